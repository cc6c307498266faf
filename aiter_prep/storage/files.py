"""Reads small files with suspicion: regular ones alone, of a bounded size."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file. A pipe or a device is neither waited for nor read.
        max_bytes: What it may hold at most.

    Raises:
        OSError: It is missing, no regular file, larger, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        # one byte more, to see whether it grew; never a buffer for all that it might hold
        data = file.read(min(status.st_size, max_bytes) + 1)
    if len(data) > min(status.st_size, max_bytes):
        raise OSError(errno.EFBIG, f"it is larger than {len(data) - 1} bytes", str(path))
    return data


def leaves_folder(path: Path) -> bool:
    """Return whether a file is a link to somewhere outside its folder.

    The cache of the Hub is made of links, `models--*/snapshots/REVISION/FILE` to
    `models--*/blobs/HASH`; these count as inside.
    """
    if not path.is_symlink():
        return False
    root = Path(os.path.realpath(path.parent))  # as `resolve`, but a loop is no error
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    target = Path(os.path.realpath(path))
    return not any(home in target.parents for home in homes)
