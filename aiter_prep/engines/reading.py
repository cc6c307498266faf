"""Reads tensors of a prepared folder straight into the memory that will hold them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aiter_prep.errors import BadSource, DataMismatch, InvalidUsage
from aiter_prep.storage.digest import Digest, digest_of
from aiter_prep.storage.header import read_header
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.reader import FolderReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from aiter_prep.manifest import Manifest, ShardRecord, TensorRecord

MAX_READERS = 4
GROUP_BYTES = 256 * 1024 * 1024
STAGING_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a prepared folder, and where its bytes lie.

    Attributes:
        record: What the manifest says of it.
        start: Offset of its first byte in its file.
        total_bytes: Its size.
    """

    record: TensorRecord
    start: int
    total_bytes: int


Destination = tuple[StoredTensor, torch.Tensor]
"""A tensor to read, and the uint8 memory, flat and contiguous, that gets its bytes."""


def stored_tensors(folder: Path, manifest: Manifest, rank: int | None) -> list[StoredTensor]:
    """Return the tensors of one rank, or the common ones (None), by where they lie.

    Raises:
        InvalidUsage: The folder does not hold that rank.
        DataMismatch: A shard is missing, or its size or header is not what the manifest says.
    """
    if rank is not None:
        _check_rank(folder, manifest, rank)
    records = {(r.file, r.name): r for r in manifest.tensors if r.rank == rank}
    found: list[StoredTensor] = []
    for shard in manifest.shards:
        if shard.rank == rank:
            found += _tensors_of_shard(folder, shard, records)
    if records:
        file, name = next(iter(records))
        raise DataMismatch(f"`{printable(file)}` does not hold `{printable(name)}`")
    return found


def _check_rank(folder: Path, manifest: Manifest, rank: int) -> None:
    ranks = manifest.target["ranks"]
    if rank not in ranks:
        shown = ", ".join(map(str, ranks))
        raise InvalidUsage(
            f"`{printable(str(folder))}` holds no rank {rank}: it has {shown}",
            "prepare the source again with --tp or --ep for as many ranks as will run",
        )


def _tensors_of_shard(
    folder: Path, shard: ShardRecord, records: dict[tuple[str, str], TensorRecord]
) -> Iterator[StoredTensor]:
    """Yield a shard's tensors, and take them out of `records`."""
    name = printable(shard.file)
    try:
        header = read_header(folder / shard.file)
    except BadSource as fault:
        raise DataMismatch(fault.message, "prepare the source again") from None
    if (header.file_bytes, header.digest) != (shard.size, shard.header_digest):
        raise DataMismatch(f"`{name}` is not the file that the manifest describes")
    for info in header.tensors:
        record = records.pop((shard.file, info.name), None)
        if record is None or (record.dtype, record.shape) != (info.dtype, info.shape):
            raise DataMismatch(
                f"`{name}` holds `{printable(info.name)}` {info.dtype} {list(info.shape)}, which "
                "is not what the manifest says"
            )
        yield StoredTensor(record, info.start, info.total_bytes)


def read_tensors(
    folder: Path, destinations: Sequence[Destination], *, check_digests: bool = False
) -> None:
    """Fill memory with the bytes of tensors.

    Memory of the CPU is what the system call writes into: tensors that follow each other in a
    file are read by one call, whatever their number. Memory of a device is filled through one
    staging buffer.

    Args:
        folder: The prepared folder.
        destinations: What to read, and where to; the memory of each is as long as its tensor.
        check_digests: Compare what was read with the digests of the manifest.

    Raises:
        DataMismatch: A file is cut short, or a digest is not what the manifest says.
    """
    here = [pair for pair in destinations if pair[1].device.type == "cpu"]
    there = [pair for pair in destinations if pair[1].device.type != "cpu"]
    try:
        with FolderReader(folder) as reader:
            _read_here(reader, here)
            digests = _read_there(reader, there)
    except BadSource as fault:
        raise DataMismatch(fault.message, fault.hint) from None
    if check_digests:
        digests |= {stored.record.name: digest_of(memory.numpy()) for stored, memory in here}
        for stored, _ in destinations:
            check_digest(stored.record, digests[stored.record.name])


def _read_here(reader: FolderReader, destinations: Sequence[Destination]) -> None:
    ranges = [(stored.record.file, stored.start, memory.numpy()) for stored, memory in destinations]
    ranges.sort(key=lambda item: item[:2])
    groups: list[list[int]] = [[]]
    size = 0
    for number, (_, _, array) in enumerate(ranges):
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(number)
        size += array.nbytes
    workers = max(1, min(MAX_READERS, len(groups), os.cpu_count() or 1))
    with ThreadPoolExecutor(workers, "aiter-prep-read") as pool:
        # a list: an exception of a reader comes out of here
        list(pool.map(lambda group: reader.read_all([ranges[n] for n in group]), groups))


def _read_there(reader: FolderReader, destinations: Sequence[Destination]) -> dict[str, str]:
    """Fill memory of devices; return the digests of what went there."""
    largest = max((stored.total_bytes for stored, _ in destinations), default=0)
    pinned = any(memory.device.type == "cuda" for _, memory in destinations)
    staging = torch.empty(min(STAGING_BYTES, largest), dtype=torch.uint8, pin_memory=pinned)
    digests: dict[str, str] = {}
    for stored, memory in sorted(destinations, key=lambda p: (p[0].record.file, p[0].start)):
        digest = Digest()
        for offset in range(0, stored.total_bytes, STAGING_BYTES):
            part = staging[: stored.total_bytes - offset]
            reader.read_into(stored.record.file, stored.start + offset, part.numpy())
            memory[offset : offset + len(part)].copy_(part)
            digest.update(part.numpy())
        digests[stored.record.name] = digest.text()
    return digests


def check_digest(record: TensorRecord, found: str) -> None:
    """Compare the digest of what was read with that of the manifest.

    Raises:
        DataMismatch: It is another.
    """
    if found != record.digest:
        raise DataMismatch(
            f"`{printable(record.name)}` in `{printable(record.file)}` has the digest {found}, the "
            f"manifest says {record.digest}",
            "see what else changed with `aiter-prep verify`",
        )
