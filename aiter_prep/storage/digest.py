"""Digests that carry the name of their algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiter_prep.storage.buffers import Bytes

ALGORITHM = "xxh3-128"
TREE_ALGORITHM = "xxh3-128-tree"


class Digest:
    """A digest in the making."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Bytes) -> None:
        """Take in the next bytes."""
        self._state.update(data)

    def text(self) -> str:
        """Return `xxh3-128:` and 32 hexadecimal digits for the bytes so far."""
        return f"{ALGORITHM}:{self._state.hexdigest()}"


def digest_of(data: Bytes) -> str:
    """Return the digest of some bytes."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


def tree_digest(header: str, tensors: Iterable[str]) -> str:
    """Return the digest of a shard from those of its parts.

    A shard is its header and its tensors with no byte between, so the digest of the header and
    of each tensor, in the order of the file, stand for every byte. The text that is hashed is
    these digests, one a line.
    """
    lines = "\n".join([header, *tensors]).encode()
    return f"{TREE_ALGORITHM}:{xxhash.xxh3_128_hexdigest(lines)}"
