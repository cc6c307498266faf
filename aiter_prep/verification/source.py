"""Compares a prepared folder with the source that it was made of."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from aiter_prep._version import __version__
from aiter_prep.backends.table import backend_named
from aiter_prep.errors import AiterPrepError, DataMismatch, NoRule
from aiter_prep.execution.comparison import ComparisonSink
from aiter_prep.execution.jobs import Context, run_block
from aiter_prep.execution.record import differing_fields, plan_arguments, wrapped_config
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import CONFIG_FILE, MANIFEST_FILE, MAX_JSON_BYTES
from aiter_prep.storage.digest import Digest
from aiter_prep.storage.files import read_whole
from aiter_prep.storage.folder import MAX_SMALL_FILE_BYTES, small_files
from aiter_prep.storage.reader import CHUNK_BYTES, FolderReader, chunks
from aiter_prep.storage.scratch import Scratch, equal_bytes
from aiter_prep.undo import (
    BadPadding,
    DamagedTensor,
    Undoer,
    Undone,
    accounted,
    common_records,
    require_all_ranks,
    source_tensors,
    stacks_of,
)
from aiter_prep.verification.findings import OTHER_BYTES, problem_with
from aiter_prep.verification.report import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiter_prep.manifest import Manifest, TensorRecord
    from aiter_prep.plan import Plan
    from aiter_prep.storage.checkpoint import Checkpoint
    from aiter_prep.undo import StackRecord
    from aiter_prep.verification.findings import Findings


class SourceCheck:
    """The checks that need the source too.

    Args:
        findings: Where to note what is wrong.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._folder = findings.folder
        self._manifest: Manifest = findings.manifest
        self._compared: dict[str, int] = defaultdict(int)
        self._lost = 0
        self._lock = threading.Lock()
        self._scratch = Scratch()
        self._is_ours = self._manifest.created_by["version"] == __version__

    def against(self, source: Checkpoint) -> None:
        """Undo every layout and compare with the source."""
        require_all_ranks(self._manifest, "--source")
        self._compare_names(source)
        with FolderReader(self._folder) as stored, FolderReader(source.folder) as reader:
            undoer = Undoer(self._folder, self._manifest, stored, self._findings.advance)
            self._findings.spread(
                lambda stack: list(self._compare_stack(undoer, stack, source, reader)),
                stacks_of(self._manifest),
            )
            self._findings.spread(
                lambda record: list(self._compare_common(undoer, record, source, stored, reader)),
                common_records(self._manifest),
            )
        self._check_whole(source)
        plan = self._plan(source)
        self._compare_files(source, plan)
        if plan is not None and self._manifest.lossy:
            self._compare_lossy(plan)
        if self._lost:
            self._findings.notes.append(
                f"{self._lost} negative zeros (FP8 byte 0x80) of the source are zeros on "
                f"{self._manifest.target.get('gfx')}"
            )

    def _plan(self, source: Checkpoint) -> Plan | None:
        """Plan the conversion again, and compare what the manifest says with what it should.

        What another version of this program would write may differ, and nothing is wrong with it.
        """
        if not (self._is_ours or self._manifest.lossy):
            return None
        try:
            plan = make_plan(source, **plan_arguments(self._manifest))
        except AiterPrepError as fault:
            self._findings.add(
                MANIFEST_FILE, f"does not lead from the source to a plan: {fault.message}"
            )
            return None
        for field in differing_fields(plan, self._manifest) if self._is_ours else ():
            self._findings.add(MANIFEST_FILE, f"`{field}` is not what the source leads to")
        return plan

    def _compare_lossy(self, plan: Plan) -> None:
        """Compute what cannot be undone from the source again, and compare."""
        sink = ComparisonSink(self._folder, self._manifest)
        with FolderReader(plan.checkpoint.folder) as reader:
            backend = backend_named("cpu")
            context = Context(
                reader, sink, Scratch(), backend, threading.Event(), self._findings.advance
            )
            try:
                for block in plan.blocks:
                    run_block(context, block, only_lossy=True)
            except NoRule as fault:
                self._findings.add(MANIFEST_FILE, f"has no such source: {fault.message}")
                return
        for record in sink.different:
            self._findings.add(record.file, "differs from what the source gives", record)

    def _compare_names(self, source: Checkpoint) -> None:
        """Check that every source tensor is accounted for, and the config is the source's."""
        held = accounted(self._manifest)
        skipped = {entry["name"] for entry in self._manifest.skipped}
        for name in sorted(source.tensors.keys() - held.keys() - skipped):
            file = source.tensors[name].file
            self._findings.problems.append(
                Problem(file, name, None, "of the source is not in the folder")
            )
        for name in sorted(held.keys() - source.tensors.keys()):
            self._findings.problems.append(
                Problem(MANIFEST_FILE, name, None, "is not in the source")
            )
        try:
            config = read_whole(self._folder / CONFIG_FILE, MAX_JSON_BYTES)
        except OSError:
            config = b""
        if config != wrapped_config(source.config):
            self._findings.add(CONFIG_FILE, "is not the source's, wrapped")

    def _check_whole(self, source: Checkpoint) -> None:
        """Check that no byte of a tensor of experts was passed over, if nothing else is wrong."""
        if self._findings.problems:
            return
        for stack in stacks_of(self._manifest):
            for name in source_tensors(stack):
                size, compared = source.tensors[name].total_bytes, self._compared[name]
                if compared != size:
                    record = stack.records[0]
                    what = f"holds {compared} of the {size} bytes of `{name}` of the source"
                    self._findings.add(record.file, what, record)

    def _compare_files(self, source: Checkpoint, plan: Plan | None) -> None:
        """Compare the small files; `config.json` is compared with the names."""
        held = {file.name for file in self._manifest.files} - {CONFIG_FILE}
        offered, _ = small_files(source.folder)
        for name in sorted(held - set(offered)):
            self._findings.add(name, "is not in the source")
        # which files another version would copy is its own affair
        for name in sorted(set(offered) - held) if self._is_ours and plan is not None else ():
            self._findings.add(name, "of the source is not in the folder")
        for name in sorted(held & set(offered)):
            try:
                ours = read_whole(self._folder / name, MAX_SMALL_FILE_BYTES)
                theirs = read_whole(source.folder / name, MAX_SMALL_FILE_BYTES)
            except OSError as fault:
                self._findings.add(name, f"cannot be compared: {fault.strerror}")
                continue
            if ours != theirs:
                self._findings.add(name, "differs from the source")

    def _compare_stack(
        self, undoer: Undoer, stack: StackRecord, source: Checkpoint, reader: FolderReader
    ) -> Iterator[Problem]:
        """Compare all experts of a stack with the source."""
        record = stack.records[0]
        try:
            for found in undoer.undo(stack):
                if isinstance(found, BadPadding):
                    where = "its end" if found.expert is None else f"expert {found.expert}"
                    what = f"{found.count} bytes of the padding of {where} are not as written"
                    yield problem_with(found.record.file, what, found.record)
                else:
                    yield from self._compare(found, source, reader, record)
        except DamagedTensor as fault:
            # ranks that disagree do not say which of them is right; their digests may
            damaged = [record for record in stack.records if not undoer.is_intact(record)]
            for record in damaged:
                yield problem_with(record.file, OTHER_BYTES, record)
            if not damaged:
                yield problem_with(fault.record.file, fault.message, fault.record)
        except DataMismatch as fault:
            yield problem_with(record.file, fault.message, record)

    def _compare(
        self, found: Undone, source: Checkpoint, reader: FolderReader, record: TensorRecord
    ) -> Iterator[Problem]:
        """Compare the matrices of some experts with the source."""
        kept: list[int] = []
        starts: list[tuple[str, int]] = []
        for index, (tensor, offset) in enumerate(found.places):
            info = source.tensors.get(tensor.name)
            if info is None:
                continue  # that was said when the names were compared
            if (info.dtype, info.shape) != (tensor.dtype, tensor.shape):
                what = f"`{tensor.name}` of the source is another tensor"
                yield problem_with(record.file, what, record)
                continue
            kept.append(index)
            starts.append((info.file, info.start + offset))
        ours = found.matrices if len(kept) == len(found.matrices) else found.matrices[kept]
        theirs = self._scratch.take("theirs", ours.shape)
        reader.read_all([(*start, one) for start, one in zip(starts, theirs, strict=True)])
        self._findings.advance(theirs.nbytes)
        normal = theirs if found.lossy is None else found.lossy.normal(theirs)
        lost = 0 if normal is theirs else int(np.count_nonzero(normal != theirs))
        names = [found.places[index][0].name for index in kept]
        with self._lock:
            for name, one in zip(names, ours, strict=True):
                self._compared[name] += one.nbytes
            self._lost += lost
        if equal_bytes(ours, normal):
            return
        for name, one, other in zip(names, ours, normal, strict=True):
            for holder, count in found.holders_of(one != other):
                what = f"{count} bytes differ from `{name}` of the source"
                yield problem_with(holder.file, what, holder)

    def _compare_common(
        self,
        undoer: Undoer,
        record: TensorRecord,
        source: Checkpoint,
        stored: FolderReader,
        reader: FolderReader,
    ) -> Iterator[Problem]:
        info = source.tensors.get(record.name)
        if info is None:
            return
        try:
            held = undoer.info(record)
        except DataMismatch as fault:
            yield problem_with(record.file, fault.message, record)
            return
        if (info.dtype, info.shape) != (held.dtype, held.shape):
            yield problem_with(record.file, "is another tensor in the source", record)
            return
        ours, theirs = (self._scratch.take(name, (CHUNK_BYTES,)) for name in ("ours", "theirs"))
        pairs = zip(chunks(held, stored, ours), chunks(info, reader, theirs), strict=True)
        digest, is_equal = Digest(), True
        for (_, one), (_, other) in pairs:
            self._findings.advance(one.nbytes + other.nbytes)
            digest.update(one)
            is_equal = is_equal and np.array_equal(one, other)
        if digest.text() != record.digest:
            yield problem_with(record.file, OTHER_BYTES, record)
        if not is_equal:
            yield problem_with(record.file, "differs from the source", record)
