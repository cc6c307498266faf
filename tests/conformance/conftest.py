"""Fixtures of the conformance tests: the engine's environment, the checkpoints, the dumps."""

from __future__ import annotations

import fcntl
import os
import zlib
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
    group_of,
    is_dumped,
)
from conformance.make_checkpoints import make_checkpoint
from conformance.paths import PATHS

ENVIRONMENT = "AITER_PREP_TEST_CONFORMANCE_ENV"
CACHE = "AITER_PREP_TEST_CONFORMANCE_CACHE"

Dump = Callable[[str, int], Path]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "conformance: needs the folder of scripts/conformance-env")


@pytest.fixture(scope="session")
def environment() -> Environment:
    """The engine's environment; without it nothing here can run."""
    folder = os.environ.get(ENVIRONMENT)
    if not folder:
        pytest.skip(
            f"NOT COMPARED WITH vLLM: {ENVIRONMENT} is not set; see scripts/conformance-env"
        )
    found = Environment(Path(folder))
    if not found.python.exists():
        pytest.fail(f"{ENVIRONMENT}: `{folder}` is not what scripts/conformance-env makes")
    return found


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of this run, or one that stays, for this state of the harness."""
    if cache := os.environ.get(CACHE):
        return Path(cache).resolve() / digest_of_harness()
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


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

    def dumped(name: str, tp: int) -> Path:
        group = group_of(PATHS[name])
        lock = f"engine-{zlib.crc32(repr(group).encode()):08x}"
        with _locked(shared_folder / "locks" / lock):
            if not is_dumped(folders[1], name):
                alike = [n for n in PATHS if n in chosen and group_of(PATHS[n]) == group]
                wanted = [n for n in alike if not is_dumped(folders[1], n)]
                for other in wanted:
                    checkpoint(other)
                dump_paths(environment, wanted, folders)
        folder = dump_folder(folders[1], name, tp)
        check_dumped(folder)
        return folder

    return dumped
