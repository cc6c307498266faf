"""The command line says the result to stdout, all else to stderr, and how it went by its code."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.models import OptionInfo

import prepared
import tiny
from aiter_prep import _version
from aiter_prep.cli import app, main, values, words
from aiter_prep.cli.progress import SECONDS_BETWEEN_LINES, Lines
from aiter_prep.demo import make_checkpoint
from aiter_prep.errors import InvalidUsage
from aiter_prep.inspection import inspect_path
from aiter_prep.progress import Progress
from command_line import CommandLine
from support import fixture

SOON = 4.0  # seconds; 2 are promised, but not of a machine that tests other things as well
COMMANDS = ("convert", "seal", "verify", "inspect", "restore", "push", "layouts", "env", "demo")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small checkpoint that pads at two ranks."""
    folder = tmp_path / "some model"
    make_checkpoint(folder)
    return folder


# --- what every command has ---------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_lists_the_exit_codes(run: CommandLine, command: str) -> None:
    said = run(command, "--help")
    assert said.code == 0
    assert "Exit codes (take an unknown one for a failure):" in said.out
    assert "  130  stopped by Ctrl-C or SIGTERM" in said.out
    assert "\b" not in said.out
    assert "[[" not in said.out


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_names_every_command(run: CommandLine, flag: str) -> None:
    said = run(flag)
    assert said.code == 0
    assert all(f"\n  {command} " in said.out for command in COMMANDS)
    assert "..." not in said.out.partition("Commands:")[2]


@pytest.mark.parametrize("argv", [["--version"], ["--version", "--help"]])
def test_the_version_is_the_packages(run: CommandLine, argv: list[str]) -> None:
    assert run(*argv).out == f"aiter-prep {_version.__version__}\n"


def loaded_by(code: str) -> set[str]:
    """Return the slow packages that some code loads, in a process of its own."""
    slow = "{'huggingface_hub', 'numpy', 'rich', 'safetensors', 'torch', 'typer', 'xxhash'}"
    code = f"import sys\n{code}\nprint(sorted({slow} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(done.stderr.replace("'", '"')))


def test_the_version_loads_no_slow_package() -> None:
    assert loaded_by("from aiter_prep.cli import main; main(['--version'])") == set()


def test_the_commands_load_what_they_need_when_they_run() -> None:
    assert loaded_by("import aiter_prep.cli.app") <= {"typer"}


def test_verify_reads_every_byte_without_numpy_or_a_planner(tmp_path: Path) -> None:
    """It is to take little more time than reading the files, and both take a while to load."""
    make_checkpoint(tmp_path / "model")
    prepared.prepare(tmp_path / "model", tmp_path / "out", 2)
    code = f"""
from aiter_prep.cli import main
assert main(['verify', {str(tmp_path / "out")!r}, '--quiet']) == 0
assert 'aiter_prep.plan' not in sys.modules
"""
    assert loaded_by(code) == {"typer", "xxhash"}


def test_the_package_loads_its_public_names_on_first_use() -> None:
    assert loaded_by("import aiter_prep") == set()
    assert "numpy" in loaded_by("import aiter_prep; aiter_prep.make_plan")


