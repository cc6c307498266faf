"""vLLM holds after our loader what it holds after its own, and no shuffle ran on the way."""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiter_prep
from aiter_prep.execution import execute
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from conformance.engine_run import ENGINES, Environment
from conformance.paths import PATHS, ConformancePath
from support import fixture

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm loader")]

TP = 2
ENTRY_POINT = "aiter_prep = aiter_prep.engines.vllm.plugin:register"
DEEPSEEK_V3 = "deepseek_v3"

NAMES = (
    "bf16",
    "bf16_i352",
    "fp8_block",
    "fp8_tensor",
    "fp8_tensor_static",
    "quark_ptpc_fp8",
    "ct_fp8_channel",
    "quark_mxfp4",
    "gpt_oss",
    DEEPSEEK_V3,
    "deepseek_v4",
    "deepseek_v4_fp8",
    "bf16_ep",
    "fp8_tensor_static_gfx942",
)
"""The paths that are loaded; every one in both versions of the engine."""

Loaded = Callable[[str, str], dict[str, Any]]


def path_of(name: str) -> ConformancePath:
    """The entry of the table; DeepSeek-V3's checkpoint lies ready, and is loaded as Qwen3's is."""
    return PATHS["fp8_block" if name == DEEPSEEK_V3 else name]


def options_of(path: ConformancePath) -> dict[str, str]:
    """What `make_plan` is told, from the words on the command line."""
    words = dict(zip(path.convert[::2], path.convert[1::2], strict=True))
    return {flag.removeprefix("--").replace("-", "_"): value for flag, value in words.items()}


def prepare(path: ConformancePath, source: Path, out: Path) -> Path:
    """Prepares a checkpoint for this path; once."""
    if not (out / "aiter_prep.json").exists():
        ranks = {"ep" if path.expert_parallel else "tp": TP}
        plan = make_plan(
            open_checkpoint(source),
            target="vllm",
            gfx=path.gfx,
            options=options_of(path),
            **ranks,  # type: ignore[arg-type]  # one of two numbers
        )
        execute(plan, out)
    return out


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the engine's path with the product and its entry point, as installed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "aiter_prep").symlink_to(Path(aiter_prep.__file__).parent)
    return installed(folder, "aiter-prep", ENTRY_POINT)


def installed(folder: Path, name: str, entry_point: str) -> Path:
    """Writes what an installer would write of a plugin of vLLM."""
    facts = folder / f"{name.replace('-', '_')}-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (facts / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry_point}\n")
    return folder


def run_engine(
    environment: Environment, sites: list[Path], words: list[object], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a module in the engine's environment."""
    seen = environment.variables(variables)
    seen["PYTHONPATH"] = os.pathsep.join([seen["PYTHONPATH"], *map(str, sites)])
    command = [environment.python, "-m", *words]
    return subprocess.run(
        list(map(str, command)), env=seen, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session")
def loaded(
    request: pytest.FixtureRequest,
    environment: Environment,
    checkpoint: Callable[[str], Path],
    site: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Loaded:
    """What the engine said of a path; a process loads all chosen paths of one kind at once."""
    base = tmp_path_factory.mktemp("loaded")
    results: dict[tuple[str, str], Path] = {}
    chosen: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if {"name", "version"} <= set(parameters):
            chosen[kind_of(parameters["version"], parameters["name"])].add(parameters["name"])

    def job(version: str, name: str) -> dict[str, object]:
        path = path_of(name)
        found = "deepseek_v3-fp8_block-sharded"
        source = fixture(found) if name == DEEPSEEK_V3 else checkpoint(name)
        results[version, name] = base / version / name
        return {
            "source": str(source),
            "prepared": str(prepare(path, source, base / "prepared" / name)),
            "out": str(results[version, name]),
            "tp": TP,
            "engine_args": path.engine_args,
            "expert_parallel": path.expert_parallel,
        }

    def result(version: str, name: str) -> dict[str, Any]:
        kind = kind_of(version, name)
        said = ""
        if (version, name) not in results:
            jobs = base / "jobs.json"
            jobs.write_text(json.dumps([job(version, other) for other in sorted(chosen[kind])]))
            where = Environment(environment.folder, version)
            words = ["conformance.loader_check", jobs, "--aiter", where.aiter]
            words += ["--gfx", path_of(name).gfx]
            done = run_engine(where, [site], words, **path_of(name).environment)
            said = done.stdout + done.stderr
        file = results[version, name] / "result.json"
        assert file.exists(), said[-6000:]
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    return result


def kind_of(version: str, name: str) -> tuple[object, ...]:
    """What one process of the engine has in common."""
    path = path_of(name)
    return version, path.gfx, tuple(sorted(path.environment.items()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", sorted(ENGINES))
def test_vllm_holds_after_our_loader_what_it_holds_after_its_own(
    version: str, name: str, loaded: Loaded
) -> None:
    result = loaded(version, name)
    assert "failure" not in result, result["failure"]
    assert result["version"].startswith(f"{version}.")
    assert [rank["rank"] for rank in result["ranks"]] == list(range(TP))
    for rank in result["ranks"]:
        assert not rank["differences"], "\n".join(rank["differences"])
        assert rank["layers"], "no expert layer was compared"
        assert rank["tensors"]
        theirs, ours = rank["shuffles"]
        assert theirs, "the spy saw nothing"
        assert ours == 0, f"{ours} shuffles of experts ran"
