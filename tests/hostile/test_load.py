"""Many conversions, many workers, a source that is read-only or slow."""

from __future__ import annotations

import gc
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from aiter_prep.execution import execute
from aiter_prep.progress import Progress
from aiter_prep.restoration import restore
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.verification import verify
from faults import Fault, Injector
from prepared import contents, plan_of, prepare, stamps

MODELS = 50


def test_fifty_models_in_one_loop_leak_nothing(tmp_path: Path) -> None:
    before = used()
    after_ten: dict[str, int] = {}
    for number in range(MODELS):
        source = tiny.write(tmp_path / "source", layers=2, seed=number)
        prepare(source, tmp_path / "out", 2, workers=2)
        assert verify(tmp_path / "out", source=open_checkpoint(source)).is_clean
        restore(tmp_path / "out", tmp_path / "back")
        for folder in ("source", "out", "back"):
            shutil.rmtree(tmp_path / folder)
        if number == 9:
            after_ten = used()
    after = used()
    assert after["descriptors"] == before["descriptors"]
    assert after["threads"] == before["threads"]
    assert after["kilobytes"] - after_ten["kilobytes"] < 8_000
    assert list(tmp_path.iterdir()) == []


def used() -> dict[str, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text("utf-8").splitlines()
    resident = next(line for line in status if line.startswith("VmRSS:"))
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "kilobytes": int(resident.split()[1]),
    }


def test_64_workers_bring_the_same_bytes_as_one(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", layers=4, spread="scattered")
    before = used()
    for workers in (1, 64):
        prepare(source, tmp_path / str(workers), 2, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "64")
    assert used()["threads"] == before["threads"]
    assert used()["descriptors"] == before["descriptors"]


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Callable[[Callable[[Path], Any]], Path]]:
    """A disk that something is written to and that is read-only then; only root may make one."""
    place = tmp_path / "disk"
    place.mkdir()

    def fill(write: Callable[[Path], Any]) -> Path:
        for options in ("size=8m", "remount,ro"):
            command = ["mount", "-t", "tmpfs", "-o", options, "aiter-prep-test", place]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("no file system may be mounted here")
            if options == "size=8m":
                write(place / "source")
        return place / "source"

    yield fill
    subprocess.run(["umount", place], capture_output=True, check=False)  # noqa: S607


def test_a_source_on_a_disk_that_is_read_only_is_enough(
    read_only_disk: Callable[[Callable[[Path], Any]], Path], tmp_path: Path
) -> None:
    source = read_only_disk(tiny.write)
    with pytest.raises(OSError, match="Read-only"):
        (source / "x").write_bytes(b"x")
    before = stamps(source)
    prepare(source, tmp_path / "out", 2)
    assert verify(tmp_path / "out", source=open_checkpoint(source)).is_clean
    assert stamps(source) == before


def test_progress_on_a_slow_source_is_never_ahead_of_what_was_read(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", layers=6, spread="scattered")
    read = 0
    lock = threading.Lock()
    seen: list[tuple[Progress, int]] = []

    def slowly(_call: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        nonlocal read
        time.sleep(0.05)
        count = function(*arguments)
        with lock:
            read += count
        return count

    with Injector([Fault("preadv", 0, slowly)]):
        execute(
            plan_of(source, 2),
            tmp_path / "out",
            workers=2,
            progress=lambda progress: seen.append((progress, read)),
        )
    done = [progress.done_bytes for progress, _ in seen]
    assert len(set(done)) > 3, "it said nothing on the way"
    assert done == sorted(done)
    assert all(progress.done_bytes <= at_most for progress, at_most in seen)
    assert {progress.total_bytes for progress, _ in seen} == {done[-1]}
    assert done[-1] == open_checkpoint(source).total_bytes
