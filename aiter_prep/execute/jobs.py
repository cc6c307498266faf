"""The hot path: reads a chunk of experts once, lays out every rank's share, writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aiter_prep.errors import Interrupted
from aiter_prep.storage.digest import Digest
from aiter_prep.storage.output import Written
from aiter_prep.storage.reader import chunks

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence

    from aiter_prep.backends.table import Backend
    from aiter_prep.execute.shardset import ShardSet
    from aiter_prep.plan.make import BlockPlan
    from aiter_prep.plan.steps import Piece, Source, Stack
    from aiter_prep.storage.buffers import ByteArray
    from aiter_prep.storage.header import TensorInfo
    from aiter_prep.storage.reader import FolderReader
    from aiter_prep.storage.scratch import Scratch

CHUNK_BYTES = 4 * 1024 * 1024
# FP8 weights hold about one negative zero in a million elements; a tensor with more than this
# many is restored to zeros of the other sign
MAX_LISTED = 100_000


@dataclass(frozen=True, slots=True)
class Context:
    """What every job needs.

    Attributes:
        reader: The source.
        shards: The output.
        scratch: Buffers of each thread.
        backend: What moves the bytes.
        stop: Set when the run is to end early.
        advance: Called with the number of source bytes that were read.
    """

    reader: FolderReader
    shards: ShardSet
    scratch: Scratch
    backend: Backend
    stop: threading.Event
    advance: Callable[[int], None]

    def check(self) -> None:
        """Leave the job if the run is to end.

        Raises:
            Interrupted: It is.
        """
        if self.stop.is_set():
            raise Interrupted("stopped")


def run_block(context: Context, plan: BlockPlan) -> None:
    """Convert one experts module for every rank that is not finished.

    Raises:
        BadSource: A shard of the source ended too early.
        NoRule: A value has no place in the target's dtype.
    """
    writers = [_StackWriter(context, stack) for stack in plan.stacks]
    writers = [writer for writer in writers if writer.steps]
    if not writers:
        return
    expert_bytes = sum(s.rows * s.row_bytes for w in writers for s in w.stack.sources)
    at_once = max(1, CHUNK_BYTES // max(1, expert_bytes))
    for first in range(0, plan.block.num_experts, at_once):
        context.check()
        experts = range(first, min(first + at_once, plan.block.num_experts))
        matrices = _read(context, writers, experts)
        for writer in writers:
            writer.write(experts, matrices)
        context.advance(expert_bytes * len(experts))
    for writer in writers:
        writer.complete()


def copy_tensors(context: Context, tensors: Sequence[TensorInfo]) -> None:
    """Copy common tensors, byte for byte.

    Raises:
        BadSource: A shard of the source ended too early.
    """
    for tensor in tensors:
        digest = Digest()
        buffer = context.scratch.take("copy", (min(CHUNK_BYTES, tensor.total_bytes),))
        for offset, data in chunks(tensor, context.reader, buffer):
            context.check()
            digest.update(data)
            context.shards.write(None, tensor.name, offset, data)
            context.advance(data.nbytes)
        context.shards.complete(None, tensor.name, Written(digest.text()))


def _read(
    context: Context, writers: Sequence[_StackWriter], experts: range
) -> dict[int, ByteArray]:
    """Read the matrices of some experts: uint8 `[experts, rows, row_bytes]` per source."""
    matrices: dict[int, ByteArray] = {}
    ranges: list[tuple[str, int, ByteArray]] = []
    sources = [source for writer in writers for source in writer.stack.sources]
    for number, source in enumerate(sources):
        shape = (len(experts), source.rows, source.row_bytes)
        matrix = context.scratch.take(f"source {number}", shape)
        matrices[id(source)] = matrix
        ranges.extend(_ranges(source, experts, matrix))
    context.reader.read_all(ranges)
    return matrices


def _ranges(
    source: Source, experts: range, matrix: ByteArray
) -> Iterator[tuple[str, int, ByteArray]]:
    for index, expert in enumerate(experts):
        tensor, offset = source.place_of(expert)
        yield tensor.file, tensor.start + offset, matrix[index]


class _StackWriter:
    """Writes the tensors of one name on all ranks, chunk by chunk of experts."""

    def __init__(self, context: Context, stack: Stack) -> None:
        self._context = context
        self.stack = stack
        self.steps = [s for s in stack.steps if not context.shards.is_finished(s.rank, stack.name)]
        self._digests = [Digest() for _ in self.steps]
        self._written = [0 for _ in self.steps]
        self._lost = [_LostBytes(stack) for _ in self.steps]

    def write(self, experts: range, matrices: dict[int, ByteArray]) -> None:
        """Lay out and write some experts for every rank."""
        for index, step in enumerate(self.steps):
            local = _overlap(experts, step.experts)
            if not local:
                continue
            pieces = [self._piece(piece, experts, local, matrices) for piece in step.pieces]
            if self.stack.conversion is not None:
                pieces = self._converted(pieces, index)
            self._append(index, self._laid_out(pieces, len(local)))

    def complete(self) -> None:
        """Write the padding at the end, if there is any, and note the digests."""
        for index, step in enumerate(self.steps):
            slot = self._context.shards.slot(step.rank, self.stack.name)
            rest = slot.total_bytes - self._written[index]
            if rest:
                self._append(index, np.full(rest, self.stack.form.fill, np.uint8))
            written = self._lost[index].noted(self._digests[index].text())
            self._context.shards.complete(step.rank, self.stack.name, written)

    def _append(self, index: int, data: ByteArray) -> None:
        step = self.steps[index]
        self._digests[index].update(data)
        self._context.shards.write(step.rank, self.stack.name, self._written[index], data)
        self._written[index] += data.nbytes

    def _laid_out(self, pieces: Sequence[tuple[ByteArray, int]], experts: int) -> ByteArray:
        stack = self.stack
        shape = (experts, stack.rows, stack.row_bytes)
        stored = self._context.scratch.take("stored", shape)
        if sum(piece.nbytes for piece, _ in pieces) < stored.nbytes:
            stored.fill(stack.form.fill)
        self._context.backend.lay_out(stack.layout, pieces, stored)
        return stored

    def _piece(
        self, piece: Piece, experts: range, local: range, matrices: dict[int, ByteArray]
    ) -> tuple[ByteArray, int]:
        first, last = (experts.index(local[end]) for end in (0, -1))
        part = matrices[id(self.stack.sources[piece.source])][
            first : last + 1,
            piece.rows.start : piece.rows.stop : piece.rows.step,
            piece.columns.start : piece.columns.stop,
        ]
        return part, piece.to_row

    def _converted(
        self, pieces: Sequence[tuple[ByteArray, int]], index: int
    ) -> list[tuple[ByteArray, int]]:
        conversion = self.stack.conversion
        assert conversion is not None
        converted: list[tuple[ByteArray, int]] = []
        for part, row in pieces:
            self._lost[index].find(part, row, self._written[index])
            converted.append((conversion.forward(np.ascontiguousarray(part)), row))
        return converted


class _LostBytes:
    """Finds the bytes of one tensor that its conversion has no place for."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._count = 0
        self._positions: list[int] = []

    def find(self, part: ByteArray, row: int, offset: int) -> None:
        """Look through a piece of some experts, whose first begins `offset` bytes in."""
        lost = self._stack.conversion.lost if self._stack.conversion else None
        if lost is None:
            return
        found = np.argwhere(part == lost[0])
        self._count += len(found)
        if self._count <= MAX_LISTED:
            matrix = self._stack.rows * self._stack.row_bytes
            places = found @ np.array([matrix, self._stack.row_bytes, 1])
            self._positions += (places + offset + row * self._stack.row_bytes).tolist()

    def noted(self, digest: str) -> Written:
        """Return what is to be noted of the tensor."""
        listed = tuple(sorted(self._positions)) if self._count <= MAX_LISTED else None
        return Written(digest, self._count, listed)


def _overlap(experts: range, held: range) -> range:
    """Return the experts of a chunk that a rank holds; ranks hold contiguous ids."""
    return range(max(experts.start, held.start), min(experts.stop, held.stop))
