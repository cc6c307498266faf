"""Measures whole conversions with each backend."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import numpy as np
from bench_table import Table

import tiny
from aiter_prep.backends.cpu import CpuBackend
from aiter_prep.backends.table import Backend
from aiter_prep.execution import execute
from aiter_prep.execution.jobs import Context, run_block
from aiter_prep.plan import Plan, make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.storage.reader import FolderReader
from aiter_prep.storage.scratch import Scratch
from aiter_prep.storage.threads import default_workers

GB = 1e9
MAX_SHARD_BYTES = 500_000_000  # many files at a time: writes into one wait for each other
# Enough layers for 16 threads, each of which converts one at a time; and the ranks.
MODELS = (
    (tiny.Model("mxfp4_quark", experts=8, hidden=4096, intermediate=2048), 8),
    (tiny.Model("bf16", experts=8, hidden=4096, intermediate=512), 1),
)


def measure_convert(table: Table, gpu: Backend, source: Path, tp: int) -> None:
    """Convert a model with each backend, without and with writing, and compare the files."""
    plan = make_plan(open_checkpoint(source), tp=tp, max_shard_bytes=MAX_SHARD_BYTES)
    read = plan.checkpoint.total_bytes / GB
    title = f"{plan.blocks[0].block.scheme.name}, tp {tp}, {read:.1f} GB"
    first: dict[str, Any] = {}
    for backend in (CpuBackend(), gpu):
        run_without_writing(plan, backend)  # the first run fetches memory
        bare = read / median([run_without_writing(plan, backend) for _ in range(3)])
        table.rate(f"{title}, nothing written: {backend.name}", bare, first.get("bare"))
        times, shards = zip(
            *(run_with_writing(plan, source.parent / "out", backend) for _ in range(4)), strict=True
        )
        whole = read / median(times[1:])
        table.rate(f"{title}, convert: {backend.name}", whole, first.get("whole"))
        first = first or {"bare": bare, "whole": whole, "shards": shards[0]}
        assert set(shards) == {first["shards"]}, title


def run_with_writing(plan: Plan, out: Path, backend: Backend) -> tuple[float, tuple[str, ...]]:
    """Convert; return the seconds and the digests of the shards."""
    start = time.perf_counter()
    manifest = execute(plan, out, backend=backend)
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return seconds, tuple(shard.digest for shard in manifest.shards)


def run_without_writing(plan: Plan, backend: Backend) -> float:
    """Read, lay out and digest every expert; return the seconds."""
    start = time.perf_counter()
    with (
        FolderReader(plan.checkpoint.folder) as reader,
        ThreadPoolExecutor(default_workers()) as pool,
    ):
        memory = Scratch(backend.buffer)
        context = Context(reader, Nowhere(plan), memory, backend, Event(), lambda _count: None)
        list(pool.map(lambda block: run_block(context, block), plan.blocks))
    return time.perf_counter() - start


class Nowhere:
    """Takes the bytes of output tensors and forgets them."""

    def __init__(self, plan: Plan) -> None:
        self._sizes = {
            (shard.rank, name): slot.total_bytes
            for shard in plan.shards
            for name, slot in shard.layout.slots.items()
        }

    def is_finished(self, _rank: int | None, _name: str) -> bool:
        """Nothing is."""
        return False

    def total_bytes(self, rank: int | None, name: str) -> int:
        """Return the size of a tensor."""
        return self._sizes[rank, name]

    def write(self, _rank: int | None, _name: str, _offset: int, _data: Any) -> None:
        """Forget some bytes."""

    def complete(self, _rank: int | None, _name: str, _written: Any) -> None:
        """Forget a tensor."""


def write_model(folder: Path, model: tiny.Model, size: float) -> Path:
    """Write as many layers of random bytes as make up the size."""
    one = sum(
        int(np.prod(shape)) * tiny.WIDTH[dtype] for dtype, shape in tiny.shapes_of(model).values()
    )
    layers = max(1, round(size * GB / one))
    layer = tiny.tensors_of(model)
    shards = {}
    for number in range(layers):  # the same bytes in every layer: random numbers take long
        moved = {key.replace("layers.0.", f"layers.{number}."): t for key, t in layer.items()}
        if number:
            moved = {key: t for key, t in moved.items() if ".layers." in key}
        shards[f"model-{number + 1:05d}-of-{layers:05d}.safetensors"] = moved
    return tiny.write_shards(folder, shards, tiny.config_of(model))
