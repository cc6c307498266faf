"""Compares a prepared folder with what an engine's expert layers hold, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from aiter_prep.manifest import Manifest, TensorRecord
from conformance.dump_format import Bytes, RankDump


def differences(folder: Path, manifest: Manifest, dump: RankDump, rank: int) -> Iterator[str]:
    """Yields a line for each thing that differs; bytes that the engine never writes are masked."""
    ours = {record.name: record for record in manifest.tensors if record.rank == rank}
    for name in sorted(ours.keys() ^ dump.tensors.keys()):
        yield f"{name} is only in {'the folder' if name in ours else 'the engine'}"
    for name in sorted(ours.keys() & dump.tensors.keys()):
        record, facts = ours[name], dump.tensors[name]
        if (record.shape, record.runtime_dtype) != (facts.shape, facts.runtime_dtype):
            yield (
                f"{name} is {record.runtime_dtype} {record.shape}, the engine has "
                f"{facts.runtime_dtype} {facts.shape}"
            )
            continue
        different = stored_bytes(folder, record) != dump.data[name]
        mask = dump.masks.get(name)
        if mask is not None:
            different &= mask == 0
        if different.any():
            yield f"{name}: {int(different.sum())} of {different.size} bytes differ"


def unflagged(dump: RankDump) -> set[str]:
    """The weights on which the engine leaves no flag of AITER's."""
    weights = {name for name in dump.tensors if name.endswith(("w13_weight", "w2_weight"))}
    return {name for name in weights if not dump.tensors[name].is_shuffled}


def stored_bytes(folder: Path, record: TensorRecord) -> Bytes:
    """The bytes of one tensor, read by hand: no reader knows every dtype."""
    with (folder / record.file).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        first, last = json.loads(file.read(size))[record.name]["data_offsets"]
        file.seek(8 + size + first)
        return np.frombuffer(file.read(last - first), np.uint8)
