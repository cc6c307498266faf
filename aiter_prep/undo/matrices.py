"""Puts the matrices of experts together again from what the ranks hold of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from aiter_prep.errors import AiterPrepError, DataMismatch
from aiter_prep.layouts.conversions import conversion_named
from aiter_prep.layouts.packing import packing_named
from aiter_prep.storage.digest import Digest
from aiter_prep.storage.dtypes import width_of
from aiter_prep.storage.header import read_header
from aiter_prep.storage.jsontext import printable
from aiter_prep.undo.records import (
    DamagedTensor,
    SourceTensor,
    StackRecord,
    experts_of,
    tensor_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from aiter_prep.layouts.conversions import Conversion
    from aiter_prep.layouts.packing import Packing
    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.manifest import Manifest, SourceSlice, TensorRecord
    from aiter_prep.storage.buffers import ByteArray
    from aiter_prep.storage.header import TensorInfo
    from aiter_prep.storage.reader import FolderReader

_Byte = TypeVar("_Byte", np.uint8, np.bool_)


@dataclass(frozen=True, slots=True)
class Undone:
    """One expert's matrix, put together from all ranks.

    Attributes:
        tensor: The source tensor that holds it.
        expert: Global id.
        offset: Byte of the tensor at which the matrix begins.
        matrix: uint8 `[rows, row_bytes]`, as in the source but for what a conversion lost.
        lossy: The conversion that lost bytes which the manifest does not list, or None.
        slices: What the matrix was put together from, and whose it is.
    """

    tensor: SourceTensor
    expert: int
    offset: int
    matrix: ByteArray
    lossy: Conversion | None
    slices: tuple[tuple[TensorRecord, SourceSlice], ...]

    def holders_of(self, marks: npt.NDArray[np.bool_]) -> Iterator[tuple[TensorRecord, int]]:
        """Yield the records that hold some bytes of the matrix, each with how many it holds.

        Args:
            marks: Which bytes, in the shape of the matrix.
        """
        counts: dict[int | None, int] = defaultdict(int)
        records: dict[int | None, TensorRecord] = {}
        for record, item in self.slices:
            turned = _turned(marks, width_of(item.dtype)) if item.transposed else marks
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
    """Reads stored matrices back.

    Args:
        folder: The prepared folder.
        manifest: Its manifest.
        reader: A reader of that folder.

    Raises:
        DataMismatch: A shard's header cannot be read.
    """

    def __init__(self, folder: Path, manifest: Manifest, reader: FolderReader) -> None:
        self._manifest = manifest
        self._layouts: dict[str, Layout] = {}
        self._reader = reader
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
        for expert in sorted({e for record in stack.records for e in experts_of(record)}):
            holders = tuple(r for r in stack.records if expert in experts_of(r))
            yield from self._undo_expert(holders, expert, digests, known)
        for record in stack.records:
            if (bad := self._bad_tail(record, digests[record.rank])) is not None:
                yield bad
            if digests[record.rank].text() != record.digest:
                raise DamagedTensor(
                    record,
                    f"`{record.name}` of rank {record.rank} in `{record.file}` has other bytes "
                    "than the manifest says",
                )

    def _undo_expert(
        self,
        holders: tuple[TensorRecord, ...],
        expert: int,
        digests: Mapping[int | None, Digest],
        known: dict[tuple[int | None, ...], frozenset[tuple[int | None, int]]],
    ) -> Iterator[Undone | BadPadding]:
        ranks = tuple(record.rank for record in holders)
        if ranks not in known:
            for record in holders:
                self.info(record)  # so that no size is larger than what lies in the folder
            known[ranks] = _repeats(holders)
        repeats = known[ranks]
        lost = {record.rank: _lost_in(record, expert) for record in holders if record.lost}
        matrices: dict[str, tuple[SourceSlice, ByteArray]] = {}
        for record in holders:
            logical = self._logical(record, expert, digests[record.rank])
            for number, item in enumerate(record.source):
                part = _part(record, item, logical, lost.get(record.rank, _NOWHERE))
                if item.pattern not in matrices:
                    matrices[item.pattern] = (item, np.empty(_matrix_shape(item), np.uint8))
                window = matrices[item.pattern][1][slice(*item.rows), slice(*item.columns)]
                if (record.rank, number) not in repeats:
                    window[...] = part
                elif not np.array_equal(window, part):
                    raise DamagedTensor(
                        record,
                        f"`{record.name}`: rank {record.rank} disagrees with another rank on "
                        f"`{tensor_name(record, item, expert)}`",
                    )
            pad_byte = self._layout(record).pad_byte
            wrong = _count_bad_padding(record, logical, pad_byte)
            if wrong:
                yield BadPadding(record, expert, wrong)
        for item, matrix in matrices.values():
            name = tensor_name(holders[0], item, expert)
            tensor = SourceTensor(name, item.dtype, item.shape)
            whole = _turned(matrix, width_of(item.dtype)) if item.transposed else matrix
            slices = tuple(
                (record, part)
                for record in holders
                for part in record.source
                if part.pattern == item.pattern
            )
            offset = _offset(item, expert)
            yield Undone(tensor, expert, offset, whole, _lossy(holders), slices)

    def _logical(self, record: TensorRecord, expert: int, digest: Digest) -> ByteArray:
        """Return one expert's stored matrix with its layout undone: uint8 `[rows, row_bytes]`."""
        rows, row_bytes, _ = _matrix(record)
        packing = _packing(record)
        stored = np.empty(_expert_bytes(record), np.uint8)
        index = experts_of(record).index(expert)
        info = self.info(record)
        self._reader.read_into(info.file, info.start + index * stored.nbytes, stored)
        digest.update(stored)
        if packing is not None:
            stored = packing.inverse(stored)
        return self._layout(record).invert(stored.reshape(rows, row_bytes))

    def _layout(self, record: TensorRecord) -> Layout:
        """Return a tensor's layout; the manifest would make it anew for every expert."""
        name = record.layout or ""
        if name not in self._layouts:
            self._layouts[name] = self._manifest.layout(name)
        return self._layouts[name]

    def _bad_tail(self, record: TensorRecord, digest: Digest) -> BadPadding | None:
        """Check the padding behind the last expert of a folded tensor."""
        info = self.info(record)
        filled = len(experts_of(record)) * _expert_bytes(record)
        if filled > info.total_bytes:
            raise DamagedTensor(record, f"`{record.name}` is too small for its experts")
        tail = np.empty(info.total_bytes - filled, np.uint8)
        self._reader.read_into(info.file, info.start + filled, tail)
        digest.update(tail)
        pad_byte = self._layout(record).pad_byte
        wrong = int(np.count_nonzero(tail != pad_byte))
        return BadPadding(record, None, wrong) if wrong else None


