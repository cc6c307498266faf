"""The command line of parts: which part it is, what is said, and what is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import prepared
import tiny
from aiter_prep.cli.schedulers import part_of
from aiter_prep.errors import InvalidUsage
from command_line import CommandLine

SIZES = ("--tp", "2", "--gfx", "gfx950", "--max-shard-size", "10KB")


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CommandLine:
    """Runs the command line in this process, in a folder of its own with a model."""
    monkeypatch.chdir(tmp_path)
    tiny.write(tmp_path / "model", kind="mxfp8", hidden=64, intermediate=64, layers=2)

    return CommandLine(capsys)


# --- which part ---------------------------------------------------------------------------------


def slurm(task: int, first: int, last: int, count: int) -> dict[str, str]:
    numbers = {"ID": task, "MIN": first, "MAX": last, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(number) for name, number in numbers.items()}


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("3/8", {}, "3/8"),
        ("3/8", slurm(1, 0, 3, 4), "3/8"),  # explicit wins
        ("3/8", {"JOB_COMPLETION_INDEX": "0"}, "3/8"),
        ("auto", slurm(0, 0, 7, 8), "1/8"),
        ("auto", slurm(7, 0, 7, 8), "8/8"),
        ("auto", slurm(1, 1, 8, 8), "1/8"),
        ("auto", slurm(10, 10, 19, 10), "1/10"),
        ("auto", slurm(14, 10, 18, 5), "3/5"),  # 10-18:2
        ("auto", slurm(5, 5, 5, 1), "1/1"),
        ("auto/8", slurm(2, 1, 8, 8), "2/8"),
        ("auto/8", {"JOB_COMPLETION_INDEX": "0"}, "1/8"),
        ("auto/8", {"JOB_COMPLETION_INDEX": "7"}, "8/8"),
    ],
)
def test_the_part_comes_from_the_flag_or_from_the_scheduler(
    text: str, environment: dict[str, str], expected: str
) -> None:
    assert str(part_of(text, environment)[0]) == expected


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("auto", {}, "neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX is set"),
        ("auto", {"JOB_COMPLETION_INDEX": "1"}, "nothing says how many there are"),
        ("auto/8", {"JOB_COMPLETION_INDEX": "8"}, "part 9/8 is none"),
        ("auto/8", {"JOB_COMPLETION_INDEX": "x"}, "JOB_COMPLETION_INDEX is x, no number"),
        ("auto/x", {"JOB_COMPLETION_INDEX": "1"}, "part 2/x is none"),
        ("auto", slurm(5, 1, 7, 3), "cannot be told"),  # 1,5,7
        ("auto", slurm(9, 1, 8, 8), "cannot be told"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "1"}, "SLURM_ARRAY_TASK_MIN is not set"),
        ("auto/8", slurm(1, 1, 4, 4), "the array of Slurm has 4 tasks"),
        ("automatic", {}, "part automatic is none"),
    ],
)
def test_what_does_not_say_which_part_is_refused(
    text: str, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidUsage) as caught:
        part_of(text, environment)
    assert message in caught.value.message
    assert caught.value.hint


def test_it_is_said_where_the_part_was_taken_from(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    said = run("convert", "model", "out", *SIZES, "--part", "auto/2")
    assert said.code == 0
    assert "note: this is part 2/2: JOB_COMPLETION_INDEX=1" in said.err
    said = run("convert", "model", "out", *SIZES, "--part", "1/2")
    assert "this is part" not in said.err


def test_a_scheduler_alone_makes_no_part(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array may convert a model a task."""
    for name, number in slurm(1, 0, 3, 4).items():
        monkeypatch.setenv(name, number)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert run("convert", "model", "out", *SIZES).code == 0
    assert (Path("out") / prepared.MANIFEST).exists()


# --- what is said -------------------------------------------------------------------------------


def test_parts_and_seal_make_the_folder_of_one_run(run: CommandLine) -> None:
    assert run("convert", "model", "one", *SIZES).code == 0
    said = run("convert", "model", "out", *SIZES, "--part", "2/2")
    assert said.code == 0
    assert said.out.startswith("part 2/2 of model is written\n")
    assert "complete the folder with: aiter-prep seal out" in said.err
    said = run("verify", "out")
    assert (said.code, "is unfinished" in said.err) == (3, True)
    said = run("inspect", "out")
    assert "aiter-prep seal out" in said.err
    said = run("seal", "out")
    assert said.code == 3
    assert "those of part 1/2 (not begun)" in said.err
    assert run("convert", "model", "out", *SIZES, "--part", "1/2").code == 0
    said = run("seal", "out")
    assert said.code == 0
    assert said.out.startswith("sealed model for aiter on gfx950, 2 ranks\n")
    assert "aiter-prep verify out" in said.err
    assert prepared.contents(Path("out")) == prepared.contents(Path("one"))


