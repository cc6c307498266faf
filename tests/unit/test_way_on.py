"""After a failure nothing is said to stay that does not, and nothing is left that nobody needs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from aiter_prep.storage.output import ShardFile
from command_line import CommandLine
from prepared import small

STAYS = "finished shards stay"


@pytest.fixture
def run(run: CommandLine, tmp_path: Path) -> CommandLine:
    """Runs the command line in a folder with a source, and a folder prepared from it."""
    small(tmp_path)
    return run


CONVERT = ("convert", "source", "new", "--tp", "2", "--workers", "1")


def failing_on_shard(monkeypatch: pytest.MonkeyPatch, number: int, fault: BaseException) -> None:
    """Have the end of a shard fail, counted from 0."""
    ended: list[ShardFile] = []
    plain = ShardFile.finish

    def failing(file: ShardFile, folder: Path) -> None:
        ended.append(file)
        if len(ended) > number:
            raise fault
        plain(file, folder)

    monkeypatch.setattr(ShardFile, "finish", failing)


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--part", "1/1"], ["--tp", "1"]])
def test_a_failure_before_the_first_shard_leaves_nothing_and_promises_nothing(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: list[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    call = ["convert", "source", "out", *CONVERT[3:], *more] if "--overwrite" in more else CONVERT
    for fault in (full(), KeyboardInterrupt()):
        with monkeypatch.context() as patch:
            failing_on_shard(patch, 0, fault)
            said = run(*call, *(more if call is CONVERT else ()))
        assert said.code == (1 if isinstance(fault, OSError) else 130)
        assert STAYS not in said.err
        assert "--resume" not in said.err
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_a_failure_behind_a_shard_names_the_command_that_goes_on(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    out = "out" if more else "new"
    call = ["convert", "source", out, *CONVERT[3:], *more]
    with monkeypatch.context() as patch:
        failing_on_shard(patch, 1, full())
        said = run(*call)
    assert said.code == 1
    assert f"{STAYS}: mend the cause and go on with --resume" in said.err
    with monkeypatch.context() as patch:
        failing_on_shard(patch, 0, KeyboardInterrupt())
        said = run(*call, "--resume")
    assert said.code == 130
    assert f"{STAYS}; go on with: aiter-prep {' '.join(call)} --resume" in said.err
    assert run(*call, "--resume").code == 0
    assert run("verify", out, "--source", "source").code == 0


def test_a_stopped_part_is_gone_on_with_by_the_same_command(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = [*CONVERT, "--part", "1/1"]
    with monkeypatch.context() as patch:
        failing_on_shard(patch, 1, KeyboardInterrupt())
        said = run(*call)
    assert said.code == 130
    assert f"go on with: aiter-prep {' '.join(call)}\n" in said.err
    assert run(*call).code == 0
    assert run("seal", "new").code == 0


def test_a_failed_part_leaves_what_others_have_begun(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(*CONVERT, "--part", "1/2").code == 0
    before = sorted(tmp_path.rglob("*.safetensors"))
    with monkeypatch.context() as patch:
        failing_on_shard(patch, 0, full())
        assert run(*CONVERT, "--part", "2/2").code == 1
    assert sorted(tmp_path.rglob("*.safetensors")) == before
    assert run(*CONVERT, "--part", "2/2").code == 0
    assert run("seal", "new").code == 0


@pytest.mark.parametrize("name", ["n" * 300, "link"])
def test_a_name_that_cannot_be_made_promises_nothing(
    run: CommandLine, tmp_path: Path, name: str
) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for more in ([], ["--part", "1/1"]):
        said = run("convert", "source", name, "--tp", "1", *more)
        assert said.code == (12 if name == "link" else 1)
        assert STAYS not in said.err
        assert ("leads nowhere" if name == "link" else "File name too long") in said.err


def test_a_stray_file_is_named_by_convert_parts_and_seal(run: CommandLine, tmp_path: Path) -> None:
    assert run(*CONVERT, "--part", "1/1").code == 0
    (tmp_path / "new" / "notes.txt").write_text("mine", "utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine", "utf-8")
    for call in (
        ["seal", "new"],
        [*CONVERT, "--part", "1/1"],
        ["convert", "source", "other", "--tp", "2"],
    ):
        said = run(*call)
        assert said.code == 12
        assert "not of our making: it holds `notes.txt`" in said.err
        assert "move that away" in said.err
    (tmp_path / "new" / "notes.txt").unlink()
    assert run("seal", "new").code == 0


def test_the_source_of_parts_may_be_renamed(run: CommandLine, tmp_path: Path) -> None:
    assert run(*CONVERT, "--part", "1/1").code == 0
    (tmp_path / "source").rename(tmp_path / "renamed")
    assert run("seal", "new", "--source", "renamed").code == 0
    assert run("verify", "new", "--source", "renamed").code == 0
    assert (tmp_path / "new" / "aiter_prep.json").read_bytes() == (
        tmp_path / "out" / "aiter_prep.json"
    ).read_bytes()


def test_resume_with_other_options_names_them(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing_on_shard(patch, 1, full())
        assert run(*CONVERT).code == 1
    said = run("convert", "source", "new", "--tp", "1", "--resume")
    assert said.code == 12
    assert "with other options: ranks [0, 1] and [0], tp 2 and 1 differ" in said.err
