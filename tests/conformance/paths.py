"""The table of everything that vLLM can load with AITER: one entry for each path and size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from conformance.checkpoint_deepseek import deepseek_v3, deepseek_v4, deepseek_v41
from conformance.checkpoint_kimi import kimi_k3
from conformance.checkpoint_minimax import minimax_m3
from conformance.checkpoint_models import Model, Sizes, gpt_oss, mixtral, qwen3_moe
from conformance.checkpoint_schemes import Scheme
from conformance.checkpoint_values import Values

Build = Callable[[Values, Scheme, Sizes], Model]


@dataclass(frozen=True)
class ConformancePath:
    """One way through the engine.

    Attributes:
        build: makes the model.
        scheme: the name of the experts' scheme.
        sizes: the sizes that matter.
        tps: the numbers of ranks to try.
        gfx: the chip.
        engine_args: what the engine is told, by `EngineArgs` name.
        environment: what the engine's environment says.
        convert: what the product is told to choose the same path.
        refused: whether the product refuses the checkpoint for this target, on purpose.
        expert_parallel: whether ranks share experts instead of columns.
        backend: the backend that the engine must choose, where it is not the scheme's usual one.
    """

    build: Build
    scheme: str
    sizes: Sizes = field(default_factory=Sizes)
    tps: tuple[int, ...] = (1, 2, 4)
    gfx: str = "gfx950"
    engine_args: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    convert: tuple[str, ...] = ()
    refused: bool = False
    expert_parallel: bool = False
    backend: str = ""

    @property
    def chosen(self) -> str:
        """The method and the backend that the engine must choose."""
        own = f"{self.build.__name__} {self.scheme}"
        method, usual = _CHOSEN.get(own, _CHOSEN[self.scheme]).split()
        return f"{method} {self.backend or usual}"


_AITER = {"moe_backend": "aiter"}
_SMALL = Sizes(intermediate=384)
_NARROW = Sizes(intermediate=352)
_SIX = Sizes(experts=6)
_TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0}}
_K3 = Sizes(intermediate=1024, layers=2)
_ODD = Sizes(hidden=320, intermediate=384, experts=3)
_ODD_K3 = Sizes(hidden=384, intermediate=768, experts=3)
"""Sizes whose folded scale rows are no multiple of 256."""


_FP8 = "Fp8MoeBackend.AITER"
_MXFP8 = "Fp8MoeBackend.AITER_MXFP8"
_A16W4 = "Mxfp4MoeBackend.AITER_MXFP4_BF16"
_A4W4 = "Mxfp4MoeBackend.AITER_MXFP4_MXFP4"

_CHOSEN = {
    "bf16": "UnquantizedFusedMoEMethod UnquantizedMoeBackend.AITER",
    "fp8_block": f"Fp8MoEMethod {_FP8}",
    "fp8_block_bf16_scale": f"Fp8MoEMethod {_FP8}",
    "fp8_tensor": f"Fp8MoEMethod {_FP8}",
    "fp8_tensor_static": f"Fp8MoEMethod {_FP8}",
    "deepseek_v4_fp8": f"Fp8MoEMethod {_FP8}",
    "modelopt_fp8": f"ModelOptFp8MoEMethod {_FP8}",
    "quark_fp8_block": f"QuarkW8A8Fp8MoEMethod {_FP8}",
    "quark_fp8_tensor": f"QuarkW8A8Fp8MoEMethod {_FP8}",
    "quark_ptpc_fp8": f"QuarkW8A8Fp8MoEMethod {_FP8}",
    "ct_fp8_block": f"CompressedTensorsW8A8Fp8MoEMethod {_FP8}",
    "ct_fp8_channel": f"CompressedTensorsW8A8Fp8MoEMethod {_FP8}",
    "ct_fp8_tensor_static": f"CompressedTensorsW8A8Fp8MoEMethod {_FP8}",
    "quark_int4_fp8": "QuarkW4A8Fp8MoEMethod None",
    "mxfp8": f"ModelOptMxFp8FusedMoE {_MXFP8}",
    "ct_mxfp8": f"CompressedTensorsW8A8Mxfp8MoEMethod {_MXFP8}",
    "quark_mxfp8": f"QuarkW8A8Mxfp8MoEMethod {_MXFP8}",
    "mxfp4": f"Mxfp4MoEMethod {_A16W4}",
    "gpt_oss mxfp4": f"GptOssMxfp4MoEMethod {_A16W4}",
    "deepseek_v4_fp4": f"Mxfp4MoEMethod {_A16W4}",
    "kimi_k3_mxfp4": f"Mxfp4MoEMethod {_A16W4}",
    "ct_mxfp4_fp8": f"CompressedTensorsW4A8Mxfp4MoEMethod {_A16W4}",
    "quark_mxfp4": f"QuarkOCP_MX_MoEMethod {_A4W4}",
    "quark_mxfp4_weight_only": f"QuarkOCP_MX_MoEMethod {_A16W4}",
    "ct_int4": "CompressedTensorsW4A16FlydslMoEMethod None",
}
"""The engine's method and backend for each scheme, of one model alone where it differs."""