_NOWHERE = np.empty((0, 2), np.int64)


def _part(
    record: TensorRecord, item: SourceSlice, logical: ByteArray, lost: npt.NDArray[np.int64]
) -> ByteArray:
    """Return the source bytes of one slice of a stored matrix; `lost` are row and column."""
    conversion = _conversion(item)
    rows, width = len(range(*item.rows)), _stored_width(item)
    part = logical[item.to_row : item.to_row + rows, :width]
    if conversion is not None:
        part = conversion.inverse(np.ascontiguousarray(part))
    if record.lost is not None:
        part = part.copy()
        places = lost - np.array([item.to_row, 0])
        inside = (places[:, 0] >= 0) & (places[:, 0] < rows) & (places[:, 1] < width)
        part[tuple(places[inside].T)] = record.lost.source
    return part


def _lost_in(record: TensorRecord, expert: int) -> npt.NDArray[np.int64]:
    """Return row and column of every listed lost byte in an expert's stored matrix."""
    if record.lost is None or record.lost.positions is None:
        return _NOWHERE
    rows, row_bytes, _ = _matrix(record)
    start = experts_of(record).index(expert) * rows * row_bytes
    places = np.array(record.lost.positions, np.int64) - start
    places = places[(places >= 0) & (places < rows * row_bytes)]
    return np.stack(np.divmod(places, row_bytes), axis=1)


def _lossy(records: Sequence[TensorRecord]) -> Conversion | None:
    """Return the conversion that lost bytes which the manifest does not list, or None."""
    for record in records:
        if record.lost is not None and record.lost.positions is None:
            return _conversion(record.source[0])
    return None


def _stored_width(item: SourceSlice) -> int:
    """Return how many bytes of a stored row a slice fills."""
    conversion = _conversion(item)
    width = item.columns[1] - item.columns[0]
    if conversion is None:
        return width
    return width // conversion.source_bytes * conversion.stored_bytes


