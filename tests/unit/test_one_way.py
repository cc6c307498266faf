"""Whoever prepares what cannot be undone is told so before the source is thrown away."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from aiter_prep.inspection import inspect_path
from aiter_prep.inspection.source import SourceInspection
from command_line import CommandLine
from support import fixture

ONE_WAY = "qwen3_moe-modelopt-fp8"
WARNING = "16 tensors cannot be undone"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync: what a crash leaves behind is the subject of other tests."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)


def test_a_dry_run_and_a_conversion_warn_to_keep_the_source(
    run: CommandLine, tmp_path: Path
) -> None:
    argv = ("convert", fixture(ONE_WAY), tmp_path / "out", "--tp", "2")
    assert f"warning: {WARNING}" in run(*argv, "--dry-run").out
    (warning,) = run(*argv, "--dry-run", "--json").json["warnings"]
    assert warning.startswith(WARNING)
    assert warning.endswith("keep the source")
    assert f"warning: {WARNING}" in run(*argv).err


def test_verify_does_not_say_that_a_source_comes_back_which_does_not(
    run: CommandLine, tmp_path: Path
) -> None:
    source, out = fixture(ONE_WAY), tmp_path / "out"
    run("convert", source, out, "--tp", "2", "-q")
    said = run("verify", out, "--source", source)
    assert said.code == 0
    assert "comes back" not in said.out
    assert "as the source gives it; 16 tensors of 65 cannot be undone" in said.out
    document = run("verify", out, "--source", source, "--json").json
    assert (document["lossy_tensors"], document["tensors"]) == (16, 65)
    assert WARNING in run("inspect", out).out
    assert run("inspect", out, "--json").json["lossy_tensors"] == 16


def test_an_inspection_says_for_which_targets_a_checkpoint_is_one_way(
    run: CommandLine, tmp_path: Path
) -> None:
    assert "--tp 1-2, 4, 8; one way: keep the source" in run("inspect", fixture(ONE_WAY)).out
    found = inspect_path(fixture(ONE_WAY))
    assert isinstance(found, SourceInspection)
    ways = {(o.target, o.gfx): o.is_one_way for o in found.outlooks if not o.refusal}
    assert ways
    assert all(ways.values())
    plain = tiny.write(tmp_path / "plain")
    assert "one way" not in run("inspect", plain).out
    assert "cannot be undone" not in run("convert", plain, tmp_path / "out").err
