"""Whatever is done to a prepared folder, `verify` says it, and says where."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tiny
from aiter_prep.errors import AiterPrepError, DataMismatch
from aiter_prep.inspection import inspect_path
from aiter_prep.progress import Progress
from aiter_prep.restoration import restore
from aiter_prep.storage.checkpoint import Checkpoint, open_checkpoint
from aiter_prep.verification import Problem, verify
from documents import Place, changed, distinct, kind_of, without
from prepared import (
    JOURNAL,
    LOCK,
    MANIFEST,
    contents,
    edit,
    flip,
    load,
    prepare,
    problems_of,
    reseal,
    sealed,
    spans,
)

RANK_0, RANK_1 = "model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"
COMMON = "model-common-part-0.safetensors"
EXPERTS = "model.layers.0.mlp.experts"
FLIPS = 300
OTHER_BYTES = "has other bytes than the manifest says"


class Folder(NamedTuple):
    """A prepared folder that a test may damage, and its source."""

    source: Path
    out: Path

    @property
    def checkpoint(self) -> Checkpoint:
        """The source, opened."""
        return open_checkpoint(self.source)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A folder of two ranks with padding, biases, and a small file; never changed."""
    folder = tmp_path_factory.mktemp("pristine")
    source = tiny.write(
        folder / "source", kind="mxfp4_gpt_oss", hidden=64, intermediate=96, experts=2
    )
    (source / "tokenizer.json").write_text('{"tiny": true}', "utf-8")
    prepare(source, folder / "out", 2)
    return Folder(source, folder / "out")


@pytest.fixture
def folder(pristine: Folder, tmp_path: Path) -> Folder:
    """A copy of it."""
    shutil.copytree(pristine.out, tmp_path / "out")
    return Folder(pristine.source, tmp_path / "out")


def found(out: Path) -> list[tuple[str, str | None, int | None]]:
    """Return file, tensor and rank of every problem."""
    return [(problem.file, problem.tensor, problem.rank) for problem in problems_of(out)]


def rank_of(file: str) -> int | None:
    return None if file == COMMON else int(file.split("-")[2])


def test_the_folder_is_clean_before_anything_is_done_to_it(pristine: Folder) -> None:
    report = verify(pristine.out, source=pristine.checkpoint)
    assert report.is_clean
    assert report.shards == 3
    assert report.tensors == len(load(pristine.out)["tensors"])
    assert any(tensor["pads"] for tensor in load(pristine.out)["tensors"])


# --- bits ---------------------------------------------------------------------------------------


def where(out: Path, file: str, byte: int) -> str | None:
    """Return the tensor that a byte of a shard belongs to; None: the header."""
    for name, (start, stop) in spans(out / file).items():
        if start <= byte < stop:
            return name
    return None


def random_bits(out: Path, count: int) -> Iterator[tuple[str, int, int]]:
    """Yield file, byte and bit: of every file alike, and the same ones every time."""
    rng = np.random.default_rng(20261129)
    files = sorted(path.name for path in out.iterdir())
    for number in range(count):
        file = files[number % len(files)]
        yield file, int(rng.integers((out / file).stat().st_size)), int(rng.integers(8))


def check_flip(folder: Folder, file: str, byte: int, bit: int) -> None:
    """Flip a bit, look at what `verify` says, and flip it back."""
    tensor = where(folder.out, file, byte) if file.endswith(".safetensors") else None
    flip(folder.out / file, byte, bit)
    try:
        if file == MANIFEST:
            with pytest.raises(DataMismatch, match=r"aiter_prep\.json"):
                verify(folder.out)
        elif tensor is not None:
            problem = Problem(file, tensor, rank_of(file), OTHER_BYTES)
            assert problems_of(folder.out) == (problem,)
        else:
            problems = problems_of(folder.out)
            assert problems
            assert {problem.file for problem in problems} == {file}
    finally:
        flip(folder.out / file, byte, bit)


def test_every_flipped_bit_is_found_and_placed(folder: Folder) -> None:
    for file, byte, bit in random_bits(folder.out, FLIPS):
        check_flip(folder, file, byte, bit)
    assert verify(folder.out).is_clean


@pytest.mark.slow
def test_every_one_of_ten_thousand_flipped_bits_is_found_and_placed(folder: Folder) -> None:
    for file, byte, bit in random_bits(folder.out, 10_000):
        check_flip(folder, file, byte, bit)


