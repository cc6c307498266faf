"""Parts and their seal may be killed at any moment; the bytes are those of one run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from aiter_prep.errors import DataMismatch
from aiter_prep.execution import Part, execute_part, seal
from aiter_prep.verification import verify
from killing import SHARD_BYTES, TP, Runner, Scene, scene_of, spread_over
from prepared import LOCK, MANIFEST, contents, plan_of, prepare, problems_of, stamps

PARTS = ".aiter_prep.parts"
POINTS = 20
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = {"kind": "mxfp8", "hidden": 64, "intermediate": 64, "spread": "layers"}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A small model over several shards."""
    return scene_of(tmp_path_factory.mktemp("scene"), **MODEL)


def part(scene: Scene, out: Path, number: int, count: int = 2) -> None:
    plan = plan_of(scene.source, TP, max_shard_bytes=SHARD_BYTES)
    execute_part(plan, out, Part(count, number), workers=1)


def check_sealed(scene: Scene, out: Path) -> None:
    found = contents(out)
    found.pop(LOCK, None)  # a kill may leave it; it holds nothing
    assert found == scene.fresh
    assert problems_of(out, scene.source) == ()
    assert stamps(scene.source) == scene.before
    assert not (out / PARTS).exists()


def check_unsealed(scene: Scene, out: Path) -> None:
    """Check that there is no manifest, and that what has its name is whole."""
    assert not (out / MANIFEST).exists()
    with pytest.raises(DataMismatch):
        verify(out)
    for path in out.glob("model-*.safetensors"):
        assert contents(out)[path.name] == scene.fresh[path.name]


@pytest.mark.parametrize("torn", [False, True])
def test_a_killed_part_is_repeated_and_nothing_is_sealed_before(
    torn: bool, runner: Runner, scene: Scene, tmp_path: Path
) -> None:
    options = {"act": "part", "number": 1, "count": 2, "torn": torn}
    part(scene, tmp_path / "whole", 2)
    count = runner.run(scene.source, tmp_path / "whole", 0, **options)
    shards = len([name for name in scene.fresh if name.startswith("model-")])
    for point in spread_over(count, POINTS):
        out = tmp_path / f"out-{point}"
        part(scene, out, 2)
        assert runner.run(scene.source, out, point, **options) == 0
        check_unsealed(scene, out)
        if len(list(out.glob(f"{PARTS}/*/model-*.json"))) < shards:  # else it died at its end
            with pytest.raises(DataMismatch):
                seal(out)
        part(scene, out, 1)
        assert list(out.glob(f"{PARTS}/*/part-1-of-2.*")) == []  # the space is given back
        seal(out)
        check_sealed(scene, out)


@pytest.mark.parametrize("torn", [False, True])
def test_a_killed_seal_is_repeated(
    torn: bool, runner: Runner, scene: Scene, tmp_path: Path
) -> None:
    def ready(name: str) -> Path:
        part(scene, tmp_path / name, 1)
        part(scene, tmp_path / name, 2)
        return tmp_path / name

    count = runner.run(scene.source, ready("whole"), 0, act="seal", torn=torn)
    check_sealed(scene, tmp_path / "whole")
    for point in spread_over(count, 2 * POINTS):
        out = ready(f"out-{point}")
        assert runner.run(scene.source, out, point, act="seal", torn=torn) == 0
        if (out / MANIFEST).exists():
            assert verify(out).is_clean
        else:
            check_unsealed(scene, out)
        seal(out)
        check_sealed(scene, out)


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_a_killed_seal_leaves_the_old_folder_or_the_new_one(
    is_exchanged: bool, runner: Runner, scene: Scene, tmp_path: Path
) -> None:
    prepare(scene.source, tmp_path / "old", 1)
    old = contents(tmp_path / "old")
    plan = plan_of(scene.source, TP, max_shard_bytes=SHARD_BYTES)

    def ready(name: str) -> Path:
        out = tmp_path / name / "out"
        shutil.copytree(tmp_path / "old", out)
        for number in (1, 2):
            execute_part(plan, out, Part(2, number), workers=1, overwrite=True)
        return out

    options = {"act": "seal", "exchange": is_exchanged}
    count = runner.run(scene.source, ready("whole"), 0, **options)
    check_sealed(scene, tmp_path / "whole" / "out")
    for point in spread_over(count, 2 * POINTS):
        out = ready(f"at-{point}")
        assert runner.run(scene.source, out, point, **options) == 0
        assert out.exists() or not is_exchanged  # two renames leave none for a moment
        if out.exists():
            assert contents(out)[MANIFEST] in {old[MANIFEST], scene.fresh[MANIFEST]}
            assert verify(out).is_clean
        seal(out)
        check_sealed(scene, out)
        assert [path.name for path in out.parent.iterdir()] == ["out"]


# --- real processes -----------------------------------------------------------------------------


def large(folder: Path) -> Path:
    """Write a model that takes a process some time."""
    return tiny.write(
        folder / "model", kind="bf16", hidden=512, intermediate=512, experts=8, layers=6
    )


