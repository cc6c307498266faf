"""The sizes of an experts module on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiter_prep.errors import NoRule
from aiter_prep.sharding import SPLITS, prove_tiling

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiter_prep.families.blocks import ExpertBlock
    from aiter_prep.targets.model import WeightPath

MAX_TRIED_TP = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """What each rank holds of the intermediate axis, and the padded sizes.

    Attributes:
        parts: Range of the intermediate axis for each tensor-parallel rank.
        intermediate: Padded intermediate size per rank.
        hidden: Padded hidden size.
    """

    parts: tuple[range, ...]
    intermediate: int
    hidden: int


def cut_block(block: ExpertBlock, path: WeightPath, tp: int) -> Cut:
    """Cut an experts module for a number of tensor-parallel ranks.

    Raises:
        NoRule: The sizes cannot be shared so; the hint lists the sizes that can.
    """
    try:
        return _cut(block.family.split, block.scheme.group, _sizes(block), path, tp)
    except NoRule as fault:
        raise NoRule(
            f"`{block.experts}` cannot be shared by {tp} ranks: {fault.message}",
            fault.hint or _tp_hint(workable_tp([(block, path)])),
        ) from None


def workable_tp(blocks: Iterable[tuple[ExpertBlock, WeightPath]]) -> tuple[int, ...]:
    """Return the tensor-parallel sizes up to 64 that every one of these modules allows."""
    kinds = [(b.family.split, b.scheme.group, _sizes(b), p) for b, p in _distinct(blocks)]
    return tuple(
        tp for tp in range(1, MAX_TRIED_TP + 1) if all(_can_cut(*kind, tp) for kind in kinds)
    )


def _distinct(
    blocks: Iterable[tuple[ExpertBlock, WeightPath]],
) -> Iterable[tuple[ExpertBlock, WeightPath]]:
    seen: dict[tuple[object, ...], tuple[ExpertBlock, WeightPath]] = {}
    for block, path in blocks:
        seen.setdefault((block.family.name, block.scheme.name, _sizes(block)), (block, path))
    return seen.values()


def _sizes(block: ExpertBlock) -> tuple[int, int]:
    return block.hidden, block.intermediate


def _tp_hint(sizes: Sequence[int]) -> str:
    if not sizes:
        return "no tensor-parallel size works for this model and target"
    return f"use --tp {', '.join(map(str, sizes[:-1]))}{' or ' if sizes[1:] else ''}{sizes[-1]}"


def _can_cut(split: str, group: int, sizes: tuple[int, int], path: WeightPath, tp: int) -> bool:
    try:
        _cut(split, group, sizes, path, tp)
    except NoRule:
        return False
    return True


def _cut(split: str, group: int, sizes: tuple[int, int], path: WeightPath, tp: int) -> Cut:
    hidden, intermediate = sizes
    parts = SPLITS[split](intermediate, tp)
    prove_tiling(parts, intermediate)
    per_rank = len(parts[0])
    for part in parts:
        for edge in (part.start, part.stop):
            if edge % group:
                raise NoRule(f"{intermediate} columns in blocks of {group} would be cut at {edge}")
    _check_multiple("intermediate size per rank", per_rank, path.intermediate_multiple)
    _check_multiple("hidden size", hidden, path.hidden_multiple)
    cut = Cut(parts, path.intermediate.pad(per_rank), path.hidden.pad(hidden))
    if cut.intermediate % 32 or cut.hidden % 32:
        raise NoRule(
            f"kernels want multiples of 32, but the padded sizes are {cut.intermediate} "
            f"(intermediate, per rank) and {cut.hidden} (hidden)"
        )
    return cut


def _check_multiple(what: str, size: int, multiple: int) -> None:
    if size % multiple:
        raise NoRule(f"the {what} is {size}, not a multiple of {multiple}")
