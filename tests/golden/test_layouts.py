"""Holds every layout to AITER's own bytes, to its laws, and to what it must refuse."""

from __future__ import annotations

import json
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from aiter_prep.errors import NoRule
from aiter_prep.layouts.packing import PACKINGS, packing_named
from aiter_prep.layouts.permutation import REST, Layout, runs
from aiter_prep.layouts.table import LAYOUTS, layout_named

Bytes = npt.NDArray[np.uint8]

GOLDEN = Path(__file__).parent
NAMES = [pair["name"] for pair in json.loads((GOLDEN / "aiter_layouts.json").read_text("utf-8"))]

# Golden pair (or the start of its name) to the layout that brings its bytes, and how many experts
# are folded into its rows.
LAYOUT_OF_PAIR: dict[str, tuple[str, int]] = {
    "weight_16x16_": ("tile_16x16", 1),
    "weight_guinterleave_gate1_": ("tile_16x16_interleaved_16", 1),
    "weight_guinterleave_gate0_": ("tile_16x16", 1),
    "weight_a16w4_gate1": ("tile_16x16_interleaved_16", 1),
    "weight_a16w4_gate0": ("tile_16x16", 1),
    "weight_padk128_u8": ("tile_16x16", 1),
    "weight_NK_16_64_u8": ("tile_16x16", 1),
    "scale_e8m0_": ("e8m0", 1),
    "scale_guinterleave_gate1_0": ("e8m0_interleaved_16", 1),
    "scale_guinterleave_gate1_1": ("e8m0_interleaved_16", 3),
    "scale_guinterleave_gate1_": ("e8m0_interleaved_16", 2),
    "scale_guinterleave_gate0_": ("e8m0_unpadded_rows", 1),
    "gfx1250_moe_weight_gu1": ("tile_16x16_interleaved_1", 1),
    "gfx1250_moe_weight_gu0": ("tile_16x16", 1),
    "gfx1250_moe_scale_gu1": ("e8m0_32x4_interleaved_1", 1),
    "gfx1250_moe_scale_gu0": ("e8m0_32x4", 1),
    "gfx1250_weight_2d": ("tile_16x16", 1),
    "gfx1250_f4_weight": ("tile_16x16", 1),
    "gfx1250_f4_scale_mx": ("e8m0_32x4", 1),
    "gfx1250_mxfp8fp4_b": ("tile_16x16", 1),
    "int4_scale_bf16": ("int4_scale", 1),
}
# No target asks for these, so no layout describes them.
NOT_OURS = {
    "weight_NK_32_32_u8": "tiles of 32 x 32",
    "gfx1250_f4_scale_nv": "scales of NVFP4",
    "int4_pack_after_shuffle": "a packing, below",
}
COVERED = [name for name in NAMES if name not in NOT_OURS]
MOVING = [name for name in LAYOUTS if name != "row_major"]


def layout_of(pair: str) -> tuple[Layout, int]:
    """Return the layout of a golden pair: the longest entry that its name starts with."""
    key = max((key for key in LAYOUT_OF_PAIR if pair.startswith(key)), key=len)
    name, experts = LAYOUT_OF_PAIR[key]
    return layout_named(name), experts


@cache
def golden() -> dict[str, oracle.Source]:
    return oracle.read_safetensors(GOLDEN / "aiter_layouts.safetensors")


def array(name: str) -> Bytes:
    """Return a golden tensor as uint8, its last axis in bytes."""
    source = golden()[name]
    width = len(source.data) // prod(source.shape)
    shape = (*source.shape[:-1], source.shape[-1] * width)
    return np.frombuffer(source.data, np.uint8).reshape(shape)


def matrices(pair: str, experts: int) -> Bytes:
    """Return the input of a golden pair as `[experts, rows, columns]`."""
    data = array(f"{pair}/in")
    if pair == "int4_scale_bf16":  # AITER takes the transposed scales
        elements = data.reshape(*data.shape[:-1], -1, 2).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(elements).reshape(len(data), elements.shape[1], -1)
    if experts > 1:
        return data.reshape(experts, -1, data.shape[-1])
    return data.reshape(-1, *data.shape[-2:])


