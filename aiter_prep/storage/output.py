"""A folder that is being written: nothing under a final name before it is whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import AiterPrepError, OutputNotEmpty
from aiter_prep.storage import jsontext
from aiter_prep.storage.checkpoint import MANIFEST_FILE
from aiter_prep.storage.digest import digest_of
from aiter_prep.storage.folder import (
    JOURNAL_FILE,
    LOCK_FILE,
    PARTIAL_SUFFIX,
    SHARD_NAME,
    partial_file,
)
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from aiter_prep.storage.buffers import Bytes
    from aiter_prep.storage.shard import ShardLayout


@dataclass(frozen=True, slots=True)
class Written:
    """What is noted of a tensor that was written.

    Attributes:
        digest: Digest of its bytes.
        lost_count: Bytes that a conversion had no place for.
        lost_positions: Where they are, or None where they are too many to list.
    """

    digest: str
    lost_count: int = 0
    lost_positions: tuple[int, ...] | None = ()


class ShardFile:
    """One shard under its temporary name; ranges may be written in any order, from any thread."""

    def __init__(self, folder: Path, layout: ShardLayout) -> None:
        self.layout = layout
        self._path = folder / partial_file(layout.file)
        self._descriptor = os.open(
            self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
        )
        os.ftruncate(self._descriptor, layout.total_bytes)
        self.write(0, layout.header)

    def write(self, start: int, data: Bytes) -> None:
        """Write all bytes at an offset of the file."""
        view = memoryview(data).cast("B")
        while len(view):
            count = os.pwrite(self._descriptor, view, start)
            view, start = view[count:], start + count

    def sync(self) -> None:
        """Bring the bytes to the disk."""
        os.fsync(self._descriptor)

    def finish(self, folder: Path) -> None:
        """Bring the bytes to the disk, close the file and give it its name."""
        self.sync()
        self.close()
        self._path.rename(folder / self.layout.file)

    def close(self) -> None:
        """Close the file; twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def discard(self) -> None:
        """Close the file and give its space back."""
        self.close()
        self._path.unlink(missing_ok=True)


