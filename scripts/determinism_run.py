"""Converts small checkpoints in several ways and prints a digest of every byte."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np

import tiny
from aiter_prep.execution import execute
from aiter_prep.plan import Plan, make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from faults import ANY, Fault, Injector, in_child, kill_before
from prepared import JOURNAL, LOCK, MANIFEST, contents

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
WORKERS = (1, 2, 7, 64)
KILLS = (20, 90, 160)


def main() -> int:
    """Print one digest; return 1 if workers or kills change a byte."""
    whole = hashlib.sha256()
    folders = 0
    with tempfile.TemporaryDirectory(prefix="aiter-prep-determinism-") as place:
        for number, (source, tp) in enumerate(_sources(Path(place))):
            found = set(_results(source, tp, Path(place) / f"out-{number}"))
            if len(found) != 1:
                sys.stdout.write(f"FAILED: {source.name}: {len(found)} different results\n")
                return 1
            whole.update(found.pop().encode())
            folders += 1
    python = f"python {platform.python_version()}, numpy {np.__version__}"
    ways = len(WORKERS) + len(KILLS)
    sys.stdout.write(f"{python}: {folders} folders, {ways} ways each: {whole.hexdigest()}\n")
    return 0


def _sources(place: Path) -> Iterator[tuple[Path, int]]:
    for name, (model, *sizes) in tiny.SAMPLES.items():
        source = tiny.write(place / name, model)
        yield from ((source, tp) for tp in sizes if tp is not None)
    for source in sorted(FIXTURES.iterdir()):
        yield source, 1


def _results(source: Path, tp: int, out: Path) -> Iterator[str]:
    """Yield a digest of the folder, for every way to come to it."""

    def plan() -> Plan:
        return make_plan(open_checkpoint(source), tp=tp, max_shard_bytes=200_000)

    for workers in WORKERS:
        folder = out.with_name(f"{out.name}-{workers}")
        execute(plan(), folder, workers=workers)
        yield _digest(folder)
    for at in KILLS:
        folder = out.with_name(f"{out.name}-killed-{at}")

        def convert(at: int = at, folder: Path = folder) -> None:
            with Injector([Fault(ANY, at, kill_before)]):
                execute(plan(), folder, workers=2)

        in_child(convert)
        # killed before its manifest, or between that and the end
        if not (folder / MANIFEST).exists() or (folder / JOURNAL).exists():
            execute(plan(), folder, workers=2, resume=True)
        yield _digest(folder)


def _digest(folder: Path) -> str:
    files = {name: digest for name, digest in contents(folder).items() if name != LOCK}
    text = json.dumps(files, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