def test_a_part_and_a_seal_say_the_same_to_programs(run: CommandLine) -> None:
    first = run("convert", "model", "out", *SIZES, "--part", "1/2", "--json").json
    assert first["schema"] == "aiter-prep/part/1"
    assert (first["part"], first["parts"]) == (1, 2)
    assert first["written_bytes"] == first["total_bytes"] > 0
    refused = run("seal", "out", "--json")
    assert (refused.code, refused.json["schema"]) == (3, "aiter-prep/error/1")
    run("convert", "model", "out", *SIZES, "--part", "2/2")
    again = run("convert", "model", "out", *SIZES, "--part", "1/2", "--json")
    assert again.json["written_bytes"] == 0
    sealed = run("seal", "out", "--json").json
    assert sealed["schema"] == "aiter-prep/seal/1"
    assert (sealed["tp"], sealed["ranks"], sealed["folder"]) == (2, [0, 1], "out")
    assert {s["file"] for s in sealed["shards"]} == {p.name for p in Path("out").glob("model-*")}


def test_a_part_that_was_there_says_so(run: CommandLine) -> None:
    run("convert", "model", "out", *SIZES, "--part", "1/1")
    assert "kept" in run("convert", "model", "out", *SIZES, "--part", "1/1").out


def test_a_source_elsewhere_can_be_named(run: CommandLine) -> None:
    run("convert", "model", "out", *SIZES, "--part", "1/1")
    Path("moved").mkdir()
    Path("model").rename("moved/model")
    said = run("seal", "out")
    assert said.code == 10
    assert run("seal", "out", "--source", "moved/model").code == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--part", "3/2"), "part 3/2 is none"),
        (("--part", "auto"), "neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX is set"),
    ],
)
def test_a_wrong_part_is_refused(flags: tuple[str, ...], message: str, run: CommandLine) -> None:
    said = run("convert", "model", "out", *SIZES, *flags)
    assert said.code == 2
    assert message in said.err
    assert not Path("out").exists()


def test_a_part_goes_into_no_prepared_folder(run: CommandLine) -> None:
    run("convert", "model", "out", *SIZES)
    before = prepared.stamps(Path("out"))
    said = run("convert", "model", "out", *SIZES, "--part", "1/2")
    assert said.code == 12
    assert "--if-needed" in said.err
    assert prepared.stamps(Path("out")) == before


def test_parts_replace_a_folder_when_they_are_sealed(run: CommandLine) -> None:
    run("convert", "model", "one", *SIZES)
    run("convert", "model", "out", "--tp", "1", "--gfx", "gfx950")
    before = prepared.stamps(Path("out"))
    for part in ("1/2", "2/2"):
        assert run("convert", "model", "out", *SIZES, "--part", part, "--overwrite").code == 0
    assert prepared.stamps(Path("out")) == before
    assert run("seal", "out").code == 0
    assert prepared.contents(Path("out")) == prepared.contents(Path("one"))
    again = ("convert", "model", "out", *SIZES, "--part", "1/2", "--overwrite", "--if-needed")
    assert "holds exactly this conversion already" in run(*again).out


# --- only if needed -----------------------------------------------------------------------------


def test_what_is_there_already_is_left_alone(run: CommandLine) -> None:
    assert run("convert", "model", "out", *SIZES, "--if-needed").code == 0
    before = prepared.stamps(Path("out"))
    said = run("convert", "model", "out", *SIZES, "--if-needed")
    assert said.code == 0
    assert said.out == "out holds exactly this conversion already; nothing was written\n"
    said = run("convert", "model", "out", *SIZES, "--if-needed", "--json", "--overwrite")
    assert said.code == 0
    assert (said.json["schema"], said.json["was_needed"]) == ("aiter-prep/convert/1", False)
    said = run("convert", "model", "out", *SIZES, "--if-needed", "--part", "1/2")
    assert said.code == 0
    assert prepared.stamps(Path("out")) == before


def test_another_conversion_is_refused_or_replaced(run: CommandLine) -> None:
    assert run("convert", "model", "out", *SIZES, "--if-needed").code == 0
    before = prepared.stamps(Path("out"))
    other = ("convert", "model", "out", "--tp", "1", "--gfx", "gfx950", "--if-needed")
    said = run(*other)
    assert said.code == 12
    assert "holds another conversion: tp is 2, not 1" in said.err
    assert prepared.stamps(Path("out")) == before
    said = run(*other, "--overwrite", "--json")
    assert said.code == 0
    assert said.json["was_needed"] is True
    assert "note: out is replaced: tp is 2, not 1" in said.err
    assert run(*other).code == 0


@pytest.mark.parametrize("what", ["a shard is missing", "a shard is short", "the manifest is cut"])
def test_a_damaged_folder_is_not_taken_for_what_is_needed(what: str, run: CommandLine) -> None:
    run("convert", "model", "out", *SIZES)
    path = min(Path("out").glob("model-rank-*"))
    if what == "the manifest is cut":
        path = Path("out") / prepared.MANIFEST
    data = path.read_bytes()
    path.unlink()
    if what != "a shard is missing":
        path.write_bytes(data[:-1])
    assert run("convert", "model", "out", *SIZES, "--if-needed").code == 12


def test_an_unfinished_folder_is_what_the_other_flags_make_of_it(run: CommandLine) -> None:
    run("convert", "model", "out", *SIZES, "--part", "1/2")
    said = run("convert", "model", "out", *SIZES, "--if-needed")
    assert said.code == 12
    assert "not sealed" in said.err
    assert run("convert", "model", "out", *SIZES, "--if-needed", "--overwrite").code == 0
