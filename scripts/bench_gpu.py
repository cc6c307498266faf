"""Measures the backend `torch` on a GPU against what the GPU, its bus and the CPU can do."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_gpu_convert import MODELS, measure_convert, write_model
from bench_table import Table, say

from aiter_prep.backends.cpu import CpuBackend
from aiter_prep.backends.probe import probe
from aiter_prep.backends.table import Backend, choose_backend
from aiter_prep.layouts.table import LAYOUTS
from aiter_prep.storage.threads import default_workers

GB = 1e9
SHAPE = (8, 8192, 8192)  # experts, rows, bytes of a row: 0.54 GB
CALL_SHAPE = (4, 2048, 4096)  # what one call of a conversion moves: 34 MB
PERMUTED = ("tile_16x16", "tile_16x16_interleaved_16", "tile_16x16_interleaved_1", "e8m0")
REPEATS = 20


def main() -> None:
    """Measure everything."""
    options = parse_options()
    table = Table()
    start = time.perf_counter()
    backend, _ = choose_backend("torch", options.device)
    backend.buffer(1)
    table.add("start of torch and the GPU, once", f"{time.perf_counter() - start:.1f} s")
    import torch

    table.add("card", torch.cuda.get_device_name(options.device), f"torch {torch.__version__}")
    table.add("cores", str(len(os.sched_getaffinity(0))))
    check_bytes(backend)
    measure_permutation(torch, backend, table, options.device)
    both = measure_bus(torch, table, options.device)
    measure_device_path(backend, table, both)
    measure_cpu(table)
    for folder in options.folder or [default_folder()]:
        table.add("folder of the models", str(folder))
        for model, tp in MODELS:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                source = write_model(Path(place) / "source", model, options.model_gb)
                measure_convert(table, backend, source, tp)
    say()
    table.show()
    if options.json:
        options.json.write_text(json.dumps(table.rows, indent=2) + "\n", "utf-8")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--folder", type=Path, action="append")
    parser.add_argument("--model-gb", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def default_folder() -> Path:
    """Return a folder in memory, where there is one: no disk is to be measured."""
    memory = Path("/dev/shm")  # noqa: S108 - a fresh folder is made in it
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


# --- bytes --------------------------------------------------------------------------------------


def random_bytes(shape: Sequence[int], seed: int = 0) -> Any:
    """Return random bytes of a shape."""
    return np.random.default_rng(seed).integers(0, 256, tuple(shape), dtype=np.uint8)


def check_bytes(backend: Backend) -> None:
    """Hold every layout to ours: on a few bytes, and on more than the lanes of a GPU hold."""
    probe(backend).require()
    matrix = random_bytes((3, 2048, 16384))
    stored = backend.buffer(matrix.nbytes).reshape(matrix.shape)
    for name, layout in LAYOUTS.items():
        stored[...] = 0xA5
        backend.lay_out(layout, [(matrix, 0, 0)], stored)
        assert np.array_equal(stored, layout.apply(matrix)), name
    say(f"    {len(LAYOUTS)} layouts: the bytes of cpu")


# --- rates --------------------------------------------------------------------------------------


def measure_permutation(torch: Any, backend: Any, table: Table, device: str) -> None:
    """Time the permutation alone, against a copy of as many bytes."""
    matrix = torch.randint(0, 256, SHAPE, dtype=torch.uint8, device=device)
    room = torch.empty(matrix.numel(), dtype=torch.uint8, device=device)
    moved = 2 * matrix.numel() / GB

    def rate(work: Callable[[], Any]) -> float:
        return moved / gpu_seconds(torch, work)

    copy = rate(lambda: room.copy_(matrix.view(-1)))
    table.rate("copy on the device, read + write", copy)
    for name in PERMUTED:
        layout = LAYOUTS[name]
        permuted = rate(lambda layout=layout: backend.permute(layout, matrix, [room]))
        table.rate(f"permutation {name}", permuted, copy)
    experts, rows, row_bytes = SHAPE
    tiles = matrix.view(experts, rows // 16, 16, row_bytes // 32, 2, 16)
    table.rate(
        "the tile as AITER writes it",
        rate(lambda: tiles.permute(0, 1, 3, 4, 2, 5).contiguous()),
        copy,
    )


def gpu_seconds(torch: Any, work: Callable[[], Any]) -> float:
    """Return the median time of some work on the current stream, launched ten times in a row."""
    times = []
    for _ in range(REPEATS + 1):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 10_000)
    return median(times[1:])


def measure_bus(torch: Any, table: Table, device: str) -> float:
    """Time pinned copies up, down, and both at once; return the rate of both together."""
    size = int(np.prod(SHAPE))
    hosts = [torch.randint(0, 256, (size,), dtype=torch.uint8).pin_memory() for _ in range(2)]
    devices = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def run(*, up: bool, down: bool) -> float:
        times = []
        for _ in range(REPEATS // 2 + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.cuda.stream(streams[0]) if up else nullcontext():
                if up:
                    devices[0].copy_(hosts[0], non_blocking=True)
            with torch.cuda.stream(streams[1]) if down else nullcontext():
                if down:
                    hosts[1].copy_(devices[1], non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return (up + down) * size / GB / median(times[1:])

    table.rate("bus up, pinned", run(up=True, down=False))
    table.rate("bus down, pinned", run(up=False, down=True))
    return table.rate("bus both ways at once", run(up=True, down=True))


def measure_device_path(backend: Backend, table: Table, both: float) -> None:
    """Time calls as `convert` makes them: from and to pinned memory, from one thread and more."""
    whole = rate_of_calls(backend, 1, SHAPE, 6)
    table.rate("device path, one call of 0.5 GB, both ways", whole, both)
    for threads in (1, 2, 4, 8, 16):
        rate = rate_of_calls(backend, threads, CALL_SHAPE, 64)
        table.rate(f"device path, {threads} threads, 34 MB a call", rate, both)


def measure_cpu(table: Table) -> None:
    """Time the same calls of the backend `cpu`."""
    for threads in (1, default_workers()):
        rate = rate_of_calls(CpuBackend(), threads, CALL_SHAPE, 64)
        table.rate(f"cpu backend, {threads} threads, read + write", rate)


def rate_of_calls(backend: Backend, threads: int, shape: tuple[int, ...], calls: int) -> float:
    """Return the bytes that calls read and write in a second, the median of three runs."""
    layout = LAYOUTS["tile_16x16"]
    size = int(np.prod(shape))
    buffers = [
        (backend.buffer(size).reshape(shape), backend.buffer(size).reshape(shape))
        for _ in range(threads)
    ]
    for number, (matrix, _) in enumerate(buffers):
        matrix[...] = random_bytes(shape, number)

    def run(number: int) -> None:
        matrix, stored = buffers[number]
        for _ in range(calls // threads):
            backend.lay_out(layout, [(matrix, 0, 0)], stored)

    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(4):
            start = time.perf_counter()
            list(pool.map(run, range(threads)))
            times.append(time.perf_counter() - start)
    return 2 * size * (calls // threads) * threads / GB / median(times[1:])


if __name__ == "__main__":
    main()
