"""From an experts module and what a target wants of it to its output tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aiter_prep.errors import NoRule
from aiter_prep.families.names import (
    BIAS,
    DOWN,
    GATE,
    GATE_UP,
    INPUT_SCALE,
    SCALE,
    SCALE_2,
    UP,
    WEIGHT,
)
from aiter_prep.families.schemes import Unit
from aiter_prep.layouts.conversions import conversion_named
from aiter_prep.layouts.merges import merge_named
from aiter_prep.layouts.packing import packing_named
from aiter_prep.layouts.table import layout_named
from aiter_prep.plan.steps import Piece, Source, Stack, Step
from aiter_prep.sharding import round_up
from aiter_prep.storage.dtypes import width_of
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aiter_prep.families.blocks import ExpertBlock, Part
    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.plan.cut import Cut
    from aiter_prep.targets.model import Form, WeightPath

W13, W2 = "w13", "w2"
ROLES = (WEIGHT, SCALE, SCALE_2, BIAS, INPUT_SCALE)
# rows of a block of scales on gfx1250
BLOCK_ROWS = 32
PER_TENSOR = Unit(0, 0)
PER_ROW = Unit(1, 0)


def stacks_of(
    block: ExpertBlock, path: WeightPath, cut: Cut, ranks: Sequence[int]
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
    gate_up = (GATE_UP,) if block.family.has_gate_up else (GATE, UP)
    for group, projections in ((W13, gate_up), (W2, (DOWN,))):
        for role in ROLES:
            parts = tuple(block.parts[p, role] for p in projections if (p, role) in block.parts)
            if parts:
                for form in _forms(path, role, parts[0]):
                    yield _Task(block, path, cut, group, role, form, parts).stack(ranks)


def is_one_way(block: ExpertBlock, path: WeightPath) -> bool:
    """Return whether the source of a module cannot be had back from what a target wants of it."""
    roles = {(W2 if projection == DOWN else W13, role) for projection, role in block.parts}
    forms = [
        (group, form)
        for group, role in roles
        for form in path.forms.values()
        if form is path.forms.get(role) or form.made_of == role
    ]
    return any(form.shape == "scalar" or form.merges[group == W2] for group, form in forms)


def _forms(path: WeightPath, role: str, part: Part) -> list[Form]:
    """Return the forms of a role: one, and those of more tensors that are made of it."""
    if role not in path.forms:
        raise NoRule(
            f"the target has no rule for `{printable(part.pattern)}`: the {role} of "
            f"{path.scheme} experts"
        )
    return [path.forms[role], *(form for form in path.forms.values() if form.made_of == role)]


@dataclass(frozen=True, slots=True)
class _Task:
    """What decides one stack."""

    block: ExpertBlock
    path: WeightPath
    cut: Cut
    group: str
    role: str
    form: Form
    parts: tuple[Part, ...]

    def stack(self, ranks: Sequence[int]) -> Stack:
        """Return the output tensors of one name."""
        form = self.form
        dtype, runtime_dtype, _ = self.stored_as(form, self.parts[0])
        layout = layout_named(form.layouts[self.group == W2])
        columns = self.columns(self.cut.hidden, self.cut.intermediate)
        filled = columns * self.width()
        merge = form.merges[self.group == W2]
        stack = Stack(
            name=self.name,
            group=self.group,
            role=self.role,
            sources=tuple(self.source(part, form) for part in self.parts),
            scales=self.scales() if merge else (),
            form=form,
            layout=layout,
            dtype=dtype,
            runtime_dtype=runtime_dtype,
            merge=merge_named(merge) if merge else None,
            packing=packing_named(form.packing) if form.packing else None,
            rows=self.rows(self.cut.hidden, self.cut.intermediate),
            row_bytes=round_up(filled, layout.column_pad),
            filled_row_bytes=filled,
            filled_columns=columns,
        )
        self.check_tiles(stack, layout)
        return replace(stack, steps=tuple(self.step(stack, rank) for rank in ranks))

    @property
    def name(self) -> str:
        spelled = self.parts[0].suffix
        suffix = self.form.name or (spelled if spelled == "weight_scale_inv" else self.role)
        return f"{self.block.experts}.{self.group}_{suffix}"

    @property
    def unit(self) -> Unit:
        """How much of the weight an element of the stored tensor stands for."""
        return PER_ROW if self.form.made_of else self.source_unit

    @property
    def source_unit(self) -> Unit:
        """How much of the weight an element of the source stands for."""
        if self.role == WEIGHT:
            return self.block.scheme.weight_unit
        if self.role == INPUT_SCALE:
            return PER_TENSOR
        return self.block.scheme.scale_unit if self.role == SCALE else PER_ROW

    def stored_as(self, form: Form, part: Part) -> tuple[str, str, str]:
        """Return stored dtype, runtime dtype and the name of the conversion."""
        if part.dtype not in form.dtypes:
            raise NoRule(
                f"`{printable(part.pattern)}` is {part.dtype}; the target takes "
                f"{', '.join(sorted(form.dtypes))} for the {part.role} of "
                f"{self.block.scheme.name} experts"
            )
        return form.dtypes[part.dtype]

    def source(self, part: Part, form: Form) -> Source:
        """Return the source tensors of a part, as they are read for a form."""
        conversion = self.stored_as(form, part)[2]
        return Source(
            pattern=part.pattern,
            tensors=part.tensors,
            fused=part.fused,
            shared=part.shared,
            transposed=part.transposed,
            dtype=part.dtype,
            rows=part.rows,
            row_bytes=part.row_bytes,
            conversion=conversion_named(conversion) if conversion else None,
        )

    def scales(self) -> tuple[Source, ...]:
        """Return the per-tensor scale of each part."""
        parts = (self.block.parts[part.projection, SCALE] for part in self.parts)
        return tuple(self.source(part, self.path.forms[SCALE]) for part in parts)

    def width(self) -> int:
        """Return the bytes of an element before it is packed."""
        part = self.parts[0]
        conversion = self.stored_as(self.form, part)[2]
        if not conversion:
            return width_of(part.dtype)
        found = conversion_named(conversion)
        return width_of(part.dtype) // found.source_bytes * found.stored_bytes

    def rows(self, hidden: int, intermediate: int) -> int:
        """Return the rows of a matrix for these sizes."""
        if self.form.shape in {"values", "scalar"}:
            return 1
        if self.group == W2:
            return _over(hidden, self.unit.rows)
        return 2 * _over(intermediate, self.unit.rows)

    def columns(self, hidden: int, intermediate: int) -> int:
        """Return the elements in a row of it."""
        return _over(hidden if self.group == W13 else intermediate, self.unit.columns)

    def check_tiles(self, stack: Stack, layout: Layout) -> None:
        """Check that a matrix fills whole tiles.

        Raises:
            NoRule: It does not.
        """
        tile_rows = layout.row_multiple()
        if stack.rows % tile_rows:
            raise NoRule(
                f"`{self.name}`: {stack.rows} rows per expert, but layout `{layout.name}` needs a "
                f"multiple of {tile_rows}"
            )
        experts = {len(held) for held in self.cut.experts}
        if stack.form.shape == "matrices" and any(
            held * stack.rows % layout.row_pad for held in experts
        ):
            raise NoRule(
                f"`{self.name}`: {max(experts)} experts of {stack.rows} rows, but the engine can "
                f"only hold a multiple of {layout.row_pad} rows in all"
            )
        # AITER counts elements of the tensor that it is given
        multiple = layout.column_multiple * (1 if stack.packing else width_of(stack.dtype))
        if stack.row_bytes % multiple:
            raise NoRule(
                f"`{self.name}`: rows of {stack.row_bytes} bytes, but layout `{layout.name}` needs "
                f"a multiple of {multiple}"
            )

    def step(self, stack: Stack, rank: int) -> Step:
        """Return the output tensor of one rank."""
        experts, part = self.cut.experts[rank], self.cut.parts[rank]
        rows = self.rows(self.block.hidden, len(part))
        columns = self.columns(self.block.hidden, len(part))
        is_vector = stack.form.shape in {"rows", "values", "scalar"}
        return Step(
            rank=rank,
            experts=experts,
            pieces=tuple(self.pieces(stack, rank)),
            shape=_shape(stack, len(experts)),
            logical_shape=(len(experts), rows) if is_vector else (len(experts), rows, columns),
        )

    def pieces(self, stack: Stack, rank: int) -> Iterator[Piece]:
        """Yield what a rank's matrices are made of."""
        part = self.cut.parts[rank]
        if self.source_unit == PER_TENSOR:
            for number, source in enumerate(stack.sources):
                yield Piece(number, range(source.rows), range(source.row_bytes), 0)
        elif self.group == W2:
            yield from self.down_pieces(stack.sources[0], part)
        elif part:
            yield from self.gate_up_pieces(stack, part)

    def gate_up_pieces(self, stack: Stack, part: range) -> Iterator[Piece]:
        """Yield gate's rows, then up's; or both as they lie, where the target wants that."""
        start, stop = (_exact(edge, self.unit.rows) for edge in (part.start, part.stop))
        columns = range(stack.sources[0].row_bytes)
        up_row = stack.rows // 2
        if len(stack.sources) > 1:
            for number in (0, 1):
                yield Piece(number, range(start, stop), columns, number * up_row)
        elif self.path.row_order == "as_source":
            yield Piece(0, range(2 * start, 2 * stop), columns, 0)
        elif self.block.family.gate_up_rows == "interleaved_1":
            for odd in (0, 1):
                yield Piece(0, range(2 * start + odd, 2 * stop + odd, 2), columns, odd * up_row)
        else:
            half = stack.sources[0].rows // 2
            for number in (0, 1):
                rows = range(number * half + start, number * half + stop)
                yield Piece(0, rows, columns, number * up_row)

    def down_pieces(self, source: Source, part: range) -> Iterator[Piece]:
        """Yield the columns of a rank, or whole rows where one element stands for all columns."""
        rows = range(source.rows)
        if self.role == BIAS and self.block.family.down_bias == "first_rank" and part.start:
            return
        if not self.unit.columns:
            yield Piece(0, rows, range(source.row_bytes), 0)
            return
        if not part:
            return
        width = width_of(source.dtype)
        first, last = (_exact(e, self.unit.columns) * width for e in (part.start, part.stop))
        yield Piece(0, rows, range(first, last), 0)


def _shape(stack: Stack, experts: int) -> tuple[int, ...]:
    """Return the stored shape of a rank's tensor."""
    columns = stack.expert_bytes // stack.rows // width_of(stack.dtype)
    return {
        "matrices": (experts, stack.rows, columns),
        "folded": (round_up(experts * stack.rows, stack.layout.row_pad), columns),
        "flat": (experts * stack.rows * columns,),
        "row_blocks": (experts, stack.rows // BLOCK_ROWS, columns * BLOCK_ROWS),
        "rows": (experts, stack.rows),
        "values": (experts,),
        "scalar": (),
    }[stack.form.shape]


def _over(size: int, unit: int) -> int:
    return -(-size // unit) if unit else 1


def _exact(edge: int, unit: int) -> int:
    assert edge % unit == 0, (edge, unit)
    return edge // unit
