"""Sends calls through a pretended GPU: what it can hold, when it is full, what threads share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aiter_prep.backends import device, lanes
from aiter_prep.errors import AiterPrepError
from aiter_prep.layouts.table import LAYOUTS

pytest.importorskip("torch")

from aiter_prep.backends.torch_device import TorchBackend
from fake_gpu import FakeDevice, FakeGpu

Bytes = npt.NDArray[np.uint8]
KIB = 1024
TILE = LAYOUTS["tile_16x16"]
MOVING = [layout for layout in LAYOUTS.values() if layout.order != (0, 1)]

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def small_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a few kilobytes fill what takes megabytes elsewhere."""
    monkeypatch.setattr(lanes, "LANE_BYTES", 16 * KIB)
    monkeypatch.setattr(lanes, "LEAST_LANE_BYTES", 4 * KIB)
    monkeypatch.setattr(device, "LEAST_COPY_BYTES", 2 * KIB)


def random_bytes(shape: tuple[int, ...], seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def backend_on(gpu: FakeGpu, memory: int = 1 << 20) -> TorchBackend:
    return TorchBackend(gpu, FakeDevice(), memory)


def check(backend: TorchBackend, layout: Any = TILE, rows: int = 256) -> None:
    """Lay out gate and up of a few experts, more than a lane holds, and check the bytes."""
    gate, up = random_bytes((5, rows // 2, 128), 1), random_bytes((5, rows // 2, 128), 2)
    stored = backend.buffer(5 * rows * 128).reshape(5, rows, 128)
    backend.lay_out(layout, [(gate, 0, 0), (up, rows // 2, 0)], stored)
    assert np.array_equal(stored, layout.apply(np.concatenate([gate, up], 1)))


@pytest.mark.parametrize("layout", MOVING, ids=lambda layout: layout.name)
@pytest.mark.parametrize("rows", [64, 128, 512])
def test_calls_larger_than_a_lane_come_down_whole(layout: Any, rows: int) -> None:
    check(backend_on(FakeGpu()), layout, rows)


@pytest.mark.parametrize("layout", MOVING, ids=lambda layout: layout.name)
def test_padding_survives_the_way_to_the_device(layout: Any) -> None:
    part = random_bytes((4, 100, 97))
    stored = np.full((4, 512, 128), 0x7F, np.uint8)
    wanted = stored.copy()
    wanted[:, 3:103, 2:99] = part
    backend_on(FakeGpu()).lay_out(layout, [(part, 3, 2)], stored)
    assert np.array_equal(stored, layout.apply(wanted))


def test_memory_of_the_device_stays_below_the_limit() -> None:
    gpu = FakeGpu()
    limit = 5 * 2 * 16 * KIB
    backend = backend_on(gpu, limit)
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(check, backend) for _ in range(40)]:
            future.result()
    assert 0 < gpu.most_bytes <= limit


def test_threads_take_turns_where_there_is_but_one_lane() -> None:
    gpu = FakeGpu()
    backend = backend_on(gpu, 2 * 16 * KIB)
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(check, backend) for _ in range(40)]:
            future.result()
    assert gpu.most_bytes == 2 * 16 * KIB


@pytest.mark.parametrize("free", [100 * KIB, 40 * KIB, 20 * KIB, 9 * KIB])
def test_a_device_that_others_fill_is_used_in_smaller_pieces(free: int) -> None:
    gpu = FakeGpu(free)
    backend = backend_on(gpu)
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(check, backend) for _ in range(8)]:
            future.result()
    assert 0 < gpu.most_bytes <= free


def test_a_full_device_is_refused_with_a_way_out() -> None:
    backend = backend_on(FakeGpu(6 * KIB))
    with pytest.raises(AiterPrepError, match="has no memory left") as caught:
        check(backend)
    assert "--backend cpu" in caught.value.hint


def test_a_limit_below_the_smallest_lane_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(AiterPrepError, match=f"at least {8 * KIB} are needed") as caught:
        backend_on(FakeGpu(), 8 * KIB - 1)
    assert "--device-memory" in caught.value.hint
    check(backend_on(FakeGpu(), 8 * KIB))


def test_a_permutation_that_finds_no_room_gets_smaller_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu()
    backend = backend_on(gpu)
    permute, refused = backend.permute, threading.Event()

    def picky(layout: Any, matrix: Any, room: Any) -> Any:
        if matrix.numel() > 4 * KIB:
            refused.set()
            raise gpu.OutOfMemoryError("no room")
        return permute(layout, matrix, room)

    monkeypatch.setattr(backend, "permute", picky)
    check(backend)
    assert refused.is_set()


def test_a_permutation_that_never_finds_room_ends_in_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu()
    backend = backend_on(gpu)

    def never(*_: Any) -> Any:
        raise gpu.OutOfMemoryError("no room")

    monkeypatch.setattr(backend, "permute", never)
    with pytest.raises(AiterPrepError, match="not even for a piece of an expert"):
        check(backend)
    monkeypatch.undo()
    check(backend)  # the lanes were given back


def test_a_failure_gives_the_lanes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_on(FakeGpu(), 2 * 16 * KIB)

    def broken(*_: Any) -> Any:
        raise RuntimeError("device-side assert")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "permute", broken)
        with pytest.raises(RuntimeError, match="device-side assert"):
            check(backend)
    check(backend)


def test_memory_that_cannot_be_pinned_is_refused_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu()

    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(gpu, "empty", full, raising=False)
    with pytest.raises(AiterPrepError, match=r"cannot pin 64 bytes .*: CUDA error: out of memory$"):
        backend_on(gpu).buffer(64)


def test_a_layout_that_moves_nothing_never_goes_to_the_device() -> None:
    gpu = FakeGpu()
    check(backend_on(gpu), LAYOUTS["row_major"])
    assert gpu.most_bytes == 0
