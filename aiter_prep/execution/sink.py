"""What jobs write into: shards, or a comparison with shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aiter_prep.storage.buffers import Bytes
    from aiter_prep.storage.output import Written


class Sink(Protocol):
    """Takes the bytes of output tensors; safe to share between threads."""

    def is_finished(self, rank: int | None, name: str) -> bool:
        """Return whether a tensor needs no writing."""

    def total_bytes(self, rank: int | None, name: str) -> int:
        """Return the size of a tensor."""

    def write(self, rank: int | None, name: str, offset: int, data: Bytes) -> None:
        """Take some bytes of a tensor, `offset` bytes behind its start."""

    def complete(self, rank: int | None, name: str, written: Written) -> None:
        """Take note that a tensor is written."""
