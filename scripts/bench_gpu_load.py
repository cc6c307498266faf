"""Loads prepared folders onto a GPU, compares with the CPU's load, and measures both."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_table import Table, say

GB = 1e9
REPEATS = 3


def main() -> None:
    """Measure everything."""
    options = parse_options()
    stand_in_for_xxhash()
    from bench_gpu_convert import MODELS, write_model

    table = Table()
    if options.device.startswith("cuda"):
        table.add("card", torch.cuda.get_device_name(options.device), f"torch {torch.__version__}")
    for model, tp in MODELS:
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            source = write_model(Path(place) / "source", model, options.model_gb)
            out = Path(place) / "out"
            prepare(source, out, tp)
            measure(table, f"{model.kind}, rank 0 of {tp}", out, options.device)
    say()
    table.show()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    shared = Path("/dev/shm")  # noqa: S108  # memory, so that no disk is measured
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--folder", type=Path, default=shared if shared.is_dir() else None)
    parser.add_argument("--model-gb", type=float, default=2.0)
    return parser.parse_args()


def stand_in_for_xxhash() -> None:
    """Let another hash stand in where xxhash is missing: what is compared here are bytes."""
    if importlib.util.find_spec("xxhash") is not None:
        return
    say("xxhash is not installed: digests of these folders are no digests of the format")
    found: Any = types.ModuleType("xxhash")
    found.xxh3_128 = lambda: hashlib.md5(usedforsecurity=False)
    found.xxh3_128_hexdigest = lambda data: hashlib.md5(data, usedforsecurity=False).hexdigest()
    sys.modules["xxhash"] = found


def prepare(source: Path, out: Path, tp: int) -> None:
    """Convert the first rank."""
    from aiter_prep.execution import execute
    from aiter_prep.plan import make_plan
    from aiter_prep.storage.checkpoint import open_checkpoint

    execute(make_plan(open_checkpoint(source), tp=tp, ranks=[0]), out)


def measure(table: Table, title: str, folder: Path, device: str) -> None:
    """Load onto the CPU and the device, compare, and note the rates."""
    from aiter_prep import load

    here = load(folder, 0)
    compare(here, load(folder, 0, device))
    compare(here, load(folder, 0, device, check_digests=True))
    size = sum(tensor.nbytes for tensor in here.values())
    table.add(f"{title}: equal on {device}", f"{len(here)} tensors, {size / GB:.2f} GB")
    staged = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=device.startswith("cuda"))
    there = torch.empty_like(staged, device=device)
    bus = staged.nbytes / seconds(lambda: there.copy_(staged), device) / GB
    table.rate(f"{title}: one pinned copy to {device}", bus)
    cases: dict[str, Callable[[], object]] = {
        "load, cpu": lambda: load(folder, 0),
        f"load, {device}": lambda: load(folder, 0, device),
        f"load, {device}, digests checked": lambda: load(folder, 0, device, check_digests=True),
    }
    for name, case in cases.items():
        table.rate(f"{title}: {name}", size / seconds(case, device) / GB, bus)


def compare(here: dict[str, Any], there: dict[str, Any]) -> None:
    """Stop unless names, dtypes, shapes, flags and every byte are equal."""
    if list(here) != list(there):
        raise SystemExit("other tensors, or another order")
    for name, expected in here.items():
        found = there[name]
        facts = [(t.dtype, tuple(t.shape), t.stride(), vars(t)) for t in (expected, found)]
        if facts[0] != facts[1]:
            raise SystemExit(f"{name}: {facts[1]}, the CPU's is {facts[0]}")
        if not torch.equal(bytes_of(expected), bytes_of(found).cpu()):
            raise SystemExit(f"{name}: its bytes differ")


def bytes_of(tensor: Any) -> Any:
    """The bytes of a tensor, flat."""
    return tensor.reshape(-1).view(torch.uint8)


def seconds(call: Callable[[], object], device: str) -> float:
    """The median time of a call, after one that fetches memory."""
    times = []
    for _ in range(REPEATS + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def synchronize(device: str) -> None:
    """Wait for what the device still does."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
