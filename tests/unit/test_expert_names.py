"""What a tensor's name says: every spelling is read, everything else below experts stops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from aiter_prep.errors import NoRule
from aiter_prep.families.names import (
    FAMILIES,
    SUFFIXES,
    family_of,
    parse_expert_name,
    role_of,
)

PREFIXES = ("model.", "", "language_model.model.", "model.language_model.", "mtp.", "model.mtp.")
PATHS = (
    *(f"{prefix}layers.3.{module}.experts" for prefix in PREFIXES for module in ("mlp", "ffn")),
    "model.layers.0.block_sparse_moe.experts",
    "mtp.0.ffn.experts",
    "experts",
    "model.layers.61.mlp.experts",
    "model.layers.0.feed_forward.experts",
)
GATED = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "gate_up_proj": "gate_up"}
PROJECTIONS |= {"w1": "gate", "w3": "up", "w2": "down"}
ROLES = {
    "weight": "weight",
    "weight_packed": "weight",
    "weight_scale": "weight_scale",
    "weight_scale_inv": "weight_scale",
    "scale": "weight_scale",
    "weight_scale_2": "weight_scale_2",
    "input_scale": "input_scale",
    "weight_shape": "weight_shape",
    "bias": "bias",
}
FUSED = {
    "gate_up_proj_blocks": "weight",
    "gate_up_proj_scales": "weight_scale",
    "gate_up_proj_bias": "bias",
    "down_proj_blocks": "weight",
    "down_proj_scales": "weight_scale",
    "down_proj_bias": "bias",
    "gate_up_proj": "weight",
    "down_proj": "weight",
}


def read(name: str) -> tuple[str, int | None, str, str, str]:
    found = parse_expert_name(name)
    assert found is not None
    return found.experts, found.expert, found.key, found.suffix, role_of(found)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_every_spelling_of_a_per_expert_tensor_is_read(projection: str, path: str) -> None:
    for suffix, role in ROLES.items():
        for expert in (0, 7, 10, 383):
            name = f"{path}.{expert}.{projection}.{suffix}"
            assert read(name) == (path, expert, projection, suffix, role)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", FUSED)
def test_every_spelling_of_a_fused_tensor_is_read(key: str, path: str) -> None:
    assert read(f"{path}.{key}") == (path, None, key, key, FUSED[key])


def test_the_tables_above_are_the_whole_tables() -> None:
    projections: dict[str, str] = {}
    fused: dict[str, str] = {}
    for family in FAMILIES.values():
        projections |= family.projections
        fused |= {key: role for key, (_, role) in family.fused.items()}
    assert projections == PROJECTIONS
    assert fused == FUSED
    assert SUFFIXES == ROLES
    for name in ("gpt_oss", "gpt_oss_per_expert"):
        assert (FAMILIES[name].split, FAMILIES[name].down_bias) == ("whole_blocks", "first_rank")
        assert FAMILIES[name].gate_up_rows == "interleaved_1"


FAMILY_OF = [
    # keys below the module, model_type, family
    ([f"0.{key}.weight" for key in GATED], "qwen3_moe", "gate_up_down"),
    ([f"0.{key}.weight" for key in GATED], "anything", "gate_up_down"),
    (["0.w1.weight", "0.w2.weight", "0.w3.weight"], "mixtral", "w1_w2_w3"),
    (["gate_up_proj_blocks", "down_proj_blocks", "down_proj_bias"], "unknown", "gpt_oss"),
    (["0.gate_up_proj.weight", "0.down_proj.weight"], "gpt_oss", "gpt_oss_per_expert"),
    (["gate_up_proj", "down_proj"], "qwen3_5_moe", "fused_rows"),
    (["gate_up_proj", "down_proj"], "qwen3_5_moe_text", "fused_rows"),
    (["gate_up_proj", "down_proj"], "llama4_text", "fused_columns"),
    (["gate_up_proj", "down_proj"], "qwen3_vl_moe", "fused_columns"),
]


@pytest.mark.parametrize(("tails", "model_type", "family"), FAMILY_OF)
def test_the_spelling_tells_the_family_and_the_config_breaks_ties(
    tails: list[str], model_type: str, family: str
) -> None:
    names = [parse_expert_name(f"experts.{tail}") for tail in tails]
    found = family_of("experts", [name for name in names if name is not None], model_type)
    assert found is FAMILIES[family]
    assert found.has_gate_up is any("gate_up" in tail for tail in tails)


@pytest.mark.parametrize(
    ("tails", "model_type"),
    [
        (["0.gate_proj.weight", "0.w2.weight"], "mixtral"),
        (["0.gate_proj.weight", "gate_up_proj_blocks"], "gpt_oss"),
        (["gate_up_proj", "down_proj"], "unknown"),  # rows or columns: the shape cannot tell
        (["gate_up_proj", "down_proj"], "mixtral"),
        (["0.gate_up_proj.weight", "0.down_proj.weight"], "qwen3_moe"),
        (["0.gate_up_proj.weight", "0.gate_proj.weight"], "gpt_oss"),
        (["gate_up_proj", "down_proj_scales"], "qwen3_5_moe"),
        (["0.down_proj.weight"], "gpt_oss"),  # either of two families
    ],
)
def test_a_spelling_that_is_not_one_familys_is_refused(tails: list[str], model_type: str) -> None:
    names = [parse_expert_name(f"m.experts.{tail}") for tail in tails]
    with pytest.raises(NoRule, match="no one family names its experts as") as caught:
        family_of("m.experts", [name for name in names if name is not None], model_type)
    assert "`m.experts`" in caught.value.message
    assert model_type in caught.value.message


@pytest.mark.parametrize(
    "tail",
    [
        "0.gate_proj.weight_zero_point",
        "0.gate_proj.weight_global_scale",  # NVFP4
        "0.gate_proj.qweight",
        "0.gate_proj.weight.extra",
        "0.gate_proj",
        "0.weight",
        "0.w4.weight",
        "0.router.weight",
        "00.gate_proj.weight",
        "01.w1.weight",
        "-1.w1.weight",
        "+1.w1.weight",
        "1_0.w1.weight",
        " 1.w1.weight",
        "\N{SUPERSCRIPT TWO}.w1.weight",
        "\N{ARABIC-INDIC DIGIT ONE}.w1.weight",
        "1234567.w1.weight",
        "x.w1.weight",
        ".w1.weight",
        "gate_up_proj.weight",
        "gate_up_proj_weight",
        "w13_weight",
        "bias",
        "",
    ],
)
@pytest.mark.parametrize("path", ["model.layers.0.mlp.experts", "experts"])
def test_what_no_family_names_so_stops_by_its_name(path: str, tail: str) -> None:
    with pytest.raises(NoRule, match="lies below an experts module, but no family names") as caught:
        parse_expert_name(f"{path}.{tail}")
    assert f"`{path}.{tail}`" in caught.value.message


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.0.mlp.shared_expert.w1.weight",
        "model.layers.0.mlp.experts",
        "my_experts.0.w1.weight",
        "expertsx.0.w1.weight",
        "",
    ],
)
def test_a_name_beside_the_routed_experts_is_no_expert(name: str) -> None:
    assert parse_expert_name(name) is None


def test_a_long_or_odd_name_is_safe_to_print() -> None:
    for name in ("experts.\x1b[2J", "experts." + "x" * 10_000_000):
        with pytest.raises(NoRule) as caught:
            parse_expert_name(name)
        assert caught.value.message.isprintable()
        assert len(caught.value.message) < 500


@given(st.text(max_size=40))
def test_any_name_is_read_refused_or_no_expert(name: str) -> None:
    for candidate in (name, f"experts.{name}", f"model.experts.0.{name}"):
        try:
            found = parse_expert_name(candidate)
        except NoRule:
            continue
        assert found is None or found.experts.endswith("experts")


@given(st.integers(0, 999_999))
def test_the_number_of_an_expert_has_one_spelling(expert: int) -> None:
    found = parse_expert_name(tiny.Model().name(expert, "up_proj", "weight"))
    assert found is not None
    assert found.expert == expert
