"""Forms that more than one target uses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aiter_prep.targets.model import Form

if TYPE_CHECKING:
    from collections.abc import Mapping

GFX942, GFX950, GFX1250 = "gfx942", "gfx950", "gfx1250"

TILE = ("tile_16x16", "tile_16x16")
TILE_INTERLEAVED = ("tile_16x16_interleaved_16", "tile_16x16")
PLAIN = ("row_major", "row_major")
E8M0_DTYPE = "float8_e8m0fnu"
E8M0 = ("e8m0", "e8m0")
E8M0_INTERLEAVED = ("e8m0_interleaved_16", "e8m0_unpadded_rows")

_SAME_FLOATS = {
    "F32": ("F32", "float32", ""),
    "BF16": ("BF16", "bfloat16", ""),
    "F16": ("F16", "float16", ""),
}
_TO_F32 = {
    "F32": ("F32", "float32", ""),
    "BF16": ("F32", "float32", "bf16_to_f32"),
    "F16": ("F32", "float32", "f16_to_f32"),
    "F8_E8M0": ("F32", "float32", "e8m0_to_f32"),
}
_DOUBLED = {
    "F32": ("F32", "float32", "f32_times_2"),
    "BF16": ("BF16", "bfloat16", "bf16_times_2"),
    "F16": ("F16", "float16", "f16_times_2"),
}
_DOUBLED_TO_F32 = {
    "F32": ("F32", "float32", "f32_times_2"),
    "BF16": ("F32", "float32", "bf16_to_f32_times_2"),
    "F16": ("F32", "float32", "f16_to_f32_times_2"),
    "F8_E8M0": ("F32", "float32", "e8m0_to_f32_times_2"),
}

HALF_WEIGHT = Form(TILE, {"BF16": ("BF16", "bfloat16", ""), "F16": ("F16", "float16", "")})
FP8_WEIGHT = Form(TILE, {"F8_E4M3": ("F8_E4M3", "float8_e4m3fn", "")})
FNUZ_WEIGHT = Form(TILE, {"F8_E4M3": ("U8", "float8_e4m3fnuz", "e4m3fn_to_e4m3fnuz")})
FP4_WEIGHT = Form(
    TILE, {"U8": ("U8", "float4_e2m1fn_x2", ""), "I8": ("U8", "float4_e2m1fn_x2", "")}
)
FLOAT_SCALE = Form(PLAIN, _SAME_FLOATS)
F32_SCALE = Form(PLAIN, _TO_F32)
BIAS = Form(PLAIN, _TO_F32, shape="rows")
SOURCE_BIAS = Form(PLAIN, _SAME_FLOATS, shape="rows")


def as_uint8(form: Form) -> Form:
    """Return a form whose tensor the engine holds as plain bytes, and views only when it runs."""
    dtypes = {source: (kept, "uint8", change) for source, (kept, _, change) in form.dtypes.items()}
    return replace(form, dtypes=dtypes)


def e8m0_scale(layouts: tuple[str, str], runtime_dtype: str, **more: object) -> Form:
    """Return the form of e8m0 scales, experts folded into rows."""
    dtypes = {"U8": ("U8", runtime_dtype, ""), "F8_E8M0": ("U8", runtime_dtype, "")}
    form = Form(layouts, dtypes, shape="folded")
    return replace(form, **more)  # type: ignore[arg-type]


def fp8_forms(chip: str, *, f32_scales: bool) -> Mapping[str, Form]:
    """Return the forms of FP8 weights with scales that are not shuffled.

    gfx942 knows e4m3fnuz only: its bytes mean half of e4m3fn's, so scales are doubled.
    """
    if chip == GFX942:
        scales = _DOUBLED_TO_F32 if f32_scales else _DOUBLED
        return {"weight": FNUZ_WEIGHT, "weight_scale": Form(PLAIN, scales)}
    return {"weight": FP8_WEIGHT, "weight_scale": F32_SCALE if f32_scales else FLOAT_SCALE}


def fp8_tensor_forms(chip: str, *, among_parts: str) -> Mapping[str, Form]:
    """Return the forms of FP8 weights with one scale a tensor: gate and up share the larger."""
    fnuz = chip == GFX942
    weight = FNUZ_WEIGHT if fnuz else FP8_WEIGHT
    scales = _DOUBLED_TO_F32 if fnuz else _TO_F32
    requantise = "requantise_e4m3fnuz" if fnuz else "requantise_e4m3fn"
    return {
        "weight": replace(weight, merges=(requantise, "")),
        "weight_scale": Form(PLAIN, scales, shape="values", merges=("larger_scale", "")),
        "input_scale": Form(PLAIN, scales, shape="scalar", among_parts=among_parts),
    }
