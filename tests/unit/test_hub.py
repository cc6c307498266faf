"""A source may be a folder or a repository of the Hub; the Hub here is a server of our own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiter_prep.errors import BadSource, InvalidUsage
from aiter_prep.storage import hub
from aiter_prep.storage.checkpoint import INDEX_FILE
from hub_server import COMMIT, REPO, HubServer, run_with, serving
from support import fixture


@pytest.fixture
def fake_hub() -> Iterator[HubServer]:
    with serving() as server:
        yield server


def convert(hub_url: str, home: Path, *more: str, repo: str = REPO) -> dict[str, Any]:
    """Convert a repository; return the JSON object that comes out, and the exit code in it."""
    done = run_with(hub_url, home, "convert", repo, "--tp", "1", "--json", "-q", *more)
    assert "Traceback" not in done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    document.setdefault("exit_code", done.returncode)
    assert document["exit_code"] == done.returncode
    return document


def model_files() -> dict[str, bytes]:
    folder = fixture("qwen3_moe-ct-mxfp4")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_repository_is_converted_under_its_commit(fake_hub: HubServer, tmp_path: Path) -> None:
    fake_hub.files = model_files()
    document = convert(fake_hub.url, tmp_path)
    assert document["schema"] == "aiter-prep/convert/1"
    assert document["source"] == {"name": REPO, "revision": COMMIT}
    assert document["folder"] == "some-model-aiter-tp1-gfx950"
    done = run_with(
        fake_hub.url, tmp_path, "verify", document["folder"], "--source", REPO, "--json"
    )
    assert json.loads(done.stdout)["is_clean"]


def test_only_the_files_that_are_needed_are_fetched(fake_hub: HubServer, tmp_path: Path) -> None:
    unwanted = ("pytorch_model.bin", "model.gguf", "original/consolidated.pth", "a.pt", "b.onnx")
    wanted = ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "code.py", "README.md")
    fake_hub.files = model_files() | dict.fromkeys((*unwanted, *wanted), b"{}")
    fake_hub.files["other.safetensors"] = b"not named by the index"
    assert convert(fake_hub.url, tmp_path)["exit_code"] == 0
    fetched = set(fake_hub.fetched)
    assert fetched.isdisjoint((*unwanted, "other.safetensors"))
    assert fetched.issuperset((*wanted, "config.json", "model.safetensors"))


def test_what_is_in_the_cache_serves_without_a_network(fake_hub: HubServer, tmp_path: Path) -> None:
    fake_hub.files = model_files()
    assert convert(fake_hub.url, tmp_path, "first")["exit_code"] == 0
    document = convert("http://127.0.0.1:9", tmp_path, "second")
    assert document["exit_code"] == 0
    assert document["source"]["revision"] == COMMIT


def test_without_a_network_and_a_cache_the_error_says_so(tmp_path: Path) -> None:
    document = convert("http://127.0.0.1:9", tmp_path)
    assert document["exit_code"] == 10
    assert "cannot be reached" in document["error"]
    assert "HF_HUB_OFFLINE" in document["hint"]


@pytest.mark.parametrize(
    ("refusal", "error", "hint"),
    [
        ((404, "RepoNotFound"), "neither a folder here nor a repository", "spelling"),
        ((401, "RepoNotFound"), "neither a folder here nor a repository", "hf auth login"),
        ((403, "GatedRepo"), "restricted", "terms"),
        ((404, "RevisionNotFound"), "has no revision", "--revision"),
    ],
)
def test_what_the_hub_refuses_is_explained(
    fake_hub: HubServer, tmp_path: Path, refusal: tuple[int, str], error: str, hint: str
) -> None:
    fake_hub.refusal = refusal
    document = convert(fake_hub.url, tmp_path)
    assert document["exit_code"] == 10
    assert error in document["error"]
    assert hint in document["hint"]


def test_a_revision_that_does_not_exist_is_named(fake_hub: HubServer, tmp_path: Path) -> None:
    fake_hub.files = model_files()
    document = convert(fake_hub.url, tmp_path, "--revision", "v9")
    assert document["exit_code"] == 10
    assert "`v9`" in document["error"]


@pytest.mark.parametrize(
    ("weight_map", "error"),
    [
        ({"a": "../../escape.safetensors"}, "not the plain name"),
        ({"a": "*.safetensors"}, "not the plain name"),
        ({"a": "weights.bin"}, "not the plain name"),
        ({"a": ["model.safetensors"]}, "not the plain name"),
        ({"a": "model-00001-of-00002.safetensors"}, "which its index names"),
        ({}, "has no `weight_map`"),
    ],
)
def test_an_index_may_name_nothing_but_its_own_shards(
    tmp_path: Path, weight_map: dict[str, Any], error: str
) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BadSource, match=error.replace("*", r"\*")):
        hub._shards_of_index(index, REPO, ["config.json", "model.safetensors"])


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["config.json", "pytorch_model.bin"], "no safetensors file"),
        (["config.json", "a.safetensors", "b.safetensors"], "2 safetensors files, but no index"),
    ],
)
def test_a_repository_without_an_index_needs_one_shard(names: list[str], error: str) -> None:
    with pytest.raises(BadSource, match=error):
        hub._single_file(REPO, names)


def test_a_repository_with_two_indexes_is_refused_unless_one_has_the_usual_name() -> None:
    names = ["a.safetensors.index.json", "b.safetensors.index.json"]
    with pytest.raises(BadSource, match="more than one index"):
        hub._index_of(REPO, names)
    assert hub._index_of(REPO, [*names, INDEX_FILE]) == INDEX_FILE


@pytest.mark.parametrize(
    ("source", "is_id"),
    [
        ("org/name", True),
        ("Qwen/Qwen3-30B-A3B", True),
        ("name", False),
        ("./org/name", False),
        ("../name", False),
        ("~/name", False),
        ("/org/name", False),
        ("a/b/c", False),
        ("org/", False),
        ("-org/name", False),
        ("org/na me", False),
        ("org/näme", False),
    ],
)
def test_a_hub_id_has_one_slash_and_plain_parts(source: str, is_id: bool) -> None:
    assert hub.is_hub_id(source) is is_id


def test_a_folder_that_exists_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not hub.is_hub_id("org/name")


@pytest.mark.parametrize(
    ("source", "name"),
    [("org/name", "name"), ("a/b/model/", "model"), ("/", "root"), ("~no-such-user-here/m", "m")],
)
def test_a_source_has_a_name_before_it_is_looked_at(source: str, name: str) -> None:
    assert hub.name_of(source) == name


def test_a_local_folder_has_no_revision() -> None:
    with pytest.raises(InvalidUsage, match="--revision means nothing"):
        hub.open_source(str(fixture("gpt_oss-mxfp4")), "main")


def test_the_home_of_nobody_is_a_bad_source() -> None:
    with pytest.raises(BadSource, match="cannot read"):
        hub.open_source("~no-such-user-here/model")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_a_bad_source(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o000)
    with pytest.raises(BadSource, match="cannot read"):
        hub.open_source(str(locked / "model"))


def test_a_repository_without_a_config_is_refused(fake_hub: HubServer, tmp_path: Path) -> None:
    fake_hub.files = {"README.md": b"nothing else"}
    document = convert(fake_hub.url, tmp_path)
    assert document["exit_code"] == 10
    assert document["error"] == f"`{REPO}` has no `config.json`"


def test_a_hub_that_fails_half_way_leaves_what_it_gave(fake_hub: HubServer, tmp_path: Path) -> None:
    fake_hub.files = model_files()
    whole = fake_hub.files.pop("model.safetensors")
    document = convert(fake_hub.url, tmp_path)
    assert document["exit_code"] == 10
    assert "`model.safetensors`" in document["error"]
    fake_hub.files["model.safetensors"] = whole
    fake_hub.fetched.clear()
    assert convert(fake_hub.url, tmp_path)["exit_code"] == 0
