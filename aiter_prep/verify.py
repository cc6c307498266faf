"""Proves that a prepared folder holds what its manifest says, or what its source held."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aiter_prep.backends.table import backend_named
from aiter_prep.errors import AiterPrepError, BadSource, DataMismatch, InvalidUsage
from aiter_prep.execute import Progress
from aiter_prep.execute.comparison import ComparisonSink
from aiter_prep.execute.jobs import Context, run_block
from aiter_prep.execute.record import plan_arguments, wrapped_config
from aiter_prep.manifest import read_manifest
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import CONFIG_FILE, MANIFEST_FILE, MAX_JSON_BYTES
from aiter_prep.storage.digest import Digest, digest_of, tree_digest
from aiter_prep.storage.files import read_whole
from aiter_prep.storage.folder import JOURNAL_FILE, LOCK_FILE
from aiter_prep.storage.header import read_header
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.output import is_unfinished
from aiter_prep.storage.reader import FolderReader, chunks
from aiter_prep.storage.scratch import Scratch
from aiter_prep.undo import (
    BadPadding,
    Undoer,
    Undone,
    accounted,
    common_records,
    require_all_ranks,
    stacks_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiter_prep.manifest import Manifest, ShardRecord, TensorRecord
    from aiter_prep.storage.checkpoint import Checkpoint
    from aiter_prep.storage.header import Header, TensorInfo


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as the manifest says.

    Attributes:
        file: The file.
        tensor: The tensor, where it can be told.
        rank: Its rank, where it has one.
        what: What is wrong.
    """

    file: str
    tensor: str | None
    rank: int | None
    what: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found.

    Attributes:
        folder: The prepared folder.
        problems: What is wrong; empty if nothing is.
        shards: Shards that were checked.
        tensors: Tensors that were checked.
        total_bytes: Bytes that were read.
        notes: What a person should know, though it is not wrong.
    """

    folder: Path
    problems: tuple[Problem, ...]
    shards: int
    tensors: int
    total_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(
    folder: str | Path,
    *,
    source: Checkpoint | None = None,
    quick: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Check a prepared folder.

    Args:
        folder: The prepared folder.
        source: Also undo every layout and compare with this checkpoint, byte by byte.
        quick: Read headers and sizes only.
        progress: Called now and then.

    Returns:
        A report; damage is in it, not raised.

    Raises:
        DataMismatch: There is no manifest that could be checked against.
        InvalidUsage: `quick` and `source` contradict each other.
    """
    if quick and source is not None:
        raise InvalidUsage("--quick reads no tensor, so it cannot compare with a --source")
    folder = Path(folder)
    if is_unfinished(folder):
        raise DataMismatch(
            f"`{printable(str(folder))}` is unfinished: a run has begun it and not sealed it",
            "finish it with `aiter-prep convert --resume`",
        )
    check = _Check(folder, read_manifest(folder), source, progress)
    check.names()
    check.shards(quick=quick)
    check.files()
    if source is not None and not check.problems:
        check.against(source)
    return check.report()


