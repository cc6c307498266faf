"""Several sizes of one reading of the source are the folders of as many conversions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import tiny
from aiter_prep.cli import main
from aiter_prep.errors import AiterPrepError, BadSource, InvalidUsage, OutputNotEmpty
from aiter_prep.execution import execute
from aiter_prep.execution.several import execute_several
from aiter_prep.plan import Plan, make_plan
from aiter_prep.storage import object_store
from aiter_prep.storage.checkpoint import Checkpoint, open_checkpoint
from aiter_prep.storage.object_store import ObjectFolder
from aiter_prep.storage.reader import FolderReader
from prepared import contents, flip, problems_of, stamps

SIZES = (1, 2, 4)
SHARD_BYTES = 100_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", "mxfp8")


def write(folder: Path, kind: str) -> Path:
    tiny.write(folder, kind=kind, hidden=256, intermediate=512, experts=4, layers=3)
    (folder / "tokenizer.json").write_text('{"tiny": true}', "utf-8")
    return folder


def plans_of(
    checkpoint: Checkpoint, out: Path, sizes: tuple[int, ...] = SIZES, **options: Any
) -> dict[Path, Plan]:
    options.setdefault("max_shard_bytes", SHARD_BYTES)
    return {out / f"tp{tp}": make_plan(checkpoint, tp=tp, **options) for tp in sizes}


def singly(source: Path, out: Path, **options: Any) -> dict[str, str]:
    """Return what as many conversions write."""
    for folder, plan in plans_of(open_checkpoint(source), out, **options).items():
        execute(plan, folder, workers=1)
    return contents(out)


@pytest.mark.parametrize("kind", ["bf16", "mxfp8", "fp8_block_f32", "mxfp4_gpt_oss", "fp8_tensor"])
@pytest.mark.parametrize("gfx", ["gfx950", "gfx942"])
def test_each_folder_is_the_one_of_a_single_conversion(kind: str, gfx: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", kind)
    before = stamps(source)
    plans = plans_of(open_checkpoint(source), tmp_path / "out", gfx=gfx)
    manifests = execute_several(plans, workers=2)
    assert contents(tmp_path / "out") == singly(source, tmp_path / "one", gfx=gfx)
    assert stamps(source) == before
    for out, manifest in manifests.items():
        assert manifest.to_json() == (out / "aiter_prep.json").read_bytes()
        if kind != "fp8_tensor":
            assert problems_of(out, source) == ()


def test_the_source_is_read_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = FolderReader.read_all

    def counted(self: FolderReader, ranges: Any) -> None:
        read.append(sum(buffer.nbytes for _, _, buffer in ranges))
        real(self, ranges)

    monkeypatch.setattr(FolderReader, "read_all", counted)
    checkpoint = open_checkpoint(source)
    (plan,) = plans_of(checkpoint, tmp_path, (2,)).values()
    execute(plan, tmp_path / "one")
    once = sum(read)
    read.clear()
    execute_several(plans_of(checkpoint, tmp_path / "out"))
    assert sum(read) == once > 0


def test_what_is_left_of_a_run_is_gone_on_with(source: Path, tmp_path: Path) -> None:
    expected = singly(source, tmp_path / "one")
    checkpoint = open_checkpoint(source)
    out = tmp_path / "out"
    plans = plans_of(checkpoint, out)
    execute(plans[out / "tp2"], out / "tp2")  # one is finished, one has begun, one has not
    shards = sorted((tmp_path / "one" / "tp4").glob("model-*"))
    execute_several({out / "tp4": plans[out / "tp4"]})
    undone = out / "tp4"
    manifest = json.loads((undone / "aiter_prep.json").read_text("utf-8"))
    assert len(manifest["shards"]) == len(shards)
    shutil.rmtree(undone)
    with pytest.raises(OutputNotEmpty):
        execute_several(plans)
    before = stamps(out / "tp2")
    execute_several(plans, resume=True)
    assert contents(out) == expected
    assert stamps(out / "tp2") == before


def test_a_folder_that_holds_another_conversion_is_not_passed_over(
    source: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(source)
    out = tmp_path / "out"
    execute(make_plan(checkpoint, tp=1), out / "tp2")
    with pytest.raises(OutputNotEmpty) as caught:
        execute_several(plans_of(checkpoint, out), resume=True)
    assert "holds another conversion: tp is 1, not 2" in caught.value.message
    assert not (out / "tp4").exists()
    execute_several(plans_of(checkpoint, out), overwrite=True, resume=True)
    assert contents(out) == singly(source, tmp_path / "one")


def test_a_run_that_fails_leaves_no_folder_that_looks_whole(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plans_of(open_checkpoint(source), tmp_path / "out")

    def failing(self: FolderReader, ranges: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise BadSource("it is broken")
        real(self, ranges)

    calls: list[int] = []
    real = FolderReader.read_all
    monkeypatch.setattr(FolderReader, "read_all", failing)
    with pytest.raises(BadSource):
        execute_several(plans, workers=1)
    monkeypatch.undo()
    assert not list(tmp_path.glob("out/*/aiter_prep.json"))
    assert not list(tmp_path.glob("out/*/.*.partial"))
    execute_several(plans, resume=True)
    assert contents(tmp_path / "out") == singly(source, tmp_path / "one")


def test_a_disk_is_asked_for_room_for_all_folders(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plans_of(open_checkpoint(source), tmp_path / "out")
    largest = max(plan.total_bytes for plan in plans.values())
    usage = shutil.disk_usage(tmp_path)._replace(free=largest + 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(AiterPrepError) as caught:
        execute_several(plans)
    assert f"the disk has {largest + 1}" in caught.value.message


def test_plans_of_two_checkpoints_are_refused(source: Path, tmp_path: Path) -> None:
    plans = [make_plan(open_checkpoint(source), tp=tp) for tp in (1, 2)]
    with pytest.raises(InvalidUsage) as caught:
        execute_several({tmp_path / str(number): plan for number, plan in enumerate(plans)})
    assert "need one checkpoint" in caught.value.message
    checkpoint = open_checkpoint(source)
    plain = make_plan(checkpoint, tp=1)
    with pytest.raises(InvalidUsage):
        execute_several({source / "in": plain})


# --- the command line ---------------------------------------------------------------------------

CALL = ("convert", "source", "out", "--gfx", "gfx950", "--max-shard-size", "100KB")


def test_several_sizes_become_a_folder_each(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ("--tp", "1", "--tp", "2", "--tp", "4")
    assert main([*CALL, *sizes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "aiter-prep/conversions/1"
    assert [(f["folder"], f["tp"], f["was_needed"]) for f in found["folders"]] == [
        ("out/tp1", 1, True),
        ("out/tp2", 2, True),
        ("out/tp4", 4, True),
    ]
    assert contents(Path("out")) == singly(source, tmp_path / "one")
    assert main([*CALL, *sizes]) == 12
    assert main([*CALL, *sizes, "--resume"]) == 0
    flip(Path("out/tp2/aiter_prep.json"), 5)
    shutil.rmtree("out/tp4")
    capsys.readouterr()
    assert main([*CALL, *sizes, "--if-needed", "--overwrite", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [f["was_needed"] for f in found["folders"]] == [False, True, True]
    assert contents(Path("out")) == contents(tmp_path / "one")


def test_a_dry_run_of_several_sizes_is_as_many_dry_runs(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = stamps(source)

    def told(*sizes: str, out: str = "out") -> dict[str, Any]:
        assert main(["convert", "source", out, *CALL[3:], *sizes, "--dry-run", "--json"]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    found = told("--tp", "1", "--tp", "4")
    singly = [told("--tp", tp, out=f"out/tp{tp}") for tp in ("1", "4")]
    assert found["schema"] == "aiter-prep/plans/1"
    assert [{"schema": "aiter-prep/plan/1", **plan} for plan in found["plans"]] == singly
    assert main([*CALL, "--tp", "1", "--tp", "4", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("nothing is in the way") == 2
    assert "out/tp4 (nothing is written now)" in said
    assert not Path("out").exists()
    assert stamps(source) == before


def test_a_dry_run_asks_for_room_for_all_folders(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plans = plans_of(open_checkpoint(source), tmp_path / "out")
    largest = max(plan.total_bytes for plan in plans.values())
    usage = shutil.disk_usage(tmp_path)._replace(free=largest + 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    monkeypatch.chdir(tmp_path)
    sizes = ("--tp", "1", "--tp", "2", "--tp", "4")
    assert main([*CALL, *sizes, "--dry-run", "--json"]) == 0
    first, *others = json.loads(capsys.readouterr().out)["plans"]
    assert first["obstacles"] == []
    for plan in others:
        assert f"of the others, its disk has {largest + 1} free" in plan["obstacles"][0]


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_some_ranks_of_each_size_are_those_of_single_conversions(
    ranks: tuple[int, ...], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = ",".join(map(str, ranks))
    assert main([*CALL, "--tp", "2", "--tp", "4", "--ranks", text]) == 0
    for folder, plan in plans_of(
        open_checkpoint(source), tmp_path / "one", (2, 4), ranks=ranks
    ).items():
        execute(plan, folder)
    assert contents(Path("out")) == contents(tmp_path / "one")


def test_a_rank_that_one_size_does_not_have_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert source.name == "source"
    assert main([*CALL, "--tp", "1", "--tp", "2", "--ranks", "1"]) == 2
    assert not Path("out").exists()


def test_each_folder_is_pushed_beside_the_others(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setitem(object_store.STORES, "memory", "fsspec")
    monkeypatch.chdir(tmp_path)
    assert source.name == "source"
    url = f"memory://{uuid4().hex}"
    sizes = ("--tp", "1", "--tp", "2")
    assert main([*CALL, *sizes, "--push", f"{url}/moe/", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["folders"]
    assert [f["pushed"]["repo"] for f in found] == [f"{url}/moe/tp1", f"{url}/moe/tp2"]
    for size in ("tp1", "tp2"):
        store = ObjectFolder(f"{url}/moe/{size}")
        held = {name: store.read(name, 0, promise.size) for name, promise in store.list().items()}
        assert held == {path.name: path.read_bytes() for path in Path("out", size).iterdir()}
    assert main([*CALL, *sizes, "--push", f"{url}/moe", "--if-needed", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["folders"]
    assert [f["pushed"]["uploaded_files"] for f in found] == [0, 0]


@pytest.mark.parametrize("flags", [["--part", "1/2"], ["--engine", "ray"]])
def test_what_is_for_one_folder_is_refused_for_several(
    flags: list[str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert source.name == "source"
    assert main([*CALL, "--tp", "1", "--tp", "2", *flags]) == 2
    assert not Path("out").exists()
