"""SGLang 0.5.23 on ROCm: what its expert layers hold after loading, with SGLANG_USE_AITER=1.

Every entry mirrors the sources of SGLang 0.5.23; docs/targets.md says which were held to SGLang's
own code, and which to an oracle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

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
    as_uint8,
    e8m0_scale,
    fp8_forms,
    fp8_tensor_forms,
)
from aiter_prep.targets.model import DEFAULT, Form, Refusal, Target, WeightPath, align_to, when
from aiter_prep.targets.traits import (
    AITER_BACKEND,
    INTERLEAVED,
    KIMI_K3,
    MINIMAX_M3,
    PER_PROJECTION,
    SEPARATED,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCALE_INV = "weight_scale_inv"
_FP8_METHODS = frozenset({"fp8", "deepseek_v4_fp8"})
_SWIGLU_OAI = MINIMAX_M3 | KIMI_K3 | {"gpt_oss"}
_NOT_SITU = frozenset({"silu", "swigluoai", "swiglu", "gelu"})
_K3_NOTE = (
    "AITER 0.1.20 and later read Kimi-K3's gate and up separated for bf16 activations, SGLang "
    "0.5.23 interleaves them: it wants an older AITER"
)
_APPROXIMATE = (
    "gate and up are requantised with an exact reciprocal of the larger scale, where the GPU has "
    "an approximate one: a value midway between two FP8 numbers may round the other way"
)


def _fp8(chip: str) -> tuple[WeightPath, ...]:
    """Return the FP8 paths: quantization/fp8.py and the schemes of Quark, compressed-tensors."""
    forms = fp8_forms(chip, f32_scales=True)
    tensor = fp8_tensor_forms(chip, among_parts="last")
    in_every_row = replace(
        tensor["weight_scale"],
        shape="rows",
        merges=("larger_scale_in_every_row", "larger_scale_in_every_row"),
        name="weight_scale1",
        made_of="weight_scale",
    )
    return (
        WeightPath(
            scheme="fp8_block",
            forms={**forms, "weight_scale": replace(forms["weight_scale"], name=_SCALE_INV)},
            when=when(chip=chip, method=_FP8_METHODS, moe_backend=AITER_BACKEND),
            intermediate=align_to(128),
            hidden_multiple=128,
            split="padded_stride",
        ),
        WeightPath(
            scheme="fp8_channel",
            forms=forms,
            when=when(chip=chip, method="quark", moe_backend=AITER_BACKEND),
        ),
        WeightPath(
            scheme="fp8_channel",
            forms=forms,
            when=when(chip=chip, method="compressed-tensors", moe_backend=AITER_BACKEND),
            intermediate=align_to(128),
            split="padded_stride",
        ),
        WeightPath(
            scheme="fp8_tensor",
            forms={**tensor, "weight_scale1": in_every_row},
            when=when(chip=chip, method="fp8", moe_backend=AITER_BACKEND),
            # of a padded w13, SGLang requantises the wrong rows
            intermediate_multiple=128,
            note=_APPROXIMATE,
        ),
    )


def _mxfp4(
    weight: Form, scale_dtype: str, fill: bytes, name: str
) -> tuple[Mapping[str, Form], ...]:
    """Return the forms of MXFP4 weights, gate and up interleaved and separated."""
    bias = replace(BIAS, name="weight_bias")
    return tuple(
        {
            "weight": replace(weight, layouts=weights),
            "weight_scale": e8m0_scale(scales, scale_dtype, fill=fill, name=name),
            "bias": bias,
        }
        for weights, scales in ((TILE_INTERLEAVED, E8M0_INTERLEAVED), (weight.layouts, E8M0))
    )


_U8_WEIGHT = as_uint8(FP4_WEIGHT)
_INPUT_SCALE = fp8_tensor_forms(GFX950, among_parts="last")["input_scale"]

_V4_INTERLEAVED, _V4_SEPARATED = _mxfp4(FP4_WEIGHT, E8M0_DTYPE, b"\x00", _SCALE_INV)
# mxfp4.py makes scales of 0x7F; of gpt-oss they stay where nothing is loaded, of the others
# FusedMoE's loader makes the rest of a half zero
_GPT_OSS_INTERLEAVED, _GPT_OSS_SEPARATED = _mxfp4(_U8_WEIGHT, "uint8", b"\x7f", "")
_K3_INTERLEAVED, _K3_SEPARATED = _mxfp4(_U8_WEIGHT, "uint8", b"\x00", "")
_W4A4 = {"weight": _U8_WEIGHT, "weight_scale": e8m0_scale(E8M0, "uint8", shape="matrices")}
_W4A8_INTERLEAVED, _W4A8_SEPARATED = (
    {**forms, "input_scale": _INPUT_SCALE} for forms in _mxfp4(_U8_WEIGHT, "uint8", b"\x01", "")
)


def _either(
    interleaved: Mapping[str, Form],
    separated: Mapping[str, Form],
    path: WeightPath,
) -> tuple[WeightPath, WeightPath]:
    """Return a path for each order of the rows: SGLANG_USE_AITER_MOE_GU_ITLV is 1 by default."""
    by_16 = {**path.when, "gate_up": INTERLEAVED}
    apart = {**path.when, "gate_up": frozenset({"separated"})}
    return (
        replace(path, forms=interleaved, when=by_16, row_order="interleaved_16"),
        replace(path, forms=separated, when=apart),
    )


def _kimi_k3(methods: frozenset[str], *, hidden_multiple: int) -> tuple[WeightPath, WeightPath]:
    """Return Kimi-K3's paths: AITER_SITUV2_A4W4=1 is fp4, AITER_SITUV2_A8W4=1 is fp8."""
    path = WeightPath(
        scheme="mxfp4",
        forms=_K3_INTERLEAVED,
        when=when(
            chip=GFX950,
            family=PER_PROJECTION,
            method=methods,
            activation="situ",
            activation_dtype=frozenset({DEFAULT, "bf16", "fp8"}),
            gate_up=INTERLEAVED,
            moe_backend=AITER_BACKEND,
        ),
        row_order="interleaved_16",
        intermediate=align_to(256),
        hidden_multiple=hidden_multiple,
        note=_K3_NOTE,
    )
    a4w4 = {"activation_dtype": frozenset({"fp4"}), "gate_up": SEPARATED}
    forms = _W4A4 if "quark" in methods else _K3_SEPARATED
    separated = replace(
        path, forms=forms, when={**path.when, **a4w4}, row_order="separated", note=""
    )
    return path, separated


