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
# FP8 blocks: mirrors oracle/fp8.py::pad_tp_shard_to_weight_blocks of vLLM 0.33
STRIDE_COLUMNS = 128


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
    return _strided(size, ranks, -(-(size // BLOCK_COLUMNS) // ranks) * BLOCK_COLUMNS)


def padded_stride(size: int, ranks: int) -> tuple[range, ...]:
    """Cut an axis at multiples of the padded part: the last ranks get less, or nothing.

    Only for an engine that reads its checkpoint so.

    Raises:
        NoRule: The size is not a multiple of the number of ranks.
    """
    return _strided(size, ranks, round_up(len(equal_parts(size, ranks)[0]), STRIDE_COLUMNS))


def _strided(size: int, ranks: int, part: int) -> tuple[range, ...]:
    return tuple(
        range(min(rank * part, size), min((rank + 1) * part, size)) for rank in range(ranks)
    )


SPLITS: dict[str, Callable[[int, int], tuple[range, ...]]] = {
    "equal_parts": equal_parts,
    "whole_blocks": whole_blocks,
    "padded_stride": padded_stride,
}


def linear_experts(count: int, ranks: int) -> tuple[range, ...]:
    """Give each rank consecutive experts; the first ranks get one more where they do not divide.

    mirrors vllm fused_moe/expert_map_manager.py (0.33), placement `linear`.

    Raises:
        NoRule: There are fewer experts than ranks.
    """
    _check_experts(count, ranks)
    base, rest = divmod(count, ranks)
    starts = [rank * base + min(rank, rest) for rank in range(ranks + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def round_robin_experts(count: int, ranks: int) -> tuple[range, ...]:
    """Give rank r the experts r, r + ranks, r + 2 * ranks, ...

    mirrors vllm fused_moe/expert_map_manager.py (0.33), placement `round_robin`.

    Raises:
        NoRule: There are fewer experts than ranks.
    """
    _check_experts(count, ranks)
    return tuple(range(rank, count, ranks) for rank in range(ranks))


def _check_experts(count: int, ranks: int) -> None:
    if count < ranks:
        raise NoRule(f"{count} experts cannot be shared by {ranks} ranks")


PLACEMENTS: dict[str, Callable[[int, int], tuple[range, ...]]] = {
    "linear": linear_experts,
    "round_robin": round_robin_experts,
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
