"""The header of a shard is read with suspicion: each lie is refused, and none is printed raw."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load

import tiny
from aiter_prep.errors import AiterPrepError, BadSource, NoRule
from aiter_prep.storage.digest import digest_of
from aiter_prep.storage.dtypes import BITS, bits_of, bytes_of, width_of
from aiter_prep.storage.header import MAX_HEADER_BYTES, Header, read_header


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read(folder: Path, raw: bytes) -> Header:
    path = folder / "model.safetensors"
    path.write_bytes(raw)
    return read_header(path)


def refusal(folder: Path, raw: bytes) -> AiterPrepError:
    """Return the refusal of a file, which must be one that a user can read."""
    with pytest.raises((BadSource, NoRule)) as caught:
        read(folder, raw)
    fault: AiterPrepError = caught.value
    assert "model.safetensors" in fault.message
    assert (fault.message + fault.hint).isprintable()
    assert len(fault.message) < 1000
    return fault


# --- what is sound ------------------------------------------------------------------------------


def test_a_header_says_where_each_tensor_lies(tmp_path: Path) -> None:
    tensors = {
        "b": tiny.Tensor("BF16", (2, 3), bytes(12)),
        "a": tiny.Tensor("F8_E4M3", (5,), bytes(5)),
        "empty": tiny.Tensor("F32", (0, 7), b""),
        "scalar": tiny.Tensor("F32", (), bytes(4)),
    }
    path = tmp_path / "shard.safetensors"
    tiny.write_shard(path, tensors, {"format": "pt", "note": "ü"})
    header = read_header(path)
    raw = path.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    assert [(t.name, t.dtype, t.shape, t.start - start, t.total_bytes) for t in header.tensors] == [
        ("b", "BF16", (2, 3), 0, 12),
        ("a", "F8_E4M3", (5,), 12, 5),
        ("empty", "F32", (0, 7), 17, 0),
        ("scalar", "F32", (), 17, 4),
    ]
    assert {tensor.file for tensor in header.tensors} == {"shard.safetensors"}
    assert header.metadata == {"format": "pt", "note": "ü"}
    assert header.file_bytes == len(raw)
    assert header.mtime_ns == path.stat().st_mtime_ns
    assert header.digest == digest_of(raw[:start])


def test_tensors_come_in_the_order_of_their_offsets_whatever_the_order_of_their_names(
    tmp_path: Path,
) -> None:
    header = read(
        tmp_path,
        tiny.file_of({"x": entry(offsets=[4, 8]), "y": entry(offsets=[0, 4])}, bytes(8)),
    )
    assert [tensor.name for tensor in header.tensors] == ["y", "x"]


def test_a_header_may_be_padded_with_spaces_and_have_no_metadata(tmp_path: Path) -> None:
    text = json.dumps({"x": entry()}).encode() + b" " * 99
    assert read(tmp_path, tiny.file_of(text, bytes(4))).metadata == {}


def test_a_file_without_tensors_is_sound(tmp_path: Path) -> None:
    assert read(tmp_path, tiny.file_of({})).tensors == ()


@given(
    st.lists(
        st.tuples(st.sampled_from(["U8", "BF16", "F32"]), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_what_safetensors_reads_we_read_alike(
    tmp_path_factory: pytest.TempPathFactory, specs: list[tuple[str, list[int]]]
) -> None:
    tensors: tiny.Tensors = {}
    for number, (dtype, shape) in enumerate(specs):
        size = bytes_of(dtype, tuple(shape))
        assert size is not None
        tensors[f"t{number}"] = tiny.Tensor(dtype, tuple(shape), bytes(size))
    path = tmp_path_factory.mktemp("shard") / "model.safetensors"
    tiny.write_shard(path, tensors)
    found = {tensor.name: tensor.shape for tensor in read_header(path).tensors}
    assert found == {name: tensor.shape for name, tensor in tensors.items()}
    if not any(dtype == "BF16" for dtype, _ in specs):  # which numpy does not know
        assert {name: array.shape for name, array in load(path.read_bytes()).items()} == found


# --- lies ---------------------------------------------------------------------------------------

LIES: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "is truncated: 0 bytes cannot hold a header"),
    "no whole length": (b"\1\0\0", "is truncated: 3 bytes cannot hold a header"),
    "length beyond the file": (
        tiny.file_of({"x": entry()}, bytes(4), length=500),
        "says it is 500 bytes long, but the file has only",
    ),
    "length one too long": (
        tiny.file_of({}, length=3),
        "says it is 3 bytes long, but the file has only 10 bytes",
    ),
    "huge length": (
        tiny.file_of({}, length=2**64 - 1),
        f"says it is {2**64 - 1} bytes long, the limit is {MAX_HEADER_BYTES}",
    ),
    "length at the sign bit": (tiny.file_of({}, length=2**63), "the limit is"),
    "length just over the limit": (tiny.file_of({}, length=MAX_HEADER_BYTES + 1), "the limit is"),
    "length too short": (tiny.file_of({"x": entry()}, bytes(4), length=20), "not valid JSON"),
    "empty header": (tiny.file_of(b""), "not valid JSON"),
    "not JSON": (tiny.file_of(b"hello"), "not valid JSON"),
    "not UTF-8": (tiny.file_of(b'{"\xff": 1}'), "not valid JSON"),
    "a list": (tiny.file_of([]), "is a JSON list, not an object"),
    "a number": (tiny.file_of(7), "is a JSON int, not an object"),
    "two documents": (tiny.file_of(b"{}{}"), "not valid JSON"),
    "truncated data": (tiny.file_of({"x": entry()}, bytes(3)), "is truncated"),
    "no data": (tiny.file_of({"x": entry()}), "is truncated"),
    "trailing bytes": (tiny.file_of({"x": entry()}, bytes(5)), "has bytes after its last tensor"),
    "trailing bytes, no tensor": (tiny.file_of({}, b"!"), "has bytes after its last tensor"),
    "a hole at the start": (
        tiny.file_of({"x": entry(offsets=[1, 5])}, bytes(5)),
        "`x` in `model.safetensors` follows a hole",
    ),
    "a hole": (
        tiny.file_of({"x": entry(), "y": entry(offsets=[5, 9])}, bytes(9)),
        "`y` in `model.safetensors` follows a hole",
    ),
    "an overlap": (
        tiny.file_of({"x": entry(), "y": entry(offsets=[3, 7])}, bytes(7)),
        "`y` in `model.safetensors` overlaps the one before it",
    ),
    "the same place twice": (
        tiny.file_of({"x": entry(), "y": entry()}, bytes(4)),
        "overlaps the one before it",
    ),
    "inside another": (
        tiny.file_of(
            {"x": entry(shape=[8], offsets=[0, 8]), "y": entry(shape=[2], offsets=[2, 4])}, bytes(8)
        ),
        "`y` in `model.safetensors` overlaps",
    ),
    "out of range": (
        tiny.file_of({"x": entry(shape=[4], offsets=[2**62, 2**62 + 4])}, bytes(4)),
        "follows a hole",
    ),
    "beyond 64 bits": (
        tiny.file_of({"x": entry(offsets=[2**64, 2**64 + 4])}, bytes(4)),
        "follows a hole",
    ),
    "ends before it starts": (tiny.file_of({"x": entry(offsets=[4, 0])}, bytes(4)), "offsets"),
    "negative offset": (tiny.file_of({"x": entry(offsets=[-4, 0])}, bytes(4)), "offsets"),
    "size disagrees with shape": (
        tiny.file_of({"x": entry(shape=[5])}, bytes(4)),
        r"has 4 bytes, but U8 [5] takes 5",
    ),
    "size disagrees with dtype": (
        tiny.file_of({"x": entry(dtype="BF16")}, bytes(4)),
        r"has 4 bytes, but BF16 [4] takes 8",
    ),
    "half a byte": (
        tiny.file_of({"x": entry(dtype="F4", shape=[7])}, bytes(4)),
        "has 4 bytes, but F4 [7] takes",
    ),
    "negative dimension": (
        tiny.file_of({"x": entry(shape=[-1, -4])}, bytes(4)),
        "has the impossible shape [-1, -4]",
    ),
    "dimension that overflows": (
        tiny.file_of({"x": entry(shape=[2**63, 2, 4])}, bytes(4)),
        "has the impossible shape",
    ),
    "product that overflows": (
        tiny.file_of({"x": entry(shape=[2**32, 2**32, 4])}, bytes(4)),
        "has 4 bytes, but U8",
    ),
    "float dimension": (tiny.file_of({"x": entry(shape=[4.0])}, bytes(4)), "impossible shape"),
    "true as a dimension": (
        tiny.file_of({"x": entry(shape=[True, 4])}, bytes(4)),
        "impossible shape",
    ),
    "null as a dimension": (tiny.file_of({"x": entry(shape=[None])}, bytes(4)), "impossible"),
    "text as a dimension": (tiny.file_of({"x": entry(shape=["4"])}, bytes(4)), "impossible"),
    "text as a shape": (tiny.file_of({"x": entry(shape="4")}, bytes(4)), "of the wrong kind"),
    "number as a shape": (tiny.file_of({"x": entry(shape=4)}, bytes(4)), "of the wrong kind"),
    "object as a shape": (tiny.file_of({"x": entry(shape={})}, bytes(4)), "of the wrong kind"),
    "float offsets": (tiny.file_of({"x": entry(offsets=[0.0, 4.0])}, bytes(4)), "offsets"),
    "true as an offset": (
        tiny.file_of({"x": entry(shape=[1], offsets=[False, True])}, bytes(1)),
        "offsets",
    ),
    "text offsets": (tiny.file_of({"x": entry(offsets="04")}, bytes(4)), "offsets"),
    "one offset": (tiny.file_of({"x": entry(offsets=[4])}, bytes(4)), "two data offsets"),
    "three offsets": (tiny.file_of({"x": entry(offsets=[0, 2, 4])}, bytes(4)), "two data offsets"),
    "no offsets": (tiny.file_of({"x": {"dtype": "U8", "shape": [4]}}, bytes(4)), "data offsets"),
    "no dtype": (tiny.file_of({"x": {"shape": [4], "data_offsets": [0, 4]}}, bytes(4)), "a dtype"),
    "no shape": (tiny.file_of({"x": {"dtype": "U8", "data_offsets": [0, 4]}}, bytes(4)), "a shape"),
    "a field too many": (
        tiny.file_of({"x": {**entry(), "stride": [1]}}, bytes(4)),
        "of the wrong kind",
    ),
    "dtype is no text": (tiny.file_of({"x": entry(dtype=8)}, bytes(4)), "of the wrong kind"),
    "dtype is a list": (tiny.file_of({"x": entry(dtype=["U8"])}, bytes(4)), "of the wrong kind"),
    "entry is a list": (tiny.file_of({"x": [1, 2, 3]}, bytes(4)), "lacks a dtype"),
    "entry is null": (tiny.file_of({"x": None}, bytes(4)), "lacks a dtype"),
    "entry is text": (tiny.file_of({"x": "U8"}, bytes(4)), "lacks a dtype"),
    "a name twice": (
        tiny.file_of(
            b'{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
            b'"x":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}',
            bytes(4),
        ),
        "the key `x` stands twice",
    ),
    "a field twice": (
        tiny.file_of(
            b'{"x":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', bytes(4)
        ),
        "the key `dtype` stands twice",
    ),
    "metadata twice": (
        tiny.file_of(b'{"__metadata__":{},"__metadata__":{}}'),
        "the key `__metadata__` stands twice",
    ),
    "metadata is a list": (tiny.file_of({"__metadata__": []}), "not an object of strings"),
    "metadata is null": (tiny.file_of({"__metadata__": None}), "not an object of strings"),
    "metadata of numbers": (tiny.file_of({"__metadata__": {"a": 1}}), "not an object of strings"),
    "not a number": (
        tiny.file_of(b'{"x":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)),
        "NaN is not a JSON number",
    ),
    "infinite": (
        tiny.file_of(b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,Infinity]}}', bytes(4)),
        "Infinity is not a JSON number",
    ),
    "deeply nested": (tiny.file_of(b'{"x":' + b"[" * 200_000, bytes(4)), "nested too deeply"),
    "deeply nested and closed": (
        tiny.file_of(b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
        "nested too deeply",
    ),
    "an integer of 5000 digits": (
        tiny.file_of(b'{"x":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'),
        "",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    raw, message = LIES[lie]
    fault = refusal(tmp_path, raw)
    assert isinstance(fault, BadSource)
    assert message in fault.message


@pytest.mark.parametrize("lie", LIES)
def test_the_formats_own_reader_refuses_the_same_lies_but_for_a_few(lie: str) -> None:
    lenient = {"a name twice", "a field too many", "metadata is null", "metadata twice"}
    if lie not in lenient:
        with pytest.raises(SafetensorError):
            load(LIES[lie][0])


@pytest.mark.parametrize("dtype", ["F8_E3M4", "float32", "f32", "", "BF16 ", "F128", "U4"])
def test_an_unknown_dtype_is_refused_by_name(dtype: str, tmp_path: Path) -> None:
    fault = refusal(tmp_path, tiny.file_of({"x": entry(dtype=dtype)}, bytes(4)))
    assert isinstance(fault, NoRule)
    assert f"`{dtype}`" in fault.message
    assert "`x`" in fault.message
    assert "F8_E8M0" in fault.hint


NASTY = {
    "NUL": "a\0b",
    "newline": "a\nb",
    "escape": "\x1b]0;owned\x07",
    "clear screen": "\x1b[2J",
    "carriage return": "ok\rBAD",
    "backspace": "a\b\b\b",
    "C1 control": "\x9b31m",
    "right to left": "\u202egpj.exe",
    "zero width": "a\u200bb",
    "lone surrogate": "\ud800",
    "delete": "a\x7f",
}


@pytest.mark.parametrize("name", NASTY.values(), ids=NASTY.keys())
@pytest.mark.parametrize("where", ["hole", "entry", "dtype", "shape", "twice", "metadata"])
def test_control_characters_in_a_name_are_never_printed_raw(
    where: str, name: str, tmp_path: Path
) -> None:
    headers: dict[str, Any] = {
        "hole": {name: entry(offsets=[1, 5])},
        "entry": {name: 5},
        "dtype": {name: entry(dtype=name)},
        "shape": {name: entry(shape=[name])},
        "twice": json.dumps({name: entry()}).encode()[:-1]
        + b","
        + json.dumps({name: entry()}).encode()[1:],
        "metadata": {"__metadata__": {name: 1}},
    }
    fault = refusal(tmp_path, tiny.file_of(headers[where], bytes(5)))
    assert name not in fault.message


def test_a_name_of_ten_megabytes_is_cut_in_the_message(tmp_path: Path) -> None:
    fault = refusal(tmp_path, tiny.file_of({"n" * 10_000_000: 5}))
    assert "(10000000 characters)" in fault.message


@pytest.mark.parametrize("dtype", ["x" * 100_000, "\x1b" * 1000])
def test_a_long_dtype_is_cut_in_the_message(dtype: str, tmp_path: Path) -> None:
    refusal(tmp_path, tiny.file_of({"x": entry(dtype=dtype)}, bytes(4)))


def test_a_shape_of_very_many_dimensions_is_refused(tmp_path: Path) -> None:
    fault = refusal(tmp_path, tiny.file_of({"x": entry(shape=[2] * 290)}, bytes(4)))
    assert isinstance(fault, BadSource)


def test_a_shape_whose_product_has_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    """Python refuses to write integers of more than 4300 digits: a ValueError of its own."""
    fault = refusal(tmp_path, tiny.file_of({"x": entry(shape=[2**48] * 400)}, bytes(4)))
    assert isinstance(fault, BadSource)


def test_an_offset_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    begin = 10**4300 - 10  # the largest integers that Python reads, and cannot write one more of
    refusal(tmp_path, tiny.file_of({"x": entry(offsets=[begin, begin + 4])}, bytes(4)))


def test_a_shape_whose_product_takes_long_to_compute_is_refused_at_once(tmp_path: Path) -> None:
    """A header may be 100 MB: at 40,000 dimensions it is a second, at a million half an hour."""
    raw = tiny.file_of({"x": entry(shape=[2**48] * 40_000)}, bytes(4))
    begin = time.process_time()
    refusal(tmp_path, raw)
    assert time.process_time() - begin < 1


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    check_no_other_failure(tmp_path_factory, raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BITS, "X", ""]) | JSON,
        "shape": st.lists(st.integers(-1, 9) | JSON, max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40) | JSON, min_size=1, max_size=3) | JSON,
    }
)
HEADER = st.dictionaries(st.text(max_size=5) | st.just("__metadata__"), ENTRY | JSON, max_size=4)


@settings(max_examples=60)
@given(HEADER, st.integers(0, 64))
def test_random_headers_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], size: int
) -> None:
    check_no_other_failure(tmp_path_factory, tiny.file_of(header, bytes(size)))


def check_no_other_failure(factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = factory.getbasetemp() / "random.safetensors"
    path.write_bytes(raw)
    header, said = None, ""
    try:
        header = read_header(path)
    except (BadSource, NoRule) as fault:
        said = fault.message + fault.hint
    assert said.isprintable()
    assert header is None or sum(t.total_bytes for t in header.tensors) <= len(raw)


# --- no regular file ----------------------------------------------------------------------------


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadSource, match=r"shard `gone\.safetensors` is missing"):
        read_header(tmp_path / "gone.safetensors")


def test_a_folder_is_no_shard(tmp_path: Path) -> None:
    with pytest.raises(BadSource, match="is not a regular file"):
        read_header(tmp_path)


def test_a_pipe_is_no_shard_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(BadSource, match=r"`pipe\.safetensors` is not a regular file"):
        read_header(tmp_path / "pipe.safetensors")


def test_a_device_is_no_shard() -> None:
    with pytest.raises(BadSource, match="`zero` is not a regular file"):
        read_header(Path("/dev/zero"))


def test_a_dangling_link_is_missing(tmp_path: Path) -> None:
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadSource, match="is missing"):
        read_header(tmp_path / "link.safetensors")


def test_a_link_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    with pytest.raises(BadSource):
        read_header(tmp_path / "loop.safetensors")


# --- dtypes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("U8", (), 1),
        ("BF16", (3, 5), 30),
        ("F32", (0, 5), 0),
        ("F4", (6,), 3),
        ("F4", (7,), None),
        ("F6_E2M3", (4,), 3),
        ("F6_E3M2", (3,), None),
        ("C64", (2,), 16),
        ("BOOL", (9,), 9),
    ],
)
def test_the_size_follows_from_dtype_and_shape(
    dtype: str, shape: tuple[int, ...], size: int | None
) -> None:
    assert bytes_of(dtype, shape) == size


def test_every_dtype_has_a_width_of_a_whole_byte_at_least() -> None:
    assert {name for name in BITS if width_of(name) * 8 != bits_of(name)} == {
        "F4",
        "F6_E2M3",
        "F6_E3M2",
    }
    with pytest.raises(NoRule, match="dtype `int8` is not known"):
        bits_of("int8")
