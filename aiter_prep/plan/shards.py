"""Which output tensor goes into which shard."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from aiter_prep.storage.dtypes import width_of
from aiter_prep.storage.folder import shard_file
from aiter_prep.storage.shard import ShardLayout, lay_out_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from aiter_prep.plan.steps import Stack
    from aiter_prep.storage.header import TensorInfo

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file.

    Attributes:
        rank: Its rank, or None for common tensors.
        part: Its number among the shards of that rank.
        layout: Where each tensor lies in it.
    """

    rank: int | None
    part: int
    layout: ShardLayout

    @property
    def file(self) -> str:
        """Its name."""
        return self.layout.file


class _Item(NamedTuple):
    """A tensor that wants a place: name, dtype, shape, layout name or None, and its size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str | None
    total_bytes: int


def rank_shards(
    blocks: Sequence[Sequence[Stack]],
    ranks: Sequence[int],
    max_shard_bytes: int,
    facts: Mapping[str, object],
) -> Iterator[Shard]:
    """Yield the shards of every rank; the tensors of one module stay together where they fit."""
    for index, rank in enumerate(ranks):
        yield from shards_of_rank(blocks, rank, index, max_shard_bytes, facts)


def shards_of_rank(
    blocks: Sequence[Sequence[Stack]],
    rank: int,
    index: int,
    max_shard_bytes: int,
    facts: Mapping[str, object],
) -> Iterator[Shard]:
    """Yield the shards of one rank, whose number among those that were planned is `index`."""
    groups = [[_stack_item(stack, index) for stack in stacks] for stacks in blocks]
    for part, items in enumerate(_parts(groups, max_shard_bytes)):
        yield _shard(rank, part, items, facts)


def common_shards(
    tensors: Sequence[TensorInfo], max_shard_bytes: int, facts: Mapping[str, object]
) -> Iterator[Shard]:
    """Yield the shards of the tensors that every rank gets as they are."""
    groups = [[_Item(t.name, t.dtype, t.shape, None, t.total_bytes)] for t in tensors]
    for part, items in enumerate(_parts(groups, max_shard_bytes)):
        yield _shard(None, part, items, facts)


def _stack_item(stack: Stack, index: int) -> _Item:
    shape = stack.steps[index].shape
    layout = stack.layout.name if stack.layout.is_shuffled else None
    return _Item(stack.name, stack.dtype, shape, layout, prod(shape) * width_of(stack.dtype))


def _parts(groups: Iterable[Sequence[_Item]], limit: int) -> Iterator[list[_Item]]:
    """Fill parts in order; a group that is larger than the limit is split between its items."""
    part: list[_Item] = []
    filled = 0
    for group in groups:
        size = sum(item.total_bytes for item in group)
        for items in [group] if size <= limit else [[item] for item in group]:
            size = sum(item.total_bytes for item in items)
            if part and filled + size > limit:
                yield part
                part, filled = [], 0
            part.extend(items)
            filled += size
    if part:
        yield part


def _shard(
    rank: int | None, part: int, items: Sequence[_Item], facts: Mapping[str, object]
) -> Shard:
    layouts = {item.name: item.layout for item in items if item.layout is not None}
    metadata = {
        "format": "pt",
        "is_shuffled": "true" if layouts else "false",
        "layouts": _json(layouts),
        "aiter_prep": _json({**facts, "format_version": FORMAT_VERSION, "rank": rank}),
    }
    tensors = ((item.name, item.dtype, item.shape) for item in items)
    return Shard(rank, part, lay_out_shard(shard_file(rank, part), tensors, metadata))


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
