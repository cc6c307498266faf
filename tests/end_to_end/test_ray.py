"""A Ray cluster of several nodes writes the folder of one run, even if it loses a node."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from aiter_prep.cli import main
from aiter_prep.errors import (
    AiterPrepError,
    BadSource,
    DataMismatch,
    InvalidUsage,
    OutputNotEmpty,
)
from aiter_prep.execution import Part, execute, execute_part, layouts_of, seal
from aiter_prep.execution.bundles import bundles_of, divided, shared_out
from aiter_prep.execution.ray_run import Settings, execute_on_ray, write_task
from aiter_prep.execution.sharing import shared_conversion
from aiter_prep.plan import Plan
from hub_server import REPO, environment, run_with, serving
from prepared import contents, plan_of, prepare, problems_of, stamps

PARTS = ".aiter_prep.parts"
SHARD_BYTES = 1_000_000

on_a_cluster = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def marked(function: Any) -> Any:
    """Mark a test that needs a cluster."""
    for mark in on_a_cluster:
        function = mark(function)
    return function


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with nodes(2) as found:
        yield found


@contextmanager
def nodes(count: int) -> Iterator[Any]:
    """Run a cluster of a head without CPUs and nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(count):
        found.add_node(num_cpus=1)
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some fifty shards."""
    return tiny.write(
        tmp_path_factory.mktemp("source") / "model",
        kind="bf16",
        hidden=512,
        intermediate=512,
        experts=8,
        layers=8,
    )


@pytest.fixture(scope="module")
def fresh(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one run writes."""
    out = tmp_path_factory.mktemp("fresh") / "out"
    execute(plan(source), out)
    return contents(out)


def plan(source: Path) -> Plan:
    return plan_of(source, 2, max_shard_bytes=SHARD_BYTES)


def notes(out: Path) -> int:
    return len(list(out.glob(f"{PARTS}/*/model-*.json")))


