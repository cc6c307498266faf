"""Builds the kernel objects of an expert layer over tensors that are in their final form.

Each function does what the tail of a method's own `process_weights_after_loading` does in vLLM
0.32 and 0.33, from the quantisation config on; nothing of it touches a weight.
"""

from __future__ import annotations

import os
from typing import Any


def unquantized(method: Any, layer: Any) -> None:
    """Mirror `UnquantizedFusedMoEMethod`."""
    method._init_moe_kernel(layer)  # noqa: SLF001  # the engine's own name for exactly this
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def fp8_by_itself(method: Any, layer: Any) -> None:
    """Mirror `Fp8MoEMethod`."""
    method._init_moe_kernel(layer)  # noqa: SLF001  # the engine's own name for exactly this


def fp8(method: Any, layer: Any) -> None:
    """Mirror the FP8 methods of Quark, compressed-tensors and ModelOpt."""
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import make_fp8_moe_kernel

    backend = getattr(method, "mxfp8_backend", None) or method.fp8_backend
    method.moe_quant_config = method.get_fused_moe_quant_config(layer)
    method.moe_kernel = make_fp8_moe_kernel(
        moe_quant_config=method.moe_quant_config,
        moe_config=method.moe,
        fp8_backend=backend,
        experts_cls=method.experts_cls,
        routing_tables=layer._expert_routing_tables(),  # noqa: SLF001
    )


def mxfp8(method: Any, layer: Any) -> None:
    """Mirror the MXFP8 methods, whose kernels read the block size from the layer."""
    layer.weight_block_size = method.weight_block_size
    fp8(method, layer)


def mxfp8_of_modelopt(method: Any, layer: Any) -> None:
    """Mirror `ModelOptMxFp8FusedMoE`, which notes on the layer that it ran."""
    layer._already_called_process_weights_after_loading = True  # noqa: SLF001
    mxfp8(method, layer)


def mxfp4(method: Any, layer: Any) -> None:
    """Mirror `GptOssMxfp4MoEMethod` and `QuarkOCP_MX_MoEMethod`."""
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import make_mxfp4_moe_kernel

    method.moe_quant_config = method.get_fused_moe_quant_config(layer)
    method.moe_kernel = make_mxfp4_moe_kernel(
        moe_quant_config=method.moe_quant_config,
        moe_config=method.moe,
        mxfp4_backend=method.mxfp4_backend,
        experts_cls=method.experts_cls,
        routing_tables=layer._expert_routing_tables(),  # noqa: SLF001
    )
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def mxfp4_by_itself(method: Any, layer: Any) -> None:
    """Mirror `Mxfp4MoEMethod`, whose conversion also sets a variable that AITER reads."""
    if not method.is_k3_situ_aiter:
        # oracle/mxfp4.py: AITER chooses bf16 over fp8 activations by it
        os.environ["AITER_BF16_FP8_MOE_BOUND"] = "0"
    method._build_moe_kernel(layer)  # noqa: SLF001  # the engine's own name for exactly this


def on_first_use(method: Any, layer: Any) -> None:
    """Mirror methods without kernel objects: the quantisation config is made when it is needed."""


def flydsl(method: Any, layer: Any) -> None:  # noqa: ARG001  # every builder is called alike
    """Mirror `CompressedTensorsW4A16FlydslMoEMethod`."""
    layer.is_aiter_converted = True
