"""What a measurement found: noted at once, shown at the end."""

from __future__ import annotations

import sys


class Table:
    """What was measured: printed at the end, and written as JSON."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []

    def add(self, what: str, value: str, of: str = "") -> None:
        """Note a fact."""
        say(f"    {what}: {value} {of}")
        self.rows.append((what, value, of))

    def rate(self, what: str, rate: float, of: float | None = None) -> float:
        """Note a rate, as a part of another one."""
        self.add(what, f"{rate:,.1f} GB/s", "" if of is None else f"{100 * rate / of:.0f} %")
        return rate

    def show(self) -> None:
        """Print everything."""
        widths = [max(len(row[column]) for row in self.rows) for column in (0, 1)]
        for what, value, of in self.rows:
            say(f"{what:{widths[0]}}  {value:>{widths[1]}}  {of}".rstrip())


def say(line: str = "") -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
