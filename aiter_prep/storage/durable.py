"""Changes of a folder that outlast a loss of power."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from aiter_prep.storage.folder import partial_file

if TYPE_CHECKING:
    from pathlib import Path


# what filesystems say that cannot sync a folder
_CANNOT_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EACCES}


def sync_folder(folder: Path) -> None:
    """Bring the names of a folder to the disk, where its filesystem can.

    Raises:
        OSError: The disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as fault:
        if fault.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def create_anew(path: Path, access: int) -> int:
    """Make a file for our own use and return its descriptor.

    What stood there is removed, never written into: it may be a link to, or another name of,
    somebody's file.

    Args:
        path: A temporary name of ours.
        access: `os.O_WRONLY` or `os.O_RDWR`.

    Raises:
        OSError: The disk is full or fails.
    """
    path.unlink(missing_ok=True)
    return os.open(path, access | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def write_whole(folder: Path, name: str, data: bytes) -> None:
    """Write a small file; nothing stands under its name before all of it is on the disk.

    Raises:
        OSError: The disk is full or fails; what was written is removed.
    """
    temporary = folder / partial_file(name)
    try:
        with os.fdopen(create_anew(temporary, os.O_WRONLY), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
