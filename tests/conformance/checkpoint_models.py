"""Tiny models: for each architecture its config.json and its tensors, experts in a given scheme."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conformance.checkpoint_schemes import Linear, Scheme, bf16_linear
from conformance.checkpoint_values import Named, RawTensor, Values

VOCABULARY = 256


@dataclass(frozen=True)
class Sizes:
    """The sizes that matter to experts; the rest of a model is as small as the engine allows."""

    hidden: int = 256
    intermediate: int = 512
    experts: int = 4
    layers: int = 2
    shared: int = 1  # DeepSeek-V3's shared experts, side by side in one MLP


Model = tuple[dict[str, RawTensor], dict[str, Any]]
"""Tensors by name, and the config."""


def norm(values: Values, name: str, width: int) -> Named:
    """The weight of a norm."""
    return f"{name}.weight", values.bf16(width)


def top(values: Values, hidden: int, prefix: str = "", head: str = "lm_head") -> Iterator[Named]:
    """What a model has outside its layers."""
    yield f"{prefix}model.embed_tokens.weight", values.bf16(VOCABULARY, hidden)
    yield f"{prefix}{head}.weight", values.bf16(VOCABULARY, hidden)
    yield norm(values, f"{prefix}model.norm", hidden)


def experts(
    values: Values, linear: Linear, path: str, sizes: Sizes, names: tuple[str, str, str]
) -> Iterator[Named]:
    """Per-expert linears; `names` are those of gate, down and up."""
    gate, down, up = names
    for expert in range(sizes.experts):
        base = f"{path}.{expert}"
        yield from linear(values, f"{base}.{gate}", sizes.intermediate, sizes.hidden)
        yield from linear(values, f"{base}.{up}", sizes.intermediate, sizes.hidden)
        yield from linear(values, f"{base}.{down}", sizes.hidden, sizes.intermediate)


def attention(
    values: Values,
    path: str,
    hidden: int,
    heads: tuple[int, int, int],
    linear: Linear = bf16_linear,
) -> Iterator[Named]:
    """Grouped-query attention; `heads` are the query heads, the key heads and a head's width."""
    queries, keys, width = heads
    for name, count in (("q", queries), ("k", keys), ("v", keys)):
        yield from linear(values, f"{path}.{name}_proj", count * width, hidden)
    yield from linear(values, f"{path}.o_proj", hidden, queries * width)


def mlp(
    values: Values, linear: Linear, path: str, widths: tuple[int, int], names: tuple[str, str, str]
) -> Iterator[Named]:
    """A dense gated MLP from `hidden` to `intermediate` and back."""
    hidden, intermediate = widths
    gate, down, up = names
    yield from linear(values, f"{path}.{gate}", intermediate, hidden)
    yield from linear(values, f"{path}.{up}", intermediate, hidden)
    yield from linear(values, f"{path}.{down}", hidden, intermediate)


LLAMA_NAMES = ("gate_proj", "down_proj", "up_proj")
W_NAMES = ("w1", "w2", "w3")
"""Gate, down and up as the vendors call them."""
_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


def common_config() -> dict[str, Any]:
    """What every config.json here says."""
    return {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
    }


def _quantised(config: dict[str, Any], scheme: Scheme, kept: list[str]) -> dict[str, Any]:
    found = scheme.config_for(kept)
    return config if found is None else {**config, "quantization_config": found}


def _kept_in(sizes: Sizes, router: str) -> list[str]:
    """Names of every linear that is not an expert's, as quantisers list them."""
    projections = [f"self_attn.{name}_proj" for name in "qkvo"]
    leaves = [*projections, router]
    return ["lm_head", *(f"model.layers.{n}.{x}" for n in range(sizes.layers) for x in leaves)]


def qwen3_moe(values: Values, scheme: Scheme, sizes: Sizes) -> Model:
    """Qwen3-MoE: grouped-query attention in bf16, no shared expert."""
    tensors = dict(top(values, sizes.hidden))
    for layer in range(sizes.layers):
        base = f"model.layers.{layer}"
        tensors |= dict(norm(values, f"{base}.{n}", sizes.hidden) for n in _LAYER_NORMS)
        tensors |= dict(attention(values, f"{base}.self_attn", sizes.hidden, (8, 4, 32)))
        tensors |= dict(norm(values, f"{base}.self_attn.{n}_norm", 32) for n in "qk")
        tensors[f"{base}.mlp.gate.weight"] = values.bf16(sizes.experts, sizes.hidden)
        path = f"{base}.mlp.experts"
        tensors |= dict(experts(values, scheme.linear, path, sizes, LLAMA_NAMES))
    config = {
        **common_config(),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": 512,
        "mlp_only_layers": [],
        "moe_intermediate_size": sizes.intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": 8,
        "num_experts": sizes.experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": 4,
        "rope_theta": 10000.0,
    }
    return tensors, _quantised(config, scheme, _kept_in(sizes, "mlp.gate"))


