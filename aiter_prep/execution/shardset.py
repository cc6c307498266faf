"""The shards of a run: opened when first written, finished when their last tensor is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from aiter_prep.plan.shards import Shard
    from aiter_prep.storage.buffers import Bytes
    from aiter_prep.storage.output import ShardFile, Written
    from aiter_prep.storage.shard import ShardLayout


class Store(Protocol):
    """Where shards are written: a prepared folder in the making, or what one waits for."""

    @property
    def finished(self) -> Container[str]:
        """Names of the shards that need no writing."""

    def create(self, layout: ShardLayout) -> ShardFile:
        """Begin a shard."""

    def finish(self, shard: ShardFile, tensors: Mapping[str, Written]) -> None:
        """Take a shard that is whole."""


class ShardSet:
    """Knows where every tensor goes, and when a shard is whole; safe to share between threads.

    Args:
        output: Where they go.
        shards: All shards of the plan; those that are finished already are left alone.
    """

    def __init__(self, output: Store, shards: Iterable[Shard]) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._shards = {shard.file: shard for shard in shards}
        self._place = {
            (shard.rank, name): (shard, slot)
            for shard in self._shards.values()
            for name, slot in shard.layout.slots.items()
        }
        self._open: dict[str, ShardFile] = {}
        self._written: dict[str, dict[str, Written]] = {file: {} for file in self._shards}

    def is_finished(self, rank: int | None, name: str) -> bool:
        """Return whether a tensor lies in a shard that was finished before."""
        return self._place[rank, name][0].file in self._output.finished

    def total_bytes(self, rank: int | None, name: str) -> int:
        """Return the size of a tensor."""
        return self._place[rank, name][1].total_bytes

    def write(self, rank: int | None, name: str, offset: int, data: Bytes) -> None:
        """Write some bytes of a tensor, `offset` bytes behind its start."""
        shard, slot = self._place[rank, name]
        self._opened(shard).write(slot.start + offset, data)

    def complete(self, rank: int | None, name: str, written: Written) -> None:
        """Note that a tensor is written; the last one of a shard finishes it."""
        shard, _ = self._place[rank, name]
        self._opened(shard)
        with self._lock:
            tensors = self._written[shard.file]
            tensors[name] = written
            if len(tensors) < len(shard.layout.slots):
                return
            file = self._open.pop(shard.file)
        self._output.finish(file, tensors)

    def discard(self) -> None:
        """Give back the space of every shard that is not finished."""
        with self._lock:
            for file in self._open.values():
                file.discard()
            self._open.clear()

    def _opened(self, shard: Shard) -> ShardFile:
        with self._lock:
            file = self._open.get(shard.file)
            if file is None:
                file = self._open[shard.file] = self._output.create(shard.layout)
            return file
