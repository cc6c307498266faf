"""A folder that is being written: nothing under a final name before it is whole."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import AiterPrepError, OutputNotEmpty
from aiter_prep.storage.checkpoint import MANIFEST_FILE
from aiter_prep.storage.descriptors import SHARDS
from aiter_prep.storage.digest import digest_of
from aiter_prep.storage.durable import create_anew, start_writing_back, sync_folder, write_whole
from aiter_prep.storage.folder import (
    JOURNAL_FILE,
    LOCK_FILE,
    PARTIAL_SUFFIX,
    PARTS_FOLDER,
    SHARD_NAME,
    partial_file,
)
from aiter_prep.storage.guards import (
    check_ours,
    check_room_for_writing,
    has_results,
    lock_folder,
)
from aiter_prep.storage.journal import Journal, differing_facts
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.swap import recover, swap, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
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
    """One shard under its temporary name; ranges may be written in any order, from any thread.

    There may be more of them at once than a process may have files open.
    """

    def __init__(self, folder: Path, layout: ShardLayout) -> None:
        self.layout = layout
        self._path = folder / partial_file(layout.file)
        self._file: int | None = SHARDS.take(self._path, create_anew(self._path, os.O_RDWR))
        try:
            with self._opened() as descriptor:
                os.ftruncate(descriptor, layout.total_bytes)
            self.write(0, layout.header)
        except BaseException:
            self.discard()
            raise

    def write(self, start: int, data: Bytes) -> None:
        """Write all bytes at an offset of the file."""
        view, place = memoryview(data).cast("B"), start
        with self._opened() as descriptor:
            while len(view):
                count = os.pwrite(descriptor, view, place)
                view, place = view[count:], place + count
            start_writing_back(descriptor, start, place - start)

    def _opened(self) -> AbstractContextManager[int]:
        if self._file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return SHARDS.lent(self._file)

    def sync(self) -> None:
        """Bring the bytes to the disk."""
        with self._opened() as descriptor:
            os.fsync(descriptor)

    def finish(self, folder: Path) -> None:
        """Bring the bytes to the disk, close the file and give it its name."""
        self.sync()
        self.close()
        self._path.rename(folder / self.layout.file)

    def close(self) -> None:
        """Close the file; twice is harmless."""
        if self._file is not None:
            SHARDS.drop(self._file)
            self._file = None

    def discard(self) -> None:
        """Close the file and give its space back."""
        self.close()
        self._path.unlink(missing_ok=True)


class OutputFolder:
    """A prepared folder in the making.

    Shards are written under a temporary name, brought to the disk, renamed, and noted in a
    journal with the digests of their tensors; the manifest comes last, atomically. So at any
    moment there is either no manifest or a complete folder. A run that fails keeps its finished
    shards for `resume`; one that has finished none leaves nothing.

    Args:
        folder: The folder to write; made if it is not there.
        fingerprint: Stands for everything that decides the result. A journal with another one
            belongs to another run.
        facts: What the fingerprint is of, by name: to say how another run differs.
        resume: Go on with an unfinished run of the same fingerprint.
        overwrite: Replace a prepared or unfinished folder, and nothing else.
        sealing: Parts wait in the folder, and are to be taken over.

    Raises:
        OutputNotEmpty: The folder holds something that may not be replaced.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        facts: Mapping[str, object] | None = None,
        resume: bool = False,
        overwrite: bool = False,
        sealing: bool = False,
    ) -> None:
        self.final = folder
        self._first: dict[str, Any] = {"fingerprint": fingerprint, "facts": dict(facts or {})}
        self._journal_lock = threading.Lock()
        self.finished: dict[str, dict[str, Written]] = {}
        recover(folder)
        self._replaces = overwrite and (folder / MANIFEST_FILE).exists()
        if self._replaces:
            check_ours(folder)
        self.folder = work_folder(folder) if self._replaces else folder
        self._check_room(resume=resume, overwrite=overwrite, sealing=sealing)
        self._made = _make_folder(self.folder)
        self._lock = lock_folder(self.folder)
        self._journal = Journal(self.folder)
        try:
            # another run may have ended while we waited for the lock
            self._check_room(resume=resume, overwrite=overwrite, sealing=sealing)
            if not sealing:
                shutil.rmtree(self.folder / PARTS_FOLDER, ignore_errors=True)
            if resume and self._journal.exists():
                self.finished = self._read_journal()
        except BaseException:
            self._unlock()
            raise
        try:
            self._begin()
        except BaseException:
            self._leave_nothing()
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
        if fault is not None:
            self._leave_nothing()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _check_room(self, *, resume: bool, overwrite: bool, sealing: bool) -> None:
        check_room_for_writing(self.folder, resume=resume, overwrite=overwrite, sealing=sealing)

    def _leave_nothing(self) -> None:
        """Remove all that is ours where no shard is finished: there is nothing to go on with.

        What was there before, an empty folder or its parents, stays.
        """
        if self.finished:
            return
        with contextlib.suppress(OSError):  # the failure that led here is what the user must see
            _remove_partial_files(self.folder)
            _remove_ours(self.folder)
            (self.folder / LOCK_FILE).unlink(missing_ok=True)
            for folder in self._made:
                folder.rmdir()

    def _begin(self) -> None:
        _remove_partial_files(self.folder)
        # of a run that was killed between its manifest and its end
        (self.folder / MANIFEST_FILE).unlink(missing_ok=True)
        if not self.finished:
            _remove_ours(self.folder)
            self._journal.append(self._first)
            sync_folder(self.folder)
            sync_folder(self.folder.resolve().parent)

    def keep_only(self, layouts: Mapping[str, ShardLayout]) -> None:
        """Forget finished shards that are no longer there as they were noted."""
        for file in list(self.finished):
            layout = layouts.get(file)
            if layout is None or not looks_like(self.folder / file, layout):
                del self.finished[file]

    def require_space(self, total_bytes: int) -> None:
        """Check that the disk has room.

        Raises:
            AiterPrepError: It has not.
        """
        require_space(self.folder, total_bytes, self.final)

    def create(self, layout: ShardLayout) -> ShardFile:
        """Begin a shard."""
        return ShardFile(self.folder, layout)

    def finish(self, shard: ShardFile, tensors: Mapping[str, Written]) -> None:
        """Bring a shard to the disk, give it its name and note it."""
        file = shard.layout.file
        try:
            shard.finish(self.folder)
        except BaseException:
            shard.discard()
            raise
        sync_folder(self.folder)
        with self._journal_lock:
            self._journal.append(_entry(file, tensors))
            self.finished[file] = dict(tensors)

    def take_over(self, shards: Mapping[Path, Mapping[str, Written]]) -> None:
        """Take shards that are whole and on the disk, by a rename each.

        They are noted first: a kill leaves no shard here that is not noted, and what is noted and
        not here is forgotten by `keep_only`.

        Args:
            shards: Where each lies, on the same filesystem, and its tensors.
        """
        self._journal.append(*(_entry(path.name, tensors) for path, tensors in shards.items()))
        self.finished |= {path.name: dict(tensors) for path, tensors in shards.items()}
        for path in shards:
            path.rename(self.folder / path.name)
        sync_folder(self.folder)

    def note_files(self, names: Sequence[str]) -> None:
        """Note which files beside the shards are about to be written."""
        self._journal.append({"files": list(names)})

    def write_file(self, name: str, data: bytes) -> tuple[int, str]:
        """Write a small file whole; return its size and digest."""
        write_whole(self.folder, name, data)
        return len(data), digest_of(data)

    def seal(self, manifest: bytes, names: Iterable[str]) -> None:
        """Write the manifest, and put the folder in its place.

        The journal goes last: a folder with both is complete, and was not brought to its end.

        Args:
            manifest: The text of the manifest.
            names: The files that it promises.

        Raises:
            AiterPrepError: One is not there: the filesystem takes two names for one.
            OutputNotEmpty: The folder that is to be replaced holds something else by now.
        """
        missing = sorted(set(names) - {path.name for path in self.folder.iterdir()})
        if missing:
            raise AiterPrepError(
                f"`{printable(missing[0])}` was written to `{printable(str(self.final))}` and is "
                "not there: its filesystem may take two names for one, such as README and readme",
                "write to a filesystem that tells large letters from small ones",
            )
        sync_folder(self.folder)
        self.write_file(MANIFEST_FILE, manifest)
        sync_folder(self.folder)
        if self._replaces:
            check_ours(self.final)  # hours later: somebody may have put something beside the files
            swap(self.final)
        for name in (JOURNAL_FILE, LOCK_FILE):
            (self.final / name).unlink(missing_ok=True)
        sync_folder(self.final)

    def _read_journal(self) -> dict[str, dict[str, Written]]:
        entries = self._journal.entries()
        # a kill before the first line was whole left nothing else
        is_fresh = not entries and not has_results(self.folder)
        first = entries[0] if entries else {}
        if not is_fresh and first.get("fingerprint") != self._first["fingerprint"]:
            how = differing_facts(first.get("facts", {}), self._first["facts"])
            raise OutputNotEmpty(
                f"`{printable(str(self.final))}` was begun from another source or with other "
                f"options{f': {how} differ' if how else ''}",
                "give the same ones again, or start anew with --overwrite",
            )
        self._journal.mend()
        return {
            entry["file"]: {name: written_of(*noted) for name, noted in entry["tensors"].items()}
            for entry in entries
            if "file" in entry
        }


