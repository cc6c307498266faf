"""The table of everything that SGLang and ATOM can load with AITER: one entry for each path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from families_table import (
    CT_CHANNEL,
    CT_TENSOR,
    FAMILIES,
    FP4_INPUTS,
    FP8_INPUTS,
    model,
    quark,
)
from tiny_families import Experts, Family


@dataclass(frozen=True)
class EnginePath:
    """One way through an engine.

    Attributes:
        family: the checkpoint.
        ranks: the numbers of ranks to try.
        gfx: the chip.
        environment: what the engine's environment says.
        backend: what SGLang's --moe-runner-backend says.
        options: what the product is told to choose the same path.
        expert_parallel: whether ranks share experts instead of columns.
        flagged: whether the engine leaves AITER's flag on the weights.
        unflagged: modules of another scheme, on whose weights it leaves none all the same.
    """

    family: Family
    ranks: tuple[int, ...] = (1, 2)
    gfx: str = "gfx950"
    environment: Mapping[str, str] = field(default_factory=dict)
    backend: str = "auto"
    options: Mapping[str, str] = field(default_factory=dict)
    expert_parallel: bool = False
    flagged: bool = True
    unflagged: tuple[str, ...] = ()


def _known(name: str, **changes: object) -> Family:
    return replace(FAMILIES[name], **changes)  # type: ignore[arg-type]


def _gpt_oss(kind: str = "gpt_oss", scheme: str = "mxfp4", **more: object) -> Family:
    family = Family(
        model("gpt_oss", "num_local_experts", swiglu_limit=7.0),
        (Experts("model.layers.0.mlp.experts", scheme, fused=kind),),
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        hidden=288,
        intermediate=288,
    )
    return replace(family, **more)  # type: ignore[arg-type]


_GPT_OSS_W4A8 = _gpt_oss(
    "gpt_oss_quark", "mxfp4_static", quantization=quark(FP8_INPUTS), intermediate=320
)
_CT_STATIC = _known("mixtral-llm-compressor", quantization=CT_TENSOR)
_K3_QUARK = _known(
    "kimi_k3",
    quantization=quark(FP4_INPUTS),
    modules=(
        Experts(
            "language_model.model.layers.1.block_sparse_moe.experts", "mxfp4", ("w1", "w3", "w2")
        ),
    ),
)
_WIDE = {"intermediate": 512}
_APART = {"SGLANG_USE_AITER_MOE_GU_ITLV": "0"}
_SEPARATED = {"gate_up": "separated"}
_ATOM_BY_16 = {"ATOM_MOE_GU_ITLV": "1"}
_INTERLEAVED = {"gate_up": "interleaved"}

SGLANG_PATHS: dict[str, EnginePath] = {
    "bf16": EnginePath(_known("qwen3_next"), flagged=False),
    "bf16_gfx942": EnginePath(_known("mixtral"), gfx="gfx942", flagged=False),
    "bf16_ep": EnginePath(_known("mixtral"), (2, 4), expert_parallel=True, flagged=False),
    "fp8_block": EnginePath(_known("deepseek_v3", **_WIDE), (1, 2, 4)),
    "fp8_block_bf16_scale": EnginePath(_known("qwen3_moe-fp8")),
    "fp8_block_padded": EnginePath(_known("deepseek_v3", intermediate=384), (2, 4)),
    "fp8_block_gfx942": EnginePath(_known("minimax_m2"), gfx="gfx942"),
    "fp8_block_padded_gfx942": EnginePath(
        _known("deepseek_v3", intermediate=384), (2, 4), gfx="gfx942"
    ),
    "fp8_block_ep": EnginePath(_known("deepseek_v3"), (2, 4), expert_parallel=True),
    "fp8_block_v4": EnginePath(_known("deepseek_v4-fp8")),
    "fp8_tensor": EnginePath(_known("qwen3_moe-fp8-per-tensor"), flagged=False),
    "fp8_tensor_gfx942": EnginePath(
        _known("qwen3_moe-fp8-per-tensor"), gfx="gfx942", flagged=False
    ),
    "fp8_tensor_static": EnginePath(
        _known(
            "qwen3_moe-modelopt-fp8",
            hf_quant_config=None,
            quantization={"quant_method": "fp8", "activation_scheme": "static"},
        ),
        flagged=False,
    ),
    "quark_ptpc": EnginePath(_known("qwen3_moe-quark-ptpc")),
    "quark_ptpc_gfx942": EnginePath(_known("qwen3_moe-quark-ptpc"), gfx="gfx942"),
    "ct_channel": EnginePath(_known("glm4_moe-fp8"), flagged=False),
    "ct_channel_padded": EnginePath(
        _known("glm4_moe-fp8", intermediate=352), (1, 2, 4), flagged=False
    ),
    "ct_channel_gfx942": EnginePath(
        _known("glm4_moe-fp8", intermediate=352), gfx="gfx942", flagged=False
    ),
    "mxfp8": EnginePath(
        _known("minimax_m3-mxfp8"), backend="aiter", options={"moe_backend": "aiter"}
    ),
    "deepseek_v4": EnginePath(_known("deepseek_v4"), (1, 2, 4)),
    "deepseek_v4_separated": EnginePath(
        _known("deepseek_v4"), environment=_APART, options=_SEPARATED
    ),
    "deepseek_v41": EnginePath(_known("deepseek_v41")),
    "gpt_oss": EnginePath(_gpt_oss(), (1, 2, 4)),
    "gpt_oss_separated": EnginePath(_gpt_oss(), environment=_APART, options=_SEPARATED),
    "gpt_oss_ep": EnginePath(_gpt_oss(), (2,), expert_parallel=True),
    "gpt_oss_quark_w4a8": EnginePath(_GPT_OSS_W4A8, (1, 2)),
    "gpt_oss_quark_w4a8_separated": EnginePath(
        _GPT_OSS_W4A8, environment=_APART, options=_SEPARATED
    ),
    "kimi_k3": EnginePath(_known("kimi_k3")),
    "kimi_k3_a8w4": EnginePath(
        _known("kimi_k3"),
        environment={"AITER_SITUV2_A8W4": "1"},
        options={"activation_dtype": "fp8"},
    ),
    "kimi_k3_a4w4": EnginePath(
        _known("kimi_k3"),
        environment={"AITER_SITUV2_A4W4": "1"},
        options={"activation_dtype": "fp4"},
    ),
    "quark_mxfp4": EnginePath(
        _known("deepseek_v3-quark-mxfp4", **_WIDE),
        (1, 2, 4),
        unflagged=("model.layers.2.mlp.experts",),  # in BF16
    ),
    "kimi_k3_quark": EnginePath(_K3_QUARK),
    "kimi_k3_quark_a4w4": EnginePath(
        _K3_QUARK,
        environment={"AITER_SITUV2_A4W4": "1"},
        options={"activation_dtype": "fp4"},
    ),
    "quark_mxfp4_ep": EnginePath(
        _known("kimi_k25-quark", intermediate=320), (2, 4), expert_parallel=True
    ),
    "bf16_gfx1250": EnginePath(_known("mixtral"), gfx="gfx1250", flagged=False),
    "fp8_block_gfx1250": EnginePath(_known("deepseek_v3"), gfx="gfx1250"),
    "fp8_tensor_gfx1250": EnginePath(
        _known("qwen3_moe-fp8-per-tensor"), gfx="gfx1250", flagged=False
    ),
    "quark_ptpc_gfx1250": EnginePath(_known("qwen3_moe-quark-ptpc"), gfx="gfx1250"),
    "ct_channel_gfx1250": EnginePath(_known("glm4_moe-fp8"), gfx="gfx1250", flagged=False),
    "deepseek_v4_gfx1250": EnginePath(_known("deepseek_v4"), gfx="gfx1250"),
    "deepseek_v4_separated_gfx1250": EnginePath(
        _known("deepseek_v4"), gfx="gfx1250", environment=_APART, options=_SEPARATED
    ),
    "quark_mxfp4_gfx1250": EnginePath(_known("kimi_k25-quark"), gfx="gfx1250"),
    "quark_mixed": EnginePath(_known("qwen3_moe-quark-mixed-other-way")),
}

ATOM_PATHS: dict[str, EnginePath] = {
    "bf16": EnginePath(_known("qwen3_next")),
    "bf16_ep": EnginePath(_known("mixtral"), (2,), expert_parallel=True),
    "bf16_gfx942": EnginePath(_known("mixtral", intermediate=192), gfx="gfx942"),
    "fp8_block": EnginePath(_known("deepseek_v3", **_WIDE), (1, 2, 4)),
    "fp8_block_gfx942": EnginePath(_known("minimax_m2"), gfx="gfx942"),
    "fp8_block_v4": EnginePath(_known("deepseek_v4-fp8")),
    "ct_block": EnginePath(_known("qwen3_moe-ct-block"), flagged=False),
    "quark_ptpc": EnginePath(_known("qwen3_moe-quark-ptpc")),
    "quark_ptpc_gfx942": EnginePath(_known("qwen3_moe-quark-ptpc"), gfx="gfx942"),
    "ct_channel": EnginePath(
        _known("glm4_moe-fp8", quantization=CT_CHANNEL, intermediate=320), flagged=False
    ),
    "ct_channel_gfx942": EnginePath(_known("glm4_moe-fp8"), gfx="gfx942", flagged=False),
    "ct_tensor": EnginePath(_CT_STATIC, flagged=False),
    "ct_tensor_gfx942": EnginePath(_CT_STATIC, gfx="gfx942", flagged=False),
    "mxfp8": EnginePath(_known("minimax_m3-mxfp8", intermediate=320)),
    "deepseek_v4": EnginePath(_known("deepseek_v4"), (1, 2, 4)),
    "deepseek_v4_interleaved": EnginePath(
        _known("deepseek_v4"), environment=_ATOM_BY_16, options=_INTERLEAVED
    ),
    "kimi_k3": EnginePath(_known("kimi_k3")),
    "kimi_k3_interleaved": EnginePath(
        _known("kimi_k3"), environment=_ATOM_BY_16, options=_INTERLEAVED
    ),
    "gpt_oss": EnginePath(_gpt_oss(intermediate=320), (1, 2)),
    "gpt_oss_interleaved": EnginePath(
        _gpt_oss(intermediate=320), environment=_ATOM_BY_16, options=_INTERLEAVED
    ),
    "gpt_oss_ep": EnginePath(_gpt_oss(), (2,), expert_parallel=True),
    "gpt_oss_quark_w4a4": EnginePath(
        _gpt_oss("gpt_oss_quark", quantization=quark(FP4_INPUTS), intermediate=320)
    ),
    "gpt_oss_quark_w4a8": EnginePath(_GPT_OSS_W4A8),
    "quark_mxfp4": EnginePath(_known("deepseek_v3-quark-mxfp4"), (1, 2, 4)),
    "quark_mxfp4_interleaved": EnginePath(
        _known("kimi_k25-quark"), environment=_ATOM_BY_16, options=_INTERLEAVED
    ),
    "quark_mxfp4_ep": EnginePath(_known("kimi_k25-quark"), (2,), expert_parallel=True),
    "bf16_gfx1250": EnginePath(_known("mixtral"), gfx="gfx1250"),
    "fp8_block_gfx1250": EnginePath(_known("deepseek_v3"), gfx="gfx1250"),
    "quark_ptpc_gfx1250": EnginePath(_known("qwen3_moe-quark-ptpc"), gfx="gfx1250"),
    "ct_channel_gfx1250": EnginePath(_known("glm4_moe-fp8"), gfx="gfx1250", flagged=False),
    "ct_tensor_gfx1250": EnginePath(_CT_STATIC, gfx="gfx1250", flagged=False),
    "mxfp8_gfx1250": EnginePath(_known("minimax_m3-mxfp8"), gfx="gfx1250"),
    "deepseek_v4_gfx1250": EnginePath(_known("deepseek_v4"), gfx="gfx1250"),
    "deepseek_v4_interleaved_gfx1250": EnginePath(
        _known("deepseek_v4"), gfx="gfx1250", environment=_ATOM_BY_16, options=_INTERLEAVED
    ),
    "gpt_oss_gfx1250": EnginePath(_gpt_oss(intermediate=320), gfx="gfx1250"),
    "quark_mxfp4_gfx1250": EnginePath(_known("kimi_k25-quark"), gfx="gfx1250"),
    "quark_mxfp4_interleaved_gfx1250": EnginePath(
        _known("kimi_k25-quark"),
        gfx="gfx1250",
        environment=_ATOM_BY_16,
        options=_INTERLEAVED,
    ),
}
