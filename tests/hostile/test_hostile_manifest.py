"""A manifest is read with suspicion: whatever it says, the answer is damage or a clean folder."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tiny
from aiter_prep.errors import AiterPrepError, BadSource, DataMismatch, NoRule
from aiter_prep.manifest import parse_manifest
from aiter_prep.restoration import restore
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.verification import verify
from prepared import MANIFEST, edit, load, prepare, reseal, sealed, spans

Step = str | int

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "folded": ({"kind": "mxfp4_quark", "hidden": 64, "intermediate": 64}, {"tp": 2}),
    "fused": ({"kind": "mxfp4_gpt_oss", "hidden": 64, "intermediate": 96}, {"tp": 2}),
    "lost": ({"kind": "fp8_block_f32"}, {"gfx": "gfx942"}),
    "merged": ({"kind": "fp8_tensor"}, {"tp": 2}),
    "packed": ({"kind": "int4"}, {"target": "vllm", "options": {"moe_backend": "flydsl"}}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A source and a prepared folder of every kind of tensor."""
    made: dict[str, tuple[Path, Path]] = {}
    for case, (model, options) in CASES.items():
        folder = tmp_path_factory.mktemp("case")
        source = tiny.write(folder / "source", **model)
        prepare(source, folder / "out", **options)
        made[case] = (source, folder / "out")
    return made


def changed(document: Any, path: tuple[Step, ...], value: Any) -> Any:
    document = copy.deepcopy(document)
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return document


def tensor_with(document: Any, holds: Callable[[Any], Any]) -> int:
    return next(n for n, tensor in enumerate(document["tensors"]) if holds(tensor))


# --- single fields ------------------------------------------------------------------------------

EVIL: list[tuple[str, tuple[Step, ...], Any]] = [
    ("folded", ("shards", 0, "file"), "../../etc/passwd"),
    ("folded", ("shards", 0, "file"), "/etc/passwd"),
    ("folded", ("shards", 0, "file"), "model-rank-0-part-0.safetensors\n"),
    ("folded", ("shards", 0, "file"), "model-rank-00-part-0.safetensors"),
    ("folded", ("shards", 0, "rank"), 1),
    ("folded", ("shards", 0, "rank"), 5000),
    ("folded", ("shards", 0, "size"), 2**80),
    ("folded", ("shards", 0, "size"), 1.0),
    ("folded", ("shards", 0, "size"), True),
    ("folded", ("files", 0, "name"), "../config.json"),
    ("folded", ("files", 0, "name"), "/etc/passwd"),
    ("folded", ("files", 0, "name"), ".."),
    ("folded", ("files", 0, "name"), "a\nb"),
    ("folded", ("files", 0, "name"), "\x1b[2J"),
    ("folded", ("files", 0, "name"), MANIFEST),
    ("folded", ("files", 0, "name"), "n" * 300),
    ("folded", ("files", 0, "digest"), "md5:" + "0" * 32),
    ("folded", ("target", "tp"), 2**62),
    ("folded", ("target", "tp"), 0),
    ("folded", ("target", "ranks"), [0, 0]),
    ("folded", ("target", "ranks"), [0, 7]),
    ("folded", ("target", "ranks"), []),
    ("folded", ("options", "engine"), {"x": 1}),
    ("folded", ("skipped",), [{"name": "a\nb", "reason": "x"}]),
    ("folded", ("created_by",), None),
    ("folded", ("model", "blocks"), 3),
    ("folded", ("layouts", "e8m0", "order"), [0, 0, 0, 0, 0, 0]),
    ("folded", ("layouts", "e8m0", "order"), [0, 1, 2, 3, 4, 9]),
    ("folded", ("layouts", "e8m0", "rows"), [-1, -1, 16]),
    ("folded", ("layouts", "e8m0", "rows"), [2**40, 2**40, 2**40]),
    ("folded", ("layouts", "e8m0", "rows"), [-1, 0, 16]),
    ("folded", ("layouts", "e8m0", "rows"), [-1, 3, 17]),
    ("folded", ("layouts", "e8m0", "pad_byte"), 256),
    ("folded", ("layouts", "e8m0", "row_pad"), 0),
    ("folded", ("layouts", "e8m0", "extra"), 0),
    ("folded", ("layouts",), {}),
    ("folded", ("tensors",), []),
    ("folded", ("conversions",), {"a": 1}),
    ("merged", ("conversions",), {}),
]


