"""Which part of an axis belongs to one rank: pure arithmetic."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from aiter_prep.errors import NoRule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# gpt-oss is cut in whole blocks of its scales: mirrors
# vllm/model_executor/models/gpt_oss.py::GptOssModel (0.33) and sglang/srt/models/gpt_oss.py
BLOCK_COLUMNS = 32


def equal_parts(size: int, ranks: int) -> tuple[range, ...]:
    """Cut an axis into equal ranges, one per rank.

    The stride is the axis' own size over the number of ranks, never a padded one.

    Raises:
        NoRule: The size is not a multiple of the number of ranks.
    """
    if size % ranks:
        raise NoRule(f"{size} cannot be cut into {ranks} equal parts")
    part = size // ranks
    return tuple(range(rank * part, (rank + 1) * part) for rank in range(ranks))


def whole_blocks(size: int, ranks: int) -> tuple[range, ...]:
    """Cut an axis as gpt-oss is: `ceil((size / 32) / ranks) * 32` each, the last takes the rest.

    Ranks past the end get an empty range.

    Raises:
        NoRule: The size is not a multiple of 32.
    """
    if size % BLOCK_COLUMNS:
        raise NoRule(f"{size} is not a multiple of {BLOCK_COLUMNS}")
    part = -(-(size // BLOCK_COLUMNS) // ranks) * BLOCK_COLUMNS
    return tuple(
        range(min(rank * part, size), min((rank + 1) * part, size)) for rank in range(ranks)
    )


SPLITS: dict[str, Callable[[int, int], tuple[range, ...]]] = {
    "equal_parts": equal_parts,
    "whole_blocks": whole_blocks,
}


def prove_tiling(parts: Sequence[range], size: int) -> None:
    """Check that ranges with step 1 tile `[0, size)`: no hole, no overlap, nothing outside.

    Raises:
        AssertionError: They do not; a mistake of ours, found before a byte is written.
    """
    assert all(part.step == 1 and part.start <= part.stop for part in parts)
    filled = [part for part in parts if part]
    assert not filled or (filled[0].start == 0 and filled[-1].stop == size)
    assert all(left.stop == right.start for left, right in pairwise(filled))
    assert sum(len(part) for part in filled) == size


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below the size."""
    return -(-size // multiple) * multiple