def _count_bad_padding(record: TensorRecord, whole: ByteArray, pad_byte: int) -> int:
    """Return how many bytes outside the slices are not what padding consists of."""
    filled_row_bytes = _matrix(record)[2]
    logical, added = whole[:, :filled_row_bytes], whole[:, filled_row_bytes:]
    wrong = int(np.count_nonzero(added != pad_byte))
    fill = _fill_row(record, filled_row_bytes)
    row = 0
    for item in sorted(record.source, key=lambda item: item.to_row):
        end = item.to_row + len(range(*item.rows))
        if item.to_row < row or end > len(logical):
            raise DataMismatch(f"the slices of `{record.name}` lie over each other")
        wrong += int(np.count_nonzero(logical[row : item.to_row] != fill))
        width = _stored_width(item)
        wrong += int(np.count_nonzero(logical[item.to_row : end, width:] != fill[width:]))
        row = end
    return wrong + int(np.count_nonzero(logical[row:] != fill))


def _fill_row(record: TensorRecord, row_bytes: int) -> ByteArray:
    """Return a row of padding."""
    element = np.frombuffer(bytes.fromhex(record.fill), np.uint8)
    return np.resize(element, row_bytes)


def _repeats(holders: tuple[TensorRecord, ...]) -> frozenset[tuple[int | None, int]]:
    """Return which slices, by rank and number, repeat what an earlier rank holds.

    Raises:
        DataMismatch: The slices do not tile their source matrices.
    """
    repeats: set[tuple[int | None, int]] = set()
    patterns: dict[str, list[tuple[int | None, int, SourceSlice]]] = defaultdict(list)
    for record in holders:
        for number, item in enumerate(record.source):
            patterns[item.pattern].append((record.rank, number, item))
    for pattern, slices in patterns.items():
        rows, row_bytes = _matrix_shape(slices[0][2])
        if rows * row_bytes > sum(_area(item) for *_, item in slices):
            raise DataMismatch(f"the ranks of the folder do not hold all of `{printable(pattern)}`")
        edges = sorted({0, row_bytes, *(edge for *_, item in slices for edge in item.columns)})
        covered = np.zeros((rows, len(edges) - 1), np.bool_)
        for rank, number, item in slices:
            columns = slice(edges.index(item.columns[0]), edges.index(item.columns[1]))
            cells = covered[slice(*item.rows), columns]
            if cells.all():
                repeats.add((rank, number))
            elif cells.any():
                raise DataMismatch(f"ranks hold overlapping parts of `{pattern}`")
            cells[...] = True
        if edges[-1] != row_bytes or not covered.all():
            raise DataMismatch(f"the ranks of the folder do not hold all of `{pattern}`")
    return frozenset(repeats)


def _area(item: SourceSlice) -> int:
    """Return the bytes of a slice."""
    return len(range(*item.rows)) * (item.columns[1] - item.columns[0])


def _matrix_shape(item: SourceSlice) -> tuple[int, int]:
    """Return the rows and bytes per row of an expert's source matrix."""
    shape = item.shape[1:] if item.fused else item.shape
    if item.transposed:
        shape = shape[::-1]
    return (shape[0] if shape else 1), item.row_bytes


def _matrix(record: TensorRecord) -> tuple[int, int, int]:
    if record.matrix is None:
        raise DataMismatch(f"the manifest names no matrix for `{record.name}`")
    return record.matrix


def _turned(matrix: npt.NDArray[_Byte], width: int) -> npt.NDArray[_Byte]:
    """Return a matrix of elements of `width` bytes as `[columns, rows]`; twice is as before."""
    rows, row_bytes = matrix.shape
    elements = matrix.reshape(rows, row_bytes // width, width)
    return np.ascontiguousarray(elements.transpose(1, 0, 2)).reshape(row_bytes // width, -1)


def _offset(item: SourceSlice, expert: int) -> int:
    return expert * prod(_matrix_shape(item)) if item.fused else 0


def _conversion(item: SourceSlice) -> Conversion | None:
    return None if item.conversion is None else conversion_named(item.conversion)


def _packing(record: TensorRecord) -> Packing | None:
    return None if record.packing is None else packing_named(record.packing)


def _expert_bytes(record: TensorRecord) -> int:
    """Return the stored bytes of one expert."""
    rows, row_bytes, _ = _matrix(record)
    packing = _packing(record)
    return rows * row_bytes // (packing.ratio if packing else 1)