def padded(matrix: Bytes, rows: int, columns: int, fill: int) -> Bytes:
    """Return `[batch, rows, columns]` with a matrix in the leading corner of each."""
    stored = np.full((len(matrix), rows, columns), fill, np.uint8)
    stored[:, : matrix.shape[1], : matrix.shape[2]] = matrix
    return stored


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def defined(pair: str) -> npt.NDArray[np.bool_]:
    """Return which bytes of the output AITER defines: the others are uninitialised memory."""
    if f"{pair}/valid" not in golden():
        return np.ones(array(f"{pair}/out").size, np.bool_)
    return np.asarray(array(f"{pair}/valid").ravel() == 1, np.bool_)


# --- golden -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", COVERED)
def test_a_layout_brings_the_bytes_of_aiter(pair: str) -> None:
    layout, experts = layout_of(pair)
    data, wanted = matrices(pair, experts), array(f"{pair}/out").ravel()
    columns = 128 if "padk128" in pair else up(data.shape[2], layout.column_pad)
    rows = up(data.shape[1], layout.row_pad)
    stored = layout.apply(padded(data, rows, columns, layout.pad_byte)).ravel()
    assert stored.size == wanted.size
    counts = defined(pair)
    assert np.array_equal(stored[counts], wanted[counts])


@pytest.mark.parametrize("pair", COVERED)
def test_aiters_bytes_lead_back_to_the_input(pair: str) -> None:
    layout, experts = layout_of(pair)
    data, stored = matrices(pair, experts), array(f"{pair}/out")
    rows = up(data.shape[1], layout.row_pad)
    back = layout.invert(stored.reshape(len(data), rows, -1))
    assert np.array_equal(back[:, : data.shape[1], : data.shape[2]], data)


@pytest.mark.parametrize("pair", [name for name in NAMES if f"{name}/valid" in golden()])
def test_bytes_which_aiter_does_not_define_are_the_padding_alone(pair: str) -> None:
    layout, _ = layout_of(pair)
    data = matrices(pair, 1)
    rows, columns = array(f"{pair}/out").shape
    marks = padded(np.ones_like(data), rows, columns, fill=0)
    assert np.array_equal(layout.apply(marks).ravel() == 1, defined(pair))


def test_every_golden_pair_has_a_layout_or_a_reason() -> None:
    assert set(NOT_OURS) <= set(NAMES)
    for pair in COVERED:
        layout_of(pair)
    used = {layout_of(pair)[0].name for pair in COVERED}
    assert used == {name for name, _ in LAYOUT_OF_PAIR.values()}


@pytest.mark.parametrize("name", MOVING)
def test_every_layout_is_held_to_a_golden_pair(name: str) -> None:
    assert any(layout_of(pair)[0].name == name for pair in COVERED)


@pytest.mark.parametrize("name", [name for name in MOVING if name != "int4_scale"])
def test_a_golden_pair_tells_every_layout_from_all_others(name: str) -> None:
    """The pair of `int4_scale` has 32 rows, at which it is `e8m0_32x4`; see its formula below."""
    others = [layout for layout in LAYOUTS.values() if layout.name != name]
    assert any(
        not any(brings(other, pair) for other in others if other.order != LAYOUTS[name].order)
        for pair in COVERED
        if layout_of(pair)[0].name == name
    )


def brings(layout: Layout, pair: str) -> bool:
    """Return whether a layout brings the bytes of a pair, which may be another's."""
    _, experts = layout_of(pair)
    data, wanted = matrices(pair, experts), array(f"{pair}/out").ravel()
    rows, columns = up(data.shape[1], layout.row_pad), up(data.shape[2], layout.column_pad)
    try:
        stored = layout.apply(padded(data, rows, columns, 0x7F)).ravel()
    except NoRule:
        return False
    counts = defined(pair)
    return stored.size == wanted.size and np.array_equal(stored[counts], wanted[counts])