_MXFP4 = (
    # fp8.py, process_weights_after_loading_block_quant, FP4 experts
    *_either(
        _V4_INTERLEAVED,
        _V4_SEPARATED,
        WeightPath(
            scheme="mxfp4",
            forms={},
            when=when(
                chip=GFX950,
                method=_FP8_METHODS,
                family=PER_PROJECTION,
                moe_backend=AITER_BACKEND,
            ),
            intermediate=align_to(128),
        ),
    ),
    # mxfp4.py, gpt-oss
    *_either(
        _GPT_OSS_INTERLEAVED,
        _GPT_OSS_SEPARATED,
        WeightPath(
            scheme="mxfp4",
            forms={},
            when=when(chip=GFX950, family="gpt_oss", moe_backend=AITER_BACKEND),
            intermediate=align_to(256),
            hidden=align_to(256),
        ),
    ),
    # quark_w4a8_mxfp4_moe.py
    *_either(
        _W4A8_INTERLEAVED,
        _W4A8_SEPARATED,
        WeightPath(
            scheme="mxfp4",
            forms={},
            when=when(
                chip=GFX950,
                family="gpt_oss_per_expert",
                method="quark",
                inputs="fp8_static",
                moe_backend=AITER_BACKEND,
            ),
            intermediate=align_to(256),
            hidden=align_to(256),
        ),
    ),
    *_kimi_k3(frozenset({"compressed-tensors", "mxfp4"}), hidden_multiple=256),
    *_kimi_k3(frozenset({"quark"}), hidden_multiple=32),
    # quark_w4a4_mxfp4_moe.py: every rank's equal chunk is padded, scales keep three axes
    WeightPath(
        scheme="mxfp4",
        forms=_W4A4,
        when=when(
            chip=GFX950,
            family=PER_PROJECTION,
            method="quark",
            activation=_NOT_SITU,
            inputs="fp4",
            moe_backend=AITER_BACKEND,
        ),
        intermediate=align_to(256),
    ),
)

