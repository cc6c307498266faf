"""How far a run is, and what each worker does: lines, JSON, a bar, a log."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

import tiny
from aiter_prep.cli import main
from aiter_prep.cli.progress import (
    FORMS,
    SECONDS_BETWEEN_LINES,
    SECONDS_BETWEEN_OBJECTS,
    Lines,
    Objects,
    showing,
)
from aiter_prep.execution import execute
from aiter_prep.progress import Board, Doing, Progress
from prepared import plan_of

HALF = Progress(
    50_000_000,
    100_000_000,
    done_jobs=3,
    total_jobs=6,
    doing=(
        Doing(1, "model.layers.3.mlp.experts", 4.0),
        Doing(0, "model.layers.4.mlp.experts", 2.0),
    ),
)
OBJECT = {
    "type": "object",
    "additionalProperties": False,
    "required": [
        "schema",
        "label",
        "is_done",
        "seconds",
        "done_bytes",
        "total_bytes",
        "bytes_per_second",
        "seconds_left",
        "done_jobs",
        "total_jobs",
        "workers",
    ],
    "properties": {
        "schema": {"const": "aiter-prep/progress/1"},
        "label": {"type": "string"},
        "is_done": {"type": "boolean"},
        "seconds": {"type": "number", "minimum": 0},
        "done_bytes": {"type": "integer", "minimum": 0},
        "total_bytes": {"type": "integer", "minimum": 0},
        "bytes_per_second": {"type": "integer", "minimum": 0},
        "seconds_left": {"type": ["number", "null"]},
        "done_jobs": {"type": "integer"},
        "total_jobs": {"type": "integer"},
        "workers": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["worker", "doing", "seconds"],
                "properties": {
                    "worker": {"type": "integer"},
                    "doing": {"type": "string"},
                    "seconds": {"type": "number"},
                },
            },
        },
    },
}


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


# --- what is done -------------------------------------------------------------------------------


def test_the_board_shows_what_each_worker_does_the_longest_first() -> None:
    clock = Clock()
    board = Board(clock)
    board.expect(100, 2)
    both, seen = threading.Barrier(3), threading.Barrier(3)

    def job() -> None:
        both.wait(10)
        seen.wait(10)

    first = threading.Thread(target=board.run, args=("layer 1", job))
    first.start()
    while not board.progress().doing:
        pass
    clock.now = 3.0
    second = threading.Thread(target=board.run, args=("layer 2", job))
    second.start()
    both.wait(10)
    clock.now = 5.0
    board.advance(40)
    assert board.progress() == Progress(
        40, 100, 0, 2, (Doing(0, "layer 1", 5.0), Doing(1, "layer 2", 2.0))
    )
    seen.wait(10)
    first.join()
    second.join()
    assert board.progress() == Progress(40, 100, 2, 2)


def test_a_job_that_fails_is_not_done() -> None:
    board = Board()
    board.expect(100, 1)

    def job() -> None:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - it is ours
        board.run("layer 1", job)
    assert board.progress() == Progress(0, 100, 0, 1)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_tells_how_far_it_is(workers: int, tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", layers=4, hidden=64, intermediate=64)
    told: list[Progress] = []
    execute(plan_of(source, 2), tmp_path / "out", workers=workers, progress=told.append)
    last = told[-1]
    assert last.done_bytes == last.total_bytes > 0
    assert (last.done_jobs, last.total_jobs, last.doing) == (5, 5, ())
    counts = [progress.done_bytes for progress in told]
    assert counts == sorted(counts)
    assert {d.worker for p in told for d in p.doing} <= set(range(workers))


# --- lines --------------------------------------------------------------------------------------


def test_a_line_says_bytes_rate_time_left_and_the_current_layer() -> None:
    clock, said = Clock(), list[str]()
    lines = Lines(said.append, "converting", clock)
    clock.now = SECONDS_BETWEEN_LINES + 20
    lines(HALF)
    assert said == [
        "converting: 50.0 MB of 100.0 MB, 1.0 MB/s, 50.0 s left, at model.layers.3.mlp.experts"
    ]
    lines(HALF)
    assert len(said) == 1


def test_verbose_lines_say_what_each_worker_does() -> None:
    clock, said = Clock(), list[str]()
    lines = Lines(said.append, "converting", clock, verbose=True)
    clock.now = SECONDS_BETWEEN_LINES
    lines(HALF)
    assert said[1:] == [
        "  worker 0: model.layers.4.mlp.experts, 2.0 s",
        "  worker 1: model.layers.3.mlp.experts, 4.0 s",
    ]


def test_a_name_of_a_module_cannot_move_the_cursor() -> None:
    clock, said = Clock(), list[str]()
    doing = (Doing(0, "model.\x1b[2J.experts", 1.0),)
    for line in (Lines(said.append, "x", clock, verbose=True), Objects(said.append, "x", clock)):
        clock.now += SECONDS_BETWEEN_LINES
        line(replace(HALF, doing=doing))
    assert len(said) == 3
    assert all(text.isprintable() for text in said)


# --- JSON ---------------------------------------------------------------------------------------


def test_objects_come_at_once_now_and_then_and_at_the_end() -> None:
    clock, said = Clock(), list[str]()
    objects = Objects(said.append, "converting", clock)
    objects(replace(HALF, done_bytes=0))
    clock.now = SECONDS_BETWEEN_OBJECTS / 2
    objects(HALF)
    clock.now = SECONDS_BETWEEN_OBJECTS * 2
    objects(HALF)
    objects.end()
    first, middle, last = map(json.loads, said)
    for document in (first, middle, last):
        jsonschema.validate(document, OBJECT)
    assert (first["done_bytes"], first["seconds_left"], first["is_done"]) == (0, None, False)
    assert (middle["bytes_per_second"], middle["seconds_left"]) == (5_000_000, 10.0)
    assert middle["workers"][0] == {
        "worker": 0,
        "doing": "model.layers.4.mlp.experts",
        "seconds": 2.0,
    }
    assert (middle["is_done"], last["is_done"]) == (False, True)


def test_nothing_is_said_of_a_run_that_did_not_begin() -> None:
    said: list[str] = []
    Objects(said.append, "converting").end()
    assert said == []


# --- a terminal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verbose", [False, True])
def test_a_bar_says_below_it_what_is_being_done(verbose: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, color_system=None)
    with showing(console, "converting", form="auto", verbose=verbose) as update:
        assert update is not None
        update(HALF)
        below = "  worker 1: model.layers.3.mlp" if verbose else "  at model.layers.3.mlp.experts"
        deadline = time.monotonic() + 10
        while below not in text.getvalue():
            assert time.monotonic() < deadline, text.getvalue()
            time.sleep(0.01)
    assert "50.0/100.0 MB" in text.getvalue()


def test_no_form_shows_nothing() -> None:
    text = io.StringIO()
    with showing(Console(file=text), "converting", form="none", verbose=True) as update:
        assert update is None
    assert text.getvalue() == ""


# --- the command line ---------------------------------------------------------------------------


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in a folder with a model."""
    monkeypatch.chdir(tmp_path)
    tiny.write(tmp_path / "model", hidden=64, intermediate=64, layers=2)

    def runner(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        said = capsys.readouterr()
        return code, said.out, said.err

    return runner


CONVERT = ("convert", "model", "out", "--tp", "2", "--gfx", "gfx950")


def documents(err: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in err.splitlines() if line.startswith("{")]


def test_progress_as_json_is_an_object_a_line_on_stderr(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, err = run(*CONVERT, "--progress", "json", "--json")
    assert code == 0
    assert json.loads(out)["schema"] == "aiter-prep/convert/1"
    found = documents(err)
    assert len(found) >= 2
    for document in found:
        jsonschema.validate(document, OBJECT)
    assert found[-1]["is_done"]
    assert found[-1]["done_bytes"] == found[-1]["total_bytes"]
    assert documents(run("verify", "out", "--progress", "json")[2])[-1]["is_done"]
    assert documents(run("restore", "out", "back", "--progress", "json", "-q")[2])


def test_no_json_says_done_where_a_run_failed(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(5, "it is broken")

    monkeypatch.setattr("os.fsync", failing)
    code, _, err = run(*CONVERT, "--progress", "json")
    assert code == 1
    assert not any(document["is_done"] for document in documents(err))


def test_an_unknown_form_is_refused(run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = run(*CONVERT, "--progress", "dots")
    assert code == 2
    assert f"use one of {', '.join(FORMS)}" in err
    assert not Path("out").exists()


LOGGED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z .+")


def test_a_log_keeps_what_is_said_with_the_time(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiter_prep.cli.progress.SECONDS_BETWEEN_LINES", 0.0)
    assert run(*CONVERT, "--log-file", "log", "-q")[0] == 0
    assert run(*CONVERT, "--log-file", "log", "--json")[0] == 12
    lines = Path("log").read_text("utf-8").splitlines()
    assert all(LOGGED.fullmatch(line) for line in lines)
    said = [line.partition(" ")[2] for line in lines]
    assert said[0] == f"aiter-prep {' '.join(CONVERT)} --log-file log -q"
    assert any(line.startswith("converting for gfx950, tp 2: ") for line in said)
    assert "prepared model for aiter on gfx950, 2 ranks" in said
    assert said[-1] == "error: `out` is a prepared folder already"


def test_a_log_that_cannot_be_written_is_refused_before_anything_else(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    code, _, err = run(*CONVERT, "--log-file", "missing/log")
    assert code == 1
    assert "cannot write `missing/log`: its folder is not there" in err
    assert not Path("out").exists()