def _qwen(scheme: str, **more: Any) -> ConformancePath:
    return ConformancePath(qwen3_moe, scheme, **more)


def _fused(build: Build, scheme: str, tps: tuple[int, ...], **more: Any) -> ConformancePath:
    variables = {"VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS": "1"}
    convert = ("--fuse-shared-experts",)
    return ConformancePath(build, scheme, tps=tps, environment=variables, convert=convert, **more)


PATHS: dict[str, ConformancePath] = {
    # unquantised
    "bf16": _qwen("bf16"),
    "bf16_i352": _qwen("bf16", sizes=_NARROW),
    "bf16_i400": _qwen("bf16", sizes=Sizes(intermediate=400)),
    "bf16_mixtral": ConformancePath(mixtral, "bf16", sizes=_NARROW),
    "bf16_gfx942": _qwen("bf16", sizes=_NARROW, gfx="gfx942"),
    "bf16_ep": _qwen("bf16", sizes=_SIX, tps=(2, 4), expert_parallel=True),
    # FP8 in blocks
    "fp8_block": _qwen("fp8_block"),
    "fp8_block_bf16_scale": _qwen("fp8_block_bf16_scale"),
    "fp8_block_mixtral": ConformancePath(mixtral, "fp8_block"),
    "fp8_block_gfx942": _qwen("fp8_block", gfx="gfx942"),
    "fp8_block_padded": _qwen(
        "fp8_block",
        sizes=_SMALL,
        tps=(2, 4),
        engine_args=_AITER,
        convert=("--moe-backend", "aiter"),
    ),
    "fp8_block_padded_gfx942": _qwen(
        "fp8_block",
        sizes=_SMALL,
        tps=(2, 4),
        gfx="gfx942",
        engine_args=_AITER,
        convert=("--moe-backend", "aiter"),
    ),
    "fp8_block_padded_gfx1250": _qwen(
        "fp8_block",
        sizes=_SMALL,
        tps=(2,),
        gfx="gfx1250",
        engine_args=_AITER,
        convert=("--moe-backend", "aiter"),
    ),
    "fp8_block_ep": _qwen("fp8_block", sizes=_SIX, tps=(2, 4), expert_parallel=True),
    "quark_fp8_block": _qwen("quark_fp8_block"),
    "ct_fp8_block": _qwen("ct_fp8_block"),
    **{
        f"{scheme}_aiter{suffix}": _qwen(
            scheme,
            tps=(2,),
            gfx=gfx,
            engine_args=_AITER,
            convert=("--moe-backend", "aiter"),
        )
        for scheme, suffix, gfx in (
            ("quark_fp8_block", "", "gfx950"),
            ("ct_fp8_block", "_gfx942", "gfx942"),
            ("ct_fp8_block", "_gfx1250", "gfx1250"),
        )
    },
    "deepseek_v4_fp8": ConformancePath(deepseek_v4, "deepseek_v4_fp8"),
    "deepseek_v3_fp8": ConformancePath(deepseek_v3, "fp8_block"),
    # shared experts appended to the routed ones
    "deepseek_v3_fp8_fused": _fused(deepseek_v3, "fp8_block", (1, 2, 4)),
    "deepseek_v3_bf16_fused": _fused(deepseek_v3, "bf16", (2,), sizes=_NARROW),
    "deepseek_v3_fp8_two_fused": _fused(
        deepseek_v3, "fp8_block", (2,), sizes=Sizes(shared=2), refused=True
    ),
    "minimax_m3_mxfp8_fused": _fused(minimax_m3, "mxfp8", (1, 2)),
    # FP8 with one scale a tensor
    "fp8_tensor": _qwen("fp8_tensor"),
    "fp8_tensor_static": _qwen("fp8_tensor_static"),
    "fp8_tensor_gfx942": _qwen("fp8_tensor", gfx="gfx942"),
    "fp8_tensor_static_gfx942": _qwen("fp8_tensor_static", gfx="gfx942"),
    "modelopt_fp8": _qwen("modelopt_fp8"),
    "modelopt_fp8_gfx942": _qwen("modelopt_fp8", gfx="gfx942", refused=True),
    "quark_fp8_tensor": _qwen("quark_fp8_tensor"),
    "ct_fp8_tensor_static": _qwen("ct_fp8_tensor_static"),
    "ct_fp8_tensor_static_gfx942": _qwen("ct_fp8_tensor_static", tps=(2,), gfx="gfx942"),
    "ct_fp8_tensor_static_gfx1250": _qwen("ct_fp8_tensor_static", tps=(2,), gfx="gfx1250"),
    # FP8 with one scale a row
    "quark_ptpc_fp8": _qwen("quark_ptpc_fp8"),
    "quark_ptpc_fp8_gfx942": _qwen("quark_ptpc_fp8", gfx="gfx942"),
    "ct_fp8_channel": _qwen("ct_fp8_channel"),
    "ct_fp8_channel_gfx942": _qwen("ct_fp8_channel", gfx="gfx942"),
    # int4 expanded to FP8
    "quark_int4_fp8": _qwen("quark_int4_fp8", sizes=Sizes(intermediate=1024)),
    "quark_int4_fp8_gfx942": _qwen("quark_int4_fp8", sizes=Sizes(intermediate=1024), gfx="gfx942"),
    # MXFP8
    "minimax_m3_mxfp8": ConformancePath(minimax_m3, "mxfp8"),
    "ct_mxfp8": _qwen("ct_mxfp8"),
    "quark_mxfp8": _qwen("quark_mxfp8"),
    "ct_mxfp8_e3": _qwen("ct_mxfp8", sizes=_ODD, tps=(1, 2)),
    # MXFP4, DeepSeek-V4
    "deepseek_v4": ConformancePath(deepseek_v4, "deepseek_v4_fp4"),
    "deepseek_v4_i768": ConformancePath(
        deepseek_v4, "deepseek_v4_fp4", sizes=Sizes(intermediate=768), tps=(1, 2)
    ),
    "deepseek_v4_h384": ConformancePath(
        deepseek_v4, "deepseek_v4_fp4", sizes=Sizes(hidden=384, intermediate=256), tps=(1, 2)
    ),
    "deepseek_v4_ep": ConformancePath(
        deepseek_v4, "deepseek_v4_fp4", tps=(2, 4), expert_parallel=True
    ),
    "deepseek_v41": ConformancePath(deepseek_v41, "deepseek_v4_fp4", engine_args=_TEXT_ONLY),
    "deepseek_v41_i576": ConformancePath(
        deepseek_v41,
        "deepseek_v4_fp4",
        sizes=Sizes(intermediate=576),
        tps=(1, 2),
        engine_args=_TEXT_ONLY,
    ),
    "deepseek_v41_a4w4": ConformancePath(
        deepseek_v41,
        "deepseek_v4_fp4",
        engine_args=_TEXT_ONLY,
        environment={"VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": "1"},
        convert=("--activation-dtype", "fp4"),
    ),
    "deepseek_v41_a4w4_e3": ConformancePath(
        deepseek_v41,
        "deepseek_v4_fp4",
        sizes=Sizes(hidden=384, intermediate=576, experts=3),
        tps=(1,),
        engine_args=_TEXT_ONLY,
        environment={"VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": "1"},
        convert=("--activation-dtype", "fp4"),
    ),
    # MXFP4, Kimi-K3
    "kimi_k3": ConformancePath(kimi_k3, "kimi_k3_mxfp4", sizes=_K3, engine_args=_TEXT_ONLY),
    "kimi_k3_e3": ConformancePath(
        kimi_k3, "kimi_k3_mxfp4", sizes=_ODD_K3, tps=(1, 2), engine_args=_TEXT_ONLY
    ),
    "kimi_k3_a16w4": ConformancePath(
        kimi_k3,
        "kimi_k3_mxfp4",
        sizes=_K3,
        engine_args=_TEXT_ONLY,
        environment={"VLLM_ROCM_USE_AITER_MOE_SITUV2": "0"},
        convert=("--activation-dtype", "bf16"),
    ),
    "kimi_k3_a8w4": ConformancePath(
        kimi_k3,
        "kimi_k3_mxfp4",
        sizes=_K3,
        engine_args=_TEXT_ONLY,
        environment={"VLLM_ROCM_USE_AITER_MOE_SITUV2": "a8w4"},
        convert=("--activation-dtype", "fp8"),
    ),
    "kimi_k3_int4_gfx942": ConformancePath(
        kimi_k3,
        "kimi_k3_mxfp4",
        sizes=_K3,
        gfx="gfx942",
        engine_args={"quantization_config": {"moe": {"weight": "int4_per_group_32"}}},
        refused=True,
    ),
    # MXFP4, gpt-oss
    "gpt_oss": ConformancePath(gpt_oss, "mxfp4"),
    "gpt_oss_i288": ConformancePath(gpt_oss, "mxfp4", sizes=Sizes(hidden=288, intermediate=288)),
    "gpt_oss_ep": ConformancePath(gpt_oss, "mxfp4", tps=(2,), expert_parallel=True),
    "gpt_oss_w4a4": ConformancePath(
        gpt_oss,
        "mxfp4",
        engine_args={"quantization_config": {"moe": {"activation": "mxfp4"}}},
        convert=("--activation-dtype", "fp4"),
        backend="Mxfp4MoeBackend.AITER_MXFP4_MXFP4",
    ),
    "gpt_oss_quark_w4a4": ConformancePath(gpt_oss, "quark_mxfp4"),
    "gpt_oss_quark_w4a16": ConformancePath(gpt_oss, "quark_mxfp4_weight_only"),
    # MXFP4, Quark, compressed-tensors
    "quark_mxfp4": _qwen("quark_mxfp4"),
    "quark_mxfp4_i384": _qwen("quark_mxfp4", sizes=_SMALL),
    "quark_mxfp4_ep": _qwen("quark_mxfp4", sizes=_SIX, tps=(2, 4), expert_parallel=True),
    "quark_mxfp4_weight_only": _qwen("quark_mxfp4_weight_only", refused=True),
    "mxfp4": _qwen("mxfp4"),
    "ct_mxfp4_fp8": _qwen("ct_mxfp4_fp8"),
    # int4
    "ct_int4_flydsl": _qwen(
        "ct_int4",
        engine_args={"moe_backend": "flydsl"},
        convert=("--moe-backend", "flydsl"),
    ),
    # a chip whose FP4 experts stay with Triton
    "bf16_gfx1250": _qwen("bf16", sizes=_NARROW, gfx="gfx1250"),
    "fp8_tensor_gfx1250": _qwen("fp8_tensor", tps=(2,), gfx="gfx1250"),
    "fp8_block_gfx1250": _qwen("fp8_block", gfx="gfx1250"),
    "quark_ptpc_fp8_gfx1250": _qwen("quark_ptpc_fp8", gfx="gfx1250"),
    "ct_mxfp8_gfx1250": _qwen("ct_mxfp8", gfx="gfx1250"),
}