@pytest.mark.parametrize("file", [RANK_0, RANK_1, COMMON])
def test_the_first_and_the_last_byte_of_every_tensor_count(file: str, folder: Folder) -> None:
    for start, stop in spans(folder.out / file).values():
        for byte in (start, stop - 1):
            check_flip(folder, file, byte, 7)


@pytest.mark.parametrize("file", [RANK_0, COMMON])
def test_every_byte_around_a_header_counts(file: str, folder: Folder) -> None:
    raw = (folder.out / file).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    text_end = raw.rindex(b"}", 0, end)
    for byte in (*range(16), text_end - 1, text_end, text_end + 1, end - 1):
        check_flip(folder, file, byte, 0)


def test_the_quick_check_reads_headers_and_sizes_alone(folder: Folder) -> None:
    start, _ = spans(folder.out / RANK_0)[f"{EXPERTS}.w13_weight"]
    flip(folder.out / RANK_0, start)
    assert verify(folder.out, quick=True).is_clean
    flip(folder.out / RANK_0, 20)
    assert not verify(folder.out, quick=True).is_clean


def test_two_damaged_tensors_are_two_problems(folder: Folder) -> None:
    for file, name in ((RANK_0, "w2_weight"), (RANK_1, "w13_bias")):
        flip(folder.out / file, spans(folder.out / file)[f"{EXPERTS}.{name}"][0])
    assert found(folder.out) == [
        (RANK_0, f"{EXPERTS}.w2_weight", 0),
        (RANK_1, f"{EXPERTS}.w13_bias", 1),
    ]


# --- sizes --------------------------------------------------------------------------------------