@pytest.mark.parametrize(("case", "path", "value"), EVIL, ids=[str(path) for _, path, _ in EVIL])
def test_a_field_that_lies_is_damage(
    case: str, path: tuple[Step, ...], value: Any, folders: dict[str, tuple[Path, Path]]
) -> None:
    document = changed(load(folders[case][1]), path, value)
    with pytest.raises(DataMismatch) as caught:
        parse_manifest(sealed(document))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1000


EVIL_TENSOR: list[tuple[str, tuple[Step, ...], Any]] = [
    ("folded", ("matrix",), [2**40, 2**40, 2**40]),
    ("folded", ("matrix",), [0, 0, 0]),
    ("folded", ("matrix",), [2**62, 1, 1]),
    ("folded", ("matrix",), [-1, 32, 32]),
    ("folded", ("matrix",), [128, 32, 33]),
    ("folded", ("matrix",), None),
    ("folded", ("experts",), [0, 2**60, 1]),
    ("folded", ("experts",), [0, 2, 0]),
    ("folded", ("experts",), [2, 2, 1]),
    ("folded", ("experts",), [0, 2, 1.0]),
    ("folded", ("shape",), [2**62, 2**62]),
    ("folded", ("shape",), [1] * 40),
    ("folded", ("dtype",), "F8"),
    ("folded", ("dtype",), "F64"),
    ("folded", ("file",), "model-rank-1-part-0.safetensors"),
    ("folded", ("file",), "model-rank-0-part-9.safetensors"),
    ("folded", ("name",), "\x1b[2J"),
    ("folded", ("name",), "n" * 2000),
    ("folded", ("is_shuffled",), False),
    ("folded", ("layout",), "row_major"),
    ("folded", ("layout",), None),
    ("folded", ("form",), "odd"),
    ("folded", ("form",), None),
    ("folded", ("fill",), "xy"),
    ("folded", ("fill",), "0"),
    ("folded", ("merge",), "magic"),
    ("folded", ("packing",), "magic"),
    ("folded", ("packing",), "int4_of_eight"),
    ("folded", ("rank",), None),
    ("folded", ("rank",), 4),
    ("folded", ("pads",), [{"axis": "rows", "from": 1, "to": 2, "fill": "00", "more": 1}]),
    ("folded", ("pads",), [{"axis": "up", "from": 1, "to": 2, "fill": "00"}]),
    ("folded", ("lost",), {"source": 128, "stored": 0, "count": 1, "positions": [0]}),
    ("lost", ("lost",), {"source": 256, "stored": 0, "count": 1, "positions": None}),
    ("folded", ("source", 0, "conversion"), "magic"),
    ("folded", ("source", 0, "rows"), [0, 2**50, 1]),
    ("folded", ("source", 0, "rows"), [5, 5, 1]),
    ("folded", ("source", 0, "rows"), [0, 32, 0]),
    ("folded", ("source", 0, "rows"), [-5, 32, 1]),
    ("folded", ("source", 0, "columns"), [0, 2**50]),
    ("folded", ("source", 0, "columns"), [7, 3]),
    ("folded", ("source", 0, "row_bytes"), 2**50),
    ("folded", ("source", 0, "row_bytes"), 0),
    ("folded", ("source", 0, "shape"), [2**50, 32]),
    ("folded", ("source", 0, "shape"), []),
    ("folded", ("source", 0, "to_row"), 2**50),
    ("folded", ("source", 0, "pattern"), "no mark"),
    ("folded", ("source", 0, "pattern"), "{expert}.{expert}"),
    ("folded", ("source", 0, "pattern"), "{expert}{x}"),
    ("folded", ("source", 0, "pattern"), "{expert}\n"),
    ("folded", ("source", 0, "shared"), "\x1b"),
    ("folded", ("source", 0, "fused"), True),
    ("folded", ("source", 0, "transposed"), True),
    ("fused", ("source", 0, "shape"), [1, 192, 2, 16]),
    ("fused", ("source", 0, "fused"), False),
]


