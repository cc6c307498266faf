"""Every layout that a target may ask for, as data."""

from __future__ import annotations

from aiter_prep.errors import NoRule
from aiter_prep.layouts.permutation import REST, Layout

_TILE = "shuffle_weight(x, (16, 16))"

# mirrors aiter/ops/shuffle.py at e404860; each entry is held to AITER's own bytes by
# tests/golden/test_layouts.py
_LAYOUTS = (
    Layout(
        name="row_major",
        row_order="separated",
        rows=(REST,),
        columns=(REST,),
        order=(0, 1),
        is_shuffled=False,
        aiter_call="x",
    ),
    Layout(
        name="tile_16x16",
        row_order="separated",
        rows=(REST, 16),
        columns=(REST, 16),
        order=(0, 2, 1, 3),
        column_multiple=32,
        aiter_call=_TILE,
    ),
    Layout(
        name="tile_16x16_interleaved_16",
        row_order="interleaved_16",
        rows=(2, REST, 16),
        columns=(REST, 16),
        order=(1, 0, 3, 2, 4),
        column_multiple=64,
        aiter_call="shuffle_weight(x, (16, 16), is_guinterleave=True, gate_up=True)",
    ),
    Layout(
        name="tile_16x16_interleaved_1",
        row_order="interleaved_1",
        rows=(2, REST, 8),
        columns=(REST, 16),
        order=(1, 3, 2, 0, 4),
        column_multiple=64,
        aiter_call="moe_shuffle_weight(x, is_guinterleave=True, gate_up=True) on gfx1250",
    ),
    Layout(
        name="e8m0",
        row_order="separated",
        rows=(REST, 2, 16),
        columns=(REST, 2, 4),
        order=(0, 3, 5, 2, 4, 1),
        row_pad=256,
        column_pad=8,
        # AITER leaves these bytes uninitialised; 0x00 is 2^-127 and never a NaN
        pad_byte=0x00,
        aiter_call="e8m0_shuffle(x)",
    ),
    Layout(
        name="e8m0_interleaved_16",
        row_order="interleaved_16",
        rows=(2, REST, 16),
        columns=(REST, 2, 4),
        order=(1, 3, 5, 2, 4, 0),
        column_pad=8,
        pad_byte=0x7F,
        aiter_call="shuffle_scale(x, experts_cnt=E, is_guinterleave=True, gate_up=True)",
    ),
    Layout(
        name="e8m0_unpadded_rows",
        row_order="separated",
        rows=(REST, 2, 16),
        columns=(REST, 2, 4),
        order=(0, 3, 5, 2, 4, 1),
        column_pad=8,
        pad_byte=0x7F,
        aiter_call="shuffle_scale(x, experts_cnt=E, is_guinterleave=True, gate_up=False)",
    ),
    Layout(
        name="e8m0_32x4",
        row_order="separated",
        rows=(REST, 32),
        columns=(REST, 4),
        order=(0, 2, 1, 3),
        aiter_call="moe_shuffle_scale(x, E, is_guinterleave=False, gate_up=True) on gfx1250",
    ),
    Layout(
        name="e8m0_32x4_interleaved_1",
        row_order="interleaved_1",
        rows=(2, REST, 16),
        columns=(REST, 4),
        order=(1, 3, 2, 0, 4),
        aiter_call="moe_shuffle_scale(x, E, is_guinterleave=True, gate_up=True) on gfx1250",
    ),
    Layout(
        name="int4_scale",
        row_order="separated",
        rows=(REST,),
        columns=(REST, 2, 2),  # pairs of groups, two bytes each
        order=(1, 0, 2, 3),
        aiter_call="shuffle_scale_for_int4(x.transpose(-1, -2))",
    ),
)

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _LAYOUTS}


def layout_named(name: str) -> Layout:
    """Return the layout of this name.

    Raises:
        NoRule: There is none.
    """
    try:
        return LAYOUTS[name]
    except KeyError:
        raise NoRule(
            f"layout `{name}` is not known", f"known layouts: {', '.join(LAYOUTS)}"
        ) from None