FILES = [RANK_0, RANK_1, COMMON, "config.json", "tokenizer.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("lost", ["one byte", "half", "all but one byte", "all"])
def test_a_truncated_file_is_named(file: str, lost: str, folder: Folder) -> None:
    data = (folder.out / file).read_bytes()
    kept = {"one byte": len(data) - 1, "half": len(data) // 2, "all but one byte": 1, "all": 0}
    (folder.out / file).write_bytes(data[: kept[lost]])
    for quick in (False, True):
        problems = verify(folder.out, quick=quick).problems
        assert {problem.file for problem in problems} == {file}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("more", [b"\0", b"x" * 4096])
def test_a_file_with_bytes_at_its_end_is_named(file: str, more: bytes, folder: Folder) -> None:
    with (folder.out / file).open("ab") as stream:
        stream.write(more)
    assert {file for file, _, _ in found(folder.out)} == {file}


@pytest.mark.parametrize("kept", [0, 1, 100, -3])
def test_a_truncated_manifest_is_damage(kept: int, folder: Folder) -> None:
    data = (folder.out / MANIFEST).read_bytes()
    (folder.out / MANIFEST).write_bytes(data[:kept])
    with pytest.raises(DataMismatch):
        verify(folder.out)


@pytest.mark.parametrize("more", [b"x", b"{}", b"\0"])
def test_a_manifest_with_bytes_at_its_end_is_damage(more: bytes, folder: Folder) -> None:
    with (folder.out / MANIFEST).open("ab") as stream:
        stream.write(more)
    with pytest.raises(DataMismatch):
        verify(folder.out)


@pytest.mark.parametrize("file", [RANK_0, RANK_1, COMMON])
@pytest.mark.parametrize("kept", ["header", "half"])
def test_a_hole_that_a_loss_of_power_leaves_is_placed(kept: str, file: str, folder: Folder) -> None:
    """The size is right and the header is there; what follows reads as zeros."""
    path = folder.out / file
    size = path.stat().st_size
    start = min(first for first, _ in spans(path).values())
    os.truncate(path, start if kept == "header" else (start + size) // 2)
    os.truncate(path, size)
    assert verify(folder.out, quick=True).is_clean
    problems = problems_of(folder.out)
    assert problems
    assert {(p.file, p.rank, p.what) for p in problems} == {(file, rank_of(file), OTHER_BYTES)}


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named_and_nothing_else(file: str, folder: Folder) -> None:
    (folder.out / file).unlink()
    assert problems_of(folder.out) == (Problem(file, None, None, "is missing"),)


def test_a_missing_manifest_is_said(folder: Folder) -> None:
    (folder.out / MANIFEST).unlink()
    with pytest.raises(DataMismatch, match="is not a prepared folder"):
        verify(folder.out)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model.safetensors.index.json",
        "model-rank-2-part-0.safetensors",
        "model-rank-0-part-1.safetensors",
        "notes.txt",
        ".hidden",
        f".{RANK_0}.partial",
        "a\nb",
    ],
)
def test_an_added_file_is_named_and_nothing_else(name: str, folder: Folder) -> None:
    shutil.copy(folder.out / RANK_0, folder.out / name)
    problem = Problem(name, None, None, "is not named by the manifest")
    assert problems_of(folder.out) == (problem,)


@pytest.mark.parametrize("name", [LOCK, JOURNAL])
def test_what_a_kill_right_behind_the_manifest_leaves_is_no_damage(
    name: str, folder: Folder
) -> None:
    (folder.out / name).write_bytes(b"")
    assert verify(folder.out, source=folder.checkpoint).is_clean


def test_an_added_folder_is_named(folder: Folder) -> None:
    (folder.out / "more").mkdir()
    assert found(folder.out) == [("more", None, None)]


def test_a_renamed_shard_is_missing_and_too_much(folder: Folder) -> None:
    (folder.out / RANK_1).rename(folder.out / "model-rank-2-part-0.safetensors")
    assert [(p.file, p.what) for p in problems_of(folder.out)] == [
        (RANK_1, "is missing"),
        ("model-rank-2-part-0.safetensors", "is not named by the manifest"),
    ]


@pytest.mark.parametrize("file", [RANK_0, COMMON, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["folder", "dangling link", "link to the same bytes"])
def test_a_file_that_became_something_else_is_named(file: str, kind: str, folder: Folder) -> None:
    path = folder.out / file
    if kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "dangling link":
        path.unlink()
        path.symlink_to("nowhere")
    else:
        path.rename(folder.out.parent / file)
        path.symlink_to(folder.out.parent / file)
    assert {file for file, _, _ in found(folder.out)} == {file}


def in_time(action: Callable[[], object], pipe: Path) -> None:
    """Run something that may wait for a pipe; after two seconds, let it go on and fail."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as fault:  # noqa: BLE001 - handed on
            caught.append(fault)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(2)
    waited = thread.is_alive()
    if waited:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        thread.join(10)
    assert not waited, "it waits for a pipe"
    if caught:
        raise caught[0]


@pytest.mark.parametrize("file", [RANK_0, "config.json", "tokenizer.json", MANIFEST])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(file: str, folder: Folder) -> None:
    (folder.out / file).unlink()
    os.mkfifo(folder.out / file)

    def check() -> None:
        if file == MANIFEST:
            with pytest.raises(DataMismatch):
                verify(folder.out)
        else:
            assert {file for file, _, _ in found(folder.out)} == {file}

    in_time(check, folder.out / file)


def test_an_unfinished_folder_is_said_to_be(folder: Folder) -> None:
    (folder.out / MANIFEST).rename(folder.out / JOURNAL)
    with pytest.raises(DataMismatch, match="is unfinished") as caught:
        verify(folder.out)
    assert "--resume" in caught.value.hint


# --- swaps --------------------------------------------------------------------------------------


def swap_files(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def swap_tensors(one: tuple[Path, str], other: tuple[Path, str]) -> None:
    """Swap the bytes of two tensors of one size."""
    pieces = []
    for path, name in (one, other):
        start, stop = spans(path)[name]
        pieces.append((path, start, path.read_bytes()[start:stop]))
    assert len(pieces[0][2]) == len(pieces[1][2])
    assert pieces[0][2] != pieces[1][2]
    for (path, start, _), (_, _, data) in zip(pieces, reversed(pieces), strict=True):
        raw = bytearray(path.read_bytes())
        raw[start : start + len(data)] = data
        path.write_bytes(raw)


def test_two_swapped_ranks_are_named(folder: Folder) -> None:
    swap_files(folder.out / RANK_0, folder.out / RANK_1)
    assert {file for file, _, _ in found(folder.out)} == {RANK_0, RANK_1}
    for quick in (False, True):
        what = {problem.what for problem in verify(folder.out, quick=quick).problems}
        assert "has another header than the manifest says" in what


def test_a_rank_and_the_common_shard_swapped_are_named(folder: Folder) -> None:
    swap_files(folder.out / RANK_0, folder.out / COMMON)
    assert {file for file, _, _ in found(folder.out)} == {RANK_0, COMMON}


@pytest.mark.parametrize("name", ["w13_weight", "w2_weight", "w13_weight_scale", "w2_bias"])
def test_a_tensor_swapped_between_ranks_is_named_in_both(name: str, folder: Folder) -> None:
    tensor = f"{EXPERTS}.{name}"
    swap_tensors((folder.out / RANK_0, tensor), (folder.out / RANK_1, tensor))
    assert found(folder.out) == [(RANK_0, tensor, 0), (RANK_1, tensor, 1)]


def test_two_swapped_tensors_of_one_shape_are_named(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", layers=2)
    prepare(source, tmp_path / "out", 2)
    names = [f"model.layers.{layer}.mlp.experts.w2_weight" for layer in (0, 1)]
    shard = tmp_path / "out" / RANK_1
    swap_tensors((shard, names[0]), (shard, names[1]))
    assert found(tmp_path / "out") == [(RANK_1, names[0], 1), (RANK_1, names[1], 1)]


def test_two_swapped_small_files_are_named(folder: Folder) -> None:
    swap_files(folder.out / "config.json", folder.out / "tokenizer.json")
    assert {file for file, _, _ in found(folder.out)} == {"config.json", "tokenizer.json"}


def test_a_shard_of_another_conversion_is_named(folder: Folder, tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "other", kind="mxfp4_gpt_oss", hidden=64, intermediate=96, seed=1)
    prepare(other, tmp_path / "other-out", 2)
    shutil.copy(tmp_path / "other-out" / RANK_0, folder.out / RANK_0)
    tensors = {tensor for _, tensor, _ in found(folder.out)}
    assert {file for file, _, _ in found(folder.out)} == {RANK_0}
    assert f"{EXPERTS}.w13_weight" in tensors


# --- the manifest -------------------------------------------------------------------------------


def wrong_values(value: Any) -> list[Any]:
    """Return values of the same kind, so that only the digest can tell."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, str):
        return [value + "x", value[:-1], value.swapcase()]
    return [None] if value is not None else ["x"]


def test_every_edited_field_of_the_manifest_is_damage(pristine: Folder, tmp_path: Path) -> None:
    document = load(pristine.out)
    tried = 0
    for place, value in distinct(document):
        if not place:
            continue
        for other in [new for new in wrong_values(value) if new != value]:
            (tmp_path / MANIFEST).write_text(json.dumps(changed(document, place, other)), "utf-8")
            with pytest.raises(DataMismatch):
                verify(tmp_path)
            tried += 1
        (tmp_path / MANIFEST).write_text(json.dumps(without(document, place)), "utf-8")
        with pytest.raises(DataMismatch):
            verify(tmp_path)
    assert tried > 150


# --- forgeries ----------------------------------------------------------------------------------


def forged(folder: Folder, *problems: tuple[str, str | None, int | None]) -> None:
    """Make all digests fit, and check that only the source brings it to light, and where."""
    reseal(folder.out)
    assert problems_of(folder.out) == ()
    against = verify(folder.out, source=folder.checkpoint).problems
    assert against
    if problems:
        assert {(problem.file, problem.tensor, problem.rank) for problem in against} == set(
            problems
        )


def data_of(out: Path, rank: int, name: str) -> int:
    """Return a byte of a tensor that is no padding, which is zero."""
    raw = (out / f"model-rank-{rank}-part-0.safetensors").read_bytes()
    start, stop = spans(out / f"model-rank-{rank}-part-0.safetensors")[f"{EXPERTS}.{name}"]
    return next(byte for byte in range(start + 3, stop) if raw[byte])


def padding_of(out: Path, rank: int, name: str) -> tuple[str, int]:
    """Return a shard and a byte of it that is padding: where a forged source would differ."""
    file = f"model-rank-{rank}-part-0.safetensors"
    _, stop = spans(out / file)[f"{EXPERTS}.{name}"]
    return file, stop - 1 if name.endswith("scale") else stop - 16


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "name", ["w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias"]
)
def test_a_consistent_forgery_of_a_weight_is_caught_by_the_source(
    name: str, rank: int, folder: Folder
) -> None:
    file, tensor = f"model-rank-{rank}-part-0.safetensors", f"{EXPERTS}.{name}"
    flip(folder.out / file, data_of(folder.out, rank, name))
    reseal(folder.out)
    assert problems_of(folder.out) == ()
    (problem,) = problems_of(folder.out, folder.source)
    assert problem.tensor == tensor
    assert "bytes differ from" in problem.what


@pytest.mark.parametrize("name", ["w13_weight", "w2_weight", "w13_bias"])
def test_a_forgery_is_placed_on_the_rank_that_holds_it(name: str, folder: Folder) -> None:
    tensor = f"{EXPERTS}.{name}"
    flip(folder.out / RANK_1, data_of(folder.out, 1, name))
    forged(folder, (RANK_1, tensor, 1))


def test_a_forgery_of_a_common_tensor_is_caught_by_the_source(folder: Folder) -> None:
    name = "model.embed_tokens.weight"
    flip(folder.out / COMMON, spans(folder.out / COMMON)[name][0])
    forged(folder, (COMMON, name, None))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["w13_weight", "w2_weight", "w13_weight_scale"])
