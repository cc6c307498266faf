"""Puts a complete folder in the place of another, so that one of the two is always there."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
from typing import TYPE_CHECKING

from aiter_prep.storage.checkpoint import MANIFEST_FILE
from aiter_prep.storage.durable import sync_folder
from aiter_prep.storage.folder import JOURNAL_FILE, PARTIAL_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def work_folder(final: Path) -> Path:
    """Return where the folder is written that is to replace another."""
    final = final.resolve()
    return final.with_name(f".{final.name}.aiter_prep{PARTIAL_SUFFIX}")


def _old_folder(final: Path) -> Path:
    return final.with_name(f".{final.name}.aiter_prep.old")


def swap(final: Path) -> None:
    """Put the complete work folder in the place of the one that it replaces.

    Where the filesystem can exchange two names, that is one step. Elsewhere it takes two, and
    `recover` finishes what a kill left between them.
    """
    final = final.resolve()
    new, old = work_folder(final), _old_folder(final)
    with _locked(final.parent):
        shutil.rmtree(old, ignore_errors=True)
        if _exchange(new, final):
            new.rename(old)
        else:
            final.rename(old)
            new.rename(final)
        sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(final: Path) -> None:
    """Finish, or undo, a swap that was killed half-way; otherwise do nothing."""
    final = final.resolve()
    work, old = work_folder(final), _old_folder(final)
    if not (work.exists() or old.exists()):
        return
    with _locked(final.parent):
        if not final.exists() and old.exists():
            (work if (work / MANIFEST_FILE).exists() else old).rename(final)
            sync_folder(final.parent)
        is_replaced = (work / MANIFEST_FILE).exists() and not (work / JOURNAL_FILE).exists()
        if final.exists() and is_replaced:  # exchanged: it lies where the new one was written
            shutil.rmtree(work, ignore_errors=True)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return whether system and filesystem can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = (os.fsencode(path) for path in (one, other))
    done: int = rename(_AT_FDCWD, next(paths), _AT_FDCWD, next(paths), _RENAME_EXCHANGE)
    return done == 0


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other runs from looking at a swap that is under way."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some filesystems cannot lock a folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