class OutputFolder:
    """A prepared folder in the making.

    Shards are written under a temporary name, brought to the disk, renamed, and noted in a
    journal with the digests of their tensors; the manifest comes last, atomically. So at any
    moment there is either no manifest or a complete folder.

    Args:
        folder: The folder to write; made if it is not there.
        fingerprint: Stands for everything that decides the result. A journal with another one
            belongs to another run.
        resume: Go on with an unfinished run of the same fingerprint.
        overwrite: Replace a prepared or unfinished folder, and nothing else.

    Raises:
        OutputNotEmpty: The folder holds something that may not be replaced.
    """

    def __init__(
        self, folder: Path, *, fingerprint: str, resume: bool = False, overwrite: bool = False
    ) -> None:
        self.final = folder
        self._fingerprint = fingerprint
        self._journal_lock = threading.Lock()
        self.finished: dict[str, dict[str, Written]] = {}
        self._replaces = overwrite and (folder / MANIFEST_FILE).exists()
        if self._replaces:
            _check_ours(folder)
        self.folder = _beside(folder) if self._replaces else folder
        _check_room_for_writing(self.folder, resume=resume, overwrite=overwrite)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)
        try:
            # another run may have ended while we waited for the lock
            _check_room_for_writing(self.folder, resume=resume, overwrite=overwrite)
            self._begin(resume=resume)
        except BaseException:
            self._unlock()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _begin(self, *, resume: bool) -> None:
        _remove_partial_files(self.folder)
        if resume and (self.folder / JOURNAL_FILE).exists():
            self.finished = self._read_journal()
        else:
            _remove_ours(self.folder)
            self._append({"fingerprint": self._fingerprint})
            _sync_folder(self.folder)

    def keep_only(self, layouts: Mapping[str, ShardLayout]) -> None:
        """Forget finished shards that are no longer there as they were noted."""
        for file in list(self.finished):
            layout = layouts.get(file)
            if layout is None or not _looks_like(self.folder / file, layout):
                del self.finished[file]

    def require_space(self, total_bytes: int) -> None:
        """Check that the disk has room.

        Raises:
            AiterPrepError: It has not.
        """
        free = shutil.disk_usage(self.folder).free
        if free < total_bytes:
            raise AiterPrepError(
                f"`{printable(str(self.final))}` needs {total_bytes} bytes, the disk has {free}",
                "free some space, or write to another disk",
            )

    def create(self, layout: ShardLayout) -> ShardFile:
        """Begin a shard."""
        return ShardFile(self.folder, layout)

    def finish(self, shard: ShardFile, tensors: Mapping[str, Written]) -> None:
        """Bring a shard to the disk, give it its name and note it."""
        file = shard.layout.file
        shard.finish(self.folder)
        _sync_folder(self.folder)
        with self._journal_lock:
            noted = {name: astuple(written) for name, written in tensors.items()}
            self._append({"file": file, "tensors": noted})
            self.finished[file] = dict(tensors)

    def note_files(self, names: Sequence[str]) -> None:
        """Note which files beside the shards are about to be written."""
        self._append({"files": list(names)})

    def write_file(self, name: str, data: bytes) -> tuple[int, str]:
        """Write a small file whole; return its size and digest."""
        temporary = self.folder / partial_file(name)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.folder / name)
        return len(data), digest_of(data)

    def seal(self, manifest: bytes) -> None:
        """Write the manifest, and put the folder in its place."""
        _sync_folder(self.folder)
        self.write_file(MANIFEST_FILE, manifest)
        _sync_folder(self.folder)
        for name in (JOURNAL_FILE, LOCK_FILE):
            (self.folder / name).unlink(missing_ok=True)
        if self._replaces:
            _swap(self.folder, self.final)
        _sync_folder(self.final)

    def _append(self, entry: Mapping[str, Any]) -> None:
        text = jsontext.canonical(entry)
        line = text + b"\t" + digest_of(text).encode() + b"\n"
        descriptor = os.open(
            self.folder / JOURNAL_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        try:
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read_journal(self) -> dict[str, dict[str, Written]]:
        entries = _journal_entries(self.folder / JOURNAL_FILE)
        if not entries or entries[0].get("fingerprint") != self._fingerprint:
            raise OutputNotEmpty(
                f"`{printable(str(self.final))}` was begun from another source or with other "
                "options",
                "give the same ones again, or start anew with --overwrite",
            )
        return {
            entry["file"]: {name: _written(*noted) for name, noted in entry["tensors"].items()}
            for entry in entries
            if "file" in entry
        }


def is_unfinished(folder: Path) -> bool:
    """Return whether a run has begun this folder and not finished it."""
    return (folder / JOURNAL_FILE).exists() and not (folder / MANIFEST_FILE).exists()


def _journal_entries(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a journal; a kill may have cut the last one."""
    entries: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n"):
        text, _, digest = line.partition(b"\t")
        if digest.decode(errors="replace") != digest_of(text):
            break
        entries.append(json.loads(text))
    return entries


def _written(digest: str, lost_count: int, lost_positions: list[int] | None) -> Written:
    return Written(digest, lost_count, None if lost_positions is None else tuple(lost_positions))


def _looks_like(path: Path, layout: ShardLayout) -> bool:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return size == layout.total_bytes and file.read(len(layout.header)) == layout.header
    except OSError:
        return False


def _check_room_for_writing(folder: Path, *, resume: bool, overwrite: bool) -> None:
    if not folder.exists():
        return
    name = printable(str(folder))
    if not folder.is_dir():
        raise OutputNotEmpty(f"`{name}` is not a folder")
    names = {path.name for path in folder.iterdir()} - {LOCK_FILE}
    if not names:
        return
    if MANIFEST_FILE in names:
        raise OutputNotEmpty(
            f"`{name}` is a prepared folder already",
            "choose another output folder, or replace it with --overwrite",
        )
    if JOURNAL_FILE not in names:
        raise OutputNotEmpty(
            f"`{name}` is not empty and not of our making", "choose another output folder"
        )
    if not (resume or overwrite):
        raise OutputNotEmpty(
            f"`{name}` holds an unfinished run",
            "finish it with --resume, or start anew with --overwrite",
        )


def _check_ours(folder: Path) -> None:
    """Check that a prepared folder holds nothing but what its manifest names.

    Raises:
        OutputNotEmpty: It does.
    """
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
        known = {entry["file"] for entry in manifest["shards"]}
        known |= {entry["name"] for entry in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    extra = sorted({path.name for path in folder.iterdir()} - known - {MANIFEST_FILE})
    if extra:
        raise OutputNotEmpty(
            f"`{printable(str(folder))}` holds `{printable(extra[0])}`, which its manifest does "
            f"not name ({len(extra)} such)",
            "move it away first: --overwrite replaces nothing but a prepared folder",
        )


def _beside(folder: Path) -> Path:
    folder = folder.resolve()
    return folder.with_name(f".{folder.name}.aiter_prep{PARTIAL_SUFFIX}")


def _swap(new: Path, final: Path) -> None:
    """Put a complete folder in the place of the one that it replaces."""
    final = final.resolve()
    old = final.with_name(f".{final.name}.aiter_prep.old")
    shutil.rmtree(old, ignore_errors=True)
    final.rename(old)
    new.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(old)


def _lock(folder: Path) -> int:
    """Take the folder's lock; it falls with the process that holds it.

    Raises:
        OutputNotEmpty: Another process holds it.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise OutputNotEmpty(
            f"another process is writing `{printable(str(folder))}`", "wait for it to end"
        ) from None
    return descriptor


def _remove_partial_files(folder: Path) -> None:
    for path in folder.glob(f".*{PARTIAL_SUFFIX}"):
        if path.is_file():
            path.unlink()


def _remove_ours(folder: Path) -> None:
    """Remove what an unfinished run left; without a journal there is nothing of ours."""
    journal = folder / JOURNAL_FILE
    if not journal.exists():
        return
    copied = {name for entry in _journal_entries(journal) for name in entry.get("files", ())}
    for path in folder.iterdir():
        if SHARD_NAME.fullmatch(path.name) or path.name in copied:
            path.unlink()
    journal.unlink()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some filesystems cannot sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