@pytest.mark.parametrize(
    "first", ["aiter_prep.verification", "aiter_prep.execution.run", "aiter_prep"]
)
def test_public_functions_stay_functions_whatever_is_imported_first(first: str) -> None:
    code = f"""
    import importlib
    importlib.import_module({first!r})
    import aiter_prep
    from aiter_prep import execute, inspect, make_plan, open_checkpoint, restore, verify
    from aiter_prep.verification import Report
    assert aiter_prep.Report is Report
    for name in aiter_prep.__all__:
        try:
            found = getattr(aiter_prep, name)
        except ModuleNotFoundError as fault:  # `load` needs torch, which need not be there
            assert fault.name == "torch", fault
        else:
            assert name == "__version__" or callable(found), name
    for name in ("execute", "restore", "verify"):
        assert type(getattr(aiter_prep, name)).__name__ == "function", name
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    import aiter_prep

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = aiter_prep.no_such_name
    assert set(aiter_prep.__all__) == set(dir(aiter_prep))


# --- the whole round ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "minimax_m3-mxfp8", "qwen3_moe-ct-mxfp4"])
def test_a_checkpoint_goes_round(run: CommandLine, tmp_path: Path, name: str) -> None:
    source, out = fixture(name), f"{name}-aiter-tp2-gfx950"
    converted = run("convert", source, "-tp", "2")
    assert converted.code == 0
    assert converted.out.startswith(f"prepared {name} for aiter on gfx950, 2 ranks\n")
    assert converted.err == f"hint: prove it with: aiter-prep verify {out}\n"
    assert "every byte is as the manifest says" in run("verify", out).out
    assert "the source comes back" in run("verify", out, "--source", source).out
    assert "no tensor was read" in run("verify", out, "--quick").out
    assert run("inspect", out).out.startswith(f"{out}: prepared from {name}\n")
    assert run("restore", out, "back").code == 0
    assert tiny.read_folder(tmp_path / "back") == tiny.read_folder(source)


@pytest.mark.parametrize("flag", ["--tp", "-tp", "--tensor-parallel-size"])
@pytest.mark.parametrize("joint", [" ", "="])
def test_tensor_parallelism_has_the_flags_of_the_ecosystem(
    run: CommandLine, model: Path, flag: str, joint: str
) -> None:
    said = run("convert", model, *f"{flag}{joint}2".split(" "), "--dry-run", "--json")
    assert said.json["tp"] == 2


def test_the_output_is_named_after_model_ranks_and_chip(
    run: CommandLine, model: Path, tmp_path: Path
) -> None:
    said = run("convert", f"{model}/", "--tp", "2", "--gfx", "gfx942", "-q", "--json")
    assert said.json["folder"] == "some model-aiter-tp2-gfx942"
    assert (tmp_path / said.json["folder"] / "aiter_prep.json").exists()


def test_the_json_of_a_conversion_names_every_shard(
    run: CommandLine, model: Path, tmp_path: Path
) -> None:
    document = run("convert", model, "out", "--tp", "2", "--json").json
    assert next(iter(document)) == "schema"
    assert document["schema"] == "aiter-prep/convert/1"
    assert document["is_complete"]
    for shard in document["shards"]:
        assert (tmp_path / "out" / shard["file"]).stat().st_size == shard["size"]
    assert document["total_bytes"] == sum(shard["size"] for shard in document["shards"])


def test_some_ranks_can_be_written_alone(run: CommandLine, model: Path) -> None:
    said = run("convert", model, "out", "--tp", "2", "--ranks", "1")
    assert "rank 1 of 2" in said.out.replace("ranks", "rank")
    assert "holds 1 of 2 ranks" in run("inspect", "out").out


def test_small_shards_can_be_asked_for(run: CommandLine, model: Path) -> None:
    document = run("convert", model, "out", "--tp", "1", "--max-shard-size", "1MB", "--json").json
    assert len(document["shards"]) > 4


def test_verbose_lists_the_shards(run: CommandLine, model: Path) -> None:
    assert "model-rank-0-part-0.safetensors" in run("convert", model, "out", "--tp", "1", "-v").out


def test_quiet_leaves_nothing_but_the_result(run: CommandLine, model: Path) -> None:
    said = run("convert", model, "out", "--tp", "2", "-q")
    assert said.out
    assert not said.err


def test_hints_can_be_pasted_into_a_shell(run: CommandLine, model: Path) -> None:
    said = run("convert", model, "my out", "--tp", "2")
    assert "aiter-prep verify 'my out'" in said.err


@pytest.mark.parametrize("command", ["verify", "inspect", "layouts", "env", "demo", "restore"])
def test_every_result_is_one_json_object_that_starts_with_its_schema(
    run: CommandLine, model: Path, command: str
) -> None:
    arguments: dict[str, Sequence[str]] = {
        "verify": ["out"],
        "inspect": ["out"],
        "restore": ["out", "back"],
        "demo": ["kept"],
    }
    run("convert", model, "out", "--tp", "2")
    said = run(command, *arguments.get(command, []), "--json")
    assert said.code == 0
    assert next(iter(said.json)) == "schema"
    assert said.json["schema"] == f"aiter-prep/{command}/1"


def test_inspect_shows_what_each_number_of_ranks_would_write(run: CommandLine, model: Path) -> None:
    said = run("inspect", model)
    assert "aiter on gfx950, gfx942: --tp 1-2, 5, 10" in said.out
    assert "--tp 2" in said.err  # one of those whose bytes were shown
    document = run("inspect", model, "--json").json
    assert document["outlooks"][0]["workable_tp"] == [1, 2, 5, 10]


def test_inspect_shows_unknown_tensors_and_leaves_with_0(run: CommandLine, tmp_path: Path) -> None:
    tensors = {**tiny.tensors_of(tiny.Model()), "mystery": tiny.Tensor("U8", (1,), b"0")}
    folder = tiny.write_shards(
        tmp_path / "odd", {tiny.SINGLE: tensors}, tiny.config_of(tiny.Model())
    )
    said = run("inspect", folder)
    assert said.code == 0
    assert "problem: tensor `mystery` is known to no family" in said.out
    assert "would refuse" in said.err


def test_inspect_says_how_to_finish_an_unfinished_folder(run: CommandLine, tmp_path: Path) -> None:
    (tmp_path / ".aiter_prep.journal").write_bytes(b"")
    said = run("inspect", tmp_path)
    assert "not finished" in said.out
    assert "--resume" in said.err


def test_layouts_lists_targets_and_what_they_refuse(run: CommandLine) -> None:
    said = run("layouts")
    assert "target aiter" in said.out
    assert "tile_16x16" in said.out
    assert "target vllm@0.33 (vllm 0.33)" in said.out
    assert "no mxfp8 (chip gfx942): gfx942 has no MX" in said.out


# --- dry run ------------------------------------------------------------------------------------


def test_a_dry_run_shows_everything_and_writes_nothing(
    run: CommandLine, model: Path, tmp_path: Path
) -> None:
    before = prepared.stamps(tmp_path)
    said = run("convert", model, "--tp", "2", "--dry-run")
    assert said.code == 0
    assert "model-rank-1-part-0.safetensors" in said.out
    assert "a rank holds 160 of 320 intermediate columns, padded to 256" in said.out
    assert "nothing is in the way" in said.out
    assert f"aiter-prep convert '{model}' --tp 2\n" in said.err
    assert prepared.stamps(tmp_path) == before


def test_a_dry_run_foretells_the_very_bytes(run: CommandLine, model: Path) -> None:
    foretold = run("convert", model, "--tp", "2", "--dry-run", "--json").json
    written = run("convert", model, "--tp", "2", "--json").json
    assert foretold["schema"] == "aiter-prep/plan/1"
    assert foretold["total_bytes"] == written["total_bytes"]
    assert [s["size"] for s in foretold["shards"]] == [s["size"] for s in written["shards"]]
    assert foretold["obstacles"] == []


def test_a_dry_run_says_what_would_fail(
    run: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("convert", model, "--tp", "2")
    monkeypatch.setattr("aiter_prep.inspection.room.free_bytes", lambda _: 7)
    said = run("convert", model, "--tp", "2", "--dry-run")
    assert said.code == 0
    assert "would fail: `some model-aiter-tp2-gfx950` is a prepared folder already" in said.out
    assert "its disk has 7 free" in said.out
    assert len(run("convert", model, "--tp", "2", "--dry-run", "--json").json["obstacles"]) == 2


def test_a_dry_run_shows_warnings_and_what_is_left_out(run: CommandLine, tmp_path: Path) -> None:
    source = tiny.Model(spread="layers")
    shards = tiny.shards_of(source, tiny.tensors_of(source))
    folder = tiny.write_shards(tmp_path / "model", shards, tiny.config_of(source))
    extra = {**shards[min(shards)], "left over": tiny.Tensor("U8", (1,), b"0")}
    tiny.write_shard(folder / min(shards), extra)
    said = run("convert", folder, "--tp", "1", "--dry-run")
    assert "skipped: left over: " in said.out
    assert "warning: " in said.out


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code", "error"),
    [
        (["bogus"], 2, "no such command `bogus`"),
        (["convert"], 2, "missing argument"),
        (["convert", "model"], 2, "neither --tp nor --ep is given"),
        (["convert", "model", "--tp", "eight"], 2, "invalid value for `--tp`"),
        (["convert", "model", "--tp", "1", "--bogus"], 2, "no such option"),
        (["convert", "model", "--tp", "0"], 2, "--tp 0 is out of range"),
        (["convert", "model", "--tp", "1", "--workers", "0"], 2, "--workers 0 is out of range"),
        (["convert", "model", "--tp", "1", "--max-shard-size", "5XB"], 2, "is no size"),
        (["convert", "model", "--tp", "1", "--ranks", "0-"], 2, "is no list of ranks"),
        (["convert", "model", "--tp", "2", "--ranks", "2"], 2, "out of range: 0 to 1"),
        (
            ["convert", "model", "--tp", "1", "--backend", "cpu", "--device", "cuda"],
            2,
            "does not run on device `cuda`",
        ),
        (["convert", "model", "--tp", "1", "--revision", "main"], 2, "is a local folder"),
        (["convert", "model", "model/out", "--tp", "1"], 2, "lie in each other"),
        (["verify", "out", "--quick", "--source", "model"], 2, "--quick reads no tensor"),
        (["verify", "model"], 3, "is not a prepared folder"),
        (["restore", "model", "back"], 3, "is not a prepared folder"),
        (["convert", "nowhere", "--tp", "1"], 10, "`nowhere` does not exist"),
        (["inspect", "nowhere"], 10, "`nowhere` does not exist"),
        (["inspect", "empty"], 10, "`config.json` is missing"),
        (["verify", "out", "--source", "nowhere"], 10, "`nowhere` does not exist"),
        (["convert", "model", "--tp", "3"], 11, "cannot be shared by 3 ranks"),
        (["convert", "out", "--tp", "1"], 11, "is prepared already"),
        (["convert", "model", "--tp", "1", "--gfx", "gfx90a"], 11, "does not know the chip"),
        (["convert", "model", "--tp", "1", "--target", "vllm@9"], 11, "target `vllm@9` is not"),
        (["convert", "model", "--tp", "1", "--backend", "cuda"], 11, "backend `cuda` is not known"),
        (["convert", "model", "out", "--tp", "1"], 12, "is a prepared folder already"),
        (["convert", "model", "other", "--tp", "1", "--overwrite"], 12, "not of our making"),
        (["restore", "out", "other"], 12, "holds something already"),
        (["demo", "other"], 12, "is not empty"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["words", "json"])
def test_what_a_user_did_wrong_has_its_code_and_its_words(
    run: CommandLine,
    tmp_path: Path,
    model: Path,
    argv: list[str],
    code: int,
    error: str,
    as_json: bool,
) -> None:
    model.rename(tmp_path / "model")
    run("convert", "model", "out", "--tp", "1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("keep")
    (tmp_path / "empty").mkdir()
    before = prepared.contents(tmp_path)
    said = run(*argv, *(["--json"] if as_json else []))
    assert said.code == code
    if as_json:
        assert list(said.json) == ["schema", "exit_code", "error", "hint"]
        assert said.json["schema"] == "aiter-prep/error/1"
        assert said.json["exit_code"] == code
        assert error in said.json["error"]
        assert not said.err
    else:
        assert not said.out
        assert said.err.startswith("error: ")
        assert error in said.err
    assert prepared.contents(tmp_path) == before


def test_without_a_command_the_help_is_pointed_at(run: CommandLine) -> None:
    said = run()
    assert (said.code, said.out) == (2, "")
    assert said.err == "error: missing command\nhint: `aiter-prep --help` lists what it takes\n"


def test_a_full_output_is_refused_before_the_source_is_looked_for(
    run: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    assert run("convert", "some-org/some-model", tmp_path, "--tp", "1").code == 12
    default = tmp_path / "some-model-aiter-tp1-gfx950"
    default.mkdir()
    (default / "mine.txt").write_text("keep")
    assert run("convert", "some-org/some-model", "--tp", "1").code == 12


def test_what_works_is_part_of_the_hint(run: CommandLine, model: Path) -> None:
    assert "hint: use --tp 1, 2, 5 or 10\n" in run("convert", model, "--tp", "3").err


def test_unknown_tensors_can_be_declared_common(run: CommandLine, tmp_path: Path) -> None:
    tensors = {**tiny.tensors_of(tiny.Model()), "my.mystery": tiny.Tensor("U8", (1,), b"0")}
    tiny.write_shards(tmp_path / "odd", {tiny.SINGLE: tensors}, tiny.config_of(tiny.Model()))
    assert run("convert", "odd", "out", "--tp", "1").code == 11
    assert (
        run("convert", "odd", "out", "--tp", "1", "--as-common", "no", "--as-common", "my.*").code
        == 0
    )


def test_a_config_that_contradicts_the_tensors_needs_a_flag(
    run: CommandLine, tmp_path: Path
) -> None:
    promised = tiny.KINDS["mxfp4_quark"].quantization
    source = tiny.Model(config={"quantization_config": promised})
    tiny.write_shards(
        tmp_path / "odd", tiny.shards_of(source, tiny.tensors_of(source)), tiny.config_of(source)
    )
    assert "--trust-tensors" in run("convert", "odd", "out", "--tp", "1").err
    said = run("convert", "odd", "out", "--tp", "1", "--trust-tensors", "-q")
    assert said.code == 0
    assert said.err.startswith("warning: the config promises mxfp4")


def test_resume_and_overwrite_do_what_they_say(
    run: CommandLine, model: Path, tmp_path: Path
) -> None:
    run("convert", model, "out", "--tp", "1")
    first = prepared.contents(tmp_path / "out")
    assert run("convert", model, "out", "--tp", "1", "--overwrite").code == 0
    assert prepared.contents(tmp_path / "out") == first


# --- damage -------------------------------------------------------------------------------------


def damaged(folder: Path) -> None:
    """Change the last byte of a rank's shard."""
    shard = folder / "model-rank-1-part-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_damage_names_file_tensor_and_rank_on_stdout(
    run: CommandLine, model: Path, tmp_path: Path
) -> None:
    run("convert", model, "out", "--tp", "2")
    damaged(tmp_path / "out")
    said = run("verify", "out")
    assert said.code == 3
    assert "model-rank-1-part-0.safetensors: `model.layers.1.mlp.experts." in said.out
    assert "` of rank 1 has other bytes than the manifest says\n" in said.out
    assert "out: 1 problem" in said.out
    assert run("verify", "out", "--quick").code == 0