def test_a_forgery_of_the_padding_is_caught_by_the_source(
    name: str, rank: int, folder: Folder
) -> None:
    file, byte = padding_of(folder.out, rank, name)
    assert (folder.out / file).read_bytes()[byte] == 0
    flip(folder.out / file, byte)
    forged(folder, (file, f"{EXPERTS}.{name}", rank))


def test_a_forgery_of_the_padding_is_not_restored(folder: Folder) -> None:
    file, byte = padding_of(folder.out, 0, "w13_weight")
    flip(folder.out / file, byte)
    reseal(folder.out)
    with pytest.raises(DataMismatch, match="the padding of"):
        restore(folder.out, folder.out.parent / "back")
    assert not (folder.out.parent / "back").exists()


@pytest.mark.parametrize("name", ["w13_weight", "w2_weight", "w13_weight_scale", "w13_bias"])
def test_a_forged_swap_of_two_ranks_is_caught_by_the_source(name: str, folder: Folder) -> None:
    tensor = f"{EXPERTS}.{name}"
    swap_tensors((folder.out / RANK_0, tensor), (folder.out / RANK_1, tensor))
    reseal(folder.out)
    assert problems_of(folder.out) == ()
    assert {problem.tensor for problem in problems_of(folder.out, folder.source)} == {tensor}


