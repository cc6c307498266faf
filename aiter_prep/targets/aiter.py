"""AITER's own contract: what its kernels' test scripts feed them."""

from __future__ import annotations

from aiter_prep.targets.model import NO_PADDING, Alignment, Form, Target, WeightPath, align_to

GFX942, GFX950 = "gfx942", "gfx950"
BOTH = frozenset({GFX942, GFX950})

_TILE = ("tile_16x16", "tile_16x16")
_E8M0 = ("e8m0", "e8m0")
_PLAIN = ("row_major", "row_major")

_HALF_WEIGHT = Form(_TILE, 0, {"BF16": ("BF16", "bfloat16", ""), "F16": ("F16", "float16", "")})
_FP8_WEIGHT = Form(_TILE, 0, {"F8_E4M3": ("F8_E4M3", "float8_e4m3fn", "")})
_FNUZ_WEIGHT = Form(_TILE, 0, {"F8_E4M3": ("U8", "float8_e4m3fnuz", "e4m3fn_to_e4m3fnuz")})
_FP4_WEIGHT = Form(
    _TILE,
    0,
    {"U8": ("U8", "float4_e2m1fn_x2", ""), "I8": ("U8", "float4_e2m1fn_x2", "")},
)
_FLOAT_SCALE = Form(
    _PLAIN,
    0,
    {
        "F32": ("F32", "float32", ""),
        "BF16": ("BF16", "bfloat16", ""),
        "F16": ("F16", "float16", ""),
    },
)
_FNUZ_SCALE = Form(
    _PLAIN,
    0,
    {
        "F32": ("F32", "float32", "f32_times_2"),
        "BF16": ("BF16", "bfloat16", "bf16_times_2"),
        "F16": ("F16", "float16", "f16_times_2"),
    },
)
# e8m0_shuffle pads with uninitialised memory; 0x00 is 2^-127, never a NaN
_E8M0_SCALE = Form(
    _E8M0,
    0,
    {"U8": ("U8", "float8_e8m0fnu", ""), "F8_E8M0": ("U8", "float8_e8m0fnu", "")},
    folded=True,
)
_BIAS = Form(_PLAIN, 0, {"BF16": ("F32", "float32", "bf16_to_f32"), "F32": ("F32", "float32", "")})

# mirrors vllm/model_executor/layers/fused_moe/oracle/unquantized.py::
# aiter_moe_intermediate_alignment (0.33): AITER's bf16 kernels come in these sizes
_BF16_INTERMEDIATE = Alignment(((192, 64), (None, 128)))

_FP8_FORMS = {
    GFX950: {"weight": _FP8_WEIGHT, "weight_scale": _FLOAT_SCALE, "bias": _BIAS},
    GFX942: {"weight": _FNUZ_WEIGHT, "weight_scale": _FNUZ_SCALE, "bias": _BIAS},
}

TARGET = Target(
    name="aiter",
    aliases=(),
    engine="aiter",
    engine_version="0.1.2 to 0.1.20",
    chips=(GFX950, GFX942),
    paths=(
        WeightPath(
            scheme="bf16",
            chips=BOTH,
            row_order="separated",
            intermediate=_BF16_INTERMEDIATE,
            hidden=NO_PADDING,
            forms={"weight": _HALF_WEIGHT, "bias": _BIAS},
        ),
        *(
            WeightPath(
                scheme="fp8_block",
                chips=frozenset({chip}),
                row_order="separated",
                intermediate=NO_PADDING,
                hidden=NO_PADDING,
                forms=forms,
                intermediate_multiple=128,
                hidden_multiple=128,
            )
            for chip, forms in _FP8_FORMS.items()
        ),
        *(
            WeightPath(
                scheme="fp8_channel",
                chips=frozenset({chip}),
                row_order="separated",
                intermediate=NO_PADDING,
                hidden=NO_PADDING,
                forms=forms,
            )
            for chip, forms in _FP8_FORMS.items()
        ),
        WeightPath(
            scheme="mxfp8",
            chips=BOTH,
            row_order="separated",
            intermediate=NO_PADDING,
            hidden=NO_PADDING,
            forms={"weight": _FP8_WEIGHT, "weight_scale": _E8M0_SCALE, "bias": _BIAS},
            intermediate_multiple=32,
            hidden_multiple=32,
        ),
        WeightPath(
            scheme="mxfp4",
            chips=BOTH,
            row_order="separated",
            # fp4 stage 2 is silently wrong at other sizes: ROCm/aiter issue 5233
            intermediate=align_to(256),
            hidden=align_to(256),
            forms={"weight": _FP4_WEIGHT, "weight_scale": _E8M0_SCALE, "bias": _BIAS},
            intermediate_multiple=32,
            hidden_multiple=32,
        ),
    ),
    refused={
        ("fp8_tensor", "*"): "w1 and w3 must be requantised to one scale, which is not built yet"
    },
)
