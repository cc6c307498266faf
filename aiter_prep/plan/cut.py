"""The sizes of an experts module on each rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aiter_prep.errors import NoRule
from aiter_prep.sharding import PLACEMENTS, SPLITS, prove_tiling

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiter_prep.families.blocks import ExpertBlock
    from aiter_prep.targets.model import WeightPath

MAX_TRIED_TP = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """What each rank holds, and the padded sizes.

    Attributes:
        parts: Range of the intermediate axis for each rank.
        experts: Global ids of the experts of each rank, in the order in which they are stored.
        intermediate: Padded intermediate size per rank.
        hidden: Padded hidden size.
    """

    parts: tuple[range, ...]
    experts: tuple[range, ...]
    intermediate: int
    hidden: int


@dataclass(frozen=True, slots=True)
class Parallel:
    """How ranks share the experts: each a slice of all, or each all of some.

    Attributes:
        tp: Tensor-parallel ranks; 1 under expert parallelism.
        ep: Expert-parallel ranks; 1 without it.
        placement: Which experts a rank holds: a name of `sharding.PLACEMENTS`.
    """

    tp: int
    ep: int = 1
    placement: str = "linear"

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.tp * self.ep


def cut_block(
    block: ExpertBlock,
    path: WeightPath,
    parallel: Parallel,
    modules: Sequence[tuple[ExpertBlock, WeightPath]] = (),
) -> Cut:
    """Cut an experts module for some ranks.

    Args:
        block: The module.
        path: What the target wants of it.
        parallel: The ranks.
        modules: All modules of the model, for the hint.

    Raises:
        NoRule: The sizes cannot be shared so; the hint lists the sizes that can.
    """
    try:
        cut = _cut(_kind(block), path, parallel.tp)
    except NoRule as fault:
        raise NoRule(
            f"`{block.experts}` cannot be shared by {parallel.tp} ranks: {fault.message}",
            fault.hint or _tp_hint(workable_tp(modules or [(block, path)])),
        ) from None
    if parallel.ep == 1:
        return replace(cut, experts=(range(block.num_experts),) * parallel.tp)
    try:
        experts = PLACEMENTS[parallel.placement](block.num_experts, parallel.ep)
    except NoRule as fault:
        raise NoRule(f"`{block.experts}`: {fault.message}", "use a smaller --ep") from None
    return replace(cut, parts=cut.parts * parallel.ep, experts=experts)


def workable_tp(blocks: Iterable[tuple[ExpertBlock, WeightPath]]) -> tuple[int, ...]:
    """Return the tensor-parallel sizes up to 64 that every one of these modules allows."""
    kinds = [(_kind(block), path) for block, path in _distinct(blocks)]
    return tuple(
        tp for tp in range(1, MAX_TRIED_TP + 1) if all(_can_cut(*kind, tp) for kind in kinds)
    )


def _distinct(
    blocks: Iterable[tuple[ExpertBlock, WeightPath]],
) -> Iterable[tuple[ExpertBlock, WeightPath]]:
    seen: dict[tuple[object, ...], tuple[ExpertBlock, WeightPath]] = {}
    for block, path in blocks:
        seen.setdefault((_kind(block), id(path)), (block, path))
    return seen.values()


@dataclass(frozen=True, slots=True)
class _Kind:
    """What decides how an experts module can be cut."""

    split: str
    group: int
    hidden: int
    intermediate: int


def _kind(block: ExpertBlock) -> _Kind:
    return _Kind(block.family.split, block.scheme.group, block.hidden, block.intermediate)


def _tp_hint(sizes: Sequence[int]) -> str:
    if not sizes:
        return "no tensor-parallel size works for this model and target"
    return f"use --tp {', '.join(map(str, sizes[:-1]))}{' or ' if sizes[1:] else ''}{sizes[-1]}"


def _can_cut(kind: _Kind, path: WeightPath, tp: int) -> bool:
    try:
        _cut(kind, path, tp)
    except NoRule:
        return False
    return True


def _cut(kind: _Kind, path: WeightPath, tp: int) -> Cut:
    size = kind.intermediate
    parts = SPLITS[path.split or kind.split](size, tp)
    prove_tiling(parts, size)
    per_rank = len(parts[0])
    for edge in (edge for part in parts for edge in (part.start, part.stop)):
        if edge % kind.group:
            raise NoRule(f"{size} columns in blocks of {kind.group} would be cut at {edge}")
    _check_multiple("intermediate size per rank", per_rank, path.intermediate_multiple)
    _check_multiple("hidden size", kind.hidden, path.hidden_multiple)
    if per_rank < path.intermediate_least:
        raise NoRule(
            f"the intermediate size per rank is {per_rank}, at least {path.intermediate_least} is "
            "needed"
        )
    cut = Cut(parts, (), path.intermediate.pad(per_rank), path.hidden.pad(kind.hidden))
    if cut.intermediate % 32 or cut.hidden % 32:
        raise NoRule(
            f"kernels want multiples of 32, but the padded sizes are {cut.intermediate} "
            f"(intermediate, per rank) and {cut.hidden} (hidden)"
        )
    return cut


def _check_multiple(what: str, size: int, multiple: int) -> None:
    if size % multiple:
        raise NoRule(f"the {what} is {size}, not a multiple of {multiple}")
