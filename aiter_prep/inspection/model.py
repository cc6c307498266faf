"""What an inspection of a source consists of."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiter_prep.inspection.forecast import Forecast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from aiter_prep.families.blocks import ExpertBlock


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Experts modules that have their family, scheme and sizes in common.

    Attributes:
        experts: Path of the modules, with `{layer}` for the number of the layer.
        layers: The numbers, such as `0-2, 5`; empty where the path has none.
        modules: How many modules.
        family: How they name their tensors.
        scheme: How their weights are quantised.
        num_experts: Routed experts of each.
        hidden: Hidden size.
        intermediate: Intermediate size of an expert.
        total_bytes: Bytes of all their tensors.
    """

    experts: str
    layers: str
    modules: int
    family: str
    scheme: str
    num_experts: int
    hidden: int
    intermediate: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a target on a chip would make of a checkpoint.

    Attributes:
        target: The target.
        gfx: The chip.
        workable_tp: Tensor-parallel sizes that work, up to 64.
        forecasts: What some of them would write.
        refusal: Why none works, or empty.
        is_one_way: Whether the source could not be had back.
    """

    target: str
    gfx: str
    workable_tp: tuple[int, ...] = ()
    forecasts: tuple[Forecast, ...] = field(default=())
    refusal: str = ""
    is_one_way: bool = False


def expert_groups(blocks: Iterable[ExpertBlock]) -> tuple[ExpertGroup, ...]:
    """Group experts modules by everything but the layer, in the order of their first layers."""
    found: dict[tuple[object, ...], list[tuple[ExpertBlock, int | None]]] = defaultdict(list)
    for block in blocks:
        path, layer = split_layer(block.experts)
        sizes = (block.num_experts, block.hidden, block.intermediate)
        found[path, block.family.name, block.scheme.name, sizes].append((block, layer))
    return tuple(_group(members) for members in found.values())


def _group(members: Sequence[tuple[ExpertBlock, int | None]]) -> ExpertGroup:
    first = members[0][0]
    return ExpertGroup(
        experts=split_layer(first.experts)[0],
        layers=compact(layer for _, layer in members if layer is not None),
        modules=len(members),
        family=first.family.name,
        scheme=first.scheme.name,
        num_experts=first.num_experts,
        hidden=first.hidden,
        intermediate=first.intermediate,
        total_bytes=sum(block.total_bytes for block, _ in members),
    )


def split_layer(experts: str) -> tuple[str, int | None]:
    """Return the path of an experts module without the last number in it, and that number.

    `model.layers.3.mlp.experts` is `model.layers.{layer}.mlp.experts` of layer 3.
    """
    fields = experts.split(".")
    for place in reversed(range(len(fields))):
        if fields[place].isascii() and fields[place].isdigit():
            layer = int(fields[place])
            return ".".join((*fields[:place], "{layer}", *fields[place + 1 :])), layer
    return experts, None


def compact(numbers: Iterable[int]) -> str:
    """Return numbers as text: `0-2, 5` for 0, 1, 2 and 5."""
    return ", ".join(
        f"{first}-{last}" if first != last else f"{first}" for first, last in _runs(sorted(numbers))
    )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = last = None
    for number in numbers:
        if first is None or last is None:
            first = last = number
        elif number <= last + 1:
            last = number
        else:
            yield first, last
            first = last = number
    if first is not None and last is not None:
        yield first, last