def test_a_forged_swap_of_two_layers_is_caught_by_the_source(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", layers=2)
    prepare(source, tmp_path / "out", 2)
    names = [f"model.layers.{layer}.mlp.experts.w2_weight" for layer in (0, 1)]
    for rank in (0, 1):
        shard = tmp_path / "out" / f"model-rank-{rank}-part-0.safetensors"
        swap_tensors((shard, names[0]), (shard, names[1]))
    reseal(tmp_path / "out")
    assert problems_of(tmp_path / "out") == ()
    against = problems_of(tmp_path / "out", source)
    assert {problem.tensor for problem in against} == set(names)


def test_a_forged_config_is_caught_by_the_source(folder: Folder) -> None:
    config = json.loads((folder.out / "config.json").read_text("utf-8"))
    config["num_experts_per_tok"] = 9
    (folder.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    forged(folder, ("config.json", None, None))


def test_a_forged_small_file_is_caught_by_the_source(folder: Folder) -> None:
    (folder.out / "tokenizer.json").write_text('{"tiny": null}', "utf-8")
    forged(folder, ("tokenizer.json", None, None))


def test_a_small_file_that_was_left_out_is_caught_by_the_source(folder: Folder) -> None:
    (folder.out / "tokenizer.json").unlink()
    edit(folder.out, lambda manifest: manifest["files"].pop())
    forged(folder, ("tokenizer.json", None, None))


def test_a_small_file_that_the_source_does_not_have_is_caught_by_it(folder: Folder) -> None:
    (folder.out / "planted.py").write_text("", "utf-8")
    entry = {"name": "planted.py", "size": 0, "digest": ""}
    edit(folder.out, lambda manifest: manifest["files"].append(entry))
    forged(folder, ("planted.py", None, None))


def drop_common(folder: Folder, name: str) -> None:
    """Take a common tensor out of its shard and the manifest."""
    tensors = tiny.read_shard(folder.out / COMMON)
    del tensors[name]
    tiny.write_shard(folder.out / COMMON, tensors, tiny.read_metadata(folder.out / COMMON))
    edit(
        folder.out,
        lambda manifest: manifest.update(
            tensors=[tensor for tensor in manifest["tensors"] if tensor["name"] != name]
        ),
    )


def test_a_tensor_that_was_left_out_is_caught_by_the_source(folder: Folder) -> None:
    drop_common(folder, "model.norm.weight")
    reseal(folder.out)
    assert problems_of(folder.out) == ()
    assert ("model.norm.weight", "of the source is not in the folder") in {
        (problem.tensor, problem.what) for problem in problems_of(folder.out, folder.source)
    }


def test_a_tensor_that_was_left_out_with_a_made_up_reason_is_caught_by_the_source(
    folder: Folder,
) -> None:
    drop_common(folder, "model.norm.weight")
    skipped = {"name": "model.norm.weight", "reason": "not needed"}
    edit(folder.out, lambda manifest: manifest["skipped"].append(skipped))
    forged(folder)


def test_the_source_of_another_revision_is_told(folder: Folder, tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "other", kind="mxfp4_gpt_oss", hidden=64, intermediate=96, seed=1)
    problems = problems_of(folder.out, other)
    assert {problem.tensor for problem in problems} >= {f"{EXPERTS}.w13_weight"}
    other = tiny.write(tmp_path / "larger", kind="mxfp4_gpt_oss", hidden=64, intermediate=128)
    assert any("is another tensor" in problem.what for problem in problems_of(folder.out, other))


# What a forger may write into the manifest while every byte of the shards stays as it is.
LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "is_shuffled": lambda t: t.update(is_shuffled=False),
    "runtime_dtype": lambda t: t.update(runtime_dtype="float8_e4m3fn"),
    "logical_shape": lambda t: t.update(logical_shape=[2, 2, 2]),
    "pads": lambda t: t.update(pads=[]),
    "packing": lambda t: t.update(packing="int4_of_eight"),
    "layout": lambda t: t.update(layout="row_major"),
    "experts": lambda t: t.update(experts=[0, 1, 1]),
    "matrix": lambda t: t.update(matrix=[t["matrix"][0] // 2, t["matrix"][1] * 2, t["matrix"][2]]),
    "source rows": lambda t: t["source"][0].update(rows=[2, 98, 2]),
    "to_row": lambda t: t["source"][0].update(to_row=16),
    "pattern": lambda t: t["source"][0].update(pattern=f"{EXPERTS}.down_proj_blocks"),
    "source dtype": lambda t: t["source"][0].update(dtype="I8"),
    "source shape": lambda t: t["source"][0].update(shape=[2, 192, 32]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_of_the_manifest_about_a_tensor_is_caught_by_the_source(
    lie: str, folder: Folder
) -> None:
    name = f"{EXPERTS}.w13_weight"

    def change(manifest: dict[str, Any]) -> None:
        LIES[lie](next(t for t in manifest["tensors"] if (t["name"], t["rank"]) == (name, 0)))

    edit(folder.out, change)
    with suppress(AiterPrepError):
        assert problems_of(folder.out, folder.source)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("target", "gfx"), "gfx942"),
        (("target", "name"), "vllm@0.33"),
        (("target", "engine"), "vllm"),
        (("model", "blocks", 0, "row_order"), "interleaved_16"),
        (("model", "blocks", 0, "hidden"), 4096),
        (("model", "blocks", 0, "padded_intermediate_per_rank"), 1),
        (("model", "blocks", 0, "scheme"), "bf16"),
        (("model", "architecture"), "LlamaForCausalLM"),
        (("layouts", "tile_16x16", "row_order"), "interleaved_16"),
    ],
)
def test_a_lie_of_the_manifest_about_the_whole_is_caught_by_the_source(
    place: Place, value: Any, folder: Folder
) -> None:
    """An engine chooses kernels by these: garbage without an error if they are wrong."""
    document = changed(load(folder.out), place, value)
    (folder.out / MANIFEST).write_bytes(sealed(document))
    with suppress(AiterPrepError):
        assert problems_of(folder.out, folder.source)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_shuffled", "false"),
        ("layouts", "{}"),
        ("format", "np"),
        ("aiter_prep", '{"format_version":1,"gfx":"gfx942","rank":1,"target":"aiter","tp":2}'),
    ],
)
def test_a_forged_metadata_of_a_shard_is_caught_by_the_source(
    key: str, value: str, folder: Folder
) -> None:
    path = folder.out / RANK_0
    metadata = {**tiny.read_metadata(path), key: value}
    tensors = tiny.read_shard(path)
    order = sorted(tensors, key=lambda name: spans(path)[name])
    tiny.write_shard(path, {name: tensors[name] for name in order}, metadata)
    forged(folder)


