"""Runs the engine's own loading in its environment, one process for each chip."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.dump_format import FAILURE, dump_path
from conformance.paths import PATHS, ConformancePath

ENGINES = {"0.32": None, "0.33": "vllm-0.33.0"}
"""The versions of vLLM at hand: the folder of its sources, or none for the installed one."""

_TESTS = Path(__file__).resolve().parents[1]


class EngineFailed(Exception):
    """The engine did not load a checkpoint; the message says why."""


@dataclass(frozen=True)
class Environment:
    """A folder that `scripts/conformance-env` made, and the version of vLLM to run in it."""

    folder: Path
    version: str = "0.33"

    @property
    def python(self) -> Path:
        """The interpreter that has the engine's packages."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def aiter(self) -> Path:
        """AITER's sources."""
        return self.folder / "aiter" / "aiter"

    def variables(self, more: dict[str, str]) -> dict[str, str]:
        """What an engine process sees; nothing of the caller's shell but `PATH` and `HOME`."""
        sources = ENGINES[self.version]
        roots = [self.folder / sources] if sources else []
        return {
            "PATH": os.environ.get("PATH", ""),
            "HOME": os.environ.get("HOME", ""),
            "OMP_NUM_THREADS": "1",  # processes fork, and the tests run beside each other
            "PYTHONPATH": os.pathsep.join(map(str, [*roots, _TESTS])),
            "PYTHONPYCACHEPREFIX": str(self.folder / "pycache"),
            **more,
        }


Group = tuple[str, tuple[tuple[str, str], ...]]
"""What one engine process has in common: the chip and the variables."""


def group_of(path: ConformancePath) -> Group:
    """The process in which `path` can be loaded."""
    return path.gfx, tuple(sorted(path.environment.items()))


def group_name(engine: str, group: Group) -> str:
    """A name for the tests and files of a group."""
    gfx, variables = group
    return " ".join([engine, gfx, *("=".join(pair) for pair in variables)])


def dump_folder(dumps: Path, name: str, tp: int) -> Path:
    """Where the dumps of the path `name` for `tp` ranks lie."""
    return dumps / name / f"tp{tp}"


_DONE = "done"
_HERE = Path(__file__).parent
_ALL = ("dump_format.py", "fake_*.py", "forks.py")
_MAKERS = {
    "vllm": (_HERE, (*_ALL, "checkpoint_*.py", "engine_*.py", "make_*.py", "paths.py")),
    "layers": (
        _HERE,
        (*_ALL, "*_dump.py", "engine_*.py", "layer_run.py", "moe_layer.py", "sglang_lookup.py"),
    ),
    "families": (_TESTS, ("families_table.py", "tiny_families.py")),
}


def digest_of_harness(*kinds: str) -> str:
    """Names the state of everything that dumps depend on besides the environment."""
    found = {
        file for kind in kinds for glob in _MAKERS[kind][1] for file in _MAKERS[kind][0].glob(glob)
    }
    files = sorted(found)
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def is_dumped(dumps: Path, name: str) -> bool:
    """Whether the path `name` was loaded for all its numbers of ranks."""
    return (dumps / name / _DONE).exists()


def _jobs(names: Iterable[str], checkpoints: Path, dumps: Path) -> list[dict[str, object]]:
    return [
        {
            "source": str(checkpoints / name),
            "out": str(dump_folder(dumps, name, tp)),
            "tp": tp,
            "engine_args": PATHS[name].engine_args,
            "expert_parallel": PATHS[name].expert_parallel,
        }
        for name in names
        for tp in PATHS[name].tps
    ]


def run_jobs(
    environment: Environment,
    group: Group,
    jobs: Sequence[Mapping[str, object]],
    module: str = "conformance.engine_dump",
    *more: str | Path,
) -> str:
    """Runs `jobs` in one engine process; returns what it said, failures are in the folders."""
    gfx, variables = group
    with tempfile.TemporaryDirectory() as scratch:
        listing = Path(scratch) / "jobs.json"
        listing.write_text(json.dumps(jobs), "utf-8")
        command = [environment.python, "-m", module, listing, *more]
        command += ["--aiter", environment.aiter, "--gfx", gfx]
        done = subprocess.run(
            list(map(str, command)),
            env=environment.variables({**dict(variables), "TMPDIR": scratch}),
            cwd=scratch,
            capture_output=True,
            text=True,
            check=False,
        )
    return done.stdout + done.stderr


def dump_paths(environment: Environment, names: Iterable[str], where: tuple[Path, Path]) -> None:
    """Loads the paths `names`; `where` has their checkpoints' folder and that for the dumps."""
    dumps = where[1]
    groups: dict[Group, list[str]] = defaultdict(list)
    for name in names:
        groups[group_of(PATHS[name])].append(name)
    for group, members in groups.items():
        jobs = _jobs(members, *where)
        said = run_jobs(environment, group, jobs)
        for job in jobs:
            out = Path(str(job["out"]))
            if not (dump_path(out, 0).exists() or (out / FAILURE).exists()):
                out.mkdir(parents=True, exist_ok=True)
                (out / FAILURE).write_text(said)
        for name in members:
            if not any((dumps / name).glob(f"*/{FAILURE}")):
                (dumps / name / _DONE).touch()


def check_dumped(folder: Path) -> None:
    """Raises `EngineFailed` with the engine's own words where there is no dump in `folder`."""
    failure = folder / FAILURE
    if failure.exists():
        raise EngineFailed(f"the engine could not load `{folder}`:\n{failure.read_text()[-6000:]}")
