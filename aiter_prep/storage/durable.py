"""Changes of a folder that outlast a loss of power."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from aiter_prep.storage.folder import partial_file

if TYPE_CHECKING:
    from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Bring the names of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some filesystems cannot sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(folder: Path, name: str, data: bytes) -> None:
    """Write a small file; nothing stands under its name before all of it is on the disk.

    Raises:
        OSError: The disk is full or fails; what was written is removed.
    """
    temporary = folder / partial_file(name)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
