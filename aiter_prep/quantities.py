"""Numbers as people write them."""

from __future__ import annotations

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


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
