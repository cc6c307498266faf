"""Packings: what AITER does to bytes after they are laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aiter_prep.errors import NoRule

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiter_prep.storage.buffers import ByteArray


@dataclass(frozen=True, slots=True)
class Packing:
    """A change of width after the layout, over the bytes of a matrix in storage order.

    Attributes:
        name: What manifests call it.
        meaning: What it does, for people.
        ratio: Bytes before for each byte afterwards.
        forward: uint8 `[..., n]` to uint8 `[..., n / ratio]`.
        inverse: The way back.

    Law: `inverse(forward(x)) == x` for every `x` that the packing is for.
    """

    name: str
    meaning: str
    ratio: int
    forward: Callable[[ByteArray], ByteArray]
    inverse: Callable[[ByteArray], ByteArray]


def _pack_eights(data: ByteArray) -> ByteArray:
    """Mirrors aiter/ops/shuffle.py::pack_int8_to_packed_int4."""
    eights = data.reshape(*data.shape[:-1], -1, 2, 4) & 0x0F
    packed = eights[..., 0, :] | (eights[..., 1, :] << 4)
    return packed.reshape(*data.shape[:-1], -1).astype(np.uint8)


def _unpack_eights(data: ByteArray) -> ByteArray:
    fours = data.reshape(*data.shape[:-1], -1, 4)
    nibbles = np.stack([fours & 0x0F, fours >> 4], axis=-2)
    signed = (nibbles ^ 0x08) - np.uint8(8)  # 8 to 15 are negative
    return signed.reshape(*data.shape[:-1], -1).astype(np.uint8)


PACKINGS: dict[str, Packing] = {
    "int4_of_eight": Packing(
        "int4_of_eight",
        "of eight signed bytes v0 to v7, byte i holds v(i) low and v(i + 4) high",
        2,
        _pack_eights,
        _unpack_eights,
    )
}


def packing_named(name: str) -> Packing:
    """Return the packing of this name.

    Raises:
        NoRule: There is none.
    """
    try:
        return PACKINGS[name]
    except KeyError:
        raise NoRule(
            f"packing `{name}` is not known", f"known packings: {', '.join(PACKINGS)}"
        ) from None
