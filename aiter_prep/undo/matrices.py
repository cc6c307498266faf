"""Puts the matrices of experts together again from what the ranks hold of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from aiter_prep.errors import AiterPrepError, DataMismatch
from aiter_prep.storage.digest import Digest
from aiter_prep.storage.dtypes import width_of
from aiter_prep.storage.header import read_header
from aiter_prep.storage.reader import chunks
from aiter_prep.storage.scratch import Scratch
from aiter_prep.undo.records import (
    DamagedTensor,
    SourceTensor,
    StackRecord,
    experts_of,
    tensor_name,
)
from aiter_prep.undo.slices import (
    expert_bytes,
    packing_of,
    repeated_slices,
    source_matrix,
    source_offset,
    source_part,
    stored_matrix,
    unlisted_loss,
    wrong_padding,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from aiter_prep.layouts.conversions import Conversion
    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.manifest import Manifest, SourceSlice, TensorRecord
    from aiter_prep.storage.buffers import ByteArray
    from aiter_prep.storage.header import TensorInfo
    from aiter_prep.storage.reader import FolderReader

_Byte = TypeVar("_Byte", np.uint8, np.bool_)

# What is undone in one go, unless one expert is larger: enough that Python's calls cost little, and
# little enough that a rank's share is in the cache still when it is looked at again.
SHARE_BYTES = 1024 * 1024
WHOLE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Undone:
    """Matrices of some experts, put together from all ranks; valid until the next are asked for.

    Attributes:
        places: For each, the source tensor that holds it and the byte at which it begins there.
        matrices: uint8 `[experts, rows, row_bytes]`, as in the source but for what a conversion
            lost.
        lossy: The conversion that lost bytes which the manifest does not list, or None.
        slices: What the matrices were put together from, and whose it is.
    """

    places: tuple[tuple[SourceTensor, int], ...]
    matrices: ByteArray
    lossy: Conversion | None
    slices: tuple[tuple[TensorRecord, SourceSlice], ...]

    def holders_of(self, marks: npt.NDArray[np.bool_]) -> Iterator[tuple[TensorRecord, int]]:
        """Yield the records that hold some bytes of a matrix, each with how many it holds.

        Args:
            marks: Which bytes, in the shape of one matrix.
        """
        counts: dict[int | None, int] = defaultdict(int)
        records: dict[int | None, TensorRecord] = {}
        for record, item in self.slices:
            turned = _turned(marks[None], width_of(item.dtype))[0] if item.transposed else marks
            window = turned[slice(*item.rows), slice(*item.columns)]
            counts[record.rank] += int(np.count_nonzero(window))
            records[record.rank] = record
        yield from ((records[rank], count) for rank, count in counts.items() if count)


@dataclass(frozen=True, slots=True)
class BadPadding:
    """Padding that does not consist of the byte that the manifest says.

    Attributes:
        record: The tensor.
        expert: Global id, or None for the end of a folded tensor.
        count: Bytes that differ.
    """

    record: TensorRecord
    expert: int | None
    count: int


class Undoer:
    """Reads stored matrices back; safe to share between threads.

    Args:
        folder: The prepared folder.
        manifest: Its manifest.
        reader: A reader of that folder.
        advance: Called with the number of stored bytes that were read.

    Raises:
        DataMismatch: A shard's header cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        reader: FolderReader,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._manifest = manifest
        self._layouts: dict[str, Layout] = {}
        self._reader = reader
        self._advance = advance
        self._scratch = Scratch()
        try:
            headers = [read_header(folder / shard.file) for shard in manifest.shards]
        except AiterPrepError as fault:
            raise DataMismatch(fault.message, "`aiter-prep verify` lists all damage") from None
        self._infos: dict[tuple[str, str], TensorInfo] = {
            (info.file, info.name): info for header in headers for info in header.tensors
        }

    def info(self, record: TensorRecord) -> TensorInfo:
        """Return where a tensor lies.

        Raises:
            DataMismatch: Its shard does not hold it as the manifest says.
        """
        info = self._infos.get((record.file, record.name))
        if info is None or (info.dtype, info.shape) != (record.dtype, record.shape):
            raise DamagedTensor(
                record, f"`{record.file}` does not hold `{record.name}` as promised"
            )
        return info

    def undo(self, stack: StackRecord) -> Iterator[Undone | BadPadding]:
        """Yield every expert's matrices of a stack, and padding that is not as it was promised.

        The slices of all ranks must tile each source matrix, and the bytes must have the digest
        that the manifest promises; that is known when the last matrix was yielded.

        Raises:
            DataMismatch: They do not, or a shard does not hold what it should.
        """
        digests = {record.rank: Digest() for record in stack.records}
        known: dict[tuple[int | None, ...], frozenset[tuple[int | None, int]]] = {}
        for holders, experts in _runs(stack):
            ranks = tuple(record.rank for record in holders)
            if ranks not in known:
                for record in holders:
                    self.info(record)  # so that no size is larger than what lies in the folder
                known[ranks] = repeated_slices(holders)
            at_once = _experts_at_once(holders)
            for first in range(0, len(experts), at_once):
                chunk = experts[first : first + at_once]
                yield from self._undo_experts(holders, chunk, digests, known[ranks])
        for record in stack.records:
            if (bad := self._bad_tail(record, digests[record.rank])) is not None:
                yield bad
            if digests[record.rank].text() != record.digest:
                raise DamagedTensor(
                    record,
                    f"`{record.name}` of rank {record.rank} in `{record.file}` has other bytes "
                    "than the manifest says",
                )

    def _undo_experts(
        self,
        holders: Sequence[TensorRecord],
        experts: Sequence[int],
        digests: Mapping[int | None, Digest],
        repeats: frozenset[tuple[int | None, int]],
    ) -> Iterator[Undone | BadPadding]:
        """Yield what some experts hold, whose stored matrices lie one behind the other."""
        wholes: dict[str, tuple[SourceSlice, ByteArray]] = {}
        for record in holders:
            first = experts_of(record).index(experts[0])
            logical = self._logical(record, first, len(experts), digests[record.rank])
            for number, item in enumerate(record.source):
                part = source_part(record, item, logical, first)
                if item.pattern not in wholes:
                    shape = (len(experts), *source_matrix(item))
                    wholes[item.pattern] = item, self._scratch.take(f"whole {len(wholes)}", shape)
                window = wholes[item.pattern][1][:, slice(*item.rows), slice(*item.columns)]
                if (record.rank, number) not in repeats:
                    window[...] = part
                elif not np.array_equal(window, part):
                    wrong = next(
                        expert
                        for expert, one, other in zip(experts, window, part, strict=True)
                        if not np.array_equal(one, other)
                    )
                    raise DamagedTensor(
                        record,
                        f"`{record.name}`: rank {record.rank} disagrees with another rank on "
                        f"`{tensor_name(record, item, wrong)}`",
                    )
            counts = wrong_padding(record, logical, self._layout(record).pad_byte)
            for expert, count in zip(experts, counts, strict=True):
                if count:
                    yield BadPadding(record, expert, count)
        for item, whole in wholes.values():
            places = tuple(
                (
                    SourceTensor(tensor_name(holders[0], item, expert), item.dtype, item.shape),
                    source_offset(item, expert),
                )
                for expert in experts
            )
            slices = tuple(
                (record, part)
                for record in holders
                for part in record.source
                if part.pattern == item.pattern
            )
            turned = _turned(whole, width_of(item.dtype)) if item.transposed else whole
            yield Undone(places, turned, unlisted_loss(holders), slices)

    def _logical(self, record: TensorRecord, first: int, count: int, digest: Digest) -> ByteArray:
        """Return stored matrices with their layout undone: uint8 `[experts, rows, row_bytes]`."""
        rows, row_bytes, _ = stored_matrix(record)
        size = expert_bytes(record)
        info = self.info(record)
        stored = self._scratch.take("stored", (count, size))
        self._reader.read_into(info.file, info.start + first * size, stored)
        self._advance(stored.nbytes)
        digest.update(stored)
        if (packing := packing_of(record)) is not None:
            stored = packing.inverse(stored)
        shape = (count, rows, row_bytes)
        layout = self._layout(record)
        if layout.is_row_major:
            return stored.reshape(shape)
        logical, work = (self._scratch.take(name, shape) for name in ("logical", "work"))
        layout.invert_into(stored.reshape(shape), logical, work)
        return logical

    def _layout(self, record: TensorRecord) -> Layout:
        """Return a tensor's layout; the manifest would make it anew for every expert."""
        name = record.layout or ""
        if name not in self._layouts:
            self._layouts[name] = self._manifest.layout(name)
        return self._layouts[name]

    def is_intact(self, record: TensorRecord) -> bool:
        """Read a tensor, and say whether it has the digest that the manifest promises."""
        digest = Digest()
        try:
            info = self.info(record)
        except DamagedTensor:
            return False
        for _, data in chunks(info, self._reader):
            digest.update(data)
        return digest.text() == record.digest

    def _bad_tail(self, record: TensorRecord, digest: Digest) -> BadPadding | None:
        """Check the padding behind the last expert of a folded tensor."""
        info = self.info(record)
        filled = len(experts_of(record)) * expert_bytes(record)
        if filled > info.total_bytes:
            raise DamagedTensor(record, f"`{record.name}` is too small for its experts")
        tail = np.empty(info.total_bytes - filled, np.uint8)
        self._reader.read_into(info.file, info.start + filled, tail)
        self._advance(tail.nbytes)
        digest.update(tail)
        pad_byte = self._layout(record).pad_byte
        wrong = int(np.count_nonzero(tail != pad_byte))
        return BadPadding(record, None, wrong) if wrong else None