def test_damage_is_json_too(run: CommandLine, model: Path, tmp_path: Path) -> None:
    run("convert", model, "out", "--tp", "2")
    damaged(tmp_path / "out")
    said = run("verify", "out", "--json")
    assert said.code == 3
    (problem,) = said.json["problems"]
    assert not said.json["is_clean"]
    assert (problem["file"], problem["rank"]) == ("model-rank-1-part-0.safetensors", 1)
    assert problem["tensor"].startswith("model.layers.")


def test_a_damaged_folder_is_not_restored(run: CommandLine, model: Path, tmp_path: Path) -> None:
    run("convert", model, "out", "--tp", "2")
    damaged(tmp_path / "out")
    assert run("restore", "out", "back").code == 3
    assert not (tmp_path / "back").exists()


# --- defaults from the environment, and from the machine ------------------------------------------


def test_environment_variables_are_defaults(
    run: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TP": "2", "GFX": "gfx942", "JSON": "1", "QUIET": "1"}.items():
        monkeypatch.setenv(f"AITER_PREP_{name}", value)
    said = run("convert", model, "--dry-run")
    assert (said.json["tp"], said.json["gfx"]) == (2, "gfx942")
    assert not said.err
    assert run("convert", model, "--dry-run", "--tp", "1").json["tp"] == 1
    assert run("convert", model, "--dry-run", "--bogus").json["exit_code"] == 2


def test_the_chip_of_this_machine_is_taken_and_named(
    run: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiter_prep.backends.rocm.local_chips", lambda: ("gfx1100", "gfx942"))
    said = run("convert", model, "--tp", "1", "--dry-run", "--json")
    assert said.json["gfx"] == "gfx942"
    assert "note: converting for gfx942, the chip of this machine" in said.err
    assert run("convert", model, "--tp", "1", "--dry-run", "--gfx", "gfx950").err.count("note") == 0


# --- terminals ----------------------------------------------------------------------------------


def test_control_characters_of_a_checkpoint_stay_out_of_the_terminal(
    run: CommandLine, tmp_path: Path
) -> None:
    evil = "\x1b]0;owned\x07\x1b[31m"
    source = tiny.Model(config={"architectures": [evil], "model_type": evil})
    tensors = {
        **tiny.tensors_of(source),
        f"model.{evil}\n[red]x[/red]": tiny.Tensor("U8", (1,), b"0"),
    }
    tiny.write_shards(tmp_path / f"a{evil}b", {tiny.SINGLE: tensors}, tiny.config_of(source))
    for argv in (["inspect"], ["convert", "--tp", "1"], ["inspect", "--json"]):
        said = run(argv[0], f"a{evil}b", *argv[1:])
        assert set(f"{said.out}{said.err}") & {"\x1b", "\x07"} == set()
        assert "\\x1b" in said.out + said.err or "\\u001b" in said.out
    assert "[red]x[/red]" in run("convert", f"a{evil}b", "--tp", "1").err


def test_a_name_that_the_terminals_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    tiny.write_shards(
        tmp_path / "モデル",
        {tiny.SINGLE: tiny.tensors_of(tiny.Model())},
        tiny.config_of(tiny.Model()),
    )
    done = start(["inspect", "モデル"], tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    assert b"\\u30e2" in out


def start(
    argv: Sequence[str], folder: Path, *, code: str = "", stdout: Any = None, **env: str
) -> subprocess.Popen[bytes]:
    """Start the command line in a process of its own, after some code."""
    program = f"{code}\nimport sys\nfrom aiter_prep.cli import main\nsys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", program, *argv],
        cwd=folder,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
    )


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aiter_prep", "layouts"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith("layouts\n")


def test_a_reader_that_has_seen_enough_is_no_failure(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = start(["layouts"], tmp_path, stdout=writing)
    os.close(writing)
    _, err = done.communicate(timeout=60)
    assert (done.returncode, err) == (0, b"")


def test_a_deaf_stderr_changes_no_exit_code(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = "import sys\nfrom aiter_prep.cli import main\nsys.exit(main())"
    argv = [sys.executable, "-c", program, "inspect", "nowhere"]
    done = subprocess.run(argv, cwd=tmp_path, stderr=writing, check=False, timeout=60)
    os.close(writing)
    assert done.returncode == 10


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream_changes_no_exit_code(tmp_path: Path, closed: str) -> None:
    code = f"import os, sys; os.close({1 if closed == 'stdout' else 2}); sys.{closed} = None"
    done = start(["inspect", "nowhere"], tmp_path, code=code)
    done.communicate(timeout=60)
    assert done.returncode == 10


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_result_that_cannot_be_written_is_a_failure(tmp_path: Path, more: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = start(["layouts", *more], tmp_path, stdout=full)
        _, err = done.communicate(timeout=60)
    assert done.returncode == 1
    assert err.startswith(b"error: cannot write the result to stdout: No space left")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_version_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = start(["--version"], tmp_path, stdout=full)
        _, err = done.communicate(timeout=60)
    assert done.returncode == 1
    assert err.startswith(b"error: cannot write the result to stdout: No space left")
    assert err.count(b"\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("more", [[], ["--json"], ["-v"], ["--progress", "json"]])
def test_a_full_stderr_changes_no_exit_code(tmp_path: Path, more: list[str]) -> None:
    make_checkpoint(tmp_path / "model")
    program = "import sys\nfrom aiter_prep.cli import main\nsys.exit(main())"
    calls = {
        ("convert", "model", "out", "--tp", "1"): 0,
        ("verify", "out"): 0,
        ("restore", "out", "back"): 0,
        ("verify", "nowhere"): 3,
        ("convert", "model", "out"): 2,
    }
    for call, code in calls.items():
        argv = [sys.executable, "-c", program, *call, *more]
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(argv, cwd=tmp_path, stderr=full, check=False, timeout=60)
        assert done.returncode == code, call


def on_a_terminal(argv: Sequence[str], folder: Path, **env: str) -> str:
    """Run the command line with a terminal for stderr; return what appears there."""
    terminal, other_end = pty.openpty()
    program = "import sys\nfrom aiter_prep.cli import main\nsys.exit(main())"
    done = subprocess.Popen(
        [sys.executable, "-c", program, *argv],
        cwd=folder,
        env={**os.environ, "TERM": "xterm-256color", **env},
        stdout=subprocess.DEVNULL,
        stderr=other_end,
    )
    os.close(other_end)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while select.select([terminal], [], [], 60)[0]:
            shown += os.read(terminal, 4096)
    os.close(terminal)
    assert done.wait(60) == 0
    return shown.decode(errors="replace")


def test_a_terminal_gets_a_bar_and_colours(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    shown = on_a_terminal(["convert", "model", "out", "--tp", "1"], tmp_path)
    assert "converting for gfx950, tp 1" in shown
    assert "MB/s" in shown or "MB" in shown
    assert "\x1b[1;36mhint: " in shown


def test_no_color_is_obeyed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    shown = on_a_terminal(["convert", "model", "out", "--tp", "1"], tmp_path, NO_COLOR="1")
    assert "\x1b[1;36m" not in shown
    assert "hint: " in shown


# --- stopping and bugs --------------------------------------------------------------------------


def write_a_large_model(folder: Path) -> None:
    """Write a checkpoint of holes: it takes no disk, but time to convert."""
    folder.mkdir()
    source = tiny.Model(experts=64, layers=2, hidden=2048, intermediate=1024)
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in tiny.shapes_of(source).items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (folder / tiny.SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(tiny.config_of(source)))


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


@pytest.mark.slow  # a limit of time means nothing on a shared machine
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_conversion_leaves_soon(tmp_path: Path, number: signal.Signals) -> None:
    write_a_large_model(tmp_path / "model")
    argv = ["convert", "model", "out", "--tp", "1", "--workers", "1"]
    running = start(argv, tmp_path)
    wait_for(lambda: list(tmp_path.glob("out/.*.partial")))
    began = time.monotonic()
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert time.monotonic() - began < SOON
    assert running.returncode == 130
    assert not out
    assert err == b"error: stopped\n"  # no shard was finished, so there is nothing to go on with
    assert not (tmp_path / "out").exists()


STUBBORN = """
import time
import aiter_prep.inspection

def stubborn(path):
    while True:
        try:
            open("started", "w").close()
            time.sleep(60)
        except KeyboardInterrupt:
            pass

aiter_prep.inspection.inspect_path = stubborn
"""


@pytest.mark.slow  # a limit of time means nothing on a shared machine
@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize("signals", [1, 2])
def test_what_does_not_give_way_is_left(tmp_path: Path, signals: int, more: list[str]) -> None:
    running = start(["inspect", ".", *more], tmp_path, code=STUBBORN)
    wait_for((tmp_path / "started").exists)
    began = time.monotonic()
    for _ in range(signals):
        running.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    out, err = running.communicate(timeout=60)
    assert time.monotonic() - began < SOON
    assert running.returncode == 130
    if more:
        assert json.loads(out)["exit_code"] == 130
    else:
        assert err == b"error: stopped\n"


LINGERING = """
import threading
import time
import aiter_prep.inspection

def lingering(path):
    threading.Thread(target=time.sleep, args=(60,)).start()
    open("started", "w").close()
    time.sleep(60)

aiter_prep.inspection.inspect_path = lingering
"""


@pytest.mark.slow  # a limit of time means nothing on a shared machine
def test_threads_that_linger_are_left(tmp_path: Path) -> None:
    running = start(["inspect", "."], tmp_path, code=LINGERING)
    wait_for((tmp_path / "started").exists)
    began = time.monotonic()
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert time.monotonic() - began < SOON
    assert (running.returncode, err) == (130, b"error: stopped\n")


def test_an_ignored_ctrl_c_stays_ignored(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    running = start(["demo", "out"], tmp_path, code=code)
    wait_for((tmp_path / "out").exists)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode == 0


def test_handlers_are_put_back(run: CommandLine) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run("layouts")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def broken(_: object) -> None:
    raise KeyError("no [b]such[/b] key")


def test_a_bug_is_called_a_bug(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiter_prep.inspection.inspect_path", broken)
    said = run("inspect", ".")
    assert said.code == 1
    assert not said.out
    assert said.err.startswith("error: this is a bug: KeyError: 'no [b]such[/b] key'\n")
    assert "aiter-prep env" in said.err
    assert run("inspect", ".", "--json").json["exit_code"] == 1


def test_verbose_shows_where_a_bug_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("aiter_prep.inspection.inspect_path", broken)
    assert main(["inspect", ".", "-v"]) == 1
    said = capsys.readouterr()
    assert "Traceback" in said.err
    assert "in broken" in said.err


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (MemoryError(), "error: out of memory\nhint: use fewer --workers\n"),
        (PermissionError(13, "Permission denied", "a/b"), "error: Permission denied: `a/b`\n"),
        (KeyboardInterrupt(), "error: stopped\n"),
    ],
)
def test_what_the_machine_does_is_no_bug(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch, fault: BaseException, error: str
) -> None:
    def raise_it(_: object) -> None:
        raise fault

    monkeypatch.setattr("aiter_prep.inspection.inspect_path", raise_it)
    said = run("inspect", ".")
    assert said.code == (130 if isinstance(fault, KeyboardInterrupt) else 1)
    assert said.err == error


# --- values and words ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "total_bytes"),
    [
        ("5GB", 5_000_000_000),
        ("5gb", 5_000_000_000),
        ("1.5 GiB", 1_610_612_736),
        ("10KiB", 10_240),
        ("10k", 10_000),
        ("3MB", 3_000_000),
        ("2TB", 2_000_000_000_000),
        ("1000", 1000),
        ("1000B", 1000),
    ],
)
def test_a_size_is_a_number_with_a_unit(text: str, total_bytes: int) -> None:
    assert values.parse_size(text) == total_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "5XB", "-1GB", "0", "0.1B", "5iB", "1e9", "٣GB", "9" * 99]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidUsage, match="--max-shard-size"):
        values.parse_size(text)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [(None, None), ("0", (0,)), ("0-3,7", (0, 1, 2, 3, 7)), ("3, 1-2,2", (1, 2, 3))],
)
def test_ranks_are_numbers_and_ranges(text: str | None, ranks: tuple[int, ...] | None) -> None:
    assert values.parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "1,,2", "0-9999999", "²"])