# --- somebody who writes meanwhile ----------------------------------------------------------------


@pytest.mark.parametrize("file", [RANK_0, COMMON, "tokenizer.json", MANIFEST])
def test_a_file_that_is_written_while_it_is_verified_is_named(file: str, folder: Folder) -> None:
    """Even if the bytes are the same again: what was read may be a mixture."""
    data = (folder.out / file).read_bytes()
    written: list[str] = []

    def write_once(progress: Progress) -> None:
        if not written and progress.done_bytes * 2 > progress.total_bytes:
            written.append(file)
            (folder.out / file).write_bytes(data)

    problems = verify(folder.out, source=folder.checkpoint, progress=write_once).problems
    assert written
    assert problems == (Problem(file, None, None, "changed while it was read"),)


# --- holes --------------------------------------------------------------------------------------


def forget_an_expert(manifest: dict[str, Any]) -> None:
    """Say of a tensor that it holds the first expert alone; the other one is padding, then."""
    for tensor in manifest["tensors"]:
        if tensor["name"] == f"{EXPERTS}.w13_bias":
            tensor.update(experts=[0, 1, 1], form="folded")


def test_experts_that_a_forged_manifest_forgets_are_not_restored_as_zeros(folder: Folder) -> None:
    edit(folder.out, forget_an_expert)
    with pytest.raises(DataMismatch):
        restore(folder.out, folder.out.parent / "back")
    assert not (folder.out.parent / "back").exists()
    with suppress(AiterPrepError):
        assert problems_of(folder.out, folder.source)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "x.bin"])