@pytest.mark.parametrize(
    ("case", "path", "value"), EVIL_TENSOR, ids=[f"{p} {v}"[:60] for _, p, v in EVIL_TENSOR]
)
def test_a_field_of_a_tensor_that_lies_is_damage(
    case: str, path: tuple[Step, ...], value: Any, folders: dict[str, tuple[Path, Path]]
) -> None:
    document = load(folders[case][1])
    number = tensor_with(document, lambda t: t["source"] and t["name"].endswith("w13_weight"))
    document = changed(document, ("tensors", number, *path), value)
    with pytest.raises(DataMismatch) as caught:
        parse_manifest(sealed(document))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("positions", [[5, 3], [3, 3], [2**62]])
def test_lost_positions_out_of_order_or_range_are_damage(
    positions: list[int], folders: dict[str, tuple[Path, Path]]
) -> None:
    document = load(folders["lost"][1])
    number = tensor_with(document, lambda tensor: tensor["lost"])
    lost = {"source": 128, "stored": 0, "count": len(positions), "positions": positions}
    with pytest.raises(DataMismatch, match=r"lost.positions"):
        parse_manifest(sealed(changed(document, ("tensors", number, "lost"), lost)))


def test_a_tensor_or_a_shard_that_stands_twice_is_damage(
    folders: dict[str, tuple[Path, Path]],
) -> None:
    for key in ("tensors", "shards", "files"):
        document = load(folders["folded"][1])
        document[key].append(document[key][0])
        with pytest.raises(DataMismatch, match="twice"):
            parse_manifest(sealed(document))


# --- any field ----------------------------------------------------------------------------------


def places(value: Any, path: tuple[Step, ...] = ()) -> Iterator[tuple[Step, ...]]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value[:4]):
            yield from places(item, (*path, number))


SCALAR = (
    st.sampled_from([0, 1, 2, 3, 4, 8, 15, 16, 31, 32, 33, 64, 128, 255, 256, 2**31, 2**62, 2**63])
    | st.sampled_from([-1, True, None, 0.5, "", "x", "{expert}", "../x", "row_major", "e8m0"])
    | st.sampled_from(["int4_of_eight", "bf16_to_f32", "int4_to_int8", "F32", "F4", "scalar"])
)
VALUE = SCALAR | st.lists(SCALAR, max_size=4)


@settings(
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(data=st.data())
def test_whatever_two_fields_say_the_folder_is_clean_or_damaged(
    data: st.DataObject, folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """No other exception, nothing written outside, nothing larger in memory than the folder."""
    source, folder = folders[data.draw(st.sampled_from(sorted(CASES)))]
    document = load(folder)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from([p for p in places(document) if p]))
        with suppress(KeyError, IndexError, TypeError):
            document = changed(document, path, data.draw(VALUE))
    with forged(folder, document):
        tracemalloc.start()
        try:
            check_only_our_errors(folder, source, tmp_path)
            assert tracemalloc.get_traced_memory()[1] < 50_000_000
        finally:
            tracemalloc.stop()


class forged:  # noqa: N801 - used as a statement
    """A folder with another manifest for a while."""

    def __init__(self, folder: Path, document: Any) -> None:
        self._path, self._text = folder / MANIFEST, sealed(document)

    def __enter__(self) -> None:
        self._before = self._path.read_bytes()
        self._path.write_bytes(self._text)

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._before)


def check_only_our_errors(folder: Path, source: Path, tmp_path: Path) -> None:
    with suppress(DataMismatch):
        verify(folder)
    with suppress(DataMismatch, NoRule):
        verify(folder, source=open_checkpoint(source))
    before = sorted(tmp_path.iterdir())
    try:
        restore(folder, tmp_path / "restored")
    except (DataMismatch, NoRule):
        assert sorted(tmp_path.iterdir()) == before
    shutil.rmtree(tmp_path / "restored", ignore_errors=True)


# --- the folder ---------------------------------------------------------------------------------