@pytest.mark.parametrize("pair", COVERED)
def test_the_plain_layout_changes_nothing(pair: str) -> None:
    data = array(f"{pair}/in")
    assert np.array_equal(LAYOUTS["row_major"].apply(data), data)
    assert not LAYOUTS["row_major"].is_shuffled


# --- laws ---------------------------------------------------------------------------------------


def random_matrix(seed: int, shape: tuple[int, ...]) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@st.composite
def sizes(draw: st.DrawFn, layout: Layout) -> tuple[int, int]:
    """Draw rows and columns that fill whole tiles."""
    tile_rows = prod(radix for radix in layout.rows if radix != REST)
    tile_columns = prod(radix for radix in layout.columns if radix != REST)
    return tile_rows * draw(st.integers(1, 4)), tile_columns * draw(st.integers(1, 5))


@settings(max_examples=40)
@given(st.data())
@pytest.mark.parametrize("name", LAYOUTS)
def test_inverting_what_was_applied_changes_nothing(name: str, data: st.DataObject) -> None:
    layout = LAYOUTS[name]
    batch = data.draw(st.lists(st.integers(1, 3), max_size=2))
    matrix = random_matrix(data.draw(st.integers(0, 999)), (*batch, *data.draw(sizes(layout))))
    assert np.array_equal(layout.invert(layout.apply(matrix)), matrix)
    assert np.array_equal(layout.apply(layout.invert(matrix)), matrix)


@settings(max_examples=40)
@given(st.data())
@pytest.mark.parametrize("name", LAYOUTS)
def test_applying_only_moves_bytes(name: str, data: st.DataObject) -> None:
    layout = LAYOUTS[name]
    rows, columns = data.draw(sizes(layout))
    numbers = np.arange(rows * columns, dtype=np.uint32)
    planes = [(numbers >> shift).astype(np.uint8) for shift in (0, 8, 16)]
    moved = [layout.apply(plane.reshape(rows, columns)).ravel() for plane in planes]
    places = sum(plane.astype(np.uint32) << np.uint32(8 * i) for i, plane in enumerate(moved))
    assert np.array_equal(np.sort(places), numbers)


@settings(max_examples=40)
@given(st.data())
@pytest.mark.parametrize("name", LAYOUTS)
def test_placing_a_rectangle_equals_applying_the_padded_matrix(
    name: str, data: st.DataObject
) -> None:
    """A rectangle of any size, cut out of a larger array, at any row and column."""
    layout = LAYOUTS[name]
    rows, columns = data.draw(sizes(layout))
    experts = data.draw(st.integers(1, 3))
    fill = data.draw(st.sampled_from([0, 0x7F]))
    row = data.draw(st.integers(0, rows - 1))
    height = data.draw(st.integers(0, rows - row))
    column = data.draw(st.integers(0, columns - 1))
    width = data.draw(st.integers(0, columns - column))
    step = data.draw(st.integers(1, 2))
    left = data.draw(st.integers(0, 17))
    whole = random_matrix(data.draw(st.integers(0, 999)), (experts, step * rows, left + columns))
    part = whole[:, : step * height : step, left : left + width]

    stored = layout.apply(np.full((experts, rows, columns), fill, np.uint8))
    layout.place(stored, part, row, column)

    wanted = np.full((experts, rows, columns), fill, np.uint8)
    wanted[:, row : row + height, column : column + width] = part
    assert np.array_equal(stored, layout.apply(wanted))


