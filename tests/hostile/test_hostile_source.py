"""A source is read with suspicion: nothing outside it is let in, nothing is waited for."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from aiter_prep.errors import AiterPrepError, BadSource, NoRule
from aiter_prep.execution import execute
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.storage.header import MAX_HEADER_BYTES, read_header
from aiter_prep.storage.jsontext import BYTES_PER_BRACKET, MAX_DEPTH, SMALL_BYTES, parse
from prepared import prepare

ESCAPE = "\x1b]0;owned\x07"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of one shard, with a tokenizer."""
    folder = tiny.write(tmp_path / "source", kind="mxfp4_quark", hidden=64, intermediate=64)
    (folder / "tokenizer.json").write_text("{}", "utf-8")
    return folder


def refusal(act: Callable[[], object], kind: type[AiterPrepError] = BadSource) -> str:
    with pytest.raises(kind) as caught:
        act()
    assert type(caught.value) is kind
    assert (caught.value.message + caught.value.hint).isprintable()
    assert len(caught.value.message) < 1000
    return caught.value.message


def with_tensor(folder: Path, name: str) -> Path:
    """Add a tensor of this name to the only shard."""
    path = folder / tiny.SINGLE
    tiny.write_shard(path, {**tiny.read_shard(path), name: tiny.Tensor("U8", (1,), b"0")})
    return folder


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "n" * 1025,
        "n" * 10_000_000,
        "model.\0.weight",
        "model.\n.weight",
        f"model.{ESCAPE}.weight",
        "model.\u202e.weight",
        "model.\ud800.weight",
    ],
    ids=["1025", "10 MB", "NUL", "newline", "escape", "right to left", "half a surrogate"],
)
def test_a_tensor_name_that_cannot_be_trusted_is_refused(name: str, source: Path) -> None:
    with_tensor(source, name)
    begin = time.process_time()
    assert "cannot be trusted" in refusal(lambda: open_checkpoint(source))
    assert time.process_time() - begin < 5


def test_a_name_of_1024_characters_is_read(source: Path) -> None:
    with_tensor(source, "ü" * 1024)
    assert "ü" * 1024 in open_checkpoint(source).tensors


@pytest.mark.parametrize("prefix", ["a{expert}b.", "{}.", "{0}."])
def test_a_brace_in_the_path_of_experts_is_refused(prefix: str, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "source", prefix=prefix)
    checkpoint = open_checkpoint(folder)
    common = [f"{prefix}*embed_tokens.weight", f"{prefix}*norm.weight", f"{prefix}*gate.weight"]
    message = refusal(lambda: make_plan(checkpoint, as_common=common), NoRule)
    assert "brace" in message


def test_experts_that_only_a_config_has_are_counted_and_not_listed(source: Path) -> None:
    path = source / "config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**config, "num_experts": 10**18}), "utf-8")
    checkpoint = open_checkpoint(source)
    assert "lacks expert" in refusal(lambda: make_plan(checkpoint))


@pytest.mark.parametrize(
    "file",
    ["../x", "/etc/x", "a/b", "a\\b", "a\0b", "\n", ESCAPE, "", ".hidden", "n" * 300, "\ud800"],
)
def test_an_index_entry_that_is_no_plain_name_is_refused(file: str, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "source", spread="layers", layers=2)
    path = folder / tiny.INDEX
    index = json.loads(path.read_text("utf-8"))
    index["weight_map"]["evil"] = f"{file}.safetensors"
    path.write_text(json.dumps(index), "utf-8")
    refusal(lambda: open_checkpoint(folder))


def test_a_file_whose_name_is_none_for_a_terminal_is_left_and_said_so(source: Path) -> None:
    (source / f"a{ESCAPE}\n.json").write_text("{}", "utf-8")
    plan = make_plan(open_checkpoint(source))
    assert plan.small_files == ("tokenizer.json",)
    assert any("its name is none for a file" in text for text in plan.warnings)
    assert all(text.isprintable() for text in plan.warnings)