class _Check:
    """Collects what is wrong with one folder."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        source: Checkpoint | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._progress = progress
        self._read_bytes = 0
        stored = sum(shard.size for shard in manifest.shards)
        self._total_bytes = stored if source is None else stored + source.total_bytes
        self._notes: list[str] = []
        self.problems: list[Problem] = []

    def report(self) -> Report:
        return Report(
            self._folder,
            tuple(self.problems),
            len(self._manifest.shards),
            len(self._manifest.tensors),
            self._read_bytes,
            tuple(self._notes),
        )

    def names(self) -> None:
        """Compare the names in the folder with the manifest, in both directions."""
        promised = {shard.file for shard in self._manifest.shards}
        promised |= {file.name for file in self._manifest.files}
        found = {path.name for path in self._folder.iterdir()}
        # a kill right behind the manifest leaves the last two; they hold nothing of the model
        found -= {MANIFEST_FILE, JOURNAL_FILE, LOCK_FILE}
        for name in sorted(promised - found):
            self._add(name, "is missing")
        for name in sorted(found - promised):
            self._add(name, "is not named by the manifest")

    def shards(self, *, quick: bool) -> None:
        """Check every shard: size, header, and each tensor's digest unless quick."""
        in_shard: dict[str, dict[str, TensorRecord]] = {s.file: {} for s in self._manifest.shards}
        for record in self._manifest.tensors:
            if record.file not in in_shard:
                self._add(record.file, "is named by a tensor, but not as a shard", record)
            else:
                in_shard[record.file][record.name] = record
        with FolderReader(self._folder) as reader:
            for shard in self._manifest.shards:
                if (self._folder / shard.file).exists():
                    self._shard(shard, in_shard[shard.file], reader, quick=quick)

    def files(self) -> None:
        """Check the files beside the shards."""
        for file in self._manifest.files:
            if not (self._folder / file.name).exists():
                continue
            try:
                data = read_whole(self._folder / file.name, file.size)
            except OSError as fault:
                self._add(file.name, f"cannot be read as the manifest says: {fault.strerror}")
                continue
            self._advance(len(data))
            if (len(data), digest_of(data)) != (file.size, file.digest):
                self._add(file.name, "has other bytes than the manifest says")

    def _shard(
        self,
        shard: ShardRecord,
        records: dict[str, TensorRecord],
        reader: FolderReader,
        *,
        quick: bool,
    ) -> None:
        try:
            header = read_header(self._folder / shard.file)
        except AiterPrepError as fault:
            self._add(shard.file, fault.message)
            return
        if header.file_bytes != shard.size:
            self._add(shard.file, f"has {header.file_bytes} bytes, not {shard.size}")
        if header.digest != shard.header_digest:
            self._add(shard.file, "has another header than the manifest says")
        self._headers(header, records)
        promised = [records[t.name].digest for t in header.tensors if t.name in records]
        if tree_digest(shard.header_digest, promised) != shard.digest:
            self._add(shard.file, "the digests of its tensors do not add up to its own")
        if not quick:
            for info in header.tensors:
                if info.name in records:
                    self._tensor(info, records[info.name], reader)

    def _headers(self, header: Header, records: dict[str, TensorRecord]) -> None:
        infos = {info.name: info for info in header.tensors}
        for name in sorted(records.keys() - infos.keys()):
            self._add(header.file, "is missing in the header", records[name])
        for name in sorted(infos.keys() - records.keys()):
            self.problems.append(
                Problem(header.file, name, None, "is in the shard, but not in the manifest")
            )
        for name in sorted(infos.keys() & records.keys()):
            info, record = infos[name], records[name]
            if (info.dtype, info.shape) != (record.dtype, record.shape):
                self._add(
                    header.file,
                    f"is {info.dtype} {list(info.shape)}, not {record.dtype} {list(record.shape)}",
                    record,
                )

    def _tensor(self, info: TensorInfo, record: TensorRecord, reader: FolderReader) -> None:
        digest = Digest()
        try:
            for _, data in chunks(info, reader):
                digest.update(data)
                self._advance(data.nbytes)
        except BadSource as fault:
            self._add(info.file, fault.message, record)
            return
        if digest.text() != record.digest:
            self._add(info.file, "has other bytes than the manifest says", record)

    def against(self, source: Checkpoint) -> None:
        """Undo every layout and compare with the source."""
        require_all_ranks(self._manifest, "--source")
        self._compare_names(source)
        lost = 0
        with FolderReader(self._folder) as stored, FolderReader(source.folder) as reader:
            undoer = Undoer(self._folder, self._manifest, stored)
            for stack in stacks_of(self._manifest):
                record = stack.records[0]
                try:
                    for found in undoer.undo(stack):
                        lost += self._compare(found, source, reader, record)
                except DataMismatch as fault:
                    self._add(record.file, fault.message, record)
            for record in common_records(self._manifest):
                self._compare_common(undoer, record, source, stored, reader)
        if self._manifest.lossy:
            self._compare_lossy(source)
        if lost:
            self._notes.append(
                f"{lost} negative zeros (FP8 byte 0x80) of the source are zeros on "
                f"{self._manifest.target.get('gfx')}"
            )

    def _compare_lossy(self, source: Checkpoint) -> None:
        """Compute what cannot be undone from the source again, and compare."""
        sink = ComparisonSink(self._folder, self._manifest)
        try:
            plan = make_plan(source, **plan_arguments(self._manifest))
        except AiterPrepError as fault:
            self._add(MANIFEST_FILE, f"does not lead from the source to a plan: {fault.message}")
            return
        with FolderReader(source.folder) as reader:
            backend = backend_named("cpu")
            context = Context(reader, sink, Scratch(), backend, threading.Event(), self._advance)
            for block in plan.blocks:
                run_block(context, block, only_lossy=True)
        for record in sink.different:
            self._add(record.file, "differs from what the source gives", record)
        self._notes.append(
            f"{len(self._manifest.lossy)} tensors cannot be undone; they were computed again from "
            "the source and compared"
        )

    def _compare_names(self, source: Checkpoint) -> None:
        """Check that every source tensor is accounted for, and the config is the source's."""
        held = accounted(self._manifest)
        skipped = {entry["name"] for entry in self._manifest.skipped}
        for name in sorted(source.tensors.keys() - held.keys() - skipped):
            file = source.tensors[name].file
            self.problems.append(Problem(file, name, None, "of the source is not in the folder"))
        for name in sorted(held.keys() - source.tensors.keys()):
            self.problems.append(Problem(MANIFEST_FILE, name, None, "is not in the source"))
        try:
            config = read_whole(self._folder / CONFIG_FILE, MAX_JSON_BYTES)
        except OSError:
            config = b""
        if config != wrapped_config(source.config):
            self._add(CONFIG_FILE, "is not the source's, wrapped")

    def _compare(
        self,
        found: Undone | BadPadding,
        source: Checkpoint,
        reader: FolderReader,
        record: TensorRecord,
    ) -> int:
        """Compare one expert's matrix with the source; return how many bytes were lost."""
        if isinstance(found, BadPadding):
            where = "its end" if found.expert is None else f"expert {found.expert}"
            what = f"{found.count} bytes of the padding of {where} are not as they were written"
            self._add(found.record.file, what, found.record)
            return 0
        info = source.tensors.get(found.tensor.name)
        if info is None:
            return 0
        if (info.dtype, info.shape) != (found.tensor.dtype, found.tensor.shape):
            self._add(record.file, f"`{info.name}` of the source is another tensor", record)
            return 0
        original = np.empty_like(found.matrix)
        reader.read_into(info.file, info.start + found.offset, original)
        self._advance(original.nbytes)
        normal = original if found.lossy is None else found.lossy.normal(original)
        wrong = int(np.count_nonzero(found.matrix != normal))
        if wrong:
            self._add(record.file, f"{wrong} bytes differ from `{info.name}` of the source", record)
        return int(np.count_nonzero(normal != original)) if normal is not original else 0

    def _compare_common(
        self,
        undoer: Undoer,
        record: TensorRecord,
        source: Checkpoint,
        stored: FolderReader,
        reader: FolderReader,
    ) -> None:
        info = source.tensors.get(record.name)
        if info is None:
            return
        try:
            held = undoer.info(record)
        except DataMismatch as fault:
            self._add(record.file, fault.message, record)
            return
        if (info.dtype, info.shape) != (held.dtype, held.shape):
            self._add(record.file, "is another tensor in the source", record)
            return
        for (_, ours), (_, theirs) in zip(chunks(held, stored), chunks(info, reader), strict=True):
            self._advance(theirs.nbytes)
            if not np.array_equal(ours, theirs):
                self._add(record.file, "differs from the source", record)
                return

    def _add(self, file: str, what: str, record: TensorRecord | None = None) -> None:
        name, rank = (None, None) if record is None else (record.name, record.rank)
        self.problems.append(Problem(file, name, rank, what))

    def _advance(self, count: int) -> None:
        self._read_bytes += count
        if self._progress is not None:
            self._progress(Progress(self._read_bytes, max(self._total_bytes, self._read_bytes)))