@pytest.fixture
def out(tmp_path: Path) -> tuple[Path, Path]:
    source = tiny.write(tmp_path / "source", kind="mxfp4_quark", hidden=64, intermediate=64)
    (source / "tokenizer.json").write_text("{}", "utf-8")
    prepare(source, tmp_path / "out", 2)
    return source, tmp_path / "out"


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "config.json", "model-rank-0-part-0.safetensors"]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_damage_and_not_waited_for(
    file: str, kind: str, out: tuple[Path, Path]
) -> None:
    _, folder = out
    (folder / file).unlink()
    if kind == "pipe":
        os.mkfifo(folder / file)
    elif kind == "device":
        (folder / file).symlink_to("/dev/zero")
    else:
        (folder / file).mkdir()
    assert file in {problem.file for problem in verify(folder).problems}
    with pytest.raises(DataMismatch):
        restore(folder, folder.parent / "restored")
    assert not (folder.parent / "restored").exists()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_manifest_that_is_no_file_is_damage(kind: str, out: tuple[Path, Path]) -> None:
    path = out[1] / MANIFEST
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(DataMismatch):
        verify(out[1])


def test_padding_with_other_bytes_is_found_by_verify_with_a_source_and_by_restore(
    tmp_path: Path,
) -> None:
    """Every digest fits, and the matrices come back; only the padding is not as it was."""
    source = tiny.write(tmp_path / "source", kind="mxfp4_quark", hidden=64, intermediate=64)
    prepare(source, tmp_path / "out", 2)
    document = load(tmp_path / "out")
    record = document["tensors"][tensor_with(document, lambda t: t["form"] == "folded")]
    shard = tmp_path / "out" / record["file"]
    data = bytearray(shard.read_bytes())
    data[spans(shard)[record["name"]][1] - 1] ^= 1
    shard.write_bytes(data)
    reseal(tmp_path / "out")
    assert verify(tmp_path / "out").is_clean
    problems = verify(tmp_path / "out", source=open_checkpoint(source)).problems
    assert any("padding" in problem.what for problem in problems)
    with pytest.raises(DataMismatch, match="padding"):
        restore(tmp_path / "out", tmp_path / "restored")


@pytest.mark.parametrize(
    "config", [b"[]", b"{", b'{"quantization_config": {"quant_method": "aiter_prep"}}', b"\xff"]
)
def test_a_forged_config_is_damage_and_no_crash(config: bytes, out: tuple[Path, Path]) -> None:
    source, folder = out
    (folder / "config.json").write_bytes(config)
    reseal(folder)
    assert not verify(folder, source=open_checkpoint(source)).is_clean
    with suppress(DataMismatch):
        restore(folder, folder.parent / "restored")


def test_options_that_no_plan_takes_are_damage(folders: dict[str, tuple[Path, Path]]) -> None:
    source, folder = folders["merged"]
    document = load(folder)
    document["options"]["engine"] = {"magic": "on"}
    with forged(folder, document):
        problems = verify(folder, source=open_checkpoint(source)).problems
    assert any("does not lead from the source to a plan" in problem.what for problem in problems)


def test_nothing_is_restored_into_the_prepared_folder(out: tuple[Path, Path]) -> None:
    with pytest.raises(AiterPrepError, match="lies in the prepared folder"):
        restore(out[1], out[1] / "restored")
    assert verify(out[1]).is_clean


def test_a_manifest_of_another_folder_is_damage(out: tuple[Path, Path], tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "other", kind="mxfp4_quark", hidden=64, intermediate=64, seed=7)
    prepare(other, tmp_path / "other_out", 2)
    shutil.copy(tmp_path / "other_out" / MANIFEST, out[1] / MANIFEST)
    assert len(verify(out[1]).problems) > 3


def test_a_bomb_for_a_manifest_is_damage(out: tuple[Path, Path]) -> None:
    for bomb in (b"[" * 100_000, b'{"a":' * 100_000, b'{"format_version": 1e999}', b"\0" * 100):
        with pytest.raises(DataMismatch):
            parse_manifest(bomb)
    edit(out[1], lambda document: document.update(created_by=json.loads("[" * 90 + "]" * 90)))
    with pytest.raises((DataMismatch, BadSource)):
        verify(out[1])
