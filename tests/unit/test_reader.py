"""The reader fills every buffer, whatever the kernel hands out at a time."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiter_prep.errors import BadSource
from aiter_prep.storage import reader as module
from aiter_prep.storage.header import TensorInfo
from aiter_prep.storage.reader import FolderReader, chunks

Preadv = Callable[[int, Sequence[memoryview], int], int]
DATA = bytes(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of three files."""
    for number, name in enumerate(("a", "b", "c")):
        (tmp_path / name).write_bytes(DATA[number:] + bytes(number))
    return tmp_path


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def short_reads(limit: int, calls: list[int] | None = None) -> Preadv:
    """Return a `preadv` that reads at most `limit` bytes at a time."""
    real = os.preadv

    def preadv(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if calls is not None:
            calls.append(len(views))
        cut, left = [], limit
        for view in views:
            cut.append(view[:left])
            left -= len(cut[-1])
            if not left:
                break
        return real(descriptor, cut, offset)

    return preadv


def failing(code: int) -> Preadv:
    def preadv(_descriptor: int, _views: Sequence[memoryview], _offset: int) -> int:
        raise OSError(code, os.strerror(code))

    return preadv


@pytest.mark.parametrize("limit", [1, 2, 7, 100, 4096])
def test_short_reads_are_gone_on_with(
    limit: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", short_reads(limit))
    buffers = [np.zeros(size, np.uint8) for size in (0, 1, 10, 0, 333, 4)]
    ranges, start = [], 5
    for buffer in buffers:
        ranges.append(("a", start, buffer))
        start += len(buffer)
    with FolderReader(folder) as reader:
        reader.read_all(ranges)
    assert b"".join(map(bytes, buffers)) == DATA[5:start]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 4000), st.integers(0, 900)), max_size=12
    ),
    st.integers(1, 500),
)
def test_any_ranges_in_any_order_are_read(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[tuple[str, int, int]], limit: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-ranges"
    if not folder.exists():
        folder.mkdir()
        for number, name in enumerate(("a", "b", "c")):
            (folder / name).write_bytes(DATA[number:] + bytes(number))
    ranges = [(file, start, np.zeros(size, np.uint8)) for file, start, size in wanted]
    with pytest.MonkeyPatch.context() as patch, FolderReader(folder) as reader:
        patch.setattr(os, "preadv", short_reads(limit))
        reader.read_all(ranges)
    for file, start, buffer in ranges:
        content = DATA["abc".index(file) :] + bytes("abc".index(file))
        assert bytes(buffer) == content[start : start + len(buffer)]


def test_ranges_that_follow_each_other_are_read_by_one_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "preadv", short_reads(10**9, calls))
    with FolderReader(folder) as reader:
        reader.read_all(
            [(file, start, np.zeros(10, np.uint8)) for start in (20, 10, 40) for file in ("b", "a")]
        )
    assert calls == [2, 1, 2, 1]


def test_more_ranges_than_the_kernel_takes_are_read_in_several_calls(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "preadv", short_reads(10**9, calls))
    buffers = [np.zeros(1, np.uint8) for _ in range(1100)]
    with FolderReader(folder) as reader:
        reader.read_all([("a", start, buffer) for start, buffer in enumerate(buffers)])
    assert sum(calls) == 1100
    assert max(calls) <= 1024
    assert b"".join(map(bytes, buffers)) == DATA[:1100]


def test_matrices_are_filled_row_after_row(folder: Path) -> None:
    matrix = np.zeros((4, 25), np.uint8)
    with FolderReader(folder) as reader:
        reader.read_into("a", 100, matrix)
    assert matrix.tobytes() == DATA[100:200]


def test_a_file_that_ends_too_early_is_named(folder: Path) -> None:
    with FolderReader(folder) as reader, pytest.raises(BadSource) as caught:
        reader.read_into("a", 4990, np.zeros(20, np.uint8))
    assert caught.value.message == "`a` ended at byte 5000, but its header promises more"


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_an_error_of_the_disk_is_reported_with_the_file(
    code: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", failing(code))
    before = open_descriptors()
    said = f"^cannot read `b`: {os.strerror(code)}$"
    with FolderReader(folder) as reader, pytest.raises(BadSource, match=said):
        reader.read_into("b", 0, np.zeros(1, np.uint8))
    assert open_descriptors() == before


def test_a_missing_file_is_reported(folder: Path) -> None:
    said = "cannot read `gone`: No such file"
    with FolderReader(folder) as reader, pytest.raises(BadSource, match=said):
        reader.read_into("gone", 0, np.zeros(1, np.uint8))


def test_a_file_is_opened_once_and_closed_at_the_end(folder: Path) -> None:
    before = open_descriptors()
    with FolderReader(folder) as reader:
        for start in range(50):
            reader.read_into("a", start, np.zeros(3, np.uint8))
        assert open_descriptors() == before + 1
        reader.close()
        assert open_descriptors() == before
        reader.read_into("a", 0, np.zeros(3, np.uint8))  # it opens again
    assert open_descriptors() == before


def test_only_so_many_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN_FILES", 3)
    for number in range(20):
        (tmp_path / str(number)).write_bytes(bytes([number]))
    before = open_descriptors()
    with FolderReader(tmp_path) as reader:
        for number in [*range(20), *range(20)]:
            buffer = np.zeros(1, np.uint8)
            reader.read_into(str(number), 0, buffer)
            assert buffer[0] == number
            assert open_descriptors() <= before + 3
    assert open_descriptors() == before


def test_many_threads_read_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN_FILES", 2)
    wrong: list[int] = []

    def read(reader: FolderReader, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for start in rng.integers(0, 4900, 150).tolist():
            buffer = np.zeros(64, np.uint8)
            reader.read_into("a", start, buffer)
            if bytes(buffer) != DATA[start : start + 64]:
                wrong.append(start)

    before = open_descriptors()
    with FolderReader(folder) as reader:
        threads = [threading.Thread(target=read, args=(reader, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert open_descriptors() == before


def info_of(size: int, start: int = 0) -> TensorInfo:
    return TensorInfo("x", "U8", (size,), "a", start, size)


def pieces(info: TensorInfo, reader: FolderReader) -> Iterator[tuple[int, bytes]]:
    return ((offset, bytes(data)) for offset, data in chunks(info, reader))


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 250, 1000])
def test_a_tensor_comes_in_chunks(size: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    with FolderReader(folder) as reader:
        found = list(pieces(info_of(size, 7), reader))
    assert [offset for offset, _ in found] == list(range(0, size, 100))
    assert b"".join(data for _, data in found) == DATA[7 : 7 + size]


def test_a_descriptor_that_comes_back_late_is_closed(folder: Path) -> None:
    before = open_descriptors()
    with FolderReader(folder) as reader:
        left = chunks(info_of(200), reader, bytearray(100))
        next(left)
    assert open_descriptors() != before
    del left
    assert open_descriptors() == before
