"""Kills runs at a chosen change of the file system, in child processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import tiny
from prepared import contents, prepare, stamps

PROGRAM = Path(__file__).with_name("hostile") / "killed_runs.py"
TP = 2
SHARD_BYTES = 10_000


class Runner:
    """The program that runs conversions and kills them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, source: Path, out: Path, kill_at: int, **more: Any) -> int:
        """Run a conversion, or another act; return how many changes it made, or 0 if killed."""
        request = {
            "source": str(source),
            "out": str(out),
            "kill_at": kill_at,
            "tp": TP,
            "max_shard_bytes": SHARD_BYTES,
            "act": more.pop("act", "convert"),
            "torn": more.pop("torn", False),
            "workers": more.pop("workers", 1),
            "options": more,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert answer["exit_code"] == 0
        assert answer["signal"] in {0, signal.SIGKILL}
        count: int = answer["count"]
        assert (count == 0) is (answer["signal"] == signal.SIGKILL)
        return count

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


class Scene(NamedTuple):
    """A source, its stamps before anything was done, and what a run of it writes."""

    source: Path
    before: dict[str, tuple[int, int, str]]
    fresh: dict[str, str]


def scene_of(folder: Path, **model: Any) -> Scene:
    source = tiny.write(folder / "source", **model)
    (source / "tokenizer.json").write_text('{"tiny": true}', "utf-8")
    before = stamps(source)
    prepare(source, folder / "fresh", TP, max_shard_bytes=SHARD_BYTES)
    return Scene(source, before, contents(folder / "fresh"))


def spread_over(count: int, points: int) -> list[int]:
    """Return points spread evenly over a run, the first and the last change among them."""
    if points >= count:
        return list(range(1, count + 1))
    return sorted({1 + number * (count - 1) // (points - 1) for number in range(points)})