def test_a_forged_small_file_does_not_take_the_place_of_restored_weights(
    name: str, folder: Folder
) -> None:
    (folder.out / name).write_bytes(b"planted")
    entry = {"name": name, "size": 7, "digest": ""}
    edit(folder.out, lambda manifest: manifest["files"].append(entry))
    reseal(folder.out)
    for verb in (verify, inspect_path, lambda out: restore(out, out.parent / "back")):
        with pytest.raises(DataMismatch, match="contradicts the rest of it"):
            verb(folder.out)


# --- hostile manifests --------------------------------------------------------------------------

WRONG: tuple[Any, ...] = (None, True, -2, 0, 10**15, 0.5, "x", "\0", [], [[]], [0], {}, {"a": 1})
# Big numbers are left to a test of their own: they ask for memory.
HARMLESS = tuple(value for value in WRONG if value != 10**15)


def faults(folder: Folder, values: tuple[Any, ...], *, with_source: bool) -> set[str]:
    """Return what `verify` fails with, other than with an error for the user."""
    document = load(folder.out)
    checkpoint = folder.checkpoint if with_source else None
    seen: set[str] = set()
    for place, value in distinct(document):
        for other in values if place else ():
            if type(other) is type(value) and other == value:
                continue
            (folder.out / MANIFEST).write_bytes(sealed(changed(document, place, other)))
            try:
                verify(folder.out, source=checkpoint, quick=not with_source)
            except AiterPrepError:
                continue
            except Exception as fault:  # noqa: BLE001 - that is the question
                seen.add(f"{type(fault).__name__} at {'/'.join(map(str, kind_of(place)))}")
    return seen


def test_a_hostile_manifest_is_damage_and_never_a_traceback(folder: Folder) -> None:
    assert faults(folder, (None, -2, [[]]), with_source=False) == set()


@pytest.mark.slow
def test_a_hostile_manifest_is_damage_and_never_a_traceback_against_the_source(
    folder: Folder,
) -> None:
    assert faults(folder, HARMLESS, with_source=True) == set()