_MXFP8 = WeightPath(  # fp8.py, _process_mxfp8_moe_weights
    scheme="mxfp8",
    forms={
        "weight": replace(FP8_WEIGHT, layouts=TILE_INTERLEAVED),
        "weight_scale": e8m0_scale(("e8m0_interleaved_16", "e8m0"), "uint8", name=_SCALE_INV),
    },
    when=when(
        chip=GFX950,
        model=MINIMAX_M3,
        method=frozenset({"mxfp8", "modelopt"}),
        moe_backend="aiter",
    ),
    row_order="interleaved_16",
    # weights would be padded to it, their scales not
    intermediate_multiple=128,
    hidden_multiple=64,
)


def _refuse(
    scheme: str, reason: str, *, otherwise: bool = False, **traits: str | frozenset[str]
) -> Refusal:
    return Refusal(scheme, reason, when(**traits), otherwise)


_TRITON = "SGLang runs these experts with Triton, which reads them as they are"
_REFUSALS = (
    _refuse(
        "bf16",
        "SGLang runs experts with SwiGLU-OAI or SiTU, which AITER's bf16 kernels do not know, with "
        "Triton",
        chip=GFX950,
        model=_SWIGLU_OAI,
    ),
    *(
        _refuse(scheme, _TRITON, method=method)
        for scheme, method in (
            ("fp8_block", "compressed-tensors"),
            ("fp8_tensor", frozenset({"compressed-tensors", "modelopt", "quark"})),
            ("int4", "compressed-tensors"),
        )
    ),
    _refuse(
        "fp8_block", "SGLang knows Quark's FP8 per tensor and per channel only", method="quark"
    ),
    _refuse(
        "mxfp8",
        "gfx942 has no MX matrix instructions: SGLang quantises the experts again in blocks of "
        "128 x 128, which loses precision",
        chip=GFX942,
    ),
    _refuse(
        "mxfp8",
        "SGLang runs MXFP8 experts with Triton unless its --moe-runner-backend is aiter; then use "
        "--moe-backend aiter",
        chip=GFX950,
        method=frozenset({"mxfp8", "modelopt"}),
        moe_backend=frozenset({DEFAULT, "auto"}),
    ),
    _refuse("mxfp8", "SGLang knows no such experts of its own", method="quark"),
    _refuse("mxfp8", "SGLang knows no such experts of its own", method="compressed-tensors"),
    _refuse("mxfp4", "gfx942 has no MX matrix instructions", chip=GFX942),
    _refuse(
        "mxfp4",
        "SGLang 0.5.23 de-interleaves rows of gate and up which are not interleaved, which looks "
        "like a bug of the engine",
        otherwise=True,
        method="mxfp4",
        family=PER_PROJECTION,
    ),
    _refuse(
        "mxfp4",
        "SGLang has no kernel of AITER's for compressed-tensors MXFP4, but for Kimi-K3",
        otherwise=True,
        method="compressed-tensors",
    ),
    _refuse(
        "mxfp4",
        "SGLang adds biases that the checkpoint has not, and computes with gpt-oss's activation",
        method="quark",
        inputs="fp8_static",
        family=PER_PROJECTION,
    ),
    _refuse(
        "mxfp4",
        "SGLang's loader of gpt-oss finds no place for the biases",
        method="quark",
        inputs="fp4",
        family="gpt_oss_per_expert",
    ),
    _refuse(
        "mxfp4",
        "of Quark's MXFP4, SGLang knows FP4 and static FP8 activations only",
        otherwise=True,
        method="quark",
    ),
    _refuse(
        "int4_fp8",
        "SGLang makes such experts from bf16 ones while it loads, or from names of its own",
    ),
)

TARGET = Target(
    name="sglang@0.5.23",
    aliases=("sglang",),
    engine="sglang",
    engine_version="0.5.23",
    chips=(GFX950, GFX942),
    paths=(
        WeightPath(  # unquant.py
            scheme="bf16",
            forms={"weight": HALF_WEIGHT},
            when=when(moe_backend=AITER_BACKEND),
            # at other sizes SGLang runs Triton, on weights as they are
            intermediate_multiple=128,
        ),
        *_fp8(GFX950),
        *_fp8(GFX942),
        *_MXFP4,
        _MXFP8,
    ),
    refusals=_REFUSALS,
    placements=("linear",),
    even_experts=True,
)