def test_what_is_no_list_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(InvalidUsage, match="--ranks"):
        values.parse_ranks(text)


@pytest.mark.parametrize(
    ("total_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (864_704_792_696, "864.7 GB"),
        (10**18, "1000.0 PB"),
    ],
)
def test_bytes_have_decimal_units(total_bytes: int, text: str) -> None:
    assert words.size(total_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


def test_a_share_of_nothing_is_nothing() -> None:
    assert words.percent(0, 0) == "0.0%"
    assert words.percent(1, 8) == "12.5%"


def test_columns_are_two_spaces_apart() -> None:
    rows = [("a", "1"), ("bcd", "22", "x"), ("e",)]
    assert list(words.columns(rows, right=[1])) == ["  a     1", "  bcd  22  x", "  e"]


def test_elsewhere_than_on_a_terminal_progress_is_a_line_now_and_then() -> None:
    now = 0.0
    said: list[str] = []
    lines = Lines(said.append, "converting", clock=lambda: now)
    for tenth in range(1000):
        now = tenth / 10
        lines(Progress(tenth * 10**9, 10**12))
    assert len(said) == 99.9 // SECONDS_BETWEEN_LINES
    assert said[0] == "converting: 300.0 GB of 1.0 TB, 10.0 GB/s, 1 min 10 s left"


def test_progress_that_has_not_begun_has_no_end() -> None:
    now = 0.0
    said: list[str] = []
    lines = Lines(said.append, "verifying", clock=lambda: now)
    now = 31.0
    lines(Progress(0, 10))
    assert said == ["verifying: 0 B of 10 B, 0 B/s"]


def test_the_api_and_the_command_line_say_the_same(run: CommandLine, model: Path) -> None:
    document = run("inspect", model, "--json").json
    del document["schema"]
    expected = json.loads(json.dumps(inspect_path(model).to_json()))
    assert document == expected


# --- targets, options, expert parallelism ---------------------------------------------------------


def test_expert_parallel_ranks_hold_whole_experts(run: CommandLine, model: Path) -> None:
    said = run("convert", model, "--ep", "4", "--dry-run")
    assert "folder  some model-aiter-ep4-gfx950 " in said.out
    assert "0-3 of 4, ep 4, linear" in said.out
    assert "of 2 of 8 experts" in said.out
    converted = run("convert", model, "--ep", "4", "--json")
    assert converted.json["ranks"] == [0, 1, 2, 3]
    assert run("verify", converted.json["folder"], "--source", model).code == 0


def test_tensor_and_expert_parallelism_exclude_each_other(run: CommandLine, model: Path) -> None:
    said = run("convert", model, "--tp", "2", "--ep", "2")
    assert said.code == 2
    assert "exclude each other" in said.err


def test_an_engine_is_a_target_and_its_version_part_of_the_name(
    run: CommandLine, model: Path
) -> None:
    said = run("convert", model, "--tp", "2", "--target", "vllm", "--json")
    assert said.json["target"] == "vllm@0.33"
    assert said.json["folder"] == "some model-vllm@0.33-tp2-gfx950"
    assert "target      vllm@0.33 on gfx950, tp 2" in run("inspect", said.json["folder"]).out


@pytest.mark.parametrize(
    ("flag", "value", "error"),
    [
        ("--gate-up", "interleaved", "--gate-up interleaved has no meaning for this model"),
        ("--placement", "random", "placement random is not known"),
    ],
)
def test_an_option_without_a_meaning_is_refused(
    run: CommandLine, model: Path, flag: str, value: str, error: str
) -> None:
    said = run("convert", model, "--tp", "1", flag, value)
    assert said.code == 2
    assert error in said.err


def test_no_option_takes_its_name_from_its_placeholder() -> None:
    """Typer 0.27 calls an option without a name `--SOURCE` where that is its placeholder."""
    application = app.build([])
    groups = [group.typer_instance for group in application.registered_groups]
    callbacks = [
        command.callback
        for group in (application, *groups)
        if group is not None
        for command in group.registered_commands
    ]
    options = [
        (f"{callback!r}: {name}", name, option)
        for callback in callbacks
        for name, hint in get_type_hints(callback, include_extras=True).items()
        for option in getattr(hint, "__metadata__", ())
        if isinstance(option, OptionInfo)
    ]
    assert len(options) > 20
    for place, name, option in options:
        # in an annotation the first name stands where the default would
        is_named = option.param_decls or option.default is not ...
        taken = (option.metavar or "").lower().replace("-", "_") == name
        assert is_named or not taken, place