def is_unfinished(folder: Path) -> bool:
    """Return whether a run has begun this folder and not finished it."""
    is_begun = (folder / JOURNAL_FILE).exists() or (folder / PARTS_FOLDER).exists()
    return is_begun and not (folder / MANIFEST_FILE).exists()


def way_on(*folders: Path) -> str:
    """Return what to do after a run that failed to write into folders."""
    if any(map(has_finished_shards, folders)):
        return "finished shards stay: mend the cause and go on with --resume"
    return "nothing of it stays: mend the cause and try again"


def has_finished_shards(out: Path) -> bool:
    """Return whether an unfinished run has shards in a folder, or in what replaces it."""
    try:
        return any(
            (place / JOURNAL_FILE).exists()
            and any(SHARD_NAME.fullmatch(path.name) for path in place.iterdir())
            for place in (out, work_folder(out))
        )
    except OSError:  # such as a name that is too long
        return False


def require_space(folder: Path, total_bytes: int, name: Path) -> None:
    """Check that the disk of a folder has room.

    Args:
        folder: The folder.
        total_bytes: What is to be written.
        name: What the user calls the folder.

    Raises:
        AiterPrepError: It has not.
    """
    free = shutil.disk_usage(folder).free
    if free < total_bytes:
        raise AiterPrepError(
            f"`{printable(str(name))}` needs {total_bytes} bytes, the disk has {free}",
            "free some space, or write to another disk",
        )


