"""Where each tensor of a new shard lies, and the header that says so."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from aiter_prep.storage import jsontext
from aiter_prep.storage.dtypes import bytes_of, width_of
from aiter_prep.storage.header import PREFIX_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PAGE_BYTES = 4096


class Slot(NamedTuple):
    """One tensor of a new shard; a tuple, for a forecast makes ten thousands.

    Attributes:
        name: The tensor's name.
        dtype: safetensors dtype name.
        shape: Elements along each axis.
        start: Offset of the first byte in the file.
        total_bytes: Size of the data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """A new shard before its data is there.

    Attributes:
        file: Its name.
        header: Its first bytes: length prefix, JSON, spaces up to a page.
        slots: Its tensors, by name, in the order of the file.
        total_bytes: Size of the file.
    """

    file: str
    header: bytes
    slots: Mapping[str, Slot]
    total_bytes: int


def lay_out_shard(
    file: str,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str],
) -> ShardLayout:
    """Decide where each tensor of a shard lies.

    Tensors whose size is a multiple of a page come first, then the others by the width of their
    dtype, widest first, so that every tensor starts at a multiple of its dtype's size.

    Args:
        file: The shard's name.
        tensors: Name, dtype and shape of each.
        metadata: The `__metadata__` object.

    Raises:
        NoRule: A dtype is not known.
    """
    sized = [(name, dtype, shape, _size(name, dtype, shape)) for name, dtype, shape in tensors]
    sized.sort(key=lambda item: (item[3] % PAGE_BYTES != 0, -width_of(item[1]), item[0]))
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape, size in sized:
        entries[name] = {"data_offsets": [offset, offset + size], "dtype": dtype, "shape": shape}
        offset += size
    header = _encode(entries)
    position = len(header)
    slots: dict[str, Slot] = {}
    for name, dtype, shape, size in sized:
        slots[name] = Slot(name, dtype, shape, position, size)
        position += size
    return ShardLayout(file, header, slots, position)


def _size(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    size = bytes_of(dtype, shape)
    assert size is not None, f"{name} does not fill whole bytes"
    return size


def _encode(entries: Mapping[str, object]) -> bytes:
    text = jsontext.canonical(entries)
    text += b" " * (-(PREFIX_BYTES + len(text)) % PAGE_BYTES)
    return struct.pack("<Q", len(text)) + text
