"""A layout as a permutation of digits, applied to bytes.

The row and the column of a byte are written as digits of a mixed radix, and the layout says in
which order these digits make up the byte's place in storage. So applying, inverting and writing
a part of a tensor straight into its place are the same few lines for every layout.

numpy is imported where bytes are moved: a manifest describes layouts too, and to read one takes no
tenth of a second for numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import NoRule

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

    from aiter_prep.storage.buffers import ByteArray

REST = -1
ATOM_BYTES = 16
_WIDE = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which a kernel wants the bytes of a matrix.

    Attributes:
        name: What manifests call it.
        row_order: Order of the gate and up rows of w13: `separated`, `interleaved_16` or
            `interleaved_1`; `separated` also for a layout that does not reorder rows.
        rows: Radices of the row number, most significant first; one of them may be `REST`.
        columns: The same for the byte's column.
        order: Digit `order[j]` of (rows + columns) is the j-th digit of the place in storage.
        row_pad: The whole matrix is padded to a multiple of this many rows.
        column_pad: Every row is padded to a multiple of this many bytes.
        pad_byte: What this padding consists of.
        column_multiple: Bytes of a row, padding included, must be a multiple of this.
        is_shuffled: Whether the bytes lie in another order than row after row. AITER's own flag
            belongs on weights of such a layout, not on scales.
        aiter_call: The call of AITER that brings the same bytes.

    Law: `layout.invert(layout.apply(x)) == x`.
    """

    name: str
    row_order: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    order: tuple[int, ...]
    row_pad: int = 1
    column_pad: int = 1
    pad_byte: int = 0
    column_multiple: int = 1
    is_shuffled: bool = True
    aiter_call: str = ""

    def row_multiple(self) -> int:
        """Return what the rows of a matrix must be a multiple of."""
        return prod(radix for radix in self.rows if radix != REST)

    def apply(self, matrix: ByteArray) -> ByteArray:
        """Return the stored bytes of a matrix.

        Args:
            matrix: uint8 `[..., rows, columns]`, padded already; each matrix is laid out alone.

        Returns:
            uint8 of the same shape.

        Raises:
            NoRule: The rows or the columns do not fill whole tiles.
        """
        stored = _empty(matrix.shape)
        self.apply_into(matrix, stored)
        return stored

    def apply_into(
        self, matrix: ByteArray, stored: ByteArray, work: ByteArray | None = None
    ) -> None:
        """Write the stored bytes of a matrix into a C-contiguous buffer of the same shape.

        Args:
            matrix: C-contiguous uint8 `[..., rows, columns]`.
            stored: Where to write.
            work: A buffer of the same shape to work in; fresh memory by default.

        Raises:
            NoRule: The rows or the columns do not fill whole tiles.
        """
        if self.keeps_atoms or not self._tiles_are_apart:
            self.place(stored, matrix, 0)
        else:
            self._apply_by_tile(matrix, stored, _empty(matrix.shape) if work is None else work)

    def invert(self, stored: ByteArray) -> ByteArray:
        """Return the matrix whose stored bytes these are.

        Args:
            stored: uint8 `[..., rows, columns]`.

        Raises:
            NoRule: The rows or the columns do not fill whole tiles.
        """
        matrix = _empty(stored.shape)
        self.invert_into(stored, matrix)
        return matrix

    def invert_into(
        self, stored: ByteArray, matrix: ByteArray, work: ByteArray | None = None
    ) -> None:
        """Write the matrix whose stored bytes these are into a buffer of the same shape.

        Args:
            stored: C-contiguous uint8 `[..., rows, columns]`.
            matrix: Where to write; C-contiguous.
            work: A buffer of the same shape to work in; fresh memory by default.

        Raises:
            NoRule: The rows or the columns do not fill whole tiles.
        """
        if self.keeps_atoms or not self._tiles_are_apart:
            logical = self.logical_view(stored)
            _copy(matrix.reshape(logical.shape), logical)
        else:
            self._invert_by_tile(stored, matrix, _empty(stored.shape) if work is None else work)

    def logical_view(self, stored: ByteArray) -> ByteArray:
        """Return stored bytes seen by their logical digits, without a copy.

        Args:
            stored: C-contiguous uint8 `[..., rows, columns]`.

        Returns:
            A view with the leading axes of `stored`, then one axis per digit.
        """
        batch = stored.ndim - 2
        radices = self.radices(*stored.shape[-2:])
        storage = (*stored.shape[:-2], *(radices[digit] for digit in self.order))
        back = [self.order.index(digit) + batch for digit in range(len(self.order))]
        return stored.reshape(storage).transpose([*range(batch), *back])

    @property
    def is_row_major(self) -> bool:
        """Whether storage holds row after row."""
        return self.order == tuple(range(len(self.order)))

    @property
    def keeps_atoms(self) -> bool:
        """Whether 16 bytes that follow each other in a row still do so in storage."""
        last = len(self.order) - 1
        return self.order[-1] == last and self.columns[-1] in {REST, ATOM_BYTES}

    @property
    def _tiles_are_apart(self) -> bool:
        """Whether a tile is one piece of storage, and its rows are runs of up to 8 bytes."""
        whole = [digit for digit, radix in enumerate((*self.rows, *self.columns)) if radix == REST]
        return (
            sorted(self.order[: len(whole)]) == whole
            and self.columns[0] == REST
            and prod(self.columns[1:]) in _WIDE
        )

    def _apply_by_tile(self, matrix: ByteArray, stored: ByteArray, work: ByteArray) -> None:
        """Gather whole tiles first, in wide elements, then permute the bytes of each.

        One copy of single bytes into their places would touch memory for every byte.
        """
        import numpy as np

        rows, gathered, within = self._tiling(matrix, work)
        gathered[...] = rows
        tiles = work.reshape(-1, within.size)
        # mode="clip": numpy writes straight into `out`; every index is in range
        np.take(tiles, within, 1, stored.reshape(tiles.shape), "clip")

    def _invert_by_tile(self, stored: ByteArray, matrix: ByteArray, work: ByteArray) -> None:
        """Permute the bytes of each tile back, then put its rows into theirs."""
        import numpy as np

        rows, gathered, within = self._tiling(matrix, work)
        tiles = stored.reshape(-1, within.size)
        np.take(tiles, np.argsort(within), 1, work.reshape(tiles.shape), "clip")
        rows[...] = gathered

    def _tiling(
        self, matrix: ByteArray, work: ByteArray
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.intp]]:
        """Return two views of wide elements, and the order of the bytes of a tile.

        Returns:
            A matrix tile by tile, each row of a tile one element; a buffer that holds it so; and
            for each byte of a stored tile, which byte of such a gathered tile it is.
        """
        import numpy as np

        radices = self.radices(*matrix.shape[-2:])
        whole = [d for d, radix in enumerate((*self.rows, *self.columns)) if radix == REST]
        inner = [d for d in range(len(radices)) if d not in whole]
        element = _WIDE[prod(self.columns[1:])]
        last_row = len(self.rows)  # the one digit that is left of the column
        batch = matrix.ndim - 2
        wide = matrix.view(element)
        shape = (*matrix.shape[:-2], *radices[:last_row], wide.shape[-1])
        inner_rows = [d for d in inner if d < last_row]
        rows = wide.reshape(shape).transpose(
            [*range(batch), *(batch + d for d in (*self.order[: len(whole)], *inner_rows))]
        )
        gathered = work.reshape(-1).view(element).reshape(rows.shape)
        inner_radices = [radices[d] for d in inner]
        within = np.arange(prod(inner_radices)).reshape(inner_radices)
        within = within.transpose([inner.index(d) for d in self.order[len(whole) :]])
        return rows, gathered, within.reshape(-1)

    def place(self, stored: ByteArray, part: ByteArray, row: int, column: int = 0) -> None:
        """Write a part of the logical matrix into its place in storage.

        Args:
            stored: C-contiguous uint8 `[..., rows, columns]`: the whole matrix, laid out.
            part: uint8 `[..., part_rows, part_columns]`, any strides along the rows.
            row: The logical row at which the part begins.
            column: The byte of these rows at which it begins.
        """
        view = self.logical_view(stored)
        for row_run in runs(self._rows(stored.shape[-2]), row, row + part.shape[-2]):
            columns = self._columns(stored.shape[-1])
            for column_run in runs(columns, column, column + part.shape[-1]):
                source = part[
                    ...,
                    row_run.start - row : row_run.stop - row,
                    column_run.start - column : column_run.stop - column,
                ]
                target = view[(..., *row_run.index, *column_run.index)]
                _copy(target, source.reshape(target.shape))

    def radices(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the radices of a matrix of this size, `REST` filled in.

        Raises:
            NoRule: The size does not fill whole tiles.
        """
        return self._rows(rows) + self._columns(columns)

    def _rows(self, rows: int) -> tuple[int, ...]:
        return _fill(self.rows, rows, f"{rows} rows", self.name)

    def _columns(self, columns: int) -> tuple[int, ...]:
        return _fill(self.columns, columns, f"rows of {columns} bytes", self.name)


@dataclass(frozen=True, slots=True)
class Run:
    """A range of numbers that one index expression on their digits covers."""

    start: int
    stop: int
    index: tuple[int | slice, ...]


def runs(radices: tuple[int, ...], start: int, stop: int) -> Iterator[Run]:
    """Split `[start, stop)` into as few runs as digits allow: leading digits fixed, one sliced.

    Args:
        radices: Radices of the number, most significant first.
        start: First number.
        stop: The number after the last.
    """
    weights = [prod(radices[digit + 1 :]) for digit in range(len(radices))]
    while start < stop:
        run = next(
            filter(None, (_run(radices, weights, d, start, stop) for d in range(len(radices))))
        )
        yield run
        start = run.stop


def _run(
    radices: tuple[int, ...], weights: list[int], digit: int, start: int, stop: int
) -> Run | None:
    """Return the longest run from `start` that slices `digit`, or None if there is none."""
    weight = weights[digit]
    block = weight * radices[digit]
    end = min(stop - stop % weight, start - start % block + block)
    if start % weight or end <= start:
        return None
    fixed = tuple(start // weights[d] % radices[d] for d in range(digit))
    first = start % block // weight
    sliced = slice(first, first + (end - start) // weight)
    return Run(start, end, (*fixed, sliced, *(slice(None) for _ in radices[digit + 1 :])))


def _fill(radices: tuple[int, ...], size: int, what: str, layout: str) -> tuple[int, ...]:
    known = prod(radix for radix in radices if radix != REST)
    if size % known or (REST not in radices and size != known):
        raise NoRule(f"layout `{layout}` cannot hold {what}: not a multiple of {known}")
    return tuple(size // known if radix == REST else radix for radix in radices)


def _copy(target: ByteArray, source: ByteArray) -> None:
    """Copy bytes between views of one shape, in atoms of 16 bytes where both allow it."""
    if target.shape[-1] == ATOM_BYTES and target.strides[-1] == source.strides[-1] == 1:
        _atoms(target)[...] = _atoms(source)
    else:
        target[...] = source


def _atoms(array: ByteArray) -> npt.NDArray[np.complex128]:
    return array.view("c16")


def _empty(shape: tuple[int, ...]) -> ByteArray:
    import numpy as np

    return np.empty(shape, np.uint8)
