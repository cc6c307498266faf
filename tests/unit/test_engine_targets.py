"""What the targets `sglang` and `atom` make of options, ranks and checkpoints they do not take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_families
from aiter_prep.errors import InvalidUsage, NoRule
from aiter_prep.execution import execute
from aiter_prep.plan import Plan, make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.targets.table import TARGETS, target_named
from families_table import CT_TENSOR, FAMILIES, model
from oracle import Source, read_safetensors
from tiny_families import Experts, Family

EXPERTS = "model.layers.0.mlp.experts"
GPT_OSS = Family(
    model("gpt_oss", "num_local_experts"),
    (Experts(EXPERTS, "mxfp4", fused="gpt_oss"),),
    {"quant_method": "mxfp4"},
    hidden=64,
    intermediate=64,
)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync: what a crash leaves behind is the subject of other tests."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)


def planned(folder: Path, family: Family | str, target: str, **more: object) -> Plan:
    """Plan a conversion of a tiny checkpoint."""
    held = FAMILIES[family] if isinstance(family, str) else family
    source = tiny_families.write(folder / "source", str(family), held)
    return make_plan(open_checkpoint(source), target=target, **more)  # type: ignore[arg-type]


def tensors_of_rank(folder: Path, rank: int) -> dict[str, Source]:
    """Read everything that a rank has of its own."""
    files = folder.glob(f"model-rank-{rank}-*.safetensors")
    return {name: tensor for file in files for name, tensor in read_safetensors(file).items()}


@pytest.mark.parametrize(
    ("alias", "name"),
    [("sglang", "sglang@0.5.23"), ("atom", "atom@2026-08-22"), ("vllm", "vllm@0.33")],
)
def test_a_target_has_a_short_name_and_records_the_long_one(alias: str, name: str) -> None:
    assert target_named(alias).name == name


@pytest.mark.parametrize(
    ("target", "default", "other"),
    [("sglang", "interleaved_16", "separated"), ("atom", "separated", "interleaved_16")],
)
def test_the_order_of_gate_and_up_is_the_engines_default_unless_asked_for(
    target: str, default: str, other: str, tmp_path: Path
) -> None:
    option = other.removesuffix("_16")
    plain = planned(tmp_path / "a", "deepseek_v4", target)
    asked = planned(tmp_path / "b", "deepseek_v4", target, options={"gate_up": option})
    assert {block.path.row_order for block in plain.blocks} == {default}
    assert {block.path.row_order for block in asked.blocks} == {other}


@pytest.mark.parametrize("target", ["sglang", "atom"])
def test_an_option_that_decides_nothing_is_a_wrong_call(target: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="--gate-up"):
        planned(tmp_path, "deepseek_v3", target, options={"gate_up": "interleaved"})


@pytest.mark.parametrize("target", ["sglang", "atom"])
def test_engines_that_share_experts_evenly_refuse_a_rest(target: str, tmp_path: Path) -> None:
    with pytest.raises(NoRule, match="shared equally by 3 ranks"):
        planned(tmp_path, "mixtral", target, ep=3)


@pytest.mark.parametrize("target", ["sglang", "atom"])
def test_engines_without_round_robin_refuse_it(target: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="no placement round_robin"):
        planned(tmp_path, "mixtral", target, ep=2, placement="round_robin")


def test_sglang_pads_a_rank_where_vllm_refuses_to_cut_a_block(tmp_path: Path) -> None:
    family = Family(
        model("deepseek_v3", "n_routed_experts"),
        (Experts(EXPERTS, "fp8_block"),),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        intermediate=384,
    )
    plan = planned(tmp_path / "a", family, "sglang", tp=2)
    assert [len(part) for part in plan.blocks[0].cut.parts] == [256, 128]
    with pytest.raises(NoRule, match="would be cut at 192"):
        planned(tmp_path / "b", family, "vllm", tp=2)


def test_a_rank_that_holds_no_columns_keeps_the_scales_that_are_not_cut(tmp_path: Path) -> None:
    family = FAMILIES["glm4_moe-fp8"]
    small = Family(**{**vars(family), "intermediate": 352})
    plan = planned(tmp_path, small, "sglang", tp=4)
    execute(plan, tmp_path / "out")
    first, last = (tensors_of_rank(tmp_path / "out", rank) for rank in (0, 3))
    name = "model.layers.1.mlp.experts.w2_weight_scale"
    assert len(plan.blocks[0].cut.parts[3]) == 0
    assert last[name] == first[name]
    assert not any(last[name.removesuffix("_scale")].data)


@pytest.mark.parametrize("target", ["aiter", "vllm", "sglang", "atom"])
def test_expert_parallel_ranks_keep_the_down_bias_of_their_own_experts(
    target: str, tmp_path: Path
) -> None:
    plan = planned(tmp_path, GPT_OSS, target, ep=2)
    execute(plan, tmp_path / "out")
    source = read_safetensors(tmp_path / "source" / "model.safetensors")
    wanted = source[f"{EXPERTS}.down_proj_bias"].data
    leaf = "w2_weight_bias" if target == "sglang" else "w2_bias"
    held = [tensors_of_rank(tmp_path / "out", rank)[f"{EXPERTS}.{leaf}"] for rank in (0, 1)]
    width = 4 if held[0].dtype == "F32" else 2
    rows = [np.frombuffer(tensor.data, np.uint8).reshape(2, -1) for tensor in held]
    top = [table[:, : 64 * width].reshape(2, 64, width)[:, :, -2:].tobytes() for table in rows]
    assert b"".join(top) == wanted


@pytest.mark.parametrize(("tp", "is_zero"), [(0, False), (1, True)])
def test_of_tensor_parallel_ranks_the_first_alone_has_the_down_bias(
    tp: int, is_zero: bool, tmp_path: Path
) -> None:
    execute(planned(tmp_path, GPT_OSS, "atom", tp=2), tmp_path / "out")
    bias = tensors_of_rank(tmp_path / "out", tp)[f"{EXPERTS}.w2_bias"]
    assert any(bias.data) != is_zero


def test_a_requantised_tensor_warns_that_the_gpu_divides_by_approximation(tmp_path: Path) -> None:
    plan = planned(tmp_path, "qwen3_moe-fp8-per-tensor", "sglang")
    assert any("approximate" in warning for warning in plan.warnings)


def test_sglang_holds_a_per_tensor_scale_a_second_time_for_each_row(tmp_path: Path) -> None:
    manifest = execute(planned(tmp_path, "qwen3_moe-fp8-per-tensor", "sglang"), tmp_path / "out")
    held = tensors_of_rank(tmp_path / "out", 0)
    base = "model.layers.1.mlp.experts.w13_weight_scale"
    one = np.frombuffer(held[base].data, "<f4")
    every = np.frombuffer(held[f"{base}1"].data, "<f4").reshape(held[f"{base}1"].shape)
    assert every.shape == (4, 512)
    assert (every == one[:, None]).all()
    assert {record.name for record in manifest.lossy} >= {base, f"{base}1"}


def test_atom_refuses_static_inputs_that_its_reading_of_the_config_does_not_see(
    tmp_path: Path,
) -> None:
    static = Family(
        model("mixtral", "num_local_experts"),
        (Experts(EXPERTS, "fp8_tensor_static"),),
        CT_TENSOR,
    )
    with pytest.raises(NoRule, match=r"no rule for .*input_scale"):
        planned(tmp_path, static, "atom")


def differing(quantization: Mapping[str, Any]) -> Family:
    """Return a checkpoint with static input scales, which differ between gate and up."""
    return Family(
        model("qwen3_moe"), (Experts(EXPERTS, "fp8_tensor_static"),), quantization=quantization
    )


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
CT_STATIC = json.loads(json.dumps(CT_TENSOR))
CT_STATIC["config_groups"]["group_0"]["input_activations"]["dynamic"] = False


def test_vllm_stops_where_input_scales_of_compressed_tensors_differ(tmp_path: Path) -> None:
    plan = planned(tmp_path, differing(CT_STATIC), "vllm")
    source = read_safetensors(tmp_path / "source" / "model.safetensors")
    with pytest.raises(NoRule, match="the engine stops") as caught:
        execute(plan, tmp_path / "out")
    for projection in ("gate_proj", "up_proj"):
        name = f"{EXPERTS}.0.{projection}.input_scale"
        value = np.frombuffer(source[name].data, "<f4")[0]
        assert f"`{name}` is {float(value)!r}" in caught.value.message
    assert "--target aiter" in caught.value.hint


@pytest.mark.parametrize(
    ("target", "counted"),
    [("aiter", ("gate_proj", "up_proj")), ("vllm", ("up_proj",)), ("sglang", ("up_proj",))],
)
def test_engines_keep_the_input_scale_that_they_read_last_and_aiter_the_larger(
    tmp_path: Path, target: str, counted: tuple[str, ...]
) -> None:
    execute(planned(tmp_path, differing(STATIC), target), tmp_path / "out")
    source = read_safetensors(tmp_path / "source" / "model.safetensors")
    values = {
        float(np.frombuffer(tensor.data, "<f4")[0])
        for name, tensor in source.items()
        if name.endswith(tuple(f"{projection}.input_scale" for projection in counted))
    }
    stored = tensors_of_rank(tmp_path / "out", 0)[f"{EXPERTS}.w13_input_scale"]
    assert np.frombuffer(stored.data, "<f4").tolist() == [max(values)]


def test_every_refusal_says_why_in_words() -> None:
    for target in TARGETS.values():
        for refusal in target.refusals:
            assert len(refusal.reason.split()) > 3
            assert not refusal.reason.endswith(".")
