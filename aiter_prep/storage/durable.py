"""Changes of a folder that outlast a loss of power."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from aiter_prep.storage.folder import partial_file

if TYPE_CHECKING:
    from pathlib import Path


# what filesystems say that cannot sync a folder
_CANNOT_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EACCES}
WRITE_BACK_BYTES = 1024 * 1024


def start_writing_back(descriptor: int, start: int, size: int) -> None:
    """Have the kernel bring what was just written to the disk, without waiting for it.

    Otherwise it would begin when a tenth of the memory is dirty, and the sync at the end would
    wait for nearly everything. Linux starts to write dirty pages when it is told that they will not
    be needed (`mm/fadvise.c`); they stay in memory until they are written. Short ranges are left
    to the sync, since each would be a write of its own.

    Args:
        descriptor: A file open for writing.
        start: Byte at which the range begins.
        size: Bytes that were written.
    """
    if size >= WRITE_BACK_BYTES and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice: a filesystem may not take it
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


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
