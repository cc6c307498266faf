"""ATOM (ROCm/ATOM at ffdf3bb, 2026-08-22): what its expert layers hold after loading.

Every entry mirrors atom/model_ops/moe.py; docs/targets.md says which were held to ATOM's own code,
and which to an oracle.
"""

from __future__ import annotations

from dataclasses import replace

from aiter_prep.targets.forms import (
    BIAS,
    E8M0,
    E8M0_32X4,
    E8M0_32X4_INTERLEAVED,
    E8M0_DTYPE,
    E8M0_INTERLEAVED,
    FP4_WEIGHT,
    FP8_WEIGHT,
    GFX942,
    GFX950,
    GFX1250,
    HALF_WEIGHT,
    TILE,
    TILE_INTERLEAVED,
    TILE_INTERLEAVED_1,
    e8m0_scale,
    fp8_forms,
    fp8_tensor_forms,
)
from aiter_prep.targets.model import (
    Form,
    Refusal,
    Target,
    WeightPath,
    align_to,
    when,
)
from aiter_prep.targets.traits import (
    INTERLEAVED,
    KIMI_K3,
    MINIMAX_M3,
    PER_PROJECTION,
    SEPARATED,
)

# ATOM's loader calls every scale so: model_loader/weight_names.py
_NAME = "weight_scale"
_CT = "compressed-tensors"
_GPT_OSS = frozenset({"gpt_oss", "gpt_oss_per_expert"})
# model_engine/model_runner.py: the models whose experts are padded to 256, the default
_PADDED_TO_256 = MINIMAX_M3 | {
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm_moe_dsa",
    "kimi_k2",
    "kimi_k25",
    "mimo_v2",
    "mimo_v2_flash",
    "minimax_m2",
    "mixtral",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
}
_BLOCK_METHODS = frozenset({"fp8", "deepseek_v4_fp8", "quark", _CT})


def _fp8(chip: str) -> tuple[WeightPath, ...]:
    """Return the FP8 paths: Fp8MoEMethod and CompressedTensorsFp8MoEMethod."""
    forms = fp8_forms(chip, f32_scales=True)
    named = replace(forms["weight_scale"], name=_NAME)
    tensor = fp8_tensor_forms(chip, among_parts="last")
    requantise = f"{tensor['weight'].merges[0]}_f32"
    return (
        WeightPath(
            scheme="fp8_block",
            forms={**forms, "weight_scale": named},
            when=when(chip=chip, method=_BLOCK_METHODS),
            intermediate_multiple=128,
            hidden_multiple=128,
        ),
        WeightPath(
            scheme="fp8_channel",
            forms={**forms, "weight_scale": replace(named, shape="rows")},
            when=when(chip=chip, method="quark"),
        ),
        WeightPath(scheme="fp8_channel", forms=forms, when=when(chip=chip, method=_CT)),
        WeightPath(
            scheme="fp8_tensor",
            forms={
                "weight": replace(tensor["weight"], merges=(requantise, "")),
                "weight_scale": tensor["weight_scale"],
            },
            when=when(chip=chip, method=_CT),
        ),
    )


_INPUT_SCALE = fp8_tensor_forms(GFX950, among_parts="last")["input_scale"]
_BY_16 = frozenset({"interleaved"})


def _mx(weight: Form, layouts: tuple[str, str], scale: Form, **more: Form) -> dict[str, Form]:
    return {"weight": replace(weight, layouts=layouts), "weight_scale": scale, **more}


def _separated(chip: str, weight: Form, **more: Form) -> dict[str, Form]:
    if chip == GFX1250:
        scale = e8m0_scale(E8M0_32X4, "uint8", name=_NAME, shape="row_blocks")
        return _mx(weight, TILE, scale, **more)
    return _mx(weight, TILE, e8m0_scale(E8M0, "uint8", name=_NAME), **more)


def _interleaved(chip: str, weight: Form, scale_dtype: str, **more: Form) -> dict[str, Form]:
    if chip == GFX1250:
        scale = e8m0_scale(E8M0_32X4_INTERLEAVED, "uint8", name=_NAME, shape="row_blocks")
        return _mx(weight, TILE_INTERLEAVED_1, scale, **more)
    scale = e8m0_scale(E8M0_INTERLEAVED, scale_dtype, name=_NAME)
    return _mx(weight, TILE_INTERLEAVED, scale, **more)


def _row_order(chip: str) -> str:
    return "interleaved_1" if chip == GFX1250 else "interleaved_16"


