"""Tiny models in Kimi-K3's own layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.checkpoint_models import (
    LLAMA_NAMES,
    W_NAMES,
    Model,
    Sizes,
    common_config,
    experts,
    mlp,
    norm,
    top,
)
from conformance.checkpoint_schemes import Scheme, bf16_linear
from conformance.checkpoint_values import Named, Values

_LINEAR_HEADS, _LINEAR_HEAD = 8, 64
_MLA = {"q": 256, "kv": 128, "nope": 64, "rope": 64, "v": 64, "heads": 8}
_LATENT_OF = 2
"""The routed experts of Kimi-K3 work on a hidden size that is this many times smaller."""


def _kimi_mla(values: Values, path: str, hidden: int) -> Iterator[Named]:
    heads = _MLA["heads"]
    shapes = {
        "q_a_proj": (_MLA["q"], hidden),
        "q_b_proj": (heads * (_MLA["nope"] + _MLA["rope"]), _MLA["q"]),
        "kv_a_proj_with_mqa": (_MLA["kv"] + _MLA["rope"], hidden),
        "kv_b_proj": (heads * (_MLA["nope"] + _MLA["v"]), _MLA["kv"]),
        "g_proj": (heads * _MLA["v"], hidden),
        "o_proj": (hidden, heads * _MLA["v"]),
    }
    for name, (out, width) in shapes.items():
        yield from bf16_linear(values, f"{path}.{name}", out, width)
    yield norm(values, f"{path}.q_a_layernorm", _MLA["q"])
    yield norm(values, f"{path}.kv_a_layernorm", _MLA["kv"])


def _kimi_delta(values: Values, path: str, hidden: int) -> Iterator[Named]:
    width = _LINEAR_HEADS * _LINEAR_HEAD
    for name in "qkv":
        yield f"{path}.{name}_proj.weight", values.bf16(width, hidden)
        yield f"{path}.{name}_conv1d.weight", values.f32(width, 1, 4)
    yield f"{path}.f_a_proj.weight", values.bf16(_LINEAR_HEAD, hidden)
    yield f"{path}.f_b_proj.weight", values.bf16(width, _LINEAR_HEAD)
    yield f"{path}.b_proj.weight", values.bf16(_LINEAR_HEADS, hidden)
    yield f"{path}.g_proj.weight", values.bf16(width, hidden)
    yield f"{path}.A_log", values.f32(_LINEAR_HEADS)
    yield f"{path}.dt_bias", values.f32(width)
    yield f"{path}.o_norm.weight", values.f32(_LINEAR_HEAD)
    yield f"{path}.o_proj.weight", values.bf16(hidden, width)


def _kimi_moe(values: Values, scheme: Scheme, path: str, sizes: Sizes) -> Iterator[Named]:
    latent = sizes.hidden
    hidden = latent * _LATENT_OF
    yield f"{path}.gate.weight", values.bf16(sizes.experts, hidden)
    yield f"{path}.gate.e_score_correction_bias", values.f32(sizes.experts)
    yield f"{path}.routed_expert_down_proj.weight", values.bf16(latent, hidden)
    yield f"{path}.routed_expert_up_proj.weight", values.bf16(hidden, latent)
    yield f"{path}.routed_expert_norm.weight", values.bf16(latent)
    shared = f"{path}.shared_experts"
    yield from mlp(values, bf16_linear, shared, (hidden, 2 * sizes.intermediate), LLAMA_NAMES)
    yield from experts(values, scheme.linear, f"{path}.experts", sizes, W_NAMES)


def _kimi_layer(
    values: Values, scheme: Scheme, path: str, layer: int, sizes: Sizes
) -> Iterator[Named]:
    hidden = sizes.hidden * _LATENT_OF
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield norm(values, f"{path}.{name}", hidden)
    for name in ("self_attention_res", "mlp_res"):
        yield f"{path}.{name}_norm.weight", values.bf16(hidden)
        yield f"{path}.{name}_proj.weight", values.bf16(1, hidden)
    last = layer == sizes.layers - 1
    yield from (_kimi_mla if last else _kimi_delta)(values, f"{path}.self_attn", hidden)
    if layer:
        yield from _kimi_moe(values, scheme, f"{path}.block_sparse_moe", sizes)
    else:
        yield from mlp(values, bf16_linear, f"{path}.mlp", (hidden, 512), LLAMA_NAMES)


_KIMI_KEPT = [
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*routed_expert_.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
]


def kimi_k3(values: Values, scheme: Scheme, sizes: Sizes) -> Model:
    """Kimi-K3's text part: layer 0 dense, the last one full attention, experts on a latent."""
    hidden, prefix = sizes.hidden * _LATENT_OF, "language_model."
    tensors = dict(top(values, hidden, prefix))
    tensors[f"{prefix}model.output_attn_res_norm.weight"] = values.bf16(hidden)
    tensors[f"{prefix}model.output_attn_res_proj.weight"] = values.bf16(1, hidden)
    for layer in range(sizes.layers):
        path = f"{prefix}model.layers.{layer}"
        tensors |= dict(_kimi_layer(values, scheme, path, layer, sizes))
    text = {
        **common_config(),
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": hidden,
        "intermediate_size": 512,
        "kv_lora_rank": _MLA["kv"],
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": [sizes.layers],
            "gate_lower_bound": -5.0,
            "head_dim": _LINEAR_HEAD,
            "kda_layers": list(range(1, sizes.layers)),
            "num_heads": _LINEAR_HEADS,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "moe_intermediate_size": sizes.intermediate,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": _MLA["heads"],
        "num_expert_group": 1,
        "num_experts": sizes.experts,
        "num_experts_per_token": 2,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": _MLA["heads"],
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "q_lora_rank": _MLA["q"],
        "qk_nope_head_dim": _MLA["nope"],
        "qk_rope_head_dim": _MLA["rope"],
        "quantization_config": scheme.config_for(_KIMI_KEPT),
        "rope_theta": 10000.0,
        "routed_expert_hidden_size": sizes.hidden,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "v_head_dim": _MLA["v"],
    }
    config = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": _VISION,
    }
    return tensors, config


_VISION: dict[str, Any] = {
    "vt_hidden_size": 64,
    "vt_num_attention_heads": 4,
    "vt_num_hidden_layers": 2,
    "vt_intermediate_size": 128,
}