@given(st.integers(1, 70), st.integers(1, 5), st.integers(0, 999))
def test_scales_of_int4_are_stored_in_pairs_of_groups(rows: int, pairs: int, seed: int) -> None:
    """`[E, G, N]` becomes `[E, G / 2, N, 2]`; our matrix is `[N, G]` elements of two bytes."""
    matrix = random_matrix(seed, (rows, pairs, 2, 2))
    stored = LAYOUTS["int4_scale"].apply(matrix.reshape(rows, -1))
    assert np.array_equal(stored.ravel(), matrix.transpose(1, 0, 2, 3).ravel())


@settings(max_examples=40)
@given(st.data())
@pytest.mark.parametrize("name", LAYOUTS)
def test_applying_into_a_buffer_takes_any_strides_of_rows(name: str, data: st.DataObject) -> None:
    layout = LAYOUTS[name]
    rows, columns = data.draw(sizes(layout))
    whole = random_matrix(data.draw(st.integers(0, 999)), (2, 2 * rows, columns + 5))
    matrix = whole[:, ::2, 3 : 3 + columns]
    buffer = np.full((2, rows, columns), 0xEE, np.uint8)
    layout.apply_into(matrix, buffer)
    assert np.array_equal(buffer, layout.apply(np.ascontiguousarray(matrix)))
    back = np.full((2, rows, columns), 0xEE, np.uint8)
    layout.invert_into(buffer, back)
    assert np.array_equal(back, matrix)


def test_a_layout_that_only_a_manifest_describes_is_undone() -> None:
    """Its tiles lie in pieces, so the quick way for single bytes does not fit it."""
    layout = Layout("scattered", "separated", (REST, 4), (2, REST), order=(1, 3, 0, 2))
    matrix = random_matrix(7, (3, 8, 6))
    assert not np.array_equal(layout.apply(matrix), matrix)
    assert np.array_equal(layout.invert(layout.apply(matrix)), matrix)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 999))
def test_the_tile_is_the_documented_formula(rows: int, columns: int, seed: int) -> None:
    matrix = random_matrix(seed, (16 * rows, 32 * columns))
    assert np.array_equal(LAYOUTS["tile_16x16"].apply(matrix), oracle.tile_16x16(matrix))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 999))
def test_a_slice_of_whole_tiles_of_rows_commutes_with_the_tile(
    tiles: int, columns: int, seed: int
) -> None:
    layout = LAYOUTS["tile_16x16"]
    matrix = random_matrix(seed, (16 * tiles, 32 * columns))
    for first in range(tiles):
        rows = slice(16 * first, 16 * (first + 1))
        assert np.array_equal(layout.apply(matrix)[rows], layout.apply(matrix[rows]))


def test_a_slice_of_columns_does_not_commute_with_the_tile() -> None:
    layout = LAYOUTS["tile_16x16"]
    matrix = random_matrix(0, (16, 64))
    assert not np.array_equal(layout.apply(matrix)[:, :32], layout.apply(matrix[:, :32]))


@pytest.mark.parametrize("name", MOVING)
def test_shuffling_twice_is_not_shuffling_once(name: str) -> None:
    layout = LAYOUTS[name]
    matrix = random_matrix(0, (4 * layout.row_multiple(), 64))
    once = layout.apply(matrix)
    assert not np.array_equal(once, matrix)
    assert not np.array_equal(layout.apply(once), once)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_expert_is_laid_out_by_itself(name: str) -> None:
    layout = LAYOUTS[name]
    matrix = random_matrix(0, (3, 2 * layout.row_multiple(), 64))
    stored = layout.apply(matrix)
    for expert in range(3):
        assert np.array_equal(stored[expert], layout.apply(matrix[expert]))


