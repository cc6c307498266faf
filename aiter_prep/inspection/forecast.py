"""How many bytes a conversion would write, told from its plan by arithmetic alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from aiter_prep.plan.cut import Parallel, cut_block
from aiter_prep.plan.make import DEFAULT_MAX_SHARD_BYTES
from aiter_prep.plan.shards import common_shards, shards_of_rank
from aiter_prep.plan.stacks import stacks_of
from aiter_prep.storage.dtypes import bytes_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from aiter_prep.families.blocks import ExpertBlock
    from aiter_prep.plan.make import Plan
    from aiter_prep.plan.shards import Shard
    from aiter_prep.plan.steps import Stack, Step
    from aiter_prep.storage.header import TensorInfo
    from aiter_prep.targets.model import WeightPath

COMMON = "common"
Module = tuple["ExpertBlock", "WeightPath"]


@dataclass(frozen=True, slots=True)
class RoleBytes:
    """The bytes of the tensors of one role, over all ranks that are written.

    Attributes:
        role: `weight`, `weight_scale`, `bias` and so on, or `common`.
        source_bytes: In the source.
        stored_bytes: In the prepared folder.
        padding_bytes: Of these, how many are padding.
    """

    role: str
    source_bytes: int
    stored_bytes: int
    padding_bytes: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a conversion would write.

    Attributes:
        tp: Tensor-parallel ranks.
        rank_bytes: Bytes of the shards of one rank, the largest.
        common_bytes: Bytes of the shards that all ranks have in common.
        total_bytes: Bytes of all shards.
        padding_bytes: Of these, how many are padding.
        roles: The tensors' bytes by role.
    """

    tp: int
    rank_bytes: int
    common_bytes: int
    total_bytes: int
    padding_bytes: int
    roles: tuple[RoleBytes, ...]


def forecast_of_plan(plan: Plan) -> Forecast:
    """Return what `execute` would write for a plan."""
    by_rank: dict[int | None, int] = defaultdict(int)
    for shard in plan.shards:
        by_rank[shard.rank] += shard.layout.total_bytes
    common_bytes = by_rank.pop(None, 0)
    stacks = [(stack, 1) for block in plan.blocks for stack in block.stacks]
    return _forecast(plan.tp, by_rank.values(), common_bytes, tuple(_roles(stacks, plan.common)))


def forecasts_of(
    modules: Sequence[Module],
    common: Sequence[TensorInfo],
    sizes: Iterable[int],
    *,
    target: str,
    gfx: str,
) -> Iterator[Forecast]:
    """Yield what conversions for some numbers of ranks would write, without their plans.

    Args:
        modules: Experts modules, and what the target wants of each.
        common: The other tensors.
        sizes: Numbers of tensor-parallel ranks.
        target: Name of the target.
        gfx: The chip.

    Raises:
        NoRule: One of these numbers does not work.
    """
    kinds = _kinds(modules)
    common_bytes: dict[int, int] = {}
    for tp in sizes:
        facts = {"ep": 1, "gfx": gfx, "target": target, "tp": tp}
        digits = len(str(tp))  # all of a number that the size of a header depends on
        if digits not in common_bytes:
            shards = common_shards(common, DEFAULT_MAX_SHARD_BYTES, facts)
            common_bytes[digits] = _size_of(shards)
        weighted: list[tuple[Stack, int]] = []
        named: dict[str, tuple[Stack, ...]] = {}
        for members in kinds:
            first = members[0][0]
            stacks = _stacks(members[0], tp)
            weighted += [(stack, len(members)) for stack in stacks]
            named |= {block.experts: _renamed(stacks, first, block) for block, _ in members}
        roles = tuple(_roles(weighted, common))
        by_rank = list(_rank_bytes([named[block.experts] for block, _ in modules], tp, facts))
        yield _forecast(tp, by_rank, common_bytes[digits], roles)


def _rank_bytes(
    blocks: Sequence[Sequence[Stack]], tp: int, facts: Mapping[str, object]
) -> Iterator[int]:
    """Yield the size of each rank's shards; ranks whose numbers are as long are of one size."""
    size = 0
    for rank in range(tp):
        if not rank or len(str(rank)) > len(str(rank - 1)):
            shards = shards_of_rank(blocks, rank, rank, DEFAULT_MAX_SHARD_BYTES, facts)
            size = _size_of(shards)
        yield size


def _kinds(modules: Sequence[Module]) -> list[list[Module]]:
    """Return the modules, those together whose output tensors differ in their names alone."""
    alike: dict[tuple[object, ...], list[Module]] = defaultdict(list)
    for block, path in modules:
        parts = tuple(
            (key, part.suffix, part.dtype, part.fused, part.rows, part.columns)
            for key, part in sorted(block.parts.items())
        )
        sizes = (block.num_experts, block.hidden, block.intermediate)
        alike[block.family.name, block.scheme.name, id(path), sizes, parts].append((block, path))
    return list(alike.values())


def _stacks(module: Module, tp: int) -> tuple[Stack, ...]:
    block, path = module
    return tuple(stacks_of(block, path, cut_block(block, path, Parallel(tp)), range(tp)))


def _renamed(stacks: Iterable[Stack], module: ExpertBlock, other: ExpertBlock) -> tuple[Stack, ...]:
    """Return a module's output tensors as those of another of its kind."""
    return tuple(
        replace(stack, name=other.experts + stack.name.removeprefix(module.experts))
        for stack in stacks
    )


def _size_of(shards: Iterable[Shard]) -> int:
    return sum(shard.layout.total_bytes for shard in shards)


def _forecast(
    tp: int, by_rank: Collection[int], common_bytes: int, roles: tuple[RoleBytes, ...]
) -> Forecast:
    return Forecast(
        tp=tp,
        rank_bytes=max(by_rank, default=0),
        common_bytes=common_bytes,
        total_bytes=sum(by_rank) + common_bytes,
        padding_bytes=sum(role.padding_bytes for role in roles),
        roles=roles,
    )


def _roles(
    stacks: Sequence[tuple[Stack, int]], common: Sequence[TensorInfo]
) -> Iterator[RoleBytes]:
    by_role: dict[str, list[tuple[Stack, int]]] = defaultdict(list)
    for stack, count in stacks:
        by_role[stack.role].append((stack, count))
    for role, members in by_role.items():
        source = stored = padding = 0
        for stack, count in members:
            sizes = [bytes_of(stack.dtype, step.shape) or 0 for step in stack.steps]
            source += count * _source_bytes(stack)
            stored += count * sum(sizes)
            padding += count * sum(map(_padding, [stack] * len(sizes), stack.steps, sizes))
        yield RoleBytes(role, source, stored, padding)
    common_bytes = sum(tensor.total_bytes for tensor in common)
    yield RoleBytes(COMMON, common_bytes, common_bytes, 0)


def _source_bytes(stack: Stack) -> int:
    # the tensors of one source are all of one shape, but for a shared expert's, which is alike
    return sum(len(source.tensors) * source.tensors[0].total_bytes for source in stack.sources)


def _padding(stack: Stack, step: Step, stored_bytes: int) -> int:
    if stack.is_scalar:
        return 0
    width = stack.filled_row_bytes // max(1, stack.filled_columns)
    ratio = stack.packing.ratio if stack.packing else 1
    return stored_bytes - prod(step.logical_shape) * width // ratio
