"""The ranks' slices tile an axis, whatever its size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiter_prep.errors import NoRule
from aiter_prep.sharding import (
    PLACEMENTS,
    SPLITS,
    equal_parts,
    linear_experts,
    padded_stride,
    prove_tiling,
    round_robin_experts,
    round_up,
    whole_blocks,
)


@given(st.integers(0, 200), st.integers(1, 80))
def test_equal_parts_tile_the_axis(part: int, ranks: int) -> None:
    parts = equal_parts(part * ranks, ranks)
    assert [index for piece in parts for index in piece] == list(range(part * ranks))
    assert {len(piece) for piece in parts} == {part}


@given(st.integers(0, 10_000), st.integers(1, 512))
def test_a_size_that_does_not_divide_is_refused(size: int, ranks: int) -> None:
    if size % ranks:
        with pytest.raises(NoRule, match=f"^{size} cannot be cut into {ranks} equal parts$"):
            equal_parts(size, ranks)
    else:
        assert sum(map(len, equal_parts(size, ranks))) == size


@given(st.integers(0, 100), st.integers(1, 200))
def test_whole_blocks_tile_the_axis_and_cut_no_block(blocks: int, ranks: int) -> None:
    parts = whole_blocks(32 * blocks, ranks)
    assert len(parts) == ranks
    assert [index for piece in parts for index in piece] == list(range(32 * blocks))
    assert all(piece.start % 32 == piece.stop % 32 == 0 for piece in parts)
    # ceil((I / 32) / tp) * 32 each, what is left for the last one that gets any, then nothing
    full = -(-blocks // ranks) * 32
    sizes = [len(piece) for piece in parts]
    held = [size for size in sizes if size]
    assert sizes[: len(held)] == held
    assert all(size == full for size in held[:-1])


@given(st.integers(0, 10_000).filter(lambda size: size % 32), st.integers(1, 64))
def test_whole_blocks_refuses_part_of_a_block(size: int, ranks: int) -> None:
    with pytest.raises(NoRule, match=f"^{size} is not a multiple of 32$"):
        whole_blocks(size, ranks)


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (1, [2880]),
        (2, [1440, 1440]),
        (4, [736, 736, 736, 672]),
        (8, [384, 384, 384, 384, 384, 384, 384, 192]),
        (16, [192] * 15 + [0]),
        (64, [64] * 45 + [0] * 19),
    ],
)
def test_gpt_oss_is_cut_as_vllm_cuts_it(ranks: int, sizes: list[int]) -> None:
    assert [len(piece) for piece in whole_blocks(2880, ranks)] == sizes


@given(st.integers(0, 100), st.integers(1, 64))
def test_a_padded_stride_tiles_the_axis_and_leaves_less_to_the_last_ranks(
    part: int, ranks: int
) -> None:
    parts = padded_stride(part * ranks, ranks)
    assert [index for piece in parts for index in piece] == list(range(part * ranks))
    assert all(piece.start % 128 == 0 for piece in parts if piece)
    sizes = [len(piece) for piece in parts]
    assert sizes == sorted(sizes, reverse=True)


@given(st.sampled_from(sorted(PLACEMENTS)), st.integers(1, 300), st.integers(1, 80))
def test_every_expert_lies_on_exactly_one_rank(name: str, count: int, ranks: int) -> None:
    if count < ranks:
        with pytest.raises(NoRule, match=f"^{count} experts cannot be shared by {ranks} ranks$"):
            PLACEMENTS[name](count, ranks)
        return
    held = PLACEMENTS[name](count, ranks)
    assert sorted(expert for experts in held for expert in experts) == list(range(count))
    sizes = [len(experts) for experts in held]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_experts_are_placed_as_vllm_places_them() -> None:
    assert [list(held) for held in linear_experts(7, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [list(held) for held in round_robin_experts(7, 3)] == [[0, 3, 6], [1, 4], [2, 5]]


@given(st.sampled_from(sorted(SPLITS)), st.integers(1, 300), st.integers(1, 64))
def test_every_split_is_proved(name: str, blocks: int, ranks: int) -> None:
    size = 32 * blocks
    try:
        parts = SPLITS[name](size, ranks)
    except NoRule:
        return
    prove_tiling(parts, size)


@pytest.mark.parametrize(
    ("parts", "size"),
    [
        ([range(4), range(5, 8)], 8),  # a hole
        ([range(4), range(3, 8)], 8),  # an overlap
        ([range(4), range(4, 7)], 8),  # short of the end
        ([range(4), range(4, 9)], 8),  # beyond the end: sglang issue 32781
        ([range(1, 8)], 8),  # short of the start
        ([range(4, 8), range(4)], 8),  # out of order
        ([range(0, 8, 2)], 8),  # every other one
        ([range(8), range(8)], 8),  # twice
        ([], 8),
        ([range(0), range(0)], 8),
        # a padded size as the stride: the last rank holds nothing; vllm issue 43865
        ([range(256), range(256, 384), range(512, 512)], 576),
    ],
)
def test_ranges_that_do_not_tile_are_a_mistake_of_ours(parts: list[range], size: int) -> None:
    with pytest.raises(AssertionError):
        prove_tiling(parts, size)


@given(st.data())
def test_the_proof_accepts_a_tiling_and_nothing_else(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 12))
    edge = st.integers(0, size + 1)
    parts = data.draw(st.lists(st.builds(lambda a, b: range(min(a, b), max(a, b)), edge, edge)))
    tiles = [index for part in parts for index in part] == list(range(size))
    try:
        prove_tiling(parts, size)
    except AssertionError:
        assert not tiles
    else:
        assert tiles


@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_rounding_up_gives_the_next_multiple(size: int, multiple: int) -> None:
    found = round_up(size, multiple)
    assert found % multiple == 0
    assert size <= found < size + multiple
