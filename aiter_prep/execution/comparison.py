"""Compares what jobs would write with what a prepared folder holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiter_prep.storage.header import read_header
from aiter_prep.storage.reader import FolderReader

if TYPE_CHECKING:
    from pathlib import Path

    from aiter_prep.manifest import Manifest, TensorRecord
    from aiter_prep.storage.buffers import Bytes
    from aiter_prep.storage.output import Written


class ComparisonSink:
    """Takes the bytes of output tensors and compares them with a folder's.

    Args:
        folder: The prepared folder.
        manifest: Its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._reader = FolderReader(folder)
        self._records = {(record.rank, record.name): record for record in manifest.tensors}
        self._infos = {
            (shard.rank, info.name): info
            for shard in manifest.shards
            for info in read_header(folder / shard.file).tensors
        }
        self._different: dict[tuple[int | None, str], TensorRecord] = {}

    @property
    def different(self) -> list[TensorRecord]:
        """The tensors that differ."""
        return list(self._different.values())

    def is_finished(self, rank: int | None, name: str) -> bool:
        """Return whether the folder has no such tensor."""
        return (rank, name) not in self._infos

    def total_bytes(self, rank: int | None, name: str) -> int:
        """Return the size of a tensor."""
        return self._infos[rank, name].total_bytes

    def write(self, rank: int | None, name: str, offset: int, data: Bytes) -> None:
        """Compare some bytes of a tensor."""
        info = self._infos[rank, name]
        ours = np.frombuffer(data, np.uint8)
        if offset + ours.nbytes > info.total_bytes:
            self._different[rank, name] = self._records[rank, name]
            return
        theirs = np.empty(ours.nbytes, np.uint8)
        self._reader.read_into(info.file, info.start + offset, theirs)
        if not np.array_equal(ours, theirs):
            self._different[rank, name] = self._records[rank, name]

    def complete(self, rank: int | None, name: str, written: Written) -> None:
        """Nothing is left to do."""
