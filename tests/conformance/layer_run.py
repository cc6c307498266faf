"""Runs an engine's expert layers in the conformance environment, one process for each chip."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import tiny_families
from conformance.dump_format import FAILURE, dump_path
from conformance.engine_paths import ATOM_PATHS, SGLANG_PATHS, EnginePath
from conformance.engine_run import run_jobs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from conformance.engine_run import Environment, Group

ENGINE_PATHS: Mapping[str, Mapping[str, EnginePath]] = {"sglang": SGLANG_PATHS, "atom": ATOM_PATHS}
SOURCES = {"sglang": "sglang-0.5.23", "atom": "atom"}


def group_of(path: EnginePath) -> Group:
    """What one process has in common: the chip, and what the engine's environment says."""
    return path.gfx, tuple(sorted(path.environment.items()))


def source_folder(work: Path, engine: str, name: str) -> Path:
    """Where the checkpoint of a path lies."""
    return work / engine / name / "source"


def dump_folder(work: Path, engine: str, name: str, ranks: int) -> Path:
    """Where the dumps of a path for some ranks lie."""
    return work / engine / name / f"ranks-{ranks}"


def run_group(
    environment: Environment, work: Path, engine: str, names: Sequence[str], group: Group
) -> None:
    """Writes the checkpoints and the dumps of some paths, or why there are none."""
    jobs = []
    for name in names:
        path = ENGINE_PATHS[engine][name]
        source = source_folder(work, engine, name)
        if not source.exists():
            tiny_families.write(source, name, path.family)
        jobs += [
            {
                "source": str(source),
                "out": str(dump_folder(work, engine, name, ranks)),
                "ranks": ranks,
                "expert_parallel": path.expert_parallel,
                "backend": path.backend,
            }
            for ranks in path.ranks
        ]
    sources = environment.folder / SOURCES[engine]
    said = run_jobs(environment, group, jobs, f"conformance.{engine}_dump", "--engine", sources)
    for job in jobs:
        out = Path(str(job["out"]))
        if not (dump_path(out, 0).exists() or (out / FAILURE).exists()):
            out.mkdir(parents=True, exist_ok=True)
            (out / FAILURE).write_text(said, "utf-8")


def names_by_group(engine: str) -> dict[Group, list[str]]:
    """The paths of an engine, by what their process has in common."""
    found: dict[Group, list[str]] = defaultdict(list)
    for name, path in ENGINE_PATHS[engine].items():
        found[group_of(path)].append(name)
    return found
