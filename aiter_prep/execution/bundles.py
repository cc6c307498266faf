"""Which shards are written together: what a part of a conversion, or a task, consists of."""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aiter_prep.errors import InvalidUsage
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiter_prep.plan.make import BlockPlan, Plan
    from aiter_prep.plan.shards import Shard
    from aiter_prep.plan.steps import Stack, Step
    from aiter_prep.storage.header import TensorInfo

MAX_PARTS = 100_000
_PART = re.compile(r"(\d{1,6})/(\d{1,6})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """One of the parts of a conversion that is shared by several processes.

    Attributes:
        count: How many parts there are.
        number: Which of them, from 1 on.
    """

    count: int
    number: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_part(text: str) -> Part:
    """Return the part that a text such as `3/8` stands for.

    Raises:
        InvalidUsage: It is none.
    """
    match = _PART.fullmatch(text)
    part = Part(int(match[2]), int(match[1])) if match else Part(0, 0)
    if not 1 <= part.number <= part.count <= MAX_PARTS:
        raise InvalidUsage(
            f"part {printable(text)} is none: parts are 1/N to N/N, N at most {MAX_PARTS}",
            "give its number and how many there are, such as 1/8 for the first of eight",
        )
    return part


@dataclass(frozen=True, slots=True)
class Bundle:
    """Shards that are made of the same source tensors: one of each rank, or a common one.

    Attributes:
        shards: The shards.
    """

    shards: tuple[Shard, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of the shards."""
        return sum(shard.layout.total_bytes for shard in self.shards)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the shards."""
        return tuple(shard.file for shard in self.shards)


def bundles_of(plan: Plan) -> tuple[Bundle, ...]:
    """Return the shards of a plan in bundles, the largest first.

    Shards of the same number hold the same experts modules on every rank, so a bundle reads its
    source tensors once for all ranks.
    """
    together: dict[tuple[bool, int], list[Shard]] = {}
    for shard in plan.shards:
        together.setdefault((shard.rank is None, shard.part), []).append(shard)
    bundles = [Bundle(tuple(shards)) for shards in together.values()]
    return tuple(sorted(bundles, key=lambda bundle: (-bundle.total_bytes, bundle.files)))


def shares_of(plan: Plan, count: int) -> tuple[tuple[Bundle, ...], ...]:
    """Return what falls to each of so many parts; every bundle falls to exactly one."""
    return shared_out(bundles_of(plan), count)


def shared_out(bundles: Sequence[Bundle], count: int) -> tuple[tuple[Bundle, ...], ...]:
    """Share bundles, the largest first, among so many; some may get none.

    Each goes to who has the fewest bytes so far, so that all take about as long as each other.
    """
    shares: list[list[Bundle]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for bundle in bundles:
        load, number = heapq.heappop(loads)
        shares[number].append(bundle)
        heapq.heappush(loads, (load + bundle.total_bytes, number))
    return tuple(map(tuple, shares))


def divided(plan: Plan, groups: Sequence[Sequence[Bundle]]) -> list[Plan]:
    """Return for each group of bundles the piece of a plan that leads to their shards.

    A piece can be carried out, and no more: it knows of no source tensor but those that it reads.
    """
    shards = [[shard for bundle in group for shard in bundle.shards] for group in groups]
    group_of = {
        (shard.rank, name): number
        for number, own in enumerate(shards)
        for shard in own
        for name in shard.layout.slots
    }
    blocks: list[list[BlockPlan]] = [[] for _ in groups]
    for block in plan.blocks:
        found: dict[int, list[Stack]] = {}
        for stack in block.stacks:
            steps: dict[int, list[Step]] = {}
            for step in stack.steps:
                number = group_of.get((step.rank, stack.name))
                if number is not None:
                    steps.setdefault(number, []).append(step)
            for number, own_steps in steps.items():
                found.setdefault(number, []).append(replace(stack, steps=tuple(own_steps)))
        for number, stacks in found.items():
            blocks[number].append(replace(block, stacks=tuple(stacks)))
    common: list[list[TensorInfo]] = [[] for _ in groups]
    for tensor in plan.common:
        number = group_of.get((None, tensor.name))
        if number is not None:
            common[number].append(tensor)
    headers = tuple(replace(header, tensors=()) for header in plan.checkpoint.headers)
    checkpoint = replace(plan.checkpoint, headers=headers, tensors={}, unindexed=())
    return [
        replace(
            plan,
            checkpoint=checkpoint,
            blocks=tuple(blocks[number]),
            common=tuple(common[number]),
            shards=tuple(shards[number]),
        )
        for number in range(len(groups))
    ]


def bundles_of_part(plan: Plan, part: Part) -> tuple[Bundle, ...]:
    """Return the bundles that fall to a part, which may be none."""
    return shares_of(plan, part.count)[part.number - 1]
