"""Which tensors are copied unchanged, and which no rule knows."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aiter_prep.families import common
from aiter_prep.families.common import COMMON_RULES, common_rule_of

# From the published tensor lists, from what transformers 5.24 saves, and from what Quark 0.13 and
# llm-compressor 0.14 write.
_DATA = Path(__file__).parent / "data" / "common_names.txt"
COMMON = tuple(
    line for line in _DATA.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"
)

_GATED = ("gate_proj", "up_proj", "down_proj")
_W = ("w1", "w2", "w3")
_SUFFIXES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_shape",
    "weight_global_scale",
    "input_scale",
    "scale",
)
EXPERTS = tuple(
    f"{experts}.N.{projection}.{suffix}"
    for experts, projections in {
        "language_model.model.blocks.N.mlp.experts": _GATED,
        "language_model.model.layers.N.block_sparse_moe.experts": _W,
        "language_model.model.layers.N.feed_forward.experts": _GATED,
        "language_model.model.layers.N.mlp.experts": _GATED,
        "layers.N.ffn.experts": _W,
        "model.language_model.layers.N.mlp.experts": _GATED,
        "model.layers.N.block_sparse_moe.experts": _W + _GATED,
        "model.layers.N.ffn.experts": _W,
        "model.layers.N.mlp.experts": _GATED,
        "mtp.N.ffn.experts": _W,
        "mtp.layers.N.mlp.experts": _GATED,
    }.items()
    for projection in projections
    for suffix in _SUFFIXES
) + tuple(
    f"{experts}.{projection}{suffix}"
    for experts in (
        "language_model.model.layers.N.feed_forward.experts",
        "model.language_model.layers.N.mlp.experts",
        "model.layers.N.mlp.experts",
        "mtp.layers.N.mlp.experts",
    )
    for projection in ("gate_up_proj", "down_proj")
    for suffix in ("", "_bias", "_blocks", "_scales")
)

UNKNOWN = (
    "foo.weight",
    "weight",
    "experts",
    "model",
    "",
    "model.layers.0.mystery.weight",
    "model.layers.0.mystery",
    "model.layers.0.weight",
    "model.layers.0.mlp.mystery_proj.weight",
    "model.layers.0.mlp.weight",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.gate_proj.mystery",
    "model.layers.0.mlp.gate.mystery",
    "model.layers.0.mlp.shared_experts.weight",
    "model.layers.0.mlp.shared_experts.gate.weight",
    "model.layers.0.mlp.shared_mystery.up_proj.weight",
    "model.layers.0.mlp.expert.0.up_proj.weight",
    "model.layers.0.self_attn",
    "model.layers.0.self_attn.",
    "model.layers.0.self_attn..weight",
    "model.layers.0.self_attn.q proj.weight",
    "model.layers.0.my_self_attn.q_proj.weight",
    "model.layers.0.input_layernorm.weight_scale",
    "model.layers.0.input_layernorms.weight",
    "model.layers.zero.self_attn.q_proj.weight",
    "model.layers.\u0661.self_attn.q_proj.weight",
    "model.layers.self_attn.q_proj.weight",
    "model.layers.0.hc_attn_mystery",
    "model.layers.0.engram.weight",
    "model.layers.0.markov_head.weight",
    "model.model.layers.0.self_attn.q_proj.weight",
    "model.mystery.weight",
    "model.embed_tokens",
    "model.norm.weight_scale",
    "decoder.layers.0.self_attn.q_proj.weight",
    "encoder.layers.0.self_attn.q_proj.weight",
    "blocks.0.self_attn.q_proj.weight",
    "mtp.mystery.weight",
    "mtp.fc_mystery.weight",
    "audio_tower.layers.0.weight",
    "visual",
    "my_visual.blocks.0.attn.qkv.weight",
    "image_mystery",
    "lm_head",
    "lm_head.weight.bias",
)

_GENERATORS = Path(__file__).resolve().parents[3] / "shared" / "tools" / "checkpoints"


def _numbered(kind: str, number: int = 0) -> str:
    return re.sub(r"\bN\b", str(number), kind)


def _with_a_segment_experts(name: str) -> Iterator[str]:
    """The name with `experts` for each of its segments, and with `experts` at each place."""
    segments = name.split(".")
    for place in range(len(segments) + 1):
        yield ".".join([*segments[:place], "experts", *segments[place:]])
        yield ".".join([*segments[:place], "experts", *segments[place + 1 :]])


def test_every_published_name_that_is_no_routed_experts_is_common() -> None:
    assert len(COMMON) > 600
    assert [kind for kind in COMMON if common_rule_of(_numbered(kind)) is None] == []


def test_every_rule_knows_a_published_name() -> None:
    used = {rule.name for kind in COMMON if (rule := common_rule_of(_numbered(kind)))}
    assert used == {rule.name for rule in COMMON_RULES}


def test_rules_have_names_of_their_own() -> None:
    assert len({rule.name for rule in COMMON_RULES}) == len(COMMON_RULES)


@pytest.mark.parametrize("rule", COMMON_RULES, ids=lambda rule: rule.name)
def test_no_rule_matches_a_routed_expert(rule: common.CommonRule) -> None:
    matched = [kind for kind in EXPERTS if re.fullmatch(rule.pattern, _numbered(kind))]
    assert matched == []


@pytest.mark.parametrize("rule", COMMON_RULES, ids=lambda rule: rule.name)
def test_no_rule_matches_a_name_with_a_segment_experts(rule: common.CommonRule) -> None:
    regex = re.compile(rule.pattern)
    for kind in COMMON:
        for name in _with_a_segment_experts(_numbered(kind)):
            assert regex.fullmatch(name) is None, name


def test_no_routed_expert_is_common() -> None:
    assert [kind for kind in EXPERTS if common_rule_of(_numbered(kind)) is not None] == []


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_has_no_rule(name: str) -> None:
    assert common_rule_of(name) is None


@pytest.mark.parametrize(
    "prefix",
    ["", "model.", "language_model.model.", "language_model.", "model.language_model."],
)
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("embed_tokens.weight", "embedding"),
        ("norm.weight", "final norm"),
        ("layers.3.self_attn.q_proj.weight", "attention"),
        ("layers.3.mlp.gate.weight", "router"),
        ("layers.3.mlp.shared_experts.up_proj.weight", "shared expert"),
        ("lm_head.weight", "head"),
        ("mtp.0.attn.wq_a.scale", "attention"),
        ("mtp.layers.0.self_attn.q_proj.weight", "attention"),
        ("mtp.fc.weight", "mtp frame"),
    ],
)
def test_a_name_is_known_under_every_prefix(prefix: str, name: str, rule: str) -> None:
    found = common_rule_of(prefix + name)
    assert found is not None
    assert found.name == rule


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("model.layers.61.shared_head.head.weight", "mtp block"),
        ("model.layers.61.embed_tokens.weight", "mtp block"),
        ("mtp.norm.weight", "mtp frame"),
        ("mtp.0.norm.weight", "mtp block"),
        ("model.layers.0.mlp.gate_proj.weight", "dense mlp"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "shared expert gate"),
        ("model.layers.0.mlp.shared_expert.gate_proj.weight_scale", "shared expert"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "attention"),
        ("vision_tower.encoder.layers.0.self_attn.q_proj.weight", "vision tower"),
    ],
)
def test_a_name_has_the_rule_of_its_kind(name: str, rule: str) -> None:
    found = common_rule_of(name)
    assert found is not None
    assert found.name == rule


def test_a_name_is_matched_as_a_whole() -> None:
    names = [_numbered(kind) for kind in COMMON]
    assert [name for name in names if common_rule_of(f"x.{name}") is not None] == []
    assert [name for name in names if common_rule_of(f"{name}\n") is not None] == []


def test_layers_share_one_answer() -> None:
    common._rule_of_kind.cache_clear()
    rules = {
        common_rule_of(f"model.layers.{number}.mlp.shared_experts.up_proj.weight")
        for number in range(1000)
    }
    assert len(rules) == 1
    assert common._rule_of_kind.cache_info().misses == 1


@pytest.mark.skipif(not _GENERATORS.is_dir(), reason="the generators are not at hand")
def test_the_names_here_are_those_of_the_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    known, experts = set(COMMON), 0
    for name in _generated(monkeypatch):
        kind = re.sub(r"\.\d+(?=\.)", ".N", name)
        if ".experts." in kind:
            experts += 1
            assert common_rule_of(name) is None
        else:
            assert kind in known
    assert experts > 1000


def _generated(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The names of every published checkpoint that the generators know, with two experts each."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    first = _module("layouts", monkeypatch)
    more = _module("layouts2", monkeypatch)
    nested = "language_model.model."
    mixtral = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 8) | {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "num_local_experts": 2,
        "head_dim": 4,
        "intermediate_size_mlp": 8,
        "interleave_moe_layer_step": 1,
    }
    qwen3_5 = _config("Qwen--Qwen3.5-35B-A3B")
    lists = (
        first.deepseek_v3(_config("deepseek-ai--DeepSeek-V3")),
        first.deepseek_v3(_config("deepseek-ai--DeepSeek-V3.2"), indexer=True),
        first.deepseek_v3(_config("zai-org--GLM-5-FP8"), indexer=True),
        first.deepseek_v3(
            _config("moonshotai--Kimi-K2.5"),
            p=nested,
            head="language_model.lm_head.weight",
            q="none",
            qe="ct-int4",
        ),
        first.kimi_k3(_config("moonshotai--Kimi-K3")),
        first.deepseek_v4(_config("deepseek-ai--DeepSeek-V4-Flash")),
        first.gpt_oss(_config("openai--gpt-oss-20b")),
        first.qwen3_moe(_config("Qwen--Qwen3-235B-A22B-FP8"), "fp8"),
        first.mixtral(mixtral),
        first.minimax_m2(_config("MiniMaxAI--MiniMax-M2.5")),
        first.minimax_m3(_config("MiniMaxAI--MiniMax-M3"), "mxfp8"),
        more.glm4_moe(more.GLM46 | {"n_routed_experts": 2}, q="fp8ch"),
        more.glm4_moe(more.GLM45AIR | {"n_routed_experts": 2}),
        more.qwen3_hybrid(more.Q3NEXT | {"num_experts": 2}, q="fp8"),
        more.qwen3_hybrid(qwen3_5, p="model.language_model.", split=True, fused=True),
        more.qwen3_hybrid(qwen3_5, p="model.language_model.", split=True, q="fp8"),
        more.llama4(mixtral),
        more.llama4(mixtral, fused=False),
        more.dense(_config("Qwen--Qwen3-32B-FP8"), "fp8", qk="head"),
    )
    for tensors in lists:
        for name, _dtype, _shape in tensors:
            yield name


def _module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, _GENERATORS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # `layouts2` imports `layouts`
    spec.loader.exec_module(module)
    return module


def _config(name: str) -> dict[str, Any]:
    text = (_GENERATORS / "configs" / f"{name}_config.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    config = config.get("text_config", config)
    for key in ("n_routed_experts", "num_experts", "num_local_experts"):
        if key in config:
            config[key] = 2
    return config
