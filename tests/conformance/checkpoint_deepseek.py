"""Tiny models in DeepSeek-V3's, V4's and V4.1's own layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.checkpoint_models import (
    LLAMA_NAMES,
    VOCABULARY,
    W_NAMES,
    Model,
    Sizes,
    common_config,
    experts,
    mlp,
    norm,
    top,
)
from conformance.checkpoint_schemes import Linear, Scheme, fp8_block_linear
from conformance.checkpoint_values import Named, Values

_HEADS, _HEAD, _RANK, _GROUPS = 8, 128, 128, 4
_HYPER = 4
"""Attention heads, their width, both low ranks, output groups; hyper-connection streams."""


def _hyper(values: Values, path: str, hidden: int, rows: int) -> Iterator[Named]:
    yield f"{path}_fn", values.f32(rows, _HYPER * hidden)
    yield f"{path}_base", values.f32(rows)


def _deepseek_v4_attention(
    values: Values, linear: Linear, path: str, hidden: int
) -> Iterator[Named]:
    yield f"{path}.attn_sink", values.f32(_HEADS)
    yield from linear(values, f"{path}.wq_a", _RANK, hidden)
    yield norm(values, f"{path}.q_norm", _RANK)
    yield from linear(values, f"{path}.wq_b", _HEADS * _HEAD, _RANK)
    yield from linear(values, f"{path}.wkv", _HEAD, hidden)
    yield norm(values, f"{path}.kv_norm", _HEAD)
    yield from linear(values, f"{path}.wo_a", _GROUPS * _RANK, _HEADS * _HEAD // _GROUPS)
    yield from linear(values, f"{path}.wo_b", hidden, _GROUPS * _RANK)


def _deepseek_v4_layer(
    values: Values, scheme: Scheme, dense: Linear, path: str, sizes: Sizes
) -> Iterator[Named]:
    mix = (2 + _HYPER) * _HYPER
    for part in ("attn", "ffn"):
        yield norm(values, f"{path}.{part}_norm", sizes.hidden)
        yield from _hyper(values, f"{path}.hc_{part}", sizes.hidden, mix)
        yield f"{path}.hc_{part}_scale", values.f32(3)
    yield from _deepseek_v4_attention(values, dense, f"{path}.attn", sizes.hidden)
    yield f"{path}.ffn.gate.weight", values.bf16(sizes.experts, sizes.hidden)
    yield f"{path}.ffn.gate.bias", values.f32(sizes.experts)
    yield from experts(values, scheme.linear, f"{path}.ffn.experts", sizes, W_NAMES)
    shared = (sizes.hidden, sizes.intermediate)
    yield from mlp(values, dense, f"{path}.ffn.shared_experts", shared, W_NAMES)


def _deepseek_v4_tensors(
    values: Values, scheme: Scheme, dense: Linear, sizes: Sizes
) -> Iterator[Named]:
    yield "embed.weight", values.bf16(VOCABULARY, sizes.hidden)
    yield "head.weight", values.bf16(VOCABULARY, sizes.hidden)
    yield norm(values, "norm", sizes.hidden)
    for layer in range(sizes.layers):
        yield from _deepseek_v4_layer(values, scheme, dense, f"layers.{layer}", sizes)


def _deepseek_v4_config(sizes: Sizes) -> dict[str, Any]:
    return {
        **common_config(),
        "attention_bias": False,
        "hc_eps": 1e-06,
        "hc_mult": _HYPER,
        "hc_sinkhorn_iters": 20,
        "head_dim": _HEAD,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk": 16,
        "moe_intermediate_size": sizes.intermediate,
        "n_routed_experts": sizes.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": _HEADS,
        "num_experts_per_tok": 2,
        "num_hash_layers": 0,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "o_groups": _GROUPS,
        "o_lora_rank": _RANK,
        "q_lora_rank": _RANK,
        "qk_rope_head_dim": 64,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "topk_method": "noaux_tc",
        "compress_rope_theta": 160000,
        "compress_ratios": [0] * sizes.layers,
    }


def _deepseek_fp8(block: int) -> dict[str, Any]:
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [block, block],
    }


def deepseek_v4(values: Values, scheme: Scheme, sizes: Sizes) -> Model:
    """DeepSeek-V4 in its own names; the shared expert is as wide as a routed one.

    The scheme's `expert_dtype` says how the experts are stored: packed FP4, or FP8 in blocks with
    float scales everywhere.
    """
    four = scheme.config is not None and scheme.config["expert_dtype"] == "fp4"
    dense = fp8_block_linear("scale", "F8_E8M0" if four else "F32")
    config = {
        **_deepseek_v4_config(sizes),
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "expert_dtype": "fp4" if four else "fp8",
        "quantization_config": _deepseek_fp8(128),
    }
    return dict(_deepseek_v4_tensors(values, scheme, dense, sizes)), config


def deepseek_v41(values: Values, scheme: Scheme, sizes: Sizes) -> Model:
    """DeepSeek-V4.1: a nested config, dense linears in blocks of 32, no vision tower loaded."""
    dense = fp8_block_linear("scale", "F8_E8M0", block=32)
    text = {
        **_deepseek_v4_config(sizes),
        "model_type": "deepseek_v41_text",
        "kv_source_layer_ids": [sizes.layers],
        "index_source_layer_ids": [],
    }
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": "bfloat16",
        "expert_dtype": "fp4",
        "text_config": text,
        "vision_config": {},
        "quantization_config": _deepseek_fp8(32),
    }
    return dict(_deepseek_v4_tensors(values, scheme, dense, sizes)), config


# DeepSeek-V3: latent attention whose sizes suit FP8 blocks on up to four ranks.
_MLA = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}


def _mla(values: Values, linear: Linear, path: str, hidden: int) -> Iterator[Named]:
    q, kv, nope, rope, v = _MLA.values()
    shapes = {
        "q_a_proj": (q, hidden),
        "q_b_proj": (_HEADS * (nope + rope), q),
        "kv_a_proj_with_mqa": (kv + rope, hidden),
        "kv_b_proj": (_HEADS * (nope + v), kv),
        "o_proj": (hidden, _HEADS * v),
    }
    for name, (out, width) in shapes.items():
        yield from linear(values, f"{path}.{name}", out, width)
    yield norm(values, f"{path}.q_a_layernorm", q)
    yield norm(values, f"{path}.kv_a_layernorm", kv)


def _deepseek_v3_layer(
    values: Values, scheme: Scheme, path: str, layer: int, sizes: Sizes
) -> Iterator[Named]:
    linear, hidden = scheme.linear, sizes.hidden
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield norm(values, f"{path}.{name}", hidden)
    yield from _mla(values, linear, f"{path}.self_attn", hidden)
    block = f"{path}.mlp"
    if not layer:
        yield from mlp(values, linear, block, (hidden, 512), LLAMA_NAMES)
        return
    yield f"{block}.gate.weight", values.bf16(sizes.experts, hidden)
    yield f"{block}.gate.e_score_correction_bias", values.f32(sizes.experts)
    yield from experts(values, linear, f"{block}.experts", sizes, LLAMA_NAMES)
    shared = (hidden, sizes.intermediate * sizes.shared)
    yield from mlp(values, linear, f"{block}.shared_experts", shared, LLAMA_NAMES)


def deepseek_v3(values: Values, scheme: Scheme, sizes: Sizes) -> Model:
    """DeepSeek-V3: layer 0 dense, then experts with shared ones."""
    tensors = dict(top(values, sizes.hidden))
    for layer in range(sizes.layers):
        path = f"model.layers.{layer}"
        tensors |= dict(_deepseek_v3_layer(values, scheme, path, layer, sizes))
    config = {
        **common_config(),
        **_MLA,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": 512,
        "moe_intermediate_size": sizes.intermediate,
        "moe_layer_freq": 1,
        "n_group": 2,
        "n_routed_experts": sizes.experts,
        "n_shared_experts": sizes.shared,
        "norm_topk_prob": True,
        "num_attention_heads": _HEADS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": _HEADS,
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
    }
    found = scheme.config_for([])
    return tensors, config if found is None else {**config, "quantization_config": found}
