"""Cuts the laying out of many experts into pieces that are laid out alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from aiter_prep.layouts.permutation import REST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiter_prep.backends.table import PlacedPart
    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.storage.buffers import ByteArray


@dataclass(frozen=True, slots=True)
class Slice:
    """What one laying out takes and gives.

    Attributes:
        parts: uint8 `[experts, rows, columns]` each, and the row and byte at which it begins.
        stored: C-contiguous uint8 `[experts, rows, row_bytes]`, filled with padding already.
    """

    parts: tuple[PlacedPart, ...]
    stored: ByteArray

    @property
    def is_covered(self) -> bool:
        """Whether the parts leave no padding."""
        return sum(part.nbytes for part, _, _ in self.parts) == self.stored.nbytes

    def assemble_into(self, matrix: ByteArray) -> None:
        """Write the logical matrices, padding included, into a buffer of the shape of `stored`."""
        if not self.is_covered:
            matrix[...] = self.stored
        for part, row, column in self.parts:
            _, rows, columns = part.shape
            matrix[:, row : row + rows, column : column + columns] = part


def cut(layout: Layout, whole: Slice, most_bytes: int) -> Iterator[Slice]:
    """Cut into slices of at most so many bytes, each a laying out of its own.

    An expert that is larger is cut into runs of tiles; what cannot be cut stays larger.

    Law: laying out every slice lays out the whole.
    """
    experts, rows, row_bytes = whole.stored.shape
    at_once = max(1, most_bytes // max(1, rows * row_bytes))
    for first in range(0, experts, at_once):
        yield from _tiles(layout, _experts(whole, first, first + at_once), most_bytes)


def _experts(whole: Slice, start: int, stop: int) -> Slice:
    parts = tuple((part[start:stop], row, column) for part, row, column in whole.parts)
    return Slice(parts, whole.stored[start:stop])


def _tiles(layout: Layout, whole: Slice, most_bytes: int) -> Iterator[Slice]:
    """Cut one expert along the outermost digit of its storage, if that is one of the row's."""
    experts, rows, row_bytes = whole.stored.shape
    tile_rows = layout.row_multiple()
    rest = layout.rows.index(REST)
    if whole.stored.nbytes <= most_bytes or experts > 1 or layout.order[0] != rest:
        yield whole
        return
    at_once = max(1, most_bytes // (tile_rows * row_bytes))
    for first in range(0, rows // tile_rows, at_once):
        last = min(first + at_once, rows // tile_rows)
        bytes_ = whole.stored.reshape(-1)[first * tile_rows * row_bytes :]
        size = (last - first) * tile_rows * row_bytes
        stored = bytes_[:size].reshape(1, -1, row_bytes)
        yield Slice(tuple(_parts_of_tiles(layout, whole, first, last)), stored)


def _parts_of_tiles(layout: Layout, whole: Slice, first: int, last: int) -> Iterator[PlacedPart]:
    """Yield what lies in tiles `[first, last)`: a run of rows, or one of each of gate and up."""
    rest = layout.rows.index(REST)
    groups, within = prod(layout.rows[:rest]), prod(layout.rows[rest + 1 :])
    group_rows = whole.stored.shape[1] // groups
    for group in range(groups):
        start, stop = (group * group_rows + tile * within for tile in (first, last))
        to_row = group * (stop - start)
        for part, row, column in whole.parts:
            low, high = max(row, start), min(row + part.shape[1], stop)
            if low < high:
                yield part[:, low - row : high - row], to_row + low - start, column