def test_a_hostile_manifest_asks_for_no_memory(folder: Folder) -> None:
    def change(manifest: dict[str, Any]) -> None:
        for tensor in manifest["tensors"]:
            if tensor["matrix"] is not None:
                tensor["matrix"] = [2**24, 2**24, 2**24]

    edit(folder.out, change)
    with suppress(AiterPrepError):
        assert problems_of(folder.out, folder.source)


@pytest.mark.parametrize("name", ["../outside.txt", "sub/../../outside.txt"])
def test_a_manifest_that_names_a_file_outside_writes_none(name: str, folder: Folder) -> None:
    """A folder from somebody else must not write beside the folder that the user named."""
    if name.startswith("sub"):
        (folder.out / "sub").mkdir()
    (folder.out / name).write_text("planted", "utf-8")
    target = folder.out.parent / "elsewhere"
    target.mkdir()

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"].append({"name": name, "size": 7, "digest": ""})

    edit(folder.out, change)
    reseal(folder.out)
    with pytest.raises(DataMismatch):
        restore(folder.out, target / "back")
    assert not (target / "outside.txt").exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname"])
def test_a_manifest_that_names_a_shard_outside_is_damage(name: str, folder: Folder) -> None:
    shutil.copy(folder.out / COMMON, folder.out.parent / "outside.safetensors")

    def change(manifest: dict[str, Any]) -> None:
        for entry in (*manifest["shards"], *manifest["tensors"]):
            if entry["file"] == COMMON:
                entry["file"] = name

    edit(folder.out, change)
    with pytest.raises(DataMismatch):
        verify(folder.out)


# --- restore ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (RANK_0, f"{EXPERTS}.w13_weight"),
        (RANK_1, f"{EXPERTS}.w2_bias"),
        (COMMON, "model.norm.weight"),
    ],
)
def test_damaged_bytes_are_not_restored(file: str, name: str, folder: Folder) -> None:
    flip(folder.out / file, spans(folder.out / file)[name][0])
    with pytest.raises(DataMismatch):
        restore(folder.out, folder.out.parent / "back")
    assert {path.name for path in folder.out.parent.iterdir()} == {"out"}


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_damaged_small_files_are_not_restored(file: str, folder: Folder) -> None:
    flip(folder.out / file, 1)
    with pytest.raises(DataMismatch, match="has other bytes than the manifest says"):
        restore(folder.out, folder.out.parent / "back")
    assert {path.name for path in folder.out.parent.iterdir()} == {"out"}


@pytest.mark.parametrize("change", ["truncated", "missing", "header", "small file missing"])
def test_damage_of_a_prepared_folder_has_the_exit_code_of_damage(
    change: str, folder: Folder
) -> None:
    path = folder.out / RANK_1
    if change == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif change == "missing":
        path.unlink()
    elif change == "header":
        flip(path, 0)
    else:
        (folder.out / "tokenizer.json").unlink()
    with pytest.raises(AiterPrepError) as caught:
        restore(folder.out, folder.out.parent / "back")
    assert caught.value.exit_code == DataMismatch.exit_code == 3


def test_restore_writes_nothing_into_the_prepared_folder(folder: Folder) -> None:
    before = contents(folder.out)
    with pytest.raises(AiterPrepError):
        restore(folder.out, folder.out / "back")
    assert contents(folder.out) == before
    assert verify(folder.out).is_clean


def test_restore_replaces_nothing(folder: Folder) -> None:
    back = folder.out.parent / "back"
    back.mkdir()
    (back / "thesis.tex").write_text("mine", "utf-8")
    with pytest.raises(AiterPrepError, match="holds something already") as caught:
        restore(folder.out, back)
    assert caught.value.exit_code == 12
    assert contents(back).keys() == {"thesis.tex"}
    with pytest.raises(AiterPrepError, match="holds something already"):
        restore(folder.out, back / "thesis.tex")


def test_a_link_to_an_empty_folder_is_restored_into(folder: Folder) -> None:
    place = folder.out.parent / "place"
    place.mkdir()
    (folder.out.parent / "back").symlink_to(place)
    restore(folder.out, folder.out.parent / "back")
    assert tiny.read_folder(place) == tiny.read_folder(folder.source)


def test_a_failing_disk_leaves_no_half_restored_folder(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(AiterPrepError, match="No space left"):
        restore(folder.out, folder.out.parent / "back")
    assert {path.name for path in folder.out.parent.iterdir()} == {"out"}
