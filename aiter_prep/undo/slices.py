"""What the slices of a stored matrix are: where their bytes lie, and what lies between them."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from aiter_prep.errors import DataMismatch, NoRule
from aiter_prep.layouts.conversions import conversion_named
from aiter_prep.layouts.packing import packing_named
from aiter_prep.storage.jsontext import printable
from aiter_prep.undo.records import DamagedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from aiter_prep.layouts.conversions import Conversion
    from aiter_prep.layouts.packing import Packing
    from aiter_prep.manifest import SourceSlice, TensorRecord
    from aiter_prep.storage.buffers import ByteArray


def stored_matrix(record: TensorRecord) -> tuple[int, int, int]:
    """Return rows, bytes of a row, and those of them that the layout has not added.

    Raises:
        DataMismatch: The manifest names no matrix.
    """
    if record.matrix is None:
        raise DataMismatch(f"the manifest names no matrix for `{record.name}`")
    return record.matrix


def source_matrix(item: SourceSlice) -> tuple[int, int]:
    """Return the rows and bytes per row of an expert's matrix in the source."""
    shape = item.shape[1:] if item.fused else item.shape
    if item.transposed:
        shape = shape[::-1]
    return (shape[0] if shape else 1), item.row_bytes


def source_offset(item: SourceSlice, expert: int) -> int:
    """Return the byte of a source tensor at which an expert's matrix begins."""
    return expert * prod(source_matrix(item)) if item.fused else 0


def packing_of(record: TensorRecord) -> Packing | None:
    """Return the packing of a stored tensor."""
    return None if record.packing is None else packing_named(record.packing)


def expert_bytes(record: TensorRecord) -> int:
    """Return the stored bytes of one expert."""
    rows, row_bytes, _ = stored_matrix(record)
    packing = packing_of(record)
    return rows * row_bytes // (packing.ratio if packing else 1)


def unlisted_loss(records: Sequence[TensorRecord]) -> Conversion | None:
    """Return the conversion that lost bytes which the manifest does not list, or None."""
    for record in records:
        if record.lost is not None and record.lost.positions is None:
            return _conversion(record.source[0])
    return None


def source_part(
    record: TensorRecord, item: SourceSlice, matrices: ByteArray, first: int
) -> ByteArray:
    """Return the source bytes of one slice of stored matrices.

    Args:
        record: The stored tensor.
        item: One of its slices.
        matrices: uint8 `[experts, rows, row_bytes]`, their layout undone.
        first: How many experts of the tensor lie before these.

    Returns:
        uint8 `[experts, rows of the slice, bytes]`; a view where nothing was converted.

    Raises:
        DamagedTensor: The conversion does not make such bytes. Its inverse alone would not tell:
            it may throw bits away.
    """
    conversion = _conversion(item)
    rows, width = len(range(*item.rows)), _stored_width(item)
    stored = matrices[:, item.to_row : item.to_row + rows, :width]
    if conversion is None:
        return stored
    stored = np.ascontiguousarray(stored)
    part = conversion.inverse(stored)
    if record.lost is not None:
        part = part.copy()
        places = _lost_places(record, first, len(matrices)) - np.array([0, item.to_row, 0])
        inside = (places[:, 1] >= 0) & (places[:, 1] < rows) & (places[:, 2] < width)
        part[tuple(places[inside].T)] = record.lost.source
    if not _makes(conversion, part, stored):
        raise DamagedTensor(
            record,
            f"`{printable(record.name)}` of rank {record.rank} in `{record.file}` holds bytes that "
            f"{conversion.name} makes of no source",
        )
    return part


def _makes(conversion: Conversion, part: ByteArray, stored: ByteArray) -> bool:
    try:
        return np.array_equal(conversion.forward(part), stored)
    except NoRule:  # it refuses such a value
        return False


def _lost_places(record: TensorRecord, first: int, experts: int) -> npt.NDArray[np.int64]:
    """Return expert, row and column of every listed lost byte in some stored matrices."""
    listed = record.lost.positions if record.lost is not None else None
    rows, row_bytes, _ = stored_matrix(record)
    places = np.array(listed or (), np.int64) - first * rows * row_bytes
    places = places[(places >= 0) & (places < experts * rows * row_bytes)]
    return np.stack(np.unravel_index(places, (experts, rows, row_bytes)), axis=1)


def wrong_padding(record: TensorRecord, matrices: ByteArray, pad_byte: int) -> list[int]:
    """Return how many bytes outside the slices are not what padding consists of.

    Args:
        record: The stored tensor.
        matrices: uint8 `[experts, rows, row_bytes]`, their layout undone.
        pad_byte: What the layout's own padding consists of.

    Returns:
        A number for each expert.

    Raises:
        DataMismatch: The slices lie over each other.
    """
    _, row_bytes, filled = stored_matrix(record)
    element = bytes.fromhex(record.fill)
    fill = np.frombuffer((element * (filled // len(element) + 1))[:filled], np.uint8)
    wrong = np.zeros(len(matrices), np.int64)

    def count(part: ByteArray, wanted: ByteArray | int) -> None:
        if part.size:
            wrong[:] += np.count_nonzero(part != wanted, axis=(1, 2))

    row = 0
    for item in sorted(record.source, key=lambda item: item.to_row):
        end = item.to_row + len(range(*item.rows))
        if item.to_row < row or end > matrices.shape[1]:
            raise DataMismatch(f"the slices of `{record.name}` lie over each other")
        width = _stored_width(item)
        count(matrices[:, row : item.to_row, :filled], fill)
        count(matrices[:, item.to_row : end, width:filled], fill[width:])
        row = end
    count(matrices[:, row:, :filled], fill)
    count(matrices[:, :, filled:row_bytes], pad_byte)
    return wrong.tolist()


def repeated_slices(holders: Sequence[TensorRecord]) -> frozenset[tuple[int | None, int]]:
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
        rows, row_bytes = source_matrix(slices[0][2])
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


def _stored_width(item: SourceSlice) -> int:
    """Return how many bytes of a stored row a slice fills."""
    conversion = _conversion(item)
    width = item.columns[1] - item.columns[0]
    if conversion is None:
        return width
    return width // conversion.source_bytes * conversion.stored_bytes


def _conversion(item: SourceSlice) -> Conversion | None:
    return None if item.conversion is None else conversion_named(item.conversion)
