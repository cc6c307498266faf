"""What configs promise about the quantisation of routed experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiter_prep.families.promises import promised_scheme, quantization_config_of
from support import FIXTURES, fixture

Config = dict[str, Any]

QWEN = "model.layers.1.mlp.experts"
V4 = "layers.1.ffn.experts"
KIMI = "language_model.model.layers.1.mlp.experts"
M3 = "language_model.model.layers.1.block_sparse_moe.experts"

FP8_BLOCK: Config = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
QUARK_MXFP4: Config = {
    "weight": {
        "dtype": "fp4",
        "is_dynamic": False,
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": 32,
        "symmetric": None,
        "scale_format": "e8m0",
        "scale_calculation_mode": "even",
    },
    "input_tensors": {"dtype": "fp4", "is_dynamic": True, "qscheme": "per_group"},
    "output_tensors": None,
    "bias": None,
}
QUARK_PTPC: Config = {
    "weight": {
        "dtype": "fp8_e4m3",
        "is_dynamic": False,
        "qscheme": "per_channel",
        "ch_axis": 0,
        "group_size": None,
        "scale_format": None,
    },
}
QUARK_FP8_BLOCK: Config = {
    "weight": {
        "dtype": "fp8_e4m3",
        "is_dynamic": False,
        "qscheme": "per_block",
        "block_size": [128, 128],
        "scale_type": "float8_e8m0fnu",
    },
}
CT_MXFP4: Config = {
    "format": "mxfp4-pack-quantized",
    "input_activations": None,
    "targets": ["Linear"],
    "weights": {"group_size": 32, "num_bits": 4, "strategy": "group", "type": "float"},
}
CT_IGNORE = ["re:.*mlp.gate$", "re:.*block_sparse_moe.gate$", "lm_head", "model.embed_tokens"]
KIMI_IGNORE = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
]
NVFP4_OVER_V4: Config = {
    "quant_algo": "MIXED_PRECISION",
    "quant_method": "fp8",
    "moe_quant_algo": "NVFP4",
    "weight_block_size": [128, 128],
    "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
}


def _fp8(**more: Any) -> Config:
    return {"quantization_config": FP8_BLOCK | more}


def _quark(scheme: Any, exclude: Any = (), **layers: Any) -> Config:
    quark = {
        "quant_method": "quark",
        "global_quant_config": scheme,
        "exclude": list(exclude),
        "layer_type_quant_config": {},
        "layer_quant_config": layers.get("layers", {}),
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    }
    return {"quantization_config": quark}


def _compressed(*groups: Config, ignore: Any = (), outer: str | None = None) -> Config:
    compressed = {
        "quant_method": "compressed-tensors",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "format": outer,
        "ignore": list(ignore),
        "quantization_status": "compressed",
    }
    return {"quantization_config": compressed}


def _group(written: str, kind: str, bits: int, strategy: str, *targets: str) -> Config:
    weights = {"type": kind, "num_bits": bits, "strategy": strategy}
    return {"format": written, "targets": list(targets or ("Linear",)), "weights": weights}


def _modelopt(algorithm: Any, ignore: Any = (), **more: Any) -> Config:
    modelopt = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": list(ignore)}
    return {"quantization_config": modelopt | more}


def _hf(algorithm: Any, exclude: Any = (), **more: Any) -> Config:
    inner = {"quant_algo": algorithm, "exclude_modules": list(exclude)} | more
    return {"producer": {"name": "modelopt"}, "quantization": inner}


# --- the small checkpoints, and what is known of published ones -----------------------------------

CHECKPOINTS: tuple[tuple[str, Config, Config | None, str, str], ...] = (
    ("deepseek_v3-fp8_block-sharded", _fp8(), None, QWEN, "fp8_block"),
    (
        "deepseek_v4-fp4",
        {"model_type": "deepseek_v4", "expert_dtype": "fp4"} | _fp8(scale_fmt="ue8m0"),
        None,
        V4,
        "mxfp4",
    ),
    (
        "gpt_oss-mxfp4",
        {
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            }
        },
        None,
        QWEN,
        "mxfp4",
    ),
    (
        "minimax_m3-mxfp8",
        {
            "text_config": {},
            "quantization_config": {
                "quant_method": "mxfp8",
                "weight_block_size": [1, 32],
                "ignored_layers": [
                    "lm_head",
                    "model.embed_tokens",
                    "block_sparse_moe.gate",
                    "vision_tower",
                    "multi_modal_projector",
                    "patch_merge_mlp",
                ],
            },
        },
        None,
        M3,
        "mxfp8",
    ),
    ("qwen3_moe-bf16", {"model_type": "qwen3_moe"}, None, QWEN, "bf16"),
    ("qwen3_moe-ct-mxfp4", _compressed(CT_MXFP4, ignore=CT_IGNORE), None, QWEN, "mxfp4"),
    (
        "qwen3_moe-fp8_block",
        _fp8(
            modules_to_not_convert=[
                "lm_head",
                "model.layers.1.input_layernorm",
                "model.layers.1.mlp.gate",
                "model.layers.1.post_attention_layernorm",
            ]
        ),
        None,
        QWEN,
        "fp8_block",
    ),
    (
        "qwen3_moe-modelopt-fp8",
        {"model_type": "qwen3_moe"},
        _hf("FP8", ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]),
        QWEN,
        "fp8_tensor",
    ),
    (
        "qwen3_moe-quark-mxfp4",
        _quark(QUARK_MXFP4, ["lm_head", "model.layers.1.mlp.gate"]),
        None,
        QWEN,
        "mxfp4",
    ),
    (
        "qwen3_moe-quark-ptpc_fp8",
        _quark(QUARK_PTPC, ["lm_head", "model.layers.1.mlp.gate"]),
        None,
        QWEN,
        "fp8_channel",
    ),
    (
        "Kimi-K2.5",
        {
            "text_config": _compressed(
                {
                    "targets": ["Linear"],
                    "weights": {"type": "int", "num_bits": 4, "strategy": "group"},
                },
                ignore=KIMI_IGNORE,
                outer="pack-quantized",
            )
        },
        None,
        KIMI,
        "int4",
    ),
    (
        "Kimi-K3",
        {"text_config": _compressed(CT_MXFP4, ignore=[*KIMI_IGNORE[1:], "re:.*lm_head.*"])},
        None,
        M3,
        "mxfp4",
    ),
    (
        "MiniMax-M2.5",
        _fp8(modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"]),
        None,
        "model.layers.1.block_sparse_moe.experts",
        "fp8_block",
    ),
    ("DeepSeek-V4-Flash-Base", {"expert_dtype": "fp8"} | _fp8(), None, V4, "fp8_block"),
    (
        "DeepSeek-V4.1-Flash",
        {"text_config": {"expert_dtype": "fp4"}} | _fp8(weight_block_size=[32, 32]),
        None,
        "mtp.0.ffn.experts",
        "mxfp4",
    ),
    (
        "DeepSeek-V4-NVFP4",
        {"expert_dtype": "fp4", "quantization_config": NVFP4_OVER_V4},
        None,
        V4,
        "nvfp4",
    ),
    (
        "Qwen3-32B-FP8-Static-PerTensor",
        {"quantization_config": {"quant_algo": "FP8", "ignore": ["lm_head"]}},
        None,
        QWEN,
        "fp8_tensor",
    ),
)


@pytest.mark.parametrize(
    ("config", "hf_quant_config", "experts", "scheme"),
    [case[1:] for case in CHECKPOINTS],
    ids=[case[0] for case in CHECKPOINTS],
)
def test_a_config_promises_what_the_checkpoint_holds(
    config: Config, hf_quant_config: Config | None, experts: str, scheme: str
) -> None:
    assert promised_scheme(config, hf_quant_config, experts) == scheme


@pytest.mark.parametrize("name", FIXTURES)
def test_the_whole_config_of_a_checkpoint_promises_the_same(name: str) -> None:
    _, _, _, experts, scheme = next(case for case in CHECKPOINTS if case[0] == name)
    folder = fixture(name)
    hf_file = folder / "hf_quant_config.json"
    hf_quant_config = json.loads(hf_file.read_text("utf-8")) if hf_file.exists() else None
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert promised_scheme(config, hf_quant_config, experts) == scheme


_CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "tools" / "checkpoints" / "configs"


@pytest.mark.skipif(not _CONFIGS.is_dir(), reason="the published configs are not at hand")
@pytest.mark.parametrize(
    ("model", "experts", "scheme"),
    [
        ("MiniMaxAI--MiniMax-M2.5", "model.layers.{}.block_sparse_moe.experts", "fp8_block"),
        ("MiniMaxAI--MiniMax-M3", "language_model.model.layers.{}.mlp.experts", "bf16"),
        ("Qwen--Qwen3-235B-A22B-FP8", "model.layers.{}.mlp.experts", "fp8_block"),
        ("Qwen--Qwen3.5-35B-A3B", "model.language_model.layers.{}.mlp.experts", "bf16"),
        ("deepseek-ai--DeepSeek-V3", "model.layers.{}.mlp.experts", "fp8_block"),
        ("deepseek-ai--DeepSeek-V3.2", "model.layers.{}.mlp.experts", "fp8_block"),
        ("deepseek-ai--DeepSeek-V4-Flash", "layers.{}.ffn.experts", "mxfp4"),
        ("deepseek-ai--DeepSeek-V4-Flash", "mtp.{}.ffn.experts", "mxfp4"),
        ("moonshotai--Kimi-K2-Instruct", "model.layers.{}.mlp.experts", "fp8_block"),
        ("moonshotai--Kimi-K2.5", "language_model.model.layers.{}.mlp.experts", "int4"),
        (
            "moonshotai--Kimi-K3",
            "language_model.model.layers.{}.block_sparse_moe.experts",
            "mxfp4",
        ),
        ("openai--gpt-oss-20b", "model.layers.{}.mlp.experts", "mxfp4"),
        ("zai-org--GLM-5-FP8", "model.layers.{}.mlp.experts", "fp8_block"),
    ],
)
def test_a_published_config_promises_one_scheme_for_all_layers(
    model: str, experts: str, scheme: str
) -> None:
    config = json.loads((_CONFIGS / f"{model}_config.json").read_text("utf-8"))
    found = {promised_scheme(config, None, experts.format(layer)) for layer in range(80)}
    assert found == {scheme}


# --- where the config is --------------------------------------------------------------------------


def test_the_config_is_read_from_the_top_level_or_the_text_part() -> None:
    inner = {"quant_method": "mxfp4"}
    assert quantization_config_of({"quantization_config": inner}) is inner
    assert quantization_config_of({"text_config": {"quantization_config": inner}}) is inner
    both = {"quantization_config": inner, "text_config": {"quantization_config": {}}}
    assert quantization_config_of(both) is inner


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        {"text_config": None},
        {"text_config": {"quantization_config": None}},
        {"text_config": []},
        {"quantization_config": "fp8"},
    ],
)
def test_a_model_without_a_quantisation_config_has_none(config: Config) -> None:
    assert quantization_config_of(config) is None


def test_the_file_beside_a_config_is_read_only_if_the_config_is_silent() -> None:
    assert promised_scheme({}, _hf("NVFP4"), QWEN) == "nvfp4"
    assert promised_scheme(_fp8(), _hf("NVFP4"), QWEN) == "fp8_block"


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {}},
        {"quantization_config": "fp8"},
        {"quantization_config": {"quant_method": "awq"}},
        {"quantization_config": {"quant_method": "aiter_prep"}},
        {"quantization_config": {"quant_method": ["fp8"]}},
        {"compression_config": {"config_groups": {}}},
        {"expert_dtype": "fp4"},
        {"expert_dtype": "fp2"} | _fp8(),
        {"expert_dtype": "fp4", "text_config": {"expert_dtype": "fp8"}} | _fp8(),
        _fp8(weight_block_size=[1, 32]),
        _fp8(weight_block_size=128),
        _fp8(weight_block_size=[128, 128, 128]),
        _fp8(quant_algo="MIXED_PRECISION"),
        _fp8(moe_quant_algo="W2A2"),
        _fp8(ignored_layers="lm_head"),
        _fp8(ignored_layers=[1]),
        _fp8(ignored_layers=["re:("]),
        _quark(None),
        _quark("mxfp4"),
        _quark({"weight": None}),
        _quark({"weight": "fp4"}),
        _quark({"weight": {"dtype": ["fp4"], "qscheme": {}}}),
        _quark({"weight": {"dtype": "fp6_e3m2", "qscheme": "per_group", "group_size": 32}}),
        _quark({"weight": QUARK_MXFP4["weight"] | {"group_size": 16}}),
        _quark({"weight": QUARK_MXFP4["weight"] | {"is_dynamic": True}}),
        _quark({"weight": [QUARK_MXFP4["weight"]]}),
        _quark({"weight": ["fp4"]}),
        _quark(QUARK_MXFP4, layers=[QWEN]),
        {"quantization_config": {"quant_method": "quark"}},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        _compressed(_group("dense", "float", 8, "channel")),
        _compressed(_group("float-quantized", "float", 4, "channel")),
        _compressed(_group("pack-quantized", "int", 2, "group")),
        _compressed(_group("mxfp4-pack-quantized", "float", 4, "group", "MysteryExperts")),
        _compressed({"targets": ["Linear"], "format": "float-quantized", "weights": None}),
        _compressed({"targets": "Linear", "format": "float-quantized"}),
        _modelopt(None),
        _modelopt("W2A2"),
        _modelopt("MIXED_PRECISION"),
        _modelopt("MIXED_PRECISION", quantized_layers={QWEN: "FP8"}),
        _modelopt("MIXED_PRECISION", quantized_layers={QWEN: {}}),
    ],
)
def test_what_cannot_be_interpreted_with_certainty_promises_nothing(config: Config) -> None:
    assert promised_scheme(config, None, QWEN) is None


def test_a_fake_quantised_export_promises_nothing() -> None:
    config = _quark(QUARK_MXFP4)
    config["quantization_config"]["export"]["weight_format"] = "fake_quantized"
    assert promised_scheme(config, None, QWEN) is None


def test_a_quark_scheme_by_class_promises_nothing() -> None:
    config = _quark(QUARK_MXFP4)
    config["quantization_config"]["layer_type_quant_config"] = {"Linear": QUARK_PTPC}
    assert promised_scheme(config, None, QWEN) is None


# --- each method ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8_tensor"),
        ({"model_type": "deepseek_v4"} | _fp8(), "mxfp4"),
        ({"text_config": {"model_type": "deepseek_v41"}} | _fp8(), "mxfp4"),
        ({"model_type": "deepseek_ref"} | _fp8(), "fp8_block"),
        ({"model_type": "deepseek_v4"} | _fp8(quant_method="deepseek_v4_fp8"), "mxfp4"),
        ({"model_type": "deepseek_v4"} | _fp8(expert_dtype="fp8"), "fp8_block"),
        ({"expert_dtype": "fp4", "text_config": {"expert_dtype": "fp4"}} | _fp8(), "mxfp4"),
        (_fp8(weight_block_size=[32, 32]), "fp8_block"),
    ],
)
def test_fp8_is_told_from_the_block_size_and_the_dtype_of_the_experts(
    config: Config, scheme: str
) -> None:
    assert promised_scheme(config, None, V4) == scheme


def test_what_modelopt_left_alone_over_deepseek_v4_is_not_promised_to_be_bf16() -> None:
    config = {"expert_dtype": "fp4", "quantization_config": NVFP4_OVER_V4}
    assert promised_scheme(config, None, "mtp.0.ffn.experts") is None


@pytest.mark.parametrize(
    ("weight", "scheme"),
    [
        ({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "fp8_tensor"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_channel"}, "fp8_channel"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_block"}, "fp8_block"),
        (QUARK_MXFP4["weight"], "mxfp4"),
        (QUARK_MXFP4["weight"] | {"dtype": "fp8_e4m3"}, "mxfp8"),
        ({"dtype": "int4", "qscheme": "per_group", "group_size": 128}, "int4"),
        ({"dtype": "int8", "qscheme": "per_channel"}, "int8"),
        (
            [
                {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
                {"dtype": "int4", "qscheme": "per_channel"},
            ],
            "int4_fp8",
        ),
        (
            [
                {"dtype": "fp4", "qscheme": "per_group", "group_size": 16},
                {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
            ],
            "nvfp4",
        ),
    ],
)
def test_a_quark_scheme_is_told_from_dtype_and_qscheme(weight: Any, scheme: str) -> None:
    assert promised_scheme(_quark({"weight": weight}), None, QWEN) == scheme


@pytest.mark.parametrize(
    ("layers", "path", "scheme"),
    [
        ({"*self_attn*": QUARK_PTPC}, QWEN, "mxfp4"),
        ({"*experts*": QUARK_PTPC, "*": QUARK_FP8_BLOCK}, QWEN, "fp8_channel"),
        ({"*": QUARK_FP8_BLOCK, "*experts*": QUARK_PTPC}, QWEN, "fp8_block"),
        ({"model.layers.*.mlp.experts": QUARK_PTPC}, QWEN, "fp8_channel"),
        ({QWEN: QUARK_PTPC}, QWEN, "fp8_channel"),
        ({"model.layers.1": QUARK_PTPC}, QWEN, "fp8_channel"),
        ({"model.layers.11": QUARK_PTPC}, QWEN, "mxfp4"),
        ({"*gate_proj": QUARK_PTPC}, QWEN, None),
        ({"*.w1": QUARK_PTPC}, QWEN, None),
        (
            {f"*.{name}": QUARK_PTPC for name in ("gate_proj", "up_proj", "down_proj")},
            QWEN,
            "fp8_channel",
        ),
        ({"*up_proj": QUARK_PTPC, "*down_proj": QUARK_PTPC}, QWEN, None),
        ({f"{QWEN}.7.down_proj": QUARK_PTPC}, QWEN, None),
        ({f"{QWEN}.7.down_proj": QUARK_MXFP4}, QWEN, "mxfp4"),
        ({"*experts*": {"weight": {"dtype": "fp6_e3m2", "qscheme": "per_group"}}}, QWEN, None),
        (
            {f"re:mtp\\.0\\.ffn\\.experts\\.\\d+\\.w{n}": QUARK_FP8_BLOCK for n in (1, 2, 3)},
            "mtp.0.ffn.experts",
            "fp8_block",
        ),
        (
            {f"re:mtp\\.0\\.ffn\\.experts\\.\\d+\\.w{n}": QUARK_FP8_BLOCK for n in (1, 2, 3)},
            V4,
            "mxfp4",
        ),
    ],
)
def test_the_first_quark_pattern_that_means_the_experts_counts(
    layers: Config, path: str, scheme: str | None
) -> None:
    assert promised_scheme(_quark(QUARK_MXFP4, layers=layers), None, path) == scheme


def test_every_expert_named_alone_is_the_same_as_all_named_together() -> None:
    layers = {
        f"{QWEN}.{expert}.{projection}": QUARK_PTPC
        for expert in range(8)
        for projection in ("gate_proj", "up_proj", "down_proj")
    }
    assert promised_scheme(_quark(QUARK_MXFP4, layers=layers), None, QWEN) == "fp8_channel"


@pytest.mark.parametrize(
    ("group", "scheme"),
    [
        (_group("float-quantized", "float", 8, "tensor"), "fp8_tensor"),
        (_group("float-quantized", "float", 8, "channel"), "fp8_channel"),
        (_group("float-quantized", "float", 8, "block"), "fp8_block"),
        (_group("naive-quantized", "float", 8, "channel"), "fp8_channel"),
        (_group("mxfp4-pack-quantized", "float", 4, "group"), "mxfp4"),
        (_group("mxfp8-quantized", "float", 8, "group"), "mxfp8"),
        (_group("nvfp4-pack-quantized", "float", 4, "tensor_group"), "nvfp4"),
        (_group("pack-quantized", "int", 4, "group"), "int4"),
        (_group("pack-quantized", "int", 8, "group"), "int8"),
        (_group("int-quantized", "int", 8, "channel"), "int8"),
    ],
)
def test_a_compressed_tensors_scheme_is_told_from_format_and_weights(
    group: Config, scheme: str
) -> None:
    assert promised_scheme(_compressed(group, ignore=CT_IGNORE), None, QWEN) == scheme


def test_the_format_of_a_group_counts_before_the_format_of_all() -> None:
    group = _group("mxfp4-pack-quantized", "float", 4, "group")
    assert promised_scheme(_compressed(group, outer="mixed-precision"), None, QWEN) == "mxfp4"
    del group["format"]
    assert promised_scheme(_compressed(group, outer="mixed-precision"), None, QWEN) is None
    outer = _compressed(group, outer="mxfp4-pack-quantized")
    assert promised_scheme(outer, None, QWEN) == "mxfp4"


@pytest.mark.parametrize(
    ("target", "scheme"),
    [
        ("re:.*mlp\\.experts.*", "fp8_block"),
        ("re:.*mlp\\.experts\\.\\d+\\.(gate|up|down)_proj$", "fp8_block"),
        (QWEN, "fp8_block"),
        ("re:.*self_attn.*", "mxfp4"),
        ("re:.*down_proj$", None),
        ("Linear", None),
    ],
)
def test_a_group_that_names_the_experts_counts_before_one_for_all_linears(
    target: str, scheme: str | None
) -> None:
    named = _group("float-quantized", "float", 8, "block", target)
    assert promised_scheme(_compressed(CT_MXFP4, named), None, QWEN) == scheme
    assert promised_scheme(_compressed(named, CT_MXFP4), None, QWEN) == scheme


def test_experts_that_no_group_targets_are_not_quantised() -> None:
    group = _group("float-quantized", "float", 8, "block", "re:.*self_attn.*")
    assert promised_scheme(_compressed(group), None, QWEN) == "bf16"


@pytest.mark.parametrize(
    ("algorithm", "scheme"),
    [
        ("FP8", "fp8_tensor"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "fp8_channel"),
        ("FP8_PB_WO", "fp8_block"),
        ("fp8_pb_wo", "fp8_block"),
        ("MXFP8", "mxfp8"),
        ("NVFP4", "nvfp4"),
        ("W4A16_NVFP4", "nvfp4"),
    ],
)
def test_modelopt_names_its_scheme_in_either_file(algorithm: str, scheme: str) -> None:
    assert promised_scheme(_modelopt(algorithm), None, QWEN) == scheme
    assert promised_scheme({}, _hf(algorithm), QWEN) == scheme


@pytest.mark.parametrize(
    ("layers", "scheme"),
    [
        ({QWEN: {"quant_algo": "NVFP4", "group_size": 16}}, "nvfp4"),
        ({"language_model.layers.1.mlp.experts": {"quant_algo": "FP8"}}, "fp8_tensor"),
        (
            {
                f"{QWEN}.{expert}.{projection}": {"quant_algo": "FP8_PB_WO"}
                for expert in range(4)
                for projection in ("gate_proj", "up_proj", "down_proj")
            },
            "fp8_block",
        ),
        (
            {
                f"{QWEN}.0.gate_proj": {"quant_algo": "FP8"},
                f"{QWEN}.0.up_proj": {"quant_algo": "FP8"},
                f"{QWEN}.0.down_proj": {"quant_algo": "NVFP4"},
            },
            None,
        ),
        ({"model.layers.1.self_attn.q_proj": {"quant_algo": "FP8"}}, "bf16"),
        ({"model.layers.11.mlp.experts": {"quant_algo": "FP8"}}, "bf16"),
        ({QWEN: {"quant_algo": "W2A2"}}, None),
    ],
)
def test_mixed_precision_quantises_the_layers_that_it_lists(
    layers: Config, scheme: str | None
) -> None:
    config = _modelopt("MIXED_PRECISION", quantized_layers=layers)
    assert promised_scheme(config, None, QWEN) == scheme
    assert promised_scheme({}, _hf("MIXED_PRECISION", quantized_layers=layers), QWEN) == scheme


# --- exclusions -----------------------------------------------------------------------------------

EXCLUDING = (
    (QWEN, QWEN),
    ("mlp.experts", QWEN),
    ("experts", QWEN),
    ("model.layers.1", QWEN),
    ("layers.1", QWEN),
    ("*experts*", QWEN),
    ("*.mlp.experts", QWEN),
    ("model.layers.*.mlp.experts.*", QWEN),
    (f"{QWEN}.*.down_proj", QWEN),
    (f"{QWEN}.0.gate_proj", QWEN),
    (f"{QWEN}.17.gate_proj", QWEN),
    ("re:.*experts.*", QWEN),
    ("re:model\\.layers\\.1\\..*", QWEN),
    ("re:.*\\.mlp\\.experts\\.\\d+\\.down_proj$", QWEN),
    ("re:.*_proj$", QWEN),
    ("layers.1.ffn.experts.0.w1", V4),
    ("model.layers.1.ffn.experts", V4),
    ("mtp.*", "mtp.0.ffn.experts"),
    ("mtp*", "mtp.0.ffn.experts"),
    ("mtp", "mtp.0.ffn.experts"),
    ("mtp.layers.0.mlp.experts", "mtp.layers.0.mlp.experts"),
    ("model.layers.1.mlp.experts", KIMI),
    ("language_model.layers.1.mlp.experts", KIMI),
    (KIMI, "model.language_model.layers.1.mlp.experts"),
    ("re:model\\.layers\\.61\\..*", "model.layers.61.mlp.experts"),
)
KEEPING = (
    ("gate", QWEN),
    ("mlp.gate", QWEN),
    ("*mlp.gate", QWEN),
    ("*.mlp.gate*", QWEN),
    ("re:.*mlp.gate$", QWEN),
    ("re:.*\\.gate$", QWEN),
    ("model.layers.1.mlp.gate", QWEN),
    ("mlp.router", QWEN),
    ("block_sparse_moe.gate", M3),
    ("model.layers.*.mlp.router", QWEN),
    ("shared_experts", QWEN),
    ("*shared_experts*", QWEN),
    ("*.ffn.shared_experts.*", V4),
    ("re:.*shared_experts.*", QWEN),
    ("re:.*mlp\\.(gate|up|gate_up|down)_proj.*", QWEN),
    ("re:experts", QWEN),
    ("model.layers.11", QWEN),
    ("model.layers.11.mlp.experts", QWEN),
    ("model.layers.11.mlp.experts.0.gate_proj", QWEN),
    ("layers.0", "mtp.layers.0.mlp.experts"),
    ("model.layers.0.mlp.experts", "mtp.layers.0.mlp.experts"),
    ("mtp.*", QWEN),
    ("mtp", QWEN),
    ("lm_head", QWEN),
    ("head", V4),
    ("expert", QWEN),
    ("", QWEN),
)


@pytest.mark.parametrize(("entry", "path"), EXCLUDING)
@pytest.mark.parametrize(
    "key",
    ["modules_to_not_convert", "ignored_layers", "exclude", "ignore", "exclude_modules"],
)
def test_an_entry_for_the_experts_excludes_them(key: str, entry: str, path: str) -> None:
    config = _fp8(**{key: ["lm_head", entry]})
    assert promised_scheme(config, None, path) == "bf16"


@pytest.mark.parametrize(("entry", "path"), KEEPING)
def test_an_entry_for_something_else_does_not_exclude_the_experts(entry: str, path: str) -> None:
    assert promised_scheme(_fp8(ignored_layers=[entry]), None, path) == "fp8_block"


@pytest.mark.parametrize("entry", ["re:.*gate", "*gate*", "*down_proj", "gate_proj", "re:.*w2$"])
def test_an_entry_for_a_part_of_all_mlps_leaves_the_experts_in_doubt(entry: str) -> None:
    assert promised_scheme(_fp8(ignored_layers=[entry]), None, QWEN) is None


@pytest.mark.parametrize(
    ("config", "hf_quant_config"),
    [
        (_quark(QUARK_MXFP4, [f"{QWEN}.*"]), None),
        (_quark(QUARK_MXFP4, [QWEN], layers={QWEN: QUARK_PTPC}), None),
        (_compressed(CT_MXFP4, ignore=["re:.*experts.*"]), None),
        (_modelopt("NVFP4", ["model.layers.1*"]), None),
        (
            _modelopt("MIXED_PRECISION", [QWEN], quantized_layers={QWEN: {"quant_algo": "FP8"}}),
            None,
        ),
        ({}, _hf("FP8", ["model.layers.1.*"])),
    ],
)
def test_every_method_has_exclusions(config: Config, hf_quant_config: Config | None) -> None:
    assert promised_scheme(config, hf_quant_config, QWEN) == "bf16"


def test_modelopts_star_after_a_layer_means_that_layer_alone() -> None:
    config = _modelopt("NVFP4", ["model.layers.1*"])
    assert promised_scheme(config, None, "model.layers.1.mlp.experts") == "bf16"
    assert promised_scheme(config, None, "model.layers.10.mlp.experts") == "nvfp4"
