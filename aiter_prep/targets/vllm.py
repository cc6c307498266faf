"""vLLM 0.33 on ROCm: what its expert layers hold after loading, with AITER selected.

Every entry mirrors the sources of vLLM 0.33.0; docs/targets.md says which were held to vLLM's own
code, and which to an oracle.
"""

from __future__ import annotations

from dataclasses import replace

from aiter_prep.targets.aiter import BF16_INTERMEDIATE
from aiter_prep.targets.forms import (
    BIAS,
    E8M0,
    E8M0_INTERLEAVED,
    FP4_WEIGHT,
    FP8_WEIGHT,
    GFX942,
    GFX950,
    GFX1250,
    HALF_WEIGHT,
    PLAIN,
    SOURCE_BIAS,
    TILE,
    TILE_INTERLEAVED,
    e8m0_scale,
    fp8_forms,
    fp8_tensor_forms,
)
from aiter_prep.targets.model import (
    DEFAULT,
    Form,
    Refusal,
    Target,
    WeightPath,
    align_to,
    when,
)
from aiter_prep.targets.traits import (
    AITER_BACKEND,
    DEEPSEEK_V41,
    INTERLEAVED,
    KIMI_K3,
    PER_PROJECTION,
    SEPARATED,
)

_NO_MX = "gfx942 has no MX matrix instructions: vLLM emulates, and AITER shuffles nothing"


def _fp8(chip: str) -> tuple[WeightPath, ...]:
    """Return the FP8 paths: oracle/fp8.py, quantization/fp8.py and its siblings."""
    forms = fp8_forms(chip, f32_scales=True)
    # the destination of a padded load is filled with 1.0, which e4m3fnuz doubles like the rest
    one = bytes.fromhex("00000040" if chip == GFX942 else "0000803f")
    padded = {
        "weight": forms["weight"],
        "weight_scale": replace(forms["weight_scale"], fill=one),
    }
    return (
        WeightPath(
            scheme="fp8_block",
            forms=forms,
            when=when(chip=chip, moe_backend=frozenset({DEFAULT, "auto"})),
            intermediate_multiple=128,
            hidden_multiple=128,
        ),
        WeightPath(
            scheme="fp8_block",
            forms=padded,
            when=when(chip=chip, moe_backend="aiter", method="fp8"),
            intermediate=align_to(128),
            hidden_multiple=128,
            split="padded_stride",
        ),
        WeightPath(
            scheme="fp8_block",
            forms=forms,
            when=when(
                chip=chip,
                moe_backend="aiter",
                method=frozenset({"quark", "compressed-tensors", "modelopt"}),
            ),
            intermediate_multiple=128,
            hidden_multiple=128,
        ),
        WeightPath(
            scheme="fp8_channel", forms=forms, when=when(chip=chip, moe_backend=AITER_BACKEND)
        ),
        # routed_experts.py: input scales of gate and up have one place, so the later one stays, but
        # compressed-tensors stops where they differ
        *(
            WeightPath(
                scheme="fp8_tensor",
                forms=fp8_tensor_forms(chip, among_parts=among_parts),
                when=when(chip=chip, moe_backend=AITER_BACKEND, method=method),
            )
            for method, among_parts in (
                (frozenset({"fp8", "modelopt", "quark"}), "last"),
                ("compressed-tensors", "equal"),
            )
        ),
    )


_MX_WEIGHT_INTERLEAVED = replace(FP4_WEIGHT, layouts=TILE_INTERLEAVED)
_INTERLEAVED_SCALE = e8m0_scale(E8M0_INTERLEAVED, "uint8")
_A16W4 = {
    "weight": _MX_WEIGHT_INTERLEAVED,
    "weight_scale": _INTERLEAVED_SCALE,
    "bias": BIAS,
}
# Quark's parameters are made of ones, not zeros: quark_moe.py, QuarkOCP_MX_MoEMethod
_QUARK_SCALE = e8m0_scale(E8M0, "uint8", shape="matrices", fill=b"\x01")

