"""Tiny models in MiniMax-M3's own layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.checkpoint_models import (
    LLAMA_NAMES,
    W_NAMES,
    Model,
    Sizes,
    attention,
    common_config,
    experts,
    mlp,
    norm,
    top,
)
from conformance.checkpoint_schemes import Scheme
from conformance.checkpoint_values import Named, Values


def _minimax_m3_layer(
    values: Values, scheme: Scheme, path: str, layer: int, sizes: Sizes
) -> Iterator[Named]:
    linear, hidden = scheme.linear, sizes.hidden
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield norm(values, f"{path}.{name}", hidden)
    block = f"{path}.self_attn"
    yield from attention(values, block, hidden, (8, 4, 64), linear)
    yield norm(values, f"{block}.q_norm", 64)
    yield norm(values, f"{block}.k_norm", 64)
    if not layer:
        yield from mlp(values, linear, f"{path}.mlp", (hidden, 256), LLAMA_NAMES)
        return
    yield from linear(values, f"{block}.index_q_proj", 4 * 64, hidden)
    yield from linear(values, f"{block}.index_k_proj", 64, hidden)
    yield norm(values, f"{block}.index_q_norm", 64)
    yield norm(values, f"{block}.index_k_norm", 64)
    moe = f"{path}.block_sparse_moe"
    yield f"{moe}.gate.weight", values.f32(sizes.experts, hidden)
    yield f"{moe}.e_score_correction_bias", values.f32(sizes.experts)
    yield from experts(values, linear, f"{moe}.experts", sizes, W_NAMES)
    shared = (hidden, sizes.intermediate)
    yield from mlp(values, linear, f"{moe}.shared_experts", shared, LLAMA_NAMES)


_MINIMAX_KEPT = [
    "lm_head",
    "model.embed_tokens",
    "block_sparse_moe.gate",
    "vision_tower",
    "multi_modal_projector",
    "patch_merge_mlp",
]


_MINIMAX_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "image_size": 56,
    "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
    "intermediate_size": 128,
    "layer_norm_eps": 1e-05,
    "num_attention_heads": 4,
    "num_channels": 3,
    "num_hidden_layers": 0,
    "patch_size": 14,
}
"""A vision tower without layers: the engine builds one even for text."""


def minimax_m3(values: Values, scheme: Scheme, sizes: Sizes) -> Model:
    """MiniMax-M3's text part: layer 0 dense, the others sparse."""
    tensors = dict(top(values, sizes.hidden, "language_model."))
    for layer in range(sizes.layers):
        path = f"language_model.model.layers.{layer}"
        tensors |= dict(_minimax_m3_layer(values, scheme, path, layer, sizes))
    sparse = [0] + [1] * (sizes.layers - 1)
    text = {
        **common_config(),
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3",
        "attention_output_gate": False,
        "dense_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "head_dim": 64,
        "hidden_act": "swigluoai",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "moe_intermediate_size": sizes.intermediate,
        "moe_layer_freq": sparse,
        "n_shared_experts": 1,
        "num_attention_heads": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": 4,
        "num_local_experts": sizes.experts,
        "num_mtp_modules": 0,
        "partial_rotary_factor": 0.5,
        "qk_norm_type": "per_head",
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": sizes.intermediate,
        "sparse_attention_config": {
            "sparse_attention_freq": sparse,
            "sparse_block_size": 128,
            "sparse_disable_index_value": sparse,
            "sparse_index_dim": 64,
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_num_index_heads": 4,
            "sparse_score_type": "max",
            "sparse_topk_blocks": 16,
            "use_sparse_attention": True,
        },
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }
    config = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": text,
        "projector_hidden_size": sizes.hidden,
        "vision_config": _MINIMAX_VISION,
        "quantization_config": scheme.config_for(_MINIMAX_KEPT),
    }
    return tensors, config
