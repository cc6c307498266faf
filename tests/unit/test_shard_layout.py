"""A new shard is laid out as format.md says."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from aiter_prep.errors import NoRule
from aiter_prep.storage.dtypes import BITS, bytes_of, width_of
from aiter_prep.storage.shard import PAGE_BYTES, ShardLayout, lay_out_shard

Spec = tuple[str, str, tuple[int, ...]]
WHOLE = [dtype for dtype, bits in BITS.items() if bits % 8 == 0]


def laid_out(*specs: Spec, metadata: dict[str, str] | None = None) -> ShardLayout:
    return lay_out_shard("s.safetensors", specs, metadata or {"format": "pt"})


def parsed(layout: ShardLayout) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", layout.header[:8])
    assert length == len(layout.header) - 8
    found: dict[str, Any] = json.loads(layout.header[8:])
    return found


@st.composite
def specs(draw: st.DrawFn) -> list[Spec]:
    """Draw tensors, some of whose sizes are whole pages."""
    names = draw(st.lists(st.text("ab.0", min_size=1, max_size=6), max_size=9, unique=True))
    found: list[Spec] = []
    for name in names:
        dtype = draw(st.sampled_from(WHOLE))
        if draw(st.booleans()):
            found.append((name, dtype, (draw(st.integers(0, 3)), PAGE_BYTES // width_of(dtype))))
        else:
            found.append((name, dtype, tuple(draw(st.lists(st.integers(0, 9), max_size=3)))))
    return found


@given(specs())
def test_a_layout_keeps_the_rules_of_the_format(wanted: list[Spec]) -> None:
    layout = laid_out(*wanted)
    slots = list(layout.slots.values())
    assert {(slot.name, slot.dtype, slot.shape) for slot in slots} == set(wanted)
    # the data begins on a page, and nothing but spaces fills the header up
    assert len(layout.header) % PAGE_BYTES == 0
    assert set(layout.header[layout.header.rindex(b"}") + 1 :]) <= {ord(" ")}
    # no hole, no overlap, to the last byte
    edges = [len(layout.header), *(slot.start + slot.total_bytes for slot in slots)]
    assert [slot.start for slot in slots] == edges[:-1]
    assert layout.total_bytes == edges[-1]
    for slot in slots:
        assert slot.total_bytes == bytes_of(slot.dtype, slot.shape)
        assert slot.start % width_of(slot.dtype) == 0
        if slot.total_bytes % PAGE_BYTES == 0:
            assert slot.start % PAGE_BYTES == 0
    # whole pages first, then the widest dtype, then by name
    keys = [(s.total_bytes % PAGE_BYTES != 0, -width_of(s.dtype), s.name) for s in slots]
    assert keys == sorted(keys)
    header = parsed(layout)
    assert header.pop("__metadata__") == {"format": "pt"}
    assert header == {
        slot.name: {
            "dtype": slot.dtype,
            "shape": list(slot.shape),
            "data_offsets": [
                slot.start - len(layout.header),
                slot.start - len(layout.header) + slot.total_bytes,
            ],
        }
        for slot in slots
    }


@given(specs(), st.randoms(use_true_random=False))
def test_the_order_of_the_call_does_not_matter(wanted: list[Spec], random: Any) -> None:
    shuffled = list(wanted)
    random.shuffle(shuffled)
    assert laid_out(*shuffled) == laid_out(*wanted)


def test_the_order_of_the_metadata_does_not_matter() -> None:
    metadata = {"format": "pt", "layouts": "{}", "is_shuffled": "false", "aiter_prep": "{}"}
    backwards = dict(reversed(metadata.items()))
    one = laid_out(("x", "U8", (1,)), metadata=metadata)
    assert one == laid_out(("x", "U8", (1,)), metadata=backwards)
    assert list(parsed(one)["__metadata__"]) == sorted(metadata)


def test_the_keys_of_the_header_are_sorted_and_there_is_no_space_between_them() -> None:
    layout = laid_out(("b", "U8", (1,)), ("a", "F32", (2,)), ("C", "I64", ()))
    text = layout.header[8:].rstrip(b" ")
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")).encode()


def test_the_format_example_comes_out_as_it_is_written_down() -> None:
    """Large tensors on pages, small ones behind them, widest first, ties by name."""
    layout = laid_out(
        ("small_u8", "U8", (5,)),
        ("weight_b", "BF16", (64, 64)),
        ("scale", "F32", (3,)),
        ("half", "F16", (3,)),
        ("weight_a", "U8", (2, 4096)),
        ("bias", "F32", (3,)),
    )
    assert list(layout.slots) == ["weight_b", "weight_a", "bias", "scale", "half", "small_u8"]
    assert [slot.start for slot in layout.slots.values()] == [
        4096,
        4096 + 8192,
        4096 + 16384,
        4096 + 16384 + 12,
        4096 + 16384 + 24,
        4096 + 16384 + 30,
    ]


@given(st.integers(0, 200))
def test_a_header_of_any_length_ends_on_a_page(count: int) -> None:
    layout = laid_out(*((f"tensor.{number}", "U8", (1,)) for number in range(count)))
    assert len(layout.header) % PAGE_BYTES == 0
    text = layout.header.rstrip(b" ")
    assert len(layout.header) - len(text) < PAGE_BYTES


def test_safetensors_reads_what_was_laid_out() -> None:
    layout = laid_out(("x", "U8", (2, 3)), ("y", "F32", (4096,)), ("z", "I64", ()))
    found = load(layout.header + bytes(layout.total_bytes - len(layout.header)))
    assert {name: array.shape for name, array in found.items()} == {
        "x": (2, 3),
        "y": (4096,),
        "z": (),
    }


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(NoRule, match="dtype `F9` is not known"):
        laid_out(("x", "F9", (1,)))


def test_a_tensor_of_half_a_byte_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="x does not fill whole bytes"):
        laid_out(("x", "F4", (3,)))


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_dtypes_narrower_than_a_byte_are_laid_out_by_their_bits(dtype: str) -> None:
    layout = laid_out(("x", dtype, (4, 8)))
    assert layout.slots["x"].total_bytes == BITS[dtype] * 4
