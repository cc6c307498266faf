"""Takes names of folders and files with suspicion, and reads small files: regular ones alone."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from aiter_prep.errors import AiterPrepError, DataMismatch, InvalidUsage
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

LEADS_OUT = "is a link that leads out of its folder"
COPY_HINT = "put the file itself into the folder, for example with `cp --dereference`"
_EFFECTIVE = os.access in os.supports_effective_ids
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.ASCII | re.IGNORECASE)

SHARED_BLOBS_MARKER = ".huggingface-shared-blobs"


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


def local_path(place: str | Path, what: str, way_out: str) -> Path:
    """Return a path that a user gave as text: neither empty nor the address of something else.

    To `Path` nothing is the current folder, and `s3://bucket/folder` a folder below `s3:`.

    Args:
        place: The text.
        what: What it stands for, such as `OUT`.
        way_out: What to do with an address.

    Raises:
        InvalidUsage: It is one of these.
    """
    if not str(place):
        raise InvalidUsage(
            f"{what} is empty", "name it; a shell variable that is not set leaves nothing"
        )
    if _ADDRESS.match(str(place)):
        raise InvalidUsage(
            f"{what} is the address `{printable(str(place))}`, and must be a local path", way_out
        )
    return Path(place)


def check_files(folder: Path, names: Iterable[str], *, with_links: bool) -> None:
    """Check that files of a prepared folder lie in it, and that we may read them.

    Args:
        folder: The folder.
        names: The files; those that are missing are left to others.
        with_links: Leave links that lead out of the folder to others, too.

    Raises:
        DataMismatch: One is a link that leads out of the folder.
        AiterPrepError: One may not be read by us: that is no damage.
    """
    for name in names:
        path = folder / name
        if not with_links and leaves_folder(path):
            raise DataMismatch(f"`{printable(name)}` {LEADS_OUT}", COPY_HINT)
        if path.exists() and not os.access(path, os.R_OK, effective_ids=_EFFECTIVE):
            raise AiterPrepError(
                f"cannot read `{printable(str(path))}`: {os.strerror(errno.EACCES)}",
                "mend its permissions; whether it is damaged is not known",
            )


def leaves_folder(path: Path) -> bool:
    """Return whether a file is a link to somewhere outside its folder.

    The cache of the Hub is made of links, `models--*/snapshots/REVISION/FILE` to
    `models--*/blobs/HASH`; these count as inside. So do those that go on from there to `blobs`
    beside `models--*`, where huggingface_hub 2.4 keeps what came over Xet
    (`utils/_shared_blobs.py`).
    """
    if not path.is_symlink():
        return False
    root = Path(os.path.realpath(path.parent))  # as `resolve`, but a loop is no error
    homes = [root]
    if root.parent.name == "snapshots":
        repository = root.parent.parent
        homes.append(repository / "blobs")
        shared = repository.parent / "blobs"
        if (shared / SHARED_BLOBS_MARKER).is_file():
            homes.append(shared)
    target = Path(os.path.realpath(path))
    return not any(home in target.parents for home in homes)