def mixtral(values: Values, scheme: Scheme, sizes: Sizes) -> Model:
    """Mixtral: other names for the same experts."""
    tensors = dict(top(values, sizes.hidden))
    for layer in range(sizes.layers):
        base = f"model.layers.{layer}"
        tensors |= dict(norm(values, f"{base}.{n}", sizes.hidden) for n in _LAYER_NORMS)
        tensors |= dict(attention(values, f"{base}.self_attn", sizes.hidden, (8, 4, 32)))
        block = f"{base}.block_sparse_moe"
        tensors[f"{block}.gate.weight"] = values.bf16(sizes.experts, sizes.hidden)
        tensors |= dict(experts(values, scheme.linear, f"{block}.experts", sizes, W_NAMES))
    config = {
        **common_config(),
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_attention_heads": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": 4,
        "num_local_experts": sizes.experts,
        "rope_theta": 10000.0,
    }
    return tensors, _quantised(config, scheme, _kept_in(sizes, "block_sparse_moe.gate"))


def _gpt_oss_layer(values: Values, base: str, sizes: Sizes) -> Iterator[Named]:
    for name in _LAYER_NORMS:
        yield norm(values, f"{base}.{name}", sizes.hidden)
    block = f"{base}.self_attn"
    yield from attention(values, block, sizes.hidden, (8, 4, 64))
    for name, rows in (("q", 512), ("k", 256), ("v", 256), ("o", sizes.hidden)):
        yield f"{block}.{name}_proj.bias", values.bf16(rows)
    yield f"{block}.sinks", values.bf16(8)
    yield f"{base}.mlp.router.weight", values.bf16(sizes.experts, sizes.hidden)
    yield f"{base}.mlp.router.bias", values.bf16(sizes.experts)


def _gpt_oss_fused(values: Values, path: str, sizes: Sizes) -> Iterator[Named]:
    """The published form: all experts in one tensor, gate and up rows alternating."""
    shapes = {
        "gate_up_proj": (sizes.experts, 2 * sizes.intermediate, sizes.hidden // 32),
        "down_proj": (sizes.experts, sizes.hidden, sizes.intermediate // 32),
    }
    for name, shape in shapes.items():
        yield f"{path}.{name}_blocks", values.fp4("U8", *shape, 16)
        yield f"{path}.{name}_scales", values.e8m0("U8", *shape)
        yield f"{path}.{name}_bias", values.bf16(*shape[:2])


def _gpt_oss_per_expert(values: Values, linear: Linear, path: str, sizes: Sizes) -> Iterator[Named]:
    """Quark's form: one fused, still alternating gate and up linear for each expert."""
    for expert in range(sizes.experts):
        base = f"{path}.{expert}"
        rows = 2 * sizes.intermediate
        yield from linear(values, f"{base}.gate_up_proj", rows, sizes.hidden)
        yield f"{base}.gate_up_proj.bias", values.bf16(rows)
        yield from linear(values, f"{base}.down_proj", sizes.hidden, sizes.intermediate)
        yield f"{base}.down_proj.bias", values.bf16(sizes.hidden)


def gpt_oss(values: Values, scheme: Scheme, sizes: Sizes) -> Model:
    """gpt-oss: its own MXFP4 form for the scheme `mxfp4`, else one linear an expert."""
    fused = scheme.config is not None and scheme.config["quant_method"] == "mxfp4"
    tensors = dict(top(values, sizes.hidden))
    for layer in range(sizes.layers):
        base = f"model.layers.{layer}"
        tensors |= dict(_gpt_oss_layer(values, base, sizes))
        path = f"{base}.mlp.experts"
        if fused:
            tensors |= dict(_gpt_oss_fused(values, path, sizes))
        else:
            tensors |= dict(_gpt_oss_per_expert(values, scheme.linear, path, sizes))
    config = {
        **common_config(),
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "initial_context_length": 4096,
        "intermediate_size": sizes.intermediate,
        "layer_types": ["sliding_attention", "full_attention"][: sizes.layers],
        "num_attention_heads": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": 4,
        "num_local_experts": sizes.experts,
        "pad_token_id": 2,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    }
    kept = _kept_in(sizes, "mlp.router")
    if fused:
        parts = ("model.layers.*.self_attn", "model.layers.*.mlp.router")
        kept = [*parts, "model.embed_tokens", "lm_head"]
    return tensors, _quantised(config, scheme, kept)