def _runs(stack: StackRecord) -> Iterator[tuple[tuple[TensorRecord, ...], list[int]]]:
    """Split the experts of a stack into runs that the same ranks hold.

    Every rank's experts come in the order in which they are stored, those of a run one behind the
    other: a run ends where one of its ranks holds the next expert with others.
    """
    holders_of: dict[int, list[TensorRecord]] = defaultdict(list)
    for record in stack.records:
        for expert in experts_of(record):
            holders_of[expert].append(record)
    runs: dict[tuple[int | None, ...], tuple[tuple[TensorRecord, ...], list[int]]] = {}
    run_of: dict[int | None, tuple[int | None, ...]] = {}
    for expert in sorted(holders_of):
        holders = tuple(holders_of[expert])
        ranks = tuple(record.rank for record in holders)
        for rank in ranks:
            last = run_of.get(rank, ranks)
            if last != ranks and last in runs:
                yield runs.pop(last)
            run_of[rank] = ranks
        runs.setdefault(ranks, (holders, []))[1].append(expert)
    yield from runs.values()


def _experts_at_once(holders: Sequence[TensorRecord]) -> int:
    share = max(prod(stored_matrix(record)[:2]) for record in holders)
    sources = {item.pattern: item for record in holders for item in record.source}
    whole = sum(prod(source_matrix(item)) for item in sources.values())
    return max(1, min(SHARE_BYTES // max(1, share), WHOLE_BYTES // max(1, whole)))


def _turned(matrices: npt.NDArray[_Byte], width: int) -> npt.NDArray[_Byte]:
    """Return matrices of elements of `width` bytes as `[columns, rows]`; twice is as before.

    Args:
        matrices: `[experts, rows, row_bytes]`.
        width: Bytes of an element.
    """
    experts, rows, row_bytes = matrices.shape
    elements = matrices.reshape(experts, rows, row_bytes // width, width)
    turned = np.ascontiguousarray(elements.transpose(0, 2, 1, 3))
    return turned.reshape(experts, row_bytes // width, -1)
