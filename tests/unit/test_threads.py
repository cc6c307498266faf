"""Work that is spread over threads comes back in order, and ends with its first failure."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tiny
from aiter_prep import restore, verify
from aiter_prep.errors import InvalidUsage
from aiter_prep.storage.durable import WRITE_BACK_BYTES, start_writing_back
from aiter_prep.storage.scratch import equal_bytes
from aiter_prep.storage.threads import checked_workers, default_workers, spread
from prepared import contents, flip, prepare


def test_results_come_in_the_order_of_the_items_whoever_is_first() -> None:
    def wait(number: int) -> int:
        time.sleep(0.002 * (5 - number))
        return number

    assert list(spread(wait, range(5), 5, threading.Event())) == [0, 1, 2, 3, 4]


def test_a_failure_ends_the_others_and_begins_no_further_one() -> None:
    stop, begun = threading.Event(), []

    def fail(number: int) -> int:
        begun.append(number)
        if number == 0:
            raise KeyError(number)
        assert stop.wait(10), "nobody said stop"
        return number

    before = threading.active_count()
    with pytest.raises(KeyError):
        list(spread(fail, range(100), 2, stop))
    assert len(begun) <= 4
    assert threading.active_count() == before


def test_who_leaves_early_leaves_no_thread() -> None:
    stop = threading.Event()
    results = spread(lambda number: number, range(100), 4, stop)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert stop.is_set()
    assert not [t for t in threading.enumerate() if t.name.startswith("aiter-prep")]


@pytest.mark.parametrize("workers", [0, -1, 257])
def test_too_few_and_too_many_workers_are_refused(workers: int) -> None:
    with pytest.raises(InvalidUsage, match=f"--workers {workers} is out of range: 1 to 256"):
        checked_workers(workers)


def test_there_is_a_worker_for_each_usable_core() -> None:
    assert checked_workers(None) == default_workers() == min(16, len(os.sched_getaffinity(0)))


def test_any_number_of_workers_finds_the_same_and_restores_the_same(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", kind="mxfp8", layers=3, experts=4)
    out = tmp_path / "out"
    prepare(source, out, 2)
    for workers in (1, 7):
        restore(out, tmp_path / f"back-{workers}", workers=workers)
    assert contents(tmp_path / "back-1") == contents(tmp_path / "back-7")
    for path in sorted(out.glob("*.safetensors")):
        flip(path, path.stat().st_size - 1)
    one, many = (verify(out, workers=workers).problems for workers in (1, 7))
    assert one == many
    assert len({problem.file for problem in one}) == len(list(out.glob("*.safetensors")))


def test_long_ranges_are_written_back_at_once_and_short_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: said.append(words[1:]))
    with (tmp_path / "file").open("wb") as file:
        start_writing_back(file.fileno(), 5, WRITE_BACK_BYTES - 1)
        start_writing_back(file.fileno(), 7, WRITE_BACK_BYTES)
    assert said == [(7, WRITE_BACK_BYTES, os.POSIX_FADV_DONTNEED)]


def test_advice_that_a_filesystem_does_not_take_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_words: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    with (tmp_path / "file").open("wb") as file:
        start_writing_back(file.fileno(), 0, WRITE_BACK_BYTES)
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("shape", [(3, 8), (3, 7), (0, 8), (1, 1)])
def test_one_byte_makes_arrays_unequal(shape: tuple[int, int]) -> None:
    one = np.arange(shape[0] * shape[1], dtype=np.uint8).reshape(shape)
    assert equal_bytes(one, one.copy())
    for place in range(one.size):
        other = one.copy()
        other.reshape(-1)[place] ^= 128
        assert not equal_bytes(one, other)
    assert equal_bytes(one[:, ::2], one[:, ::2].copy())