_MXFP4 = (
    # oracle/mxfp4.py, AITER_MXFP4_BF16: DeepSeek-V4 and V4.1, `quant_method: mxfp4`, and
    # compressed-tensors with FP8 inputs
    WeightPath(
        scheme="mxfp4",
        forms=_A16W4,
        when=when(
            chip=GFX950,
            family=PER_PROJECTION,
            method=frozenset({"fp8", "deepseek_v4_fp8", "mxfp4"}),
            gate_up=INTERLEAVED,
            activation_dtype=frozenset({DEFAULT, "bf16"}),
            moe_backend=AITER_BACKEND,
        ),
        row_order="interleaved_16",
        intermediate=align_to(128),
        hidden=align_to(128),
    ),
    WeightPath(
        scheme="mxfp4",
        forms=_A16W4,
        when=when(
            chip=GFX950,
            method="compressed-tensors",
            inputs=frozenset({"fp8_dynamic", "fp8_static"}),
            moe_backend=AITER_BACKEND,
        ),
        row_order="interleaved_16",
        intermediate=align_to(128),
        hidden=align_to(128),
    ),
    # the same with VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4=1, which only V4.1 may have
    WeightPath(
        scheme="mxfp4",
        forms={"weight": FP4_WEIGHT, "weight_scale": e8m0_scale(E8M0, "uint8"), "bias": BIAS},
        when=when(
            chip=GFX950,
            model=DEEPSEEK_V41,
            activation_dtype="fp4",
            gate_up=SEPARATED,
            moe_backend=AITER_BACKEND,
        ),
        intermediate=align_to(128),
        hidden=align_to(128),
    ),
    # Kimi-K3, SiTU: VLLM_ROCM_USE_AITER_MOE_SITUV2 is auto (a4w4), 0 (a16w4) or a8w4
    WeightPath(
        scheme="mxfp4",
        forms={
            "weight": FP4_WEIGHT,
            "weight_scale": e8m0_scale(("e8m0_unpadded_rows", "e8m0"), "float8_e8m0fnu"),
        },
        when=when(
            chip=GFX950,
            model=KIMI_K3,
            activation_dtype=frozenset({DEFAULT, "fp4", "bf16"}),
            gate_up=SEPARATED,
            moe_backend=AITER_BACKEND,
        ),
        intermediate=align_to(128),
        hidden=align_to(128),
        intermediate_least=256,
    ),
    WeightPath(
        scheme="mxfp4",
        forms={
            "weight": _MX_WEIGHT_INTERLEAVED,
            "weight_scale": e8m0_scale(("e8m0_interleaved_16", "e8m0"), "float8_e8m0fnu"),
        },
        when=when(
            chip=GFX950,
            model=KIMI_K3,
            activation_dtype="fp8",
            gate_up=INTERLEAVED,
            moe_backend=AITER_BACKEND,
        ),
        row_order="interleaved_16",
        intermediate=align_to(128),
        hidden=align_to(128),
        intermediate_least=256,
    ),
    # gpt-oss: mxfp4.py, GptOssMxfp4MoEMethod
    WeightPath(
        scheme="mxfp4",
        forms=_A16W4,
        when=when(
            chip=GFX950,
            family="gpt_oss",
            activation_dtype=frozenset({DEFAULT, "bf16"}),
            gate_up=INTERLEAVED,
            moe_backend=AITER_BACKEND,
        ),
        row_order="interleaved_16",
        intermediate=align_to(256),
        hidden=align_to(256),
    ),
    WeightPath(
        scheme="mxfp4",
        forms={
            "weight": FP4_WEIGHT,
            "weight_scale": e8m0_scale(E8M0, "uint8", shape="matrices"),
            "bias": BIAS,
        },
        when=when(
            chip=GFX950,
            family="gpt_oss",
            activation_dtype="fp4",
            gate_up=DEFAULT,
            moe_backend=AITER_BACKEND,
        ),
        row_order="as_source",
        intermediate=align_to(128),
        hidden=align_to(256),
    ),
    # Quark: quark_moe.py, QuarkOCP_MX_MoEMethod
    WeightPath(
        scheme="mxfp4",
        forms={"weight": FP4_WEIGHT, "weight_scale": _QUARK_SCALE, "bias": BIAS},
        when=when(
            chip=GFX950,
            family=frozenset({"gate_up_down", "w1_w2_w3", "gpt_oss_per_expert"}),
            method="quark",
            inputs="fp4",
            moe_backend=AITER_BACKEND,
        ),
        row_order="as_source",
        intermediate=align_to(128),
        hidden=align_to(256),
    ),
    WeightPath(
        scheme="mxfp4",
        forms={
            "weight": _MX_WEIGHT_INTERLEAVED,
            "weight_scale": replace(_INTERLEAVED_SCALE, fill=b"\x01"),
            "bias": BIAS,
        },
        when=when(
            chip=GFX950,
            family="gpt_oss_per_expert",
            method="quark",
            inputs="bf16",
            moe_backend=AITER_BACKEND,
        ),
        row_order="interleaved_16",
        intermediate=align_to(256),
        hidden=align_to(256),
    ),
)

