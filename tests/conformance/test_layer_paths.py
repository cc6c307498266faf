"""Prepared folders hold, byte for byte, what SGLang's and ATOM's expert layers hold."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_families
from aiter_prep.execution import execute
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.targets.table import target_named
from conformance.compare_layers import differences, unflagged
from conformance.dump_format import FAILURE, dump_path, read_dump
from conformance.engine_paths import EnginePath
from conformance.engine_run import Environment, group_name
from conformance.layer_run import (
    ENGINE_PATHS,
    SOURCES,
    dump_folder,
    group_of,
    names_by_group,
    run_group,
    source_folder,
)


def in_one_process(engine: str, path: EnginePath) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a test that needs the engine: xdist gives tests of one process to one worker."""
    return pytest.mark.vllm, pytest.mark.xdist_group(group_name(engine, group_of(path)))


CASES = [
    pytest.param(
        engine, name, ranks, id=f"{engine}-{name}-{ranks}", marks=in_one_process(engine, path)
    )
    for engine, paths in ENGINE_PATHS.items()
    for name, path in paths.items()
    for ranks in path.ranks
]

Dumped = Callable[[str, str, int], Path]


@pytest.fixture(scope="session")
def dumped(environment: Environment, layers_folder: Path) -> Dumped:
    """The dumps of a path; the first that asks runs all paths of one process."""
    work = layers_folder

    def find(engine: str, name: str, ranks: int) -> Path:
        if not (environment.folder / SOURCES[engine]).is_dir():
            pytest.skip(f"NOT COMPARED WITH {engine}: no `{SOURCES[engine]}` in the environment")
        group = group_of(ENGINE_PATHS[engine][name])
        done = work / engine / f"{group_name(engine, group)}.done"
        done.parent.mkdir(parents=True, exist_ok=True)
        with done.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                run_group(environment, work, engine, names_by_group(engine)[group], group)
                done.touch()
        folder = dump_folder(work, engine, name, ranks)
        if (folder / FAILURE).exists():
            pytest.fail(f"the engine failed:\n{(folder / FAILURE).read_text('utf-8')[-4000:]}")
        return folder

    return find


@pytest.mark.parametrize(("engine", "name", "ranks"), CASES)
def test_a_prepared_folder_holds_what_the_engines_expert_layers_hold(
    engine: str, name: str, ranks: int, dumped: Dumped, layers_folder: Path, tmp_path: Path
) -> None:
    path = ENGINE_PATHS[engine][name]
    folder = dumped(engine, name, ranks)
    source = open_checkpoint(source_folder(layers_folder, engine, name))
    tp, ep = (1, ranks) if path.expert_parallel else (ranks, 1)
    plan = make_plan(source, tp=tp, ep=ep, target=engine, gfx=path.gfx, options=path.options)
    manifest = execute(plan, tmp_path / "out")
    for rank in range(ranks):
        held = read_dump(dump_path(folder, rank))
        assert list(differences(tmp_path / "out", manifest, held, rank)) == []
        modules = {name.rpartition(".")[0] for name in unflagged(held)}
        assert modules.issuperset(path.unflagged)
        others = modules.difference(path.unflagged)
        assert bool(others) != path.flagged, "the engine's flag is not as in the table"


@pytest.mark.parametrize("engine", sorted(ENGINE_PATHS))
def test_every_path_of_a_targets_table_is_compared(engine: str, tmp_path: Path) -> None:
    taken: list[object] = []
    for name, path in ENGINE_PATHS[engine].items():
        source = tiny_families.write(tmp_path / name, name, path.family)
        tp = 1 if path.expert_parallel else path.ranks[-1]
        plan = make_plan(
            open_checkpoint(source), tp=tp, target=engine, gfx=path.gfx, options=path.options
        )
        taken += [block.path for block in plan.blocks]
    missed = [p for p in target_named(engine).paths if not any(p is held for held in taken)]
    assert [(p.scheme, dict(p.when)) for p in missed] == []
