"""Sources and destinations in object stores: in memory, and on an S3 server of our own."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import tiny
from aiter_prep.cli import main
from aiter_prep.errors import AiterPrepError, BadSource, InvalidUsage
from aiter_prep.execution.bundles import bundles_of, divided, shared_out
from aiter_prep.execution.fingerprint import fingerprint_of
from aiter_prep.execution.ray_run import Settings, write_task
from aiter_prep.execution.sealing import seal_conversion
from aiter_prep.execution.sharing import shared_conversion
from aiter_prep.manifest import read_manifest
from aiter_prep.plan import make_plan
from aiter_prep.publication import push
from aiter_prep.storage import hub, object_store
from aiter_prep.storage.object_store import ObjectFolder, ObjectSource, is_store_url
from aiter_prep.storage.remote import scratch_folder
from aiter_prep.storage.sources import open_streamed
from aiter_prep.storage.supply import Promise
from prepared import MANIFEST, prepare

NOTES = ".aiter_prep.push"
pytestmark = pytest.mark.filterwarnings("default")  # those of the stores' own packages


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "some-model"
    return tiny.write(folder, layers=2, spread="layers")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    prepare(source, out, 2)
    return out


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 server on loopback with a bucket; returns the address of the bucket."""
    pytest.importorskip("s3fs", reason="needs s3fs")
    server_of = pytest.importorskip("moto.server", reason="needs moto[server]")
    import s3fs

    server = server_of.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "tests")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("NO_PROXY", "127.0.0.1")
        s3fs.S3FileSystem().mkdir("models")
        yield "s3://models"
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty folder in a store."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{uuid4().hex}"
    monkeypatch.setitem(object_store.STORES, "memory", "fsspec")
    return f"memory://{uuid4().hex}/folder"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty folder in a store in memory."""
    monkeypatch.setitem(object_store.STORES, "memory", "fsspec")
    return f"memory://{uuid4().hex}/folder"


def upload(folder: Path, url: str) -> None:
    store = ObjectFolder(url)
    for path in folder.iterdir():
        store.put(path.name, path)


def content(url: str) -> dict[str, bytes]:
    store = ObjectFolder(url)
    return {name: store.read(name, 0, promise.size) for name, promise in store.list().items()}


def files_of(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


# --- sources ------------------------------------------------------------------------------------


def test_a_source_in_a_store_is_converted_as_one_on_the_disk(
    url: str, source: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(source, url)
    out = tmp_path / "out"
    assert main(["convert", url, str(out), "--tp", "2", "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["source"] == {"name": url, "revision": None}
    assert files_of(out, "*.safetensors") == files_of(made, "*.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert main(["verify", str(out), "--source", str(source), "-q"]) == 0
    assert all("sha256" not in file for file in read_manifest(out).source["files"])


def test_a_folder_is_named_after_the_last_part_of_the_address() -> None:
    assert hub.name_of("s3://bucket/models/some-model/") == "some-model"


def test_a_store_without_such_a_folder_is_a_bad_source(url: str) -> None:
    with pytest.raises(BadSource, match="holds no object"):
        ObjectSource(f"{url}/nothing")


def test_only_what_lies_right_below_the_address_counts(memory: str, source: Path) -> None:
    upload(source, f"{memory}/deeper")
    ObjectFolder(memory).put_bytes("a.txt", b"a")
    assert set(ObjectFolder(memory).list()) == {"a.txt"}


def test_an_object_that_changes_is_refused(url: str, tmp_path: Path) -> None:
    store = ObjectFolder(url)
    store.put_bytes("a.bin", b"before")
    opened = ObjectSource(url)
    store.put_bytes("a.bin", b"behind")
    with pytest.raises(BadSource, match="changed while it was read"):
        opened.fetch("a.bin", tmp_path)


def test_what_was_fetched_of_another_state_is_not_used(
    memory: str, source: Path, made: Path, tmp_path: Path
) -> None:
    upload(source, memory)
    scratch = scratch_folder(tmp_path / "out")
    before = open_streamed(memory, None, scratch)
    for path in source.glob("*.safetensors"):
        (before.folder / path.name).write_bytes(b"?" * path.stat().st_size)
    upload(source, memory)
    assert main(["convert", memory, str(tmp_path / "out"), "--tp", "2", "-q"]) == 0
    assert files_of(tmp_path / "out", "*.safetensors") == files_of(made, "*.safetensors")
    assert not scratch.exists()


def test_other_bytes_under_the_same_header_are_another_source(
    memory: str, source: Path, tmp_path: Path
) -> None:
    upload(source, memory)
    shard = max(source.glob("*.safetensors"))
    prints = set()
    for last in (shard.read_bytes()[-1:], b"?"):
        ObjectFolder(memory).put_bytes(shard.name, shard.read_bytes()[:-1] + last)
        opened = open_streamed(memory, None, tmp_path / "scratch")
        prints.add(fingerprint_of(make_plan(opened, tp=2)))
    assert len(prints) == 2


class Flaky:
    """A store in memory whose reads fail now and then."""

    def __init__(self, store: Any, faults: int) -> None:
        self._store = store
        self.faults = faults
        self.read_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        if start and self.faults:
            self.faults -= 1
            raise OSError("the connection was cut")
        data: bytes = self._store.cat_file(path, start=start, end=end)
        self.read_bytes += len(data)
        return data


@pytest.fixture
def flaky(memory: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], ObjectFolder]:
    monkeypatch.setattr(object_store, "BLOCK_BYTES", 10)
    monkeypatch.setattr(object_store, "PAUSES", (0, 0))

    def make(faults: int) -> ObjectFolder:
        folder = ObjectFolder(memory)
        monkeypatch.setattr(folder, "_fs", Flaky(folder._fs, faults))
        return folder

    return make


def test_reads_that_fail_are_tried_again(
    flaky: Callable[[int], ObjectFolder], tmp_path: Path
) -> None:
    store = flaky(2)
    store.put_bytes("a", bytes(range(100)))
    store.fetch("a", tmp_path, store.list()["a"])
    assert (tmp_path / "a").read_bytes() == bytes(range(100))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_was_begun_is_gone_on_with(
    flaky: Callable[[int], ObjectFolder], tmp_path: Path
) -> None:
    store = flaky(3)
    store.put_bytes("a", bytes(range(100)))
    promise = store.list()["a"]
    with pytest.raises(BadSource, match="connection was cut"):
        store.fetch("a", tmp_path, promise)
    assert not (tmp_path / "a").exists()
    store.fetch("a", tmp_path, promise)
    assert (tmp_path / "a").read_bytes() == bytes(range(100))
    assert store._fs.read_bytes == 100


def test_what_was_begun_of_another_state_is_not_gone_on_with(
    flaky: Callable[[int], ObjectFolder], tmp_path: Path
) -> None:
    store = flaky(3)
    store.put_bytes("a", b"x" * 100)
    with pytest.raises(BadSource, match="connection was cut"):
        store.fetch("a", tmp_path, store.list()["a"])
    store.put_bytes("a", bytes(range(100)))
    store.fetch("a", tmp_path, store.list()["a"])
    assert (tmp_path / "a").read_bytes() == bytes(range(100))


def test_an_object_that_is_shorter_than_it_was_is_refused(memory: str, tmp_path: Path) -> None:
    store = ObjectFolder(memory)
    store.put_bytes("a", b"x" * 10)
    version = store.list()["a"].version
    with pytest.raises(BadSource, match="ended at byte 10"):
        store.fetch("a", tmp_path, Promise(20, version=version))


# --- shared by several processes ----------------------------------------------------------------


def test_a_source_in_a_store_is_shared_by_parts(
    url: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(source, url)
    call = ["convert", url, str(tmp_path / "out"), "--tp", "2", "--max-shard-size", "10KB", "-q"]
    for part in ("1/2", "2/2"):
        assert main([*call, "--part", part]) == 0
    assert main(["seal", str(tmp_path / "out"), "-q"]) == 0
    prepare(source, tmp_path / "one", 2, max_shard_bytes=10_000)
    assert files_of(tmp_path / "out", "*.safetensors") == files_of(
        tmp_path / "one", "*.safetensors"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out"]
    capsys.readouterr()


def test_parts_of_a_source_that_changed_in_its_store_are_not_sealed(
    memory: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(source, memory)
    call = ["convert", memory, str(tmp_path / "out"), "--tp", "2", "-q"]
    assert main([*call, "--part", "1/1"]) == 0
    name = max(files_of(source, "*.safetensors"))
    data = files_of(source)[name]
    ObjectFolder(memory).put_bytes(name, data[:-1] + b"?")
    assert main(["seal", str(tmp_path / "out")]) == 3
    assert "source differ" in capsys.readouterr().err


def test_a_task_that_is_sent_elsewhere_fetches_for_itself(
    url: str, source: Path, tmp_path: Path
) -> None:
    upload(source, url)
    checkpoint = open_streamed(url, None, tmp_path / "scratch")
    plan = make_plan(checkpoint, tp=2, max_shard_bytes=10_000)
    conversion = shared_conversion(plan, tmp_path / "out")
    groups = shared_out(bundles_of(plan), 3)
    for piece, group in zip(divided(plan, groups), groups, strict=True):
        sent = pickle.loads(pickle.dumps(replace(conversion, plan=piece)))  # noqa: S301 - ours
        assert write_task(sent, group, Settings()).digests
    assert not list((tmp_path / "out").rglob("source"))
    seal_conversion(conversion)
    prepare(source, tmp_path / "one", 2, max_shard_bytes=10_000)
    assert files_of(tmp_path / "out", "*.safetensors") == files_of(
        tmp_path / "one", "*.safetensors"
    )


# --- destinations -------------------------------------------------------------------------------


def test_a_push_writes_the_folder_and_the_manifest_last(
    url: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    plain = ObjectFolder.put

    def noted(self: ObjectFolder, file: str, local: Path) -> Promise:
        order.append(file)
        return plain(self, file, local)

    monkeypatch.setattr(ObjectFolder, "put", noted)
    done = push(made, url)
    assert content(url) == files_of(made)
    assert order[-1] == MANIFEST
    assert sorted(order) == sorted(files_of(made))
    assert (done.files, done.uploaded_files) == (len(order), len(order))
    assert (done.branch, done.commit, done.card) == (None, None, None)


def test_a_second_push_sends_nothing(url: str, made: Path) -> None:
    push(made, url)
    assert push(made, url).uploaded_files == 0
    assert content(url) == files_of(made)


def test_a_push_that_was_cut_off_goes_on(
    url: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ObjectFolder.put

    def cut(self: ObjectFolder, file: str, local: Path) -> Promise:
        if file.startswith("model-rank-1"):
            raise AiterPrepError("the connection was cut")
        return plain(self, file, local)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectFolder, "put", cut)
        with pytest.raises(AiterPrepError, match="cut"):
            push(made, url)
    there = content(url)
    assert MANIFEST not in there
    assert NOTES in there
    done = push(made, url)
    assert 0 < done.uploaded_files < done.files
    assert content(url) == files_of(made)


def test_an_object_that_was_changed_since_is_sent_again(
    url: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ObjectFolder.put

    def cut(self: ObjectFolder, file: str, local: Path) -> Promise:
        if file == MANIFEST:
            raise AiterPrepError("the connection was cut")
        return plain(self, file, local)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectFolder, "put", cut)
        with pytest.raises(AiterPrepError, match="cut"):
            push(made, url)
    name = min(files_of(made, "*.safetensors"))
    ObjectFolder(url).put_bytes(name, b"?" * len(files_of(made)[name]))
    assert push(made, url).uploaded_files == 2  # that one and the manifest
    assert content(url) == files_of(made)


def test_another_conversion_is_replaced_only_if_asked(
    url: str, made: Path, source: Path, tmp_path: Path
) -> None:
    push(made, url)
    prepare(source, tmp_path / "other", 1)
    with pytest.raises(AiterPrepError, match="another conversion") as caught:
        push(tmp_path / "other", url)
    assert caught.value.exit_code == 12
    assert content(url) == files_of(made)
    push(tmp_path / "other", url, overwrite=True)
    assert content(url) == files_of(tmp_path / "other")


def test_what_is_not_of_a_folder_is_not_taken_away(memory: str, made: Path) -> None:
    ObjectFolder(memory).put_bytes("notes.txt", b"of somebody")
    with pytest.raises(AiterPrepError, match=r"`notes\.txt`"):
        push(made, memory)
    assert set(content(memory)) == {"notes.txt"}


def test_what_is_not_sound_is_not_pushed(memory: str, made: Path, tmp_path: Path) -> None:
    for name, data in files_of(made).items():
        (tmp_path / name).write_bytes(data[:-1] + b"?" if name.startswith("model-rank") else data)
    with pytest.raises(AiterPrepError) as caught:
        push(tmp_path, memory)
    assert caught.value.exit_code == 3
    assert content(memory) == {}


def test_a_conversion_goes_from_store_to_store(
    url: str, source: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(source, f"{url}/in")
    out = tmp_path / "out"
    arguments = ["convert", f"{url}/in", str(out), "--tp", "2", "--push", f"{url}/out"]
    assert main([*arguments, "--json", "-q"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["pushed"]["repo"] == f"{url}/out"
    assert content(f"{url}/out") == files_of(out)
    assert files_of(out, "*.safetensors") == files_of(made, "*.safetensors")


# --- addresses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["file:///etc", "http://host/x", "simplecache::s3://b/x", "s3://", "s3:///", "ftp://a/b"],
)
def test_addresses_of_other_kinds_are_refused(text: str) -> None:
    with pytest.raises(InvalidUsage):
        ObjectFolder(text)


@pytest.mark.parametrize(
    ("text", "is_url"),
    [("s3://b/x", True), ("org/name", False), ("/a://b", False), ("a/s3://b", False)],
)
def test_an_address_has_a_scheme(text: str, is_url: bool) -> None:
    assert is_store_url(text) is is_url


def test_a_store_whose_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(InvalidUsage, match="adlfs") as caught:
        ObjectFolder("az://container/folder")
    assert "aiter-prep[remote]" in caught.value.hint


def test_only_convert_reads_from_a_store() -> None:
    with pytest.raises(InvalidUsage, match="only `convert` reads"):
        hub.open_source("s3://bucket/model")


def test_a_revision_of_a_store_means_nothing(memory: str, tmp_path: Path) -> None:
    arguments = ["convert", memory, str(tmp_path / "out"), "--tp", "1", "--revision", "main"]
    assert main(arguments) == 2


def test_fsspec_is_not_loaded_unless_it_is_needed(source: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from aiter_prep.cli import main; "
        f"code = main(['convert', {str(source)!r}, 'out', '--tp', '2', '-q']); "
        "sys.exit(code or 'fsspec' in sys.modules or 'huggingface_hub' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False)
    assert done.returncode == 0