_INT4_FP8 = WeightPath(  # quark_moe.py, QuarkW4A8Fp8MoEMethod
    scheme="int4_fp8",
    forms={
        "weight": Form(TILE, {"I32": ("U32", "uint32", "")}),
        "weight_scale": Form(
            PLAIN, {"F32": ("F32", "float32", "")}, shape="values", merges=("larger_scale", "")
        ),
        "weight_scale_2": Form(
            PLAIN,
            {"F32": ("F32", "float32", "")},
            shape="rows",
            merges=("fold_scale_into_rows", "fold_scale_into_rows"),
        ),
    },
    when=when(chip=frozenset({GFX942, GFX950}), moe_backend=AITER_BACKEND),
)

_INT4 = WeightPath(  # compressed_tensors_moe_w4a16_flydsl.py
    scheme="int4",
    forms={
        "weight": Form(
            TILE,
            {"I32": ("I8", "int8", "int4_to_int8")},
            shape="flat",
            packing="int4_of_eight",
            name="weight_packed",
        ),
        "weight_scale": Form(
            ("int4_scale", "int4_scale"), {"BF16": ("BF16", "bfloat16", "")}, shape="flat"
        ),
    },
    when=when(chip=GFX950, moe_backend="flydsl", method="compressed-tensors"),
    intermediate_multiple=64,
    hidden_multiple=64,
)

_MXFP8 = WeightPath(  # oracle/mxfp8.py, experts/aiter_mxfp8_moe.py
    scheme="mxfp8",
    forms={
        "weight": replace(FP8_WEIGHT, layouts=TILE_INTERLEAVED),
        "weight_scale": e8m0_scale(("e8m0_interleaved_16", "e8m0"), "uint8"),
    },
    when=when(chip=frozenset({GFX950, GFX1250}), moe_backend=AITER_BACKEND),
    row_order="interleaved_16",
    intermediate_multiple=64,
    hidden_multiple=64,
)

TARGET = Target(
    name="vllm@0.33",
    aliases=("vllm",),
    engine="vllm",
    engine_version="0.33",
    chips=(GFX950, GFX942, GFX1250),
    paths=(
        WeightPath(
            scheme="bf16",
            forms={"weight": HALF_WEIGHT, "bias": SOURCE_BIAS},
            when=when(moe_backend=AITER_BACKEND),
            intermediate=BF16_INTERMEDIATE,
        ),
        *_fp8(GFX950),
        *_fp8(GFX942),
        *_fp8(GFX1250),
        *_MXFP4,
        _MXFP8,
        _INT4_FP8,
        _INT4,
    ),
    refusals=(
        Refusal(
            "int4",
            "vLLM runs int4 experts with Triton or emulates them, unless --moe-backend is flydsl",
            when(chip=GFX950, method="compressed-tensors"),
            otherwise=True,
        ),
        Refusal(
            "mxfp4",
            "vLLM repacks compressed-tensors MXFP4 for Marlin unless its inputs are FP8 or it is "
            "Kimi-K3's",
            when(method="compressed-tensors"),
            otherwise=True,
        ),
        Refusal("mxfp4", _NO_MX, when(chip=GFX942)),
        Refusal("mxfp8", _NO_MX, when(chip=GFX942)),
        Refusal(
            "mxfp4",
            "on gfx1250 vLLM swizzles for Triton into objects that are no plain tensors",
            when(chip=GFX1250),
        ),
        Refusal(
            "fp8_tensor",
            "vLLM 0.33 does not bring ModelOpt's FP8 experts into this chip's format, which looks "
            "like a bug of the engine",
            when(chip=GFX942, method="modelopt"),
        ),
        Refusal(
            "mxfp4",
            "vLLM 0.33 de-interleaves rows of a weight-only Quark checkpoint which are not "
            "interleaved, which looks like a bug of the engine",
            when(method="quark", inputs="bf16", family=PER_PROJECTION),
        ),
        Refusal(
            "mxfp4",
            "with static FP8 inputs vLLM swizzles for Triton into objects that are no plain "
            "tensors",
            when(method="quark", inputs=frozenset({"fp8_static", "fp8_dynamic", "other"})),
        ),
    ),
)
