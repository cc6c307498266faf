"""Converts every small checkpoint and compares each tensor with the independent oracle."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import safetensors

import oracle
import tiny
from aiter_prep.errors import NoRule
from aiter_prep.execution import execute, writers
from aiter_prep.layouts.table import LAYOUTS
from aiter_prep.manifest import Manifest, read_manifest
from aiter_prep.plan import make_plan
from aiter_prep.restoration import restore
from aiter_prep.storage.checkpoint import Checkpoint, open_checkpoint
from aiter_prep.verification import verify
from prepared import contents, plan_of, prepare
from support import FIXTURES, fixture

TP = (1, 2, 3, 4, 6, 8)
# What divides the intermediate size of each fixture and cuts no block of its scales.
WORKING_TP: dict[str, tuple[int, ...]] = {
    "deepseek_v3-fp8_block-sharded": (1, 2),
    "deepseek_v4-fp4": (1, 2, 4, 8),
    "gpt_oss-mxfp4": (1, 2, 3, 4, 6, 8),
    "minimax_m3-mxfp8": (1, 2, 4, 8),
    "qwen3_moe-bf16": (1, 2, 4, 8),
    "qwen3_moe-ct-mxfp4": (1, 2, 3, 6),
    "qwen3_moe-fp8_block": (1, 2, 4),
    "qwen3_moe-modelopt-fp8": (1, 2, 4, 8),
    "qwen3_moe-quark-mxfp4": (1, 2, 3, 4, 6),
    "qwen3_moe-quark-ptpc_fp8": (1, 2, 4, 8),
}
CHIPS = ("gfx950", "gfx942")
LOSSY = ("qwen3_moe-modelopt-fp8",)  # gate and up under one scale: the oracle has no such case
WORKING = [
    (name, tp, gfx)
    for name in FIXTURES
    if name not in LOSSY
    for tp in WORKING_TP[name]
    for gfx in CHIPS
]
REFUSED = [(name, tp) for name in FIXTURES for tp in TP if tp not in WORKING_TP[name]]
PER_SCHEME = [
    (name, tp, gfx)
    for name, (_, plain, padding) in tiny.SAMPLES.items()
    for tp in (plain, padding)
    if tp is not None
    for gfx in CHIPS
]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync: what a crash leaves behind is the subject of hostile/test_kill.py."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)


@cache
def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder)


def stored_tensors(folder: Path) -> dict[tuple[int | None, str], tiny.Tensor]:
    """Read every tensor of a prepared folder with the tests' own reader, by rank and name."""
    found: dict[tuple[int | None, str], tiny.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        rank = None if "common" in path.name else int(path.name.split("-")[2])
        for name, content in tiny.read_shard(path).items():
            assert (rank, name) not in found
            found[rank, name] = content
    return found


def check_against_oracle(source: Path, out: Path, manifest: Manifest, tp: int, gfx: str) -> None:
    """Check every tensor of a prepared folder: experts by the oracle, the others by the source."""
    wanted = oracle.expected(source, tp, gfx)
    found = stored_tensors(out)
    records = {(record.rank, record.name): record for record in manifest.tensors}
    assert records.keys() == found.keys()
    assert {key for key in found if key[0] is not None} == wanted.keys()
    for key, tensor in wanted.items():
        held, record = found[key], records[key]
        assert (held.dtype, held.shape) == (tensor.dtype, tensor.shape), key
        assert held.data == tensor.data, f"{key} has other bytes than the oracle"
        assert record.runtime_dtype == tensor.runtime_dtype, key
        assert (record.dtype, record.shape) == (held.dtype, held.shape), key
    common = {name: held for (rank, name), held in found.items() if rank is None}
    assert common == {
        name: content
        for name, content in tiny.read_folder(source).items()
        if "experts" not in name.split(".")
    }


def check_with_safetensors(out: Path) -> None:
    """Open every shard with safetensors' own reader, and check its metadata."""
    for path in out.glob("*.safetensors"):
        with safetensors.safe_open(path, framework="numpy") as shard:
            metadata = shard.metadata()
            names = set(shard.keys())
        mine = tiny.read_shard(path)
        assert names == mine.keys()
        assert metadata["format"] == "pt"
        layouts = json.loads(metadata["layouts"])
        assert metadata["is_shuffled"] == ("true" if layouts else "false")
        assert set(layouts) == {name for name in names if is_shuffled(name, mine[name], path)}
        assert all(LAYOUTS[layout].is_shuffled for layout in layouts.values())
        facts = json.loads(metadata["aiter_prep"])
        assert {"format_version", "gfx", "rank", "target", "tp"} <= facts.keys()
        assert facts["rank"] == (None if "common" in path.name else int(path.name.split("-")[2]))


def is_shuffled(name: str, content: tiny.Tensor, path: Path) -> bool:
    """Return whether the table of targets.md says so: weights and scales in e8m0."""
    if "common" in path.name:
        return False
    return name.endswith("_weight") or ("_scale" in name and content.dtype == "U8")


def check_restored(source: Path, out: Path, back: Path) -> None:
    """Check that `restore` brings every tensor back: name, dtype, shape and bytes."""
    result = restore(out, back)
    assert result.notes == ()
    assert tiny.read_folder(back) == tiny.read_folder(source)
    config = json.loads((source / "config.json").read_text("utf-8"))
    assert json.loads((back / "config.json").read_text("utf-8")) == config
    assert open_checkpoint(back).tensors.keys() == opened(source).tensors.keys()


def check_everything(source: Path, folder: Path, tp: int, gfx: str) -> None:
    out = folder / "out"
    manifest = execute(make_plan(opened(source), tp=tp, gfx=gfx), out, workers=2)
    assert read_manifest(out) == manifest
    assert (manifest.target["gfx"], manifest.target["tp"]) == (gfx, tp)
    check_against_oracle(source, out, manifest, tp, gfx)
    if gfx == "gfx942" and not any("fnuz" in str(r.runtime_dtype) for r in manifest.tensors):
        return  # the oracle saw that the tensors are those of gfx950
    check_with_safetensors(out)
    assert verify(out, quick=True).problems == ()
    assert verify(out, source=opened(source)).problems == ()
    check_restored(source, out, folder / "back")


@pytest.mark.parametrize(("name", "tp", "gfx"), WORKING)
def test_a_fixture_becomes_what_the_oracle_says_and_comes_back(
    name: str, tp: int, gfx: str, tmp_path: Path
) -> None:
    check_everything(fixture(name), tmp_path, tp, gfx)


@pytest.mark.parametrize(("name", "tp"), REFUSED)
def test_a_size_that_does_not_work_for_a_fixture_is_refused(name: str, tp: int) -> None:
    for gfx in CHIPS:
        with pytest.raises(NoRule) as caught:
            make_plan(opened(fixture(name)), tp=tp, gfx=gfx)
        sizes = [int(word.strip(",")) for word in caught.value.hint.split() if word[0].isdigit()]
        assert [size for size in sizes if size in TP] == list(WORKING_TP[name])


@pytest.mark.parametrize("gfx", CHIPS)
@pytest.mark.parametrize(("name", "tp"), [(n, tp) for n in LOSSY for tp in WORKING_TP[n]])
def test_what_cannot_be_undone_is_computed_again_and_compared_and_not_restored(
    name: str, tp: int, gfx: str, tmp_path: Path
) -> None:
    source = opened(fixture(name))
    manifest = execute(make_plan(source, tp=tp, gfx=gfx), tmp_path / "out")
    assert manifest.lossy
    assert verify(tmp_path / "out", source=source).problems == ()
    check_with_safetensors(tmp_path / "out")
    with pytest.raises(NoRule, match="cannot be undone"):
        restore(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(("name", "tp", "gfx"), PER_SCHEME)
def test_every_scheme_becomes_what_the_oracle_says_and_comes_back(
    name: str, tp: int, gfx: str, tmp_path: Path
) -> None:
    check_everything(tiny.write(tmp_path / "source", tiny.SAMPLES[name][0]), tmp_path, tp, gfx)


@pytest.mark.parametrize("name", tiny.SAMPLES)
def test_the_samples_pad_where_they_say(name: str, tmp_path: Path) -> None:
    """So every scheme is compared once with padding, where its target has any, and once without."""
    model, plain, padding = tiny.SAMPLES[name]
    source = tiny.write(tmp_path / "source", model)
    cases = [(plain, False)] + ([] if padding is None else [(padding, True)])
    for tp, pads in cases:
        manifest = prepare(source, tmp_path / f"out-{tp}", tp)
        weights = [r for r in manifest.tensors if r.name.endswith("_weight")]
        assert any(record.pads for record in weights) is pads


@pytest.mark.parametrize("spread", ["layers", "apart", "scattered"])
@pytest.mark.parametrize("kind", ["fp8_block_f32", "mxfp4_v4", "mxfp4_gpt_oss"])
def test_tensors_may_lie_in_any_shard(kind: str, spread: str, tmp_path: Path) -> None:
    model, tp, _ = tiny.SAMPLES[kind]
    source = tiny.write(tmp_path / "source", model, layers=2, spread=spread)
    check_everything(source, tmp_path, tp, "gfx950")


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model.", "model.language_model."])
def test_every_prefix_is_kept(prefix: str, tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", prefix=prefix)
    check_everything(source, tmp_path, 2, "gfx950")
    names = {name for rank, name in stored_tensors(tmp_path / "out") if rank == 0}
    assert names == {f"{prefix}layers.0.mlp.experts.{n}_weight" for n in ("w13", "w2")}


@pytest.mark.parametrize(
    ("kind", "gfx"), [("mxfp4_gpt_oss", "gfx950"), ("fp8_block_bf16", "gfx942"), ("bf16", "gfx950")]
)
def test_the_same_source_gives_the_same_bytes_twice_and_with_any_number_of_workers(
    kind: str, gfx: str, tmp_path: Path
) -> None:
    model, tp, padding = tiny.SAMPLES[kind]
    source = tiny.write(tmp_path / "source", model, layers=3, spread="layers")
    written = []
    for number, workers in enumerate((1, 4, 4, 16)):
        out = tmp_path / f"out-{number}"
        prepare(source, out, padding or tp, workers=workers, gfx=gfx)
        written.append(contents(out))
    assert all(one == written[0] for one in written)


def test_the_bytes_do_not_depend_on_where_the_folders_lie(tmp_path: Path) -> None:
    for place in ("here", "there/far"):
        prepare(tiny.write(tmp_path / place / "tiny"), tmp_path / place / "out", 2)
    assert contents(tmp_path / "here" / "out") == contents(tmp_path / "there" / "far" / "out")


@pytest.mark.parametrize("kind", ["mxfp4_quark", "fp8_channel_1d", "mxfp4_gpt_oss"])
@pytest.mark.parametrize("limit", [1, 20_000, 200_000])
def test_a_small_limit_gives_more_shards_with_the_same_tensors(
    kind: str, limit: int, tmp_path: Path
) -> None:
    model, tp, padding = tiny.SAMPLES[kind]
    tp = padding or tp
    source = tiny.write(tmp_path / "source", model, layers=2)
    prepare(source, tmp_path / "whole", tp)
    manifest = prepare(source, tmp_path / "parts", tp, max_shard_bytes=limit)
    whole, parts = stored_tensors(tmp_path / "whole"), stored_tensors(tmp_path / "parts")
    assert parts == whole
    assert verify(tmp_path / "parts", source=open_checkpoint(source)).problems == ()
    for rank in (*range(tp), None):
        mine = [shard for shard in manifest.shards if shard.rank == rank]
        assert [shard.part for shard in mine] == list(range(len(mine)))
        if limit == 1:
            assert len(mine) == sum(key[0] == rank for key in whole)
    for shard in manifest.shards:
        tensors = tiny.read_shard(tmp_path / "parts" / shard.file)
        size = sum(len(tensor.data) for tensor in tensors.values())
        assert size <= limit or len(tensors) == 1
    assert limit == 200_000 or len(manifest.shards) > tp + 1
    check_with_safetensors(tmp_path / "parts")
    check_restored(source, tmp_path / "parts", tmp_path / "back")


def test_the_ranks_of_a_part_are_those_of_the_whole(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", tiny.SAMPLES["mxfp4_quark"][0])
    prepare(source, tmp_path / "whole", 4)
    prepare(source, tmp_path / "part", 4, ranks=[1, 3])
    whole, part = stored_tensors(tmp_path / "whole"), stored_tensors(tmp_path / "part")
    assert part == {key: value for key, value in whole.items() if key[0] in {1, 3, None}}
    assert verify(tmp_path / "part").problems == ()
    for needs_all in (
        lambda: verify(tmp_path / "part", source=open_checkpoint(source)),
        lambda: restore(tmp_path / "part", tmp_path / "back"),
    ):
        with pytest.raises(NoRule, match="all 4 ranks"):
            needs_all()
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize("kind", ["mxfp4_quark", "fp8_block_f32", "mxfp8", "bf16"])
def test_ranks_may_share_whole_experts(kind: str, placement: str, tmp_path: Path) -> None:
    """With `ep`, a rank holds all of some experts: those of tp 1, in the order of their ids."""
    model, _, _ = tiny.SAMPLES[kind]
    source = tiny.write(tmp_path / "source", model, experts=5)
    one, many = tmp_path / "one", tmp_path / "many"
    prepare(source, one)
    manifest = prepare(source, many, ep=3, placement=placement, gfx="gfx950")
    whole, parts = stored_tensors(one), stored_tensors(many)
    held = {"linear": [[0, 1], [2, 3], [4]], "round_robin": [[0, 3], [1, 4], [2]]}[placement]
    for (rank, name), content in parts.items():
        if rank is None:
            assert content == whole[None, name]
            continue
        reference = whole[0, name]
        record = next(r for r in manifest.tensors if (r.rank, r.name) == (rank, name))
        assert record.experts is not None
        assert list(range(*record.experts)) == held[rank]
        size = record.matrix[0] * record.matrix[1] if record.matrix else 0
        wanted = b"".join(reference.data[e * size : (e + 1) * size] for e in held[rank])
        assert content.data[: len(wanted)] == wanted
        assert set(content.data[len(wanted) :]) <= {0}
    assert verify(many, source=open_checkpoint(source)).problems == ()
    check_restored(source, many, tmp_path / "back")


def test_a_restored_folder_converts_to_the_same_tensors_again(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", tiny.SAMPLES["mxfp4_v4"][0], spread="scattered")
    prepare(source, tmp_path / "out", 4)
    restore(tmp_path / "out", tmp_path / "back")
    prepare(tmp_path / "back", tmp_path / "again", 4)
    assert stored_tensors(tmp_path / "again") == stored_tensors(tmp_path / "out")


def test_a_moved_folder_still_verifies_and_restores(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    prepare(source, tmp_path / "out", 2)
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    (tmp_path / "out").rename(moved)
    source.rename(tmp_path / "source-moved")
    assert verify(moved, source=open_checkpoint(tmp_path / "source-moved")).problems == ()
    check_restored(tmp_path / "source-moved", moved, tmp_path / "back")


def test_restoring_in_several_shards_brings_the_same_tensors(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", layers=2)
    prepare(source, tmp_path / "out", 2)
    result = restore(tmp_path / "out", tmp_path / "back", max_shard_bytes=50_000)
    assert result.shards == len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert tiny.read_folder(tmp_path / "back") == tiny.read_folder(source)
    index = json.loads((tmp_path / "back" / tiny.INDEX).read_text("utf-8"))
    size = sum(len(tensor.data) for tensor in tiny.read_folder(source).values())
    assert index["metadata"]["total_size"] == size == result.total_bytes
    prepare(tmp_path / "back", tmp_path / "again", 2)
    assert stored_tensors(tmp_path / "again") == stored_tensors(tmp_path / "out")


@pytest.mark.parametrize("kind", ["fp8_block_f32", "fp8_block_bf16", "fp8_channel_1d"])
def test_negative_zeros_that_fnuz_has_no_byte_for_are_listed_and_come_back(
    kind: str, tmp_path: Path
) -> None:
    model, tp, _ = tiny.SAMPLES[kind]
    source = tiny.write(tmp_path / "source", model)
    experts = [
        content.data
        for name, content in tiny.read_folder(source).items()
        if ".experts." in name and content.dtype == "F8_E4M3"
    ]
    zeros = sum(data.count(b"\x80") for data in experts)
    manifest = prepare(source, tmp_path / "out", tp, gfx="gfx942")
    lost = [record.lost for record in manifest.tensors if record.lost is not None]
    assert zeros > 0
    assert sum(entry.count for entry in lost) == zeros
    assert all((entry.source, entry.stored) == (0x80, 0) for entry in lost)
    assert sum(len(entry.positions or ()) for entry in lost) == zeros
    check_restored(source, tmp_path / "out", tmp_path / "back")


def test_too_many_negative_zeros_are_counted_and_come_back_as_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "MAX_LISTED", 3)
    model, tp, _ = tiny.SAMPLES["fp8_block_f32"]
    source = tiny.write(tmp_path / "source", model)
    manifest = prepare(source, tmp_path / "out", tp, gfx="gfx942")
    counted = [record for record in manifest.tensors if record.lost is not None]
    assert all(r.lost is not None and r.lost.positions is None for r in counted)
    report = verify(tmp_path / "out", source=open_checkpoint(source))
    assert report.problems == ()
    zeros = sum(record.lost.count for record in counted if record.lost is not None)
    assert report.notes == (
        f"{zeros} negative zeros (FP8 byte 0x80) of the source are zeros on gfx942",
    )
    result = restore(tmp_path / "out", tmp_path / "back")
    assert len(result.notes) == len(counted)
    restored = tiny.read_folder(tmp_path / "back")
    for name, content in tiny.read_folder(source).items():
        is_expert = ".experts." in name and content.dtype == "F8_E4M3"
        data = content.data.replace(b"\x80", b"\0") if is_expert else content.data
        assert restored[name].data == data, name


def test_nothing_but_what_the_manifest_names_is_left_in_the_folder(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", spread="apart")
    (source / "tokenizer.json").write_text("{}", "utf-8")
    (source / "LICENSE").write_text("free", "utf-8")
    (source / ".hidden").write_text("no", "utf-8")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "original").mkdir()
    plan = plan_of(source, 2)
    execute(plan, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "LICENSE",
        "aiter_prep.json",
        "config.json",
        "model-common-part-0.safetensors",
        "model-rank-0-part-0.safetensors",
        "model-rank-1-part-0.safetensors",
        "tokenizer.json",
    }
    assert [warning for warning in plan.warnings if "`original`" in warning]
    assert (tmp_path / "out" / "LICENSE").read_text("utf-8") == "free"


@pytest.mark.parametrize("holder", ["top", "text_config", "both", "none"])
def test_the_config_refuses_engines_that_do_not_know_us(holder: str, tmp_path: Path) -> None:
    model, tp, _ = tiny.SAMPLES["mxfp8"]
    kind = "bf16" if holder == "none" else "mxfp8"
    quantization = model.scheme.quantization
    config = tiny.config_of(model)
    del config["quantization_config"]
    if holder in {"top", "both"}:
        config["quantization_config"] = quantization
    if holder in {"text_config", "both"}:
        config["text_config"] = {"hidden_size": 96, "quantization_config": quantization}
    source = tiny.write(tmp_path / "source", model, kind=kind)
    (source / "config.json").write_text(json.dumps(config), "utf-8")
    prepare(source, tmp_path / "out", tp)
    wrapped = {"quant_method": "aiter_prep", "format_version": 1, "source": quantization}
    found = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    top = wrapped if holder in {"top", "both"} else {**wrapped, "source": None}
    assert found["quantization_config"] == top
    if holder in {"text_config", "both"}:
        assert found["text_config"] == {"hidden_size": 96, "quantization_config": wrapped}
    rest = {key: value for key, value in found.items() if key in config}
    assert {**rest, **{k: config[k] for k in config if "config" in k}} == config
    check_restored(source, tmp_path / "out", tmp_path / "back")