def written_of(digest: str, lost_count: int, lost_positions: list[int] | None) -> Written:
    """Return what was noted of a tensor, as JSON brings it back."""
    return Written(digest, lost_count, None if lost_positions is None else tuple(lost_positions))


def looks_like(path: Path, layout: ShardLayout) -> bool:
    """Return whether a file has the size and the header of a shard."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return size == layout.total_bytes and file.read(len(layout.header)) == layout.header
    except OSError:
        return False


def _entry(file: str, tensors: Mapping[str, Written]) -> dict[str, object]:
    return {"file": file, "tensors": {name: astuple(done) for name, done in tensors.items()}}


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents; return those that were not there, the innermost first."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made


def _remove_partial_files(folder: Path) -> None:
    for path in folder.glob(f".*{PARTIAL_SUFFIX}"):
        if path.is_symlink() or path.is_file():
            path.unlink()


def _remove_ours(folder: Path) -> None:
    """Remove what an unfinished run left; without a journal there is nothing of ours."""
    journal = Journal(folder)
    if not journal.exists():
        return
    copied = {name for entry in journal.entries() for name in entry.get("files", ())}
    for path in folder.iterdir():
        if SHARD_NAME.fullmatch(path.name) or path.name in copied:
            path.unlink()
    journal.remove()
