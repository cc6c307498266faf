"""Several sizes of one reading of the source are the folders of as many conversions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny
from aiter_prep.cli import main
from aiter_prep.errors import AiterPrepError, BadSource, InvalidUsage, OutputNotEmpty
from aiter_prep.execution import execute
from aiter_prep.execution.several import execute_several
from aiter_prep.plan import Plan, make_plan
from aiter_prep.storage.checkpoint import Checkpoint, open_checkpoint
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
    execute_several(plans_of(checkpoint, out), overwrite=True)
    assert contents(out) == singly(source, tmp_path / "one")


def test_a_run_that_fails_leaves_no_folder_that_looks_whole(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plans_of(open_checkpoint(source), tmp_path / "out")

    def failing(self: FolderReader, ranges: Any) -> None:
        calls.append(1)
        if len(calls) > 5:
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
    sizes = ("--tp", "1", "--tp", "2", "--tp", "4", "--tp", "2")
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


@pytest.mark.parametrize(
    "flags", [["--part", "1/2"], ["--engine", "ray"], ["--dry-run"], ["--ranks", "0"]]
)
def test_what_is_for_one_folder_is_refused_for_several(
    flags: list[str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert source.name == "source"
    assert main([*CALL, "--tp", "1", "--tp", "2", *flags]) == 2
    assert not Path("out").exists()
