"""Files that a user names for what is written beside a run: where they may lie, how they come."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from aiter_prep.errors import AiterPrepError, InvalidUsage
from aiter_prep.storage.checkpoint import CONFIG_FILE, MANIFEST_FILE
from aiter_prep.storage.durable import write_whole
from aiter_prep.storage.folder import JOURNAL_FILE, PARTS_FOLDER, is_weights_name
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_LINKS = 40  # as Linux follows (`fs/namei.c`, MAXSYMLINKS)
_DESCRIPTOR = re.compile(r"/(?:dev|proc/(?:self|thread-self|(\d+)))/fd/(\d+)")


def check_side_file(path: Path, apart_from: Iterable[Path], others: Iterable[Path] = ()) -> None:
    """Check that a file may be written where a user wants it, before any work begins.

    A file of a checkpoint or of a prepared folder must never be replaced or added to, and one more
    in it would be one too many. Links count as what they lead to, and other names of a file as the
    file.

    Args:
        path: The file; it need not be there.
        apart_from: Folders that it must not lie in, nor in what a run has beside them meanwhile.
            They need not be there.
        others: Files that the same run writes.

    Raises:
        InvalidUsage: It lies in one of these, or in any other model's folder, is a folder, or is
            one of the other files.
        AiterPrepError: Its own folder is not there.
    """
    name = printable(str(path))
    try:
        real = Path(os.path.realpath(path))
        places = {real, Path(os.path.realpath(path.parent)) / path.name}
        for folder in apart_from:
            if any(_lies_in(place, folder) for place in places) or _is_file_of(path, folder):
                raise InvalidUsage(
                    f"`{name}` lies in the folder that it is about, `{printable(str(folder))}`, "
                    "or is one of its files",
                    "put it beside the folder",
                )
        if path.is_dir():
            raise InvalidUsage(f"`{name}` is a folder", "name a file")
        if is_weights_name(real.name):
            raise InvalidUsage(f"`{name}` has the name of a file of weights", "choose another name")
        if not is_written_in_place(path) and _has_other_names(real):
            raise InvalidUsage(
                f"`{name}` is a file with other names, and one may be a model's",
                "choose another name, or remove this one",
            )
        if not is_written_in_place(path) and _holds_a_model(real.parent):
            where = printable(str(real.parent))
            raise InvalidUsage(
                f"`{name}` lies in a checkpoint or prepared folder, `{where}`",
                "put it beside the folder",
            )
        if any(Path(os.path.realpath(other)) == real for other in others):
            raise InvalidUsage(f"`{name}` is named for two things", "give each a file of its own")
        if not path.exists() and not real.parent.is_dir():
            raise AiterPrepError(f"cannot write `{name}`: its folder is not there")
    except OSError as fault:
        raise AiterPrepError(f"cannot write `{name}`: {fault.strerror}") from None


def write_side_file(path: Path, data: bytes) -> None:
    """Write a file whole, where `check_side_file` takes it.

    Nothing but a regular file is replaced, and that in one step. A link stays, and what it leads to
    is replaced. Pipes, devices and open descriptors, such as `/dev/stdout`, are written into.

    Raises:
        AiterPrepError: It cannot be written.
    """
    try:
        if is_written_in_place(path):
            with os.fdopen(open_in_place(path), "wb") as file:
                file.write(data)
        else:
            real = Path(os.path.realpath(path))
            write_whole(real.parent, real.name, data)
    except OSError as fault:
        raise AiterPrepError(f"cannot write `{printable(str(path))}`: {fault.strerror}") from None


def is_written_in_place(path: Path) -> bool:
    """Return whether a name stands for a pipe, a device or an open descriptor.

    Raises:
        OSError: It cannot be looked at.
    """
    if _descriptor_of(path) is not None:
        return True
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def open_in_place(path: Path) -> int:
    """Return a descriptor that writes to what is there, at its end; nothing is made.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = _descriptor_of(path)
    # a copy shares the offset; to open the name anew would write over what stands there
    if descriptor is not None:
        return os.dup(descriptor)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def _descriptor_of(path: Path) -> int | None:
    """Return the descriptor of this process that a name stands for, if it does."""
    place = os.path.abspath(path)  # noqa: PTH100 - `resolve` would follow the link itself
    for _ in range(MAX_LINKS):
        match = _DESCRIPTOR.fullmatch(place)
        if match is not None and match[1] in (None, str(os.getpid())):
            return int(match[2])
        try:
            target = os.readlink(place)  # noqa: PTH115 - texts alone here
        except OSError:
            return None
        place = os.path.abspath(os.path.join(os.path.dirname(place), target))  # noqa: PTH100, PTH118, PTH120
    return None


def _has_other_names(path: Path) -> bool:
    """Return whether a regular file is there, and has hard links."""
    return path.is_file() and path.stat().st_nlink > 1


def _holds_a_model(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, or prepared, or being prepared."""
    marks = (MANIFEST_FILE, JOURNAL_FILE, PARTS_FOLDER)
    if any((folder / name).exists() for name in marks):
        return True
    return (folder / CONFIG_FILE).exists() and any(folder.glob("*.safetensors"))


def _lies_in(place: Path, folder: Path) -> bool:
    """Return whether a path is a folder or lies in it, or in what a run has beside it meanwhile."""
    root = Path(os.path.realpath(folder))
    if place == root or root in place.parents:
        return True
    hidden = f".{root.name}.aiter_prep"
    inner = [p for p in (place, *place.parents) if p.parent == root.parent]
    return any(p.name.startswith(hidden) for p in inner) or _is_below(place, root)


def _is_below(place: Path, root: Path) -> bool:
    """Return the same by what the names stand for: a folder may be mounted twice."""
    try:
        status = root.stat()
    except OSError:
        return False
    return any(os.path.samestat(status, parent) for parent in _statuses(place.parents))


def _is_file_of(path: Path, folder: Path) -> bool:
    """Return whether a file that is there is one of a folder, under whatever name."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return False
        files = list(folder.iterdir()) if folder.is_dir() else [folder]
    except OSError:
        return False
    return any(os.path.samestat(status, file) for file in _statuses(files))


def _statuses(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    for path in paths:
        with contextlib.suppress(OSError):
            yield path.stat()
