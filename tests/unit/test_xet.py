"""Over the Hub's Xet protocol, spoken by the real client, all is as it is over HTTP and LFS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from hub_server import REPO, Client, HubServer
from prepared import MANIFEST, prepare
from xet_store import XetStore

hf_xet = pytest.importorskip("hf_xet", reason="needs hf_xet")
if not hasattr(hf_xet, "XetSession"):
    pytest.skip("needs an hf_xet that has sessions", allow_module_level=True)

TARGET = "some-org/prepared-model"
BRANCH = "aiter-tp2-gfx950"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "some-model"
    return tiny.write(folder, layers=3, spread="layers")


@pytest.fixture(scope="module")
def wanted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wanted") / "out"
    prepare(source, out, 2)
    return out


@pytest.fixture(scope="module")
def client(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    running = Client(hub, tmp_path_factory.mktemp("home"), xet=True)
    yield running
    running.close()


@pytest.fixture
def server(hub: HubServer, source: Path, tmp_path: Path) -> HubServer:
    hub.reset()
    hub.files = {path.name: path.read_bytes() for path in source.iterdir()}
    hub.xet = XetStore(tmp_path / "xet")
    return hub


@pytest.fixture
def stored(server: HubServer, source: Path) -> HubServer:
    assert server.xet is not None
    server.xet.put(*sorted(source.glob("*.safetensors")))
    return server


def shards_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def sent_whole(server: HubServer) -> list[str]:
    return [name for name in server.downloaded if name.endswith(".safetensors")]


@pytest.mark.parametrize("how", [["--stream"], []])
def test_a_source_comes_in_chunks(
    how: list[str], stored: HubServer, client: Client, wanted: Path, tmp_path: Path
) -> None:
    document = client.json(tmp_path, "convert", REPO, "out", "--tp", "2", *how)
    assert document["exit_code"] == 0, document
    assert shards_of(tmp_path / "out") == shards_of(wanted)
    assert sent_whole(stored) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "xet"]


def test_other_chunks_than_were_promised_are_refused(
    stored: HubServer, client: Client, source: Path, wanted: Path, tmp_path: Path
) -> None:
    shard = max(source.glob("*.safetensors"))
    lie = tmp_path / "xet" / "lie"
    lie.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert stored.xet is not None
    stored.xet.put(lie)
    stored.lies[shard.name] = lie.read_bytes()
    arguments = ("convert", REPO, "out", "--tp", "2", "--stream")
    document = client.json(tmp_path, *arguments)
    assert document["exit_code"] == 10, document
    assert f"`{shard.name}` came with other bytes" in document["error"]
    stored.lies.clear()
    assert client.json(tmp_path, *arguments, "--resume")["exit_code"] == 0
    assert shards_of(tmp_path / "out") == shards_of(wanted)


def test_a_folder_is_pushed_in_chunks(
    server: HubServer, client: Client, wanted: Path, tmp_path: Path
) -> None:
    assert server.xet is not None
    server.xet.expect(*sorted(wanted.glob("*.safetensors")))
    document = client.json(tmp_path, "push", str(wanted), TARGET)
    assert document["exit_code"] == 0, document
    held = dict(server.repositories[TARGET].files(BRANCH))
    del held[".gitattributes"]
    assert held == {path.name: path.read_bytes() for path in wanted.iterdir()}
    assert server.uploads == []  # none by LFS
    again = client.json(tmp_path, "push", str(wanted), TARGET)
    assert again["uploaded_files"] == 0
    oid: str | None = server.repositories[TARGET].branches[BRANCH]
    states = []
    while oid is not None:
        commit = server.repositories[TARGET].commits[oid]
        states.append(MANIFEST in commit.files)
        oid = commit.parent
    assert states == [True, *[False] * (len(states) - 1)]  # the manifest came last


def test_a_store_that_is_out_of_reach_is_said_so(
    server: HubServer, client: Client, wanted: Path, tmp_path: Path
) -> None:
    server.xet = None
    document = client.json(tmp_path, "push", str(wanted), TARGET)
    assert document["exit_code"] == 1
    assert f"cannot write to `{TARGET}`" in document["error"]
