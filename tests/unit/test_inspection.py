"""What a folder holds, and what a conversion would write, can be told without reading a tensor."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import prepared
import tiny
from aiter_prep.errors import BadSource, DataMismatch, NoRule
from aiter_prep.execution import execute
from aiter_prep.families.common import COMMON_RULES
from aiter_prep.inspection import (
    Outlook,
    PreparedInspection,
    SourceInspection,
    UnfinishedInspection,
    forecast_of_plan,
    inspect_path,
    obstacles,
)
from aiter_prep.inspection.model import compact, split_layer
from aiter_prep.inspection.prepared import inspect_prepared
from aiter_prep.inspection.source import COMMON_ROLES
from aiter_prep.plan import Plan, make_plan
from aiter_prep.storage.checkpoint import Checkpoint, open_checkpoint


def write(folder: Path, model: tiny.Model, **more: tiny.Tensor) -> Path:
    """Write a tiny checkpoint with a few tensors more."""
    tensors = {**tiny.tensors_of(model), **more}
    return tiny.write_shards(folder, tiny.shards_of(model, tensors), tiny.config_of(model))


def inspect_source(folder: Path) -> SourceInspection:
    found = inspect_path(folder)
    assert isinstance(found, SourceInspection)
    return found


# --- a source -----------------------------------------------------------------------------------


def plan(checkpoint: Checkpoint, outlook: Outlook, tp: int) -> Plan:
    """Plan the first rank."""
    return make_plan(checkpoint, tp=tp, target=outlook.target, gfx=outlook.gfx, ranks=[0])


def test_what_is_forecast_is_what_a_plan_writes(checkpoint_folder: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_folder)
    for outlook in inspect_source(checkpoint_folder).outlooks:
        for forecast in outlook.forecasts:
            plan = make_plan(checkpoint, tp=forecast.tp, target=outlook.target, gfx=outlook.gfx)
            assert forecast == forecast_of_plan(plan)
            assert forecast.total_bytes == plan.total_bytes


def test_a_tensor_parallel_size_that_is_listed_works_and_no_other(checkpoint_folder: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_folder)
    for outlook in inspect_source(checkpoint_folder).outlooks:
        for tp in range(1, 65):
            if tp in outlook.workable_tp:
                plan(checkpoint, outlook, tp)
            else:
                with pytest.raises(NoRule):
                    plan(checkpoint, outlook, tp)


def test_the_bytes_of_all_roles_add_up(checkpoint_folder: Path) -> None:
    found = inspect_source(checkpoint_folder)
    assert sum(found.roles.values()) == found.total_bytes
    assert list(found.roles.values()) == sorted(found.roles.values(), reverse=True)
    assert "unknown" not in found.roles
    assert not found.problems


def test_sound_checkpoints_have_no_warning(checkpoint_folder: Path) -> None:
    assert not inspect_source(checkpoint_folder).warnings


def test_padding_is_part_of_the_forecast(tmp_path: Path) -> None:
    model = tiny.Model(kind="mxfp4_quark", hidden=256, intermediate=320)
    found = inspect_source(write(tmp_path / "model", model))
    by_tp = {forecast.tp: forecast for forecast in found.outlooks[0].forecasts}
    # 160 columns of 256 are padded to 256: w13 holds 96 empty rows of 256, twice
    weight = next(role for role in by_tp[2].roles if role.role == "weight")
    experts = 2 * model.experts * 256 // 2  # ranks, experts, bytes of a row of w13
    assert weight.padding_bytes == experts * 96 * 2 + experts * 96
    assert by_tp[2].padding_bytes > weight.padding_bytes  # and the scales


def test_modules_of_a_kind_are_one_group(tmp_path: Path) -> None:
    found = inspect_source(write(tmp_path / "model", tiny.Model(layers=3)))
    (group,) = found.groups
    assert (group.experts, group.layers, group.modules) == (
        "model.layers.{layer}.mlp.experts",
        "0-2",
        3,
    )
    assert group.total_bytes == found.roles["expert_weights"]


def test_modules_of_another_size_are_another_group(tmp_path: Path) -> None:
    small = tiny.tensors_of(tiny.Model(layers=2))
    large = tiny.tensors_of(tiny.Model(layers=2, intermediate=256))
    mixed = {name: (large if ".layers.1." in name else small)[name] for name in small}
    folder = tiny.write_shards(
        tmp_path / "model", {tiny.SINGLE: mixed}, tiny.config_of(tiny.Model())
    )
    groups = inspect_source(folder).groups
    assert [(group.layers, group.intermediate) for group in groups] == [("0", 128), ("1", 256)]


def test_an_unknown_tensor_is_reported_and_hides_nothing(tmp_path: Path) -> None:
    odd = tiny.Tensor("F32", (2,), bytes(8))
    folder = write(tmp_path / "model", tiny.Model(), **{"model.mystery": odd, "zzz": odd})
    found = inspect_source(folder)
    assert found.problems == ("tensor `model.mystery` is known to no family (2 such)",)
    assert found.roles["unknown"] == 16
    assert found.outlooks[0].forecasts
    with pytest.raises(NoRule):
        make_plan(open_checkpoint(folder), tp=1)


def test_an_unknown_tensor_below_the_experts_is_reported(tmp_path: Path) -> None:
    odd = tiny.Tensor("F32", (2,), bytes(8))
    name = "model.layers.0.mlp.experts.0.gate_proj.weight_zero_point"
    found = inspect_source(write(tmp_path / "model", tiny.Model(), **{name: odd}))
    assert found.problems == (f"tensor `{name}` is known to no family",)


def test_a_broken_module_hides_no_other(tmp_path: Path) -> None:
    model = tiny.Model(layers=2)
    tensors = tiny.tensors_of(model)
    del tensors[model.name(1, "up_proj", "weight", layer=1)]
    folder = tiny.write_shards(tmp_path / "model", {tiny.SINGLE: tensors}, tiny.config_of(model))
    found = inspect_source(folder)
    assert [group.layers for group in found.groups] == ["0"]
    assert "model.layers.1.mlp.experts.1.up_proj.weight" in found.problems[0]


def test_faults_of_many_modules_are_counted(tmp_path: Path) -> None:
    model = tiny.Model(kind="nvfp4", layers=3)
    found = inspect_source(write(tmp_path / "model", model))
    assert not found.groups
    assert not found.outlooks
    assert found.problems[-1] == "2 more experts modules have such a fault"


def test_a_dense_model_has_nothing_to_prepare(tmp_path: Path) -> None:
    dense = {"model.norm.weight": tiny.Tensor("BF16", (2,), bytes(4))}
    folder = tiny.write_shards(tmp_path / "model", {tiny.SINGLE: dense}, {"model_type": "llama"})
    found = inspect_source(folder)
    assert found.problems == ("there are no routed experts, so there is nothing to prepare",)
    assert found.model_type == "llama"


def test_a_scheme_that_a_target_refuses_has_a_reason(tmp_path: Path) -> None:
    found = inspect_source(write(tmp_path / "model", tiny.Model(kind="mxfp8")))
    by_place = {(outlook.target, outlook.gfx): outlook for outlook in found.outlooks}
    refused = by_place["vllm@0.33", "gfx942"]
    assert "mxfp8" in refused.refusal
    assert not refused.workable_tp
    assert by_place["aiter", "gfx942"].workable_tp


def test_a_config_that_promises_something_else_is_a_problem(tmp_path: Path) -> None:
    promised = tiny.KINDS["mxfp4_quark"].quantization
    model = tiny.Model(config={"quantization_config": promised})
    (problem,) = inspect_source(write(tmp_path / "model", model)).problems
    assert "promises mxfp4" in problem
    assert "--trust-tensors" in problem


def test_a_link_that_leads_out_is_a_problem(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", tiny.Model())
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    (folder / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    (problem,) = inspect_source(folder).problems
    assert "`tokenizer.json` is a link that leads out of its folder" in problem


def test_a_shard_that_is_gone_from_a_prepared_folder_is_named(tmp_path: Path) -> None:
    _, out = prepared.small(tmp_path)
    assert inspect_prepared(out).missing == ()
    gone = next(iter(out.glob("*rank*.safetensors")))
    gone.unlink()
    assert inspect_prepared(out).missing == (gone.name,)


def test_a_folder_without_its_manifest_is_not_sent_to_restore(tmp_path: Path) -> None:
    _, out = prepared.small(tmp_path)
    (out / prepared.MANIFEST).unlink()
    with pytest.raises(NoRule) as caught:
        inspect_path(out)
    assert "`aiter_prep.json` is gone" in caught.value.hint
    assert "restore" not in caught.value.hint


def test_what_the_index_does_not_name_is_a_warning(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", tiny.Model(spread="layers"))
    tiny.write_shard(folder / "left-over.safetensors", {"a": tiny.Tensor("U8", (1,), b"0")})
    (warning,) = inspect_source(folder).warnings
    assert "left-over.safetensors" in warning


def test_every_role_of_a_common_tensor_is_a_kind_that_there_is() -> None:
    assert set(COMMON_ROLES) <= {rule.name for rule in COMMON_RULES}


# --- a prepared folder --------------------------------------------------------------------------


def test_a_prepared_folder_says_what_was_done(tmp_path: Path) -> None:
    source = write(tmp_path / "model", tiny.Model(kind="mxfp4_quark", layers=2, intermediate=320))
    plan = make_plan(open_checkpoint(source), tp=2, gfx="gfx942")
    execute(plan, tmp_path / "out")
    found = inspect_path(tmp_path / "out")
    assert isinstance(found, PreparedInspection)
    assert found.source == {"name": "model", "revision": None}
    assert (found.target["name"], found.target["gfx"], found.target["tp"]) == (
        "aiter",
        "gfx942",
        2,
    )
    assert [entry.rank for entry in found.ranks] == [0, 1, None]
    assert found.total_bytes == plan.total_bytes == sum(e.total_bytes for e in found.ranks)
    assert found.padding_bytes == forecast_of_plan(plan).padding_bytes
    (group,) = found.groups
    assert (group.layers, group.modules) == ("0-1", 2)
    assert group.facts["padded_intermediate_per_rank"] == 256
    assert found.layouts == {"e8m0": 8, "tile_16x16": 8}


def test_a_prepared_folder_is_told_from_its_manifest_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "model", tiny.Model())
    execute(make_plan(open_checkpoint(source), tp=1), tmp_path / "out")
    for shard in (tmp_path / "out").glob("*.safetensors"):
        shard.unlink()
    assert isinstance(inspect_path(tmp_path / "out"), PreparedInspection)


def test_a_damaged_manifest_is_not_believed(tmp_path: Path) -> None:
    source = write(tmp_path / "model", tiny.Model())
    execute(make_plan(open_checkpoint(source), tp=1), tmp_path / "out")
    manifest = tmp_path / "out" / "aiter_prep.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"tp": 1', b'"tp": 2'))
    with pytest.raises(DataMismatch):
        inspect_path(tmp_path / "out")


def test_an_unfinished_folder_is_called_so(tmp_path: Path) -> None:
    (tmp_path / ".aiter_prep.journal").write_bytes(b"")
    (tmp_path / "model-rank-0-part-0.safetensors").write_bytes(b"12345678")
    found = inspect_path(tmp_path)
    assert isinstance(found, UnfinishedInspection)
    assert (found.shards, found.total_bytes) == (1, 8)


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_what_is_no_folder_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "path"
    if kind == "file":
        path.write_text("no folder")
    with pytest.raises(BadSource):
        inspect_path(path)


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", tiny.Model())
    shard = folder / tiny.SINGLE
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(BadSource, match="truncated"):
        inspect_path(folder)


# --- JSON, room, words --------------------------------------------------------------------------


def test_every_inspection_is_json_with_its_kind_first(tmp_path: Path) -> None:
    source = write(tmp_path / "model", tiny.Model())
    execute(make_plan(open_checkpoint(source), tp=1), tmp_path / "out")
    for path, kind in ((source, "source"), (tmp_path / "out", "prepared")):
        document: dict[str, Any] = json.loads(json.dumps(inspect_path(path).to_json()))
        assert next(iter(document)) == "kind"
        assert document["kind"] == kind
        assert document["folder"] == str(path)


def test_a_forecast_is_plain_numbers(tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(write(tmp_path / "model", tiny.Model())), tp=2)
    assert json.loads(json.dumps(asdict(forecast_of_plan(plan))))["tp"] == 2


def test_a_full_disk_and_a_full_folder_are_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(open_checkpoint(write(tmp_path / "model", tiny.Model())), tp=1)
    out = tmp_path / "deep" / "out"
    assert obstacles(plan, out, resume=False, overwrite=False) == ()
    out.mkdir(parents=True)
    (out / "mine.txt").write_text("keep")
    monkeypatch.setattr("aiter_prep.inspection.room.free_bytes", lambda _: 10)
    not_empty, no_room = obstacles(plan, out, resume=False, overwrite=True)
    assert "not empty" in not_empty
    assert f"needs {plan.total_bytes} bytes, its disk has 10 free" in no_room


def test_what_is_written_already_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(open_checkpoint(write(tmp_path / "model", tiny.Model())), tp=1)
    out = tmp_path / "out"
    out.mkdir()
    (out / ".aiter_prep.journal").write_bytes(b"")
    for shard in plan.shards:
        (out / shard.file).write_bytes(b"")
    monkeypatch.setattr("aiter_prep.inspection.room.free_bytes", lambda _: 0)
    assert obstacles(plan, out, resume=True, overwrite=False) == ()
    assert len(obstacles(plan, out, resume=False, overwrite=True)) == 1


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([5, 2, 1, 1, 0], "0-2, 5"), ([1, 3], "1, 3")],
)
def test_numbers_are_written_as_ranges(numbers: list[int], text: str) -> None:
    assert compact(numbers) == text


@pytest.mark.parametrize(
    ("path", "pattern", "layer"),
    [
        ("model.layers.3.mlp.experts", "model.layers.{layer}.mlp.experts", 3),
        ("mtp.layers.0.mlp.experts", "mtp.layers.{layer}.mlp.experts", 0),
        ("experts", "experts", None),
        ("a.²b.experts", "a.²b.experts", None),
    ],
)
def test_a_layer_is_the_last_number_of_a_path(path: str, pattern: str, layer: int | None) -> None:
    assert split_layer(path) == (pattern, layer)
