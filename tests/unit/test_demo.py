"""The demonstration makes the same checkpoint every time, and brings it round in one piece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

import prepared
from aiter_prep.demo import (
    TP,
    DemoStep,
    differences,
    make_checkpoint,
    prepared_folder,
    restored_folder,
    run_demo,
    source_folder,
)
from aiter_prep.errors import OutputNotEmpty
from aiter_prep.families.promises import promised_scheme
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "out"


@pytest.fixture(scope="module")
def steps(out: Path) -> list[DemoStep]:
    return list(run_demo(out))


def test_every_step_is_done_in_order(steps: list[DemoStep]) -> None:
    assert [step.name for step in steps] == [
        "make",
        "inspect",
        "convert",
        "verify",
        "restore",
        "compare",
    ]


def test_every_tensor_comes_back(steps: list[DemoStep], out: Path) -> None:
    assert steps[-1].facts["differing"] == 0
    source, restored = (open_checkpoint(f(out)) for f in (source_folder, restored_folder))
    assert not list(differences(source, restored))
    assert not prepared.problems_of(prepared_folder(out), source_folder(out))


def test_the_facts_are_json(steps: list[DemoStep]) -> None:
    assert json.loads(json.dumps([dict(step.facts) for step in steps]))


def test_padding_is_shown(steps: list[DemoStep]) -> None:
    facts = next(step.facts for step in steps if step.name == "convert")
    assert (facts["tp"], facts["intermediate_per_rank"]) == (TP, 160)
    assert facts["padded_intermediate_per_rank"] == 256


def test_the_checkpoint_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_checkpoint(tmp_path / name)
    assert prepared.contents(tmp_path / "one") == prepared.contents(tmp_path / "two")


def test_the_checkpoint_keeps_the_promise_of_its_config(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    path = "model.layers.1.mlp.experts"
    assert promised_scheme(checkpoint.config, None, path) == "mxfp4"
    plan = make_plan(checkpoint, tp=TP)
    assert {block.block.scheme.name for block in plan.blocks} == {"mxfp4"}
    assert not plan.warnings


def test_any_reader_of_safetensors_opens_the_shards(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_bytes())
    seen: set[str] = set()
    for file in set(index["weight_map"].values()):
        with safe_open(tmp_path / "model" / file, framework="numpy") as shard:
            seen |= set(shard.keys())
    assert seen == set(index["weight_map"])


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_nothing_is_written_into_what_is_there(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
        (out / "mine.txt").write_text("keep")
    else:
        out.write_text("keep")
    before = prepared.contents(tmp_path)
    with pytest.raises(OutputNotEmpty):
        next(run_demo(out))
    assert prepared.contents(tmp_path) == before


def test_a_difference_is_found(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_checkpoint(tmp_path / name)
    one = open_checkpoint(tmp_path / "one")
    last = max(one.tensors.values(), key=lambda tensor: (tensor.file, tensor.start))
    shard = tmp_path / "two" / last.file
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert list(differences(one, open_checkpoint(tmp_path / "two"))) == [last.name]
