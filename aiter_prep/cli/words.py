"""How numbers and tables are written for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
MINUTE, HOUR = 60, 3600


def size(total_bytes: float) -> str:
    """Return bytes with a decimal unit: `864.7 GB`."""
    value, unit = float(total_bytes), UNITS[0]
    for unit in UNITS:
        if value < 999.95 or unit == UNITS[-1]:  # noqa: PLR2004 - else it would read 1000.0
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == UNITS[0] else f"{value:.1f} {unit}"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 shard`, `145,116 tensors`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def percent(part: int, whole: int) -> str:
    """Return a share of a whole: `24.4%`, or nothing of nothing."""
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"


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
