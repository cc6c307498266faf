"""A kill at any moment leaves no manifest or a complete folder, and resume ends in the same bytes.

The runs are killed with SIGKILL before a chosen change of the file system (an open for writing, a
write, fsync, rename, unlink, mkdir, truncation or lock), or in the middle of a write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aiter_prep.errors import DataMismatch
from aiter_prep.execution import execute
from aiter_prep.restoration import restore
from aiter_prep.verification import verify
from killing import SHARD_BYTES, TP, Runner, Scene, scene_of, spread_over
from prepared import JOURNAL, LOCK, MANIFEST, contents, plan_of, prepare, problems_of, stamps

QUICK_POINTS = 20
LONG_POINTS = 200


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A small model over several shards; on gfx950 and gfx942 alike."""
    folder = tmp_path_factory.mktemp("scene")
    return scene_of(folder, kind="mxfp8", hidden=64, intermediate=64, spread="layers")


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Another one, which lies in the folder before."""
    folder = tmp_path_factory.mktemp("older")
    return scene_of(folder, kind="bf16", hidden=64, intermediate=64)


def model_files(out: Path) -> dict[str, str]:
    """Return the digests of a folder's files but for those of a run that is not at its end."""
    return {name: digest for name, digest in contents(out).items() if name not in {JOURNAL, LOCK}}


def check_after_kill(scene: Scene, out: Path) -> None:
    """Check that a kill left no manifest, or a complete folder; and the source as it was."""
    assert stamps(scene.source) == scene.before
    if not out.exists():
        return
    if (out / MANIFEST).exists():
        assert verify(out).is_clean
        assert problems_of(out, scene.source) == ()
        assert model_files(out) == scene.fresh
        return
    with pytest.raises(DataMismatch):
        verify(out)
    with pytest.raises(DataMismatch):
        restore(out, out.parent / "back")
    for path in out.glob("*.safetensors"):  # a final name is a whole file
        assert contents(out)[path.name] == scene.fresh[path.name]


def finish(scene: Scene, out: Path) -> None:
    """Resume a killed run, and check that it ends in the same bytes."""
    if (out / MANIFEST).exists() and not (out / JOURNAL).exists():
        assert model_files(out) == scene.fresh  # it was at its end
        return
    execute(plan_of(scene.source, TP, max_shard_bytes=SHARD_BYTES), out, resume=True)
    assert contents(out) == scene.fresh
    assert problems_of(out, scene.source) == ()
    assert stamps(scene.source) == scene.before


def kill_and_resume(
    runner: Runner, scene: Scene, folder: Path, points: int, **options: Any
) -> None:
    count = runner.run(scene.source, folder / "whole", 0, **options)
    assert contents(folder / "whole") == scene.fresh
    for point in spread_over(count, points):
        out = folder / f"out-{point}"
        assert runner.run(scene.source, out, point, **options) == 0
        check_after_kill(scene, out)
        finish(scene, out)


@pytest.mark.parametrize("torn", [False, True])
def test_a_killed_run_leaves_nothing_or_everything_and_resumes_to_the_same_bytes(
    torn: bool, runner: Runner, scene: Scene, tmp_path: Path
) -> None:
    kill_and_resume(runner, scene, tmp_path, QUICK_POINTS, torn=torn)


@pytest.mark.slow
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4_gpt_oss"])
def test_a_run_killed_at_two_hundred_points_resumes_to_the_same_bytes(
    kind: str, torn: bool, runner: Runner, tmp_path: Path
) -> None:
    scene = scene_of(tmp_path / "scene", kind=kind, hidden=64, intermediate=64, layers=4)
    kill_and_resume(runner, scene, tmp_path, LONG_POINTS, torn=torn)


@pytest.mark.slow
def test_a_run_of_several_workers_killed_anywhere_resumes_to_the_same_bytes(
    runner: Runner, scene: Scene, tmp_path: Path
) -> None:
    count = runner.run(scene.source, tmp_path / "whole", 0, workers=4)
    for point in range(1, count + 1):
        out = tmp_path / f"out-{point}"
        runner.run(scene.source, out, point, workers=4)
        check_after_kill(scene, out)
        finish(scene, out)


