"""A flag without effect is refused, and what is printed to be typed can be typed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from aiter_prep import make_plan, open_checkpoint
from aiter_prep.cli import main
from aiter_prep.errors import InvalidUsage
from aiter_prep.storage.shell import command_line
from command_line import CommandLine
from prepared import small


@pytest.fixture
def run(run: CommandLine, tmp_path: Path) -> CommandLine:
    """Runs the command line in a folder with a source, and a folder prepared from it."""
    small(tmp_path)
    return run


CONVERT = ("convert", "source", "new")
TP = ("--tp", "2")
IDLE = {
    "--private has no effect without --push to the Hub": [*CONVERT, *TP, "--private"],
    "--private has no effect without --push": [*CONVERT, *TP, "--private", "--push", "s3://b/f"],
    "--private has no effect without a repository": ["push", "out", "s3://b/f", "--private"],
    "--stream-disk has no effect without --stream": [*CONVERT, *TP, "--stream-disk", "1GB"],
    "--device-memory has no effect without a --backend for GPUs": [
        *CONVERT,
        *TP,
        "--backend",
        "cpu",
        "--device-memory",
        "2GB",
    ],
    "--ray-address has no effect without --engine ray": [*CONVERT, *TP, "--ray-address", "x:1"],
    "--placement round_robin has no effect without --ep": [
        *CONVERT,
        *TP,
        "--placement",
        "round_robin",
    ],
    "--tp 2 is given twice": [*CONVERT, *TP, *TP],
    "--ranks 2,5 is out of range: 0 to 1": [*CONVERT, *TP, "--ranks", "2,5"],
}


@pytest.mark.parametrize("message", IDLE)
def test_a_flag_without_effect_is_refused(run: CommandLine, message: str) -> None:
    said = run(*IDLE[message])
    assert said.code == 2
    assert message in said.err
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("STREAM_DISK", "1GB"), ("DEVICE_MEMORY", "1GB"), ("RAY_ADDRESS", "x:1")],
)
def test_a_default_of_the_environment_may_be_without_effect(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"AITER_PREP_{name}", value)
    assert run(*CONVERT, *TP, "--backend", "cpu").code == 0


def test_no_plan_has_a_placement_without_expert_parallel_ranks(run: CommandLine) -> None:
    checkpoint = open_checkpoint("source")
    with pytest.raises(InvalidUsage, match="has no effect without --ep"):
        make_plan(checkpoint, tp=2, placement="round_robin")
    assert make_plan(checkpoint, tp=2, placement="linear").parallel.placement == "linear"
    assert run("convert", "source", "new", "--ep", "2", "--placement", "round_robin").code == 0


# --- commands that are printed ------------------------------------------------------------------

HARD = [
    "plain",
    "two words",
    "it's",
    "-dash",
    "new\nline",
    "\x1b[31mred",
    "back\\slash\t'q'",
    "ü\udcff",
]


@pytest.mark.parametrize("name", HARD)
def test_a_printed_command_is_safe_and_means_the_same_to_a_shell(name: str) -> None:
    line = command_line("printf", "%s", name)
    assert line.isprintable()
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True)  # noqa: S607
    assert done.stdout == name.encode("utf-8", "surrogateescape")


def test_a_path_is_never_printed_as_a_flag() -> None:
    assert command_line("aiter-prep", "verify", Path("-out")) == "aiter-prep verify ./-out"
    assert command_line("aiter-prep", "--json", Path("a b")) == "aiter-prep --json 'a b'"


@pytest.mark.parametrize("name", ["-new", "a\nb"])
def test_the_closing_hint_can_be_run(run: CommandLine, name: str) -> None:
    said = run("convert", *TP, "--", "source", name)
    assert said.code == 0
    line = said.err.strip().rpartition("hint: prove it with: ")[2]
    program = f"{shlex.quote(sys.executable)} -m aiter_prep"
    command = line.replace("aiter-prep", program, 1)
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0  # noqa: S607


def test_a_dry_run_that_would_fail_does_not_hint_to_write(run: CommandLine) -> None:
    said = run("convert", "source", "out", *TP, "--dry-run")
    assert "would fail: " in said.out
    assert "write it with" not in said.err
    assert "write it with" in run(*CONVERT, *TP, "--dry-run").err


def test_the_help_says_that_ranks_are_required(run: CommandLine) -> None:
    assert "required, unless --ep is given" in " ".join(run("convert", "--help").out.split())


@pytest.mark.parametrize("call", [["verify", "nowhere"], ["restore", "nowhere", "back"]])
def test_a_folder_that_is_not_there_is_said_to_be_missing(
    run: CommandLine, call: list[str]
) -> None:
    said = run(*call)
    assert said.code == 3
    assert "`nowhere` does not exist" in said.err


def test_a_current_folder_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write(tmp_path / "source", kind="mxfp8")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["convert", str(tmp_path / "source"), "out", "--tp", "1"]) != 0
    assert "the current folder is gone" in capsys.readouterr().err


def test_a_demo_that_cannot_be_written_names_its_folder(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aiter_prep.demo.make_checkpoint", full)
    said = run("demo", "try")
    assert said.code == 1
    assert "cannot write `try" in said.err
    assert "No space left" in said.err


def test_a_signal_while_modules_are_loaded_ends_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("aiter_prep.cli.app.run", stopped)
    assert main(["layouts"]) == 130
    assert capsys.readouterr().err == "error: stopped\n"


def test_the_last_word_of_progress_is_that_all_was_read(run: CommandLine) -> None:
    for call in (["verify", "out"], ["verify", "out", "--source", "source"]):
        said = run(*call, "--progress", "json")
        last = [line for line in said.err.splitlines() if line.startswith("{")][-1]
        document = json.loads(last)
        assert document["is_done"]
        assert document["done_bytes"] == document["total_bytes"] > 0
