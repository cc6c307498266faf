"""The dtype names of the safetensors format, and how many bits an element of each takes."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from aiter_prep.errors import NoRule

# mirrors safetensors/src/tensor.rs::Dtype and Dtype::bitsize (0.7)
BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def bits_of(dtype: str) -> int:
    """Return the bits of one element.

    Raises:
        NoRule: The name is not a dtype of the format as we know it.
    """
    try:
        return BITS[dtype]
    except KeyError:
        raise NoRule(
            f"dtype `{dtype}` is not known",
            f"known dtypes: {', '.join(sorted(BITS))}",
        ) from None


@lru_cache(maxsize=4096)  # the tensors of a model have few shapes
def bytes_of(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Return the bytes of a tensor, or None if its bits do not fill whole bytes.

    Raises:
        NoRule: The dtype is not known.
    """
    bits = bits_of(dtype) * prod(shape)
    return None if bits % 8 else bits // 8


def width_of(dtype: str) -> int:
    """Return the bytes of one element, at least one; what a tensor's start is aligned to.

    Raises:
        NoRule: The dtype is not known.
    """
    return max(1, bits_of(dtype) // 8)
