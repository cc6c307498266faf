"""Experts modules are told apart, and checked: what is missing or odd is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

import tiny
from aiter_prep.errors import AiterPrepError, BadSource, NoRule
from aiter_prep.families.blocks import ExpertBlock, expert_counts, group_blocks, natural_key
from aiter_prep.families.names import parse_expert_name
from aiter_prep.storage.header import TensorInfo

EXPERTS = "model.layers.0.mlp.experts"
NAMING = {
    name: "w1_w2_w3" if m.projections[0] == "w1" else "gate_up_down"
    for name, (m, *_) in tiny.SAMPLES.items()
}
SCHEME = {
    "bf16": "bf16",
    "f16": "bf16",
    "fp8_block_f32": "fp8_block",
    "fp8_block_bf16": "fp8_block",
    "fp8_channel_1d": "fp8_channel",
    "fp8_channel_n1": "fp8_channel",
    "mxfp4_quark": "mxfp4",
    "mxfp4_ct": "mxfp4",
    "mxfp4_v4": "mxfp4",
    "mxfp8": "mxfp8",
    "mxfp4_gpt_oss": "mxfp4",
    "fp8_tensor": "fp8_tensor",
    "int4": "int4",
}


def blocks_of(
    shapes: Mapping[str, tiny.Shape], config: Mapping[str, Any] | None = None
) -> list[ExpertBlock]:
    """Group tensors that exist as names and shapes alone."""
    named = []
    for name, (dtype, shape) in shapes.items():
        parsed = parse_expert_name(name)
        if parsed is not None and parsed.suffix != "weight_shape":  # it goes to the common shards
            named.append((parsed, TensorInfo(name, dtype, shape, "f", 0, 0)))
    return list(group_blocks(named, config or {}))


def one(model: tiny.Model, config: Mapping[str, Any] | None = None) -> ExpertBlock:
    (block,) = blocks_of(tiny.shapes_of(model), config)
    return block


def refusal(
    shapes: Mapping[str, tiny.Shape],
    kind: type[AiterPrepError],
    config: Mapping[str, Any] | None = None,
) -> str:
    with pytest.raises(kind) as caught:
        blocks_of(shapes, config)
    assert type(caught.value) is kind
    assert caught.value.message.isprintable()
    return str(caught.value.message)


# --- what is sound ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCHEME)
def test_every_scheme_is_told_from_dtypes_suffixes_and_shapes(kind: str) -> None:
    model = tiny.Model(kind, hidden=256, intermediate=384, experts=3)
    block = one(model)
    assert block.scheme.name == SCHEME[kind]
    assert (block.num_experts, block.hidden, block.intermediate) == (3, 256, 384)
    assert block.experts == EXPERTS
    assert block.family.name == ("gpt_oss" if model.is_gpt_oss else "gate_up_down")


@pytest.mark.parametrize("hidden", [32, 96, 128, 2880])
@pytest.mark.parametrize("kind", tiny.CONVERTIBLE)
def test_the_sizes_are_in_elements_whatever_is_packed(kind: str, hidden: int) -> None:
    block = one(tiny.Model(kind, hidden=hidden, intermediate=160))
    assert (block.hidden, block.intermediate) == (hidden, 160)


@pytest.mark.parametrize("kind", [kind for kind in tiny.CONVERTIBLE if kind != "mxfp4_gpt_oss"])
@pytest.mark.parametrize("projections", [tiny.GATE_UP_DOWN, tiny.W1_W3_W2])
def test_every_scheme_comes_in_both_spellings(kind: str, projections: tuple[str, str, str]) -> None:
    block = one(tiny.Model(kind, projections=projections))
    assert block.family.name == ("w1_w2_w3" if "w1" in projections else "gate_up_down")
    gate = block.parts["gate", "weight"]
    assert gate.pattern == f"{EXPERTS}.{{expert}}.{projections[0]}.{gate.suffix}"
    assert [tensor.name for tensor in gate.tensors] == [
        gate.pattern.replace("{expert}", str(expert)) for expert in range(2)
    ]


def test_experts_are_ordered_by_number_not_by_name() -> None:
    block = one(tiny.Model(experts=12))
    names = [tensor.name for tensor in block.parts["up", "weight"].tensors]
    assert names == [f"{EXPERTS}.{expert}.up_proj.weight" for expert in range(12)]


def test_layers_are_ordered_by_number_not_by_name() -> None:
    blocks = blocks_of(tiny.shapes_of(tiny.Model(layers=12)))
    assert [block.experts for block in blocks] == [
        f"model.layers.{layer}.mlp.experts" for layer in range(12)
    ]


def test_each_layer_may_have_its_own_scheme_and_size() -> None:
    shapes = tiny.shapes_of(tiny.Model("bf16"))
    other = tiny.shapes_of(tiny.Model("mxfp8", layers=2, intermediate=64))
    shapes |= {name: shape for name, shape in other.items() if ".layers.1." in name}
    assert [(b.scheme.name, b.intermediate) for b in blocks_of(shapes)] == [
        ("bf16", 128),
        ("mxfp8", 64),
    ]


def test_an_mtp_block_may_have_its_own_number_of_experts() -> None:
    shapes = tiny.shapes_of(tiny.Model(experts=4))
    mtp = tiny.shapes_of(tiny.Model(experts=2, prefix="mtp."))
    blocks = blocks_of({**shapes, **mtp}, {"num_experts": 4})
    assert [(block.experts, block.num_experts) for block in blocks] == [
        (EXPERTS, 4),
        ("mtp.layers.0.mlp.experts", 2),
    ]


def test_a_biased_gpt_oss_block_and_one_without_biases_are_both_whole() -> None:
    for biases in (True, False):
        block = one(tiny.Model("mxfp4_gpt_oss", biases=biases))
        assert ({("gate_up", "bias"), ("down", "bias")} <= block.parts.keys()) is biases


def test_the_bytes_of_a_block_are_those_of_its_tensors() -> None:
    shapes = tiny.shapes_of(tiny.Model("mxfp8"))
    block = one(tiny.Model("mxfp8"))
    held = {tensor.name for part in block.parts.values() for tensor in part.tensors}
    assert held == {name for name in shapes if ".experts." in name}


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        ({}, set()),
        ({"num_experts": 8}, {8}),
        ({"n_routed_experts": 8, "num_local_experts": 4}, {4, 8}),
        ({"text_config": {"num_local_experts": 4}}, {4}),
        ({"num_experts": None, "text_config": None}, set()),
        ({"num_experts": True, "n_routed_experts": "8", "num_local_experts": 0}, set()),
        ({"num_experts": -1, "text_config": [1]}, set()),
    ],
)
def test_the_config_says_how_many_experts_there_are(
    config: Mapping[str, Any], counts: set[int]
) -> None:
    assert expert_counts(config) == counts


def test_names_are_sorted_as_people_count() -> None:
    names = ["a.10.b", "a.2.b", "a.b", "a", "a.2", "b.1"]
    assert sorted(names, key=natural_key) == ["a", "a.2", "a.2.b", "a.10.b", "a.b", "b.1"]


def test_a_number_of_thousands_of_digits_in_a_name_can_be_sorted() -> None:
    natural_key("model.layers." + "9" * 5000)


# --- what is missing ----------------------------------------------------------------------------

PER_EXPERT = [kind for kind in SCHEME if kind != "mxfp4_gpt_oss"]


@pytest.mark.parametrize("kind", PER_EXPERT)
def test_each_tensor_that_one_expert_lacks_is_named(kind: str) -> None:
    shapes = tiny.shapes_of(tiny.Model(kind, experts=3))
    held = [n for n in shapes if ".experts.1." in n and not n.endswith("weight_shape")]
    for name in held:
        rest = {key: shape for key, shape in shapes.items() if key != name}
        assert refusal(rest, BadSource) == f"tensor `{name}` is missing"


@pytest.mark.parametrize("kind", PER_EXPERT)
@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_a_projection_that_all_experts_lack_is_named(projection: str, kind: str) -> None:
    shapes = tiny.shapes_of(tiny.Model(kind))
    rest = {name: shape for name, shape in shapes.items() if f".{projection}_proj." not in name}
    message = refusal(rest, BadSource)
    assert message.startswith(f"`{EXPERTS}` has no ")
    assert f"of the {projection} projection" in message


@pytest.mark.parametrize("kind", [kind for kind in PER_EXPERT if tiny.KINDS[kind].scale])
@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_a_scale_that_all_experts_lack_is_named(projection: str, kind: str) -> None:
    shapes = tiny.shapes_of(tiny.Model(kind))
    scale = re.compile(rf"\.{projection}_proj\.(weight_scale|weight_scale_inv|scale)$")
    rest = {name: shape for name, shape in shapes.items() if not scale.search(name)}
    assert (
        refusal(rest, BadSource)
        == f"`{EXPERTS}` has no weight_scale of the {projection} projection"
    )


def test_scales_that_are_missing_altogether_leave_no_scheme() -> None:
    shapes = tiny.shapes_of(tiny.Model("mxfp4_quark"))
    rest = {name: shape for name, shape in shapes.items() if not name.endswith("_scale")}
    message = refusal(rest, NoRule)
    assert f"no quantisation scheme describes `{EXPERTS}.{{expert}}.gate_proj.weight`" in message
    assert "weight U8 [128, 64]" in message


@pytest.mark.parametrize("suffix", ["blocks", "scales", "bias"])
@pytest.mark.parametrize("projection", ["gate_up_proj", "down_proj"])
def test_a_fused_tensor_that_is_missing_is_named(projection: str, suffix: str) -> None:
    shapes = tiny.shapes_of(tiny.Model("mxfp4_gpt_oss"))
    del shapes[f"{EXPERTS}.{projection}_{suffix}"]
    role = {"blocks": "weight", "scales": "weight_scale", "bias": "bias"}[suffix]
    part = projection.removesuffix("_proj")
    assert refusal(shapes, BadSource) == f"`{EXPERTS}` has no {role} of the {part} projection"


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_whole_expert_that_is_missing_is_named(lost: int) -> None:
    shapes = tiny.shapes_of(tiny.Model(experts=4))
    rest = {name: shape for name, shape in shapes.items() if f".experts.{lost}." not in name}
    message = refusal(rest, BadSource, {"num_experts": 4})
    assert message == f"`{EXPERTS}` lacks expert {lost} (1 missing of 4)"


def test_a_gap_is_found_without_the_config() -> None:
    shapes = tiny.shapes_of(tiny.Model(experts=4))
    rest = {name: shape for name, shape in shapes.items() if ".experts.2." not in name}
    assert refusal(rest, BadSource) == f"`{EXPERTS}` lacks expert 2 (1 missing of 4)"


def test_more_experts_than_the_config_says_are_refused() -> None:
    message = refusal(tiny.shapes_of(tiny.Model(experts=4)), BadSource, {"num_experts": 3})
    assert message == f"`{EXPERTS}` holds 4 experts, the config says 3"


def test_either_number_that_the_config_says_is_right() -> None:
    config = {"n_routed_experts": 2, "num_experts": 6}
    assert one(tiny.Model(experts=2), config).num_experts == 2
    assert one(tiny.Model(experts=6), config).num_experts == 6
    message = refusal(tiny.shapes_of(tiny.Model(experts=7)), BadSource, config)
    assert "the config says 2 or 6" in message


@pytest.mark.parametrize("prefix", ["a{x}b.", "{}.", "a{.", "{0}."])
def test_a_missing_tensor_below_a_path_with_braces_is_named(prefix: str) -> None:
    shapes = tiny.shapes_of(tiny.Model(prefix=prefix))
    name = f"{prefix}layers.0.mlp.experts.1.up_proj.weight"
    del shapes[name]
    assert refusal(shapes, BadSource) == f"tensor `{name}` is missing"


# --- what is odd --------------------------------------------------------------------------------


def changed(
    kind: str, end: str, change: Callable[[str, tuple[int, ...]], tiny.Shape]
) -> dict[str, tiny.Shape]:
    """Return the tensors of a model with those changed whose names end so."""
    shapes = tiny.shapes_of(tiny.Model(kind))
    return {n: change(*shape) if n.endswith(end) else shape for n, shape in shapes.items()}


@pytest.mark.parametrize("kind", PER_EXPERT)
def test_an_expert_of_another_shape_than_its_siblings_is_named(kind: str) -> None:
    suffix = tiny.KINDS[kind].weight[0]
    name = f"1.down_proj.{suffix}"
    message = refusal(changed(kind, name, lambda d, s: (d, (s[0] + 32, s[1]))), BadSource)
    assert f"tensor `{EXPERTS}.{name}` is " in message
    assert f"`{EXPERTS}.0.down_proj.{suffix}` is " in message


@pytest.mark.parametrize("kind", PER_EXPERT)
def test_an_expert_of_another_dtype_than_its_siblings_is_named(kind: str) -> None:
    name = f"1.gate_proj.{tiny.KINDS[kind].weight[0]}"
    message = refusal(changed(kind, name, lambda _, s: ("F32", s)), BadSource)
    assert f"tensor `{EXPERTS}.{name}` is F32" in message


@pytest.mark.parametrize("projection", ["up_proj", "down_proj"])
def test_a_projection_of_another_dtype_than_the_gate_is_named(projection: str) -> None:
    message = refusal(changed("bf16", f"{projection}.weight", lambda _, s: ("F16", s)), BadSource)
    assert (
        message == f"`{EXPERTS}.{{expert}}.{projection}.weight` has another dtype than its siblings"
    )


@pytest.mark.parametrize("kind", PER_EXPERT)
@pytest.mark.parametrize("projection", ["up_proj", "down_proj"])
def test_a_projection_whose_shape_does_not_fit_the_gate_is_named(
    projection: str, kind: str
) -> None:
    end = f"{projection}.{tiny.KINDS[kind].weight[0]}"
    message = refusal(changed(kind, end, lambda d, s: (d, (s[0], s[1] + 16))), BadSource)
    assert f"`{EXPERTS}.{{expert}}.{end}` has shape" in message
    assert "which does not fit" in message


def test_a_transposed_down_projection_is_refused() -> None:
    shapes = tiny.shapes_of(tiny.Model(hidden=128, intermediate=64))
    turned = {
        name: (dtype, shape[::-1]) if "down_proj" in name else (dtype, shape)
        for name, (dtype, shape) in shapes.items()
    }
    assert "which does not fit 128 x 64 of bf16" in refusal(turned, BadSource)


@pytest.mark.parametrize("kind", [kind for kind in PER_EXPERT if tiny.KINDS[kind].scale])
def test_a_scale_of_the_down_projection_that_fits_no_weight_is_named(kind: str) -> None:
    scale = tiny.KINDS[kind].scale
    assert scale is not None
    end = f"down_proj.{scale[0]}"
    message = refusal(changed(kind, end, lambda d, s: (d, (*s, 3))), BadSource)
    assert f"`{EXPERTS}.{{expert}}.{end}` has shape" in message


def test_an_odd_number_of_fused_rows_is_refused() -> None:
    shapes = {
        name: (dtype, (shape[0], shape[1] - 1, *shape[2:])) if "gate_up" in name else (dtype, shape)
        for name, (dtype, shape) in tiny.shapes_of(tiny.Model("mxfp4_gpt_oss")).items()
    }
    assert "has an odd number of rows" in refusal(shapes, BadSource)


def test_fused_tensors_that_disagree_on_the_number_of_experts_are_refused() -> None:
    shapes = tiny.shapes_of(tiny.Model("mxfp4_gpt_oss", experts=4))
    name = f"{EXPERTS}.down_proj_scales"
    shapes[name] = ("U8", (3, *shapes[name][1][1:]))
    assert refusal(shapes, BadSource) == f"the tensors of `{EXPERTS}` disagree on experts"


def test_fused_scalars_are_refused() -> None:
    shapes: dict[str, tiny.Shape] = {
        f"{EXPERTS}.{name}_{suffix}": ("U8", ())
        for name in ("gate_up_proj", "down_proj")
        for suffix in ("blocks", "scales")
    }
    refusal(shapes, BadSource)


@pytest.mark.parametrize("shape", [(0,), (7,), (2, 3, 4)])
def test_a_weight_whose_shape_is_another_than_the_siblings_need_is_refused(
    shape: tuple[int, ...],
) -> None:
    shapes = {
        name: ("BF16", shape if ".experts." in name else other)
        for name, (_, other) in tiny.shapes_of(tiny.Model()).items()
    }
    with pytest.raises((BadSource, NoRule)):
        blocks_of(shapes)


# --- what no rule describes ---------------------------------------------------------------------


def test_two_spellings_in_one_module_are_refused() -> None:
    shapes = tiny.shapes_of(tiny.Model())
    other = tiny.shapes_of(tiny.Model(projections=tiny.W1_W3_W2))
    shapes |= {name: shape for name, shape in other.items() if ".experts.1." in name}
    message = refusal(shapes, NoRule)
    assert f"no one family names its experts as `{EXPERTS}` does" in message
    assert "down_proj, gate_proj, up_proj, w1, w2, w3" in message


def test_two_suffixes_of_one_role_are_refused() -> None:
    shapes = tiny.shapes_of(tiny.Model("fp8_block_f32"))
    lost = f"{EXPERTS}.1.up_proj.weight_scale_inv"
    both = {name.removesuffix("_inv"): shape for name, shape in shapes.items()}
    assert "mixes two spellings" in refusal({**shapes, **both}, NoRule)
    shapes[lost.removesuffix("_inv")] = shapes.pop(lost)
    assert refusal(shapes, BadSource) == f"tensor `{lost}` is missing"


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_a_projection_in_another_spelling_is_refused(projection: str) -> None:
    """As if half a checkpoint had been renamed: gate_proj and down_proj, but w3."""
    spelled = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
    old, new = spelled[projection]
    shapes = {n.replace(old, new): shape for n, shape in tiny.shapes_of(tiny.Model()).items()}
    assert f"no one family names its experts as `{EXPERTS}` does" in refusal(shapes, NoRule)


def test_fused_and_single_experts_in_one_module_are_refused() -> None:
    shapes = tiny.shapes_of(tiny.Model()) | tiny.shapes_of(tiny.Model("mxfp4_gpt_oss"))
    assert f"no one family names its experts as `{EXPERTS}` does" in refusal(shapes, NoRule)


CHANGES: dict[str, tuple[str, str, tiny.Shape]] = {
    # what is changed in the gate of which kind, and what the message shows
    "int8 with a scale per channel is not packed fp4": ("int8", "", ("", ())),
    "I8 with groups, but named weight_scale": ("mxfp4_v4", "scale>weight_scale", ("F8_E8M0", ())),
    "I8 with U8 scales": ("mxfp4_v4", "scale", ("U8", ())),
    "U8 with float scales is not MXFP4": ("mxfp4_quark", "weight_scale", ("BF16", ())),
    "U8 with a scale per 16 is not MXFP4": ("mxfp4_ct", "weight_scale", ("U8", (128, 8))),
    "U8 named scale": ("mxfp4_quark", "weight_scale>scale", ("U8", ())),
    "NVFP4 scales": ("mxfp4_ct", "weight_scale", ("F8_E4M3", (128, 8))),
    "FP8 with scales of 64 x 64": ("fp8_block_f32", "weight_scale_inv", ("F32", (2, 2))),
    "FP8 with a scale per column": ("fp8_channel_n1", "weight_scale", ("F32", (1, 128))),
    "FP8 with integer scales": ("fp8_channel_1d", "weight_scale", ("I32", (128,))),
    "FP8 with a scale per channel named scale": (
        "fp8_channel_1d",
        "weight_scale>scale",
        ("F32", ()),
    ),
    "FP8 blocks with scales of bytes": ("fp8_block_f32", "weight_scale_inv", ("U8", (1, 1))),
    "MXFP8 with a scale per 16": ("mxfp8", "weight_scale_inv", ("U8", (128, 8))),
    "F32 weights": ("bf16", "weight", ("F32", (128, 128))),
    "FP8 without scales": ("bf16", "weight", ("F8_E4M3", (128, 128))),
    "E5M2 weights": ("fp8_block_f32", "weight", ("F8_E5M2", (128, 128))),
    "fnuz weights": ("fp8_block_f32", "weight", ("F8_E4M3FNUZ", (128, 128))),
    "BF16 with scales": ("fp8_block_f32", "weight", ("BF16", (128, 128))),
    "packed I32": ("mxfp4_ct", "weight_packed", ("I32", (128, 16))),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_no_scheme_describes_is_refused_with_what_was_seen(case: str) -> None:
    kind, suffix, (dtype, shape) = CHANGES[case]
    old, _, new = suffix.partition(">")
    shapes = {}
    for name, (old_dtype, old_shape) in tiny.shapes_of(tiny.Model(kind)).items():
        if suffix and ".experts." in name and name.endswith(f".{old}"):
            renamed = name.removesuffix(old) + (new or old)
            shapes[renamed] = (dtype or old_dtype, shape or old_shape)
        else:
            shapes[name] = (old_dtype, old_shape)
    message = refusal(shapes, NoRule)
    assert f"no quantisation scheme describes `{EXPERTS}.{{expert}}.gate_proj" in message
    assert dtype in message


def test_nvfp4_is_refused_by_the_first_tensor_that_is_its_own() -> None:
    with pytest.raises(
        NoRule, match=r"gate_proj\.weight_global_scale` lies below an experts module"
    ):
        blocks_of(tiny.shapes_of(tiny.Model("nvfp4")))


@pytest.mark.parametrize("kind", ["mxfp8", "fp8_block_f32", "bf16"])
def test_an_input_scale_beside_a_scheme_that_has_none_is_refused(kind: str) -> None:
    shapes = tiny.shapes_of(tiny.Model(kind))
    for expert in range(2):
        for projection in tiny.GATE_UP_DOWN:
            shapes[f"{EXPERTS}.{expert}.{projection}.input_scale"] = ("F32", ())
    message = refusal(shapes, NoRule)
    assert f"scheme {SCHEME[kind]} has no rule for `{EXPERTS}.{{expert}}." in message
    assert "input_scale" in message


def test_one_expert_of_one_row_is_told_or_refused_but_never_guessed() -> None:
    """A scale `[1, 1]` of a weight `[1, 128]` may be per block or per channel."""
    model = tiny.Model("fp8_channel_n1", intermediate=1)
    assert "no quantisation scheme describes" in refusal(tiny.shapes_of(model), NoRule)


def test_a_scale_per_tensor_may_be_a_scalar_or_a_vector_of_one() -> None:
    for shape in ((), (1,)):
        shapes = changed("fp8_tensor", "weight_scale", lambda d, _, shape=shape: (d, shape))  # type: ignore[misc]
        assert [block.scheme.name for block in blocks_of(shapes)] == ["fp8_tensor"]


def test_the_order_of_the_tensors_does_not_matter() -> None:
    for kind in tiny.CONVERTIBLE:
        model = replace(tiny.Model(kind), layers=2, experts=3)
        shapes = tiny.shapes_of(model)
        backwards = dict(reversed(shapes.items()))
        assert {b.experts: list(b.parts["down", "weight"].tensors) for b in blocks_of(shapes)} == {
            b.experts: list(b.parts["down", "weight"].tensors) for b in blocks_of(backwards)
        }