def _mxfp4(chip: str) -> tuple[WeightPath, ...]:
    """Return the paths of Mxfp4MoEMethod, in both orders of rows: ATOM_MOE_GU_ITLV is 0."""
    padded_to_128 = WeightPath(  # models/deepseek_v4.py and kimi_k3.py: pad_align=128
        scheme="mxfp4",
        forms=_separated(chip, FP4_WEIGHT, input_scale=_INPUT_SCALE),
        when=when(
            chip=chip,
            family=PER_PROJECTION,
            model=KIMI_K3 | {"deepseek_v4"},
            method=frozenset({"fp8", "deepseek_v4_fp8", "mxfp4", "quark", _CT}),
            gate_up=SEPARATED,
        ),
        intermediate=align_to(128),
        hidden_multiple=128,
    )
    padded_to_256 = replace(
        padded_to_128,
        when={
            **padded_to_128.when,
            "model": _PADDED_TO_256,
            "method": frozenset({"mxfp4", "quark"}),
        },
        intermediate=align_to(256),
        # only gpt-oss' loader fills a part of a row that is padded
        hidden_multiple=256,
    )
    gpt_oss = WeightPath(
        scheme="mxfp4",
        forms=_separated(chip, FP4_WEIGHT, bias=BIAS, input_scale=_INPUT_SCALE),
        when=when(
            chip=chip,
            family=_GPT_OSS,
            method=frozenset({"mxfp4", "quark"}),
            gate_up=SEPARATED,
        ),
        intermediate=align_to(256),
        hidden=align_to(256),
        # not in blocks of 32, as other engines cut it
        split="equal_parts",
    )
    # on gfx1250 the rows of a bias would be interleaved, too
    orders = (padded_to_128, padded_to_256, *((gpt_oss,) if chip != GFX1250 else ()))
    return (
        padded_to_128,
        padded_to_256,
        gpt_oss,
        *(
            replace(
                path,
                forms={
                    **path.forms,
                    **_interleaved(chip, FP4_WEIGHT, "uint8"),
                },
                when={**path.when, "gate_up": _BY_16},
                row_order=_row_order(chip),
            )
            for path in orders
        ),
    )


def _mxfp8(chip: str) -> WeightPath:
    """Return the path of Fp8MoEMethod with QuantType.per_1x32: always interleaved."""
    return WeightPath(
        scheme="mxfp8",
        forms=_interleaved(chip, FP8_WEIGHT, E8M0_DTYPE),
        when=when(chip=chip, method=frozenset({"mxfp8", "quark"}), gate_up=INTERLEAVED),
        row_order=_row_order(chip),
        intermediate=align_to(256),
        hidden_multiple=128 if chip == GFX1250 else 64,
    )


_NO_METHOD = "ATOM does not recognise such experts from a config of this quantiser"
_REFUSALS = (
    Refusal(
        "mxfp4",
        "ATOM's mega backend keeps its experts apart from the model's parameters",
        when(moe_backend="mega"),
    ),
    Refusal(
        "mxfp4",
        "on gfx1250 ATOM interleaves the rows of biases, too, which is not in the table",
        when(chip=GFX1250, family=_GPT_OSS, gate_up="interleaved"),
    ),
    Refusal("mxfp4", "on gfx942 ATOM rearranges MXFP4 experts for Triton", when(chip=GFX942)),
    Refusal("mxfp8", "gfx942 has no MX matrix instructions", when(chip=GFX942)),
    Refusal(
        "mxfp4",
        "ATOM has no such model",
        when(method=frozenset({"fp8", "deepseek_v4_fp8", "mxfp4", "quark"})),
        otherwise=True,
    ),
    Refusal(
        "mxfp4",
        "ATOM knows packed compressed-tensors experts of Kimi-K3 only",
        when(method=_CT),
        otherwise=True,
    ),
    Refusal(
        "mxfp8",
        "ATOM reads the bytes of the scales as numbers, which looks like a bug of the engine",
        when(method=_CT),
    ),
    Refusal("mxfp8", _NO_METHOD, when(method="modelopt")),
    Refusal("fp8_block", _NO_METHOD, when(method="modelopt")),
    Refusal(
        "fp8_tensor",
        "ATOM hands F32 values and no FP8 type to AITER's quantiser, which takes neither: that "
        "looks like a bug of the engine",
        when(method=frozenset({"fp8", "modelopt", "quark"})),
    ),
    Refusal("int4", "ATOM has no int4 experts"),
    Refusal("int4_fp8", "ATOM has no int4 experts"),
)

TARGET = Target(
    name="atom@2026-08-22",
    aliases=("atom",),
    engine="atom",
    engine_version="ffdf3bb of 2026-08-22",
    chips=(GFX950, GFX942, GFX1250),
    paths=(
        WeightPath(scheme="bf16", forms={"weight": HALF_WEIGHT}),
        *_fp8(GFX950),
        *_fp8(GFX942),
        *_fp8(GFX1250),
        *_mxfp4(GFX950),
        *_mxfp4(GFX1250),
        _mxfp8(GFX950),
        _mxfp8(GFX1250),
    ),
    refusals=_REFUSALS,
    placements=("linear",),
    even_experts=True,
)
