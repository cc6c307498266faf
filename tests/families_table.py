"""The table of families: one tiny checkpoint for each way in which a published model is stored."""

from __future__ import annotations

from typing import Any

from tiny_families import GATED, NUMBERED, Experts, Family


def model(kind: str, experts: str = "num_experts", count: int = 4, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, experts: count, **more}


def _nested(outer: str, inner: str, experts: str = "num_experts", **more: Any) -> dict[str, Any]:
    return {"model_type": outer, "text_config": {"model_type": inner, experts: 4, **more}}


def _mlp(scheme: str, layer: str = "model.layers.1", **more: Any) -> Experts:
    return Experts(f"{layer}.mlp.experts", scheme, **more)


def _sparse(scheme: str, layer: str = "model.layers.1", **more: Any) -> Experts:
    return Experts(f"{layer}.block_sparse_moe.experts", scheme, NUMBERED, **more)


def _fp8(**more: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        **more,
    }


def _quark_spec(dtype: str, qscheme: str, *, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": qscheme, "is_dynamic": dynamic, **more}


_MX: dict[str, Any] = {"group_size": 32, "scale_format": "e8m0", "ch_axis": -1}
FP4_INPUTS = {
    "weight": _quark_spec("fp4", "per_group", **_MX),
    "input_tensors": _quark_spec("fp4", "per_group", dynamic=True, **_MX),
}
FP8_INPUTS = {
    "weight": _quark_spec("fp4", "per_group", **_MX),
    "input_tensors": _quark_spec("fp8_e4m3", "per_tensor"),
}
_PTPC = {
    "weight": _quark_spec("fp8_e4m3", "per_channel", ch_axis=0),
    "input_tensors": _quark_spec("fp8_e4m3", "per_channel", dynamic=True),
}
_PER_TENSOR = {
    "weight": _quark_spec("fp8_e4m3", "per_tensor"),
    "input_tensors": _quark_spec("fp8_e4m3", "per_tensor"),
}


def quark(everywhere: dict[str, Any], **layers: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": everywhere,
        "layer_quant_config": layers.get("layers", {}),
        "layer_type_quant_config": {},
        "exclude": layers.get("exclude", ["lm_head"]),
        "export": {
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "kv_cache_group": [],
        },
    }


def _compressed(
    written: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    }


def _float8(strategy: str, **more: Any) -> dict[str, Any]:
    return {"type": "float", "num_bits": 8, "strategy": strategy, "dynamic": False, **more}


_PER_TOKEN = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}
CT_CHANNEL = _compressed("float-quantized", _float8("channel"), _PER_TOKEN)
CT_TENSOR = _compressed("float-quantized", _float8("tensor"), {**_PER_TOKEN, "strategy": "tensor"})
_CT_BLOCK = _compressed(
    "float-quantized",
    _float8("block", block_structure=[128, 128]),
    {**_PER_TOKEN, "strategy": "group", "group_size": 128},
)
_CT_MXFP4 = _compressed(
    "mxfp4-pack-quantized",
    {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32},
)
_CT_MXFP4_FP8 = _compressed(
    "mxfp4-pack-quantized",
    {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32},
    {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True},
)
_CT_MXFP8 = _compressed(
    "mxfp8-quantized",
    _float8("group", group_size=32),
    {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32, "dynamic": True},
)
_CT_INT4 = _compressed(
    "pack-quantized",
    {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
)
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
_MODELOPT_MX = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}
_FLYDSL = {"vllm": {"moe_backend": "flydsl"}}
_SGLANG_AITER = {"sglang": {"moe_backend": "aiter"}}