@marked
def test_a_cluster_that_loses_a_node_writes_the_folder_of_one_run(
    cluster: Any, source: Path, fresh: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    doomed = cluster.add_node(num_cpus=2)
    seen: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 120
        while notes(out) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(notes(out))
        cluster.remove_node(doomed, allow_graceful=False)

    before = stamps(source)
    killer = threading.Thread(target=kill)
    killer.start()
    told: list[int] = []
    manifest = execute_on_ray(
        plan(source),
        out,
        address=cluster.address,
        progress=lambda progress: told.append(progress.done_bytes),
    )
    killer.join()
    assert 4 <= seen[0] < len(manifest.shards), "the node was to be lost in the middle"
    assert contents(out) == fresh
    assert problems_of(out, source) == ()
    assert not (out / PARTS).exists()
    assert told == sorted(told)
    assert told[-1] == manifest_bytes(plan(source))
    assert stamps(source) == before


def manifest_bytes(made: Plan) -> int:
    return sum(shard.layout.total_bytes for shard in made.shards)


@marked
def test_a_cluster_goes_on_with_what_parts_have_written(
    cluster: Any,
    source: Path,
    fresh: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    execute_part(plan(source), out, Part(3, 2))
    waiting = stamps(out)
    flags = ["--tp", "2", "--gfx", "gfx950", "--max-shard-size", "1MB"]
    ray = ["--engine", "ray", "--ray-address", cluster.address]
    assert main(["convert", str(source), str(out), *flags, *ray]) == 0
    assert capsys.readouterr().out.startswith("prepared model for aiter on gfx950, 2 ranks")
    assert contents(out) == fresh
    kept = {Path(name).name: stamp for name, stamp in waiting.items() if name.endswith("tensors")}
    assert kept
    assert {name: stamps(out)[name] for name in kept} == kept
    assert main(["convert", str(source), str(out), *flags, *ray, "--if-needed"]) == 0
    with pytest.raises(OutputNotEmpty):
        execute_on_ray(plan(source), out, address=cluster.address)


@marked
def test_a_cluster_replaces_a_folder_when_the_new_one_is_whole(
    cluster: Any, source: Path, fresh: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prepare(source, out, 1)
    before = stamps(out)
    seen: list[bool] = []
    execute_on_ray(
        plan(source),
        out,
        address=cluster.address,
        overwrite=True,
        progress=lambda _: seen.append(stamps(out) == before),
    )
    assert seen
    assert all(seen)
    assert contents(out) == fresh
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@marked
def test_paths_are_those_of_the_folder_where_it_was_called(
    cluster: Any,
    source: Path,
    fresh: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").symlink_to(source.parent)
    made = plan(Path("here") / source.name)
    execute_on_ray(made, "out", address=cluster.address)
    assert contents(tmp_path / "out") == fresh


@marked
def test_nodes_fetch_what_they_need_of_the_hub(tmp_path: Path) -> None:
    made = tiny.write(tmp_path / "model", layers=3, spread="layers")
    prepare(made, tmp_path / "one", 2, max_shard_bytes=110_000)
    with serving() as hub, pytest.MonkeyPatch.context() as patch:
        hub.files = {path.name: path.read_bytes() for path in made.iterdir()}
        for name, value in environment(hub.url, tmp_path).items():
            patch.setenv(name, value)  # nodes have what they need to know from where they start
        with nodes(2) as cluster:
            flags = ("--tp", "2", "--gfx", "gfx950", "--max-shard-size", "110KB", "--stream")
            on_ray = ("--engine", "ray", "--ray-address", cluster.address)
            done = run_with(hub.url, tmp_path, "convert", REPO, "out", *flags, *on_ray)
        whole = [name for name in hub.downloaded if name.endswith(".safetensors")]
    assert done.returncode == 0, done.stderr
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "one")
    assert problems_of(tmp_path / "out", made) == ()
    assert len(whole) == 3 + 4  # a layer for each of three tasks, and all of it for what is common
    assert {path.name for path in tmp_path.iterdir()} - {"hf"} == {"model", "one", "out"}


def shards_of(folder: Path) -> dict[str, str]:
    return {name: data for name, data in contents(folder).items() if name.endswith(".safetensors")}


@marked
def test_what_fails_on_a_node_fails_here_under_its_own_name(
    cluster: Any, source: Path, tmp_path: Path
) -> None:
    made = plan(source)
    path = made.checkpoint.folder / made.checkpoint.headers[0].file
    before = path.read_bytes()
    stamp = path.stat().st_mtime_ns
    try:
        os.truncate(path, len(before) // 2)
        with pytest.raises(BadSource) as caught:
            execute_on_ray(made, tmp_path / "out", address=cluster.address)
        assert caught.value.hint
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(stamp, stamp))
    # the bytes are those of before, but the system has noted that the file was changed
    with pytest.raises(BadSource) as caught:
        execute_on_ray(made, tmp_path / "out", address=cluster.address)
    assert "changed while it was read" in caught.value.message
    again = execute_on_ray(
        plan(source), tmp_path / "again", address=cluster.address, settings=Settings(workers=1)
    )
    assert again.shards
    assert problems_of(tmp_path / "again", source) == ()


@marked
def test_there_need_be_a_cluster(tmp_path: Path, source: Path) -> None:
    with pytest.raises(AiterPrepError) as caught:
        execute_on_ray(plan(source), tmp_path / "out", address="127.0.0.1:1")
    assert "there is no Ray cluster" in caught.value.message
    assert "ray start --head" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_a_node_with_another_version_writes_nothing(tmp_path: Path) -> None:
    made = plan_of(tiny.write(tmp_path / "source"), 2)
    conversion = shared_conversion(made, tmp_path / "out")
    facts = {**conversion.request["facts"], "code": "xxh3-128:" + "0" * 32}
    other = replace(conversion, request={**conversion.request, "facts": facts})
    with pytest.raises(DataMismatch) as caught:
        write_task(other, bundles_of(made), Settings())
    assert "has another version of aiter-prep" in caught.value.message
    assert not (tmp_path / "out").exists()
    write_task(conversion, bundles_of(made), Settings())
    assert notes(tmp_path / "out") == len(made.shards)


def test_a_piece_of_a_plan_writes_its_shards_and_no_more(source: Path, tmp_path: Path) -> None:
    """A task is sent no more than that, so it can be read by a process that knows nothing."""
    made = plan(source)
    groups = shared_out(bundles_of(made), 3)
    conversion = shared_conversion(made, tmp_path / "out")
    for piece, group in zip(divided(made, groups), groups, strict=True):
        sent = pickle.loads(pickle.dumps(replace(conversion, plan=piece)))  # noqa: S301 - ours
        assert len(pickle.dumps(sent)) < len(pickle.dumps(conversion))
        share = write_task(sent, group, Settings(layouts=layouts_of(made)))
        assert set(share.digests) == {file for bundle in group for file in bundle.files}
    seal(tmp_path / "out")
    execute(made, tmp_path / "one")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_ray_is_named_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    made = plan_of(tiny.write(tmp_path / "source"), 2)
    with pytest.raises(AiterPrepError) as caught:
        execute_on_ray(made, tmp_path / "out")
    assert "pip install 'aiter-prep[ray]'" in caught.value.hint


def test_ray_is_loaded_only_when_it_is_asked_for(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    argv = ["convert", str(source), str(tmp_path / "out"), "--tp", "1", "--part", "1/1"]
    code = f"import sys; from aiter_prep.cli import main; main({argv}); print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--engine", "abacus"), "--engine abacus is not known"),
        (("--engine", "ray", "--part", "1/2"), "--engine ray and --part exclude each other"),
    ],
)
def test_what_contradicts_the_engine_is_refused(
    flags: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny.write(tmp_path / "source")
    assert main(["convert", str(source), str(tmp_path / "out"), "--tp", "1", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_prepared_folder_is_refused_before_ray_is_asked(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    prepare(source, tmp_path / "out")
    with pytest.raises(OutputNotEmpty):
        execute_on_ray(plan_of(source), tmp_path / "out")
    with pytest.raises(InvalidUsage):
        execute_on_ray(plan_of(source), tmp_path / "out", settings=Settings(workers=0))