def test_folding_experts_into_rows_is_one_shuffle_of_all_rows() -> None:
    """`e8m0_shuffle` takes `[E * rows, columns]`; the writer lays out one expert at a time."""
    layout = LAYOUTS["e8m0"]
    matrix = random_matrix(0, (4, 64, 16))
    assert layout.apply(matrix).tobytes() == layout.apply(matrix.reshape(256, 16)).tobytes()


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    st.integers(0, 700),
    st.integers(0, 700),
)
def test_runs_cover_a_range_once_and_in_order(
    radices: tuple[int, ...], start: int, stop: int
) -> None:
    size = prod(radices)
    start, stop = sorted((start % (size + 1), stop % (size + 1)))
    numbers = np.arange(size).reshape(radices)
    found: list[int] = []
    for run in runs(radices, start, stop):
        block = numbers[run.index].ravel().tolist()
        assert block == list(range(run.start, run.stop))
        found += block
    assert found == list(range(start, stop))


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MOVING if LAYOUTS[name].row_multiple() > 1])
def test_rows_that_fill_no_whole_tile_are_refused(name: str) -> None:
    layout = LAYOUTS[name]
    rows = 2 * layout.row_multiple() - 1
    for refuse in (layout.apply, layout.invert, layout.logical_view):
        with pytest.raises(NoRule, match=f"layout `{name}` cannot hold {rows} rows"):
            refuse(np.zeros((rows, 64), np.uint8))
    with pytest.raises(NoRule, match=name):
        layout.place(np.zeros((rows, 64), np.uint8), np.zeros((1, 64), np.uint8), 0)


@pytest.mark.parametrize("name", MOVING)
def test_columns_that_fill_no_whole_tile_are_refused(name: str) -> None:
    layout = LAYOUTS[name]
    columns = 2 * prod(radix for radix in layout.columns if radix != REST) - 1
    with pytest.raises(NoRule, match=f"layout `{name}` cannot hold rows of {columns} bytes"):
        layout.apply(np.zeros((2 * layout.row_multiple(), columns), np.uint8))


def test_an_unknown_layout_is_refused_by_name() -> None:
    with pytest.raises(NoRule, match="`tile_32x32` is not known") as caught:
        layout_named("tile_32x32")
    assert "tile_16x16" in caught.value.hint


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_a_layout_is_well_formed(layout: Layout) -> None:
    assert sorted(layout.order) == list(range(len(layout.rows) + len(layout.columns)))
    assert layout.rows.count(REST) == layout.columns.count(REST) == 1
    assert layout.row_pad % layout.row_multiple() == 0 or layout.row_pad == 1
    assert layout.pad_byte != 0xFF  # E8M0 NaN: NaN times a zero weight is NaN
    assert layout.row_order in {"separated", "interleaved_16", "interleaved_1"}
    assert layout.row_order == "separated" or layout.rows[0] == 2
    assert layout.aiter_call


# --- packings -----------------------------------------------------------------------------------


def test_packing_int4_after_the_tile_brings_the_bytes_of_aiter() -> None:
    """`pack_int8_to_packed_int4(shuffle_weight(x, (16, 16)))`."""
    data = array("int4_pack_after_shuffle/in")
    tiled = LAYOUTS["tile_16x16"].apply(data)
    packed = PACKINGS["int4_of_eight"].forward(tiled.reshape(len(data), -1))
    assert np.array_equal(packed.ravel(), array("int4_pack_after_shuffle/out").ravel())
    back = PACKINGS["int4_of_eight"].inverse(packed)
    assert np.array_equal(LAYOUTS["tile_16x16"].invert(back.reshape(data.shape)), data)


@given(st.integers(1, 9), st.integers(0, 999))
def test_unpacking_what_was_packed_changes_nothing(count: int, seed: int) -> None:
    packing = PACKINGS["int4_of_eight"]
    values = np.random.default_rng(seed).integers(-8, 8, (2, 8 * count), dtype=np.int8)
    packed = packing.forward(values.view(np.uint8))
    assert packed.shape == (2, 8 * count // packing.ratio)
    assert np.array_equal(packing.inverse(packed).view(np.int8), values)


def test_an_unknown_packing_is_refused_by_name() -> None:
    with pytest.raises(NoRule, match="packing `int3` is not known"):
        packing_named("int3")