_LATENT = {
    f"language_model.model.layers.1.block_sparse_moe.{name}": ("BF16", shape)
    for name, shape in {
        "routed_expert_down_proj.weight": (256, 512),
        "routed_expert_up_proj.weight": (512, 256),
        "routed_expert_norm.weight": (256,),
        "shared_experts.gate_proj.weight": (1024, 512),
        "shared_experts.up_proj.weight": (1024, 512),
        "shared_experts.down_proj.weight": (512, 1024),
        "gate.weight": (4, 512),
        "gate.e_score_correction_bias": (4,),
    }.items()
}

FAMILIES: dict[str, Family] = {
    # fused tensors; twice the intermediate size is the hidden one, so that no shape tells
    "llama4": Family(
        _nested("llama4", "llama4_text", "num_local_experts"),
        (Experts("language_model.model.layers.1.feed_forward.experts", "bf16", fused="columns"),),
        intermediate=128,
        refused=frozenset({"sglang"}),
    ),
    "llama4-ct-fp8": Family(
        _nested("llama4", "llama4_text", "num_local_experts"),
        (Experts("language_model.model.layers.1.feed_forward.experts", "fp8_channel_ct"),),
        CT_CHANNEL,
        special="compressed-tensors",
    ),
    "qwen3_vl_moe": Family(
        _nested("qwen3_vl_moe", "qwen3_vl_moe_text"),
        (_mlp("bf16", "model.language_model.layers.0", fused="columns"),),
        common={"model.visual.patch_embed.proj.weight": ("BF16", (8, 4))},
        intermediate=128,
        refused=frozenset({"sglang"}),
    ),
    "qwen3_5-fused": Family(
        _nested("qwen3_5_moe", "qwen3_5_moe_text"),
        (
            _mlp("bf16", "model.language_model.layers.0", fused="rows"),
            _mlp("bf16", "mtp.layers.0"),
        ),
        intermediate=256,
    ),
    "qwen3_5-fp8": Family(
        _nested("qwen3_5_moe", "qwen3_5_moe_text"),
        (
            _mlp("fp8_block_bf16", "model.language_model.layers.0"),
            _mlp("bf16", "mtp.layers.0", fused="rows"),
        ),
        _fp8(modules_to_not_convert=["lm_head", "mtp"]),
    ),
    "qwen3_next": Family(model("qwen3_next"), (_mlp("bf16"), _mlp("bf16", "mtp.layers.0"))),
    "qwen3_next-fp8": Family(
        model("qwen3_next"),
        (_mlp("fp8_block_bf16"), _mlp("bf16", "mtp.layers.0")),
        _fp8(modules_to_not_convert=["lm_head", "mtp"]),
    ),
    "qwen3_moe-fp8": Family(model("qwen3_moe"), (_mlp("fp8_block_bf16"),), _fp8()),
    "glm4_moe": Family(
        model("glm4_moe", "n_routed_experts"),
        (_mlp("bf16"), _mlp("bf16", "model.layers.2")),
        common={"model.layers.2.eh_proj.weight": ("BF16", (256, 512))},
    ),
    "glm4_moe-fp8": Family(
        model("glm4_moe", "n_routed_experts"),
        (_mlp("fp8_channel_ct"),),
        CT_CHANNEL,
        special="compressed-tensors",
    ),
    "glm_moe_dsa-fp8": Family(
        model("glm_moe_dsa", "n_routed_experts"),
        (_mlp("fp8_block"), _mlp("fp8_block", "model.layers.2")),
        _fp8(scale_fmt="ue8m0"),
        common={"model.layers.2.self_attn.indexer.weights_proj.weight": ("BF16", (4, 256))},
    ),
    "kimi_k2": Family(
        model("kimi_k2", "n_routed_experts"),
        (_mlp("fp8_block"),),
        _fp8(),
        common={"model.layers.1.self_attn.rotary_emb.inv_freq": ("F32", (16,))},
    ),
    "kimi_k25": Family(
        _nested("kimi_k25", "kimi_k2", "n_routed_experts"),
        (_mlp("int4", "language_model.model.layers.1"),),
        _CT_INT4,
        options=_FLYDSL,
        refused=frozenset({"aiter", "sglang", "atom"}),
    ),
    "kimi_k3": Family(
        _nested("kimi_k3", "kimi_linear", hidden_act="situ"),
        (_sparse("mxfp4_packed", "language_model.model.layers.1"),),
        _CT_MXFP4,
        common=_LATENT,
        intermediate=768,
        special="kimi_k3",
    ),
    "minimax_m2": Family(model("minimax_m2", "num_local_experts"), (_sparse("fp8_block"),), _fp8()),
    "minimax_m3": Family(
        _nested("minimax_m3_vl", "minimax_m3_vl_text", "num_local_experts"),
        (_sparse("bf16", "language_model.model.layers.1"),),
        refused=frozenset({"sglang"}),
    ),
    "minimax_m3-mxfp8": Family(
        _nested("minimax_m3_vl", "minimax_m3_vl_text", "num_local_experts"),
        (_sparse("mxfp8_inv", "language_model.model.layers.1"),),
        {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
            "ignored_layers": ["lm_head"],
        },
        options=_SGLANG_AITER,
    ),
    "mixtral": Family(model("mixtral", "num_local_experts"), (_sparse("bf16"),)),
    "mixtral-llm-compressor": Family(
        model("mixtral", "num_local_experts"),
        (Experts("model.layers.0.block_sparse_moe.experts", "fp8_tensor_ct", GATED),),
        CT_TENSOR,
        refused=frozenset({"sglang"}),
    ),
    "phimoe": Family(model("phimoe", "num_local_experts"), (_sparse("bf16"),)),
    "deepseek_v2": Family(model("deepseek_v2", "n_routed_experts"), (_mlp("bf16"),)),
    "deepseek_v3": Family(
        model("deepseek_v3", "n_routed_experts"),
        (_mlp("fp8_block"), _mlp("fp8_block", "model.layers.2")),
        _fp8(),
        common={"model.layers.2.shared_head.head.weight": ("BF16", (16, 256))},
    ),
    "deepseek_v32": Family(
        model("deepseek_v32", "n_routed_experts"), (_mlp("fp8_block"),), _fp8(scale_fmt="ue8m0")
    ),
    "deepseek_v4": Family(
        model("deepseek_v4", "n_routed_experts", expert_dtype="fp4"),
        (
            Experts("layers.0.ffn.experts", "mxfp4_v4", NUMBERED),
            Experts("mtp.0.ffn.experts", "mxfp4_v4", NUMBERED),
        ),
        _fp8(scale_fmt="ue8m0"),
        intermediate=384,
        special="deepseek_v4",
    ),
    "deepseek_v4-fp8": Family(
        model("deepseek_v4", "n_routed_experts", expert_dtype="fp8"),
        (Experts("layers.0.ffn.experts", "fp8_block_v4", NUMBERED),),
        _fp8(),
    ),
    "deepseek_v41": Family(
        _nested("deepseek_v41", "deepseek_v41_text", "n_routed_experts", expert_dtype="fp4"),
        (
            Experts("layers.0.ffn.experts", "mxfp4_v4", NUMBERED),
            Experts("mtp.0.ffn.experts", "mxfp4_v4", NUMBERED, experts=2),
        ),
        _fp8(scale_fmt="ue8m0", weight_block_size=[32, 32]),
        intermediate=320,
        refused=frozenset({"atom"}),
    ),
    # AMD Quark
    "deepseek_v3-quark-mxfp4": Family(
        model("deepseek_v3", "n_routed_experts"),
        (_mlp("mxfp4"), _mlp("bf16", "model.layers.2")),
        quark(FP4_INPUTS, exclude=["lm_head", "re:model.layers.2.*", "*self_attn*"]),
        special="quark",
    ),
    "deepseek_v3-quark-mixed": Family(
        model("deepseek_v3", "n_routed_experts"),
        (_mlp("mxfp4"), _mlp("fp8_channel_quark", "model.layers.2")),
        quark(FP4_INPUTS, layers={"*self_attn*": _PTPC, "*layers.2.*": _PTPC}),
        special="quark",
    ),
    "qwen3_moe-quark-mixed-other-way": Family(
        model("qwen3_moe"),
        (_mlp("fp8_channel_quark"), _mlp("mxfp4", "model.layers.2")),
        quark(_PTPC, layers={"*layers.2.mlp*": FP4_INPUTS}),
        special="quark",
    ),
    "kimi_k25-quark": Family(
        _nested("kimi_k25", "kimi_k2", "n_routed_experts"),
        (_mlp("mxfp4", "language_model.model.layers.1"),),
        quark(FP4_INPUTS, exclude=["*self_attn*"]),
        special="quark",
    ),
    "minimax_m3-quark": Family(
        _nested("minimax_m3_vl", "minimax_m3_vl_text", "num_local_experts"),
        (_sparse("mxfp4", "language_model.model.layers.1"),),
        quark(FP4_INPUTS),
        special="quark",
    ),
    "glm_moe_dsa-quark": Family(
        model("glm_moe_dsa", "n_routed_experts"),
        (_mlp("mxfp4"), _mlp("bf16", "model.layers.2")),
        quark(FP4_INPUTS, exclude=["model.layers.2.mlp.experts.*.down_proj"]),
        special="quark",
    ),
    "qwen3_moe-quark-ptpc": Family(
        model("qwen3_moe"), (_mlp("fp8_channel_quark"),), quark(_PTPC), special="quark"
    ),
    "mixtral-quark-fp8": Family(
        model("mixtral", "num_local_experts"),
        (_sparse("fp8_tensor_static"),),
        quark(_PER_TENSOR),
        refused=frozenset({"sglang", "atom"}),
    ),
    # compressed-tensors
    "qwen3_moe-ct-block": Family(
        model("qwen3_moe"), (_mlp("fp8_block_ct"),), _CT_BLOCK, refused=frozenset({"sglang"})
    ),
    "qwen3_moe-ct-mxfp4": Family(
        model("qwen3_moe"),
        (_mlp("mxfp4_packed"),),
        _CT_MXFP4,
        refused=frozenset({"vllm", "sglang", "atom"}),
    ),
    "qwen3_moe-ct-mxfp4-fp8": Family(
        model("qwen3_moe"),
        (_mlp("mxfp4_packed"),),
        _CT_MXFP4_FP8,
        refused=frozenset({"sglang", "atom"}),
    ),
    "qwen3_moe-ct-mxfp8": Family(
        model("qwen3_moe"), (_mlp("mxfp8"),), _CT_MXFP8, refused=frozenset({"sglang", "atom"})
    ),
    "qwen3_moe-ct-int4": Family(
        model("qwen3_moe"),
        (_mlp("int4"),),
        _CT_INT4,
        options=_FLYDSL,
        refused=frozenset({"aiter", "sglang", "atom"}),
    ),
    # modelopt
    "qwen3_moe-modelopt-fp8": Family(
        model("qwen3_moe"),
        (_mlp("fp8_tensor_static"),),
        hf_quant_config={
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        },
        refused=frozenset({"sglang", "atom"}),
    ),
    "qwen3_moe-modelopt-fp8-in-config": Family(
        model("qwen3_moe"),
        (_mlp("fp8_tensor_static"),),
        _MODELOPT,
        refused=frozenset({"sglang", "atom"}),
    ),
    "qwen3_moe-modelopt-mxfp8": Family(
        model("qwen3_moe"), (_mlp("mxfp8"),), _MODELOPT_MX, refused=frozenset({"sglang", "atom"})
    ),
    "qwen3_moe-fp8-per-tensor": Family(
        model("qwen3_moe"),
        (_mlp("fp8_tensor"),),
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        refused=frozenset({"atom"}),
    ),
}
