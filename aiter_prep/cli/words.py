"""How numbers and tables are written for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiter_prep.quantities import count, percent, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["columns", "count", "duration", "percent", "size"]

MINUTE, HOUR = 60, 3600


def duration(seconds: float) -> str:
    """Return a time: `0.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE} s"
    return f"{whole // HOUR} h {whole % HOUR // MINUTE} min"


def columns(
    rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: int = 2
) -> Iterator[str]:
    """Yield the lines of a table, its columns two spaces apart.

    Args:
        rows: Cells; rows may have fewer cells than others.
        right: Numbers of the columns that are set flush right.
        indent: Spaces before each line.
    """
    widths: list[int] = []
    for row in rows:
        widths += [0] * (len(row) - len(widths))
        for number, cell in enumerate(row):
            widths[number] = max(widths[number], len(cell))
    for row in rows:
        cells = [
            cell.rjust(widths[n]) if n in right else cell.ljust(widths[n])
            for n, cell in enumerate(row)
        ]
        yield (" " * indent + "  ".join(cells)).rstrip()