def test_every_moment_at_the_end_of_a_run_is_safe(
    runner: Runner, scene: Scene, tmp_path: Path
) -> None:
    """From the last shard to the last unlink: here the folder becomes whole."""
    count = runner.run(scene.source, tmp_path / "whole", 0)
    complete = []
    for point in range(max(1, count - 20), count + 1):
        out = tmp_path / f"out-{point}"
        assert runner.run(scene.source, out, point) == 0
        check_after_kill(scene, out)
        complete.append((out / MANIFEST).exists())
        finish(scene, out)
    assert complete == sorted(complete)
    assert complete[0] is False
    assert complete[-1] is True


def test_a_run_may_be_killed_again_and_again(runner: Runner, scene: Scene, tmp_path: Path) -> None:
    """Each resumed run is killed a little later; what is finished stays finished."""
    out = tmp_path / "out"
    finished = 0
    for point in range(3, 400, 9):
        done = runner.run(scene.source, out, point, resume=True, torn=point % 2 == 0)
        check_after_kill(scene, out)
        held = len(list(out.glob("*.safetensors"))) if out.exists() else 0
        assert held >= finished
        finished = held
        if done or ((out / MANIFEST).exists() and not (out / JOURNAL).exists()):
            break
    finish(scene, out)
    assert model_files(out) == scene.fresh


def kill_and_replace(
    runner: Runner, older: Scene, scene: Scene, folder: Path, points: int
) -> set[str]:
    """Kill runs that replace a prepared folder; return what lay in its place afterwards."""
    whole = folder / "whole"
    prepare(older.source, whole / "out", TP, max_shard_bytes=SHARD_BYTES)
    count = runner.run(scene.source, whole / "out", 0, overwrite=True)
    assert contents(whole / "out") == scene.fresh
    seen: set[str] = set()
    for point in spread_over(count, points):
        out = folder / f"at-{point}" / "out"
        prepare(older.source, out, TP, max_shard_bytes=SHARD_BYTES)
        assert runner.run(scene.source, out, point, overwrite=True) == 0
        seen.add(state_of(out, older, scene))
        runner.run(scene.source, out, 0, overwrite=True)
        assert contents(out) == scene.fresh
        assert {path.name for path in out.parent.iterdir()} == {"out"}
    assert stamps(scene.source) == scene.before
    return seen


def state_of(out: Path, older: Scene, scene: Scene) -> str:
    """Return which folder lies there; it must be one of the two, and whole."""
    held = model_files(out)
    if held == older.fresh:
        assert problems_of(out, older.source) == ()
        return "old"
    assert held == scene.fresh
    assert problems_of(out, scene.source) == ()
    return "new"


def test_a_kill_while_replacing_leaves_the_old_folder_or_the_new_one(
    runner: Runner, older: Scene, scene: Scene, tmp_path: Path
) -> None:
    assert "old" in kill_and_replace(runner, older, scene, tmp_path, QUICK_POINTS)


@pytest.mark.slow
def test_a_kill_anywhere_while_replacing_leaves_the_old_folder_or_the_new_one(
    runner: Runner, older: Scene, scene: Scene, tmp_path: Path
) -> None:
    seen = kill_and_replace(runner, older, scene, tmp_path, LONG_POINTS)
    assert seen == {"old", "new"}


def test_a_lock_of_a_killed_run_does_not_block(
    runner: Runner, scene: Scene, tmp_path: Path
) -> None:
    count = runner.run(scene.source, tmp_path / "whole", 0)
    assert runner.run(scene.source, tmp_path / "out", count // 2) == 0
    assert (tmp_path / "out" / LOCK).exists()
    finish(scene, tmp_path / "out")
    assert not (tmp_path / "out" / LOCK).exists()
