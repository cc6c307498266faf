"""Draws a layout: which bytes of storage each part of a small matrix becomes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import numpy as np

from aiter_prep.layouts.permutation import REST

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from aiter_prep.layouts.permutation import Layout

    Offsets = npt.NDArray[np.int64]
    Colour = tuple[int, int, int]

_TILES = 2
MAX_CELLS = 600
# of a layout without tiles
PLAIN_ROWS, PLAIN_BYTES = 4, 64
_FIRST, _LAST = (224, 242, 241), (13, 71, 101)
LIGHT = 380
# of the picture, in its own units
FONT, CHARACTER, LINE, TOP, MARGIN, MIN_CELL_WIDTH = 13, 8, 22, 52, 12, 40


@dataclass(frozen=True, slots=True)
class Cell:
    """A rectangle of the matrix whose bytes follow each other in storage, row after row.

    Attributes:
        rows: Its rows in the matrix.
        columns: Its bytes in each of these rows.
        start: First byte of storage.
        stop: The byte after the last.
    """

    rows: range
    columns: range
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Drawing:
    """A layout, applied to a matrix that is just large enough to show it.

    Attributes:
        name: Name of the layout.
        rows: Rows of the matrix.
        row_bytes: Bytes of a row.
        halves: Whether the first half of the rows is gate and the second up.
        cells: The matrix in rectangles, row by row; each line has the same columns.
    """

    name: str
    rows: int
    row_bytes: int
    halves: bool
    cells: tuple[tuple[Cell, ...], ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of the matrix."""
        return self.rows * self.row_bytes

    def row_label(self, rows: range) -> str:
        """Return what some rows are called: `row 3`, `gate 0-15`."""
        half = self.rows // 2
        if not self.halves:
            return f"row {span(rows)}"
        of = "up" if rows.start >= half else "gate"
        return f"{of} {span(range(rows.start % half, rows.start % half + len(rows)))}"

    def colour(self, cell: Cell) -> Colour:
        """Return a colour for a cell: the later in storage, the darker."""
        last = max(1, *(held.start for line in self.cells for held in line))
        red, green, blue = (
            round(first + (end - first) * cell.start / last)
            for first, end in zip(_FIRST, _LAST, strict=True)
        )
        return red, green, blue


def draw(layout: Layout) -> Drawing:
    """Return the drawing of a layout: of two tiles each way, or of one where that shows enough."""
    drawings = (_drawn(layout, rest) for rest in (_TILES, 1))
    return next(d for d in drawings if sum(map(len, d.cells)) <= MAX_CELLS)


def _drawn(layout: Layout, rest: int) -> Drawing:
    places = _places(layout, rest)
    columns = list(_runs(places.T, 1))
    lines = list(_runs(places[:, [run.start for run in columns]], len(columns[0])))
    return Drawing(
        name=layout.name,
        rows=places.shape[0],
        row_bytes=places.shape[1],
        halves=layout.row_order != "separated",
        cells=tuple(tuple(_cell(places, line, run) for run in columns) for line in lines),
    )


def _places(layout: Layout, rest: int) -> Offsets:
    """Return the byte of storage of every byte of a small matrix."""
    rows = prod(_radix(r, rest, layout.rows, PLAIN_ROWS) for r in layout.rows)
    row_bytes = prod(_radix(r, rest, layout.columns, PLAIN_BYTES) for r in layout.columns)
    radices = layout.radices(rows, row_bytes)
    stored = np.arange(rows * row_bytes).reshape([radices[digit] for digit in layout.order])
    back = [layout.order.index(digit) for digit in range(len(radices))]
    places: Offsets = stored.transpose(back).reshape(rows, row_bytes)
    return places


def _radix(radix: int, rest: int, radices: tuple[int, ...], plain: int) -> int:
    if radix != REST:
        return radix
    return plain if radices == (REST,) else rest


def _runs(places: Offsets, step: int) -> Iterator[range]:
    """Yield the longest runs of lines of which each lies `step` bytes behind the one before."""
    start = 0
    for number in range(1, len(places) + 1):
        if number == len(places) or (places[number] != places[number - 1] + step).any():
            yield range(start, number)
            start = number


def _cell(places: Offsets, rows: range, columns: range) -> Cell:
    start = int(places[rows.start, columns.start])
    return Cell(rows, columns, start, start + len(rows) * len(columns))


def svg(drawing: Drawing) -> str:
    """Return the drawing as a picture: each cell with the bytes of storage that it becomes."""
    cell_width = max(MIN_CELL_WIDTH, CHARACTER * max(len(t) for t in _texts(drawing)) + 12)
    left = CHARACTER * max(len(drawing.row_label(line[0].rows)) for line in drawing.cells) + 16
    title = f"{drawing.name}: each cell holds the bytes of storage that it becomes"
    width = max(left + cell_width * len(drawing.cells[0]), CHARACTER * len(title) + 8) + MARGIN
    height = TOP + LINE * len(drawing.cells) + MARGIN
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="monospace" font-size="{FONT}">'
        ),
        f"<title>{escape(drawing.name)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(8, 20, title),
    ]
    for number, cell in enumerate(drawing.cells[0]):
        x = left + cell_width * (number + 0.5)
        parts.append(_text(x, TOP - 8, _column_label(cell.columns), "middle"))
    for number, line in enumerate(drawing.cells):
        y = TOP + LINE * number
        parts.append(_text(left - 8, y + LINE - 7, drawing.row_label(line[0].rows), "end"))
        for place, cell in enumerate(line):
            parts += _picture(drawing, cell, left + cell_width * place, y, cell_width)
    return "\n".join([*parts, "</svg>", ""])


def _texts(drawing: Drawing) -> Iterator[str]:
    for line in drawing.cells:
        for cell in line:
            yield span(range(cell.start, cell.stop))
            yield _column_label(cell.columns)


def _column_label(columns: range) -> str:
    return f"{'byte' if len(columns) == 1 else 'bytes'} {span(columns)}"


def _picture(drawing: Drawing, cell: Cell, x: float, y: float, width: float) -> Iterator[str]:
    red, green, blue = drawing.colour(cell)
    ink = "black" if is_light((red, green, blue)) else "white"
    yield (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{LINE}" stroke="white" '
        f'fill="#{red:02x}{green:02x}{blue:02x}"/>'
    )
    text = span(range(cell.start, cell.stop))
    yield _text(x + width / 2, y + LINE - 7, text, "middle", ink)


def _text(x: float, y: float, text: str, anchor: str = "start", ink: str = "black") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{ink}">{escape(text)}</text>'


def is_light(colour: Colour) -> bool:
    """Return whether dark letters can be read on a colour."""
    return sum(colour) > LIGHT


def span(numbers: range) -> str:
    """Return the first and the last of some numbers: `0-15`, or `3` where it is only one."""
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
