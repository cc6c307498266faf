"""Undoes a prepared folder: from its manifest alone back to the source's matrices."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from aiter_prep.errors import AiterPrepError, DataMismatch, NoRule
from aiter_prep.layouts.conversions import conversion_named
from aiter_prep.layouts.packing import packing_named
from aiter_prep.storage.digest import Digest
from aiter_prep.storage.dtypes import width_of
from aiter_prep.storage.header import read_header
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from aiter_prep.layouts.conversions import Conversion
    from aiter_prep.layouts.packing import Packing
    from aiter_prep.manifest import Manifest, SourceSlice, TensorRecord
    from aiter_prep.storage.buffers import ByteArray
    from aiter_prep.storage.header import TensorInfo
    from aiter_prep.storage.reader import FolderReader


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor as the source has it.

    Attributes:
        name: Its name.
        dtype: safetensors dtype.
        shape: Elements along each axis.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Size of the data."""
        return prod(self.shape) * width_of(self.dtype)


@dataclass(frozen=True, slots=True)
class Undone:
    """One expert's matrix, put together from all ranks.

    Attributes:
        tensor: The source tensor that holds it.
        expert: Global id.
        offset: Byte of the tensor at which the matrix begins.
        matrix: uint8 `[rows, row_bytes]`, as in the source but for what a conversion lost.
        lossy: The conversion that lost bytes which the manifest does not list, or None.
    """

    tensor: SourceTensor
    expert: int
    offset: int
    matrix: ByteArray
    lossy: Conversion | None


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


@dataclass(frozen=True, slots=True)
class StackRecord:
    """The records of one name on all ranks, in the order of the ranks."""

    name: str
    records: tuple[TensorRecord, ...]


def stacks_of(manifest: Manifest) -> list[StackRecord]:
    """Return the prepared tensors of a manifest that can be undone, grouped by name."""
    groups: dict[str, list[TensorRecord]] = defaultdict(list)
    lossy = {record.name for record in manifest.lossy}
    for record in manifest.tensors:
        if record.rank is not None and record.name not in lossy:
            groups[record.name].append(record)
    return [
        StackRecord(name, tuple(sorted(records, key=lambda r: r.rank or 0)))
        for name, records in groups.items()
    ]


def source_tensors(stack: StackRecord) -> dict[str, SourceTensor]:
    """Return the source tensors that a stack was made of, by name."""
    found: dict[str, SourceTensor] = {}
    for record in stack.records:
        for item in record.source:
            for expert in _experts(record):
                name = tensor_name(record, item, expert)
                found.setdefault(name, SourceTensor(name, item.dtype, item.shape))
    return found


