"""Lays out the experts of one chunk for every rank, and writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from aiter_prep.errors import NoRule
from aiter_prep.layouts.conversions import CONVERSIONS
from aiter_prep.layouts.unfit import UnfitValue
from aiter_prep.storage.digest import Digest
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.output import Written

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from aiter_prep.backends.table import PlacedPart
    from aiter_prep.execution.jobs import Context
    from aiter_prep.layouts.merges import Merge
    from aiter_prep.plan.steps import Piece, Source, Stack, Step
    from aiter_prep.storage.buffers import ByteArray

# FP8 weights hold about one negative zero in a million elements; a tensor with more than this
# many is restored to zeros of the other sign
MAX_LISTED = 100_000
F32 = np.dtype("<f4")
WIDENED = {"BF16": "bf16_to_f32", "F16": "f16_to_f32", "F8_E8M0": "e8m0_to_f32"}
MEND_SCALE = "mend the checkpoint: calibrate its inputs again, or write the scale that they need"


class Writer(Protocol):
    """Writes the tensors of one name on all ranks, chunk by chunk of experts."""

    @property
    def stack(self) -> Stack:
        """The stack."""

    @property
    def steps(self) -> Sequence[Step]:
        """The steps that are not finished yet."""

    def write(self, experts: range, matrices: Mapping[str, ByteArray]) -> None:
        """Take the matrices of some experts."""

    def complete(self) -> None:
        """Write what is left, and note the digests."""


def writer_of(context: Context, stack: Stack) -> Writer:
    """Return the writer that suits a stack."""
    return ScalarWriter(context, stack) if stack.is_scalar else StackWriter(context, stack)


def read_matrices(
    context: Context, sources: Iterable[Source], experts: range
) -> dict[str, ByteArray]:
    """Read the matrices of some experts.

    Returns:
        uint8 `[experts, rows, row_bytes]` by the pattern of the source's names.
    """
    matrices: dict[str, ByteArray] = {}
    ranges: list[tuple[str, int, ByteArray]] = []
    transposed: list[tuple[Source, ByteArray]] = []
    for number, source in enumerate(sources):
        shape = (len(experts), source.rows, source.row_bytes)
        matrix = context.scratch.take(f"source {number}", shape)
        matrices[source.pattern] = matrix
        ranges.extend(_ranges(source, experts, matrix))
        if source.transposed:
            transposed.append((source, matrix))
    context.reader.read_all(ranges)
    for source, matrix in transposed:
        matrices[source.pattern] = _turned(source, matrix)
    return matrices


def _ranges(
    source: Source, experts: range, matrix: ByteArray
) -> Iterator[tuple[str, int, ByteArray]]:
    for index, expert in enumerate(experts):
        tensor, offset = source.place_of(expert)
        yield tensor.file, tensor.start + offset, matrix[index]


def _turned(source: Source, matrix: ByteArray) -> ByteArray:
    """Return matrices that were read as `[columns, rows]` elements with their rows in order."""
    width = source.element_bytes
    columns = source.row_bytes // width
    elements = matrix.reshape(len(matrix), columns, source.rows, width)
    return np.ascontiguousarray(elements.transpose(0, 2, 1, 3)).reshape(matrix.shape)


class StackWriter:
    """Writes tensors that hold a matrix, a vector or a value per expert."""

    def __init__(self, context: Context, stack: Stack) -> None:
        self._context = context
        self.stack = stack
        self.steps = [s for s in stack.steps if not context.shards.is_finished(s.rank, stack.name)]
        self._outputs = [_Output(context, stack, step) for step in self.steps]

    def write(self, experts: range, matrices: Mapping[str, ByteArray]) -> None:
        """Lay out and write some experts for every rank."""
        for step, output in zip(self.steps, self._outputs, strict=True):
            local = held_experts(experts, step.experts)
            if local:
                output.append(self._stored(step, output, experts, local, matrices))

    def complete(self) -> None:
        """Write the padding at the end, if there is any, and note the digests."""
        for output in self._outputs:
            output.complete()

    def _stored(
        self,
        step: Step,
        output: _Output,
        experts: range,
        local: range,
        matrices: Mapping[str, ByteArray],
    ) -> ByteArray:
        """Return the stored bytes of some experts of one rank."""
        stack = self.stack
        chosen = slice(
            experts.index(local[0]), experts.index(local[-1]) + 1, local.step // experts.step
        )
        parts: list[ByteArray] = []
        for piece in step.pieces:
            source = stack.sources[piece.source]
            part = _window(matrices[source.pattern][chosen], piece)
            if source.conversion is not None:
                output.find_lost(part, piece.to_row)
                part = _converted(source, part, local)
            parts.append(part)
        if stack.merge is not None:
            parts = self._merged(stack.merge, parts, chosen, local, matrices)
            if stack.merge.fills_rows:
                parts = [np.repeat(part, stack.rows, axis=1) for part in parts]
        placed = [(part, p.to_row, 0) for part, p in zip(parts, step.pieces, strict=False)]
        return self._laid_out(placed, len(local))

    def _merged(
        self,
        merge: Merge,
        parts: list[ByteArray],
        chosen: slice,
        local: range,
        matrices: Mapping[str, ByteArray],
    ) -> list[ByteArray]:
        """Return what a merge makes of the parts of some experts.

        Raises:
            NoRule: A value has no place under the scale that is kept, or a scale is none.
        """
        stack = self.stack
        held = [matrices[scale.pattern][chosen] for scale in stack.scales]
        scales = [
            _values(scale, data, local) for scale, data in zip(stack.scales, held, strict=True)
        ]
        try:
            return merge.forward(parts, scales)
        except UnfitValue as fault:
            expert, part = fault.expert, fault.part
            source = (stack.scales if fault.is_scale else stack.sources)[part]
            if fault.is_scale:  # as it is in the source, where it is doubled for gfx942
                fault.value = repr(float(_as_read(source, held[part])[expert]))
            raise fault.named(_name_of(source, local[expert])) from None

    def _laid_out(self, parts: list[PlacedPart], experts: int) -> ByteArray:
        stack = self.stack
        stored = self._context.scratch.take("stored", (experts, stack.rows, stack.row_bytes))
        if sum(part.nbytes for part, _, _ in parts) < stored.nbytes:
            _fill(stored, stack.form.fill)
        added = stack.row_bytes - stack.filled_row_bytes
        if added:
            padding = np.full((experts, stack.rows, added), stack.layout.pad_byte, np.uint8)
            parts = [*parts, (padding, 0, stack.filled_row_bytes)]
        self._context.backend.lay_out(stack.layout, parts, stored)
        if stack.packing is None:
            return stored
        return stack.packing.forward(stored.reshape(experts, -1))


class ScalarWriter:
    """Writes tensors that hold one value for all experts of a rank: the largest."""

    def __init__(self, context: Context, stack: Stack) -> None:
        self.stack = stack
        self.steps = [s for s in stack.steps if not context.shards.is_finished(s.rank, stack.name)]
        self._outputs = [_Output(context, stack, step) for step in self.steps]
        self._largest = [np.float32(-np.inf) for _ in self.steps]

    def write(self, experts: range, matrices: Mapping[str, ByteArray]) -> None:
        """Look at the values of some experts."""
        for index, step in enumerate(self.steps):
            for expert in held_experts(experts, step.experts):
                row = slice(experts.index(expert), experts.index(expert) + 1)
                own = range(expert, expert + 1)
                values = [_scale_of(s, matrices[s.pattern][row], own) for s in self.stack.sources]
                self._largest[index] = max(self._largest[index], *self._counted(expert, values))

    def _counted(self, expert: int, values: Sequence[np.float32]) -> Sequence[np.float32]:
        """Return those of an expert's values that count.

        Raises:
            NoRule: Gate's and up's differ, and must not.
        """
        tensors = [source.place_of(expert)[0] for source in self.stack.sources]
        if self.stack.form.among_parts == "last":  # engines read shard by shard, and by name there
            read = range(len(values))
            return [values[max(read, key=lambda i: (tensors[i].file, tensors[i].name))]]
        if self.stack.form.among_parts == "equal" and any(v != values[0] for v in values):
            held = [
                f"`{printable(tensor.name)}` is {float(value)!r}"
                for tensor, value in zip(tensors, values, strict=True)
            ]
            raise NoRule(
                f"{', '.join(held)}: the engine stops where these differ",
                "write one value into both, the larger, or take --target aiter, which uses it",
            )
        return values

    def complete(self) -> None:
        """Write the values.

        Raises:
            NoRule: All experts of a rank have zeros.
        """
        for output, step, largest in zip(self._outputs, self.steps, self._largest, strict=True):
            if not largest > 0:
                name = _name_of(self.stack.sources[0], step.experts[0])
                raise NoRule(
                    f"`{name}` is {float(largest)!r}, as is that of every other expert of rank "
                    f"{step.rank}: the engine divides the experts' inputs by the largest",
                    MEND_SCALE,
                )
            output.append(np.array([largest], F32).view(np.uint8))
            output.complete()


class _Output:
    """One output tensor that is written from front to back."""

    def __init__(self, context: Context, stack: Stack, step: Step) -> None:
        self._shards = context.shards
        self._stack = stack
        self._rank = step.rank
        self._digest = Digest()
        self._written = 0
        self._lost_count = 0
        self._lost: list[int] = []

    def append(self, data: ByteArray) -> None:
        """Write the next bytes."""
        self._digest.update(data)
        self._shards.write(self._rank, self._stack.name, self._written, data)
        self._written += data.nbytes

    def find_lost(self, part: ByteArray, row: int) -> None:
        """Look for bytes that the conversion has no place for, before `append` writes the rest.

        Args:
            part: uint8 `[experts, rows, columns]` of the source; its experts come next.
            row: Row of the stored matrix at which it begins.
        """
        conversion = self._stack.sources[0].conversion
        if conversion is None or conversion.lost is None or self._stack.is_lossy:
            return
        found = np.argwhere(part == conversion.lost[0])
        self._lost_count += len(found)
        if self._lost_count <= MAX_LISTED:
            matrix = self._stack.rows * self._stack.row_bytes
            places = found @ np.array([matrix, self._stack.row_bytes, 1])
            offset = self._written + row * self._stack.row_bytes
            self._lost += (places + offset).tolist()

    def complete(self) -> None:
        """Write the padding at the end, if there is any, and note the digest."""
        rest = self._shards.total_bytes(self._rank, self._stack.name) - self._written
        if rest:
            self.append(np.full(rest, self._stack.layout.pad_byte, np.uint8))
        listed = tuple(sorted(self._lost)) if self._lost_count <= MAX_LISTED else None
        written = Written(self._digest.text(), self._lost_count, listed)
        self._shards.complete(self._rank, self._stack.name, written)


def held_experts(experts: range, held: range) -> range:
    """Return the experts of a chunk, which are consecutive, that a rank holds."""
    first = held.start + max(0, -(-(experts.start - held.start) // held.step)) * held.step
    return range(first, min(experts.stop, held.stop), held.step)


def _window(matrices: ByteArray, piece: Piece) -> ByteArray:
    rows, columns = piece.rows, piece.columns
    return matrices[:, rows.start : rows.stop : rows.step, columns.start : columns.stop]


def _name_of(source: Source, expert: int) -> str:
    return printable(source.place_of(expert)[0].name)


def _converted(source: Source, matrices: ByteArray, experts: range) -> ByteArray:
    """Return matrices after their conversion, if they have any.

    Raises:
        NoRule: A value has no place in the target's dtype.
    """
    data = np.ascontiguousarray(matrices)
    if source.conversion is None:
        return data
    try:
        return source.conversion.forward(data)
    except UnfitValue as fault:
        raise fault.named(_name_of(source, experts[fault.expert])) from None


def _values(source: Source, matrices: ByteArray, experts: range) -> npt.NDArray[np.float32]:
    """Return the per-tensor scale of each expert, converted, as F32 `[experts]`."""
    return _converted(source, matrices, experts).view(F32).reshape(len(matrices))


def _as_read(source: Source, matrices: ByteArray) -> npt.NDArray[np.float32]:
    """Return the per-tensor scale of each expert as it is in the source, as F32 `[experts]`."""
    data = np.ascontiguousarray(matrices)
    if source.dtype in WIDENED:
        data = CONVERSIONS[WIDENED[source.dtype]].forward(data)
    return data.view(F32).reshape(len(matrices))


def _scale_of(source: Source, matrix: ByteArray, experts: range) -> np.float32:
    """Return the scale of one expert's inputs, converted.

    torch's max, by which engines choose, brings NaN where there is one; Python's does not.

    Raises:
        NoRule: It is NaN, infinite or negative.
    """
    value = np.float32(_values(source, matrix, experts)[0])
    if not (np.isfinite(value) and value >= 0):
        shown = repr(float(_as_read(source, matrix)[0]))
        raise NoRule(
            f"`{_name_of(source, experts[0])}` is {shown}: no scale of inputs is NaN, infinite or "
            "negative, and the engine uses the largest of all experts",
            MEND_SCALE,
        )
    return value


def _fill(stored: ByteArray, fill: bytes) -> None:
    """Fill a buffer with one byte, or with elements of more."""
    stored.reshape(-1, len(fill))[...] = np.frombuffer(fill, np.uint8)