def call(*argv: str | Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "aiter_prep", *map(str, argv)]
    environment = {**os.environ, **environment}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and what was said to stderr."""
    said = process.communicate(timeout=120)[1]
    assert "Traceback" not in said
    return process.returncode, said


def flags(number: int, count: int = 4, tp: int = 2) -> list[Any]:
    sizes = ["--tp", tp, "--max-shard-size", "2MB", "--workers", 1, "-q"]
    return [*map(str, sizes), "--part", f"{number}/{count}"]


@pytest.mark.slow
def test_processes_at_once_one_of_which_is_killed_make_the_folder_of_one_run(
    tmp_path: Path,
) -> None:
    source = large(tmp_path)
    prepare(source, tmp_path / "one", 2, max_shard_bytes=2_000_000)
    out = tmp_path / "out"
    running = {n: call("convert", source, out, *flags(n)) for n in (1, 2, 3, 4)}
    deadline = time.monotonic() + 60
    while not list(out.glob(f"{PARTS}/*/part-3-of-4.*/.*.partial")):
        assert time.monotonic() < deadline, "part 3 does not begin to write"
        assert running[3].poll() is None, "part 3 ended before it could be killed"
    running[3].send_signal(signal.SIGKILL)
    assert ended(running.pop(3))[0] == -signal.SIGKILL
    assert [ended(process)[0] for process in running.values()] == [0, 0, 0]
    code, said = ended(call("seal", out, "-q"))
    assert (code, "those of part 3/4" in said) == (3, True)
    code, said = ended(call("convert", source, out, *flags(1, tp=1)))
    assert (code, "holds parts of another conversion" in said) == (12, True)
    assert ended(call("convert", source, out, *flags(3)))[0] == 0
    assert ended(call("seal", out, "-q"))[0] == 0
    assert contents(out) == contents(tmp_path / "one")
    assert problems_of(out, source) == ()


@pytest.mark.slow
def test_one_part_run_by_two_processes_at_once_makes_the_same_folder(tmp_path: Path) -> None:
    source = large(tmp_path)
    prepare(source, tmp_path / "one", 2, max_shard_bytes=2_000_000)
    out = tmp_path / "out"
    running = [call("convert", source, out, *flags(1, 1)) for _ in range(3)]
    results = [ended(process) for process in running]
    assert any(code == 0 for code, _ in results)  # the last to begin, at least
    assert [said for code, said in results if code and "is gone" not in said] == []
    assert ended(call("seal", out, "-q"))[0] == 0
    assert contents(out) == contents(tmp_path / "one")


# --- the examples -------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which a shell finds the program."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    program = bin_folder / "aiter-prep"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m aiter_prep "$@"\n', "utf-8")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}


def small(folder: Path) -> Path:
    return tiny.write(folder / "model", kind="bf16", hidden=64, intermediate=64, layers=2)


@pytest.mark.slow
def test_the_slurm_array_makes_the_folder_of_one_run(shell: dict[str, str], tmp_path: Path) -> None:
    source, out = small(tmp_path), tmp_path / "out"
    prepare(source, tmp_path / "one", 2)
    script = EXAMPLES / "slurm-array.sbatch"
    first, last = (int(n) for n in _option(script, "--array").split("-"))
    array = {
        "SLURM_ARRAY_TASK_MIN": str(first),
        "SLURM_ARRAY_TASK_MAX": str(last),
        "SLURM_ARRAY_TASK_COUNT": str(last - first + 1),
        "SLURM_CPUS_PER_TASK": "1",
        "SOURCE": str(source),
        "OUT": str(out),
        "TP": "2",
    }
    running = [
        subprocess.Popen(
            ["/bin/bash", script], env={**shell, **array, "SLURM_ARRAY_TASK_ID": str(task)}
        )
        for task in range(first, last + 1)
    ]
    assert [process.wait(120) for process in running] == [0] * len(running)
    seal(out)
    assert contents(out) == contents(tmp_path / "one")


def _option(script: Path, name: str) -> str:
    lines = script.read_text("utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"#SBATCH {name}="))
    return line.partition("=")[2]


@pytest.mark.slow
def test_the_kubernetes_jobs_make_the_folder_of_one_run(
    shell: dict[str, str], tmp_path: Path
) -> None:
    source, out = small(tmp_path), tmp_path / "out"
    prepare(source, tmp_path / "one", 2)
    text = (EXAMPLES / "kubernetes-indexed-job.yaml").read_text("utf-8")
    text = text.replace("/models/source", str(source)).replace("/models/prepared", str(out))
    convert, complete = yaml.safe_load_all(text)
    assert convert["spec"]["completionMode"] == "Indexed"
    count = convert["spec"]["completions"]
    running = [
        subprocess.Popen(_argv(convert), env={**shell, "JOB_COMPLETION_INDEX": str(index)})
        for index in range(count)
    ]
    early = subprocess.run(_argv(complete), env=shell, check=False)
    assert early.returncode in {0, 3}  # it is started again until it succeeds
    assert [process.wait(120) for process in running] == [0] * count
    assert subprocess.run(_argv(complete), env=shell, check=False).returncode == 0
    assert contents(out) == contents(tmp_path / "one")


def _argv(job: dict[str, Any]) -> list[str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    argv: list[str] = [*container["command"], *container["args"]]
    return argv


@pytest.mark.slow
def test_the_step_of_a_pipeline_converts_once(shell: dict[str, str], tmp_path: Path) -> None:
    source, out = small(tmp_path), tmp_path / "out"
    workflow = yaml.safe_load((EXAMPLES / "ci-step.yml").read_text("utf-8"))
    (step,) = workflow["jobs"]["prepare"]["steps"]
    environment = {**shell, "SOURCE": str(source), "OUT": str(out)}
    command = ["/bin/bash", "-c", step["run"]]
    first = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert first.stdout.startswith("prepared model")
    before = stamps(out)
    again = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert "already; nothing was written" in again.stdout
    assert stamps(out) == before
