"""A source on the Hub is converted while its shards come, and never lies on the disk whole."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import tiny
from aiter_prep.errors import BadSource, InvalidUsage
from aiter_prep.manifest import read_manifest
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.storage.supply import Promise, ShardSupply
from hub_server import REPO, Client, HubServer, sha256_of
from prepared import prepare

SCRATCH = ".out.aiter_prep.source.partial"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a shard for each layer, which two jobs read: experts, and the rest."""
    folder = tmp_path_factory.mktemp("source") / "some-model"
    return tiny.write(folder, layers=5, spread="layers")


@pytest.fixture(scope="module")
def wanted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, converted from the disk."""
    out = tmp_path_factory.mktemp("wanted") / "out"
    prepare(source, out, 2)
    return out


pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture
def server(hub: HubServer, source: Path) -> HubServer:
    hub.reset()
    hub.files = {path.name: path.read_bytes() for path in source.iterdir()}
    return hub


def shards_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def stream(client: Client, folder: Path, *more: str) -> dict[str, Any]:
    arguments = ("convert", REPO, "out", "--tp", "2", "--stream", *more)
    return client.json(folder, *arguments)


def test_the_bytes_are_those_of_a_conversion_from_the_disk(
    server: HubServer, client: Client, wanted: Path, tmp_path: Path
) -> None:
    document = stream(client, tmp_path)
    assert document["source"] == {"name": REPO, "revision": server.commit}
    assert shards_of(tmp_path / "out") == shards_of(wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    verified = client.json(tmp_path, "verify", "out", "--source", REPO)
    assert verified["is_clean"]


@pytest.mark.parametrize("shards", [3, 100])
def test_several_sizes_fetch_each_shard_once(
    server: HubServer,
    client: Client,
    source: Path,
    wanted: Path,
    tmp_path: Path,
    shards: int,
) -> None:
    limit = str(shards * max(map(len, shards_of(source).values())))
    prepare(source, tmp_path / "one", 1)
    document = stream(client, tmp_path, "--tp", "1", "--stream-disk", limit)
    assert [folder["tp"] for folder in document["folders"]] == [2, 1]
    assert shards_of(tmp_path / "out" / "tp2") == shards_of(wanted)
    assert shards_of(tmp_path / "out" / "tp1") == shards_of(tmp_path / "one")
    whole = [name for name in server.downloaded if name.endswith(".safetensors")]
    assert sorted(whole) == sorted(shards_of(source))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out"]
    for tp in ("1", "2"):
        folder = f"out/tp{tp}"
        assert client.json(tmp_path, "verify", folder, "--source", str(source))["is_clean"]


def test_several_sizes_that_are_there_already_leave_nothing_else(
    server: HubServer, client: Client, tmp_path: Path
) -> None:
    assert stream(client, tmp_path, "--tp", "1")["folders"]
    server.fetched.clear()
    again = stream(client, tmp_path, "--tp", "1", "--if-needed")
    assert [folder["was_needed"] for folder in again["folders"]] == [False, False]
    assert server.downloaded.count("model-00001-of-00005.safetensors") <= 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out" / "tp1" / "aiter_prep.json").unlink()
    shutil.rmtree(tmp_path / "out" / "tp1")
    again = stream(client, tmp_path, "--tp", "1", "--if-needed")
    assert [folder["was_needed"] for folder in again["folders"]] == [False, True]


def test_parts_fetch_what_they_need_and_are_sealed(
    server: HubServer, client: Client, source: Path, tmp_path: Path
) -> None:
    flags = ("--max-shard-size", "110KB")  # a layer
    wanted = tmp_path / "wanted"
    prepare(source, wanted, 2, max_shard_bytes=110_000)
    fetched: list[int] = []
    for number in (2, 1, 3):
        server.downloaded.clear()
        done = stream(client, tmp_path, *flags, "--part", f"{number}/3")
        assert done["schema"] == "aiter-prep/part/1", done
        whole = [name for name in server.downloaded if name.endswith(".safetensors")]
        assert sorted(whole) == sorted(set(whole))
        fetched.append(len(whole))
    assert sorted(fetched) == [2, 2, 6]  # two layers, two layers, one layer and all that is common
    assert shards_of(tmp_path / "out") == {}
    server.downloaded.clear()
    assert client.json(tmp_path, "seal", "out")["schema"] == "aiter-prep/seal/1"
    assert not [name for name in server.downloaded if name.endswith(".safetensors")]
    assert shards_of(tmp_path / "out") == shards_of(wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "wanted"]
    single = stream(client, tmp_path, *flags, "--if-needed")  # as one run would have left it
    assert not single["was_needed"]


def test_a_part_that_was_cut_off_goes_on(
    server: HubServer, client: Client, source: Path, tmp_path: Path
) -> None:
    flags = ("--max-shard-size", "10KB", "--part", "1/1")
    name = sorted(name for name in server.files if name.endswith(".safetensors"))[-2]
    lie = bytearray(server.files[name])
    lie[-1] ^= 1
    server.lies[name] = bytes(lie)
    failed = stream(client, tmp_path, *flags)
    assert failed["exit_code"] == 10
    assert not list((tmp_path / "out").rglob("source"))
    server.lies.clear()
    done = stream(client, tmp_path, *flags)
    assert 0 < done["written_bytes"] < done["total_bytes"]
    assert client.json(tmp_path, "seal", "out")["schema"] == "aiter-prep/seal/1"
    prepare(source, tmp_path / "wanted", 2, max_shard_bytes=10_000)
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "wanted")


def test_the_digests_of_the_hub_are_in_the_manifest(
    server: HubServer, client: Client, tmp_path: Path
) -> None:
    assert stream(client, tmp_path)["exit_code"] == 0
    files = read_manifest(tmp_path / "out").source["files"]
    assert {file["name"]: file["sha256"] for file in files} == {
        name: sha256_of(data) for name, data in server.files.items() if name.endswith("tensors")
    }


def test_a_folder_from_the_disk_names_no_digest_that_nobody_promised(wanted: Path) -> None:
    assert all("sha256" not in file for file in read_manifest(wanted).source["files"])


def test_each_shard_is_fetched_once_and_with_room_for_few(
    server: HubServer, client: Client, wanted: Path, tmp_path: Path
) -> None:
    sizes = [len(data) for name, data in server.files.items() if name.endswith("tensors")]
    limit = str(3 * max(sizes))
    document = stream(client, tmp_path, "--stream-disk", limit, "--workers", "3")
    assert document["exit_code"] == 0, document
    assert shards_of(tmp_path / "out") == shards_of(wanted)
    whole = [name for name in server.downloaded if name.endswith(".safetensors")]
    assert sorted(whole) == sorted(set(whole))
    assert len(whole) == len(sizes)


def test_shards_that_all_layers_share_stay_until_the_last(
    server: HubServer, client: Client, tmp_path: Path
) -> None:
    scattered = tiny.write(tmp_path / "scattered", layers=3, spread="scattered")
    server.files = {path.name: path.read_bytes() for path in scattered.iterdir()}
    prepare(scattered, tmp_path / "wanted", 2)
    document = stream(client, tmp_path, "--workers", "2")
    assert document["exit_code"] == 0, document
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "wanted")


def test_a_plan_needs_the_headers_alone(server: HubServer, client: Client, tmp_path: Path) -> None:
    large = tiny.write(tmp_path / "large", layers=1, hidden=512, intermediate=512)
    server.files = {path.name: path.read_bytes() for path in large.iterdir()}
    shutil.rmtree(large)
    document = stream(client, tmp_path, "--dry-run")
    assert document["schema"] == "aiter-prep/plan/1"
    assert list(tmp_path.iterdir()) == []
    assert 0 < server.sent_bytes < len(server.files["model.safetensors"]) / 5


def test_other_bytes_than_were_promised_are_refused(
    server: HubServer, client: Client, wanted: Path, tmp_path: Path
) -> None:
    name = max(name for name in server.files if name.endswith(".safetensors"))
    lie = bytearray(server.files[name])
    lie[-1] ^= 1
    server.lies[name] = bytes(lie)
    document = stream(client, tmp_path)
    assert document["exit_code"] == 10
    assert f"`{name}`" in document["error"]
    assert sha256_of(server.files[name]) in document["error"]
    assert not (tmp_path / "out" / "aiter_prep.json").exists()
    server.lies.clear()
    assert stream(client, tmp_path, "--resume")["exit_code"] == 0
    assert shards_of(tmp_path / "out") == shards_of(wanted)


def test_a_small_file_with_other_bytes_is_refused(
    server: HubServer, client: Client, tmp_path: Path
) -> None:
    server.lies["config.json"] = server.files["config.json"].replace(b"{", b"{ ", 1)
    document = stream(client, tmp_path)
    assert document["exit_code"] == 10
    assert "`config.json`" in document["error"]


def test_connections_that_are_cut_are_taken_up_again(
    server: HubServer, client: Client, wanted: Path, tmp_path: Path
) -> None:
    names = sorted(name for name in server.files if name.endswith(".safetensors"))
    server.cuts = {names[0]: 2, names[-1]: 2}
    document = stream(client, tmp_path, "--workers", "1")
    assert document["exit_code"] == 0, document
    assert server.cuts == {names[0]: 0, names[-1]: 0}
    assert shards_of(tmp_path / "out") == shards_of(wanted)


def test_what_is_finished_is_not_fetched_again(
    server: HubServer, client: Client, tmp_path: Path
) -> None:
    apart = tiny.write(tmp_path / "apart", layers=2, spread="apart")
    server.files = {path.name: path.read_bytes() for path in apart.iterdir()}
    common, experts = sorted(name for name in server.files if name.endswith(".safetensors"))
    server.lies[experts] = server.files[experts][:-1] + b"?"
    assert stream(client, tmp_path, "--workers", "1")["exit_code"] == 10
    assert [path.name for path in (tmp_path / "out").glob("model-*")] == [
        "model-common-part-0.safetensors"
    ]
    assert (tmp_path / SCRATCH / server.commit).is_dir()
    server.lies.clear()
    server.downloaded.clear()
    assert stream(client, tmp_path, "--resume")["exit_code"] == 0
    assert experts in server.downloaded
    assert common not in server.downloaded
    assert not (tmp_path / SCRATCH).exists()
    assert client.json(tmp_path, "verify", "out", "--source", str(apart))["is_clean"]


@pytest.mark.parametrize("commit", ["../../elsewhere", "main", ""])
def test_a_hub_that_names_no_commit_is_refused(
    server: HubServer, client: Client, tmp_path: Path, commit: str
) -> None:
    server.commit = commit
    document = stream(client, tmp_path)
    assert document["exit_code"] == 10
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_said_before_anything_is_written(client: Client, tmp_path: Path) -> None:
    document = stream(client, tmp_path, "--stream-disk", "1000")
    assert document["exit_code"] == 2
    assert "--stream-disk 1000 is too small" in document["error"]


def test_a_folder_on_the_disk_is_not_streamed(client: Client, source: Path, tmp_path: Path) -> None:
    document = client.json(tmp_path, "convert", str(source), "out", "--tp", "2", "--stream")
    assert document["exit_code"] == 2
    assert "--stream" in document["error"]


def test_a_prepared_repository_is_refused(
    server: HubServer, client: Client, wanted: Path, tmp_path: Path
) -> None:
    server.files = {path.name: path.read_bytes() for path in wanted.iterdir()}
    document = stream(client, tmp_path)
    assert document["exit_code"] == 11
    assert "prepared already" in document["error"]
    assert not (tmp_path / "out").exists()


# --- the supply ---------------------------------------------------------------------------------


class Store:
    """Shards of some sizes, and what was done with them."""

    def __init__(self, folder: Path, **sizes: int) -> None:
        self.folder = folder
        self.data = {name: name[:1].encode() * size for name, size in sizes.items()}
        self.fetched: list[str] = []

    def promises(self) -> dict[str, Promise]:
        return {n: Promise(len(d), "sha256", sha256_of(d)) for n, d in self.data.items()}

    def fetch(self, name: str) -> None:
        self.fetched.append(name)
        (self.folder / name).write_bytes(self.data[name])

    def supply(self, limit: int | None) -> ShardSupply:
        return ShardSupply(self.folder, self.promises(), self.fetch, limit)


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # deleted just now
            total += path.stat().st_size
    return total


def run_jobs(supply: ShardSupply, jobs: list[set[str]], workers: int) -> int:
    """Run jobs in threads; return the most bytes that lay in the folder at a time."""
    supply.begin([frozenset(job) for job in jobs], lambda _: None)
    most = 0
    lock = threading.Lock()
    numbers = iter(range(len(jobs)))

    def work() -> None:
        nonlocal most
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            with supply.holding(number, lambda: None):
                with lock:
                    most = max(most, supply.most_bytes, size_of(supply.folder))
                assert all((supply.folder / name).is_file() for name in jobs[number])

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return most


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_jobs_in_any_pattern_end_within_the_limit(tmp_path: Path, workers: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    names = [f"{letter}.safetensors" for letter in "abcdefgh"]
    store = Store(tmp_path, **{name: int(random.integers(1, 50)) for name in names})
    jobs = [set(random.choice(names, 3, replace=False).tolist()) for _ in range(20)]
    most = run_jobs(store.supply(160), jobs, workers)
    assert most <= 160
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_is_needed_in_a_row_is_fetched_once(tmp_path: Path) -> None:
    store = Store(tmp_path, a=10, b=10, c=10)
    most = run_jobs(store.supply(20), [{"a"}, {"a", "b"}, {"b"}, {"b", "c"}], 2)
    assert sorted(store.fetched) == ["a", "b", "c"]
    assert most <= 20


def test_a_shard_that_comes_with_other_bytes_is_not_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, a=10)
    supply = store.supply(None)
    store.data["a"] = b"x" * 10
    supply.begin([frozenset({"a"})], lambda _: None)
    with pytest.raises(BadSource, match="other bytes"), supply.holding(0, lambda: None):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("promise", "error"),
    [
        (Promise(3), "came with 4 bytes"),
        (Promise(4, "git", "0" * 40), "git"),
        (Promise(4, "sha256", "0" * 64), "sha256"),
    ],
)
def test_a_promise_is_of_size_and_digest(tmp_path: Path, promise: Promise, error: str) -> None:
    (tmp_path / "a").write_bytes(b"data")
    with pytest.raises(BadSource, match=error):
        promise.check(tmp_path / "a")
    Promise(4, "git", "6320cd248dd8aeaab759d5871f8781b5c0505172").check(tmp_path / "a")


def test_a_job_that_needs_more_than_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="too small"):
        Store(tmp_path, a=10, b=10).supply(15).begin([frozenset({"a", "b"})], lambda _: None)


def test_opening_by_headers_finds_the_same_tensors(source: Path, tmp_path: Path) -> None:
    from aiter_prep.storage.remote import open_remote

    class Local:
        name = "some/model"
        revision: str | None = None
        state = "state"
        files: Mapping[str, Promise] = MappingProxyType(
            {path.name: Promise(path.stat().st_size) for path in source.iterdir()}
        )

        def fetch(self, file: str, folder: Path) -> None:
            shutil.copy(source / file, folder / file)

        def read(self, file: str, start: int, size: int) -> bytes:
            return (source / file).read_bytes()[start : start + size]

    opened, plain = open_remote(Local(), tmp_path / "scratch"), open_checkpoint(source)
    assert opened.tensors == plain.tensors
    assert json.dumps(opened.config) == json.dumps(plain.config)
    assert not list((tmp_path / "scratch").rglob("*.safetensors"))
