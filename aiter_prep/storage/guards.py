"""Guards a folder that is to be written: what may be in it, and who may write."""

from __future__ import annotations

import fcntl
import json
import os
from typing import TYPE_CHECKING

from aiter_prep.errors import OutputNotEmpty
from aiter_prep.storage.checkpoint import MANIFEST_FILE
from aiter_prep.storage.files import read_whole
from aiter_prep.storage.folder import JOURNAL_FILE, LOCK_FILE, PARTS_FOLDER
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.shell import command_line

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

MAX_MANIFEST_BYTES = 2_000_000_000


def has_results(folder: Path) -> bool:
    """Return whether a folder holds more than what a run notes for itself."""
    return any(not path.name.startswith(".") for path in folder.iterdir())


def check_room_for_writing(
    folder: Path, *, resume: bool, overwrite: bool, sealing: bool = False
) -> None:
    """Check that a folder is empty, or unfinished and to be gone on with or written anew.

    Args:
        folder: The folder.
        resume: It may be gone on with.
        overwrite: It may be written anew.
        sealing: Parts that wait in it are to be taken over.

    Raises:
        OutputNotEmpty: It is neither.
    """
    if not is_folder(folder):
        return
    name = printable(str(folder))
    names = {path.name for path in folder.iterdir()} - {LOCK_FILE}
    if PARTS_FOLDER in names and not (overwrite or sealing or MANIFEST_FILE in names):
        raise OutputNotEmpty(
            f"`{name}` holds parts of a conversion that are not sealed",
            f"{finish_hint(folder)}, or start anew with --overwrite",
        )
    names -= {PARTS_FOLDER}
    if not names:
        return
    is_ours_to_finish = JOURNAL_FILE in names and (resume or overwrite)
    if MANIFEST_FILE in names and not is_ours_to_finish:
        raise OutputNotEmpty(
            f"`{name}` is a prepared folder already",
            "choose another output folder, or replace it with --overwrite",
        )
    if JOURNAL_FILE not in names:
        raise not_of_ours(folder, names)
    if not (resume or overwrite):
        raise OutputNotEmpty(
            f"`{name}` holds an unfinished run",
            "finish it with --resume, or start anew with --overwrite",
        )


def is_folder(folder: Path) -> bool:
    """Return whether a folder to write is there already.

    Raises:
        OutputNotEmpty: Something else is there.
    """
    if not os.path.lexists(folder):
        return False
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "is a link that leads nowhere"
        raise OutputNotEmpty(f"`{printable(str(folder))}` {what}", "choose another output folder")
    return True


def not_of_ours(folder: Path, names: Collection[str]) -> OutputNotEmpty:
    """Return the refusal of a folder that holds somebody's files."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return OutputNotEmpty(
        f"`{printable(str(folder))}` is not empty and not of our making: it holds "
        f"`{printable(min(names))}`{more}",
        "move that away, or choose another output folder",
    )


def finish_hint(folder: Path) -> str:
    """Return how an unfinished folder is brought to its end."""
    if (folder / PARTS_FOLDER).exists():
        command = command_line("aiter-prep", "seal", folder)
        return f"when every part has ended, seal it with: {command}"
    return "finish it with `aiter-prep convert --resume`"


def check_ours(folder: Path) -> None:
    """Check that a prepared folder holds nothing but what its manifest names.

    Raises:
        OutputNotEmpty: It does.
    """
    try:
        manifest = json.loads(read_whole(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES))
        known = {entry["file"] for entry in manifest["shards"]}
        known |= {entry["name"] for entry in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        known = set()
    known |= {MANIFEST_FILE, JOURNAL_FILE, LOCK_FILE, PARTS_FOLDER}
    extra = sorted({path.name for path in folder.iterdir()} - known)
    if extra:
        raise OutputNotEmpty(
            f"`{printable(str(folder))}` holds `{printable(extra[0])}`, which its manifest does "
            f"not name ({len(extra)} such)",
            "move it away first: --overwrite replaces nothing but a prepared folder",
        )


def lock_folder(folder: Path) -> int:
    """Take the folder's lock; it falls with the process that holds it.

    Raises:
        OutputNotEmpty: Another process holds it.
    """
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:  # that run has failed, and taken the folder away that it had made
        raise _locked(folder) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # a run that ended meanwhile took its file away, and another may have made one anew
        is_current = os.path.samestat(os.fstat(descriptor), (folder / LOCK_FILE).stat())
    except (BlockingIOError, FileNotFoundError):
        is_current = False
    except OSError:
        os.close(descriptor)
        raise
    if not is_current:
        os.close(descriptor)
        raise _locked(folder)
    return descriptor


def _locked(folder: Path) -> OutputNotEmpty:
    return OutputNotEmpty(
        f"another process is writing `{printable(str(folder))}`", "wait for it to end"
    )
