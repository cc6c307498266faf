"""Fixtures of the conformance tests: the engine's environment, the checkpoints, the dumps."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conformance.engine_run import (
    Environment,
    check_dumped,
    digest_of_harness,
    dump_folder,
    dump_paths,
    group_name,
    group_of,
    is_dumped,
)
from conformance.make_checkpoints import make_checkpoint
from conformance.paths import PATHS

ENVIRONMENT = "AITER_PREP_TEST_CONFORMANCE_ENV"
CACHE = "AITER_PREP_TEST_CONFORMANCE_CACHE"

Dump = Callable[[str, int], Path]


@pytest.fixture(scope="session")
def environment() -> Environment:
    """The engines' environment, for tests with the marker `vllm`."""
    folder = os.environ[ENVIRONMENT]
    found = Environment(Path(folder).resolve())
    if not found.python.exists():
        pytest.fail(f"{ENVIRONMENT}: `{folder}` is not what scripts/conformance-env makes")
    return found


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run share, or one that stays."""
    if cache := os.environ.get(CACHE):
        return Path(cache).resolve()
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def shared_folder(run_folder: Path) -> Path:
    """The part of the folder for this state of the harness of vLLM."""
    return run_folder / f"vllm-{digest_of_harness('vllm')}"


@pytest.fixture(scope="session")
def layers_folder(run_folder: Path) -> Path:
    """The part of the folder for this state of the harness of SGLang and ATOM."""
    return run_folder / f"layers-{digest_of_harness('layers', 'families')}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock `path` against other workers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def checkpoint(shared_folder: Path) -> Callable[[str], Path]:
    """Makes the checkpoint of a path on first use."""

    def made(name: str) -> Path:
        folder = shared_folder / "checkpoints" / name
        with _locked(shared_folder / "locks" / name):
            if not (folder / "config.json").exists():
                make_checkpoint(name, folder)
        return folder

    return made


@pytest.fixture(scope="session")
def dump(
    request: pytest.FixtureRequest,
    environment: Environment,
    shared_folder: Path,
    checkpoint: Callable[[str], Path],
) -> Dump:
    """The engine's dumps of a path; a process loads all chosen paths of one kind at once."""
    chosen = {
        item.callspec.params.get("name")
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    }
    folders = (shared_folder / "checkpoints", shared_folder / "dumps")
    tried: set[str] = set()

    def dumped(name: str, tp: int) -> Path:
        group = group_of(PATHS[name])
        with _locked(shared_folder / "locks" / group_name("vllm", group)):
            if name not in tried and not is_dumped(folders[1], name):
                alike = [n for n in PATHS if n in chosen and group_of(PATHS[n]) == group]
                wanted = [n for n in alike if not is_dumped(folders[1], n)]
                tried.update(wanted)
                for other in wanted:
                    checkpoint(other)
                dump_paths(environment, wanted, folders)
        folder = dump_folder(folders[1], name, tp)
        check_dumped(folder)
        return folder

    return dumped
