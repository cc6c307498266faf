"""Output tensors, and which part of which source tensor each is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aiter_prep.errors import NoRule
from aiter_prep.families.names import BIAS, DOWN, GATE, GATE_UP, SCALE, UP, WEIGHT
from aiter_prep.families.schemes import Unit
from aiter_prep.layouts.conversions import conversion_named
from aiter_prep.layouts.table import layout_named
from aiter_prep.sharding import round_up
from aiter_prep.storage.dtypes import width_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiter_prep.families.blocks import ExpertBlock, Part
    from aiter_prep.layouts.conversions import Conversion
    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.plan.cut import Cut
    from aiter_prep.storage.header import TensorInfo
    from aiter_prep.targets.model import Form, WeightPath

W13, W2 = "w13", "w2"


@dataclass(frozen=True, slots=True)
class Source:
    """The source tensors of one projection in one role.

    Attributes:
        pattern: Their names, with `{expert}` for the id.
        tensors: One per expert, or one for all when fused.
        fused: One tensor holds all experts.
        dtype: safetensors dtype.
        rows: Rows of one expert's matrix.
        row_bytes: Bytes of a row.
    """

    pattern: str
    tensors: tuple[TensorInfo, ...]
    fused: bool
    dtype: str
    rows: int
    row_bytes: int

    def place_of(self, expert: int) -> tuple[TensorInfo, int]:
        """Return the tensor that holds an expert's matrix, and where the matrix starts in it."""
        if self.fused:
            return self.tensors[0], expert * self.rows * self.row_bytes
        return self.tensors[expert], 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of an expert's source matrix, and where it goes.

    Attributes:
        source: Which of the stack's sources.
        rows: Rows of the source matrix.
        columns: Bytes of each of these rows.
        to_row: Row of the stored matrix, before it is laid out, at which the piece begins.
    """

    source: int
    rows: range
    columns: range
    to_row: int


@dataclass(frozen=True, slots=True)
class Stack:
    """The experts' tensors of one name, on all ranks.

    Attributes:
        name: Name of the output tensor, the same on every rank.
        group: `w13` or `w2`.
        role: `weight`, `weight_scale`, `bias`.
        sources: What it is made of.
        form: How it is stored.
        layout: Order of the bytes.
        dtype: Stored safetensors dtype.
        runtime_dtype: torch dtype that an engine views it as.
        conversion: Change of values, or None.
        rows: Rows of one expert's stored matrix, padding included.
        row_bytes: Bytes of its rows, padding included.
        steps: Its output tensors, one per rank.
    """

    name: str
    group: str
    role: str
    sources: tuple[Source, ...]
    form: Form
    layout: Layout
    dtype: str
    runtime_dtype: str
    conversion: Conversion | None
    rows: int
    row_bytes: int
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One output tensor of one rank.

    Attributes:
        rank: The rank.
        experts: Global ids of its experts, in the order in which they are stored.
        pieces: What each expert's matrix is made of; the rest of the matrix is padding.
        shape: Stored shape.
        logical_shape: The shape without padding.
    """

    rank: int
    experts: range
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    logical_shape: tuple[int, ...]


def stacks_of(
    block: ExpertBlock, path: WeightPath, cut: Cut, ranks: tuple[int, ...]
) -> Iterator[Stack]:
    """Yield the output tensors of an experts module.

    Args:
        block: The module.
        path: What the target wants of it.
        cut: Its sizes on each rank.
        ranks: The ranks that are asked for.

    Raises:
        NoRule: A dtype or a size does not suit the target.
    """
    fused = (GATE_UP, WEIGHT) in block.parts
    for group, projections in ((W13, (GATE_UP,) if fused else (GATE, UP)), (W2, (DOWN,))):
        for role in (WEIGHT, SCALE, BIAS):
            parts = [block.parts[p, role] for p in projections if (p, role) in block.parts]
            if parts:
                yield _stack(_Task(block, path, cut, group, role, tuple(parts)), ranks)


@dataclass(frozen=True, slots=True)
class _Task:
    """What decides one stack."""

    block: ExpertBlock
    path: WeightPath
    cut: Cut
    group: str
    role: str
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        suffix = f"_{self.role}"
        if self.parts[0].suffix == "weight_scale_inv":
            suffix = "_weight_scale_inv"
        return f"{self.block.experts}.{self.group}{suffix}"

    @property
    def unit(self) -> Unit:
        if self.role == WEIGHT:
            return self.block.scheme.weight_unit
        return Unit(1, 0) if self.role == BIAS else self.block.scheme.scale_unit

    def rows(self, hidden: int, intermediate: int) -> int:
        """Return the rows of a matrix for these sizes."""
        if self.group == W2:
            return _over(hidden, self.unit.rows)
        return 2 * _over(intermediate, self.unit.rows)

    def columns(self, hidden: int, intermediate: int) -> int:
        """Return the elements in a row of it."""
        return _over(hidden if self.group == W13 else intermediate, self.unit.columns)


