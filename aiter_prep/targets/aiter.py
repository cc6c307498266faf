"""AITER's own contract: what its kernels' test scripts feed them."""

from __future__ import annotations

from aiter_prep.targets.forms import (
    BIAS,
    E8M0,
    FP4_WEIGHT,
    FP8_WEIGHT,
    GFX942,
    GFX950,
    HALF_WEIGHT,
    e8m0_scale,
    fp8_forms,
    fp8_tensor_forms,
)
from aiter_prep.targets.model import Alignment, Refusal, Target, WeightPath, align_to

# mirrors vllm/model_executor/layers/fused_moe/oracle/unquantized.py::
# aiter_moe_intermediate_alignment (0.33): AITER's bf16 kernels come in these sizes
BF16_INTERMEDIATE = Alignment(((192, 64), (None, 128)))


def _for_chip(chip: str) -> tuple[WeightPath, ...]:
    """Return the paths whose bytes depend on the chip's FP8 format."""
    when = {"chip": frozenset({chip})}
    forms = {**fp8_forms(chip, f32_scales=False), "bias": BIAS}
    return (
        WeightPath(
            scheme="fp8_block",
            forms=forms,
            when=when,
            intermediate_multiple=128,
            hidden_multiple=128,
        ),
        WeightPath(scheme="fp8_channel", forms=forms, when=when),
        WeightPath(
            scheme="fp8_tensor", forms=fp8_tensor_forms(chip, among_parts="largest"), when=when
        ),
    )


def _mx(chip: str, note: str) -> tuple[WeightPath, ...]:
    """Return the paths of MX weights."""
    scale = e8m0_scale(E8M0, "float8_e8m0fnu")
    when = {"chip": frozenset({chip})}
    return (
        WeightPath(
            scheme="mxfp8",
            forms={"weight": FP8_WEIGHT, "weight_scale": scale, "bias": BIAS},
            when=when,
            intermediate_multiple=32,
            hidden_multiple=32,
            note=note,
        ),
        WeightPath(
            scheme="mxfp4",
            forms={"weight": FP4_WEIGHT, "weight_scale": scale, "bias": BIAS},
            when=when,
            # fp4 stage 2 is silently wrong at other sizes: ROCm/aiter issue 5233
            intermediate=align_to(256),
            hidden=align_to(256),
            intermediate_multiple=32,
            hidden_multiple=32,
            note=note,
        ),
    )


TARGET = Target(
    name="aiter",
    aliases=(),
    engine="aiter",
    engine_version="0.1.2 to 0.1.20",
    chips=(GFX950, GFX942),
    paths=(
        WeightPath(
            scheme="bf16",
            forms={"weight": HALF_WEIGHT, "bias": BIAS},
            intermediate=BF16_INTERMEDIATE,
        ),
        *_for_chip(GFX950),
        *_for_chip(GFX942),
        *_mx(GFX950, ""),
        *_mx(GFX942, "gfx942 has no MX matrix instructions: engines emulate MXFP4 and MXFP8 there"),
    ),
    refusals=(
        Refusal(
            "int4", "AITER's test scripts have no int4 contract of their own; use --target vllm"
        ),
        Refusal("int4_fp8", "AITER's test scripts have no contract for it; use --target vllm"),
    ),
)