# --- links --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", [tiny.SINGLE, "config.json", "tokenizer.json", "hf_quant_config.json"]
)
@pytest.mark.parametrize("is_relative", [True, False])
def test_a_link_that_leads_out_of_the_folder_is_refused(
    file: str, is_relative: bool, source: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    if (source / file).exists():
        (source / file).rename(secret)
    else:
        secret.write_text("{}", "utf-8")
    (source / file).symlink_to(Path("..", "secret") if is_relative else secret)
    message = refusal(lambda: make_plan(open_checkpoint(source)))
    assert f"`{file}` is a link that leads out of its folder" in message


def test_an_index_that_is_a_link_to_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "source", spread="layers", layers=2)
    (folder / tiny.INDEX).rename(tmp_path / "index")
    (folder / tiny.INDEX).symlink_to(tmp_path / "index")
    assert "leads out" in refusal(lambda: open_checkpoint(folder))


def test_a_link_to_a_neighbour_is_followed(source: Path) -> None:
    (source / "tokenizer.json").rename(source / "other.json")
    (source / "tokenizer.json").symlink_to("other.json")
    assert make_plan(open_checkpoint(source)).small_files == ("other.json", "tokenizer.json")


def test_the_cache_of_the_hub_is_made_of_links_and_read(source: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    revision = repository / "snapshots" / ("0" * 40)
    revision.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(repository / "blobs" / f"{number:064x}")
        (revision / path.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    prepare(revision, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()


@pytest.mark.parametrize("is_marked", [True, False])
def test_what_repositories_share_in_the_cache_of_the_hub_is_read(
    is_marked: bool, source: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "hub"
    revision = cache / "models--org--name" / "snapshots" / ("0" * 40)
    for folder in (revision, cache / "models--org--name" / "blobs", cache / "blobs" / "00"):
        folder.mkdir(parents=True)
    if is_marked:
        (cache / "blobs" / ".huggingface-shared-blobs").write_text("1\n", "utf-8")
    for path in sorted(source.iterdir()):
        path.rename(cache / "blobs" / "00" / path.name)
        blob = cache / "models--org--name" / "blobs" / path.name
        blob.symlink_to(Path("..", "..", "blobs", "00", path.name))
        (revision / path.name).symlink_to(Path("..", "..", "blobs", path.name))
    if is_marked:
        prepare(revision, tmp_path / "out")
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"
    else:
        assert "leads out" in refusal(lambda: open_checkpoint(revision))


def test_a_link_from_the_cache_of_the_hub_to_elsewhere_is_refused(
    source: Path, tmp_path: Path
) -> None:
    revision = tmp_path / "models--org--name" / "snapshots" / "main"
    revision.parent.mkdir(parents=True)
    source.rename(revision)
    (tmp_path / "secret").write_text("{}", "utf-8")
    (revision / "tokenizer.json").unlink()
    (revision / "tokenizer.json").symlink_to(tmp_path / "secret")
    assert "leads out" in refusal(lambda: make_plan(open_checkpoint(revision)))


def test_the_folder_itself_may_be_a_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    prepare(tmp_path / "link", tmp_path / "out")


# --- what is no regular file --------------------------------------------------------------------


def no_file(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
@pytest.mark.parametrize("file", [tiny.SINGLE, "config.json", tiny.INDEX])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(
    file: str, kind: str, source: Path
) -> None:
    make_or_skip(source / file, kind)
    refusal(lambda: make_plan(open_checkpoint(source)))


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
def test_a_small_file_that_is_none_is_left_out(kind: str, source: Path) -> None:
    make_or_skip(source / "tokenizer.json", kind)
    plan = make_plan(open_checkpoint(source))
    assert plan.small_files == ()
    assert len(plan.warnings) == 1


def test_a_small_file_that_becomes_a_pipe_is_not_waited_for(source: Path, tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(source))
    no_file(source / "tokenizer.json", "pipe")
    assert "not a regular file" in refusal(lambda: execute(plan, tmp_path / "out"))
    assert not (tmp_path / "out" / "aiter_prep.json").exists()


def make_or_skip(path: Path, kind: str) -> None:
    try:
        no_file(path, kind)
    except PermissionError:
        pytest.skip("only root may make a device")


# --- JSON ---------------------------------------------------------------------------------------

BOMBS = {
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deeper than we write": b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    "wide lists": b"[" + b"[]," * 600_000 + b"[]]",
    "wide objects": b"[" + b"{}," * 600_000 + b"{}]",
    "a long integer": b"[" + b"9" * 5000 + b"]",
    "an infinity": b"[1e999]",
    "a name for it": b"[-Infinity]",
    "no number": b"[NaN]",
    "a key twice": b'{"a":{"b":1,"b":1}}',
    "half a surrogate in bytes": b'"\xed\xa0\x80"',
    "a mark in front": b"\xef\xbb\xbf{}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_of_json_is_refused_soon(bomb: str) -> None:
    begin = time.process_time()
    assert "is not valid JSON" in refusal(lambda: parse(BOMBS[bomb], "it"))
    assert time.process_time() - begin < 2


def test_the_densest_honest_header_is_read() -> None:
    entry = {"dtype": "U8", "shape": [], "data_offsets": [0, 0]}
    text = json.dumps({f"{n:x}": entry for n in range(30_000)}, separators=(",", ":")).encode()
    assert len(text) > SMALL_BYTES
    assert (text.count(b"[") + text.count(b"{")) * BYTES_PER_BRACKET < len(text)
    assert len(parse(text, "it")) == 30_000


@pytest.mark.parametrize("file", ["config.json", tiny.INDEX, "hf_quant_config.json"])
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_in_any_json_file_of_a_source_is_refused(file: str, bomb: str, source: Path) -> None:
    (source / file).write_bytes(BOMBS[bomb])
    refusal(lambda: open_checkpoint(source))


@pytest.mark.parametrize("file", ["config.json", tiny.INDEX])
def test_a_key_that_stands_twice_is_refused_wherever_it_stands(file: str, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "source", spread="layers", layers=2)
    text = (folder / file).read_text("utf-8").strip()
    (folder / file).write_text(f'{text[:-1]},"x":{{"y":1,"y":1}}}}', "utf-8")
    assert "stands twice" in refusal(lambda: open_checkpoint(folder))


# --- headers ------------------------------------------------------------------------------------


def header(path: Path, entries: dict[str, Any] | bytes, data: bytes = b"", **lies: int) -> Path:
    path.write_bytes(tiny.file_of(entries, data, **lies))
    return path


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([2**32, 2**32], [0, 0]),
        ([2**48] * 32, [0, 4]),
        ([2**63], [0, 0]),
        ([-1, -4], [0, 4]),
        ([4], [0, 2**64 + 4]),
        ([4], [-(2**64), 4]),
        ([4], [2**63, 2**63 + 4]),
        ([1] * 33 + [4], [0, 4]),
        ([True, 4], [0, 4]),
        ([4.0], [0, 4]),
        ([10**4000], [0, 4]),
    ],
)
def test_numbers_that_overflow_elsewhere_are_refused_here(
    shape: list[Any], offsets: list[int], tmp_path: Path
) -> None:
    entries = {"x": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}
    path = header(tmp_path / tiny.SINGLE, entries, bytes(4))
    refusal(lambda: read_header(path))


def test_a_header_over_100_mb_is_refused_by_its_length_alone(tmp_path: Path) -> None:
    path = header(tmp_path / tiny.SINGLE, b"{}", length=MAX_HEADER_BYTES + 1)
    os.truncate(path, MAX_HEADER_BYTES * 3)  # a hole: it takes no room
    begin = time.process_time()
    assert "the limit is" in refusal(lambda: read_header(path))
    assert time.process_time() - begin < 0.1


def test_pickled_weights_are_refused_with_a_hint(source: Path) -> None:
    (source / tiny.SINGLE).rename(source / "pytorch_model.bin")
    with pytest.raises(BadSource, match="can run code") as caught:
        open_checkpoint(source)
    assert "safetensors" in caught.value.hint


def test_nothing_of_a_prepared_folder_is_taken_for_a_source(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    (tmp_path / "copy" / "aiter_prep.json").unlink()
    refusal(lambda: open_checkpoint(tmp_path / "copy"), NoRule)
