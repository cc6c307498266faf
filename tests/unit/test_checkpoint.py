"""A source is checked before anything is done with it: each way to be broken has its refusal."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from aiter_prep.errors import AiterPrepError, BadSource, NoRule
from aiter_prep.execution import execute
from aiter_prep.plan import make_plan
from aiter_prep.restoration import restore
from aiter_prep.storage.checkpoint import Checkpoint, open_checkpoint, read_json_file
from aiter_prep.verification import verify
from prepared import prepare
from support import fixture

SHARD_1 = "model-00001-of-00002.safetensors"
SHARD_2 = "model-00002-of-00002.safetensors"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A checkpoint of one file without an index."""
    return tiny.write(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of two shards with an index."""
    return tiny.write(tmp_path / "sharded", spread="layers")


def refusal(folder: Path, kind: type[AiterPrepError] = BadSource) -> AiterPrepError:
    with pytest.raises(kind) as caught:
        open_checkpoint(folder)
    fault: AiterPrepError = caught.value
    assert type(fault) is kind
    assert (fault.message + fault.hint).isprintable()
    return fault


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / tiny.INDEX
    index = json.loads(path.read_text("utf-8"))
    change(index["weight_map"])
    path.write_text(json.dumps(index), "utf-8")


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **fields}), "utf-8")


# --- what is sound ------------------------------------------------------------------------------


def test_a_checkpoint_is_known_by_its_headers(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    tensors = tiny.read_folder(sharded)
    assert {n: (t.dtype, t.shape) for n, t in checkpoint.tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    assert checkpoint.total_bytes == sum(len(tensor.data) for tensor in tensors.values())
    assert [header.file for header in checkpoint.headers] == [SHARD_1, SHARD_2]
    assert (checkpoint.name, checkpoint.revision) == ("sharded", None)
    assert (checkpoint.architecture, checkpoint.model_type) == ("TinyMoeForCausalLM", "tiny_moe")
    assert (checkpoint.unindexed, checkpoint.stray_files) == ((), ())
    assert checkpoint.hf_quant_config is None


def test_every_fixture_opens(checkpoint_folder: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_folder)
    assert set(checkpoint.tensors) == set(tiny.read_folder(checkpoint_folder))


def test_a_name_and_a_revision_may_be_given(single: Path) -> None:
    checkpoint = open_checkpoint(single, name="org/name", revision="abc")
    assert (checkpoint.name, checkpoint.revision) == ("org/name", "abc")


def test_the_path_may_be_text_and_relative(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(single)
    assert open_checkpoint(".").name == "single"


@pytest.mark.parametrize(
    ("fields", "architecture", "model_type"),
    [
        ({"architectures": [], "model_type": None}, "unknown", "unknown"),
        ({"architectures": "A", "model_type": 3}, "unknown", "unknown"),
        ({"architectures": [3], "model_type": []}, "unknown", "unknown"),
        ({"architectures": None, "model_type": "m"}, "unknown", "m"),
    ],
)
def test_an_odd_config_makes_the_architecture_unknown(
    fields: dict[str, Any], architecture: str, model_type: str, single: Path
) -> None:
    change_config(single, **fields)
    checkpoint = open_checkpoint(single)
    assert (checkpoint.architecture, checkpoint.model_type) == (architecture, model_type)


def test_the_quantisation_config_of_modelopt_is_read() -> None:
    checkpoint = open_checkpoint(fixture("qwen3_moe-modelopt-fp8"))
    assert checkpoint.hf_quant_config is not None


def test_one_file_of_another_name_needs_no_index(single: Path) -> None:
    (single / tiny.SINGLE).rename(single / "weights.safetensors")
    assert [header.file for header in open_checkpoint(single).headers] == ["weights.safetensors"]


def test_an_index_of_another_name_is_taken_if_it_is_the_only_one(sharded: Path) -> None:
    (sharded / tiny.INDEX).rename(sharded / "weights.safetensors.index.json")
    assert len(open_checkpoint(sharded).headers) == 2


def test_files_may_be_links_as_in_the_cache_of_the_hub(sharded: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / "abc", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(sharded.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    checkpoint = open_checkpoint(snapshot)
    assert [header.file for header in checkpoint.headers] == [SHARD_1, SHARD_2]


@pytest.mark.parametrize("name", ["config.json", tiny.INDEX, SHARD_1])
def test_a_link_that_leads_out_of_the_folder_is_refused(
    name: str, sharded: Path, tmp_path: Path
) -> None:
    (sharded / name).rename(tmp_path / name)
    (sharded / name).symlink_to(tmp_path / name)
    message = refusal(sharded).message
    assert f"`{name}`" in message
    assert "link" in message


# --- missing ------------------------------------------------------------------------------------


def test_a_folder_that_does_not_exist_is_said_to(tmp_path: Path) -> None:
    fault = refusal(tmp_path / "nowhere")
    assert "nowhere` does not exist" in fault.message
    assert "Hub id" in fault.hint


def test_a_file_is_no_checkpoint(single: Path) -> None:
    assert "is not a folder" in refusal(single / tiny.SINGLE).message


def test_a_folder_without_a_config_is_refused(single: Path) -> None:
    (single / "config.json").unlink()
    assert "`config.json` is missing" in refusal(single).message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "`config.json` is not valid JSON"),
        (b"{", "`config.json` is not valid JSON"),
        (b"[]", "`config.json` is a JSON list, not an object"),
        (b"null", "`config.json` is a JSON NoneType, not an object"),
        (b'{"a": 1, "a": 2}', "the key `a` stands twice"),
        (b'{"a": {"b": 1, "b": 1}}', "the key `b` stands twice"),
        (b'{"a": 1e999}', "1e999 is too large a number"),
        (b'{"a": nan}', "`config.json` is not valid JSON"),
        (
            b'{"quantization_config": "x"}',
            "`quantization_config` of `config.json` is 'x', not an o",
        ),
        (b'{"quantization_config": []}', "`quantization_config` of `config.json` is [], not an o"),
        (b'{"compression_config": 1}', "`compression_config` of `config.json` is 1, not an object"),
        (
            b'{"text_config": {"quantization_config": false}}',
            "`quantization_config` of `config.json` is False, not an object",
        ),
        (b'{"a\x1b[2J": 1, "a\x1b[2J": 2}', "not valid JSON"),
        (b'{"\\u001b": 1, "\\u001b": 2}', r"the key `\x1b` stands twice"),
        (b"\xff\xfe{}", "`config.json` is not valid JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(
    text: bytes, message: str, single: Path
) -> None:
    (single / "config.json").write_bytes(text)
    assert message in refusal(single).message


def test_a_number_too_large_for_a_float_is_refused_as_it_cannot_be_written_again(
    single: Path,
) -> None:
    text = (single / "config.json").read_text("utf-8")
    (single / "config.json").write_text(text.replace("{", '{"rope_theta": 1e999,', 1), "utf-8")
    refusal(single)


def test_a_config_that_is_a_folder_is_missing(single: Path) -> None:
    (single / "config.json").unlink()
    (single / "config.json").mkdir()
    assert "`config.json` is missing" in refusal(single).message


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", tiny.INDEX])
def test_a_pipe_for_a_json_file_is_refused_and_not_waited_for(name: str, single: Path) -> None:
    (single / name).unlink(missing_ok=True)
    os.mkfifo(single / name)
    assert f"`{name}` is missing" in refusal(single).message


def test_json_of_more_than_its_limit_is_not_read(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiter_prep.storage.checkpoint.MAX_JSON_BYTES", 10)
    assert "`config.json` is larger than 10 bytes" in refusal(single).message


def test_a_json_file_says_where_it_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BadSource, match=r"`a\.json` is missing in"):
        read_json_file(tmp_path / "a.json")


def test_a_folder_without_weights_is_refused(single: Path) -> None:
    (single / tiny.SINGLE).unlink()
    assert refusal(single).message == "`single` holds no safetensors file"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickles_are_refused_with_a_hint_and_never_opened(name: str, single: Path) -> None:
    (single / tiny.SINGLE).unlink()
    os.mkfifo(single / name)  # whoever opens it waits for ever
    fault = refusal(single)
    assert "pickled weights only, which can run code when read" in fault.message
    assert "safetensors" in fault.hint


def test_a_shard_that_the_index_names_and_the_folder_lacks_is_named(sharded: Path) -> None:
    (sharded / SHARD_2).unlink()
    fault = refusal(sharded)
    assert fault.message.startswith(f"`{SHARD_2}`: named by `{tiny.INDEX}`, but missing")
    assert fault.hint == "finish the download"


def test_of_many_missing_shards_some_are_named_and_all_are_counted(sharded: Path) -> None:
    change_index(
        sharded, lambda places: places.update({f"x{n}": f"m-{n}.safetensors" for n in range(9)})
    )
    message = refusal(sharded).message
    assert "`m-0.safetensors`, `m-1.safetensors`" in message
    assert "and 4 more" in message


def test_a_tensor_that_is_not_where_the_index_places_it_is_named(sharded: Path) -> None:
    change_index(sharded, lambda places: places.update({"model.extra.weight": SHARD_1}))
    message = refusal(sharded).message
    assert f"tensor `model.extra.weight` is not in `{SHARD_1}`, where the index places" in message


def test_a_tensor_that_lies_in_the_other_shard_is_refused(sharded: Path) -> None:
    change_index(sharded, lambda places: places.update({"model.norm.weight": SHARD_1}))
    assert "tensor `model.norm.weight` is not in" in refusal(sharded).message


def test_several_files_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / tiny.INDEX).unlink()
    fault = refusal(sharded)
    assert (
        "2 safetensors files in `sharded`, but no `model.safetensors.index.json`" in fault.message
    )
    assert "finish the download" in fault.hint


def test_the_first_of_several_shards_alone_is_refused(sharded: Path) -> None:
    (sharded / tiny.INDEX).unlink()
    (sharded / SHARD_2).unlink()
    assert "1 safetensors files in `sharded`, but no" in refusal(sharded).message


def test_a_single_file_beside_shards_without_an_index_is_refused(sharded: Path) -> None:
    (sharded / tiny.INDEX).unlink()
    shutil.copy(sharded / SHARD_1, sharded / tiny.SINGLE)
    assert "but no `model.safetensors.index.json`" in refusal(sharded).message


def test_a_checkpoint_without_a_tensor_is_refused(single: Path) -> None:
    tiny.write_shard(single / tiny.SINGLE, {})
    assert refusal(single).message == "`single` holds no tensor"


# --- too much -----------------------------------------------------------------------------------


def test_a_name_in_two_shards_is_refused(sharded: Path) -> None:
    tensors = tiny.read_shard(sharded / SHARD_1)
    tensors["model.norm.weight"] = tiny.read_shard(sharded / SHARD_2)["model.norm.weight"]
    tiny.write_shard(sharded / SHARD_1, tensors)
    message = refusal(sharded).message
    assert "tensor `model.norm.weight` stands in two shards" in message
    assert f"`{SHARD_1}`" in message
    assert f"`{SHARD_2}`" in message


def test_tensors_that_the_index_does_not_name_are_reported(sharded: Path) -> None:
    change_index(sharded, lambda places: places.pop("model.norm.weight"))
    checkpoint = open_checkpoint(sharded)
    assert "model.norm.weight" not in checkpoint.tensors
    assert [tensor.name for tensor in checkpoint.unindexed] == ["model.norm.weight"]


def test_files_that_the_index_does_not_name_are_reported(sharded: Path) -> None:
    tiny.write_shard(sharded / "old.safetensors", {"x": tiny.Tensor("U8", (1,), b"x")})
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.stray_files == ("old.safetensors",)
    assert "x" not in checkpoint.tensors


def test_files_beside_a_single_one_are_reported(single: Path) -> None:
    shutil.copy(single / tiny.SINGLE, single / "consolidated.safetensors")
    assert open_checkpoint(single).stray_files == ("consolidated.safetensors",)


def test_a_stray_file_is_not_read_at_all(sharded: Path) -> None:
    (sharded / "broken.safetensors").write_bytes(b"no header")
    assert open_checkpoint(sharded).stray_files == ("broken.safetensors",)


def test_two_indexes_are_refused_unless_one_is_the_usual(sharded: Path) -> None:
    shutil.copy(sharded / tiny.INDEX, sharded / "other.safetensors.index.json")
    assert isinstance(open_checkpoint(sharded), Checkpoint)
    (sharded / tiny.INDEX).rename(sharded / "third.safetensors.index.json")
    message = refusal(sharded).message
    assert "`other.safetensors.index.json`, `third.safetensors.index.json`" in message


# --- the index ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 3])
def test_an_index_without_a_weight_map_is_refused(weight_map: Any, sharded: Path) -> None:
    (sharded / tiny.INDEX).write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    assert "has no `weight_map`" in refusal(sharded).message


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "sub/inside.safetensors",
        "/etc/passwd",
        "/srv/outside.safetensors",
        "..",
        ".",
        "",
        ".hidden.safetensors",
        "a\0b.safetensors",
        "a\nb.safetensors",
        "\x1b[2J.safetensors",
        "C:\\outside.safetensors",
        "\ud800.safetensors",
        "model.bin",
        "config.json",
        "model.safetensors/",
        None,
        3,
        [],
        {"a": 1},
    ],
)
def test_an_index_entry_that_is_no_plain_name_is_refused(file: Any, sharded: Path) -> None:
    tiny.write_shard(sharded.parent / "outside.safetensors", {"x": tiny.Tensor("U8", (1,), b"x")})
    change_index(sharded, lambda places: places.update({"x": file}))
    message = refusal(sharded).message
    assert "places `x` in" in message
    assert "not the plain name of a safetensors file" in message


def test_the_name_of_a_tensor_in_the_index_is_never_printed_raw(sharded: Path) -> None:
    for places in ({"\x1b[2J": 3}, {"\x1b[2J\n": SHARD_1}):
        change_index(sharded, lambda index, places=places: index.update(places))  # type: ignore[misc]
        assert "\x1b" not in refusal(sharded).message


def test_a_file_name_that_is_too_long_for_the_disk_is_refused(sharded: Path) -> None:
    change_index(sharded, lambda places: places.update({"x": "n" * 300 + ".safetensors"}))
    refusal(sharded)


def test_a_folder_name_that_is_too_long_for_the_disk_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path / ("n" * 300))


def test_a_folder_name_with_a_nul_does_not_exist(tmp_path: Path) -> None:
    refusal(tmp_path / "a\0b")


# --- no regular files ---------------------------------------------------------------------------


@pytest.mark.parametrize("spread", ["single", "layers"])
def test_a_pipe_for_a_shard_is_refused_and_not_waited_for(spread: str, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", spread=spread)
    shard = next(folder.glob("*.safetensors"))
    shard.unlink()
    os.mkfifo(shard)
    assert refusal(folder).message == f"shard `{shard.name}` is not a regular file"


@pytest.mark.parametrize("spread", ["single", "layers"])
def test_a_folder_for_a_shard_is_refused(spread: str, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", spread=spread)
    shard = next(folder.glob("*.safetensors"))
    shard.unlink()
    shard.mkdir()
    assert refusal(folder).message == f"shard `{shard.name}` is not a regular file"


def test_a_truncated_shard_is_refused_before_anything_is_planned(sharded: Path) -> None:
    data = (sharded / SHARD_1).read_bytes()
    (sharded / SHARD_1).write_bytes(data[:-1])
    fault = refusal(sharded)
    assert f"shard `{SHARD_1}` is truncated: {len(data) - 1} bytes" in fault.message
    assert fault.hint == "download it again"


def test_an_unknown_dtype_is_refused_by_name(single: Path) -> None:
    header = {"x": {"dtype": "F2", "shape": [4], "data_offsets": [0, 1]}}
    (single / tiny.SINGLE).write_bytes(tiny.file_of(header, b"x"))
    assert "`F2`" in refusal(single, NoRule).message


# --- prepared already ---------------------------------------------------------------------------


def test_a_prepared_folder_is_refused(single: Path, tmp_path: Path) -> None:
    prepare(single, tmp_path / "out")
    fault = refusal(tmp_path / "out", NoRule)
    assert fault.message.startswith("`out` is prepared already")
    assert "aiter-prep restore" in fault.hint


def test_a_manifest_alone_is_enough_to_refuse(single: Path) -> None:
    (single / "aiter_prep.json").write_text("{", "utf-8")
    assert "is prepared already" in refusal(single, NoRule).message


@pytest.mark.parametrize("holder", ["top", "text_config"])
def test_a_prepared_config_is_refused(holder: str, single: Path) -> None:
    wrapped = {"quantization_config": {"quant_method": "aiter_prep"}}
    change_config(single, **(wrapped if holder == "top" else {"text_config": wrapped}))
    assert "is prepared already" in refusal(single, NoRule).message


@pytest.mark.parametrize("key", ["aiter_prep", "is_shuffled"])
def test_a_prepared_shard_is_refused(key: str, single: Path) -> None:
    tensors = tiny.read_shard(single / tiny.SINGLE)
    value = "true" if key == "is_shuffled" else "{}"
    tiny.write_shard(single / tiny.SINGLE, tensors, {"format": "pt", key: value})
    assert "says that its tensors are shuffled already" in refusal(single, NoRule).message


def test_a_prepared_folder_whose_manifest_and_config_were_taken_away_is_refused(
    single: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prepare(single, out)
    (out / "aiter_prep.json").unlink()
    shutil.copy(single / "config.json", out / "config.json")
    (out / "model-common-part-0.safetensors").unlink()
    refusal(out, NoRule)


def test_a_shard_that_says_it_is_not_shuffled_is_taken(single: Path) -> None:
    tensors = tiny.read_shard(single / tiny.SINGLE)
    tiny.write_shard(single / tiny.SINGLE, tensors, {"format": "pt", "is_shuffled": "false"})
    assert len(open_checkpoint(single).tensors) == len(tensors)


def test_numbers_that_only_python_writes_are_carried_over_and_come_back(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    config = json.loads((source / "config.json").read_text("utf-8"))
    config |= {"time_step_limit": [0.0, math.inf], "low": -math.inf, "none": math.nan}
    (source / "config.json").write_text(json.dumps(config), "utf-8")
    out, back = tmp_path / "out", tmp_path / "back"
    execute(make_plan(open_checkpoint(source)), out)
    assert verify(out, source=open_checkpoint(source)).problems == ()
    restore(out, back)
    for folder in (out, back):
        held = json.loads((folder / "config.json").read_text("utf-8"))
        assert held["time_step_limit"] == [0.0, math.inf]
        assert held["low"] == -math.inf
        assert math.isnan(held["none"])


@pytest.mark.parametrize("file", [tiny.INDEX, "hf_quant_config.json"])
def test_in_other_files_such_numbers_are_refused(file: str, tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", spread="layers", layers=2)
    path = source / file
    entries = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**entries, "a": math.inf}), "utf-8")
    with pytest.raises(BadSource, match="Infinity is not a JSON number"):
        open_checkpoint(source)