def _over(size: int, unit: int) -> int:
    return -(-size // unit) if unit else 1


def _stack(task: _Task, ranks: tuple[int, ...]) -> Stack:
    source_dtype = task.parts[0].dtype
    form = task.path.forms[task.role]
    if source_dtype not in form.dtypes:
        raise NoRule(
            f"`{task.parts[0].pattern}` is {source_dtype}; the target takes "
            f"{', '.join(sorted(form.dtypes))} for the {task.role} of {task.block.scheme.name}"
        )
    dtype, runtime_dtype, conversion = form.dtypes[source_dtype]
    layout = layout_named(form.layouts[0 if task.group == W13 else 1])
    hidden, intermediate = task.cut.hidden, task.cut.intermediate
    rows = task.rows(hidden, intermediate)
    row_bytes = round_up(task.columns(hidden, intermediate) * width_of(dtype), layout.column_pad)
    _check_tiles(task, layout, rows, row_bytes, width_of(dtype))
    stack = Stack(
        name=task.name,
        group=task.group,
        role=task.role,
        sources=tuple(
            Source(p.pattern, p.tensors, p.fused, p.dtype, p.rows, p.row_bytes) for p in task.parts
        ),
        form=form,
        layout=layout,
        dtype=dtype,
        runtime_dtype=runtime_dtype,
        conversion=conversion_named(conversion) if conversion else None,
        rows=rows,
        row_bytes=row_bytes,
    )
    return replace(stack, steps=tuple(_step(task, stack, rank) for rank in ranks))


def _check_tiles(task: _Task, layout: Layout, rows: int, row_bytes: int, width: int) -> None:
    tile_rows = layout.row_multiple()
    if rows % tile_rows:
        raise NoRule(
            f"`{task.name}`: {rows} rows per expert, but layout `{layout.name}` needs a multiple "
            f"of {tile_rows}"
        )
    if row_bytes % (layout.column_multiple * width):
        raise NoRule(
            f"`{task.name}`: rows of {row_bytes} bytes, but layout `{layout.name}` needs a "
            f"multiple of {layout.column_multiple * width}"
        )


def _step(task: _Task, stack: Stack, rank: int) -> Step:
    experts = range(task.block.num_experts)
    part = task.cut.parts[rank]
    logical = (
        task.rows(task.block.hidden, len(part)),
        task.columns(task.block.hidden, len(part)),
    )
    return Step(
        rank=rank,
        experts=experts,
        pieces=_pieces(task, stack, rank),
        shape=_shape(task, stack, len(experts)),
        logical_shape=(len(experts), *logical[: 1 if task.role == BIAS else 2]),
    )


def _shape(task: _Task, stack: Stack, experts: int) -> tuple[int, ...]:
    columns = stack.row_bytes // width_of(stack.dtype)
    if stack.form.folded:
        return (round_up(experts * stack.rows, stack.layout.row_pad), columns)
    return (experts, stack.rows) if task.role == BIAS else (experts, stack.rows, columns)


def _pieces(task: _Task, stack: Stack, rank: int) -> tuple[Piece, ...]:
    part = task.cut.parts[rank]
    if not part:
        return ()
    if task.group == W2:
        return _down_pieces(task, stack.sources[0], part, rank)
    rows = range(_exact(part.start, task.unit.rows), _exact(part.stop, task.unit.rows))
    columns = range(stack.sources[0].row_bytes)
    if len(stack.sources) == 1 and task.block.family.gate_up_rows == "interleaved_1":
        gate, up = (range(2 * rows.start + odd, 2 * rows.stop + odd, 2) for odd in (0, 1))
        return (Piece(0, gate, columns, 0), Piece(0, up, columns, stack.rows // 2))
    assert len(stack.sources) == 2, task.name  # noqa: PLR2004 - gate and up
    return (Piece(0, rows, columns, 0), Piece(1, rows, columns, stack.rows // 2))


def _down_pieces(task: _Task, source: Source, part: range, rank: int) -> tuple[Piece, ...]:
    if task.role == BIAS and task.block.family.down_bias == "first_rank" and rank:
        return ()
    if not task.unit.columns:  # one element for all columns: every rank holds it whole
        return (Piece(0, range(source.rows), range(source.row_bytes), 0),)
    width = width_of(source.dtype)
    first, last = (_exact(edge, task.unit.columns) * width for edge in (part.start, part.stop))
    return (Piece(0, range(source.rows), range(first, last), 0),)


def _exact(edge: int, unit: int) -> int:
    assert edge % unit == 0, (edge, unit)
    return edge // unit