def tensor_name(record: TensorRecord, item: SourceSlice, expert: int) -> str:
    """Return the name of the source tensor that holds an expert."""
    if item.shared is not None and expert == _experts(record)[-1]:
        return item.shared
    return item.pattern if item.fused else item.pattern.replace("{expert}", str(expert))


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
            raise DataMismatch(f"`{record.file}` does not hold `{record.name}` as promised")
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
        for expert in sorted({e for record in stack.records for e in _experts(record)}):
            holders = tuple(r for r in stack.records if expert in _experts(r))
            yield from self._undo_expert(holders, expert, digests, known)
        for record in stack.records:
            if (bad := self._bad_tail(record, digests[record.rank])) is not None:
                yield bad
            if digests[record.rank].text() != record.digest:
                raise DataMismatch(
                    f"`{record.name}` of rank {record.rank} in `{record.file}` has other bytes "
                    "than the manifest says",
                    "`aiter-prep verify` lists all that is damaged",
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
                    raise DataMismatch(
                        f"`{record.name}`: rank {record.rank} disagrees with another rank on "
                        f"`{tensor_name(record, item, expert)}`"
                    )
            pad_byte = self._manifest.layout(record.layout or "").pad_byte
            wrong = _count_bad_padding(record, logical, pad_byte)
            if wrong:
                yield BadPadding(record, expert, wrong)
        for item, matrix in matrices.values():
            name = tensor_name(holders[0], item, expert)
            tensor = SourceTensor(name, item.dtype, item.shape)
            whole = _turned(matrix, width_of(item.dtype)) if item.transposed else matrix
            yield Undone(tensor, expert, _offset(item, expert), whole, _lossy(holders))

    def _logical(self, record: TensorRecord, expert: int, digest: Digest) -> ByteArray:
        """Return one expert's stored matrix with its layout undone: uint8 `[rows, row_bytes]`."""
        rows, row_bytes, _ = _matrix(record)
        packing = _packing(record)
        stored = np.empty(_expert_bytes(record), np.uint8)
        index = _experts(record).index(expert)
        info = self.info(record)
        self._reader.read_into(info.file, info.start + index * stored.nbytes, stored)
        digest.update(stored)
        if packing is not None:
            stored = packing.inverse(stored)
        return self._manifest.layout(record.layout or "").invert(stored.reshape(rows, row_bytes))

    def _bad_tail(self, record: TensorRecord, digest: Digest) -> BadPadding | None:
        """Check the padding behind the last expert of a folded tensor."""
        info = self.info(record)
        filled = len(_experts(record)) * _expert_bytes(record)
        if filled > info.total_bytes:
            raise DataMismatch(f"`{record.name}` is too small for its experts")
        tail = np.empty(info.total_bytes - filled, np.uint8)
        self._reader.read_into(info.file, info.start + filled, tail)
        digest.update(tail)
        pad_byte = self._manifest.layout(record.layout or "").pad_byte
        wrong = int(np.count_nonzero(tail != pad_byte))
        return BadPadding(record, None, wrong) if wrong else None


_NOWHERE = np.empty((0, 2), np.int64)


def _part(
    record: TensorRecord, item: SourceSlice, logical: ByteArray, lost: npt.NDArray[np.int64]
) -> ByteArray:
    """Return the source bytes of one slice of a stored matrix; `lost` are row and column."""
    conversion = _conversion(item)
    rows, width = len(range(*item.rows)), _stored_width(item)
    part = logical[item.to_row : item.to_row + rows, :width].copy()
    if conversion is not None:
        part = conversion.inverse(part)
    if record.lost is not None:
        places = lost - np.array([item.to_row, 0])
        inside = (places[:, 0] >= 0) & (places[:, 0] < rows) & (places[:, 1] < width)
        part[tuple(places[inside].T)] = record.lost.source
    return part


def _lost_in(record: TensorRecord, expert: int) -> npt.NDArray[np.int64]:
    """Return row and column of every listed lost byte in an expert's stored matrix."""
    if record.lost is None or record.lost.positions is None:
        return _NOWHERE
    rows, row_bytes, _ = _matrix(record)
    start = _experts(record).index(expert) * rows * row_bytes
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


def _experts(record: TensorRecord) -> range:
    if record.experts is None:
        raise DataMismatch(f"the manifest names no experts for `{record.name}`")
    return range(*record.experts)


def _matrix(record: TensorRecord) -> tuple[int, int, int]:
    if record.matrix is None:
        raise DataMismatch(f"the manifest names no matrix for `{record.name}`")
    return record.matrix


def _turned(matrix: ByteArray, width: int) -> ByteArray:
    """Return a matrix of elements of `width` bytes as `[columns, rows]`."""
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


def require_all_ranks(manifest: Manifest, what: str) -> None:
    """Check that the folder holds every rank.

    Raises:
        NoRule: It was written for some ranks only.
    """
    ranks = manifest.target["ranks"]
    count = manifest.target["tp"] * manifest.target["ep"]
    if len(ranks) != count:
        raise NoRule(
            f"{what} needs all {count} ranks, but this folder holds only {ranks}",
            "convert again without --ranks",
        )


def require_lossless(manifest: Manifest) -> None:
    """Check that every tensor can be undone.

    Raises:
        NoRule: One cannot.
    """
    if manifest.lossy:
        record = manifest.lossy[0]
        how = manifest.conversions.get(record.merge or "", "one value stands for many")
        raise NoRule(
            f"`{printable(record.name)}` cannot be undone: {how} ({len(manifest.lossy)} such)",
            "keep the source: it is the only way back",
        )


def common_records(manifest: Manifest) -> Sequence[TensorRecord]:
    """Return the records of the tensors that every rank has."""
    return [record for record in manifest.tensors if record.rank is None]


def accounted(manifest: Manifest) -> Mapping[str, SourceTensor]:
    """Return every source tensor that the folder was made of, by name."""
    found: dict[str, SourceTensor] = {}
    for record in manifest.tensors:
        if record.rank is not None:
            for name, tensor in source_tensors(StackRecord(record.name, (record,))).items():
                if found.setdefault(name, tensor) != tensor:
                    raise DataMismatch(f"the manifest knows two kinds of `{printable(name)}`")
    for record in common_records(manifest):
        if record.name in found:
            raise DataMismatch(f"the manifest knows two kinds of `{printable(record.name)}`")
        found[record.name] = SourceTensor(record.name, record.dtype, record.shape)
    return found
