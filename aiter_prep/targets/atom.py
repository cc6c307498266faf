"""ATOM (ROCm/ATOM at ffdf3bb, 2026-08-22): what its expert layers hold after loading.

Every entry mirrors atom/model_ops/moe.py; docs/targets.md says which were held to ATOM's own code,
and which to an oracle.
"""

from __future__ import annotations

from dataclasses import replace

from aiter_prep.targets.forms import (
    BIAS,
    E8M0,
    E8M0_DTYPE,
    E8M0_INTERLEAVED,
    FP4_WEIGHT,
    FP8_WEIGHT,
    GFX942,
    GFX950,
    HALF_WEIGHT,
    TILE_INTERLEAVED,
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


def _mx(weight: Form, layouts: tuple[str, str], scale: Form, **more: Form) -> dict[str, Form]:
    return {"weight": replace(weight, layouts=layouts), "weight_scale": scale, **more}


def _both_orders(path: WeightPath, **more: Form) -> tuple[WeightPath, WeightPath]:
    """Return a path for each order of the rows: ATOM_MOE_GU_ITLV is 0 by default."""
    separated = _mx(FP4_WEIGHT, FP4_WEIGHT.layouts, e8m0_scale(E8M0, "uint8", name=_NAME), **more)
    scale = e8m0_scale(E8M0_INTERLEAVED, "uint8", name=_NAME)
    interleaved = _mx(FP4_WEIGHT, TILE_INTERLEAVED, scale, **more)
    by_16 = {**path.when, "gate_up": frozenset({"interleaved"})}
    return (
        replace(path, forms=separated, when={**path.when, "gate_up": SEPARATED}),
        replace(path, forms=interleaved, when=by_16, row_order="interleaved_16"),
    )


_INPUT_SCALE = fp8_tensor_forms(GFX950, among_parts="last")["input_scale"]

_MXFP4 = (
    *_both_orders(  # models/deepseek_v4.py and kimi_k3.py: pad_align=128
        WeightPath(
            scheme="mxfp4",
            forms={},
            when=when(
                chip=GFX950,
                family=PER_PROJECTION,
                model=KIMI_K3 | {"deepseek_v4"},
                method=frozenset({"fp8", "deepseek_v4_fp8", "mxfp4", "quark", _CT}),
            ),
            intermediate=align_to(128),
            hidden_multiple=128,
        ),
        input_scale=_INPUT_SCALE,
    ),
    *_both_orders(
        WeightPath(
            scheme="mxfp4",
            forms={},
            when=when(
                chip=GFX950,
                family=PER_PROJECTION,
                model=_PADDED_TO_256,
                method=frozenset({"mxfp4", "quark"}),
            ),
            intermediate=align_to(256),
            # only gpt-oss' loader fills a part of a row that is padded
            hidden_multiple=256,
        ),
        input_scale=_INPUT_SCALE,
    ),
    *_both_orders(
        WeightPath(
            scheme="mxfp4",
            forms={},
            when=when(
                chip=GFX950,
                family=frozenset({"gpt_oss", "gpt_oss_per_expert"}),
                method=frozenset({"mxfp4", "quark"}),
            ),
            intermediate=align_to(256),
            hidden=align_to(256),
            # not in blocks of 32, as other engines cut it
            split="equal_parts",
        ),
        bias=BIAS,
        input_scale=_INPUT_SCALE,
    ),
)

_MXFP8 = WeightPath(  # Fp8MoEMethod, QuantType.per_1x32: always interleaved
    scheme="mxfp8",
    forms=_mx(FP8_WEIGHT, TILE_INTERLEAVED, e8m0_scale(E8M0_INTERLEAVED, E8M0_DTYPE, name=_NAME)),
    when=when(chip=GFX950, method=frozenset({"mxfp8", "quark"}), gate_up=INTERLEAVED),
    row_order="interleaved_16",
    intermediate=align_to(256),
    hidden_multiple=64,
)

_NO_METHOD = "ATOM does not recognise such experts from a config of this quantiser"
_REFUSALS = (
    Refusal(
        "mxfp4",
        "ATOM's mega backend keeps its experts apart from the model's parameters",
        when(moe_backend="mega"),
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
    chips=(GFX950, GFX942),
    paths=(
        WeightPath(scheme="bf16", forms={"weight": HALF_WEIGHT}),
        *_fp8(GFX950),
        *_fp8(GFX942),
        *_MXFP4,
        _MXFP8,
    ),
    refusals=_REFUSALS,
    placements=("linear",),
    even_experts=True,
)
