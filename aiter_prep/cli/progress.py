"""Shows how far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiter_prep.cli import words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from aiter_prep.execution import Progress

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def showing(console: Console, label: str) -> Iterator[Callable[[Progress], None]]:
    """Show progress on a console while the context is open."""
    if console.is_terminal and not console.is_dumb_terminal:
        with _bar(console, label) as update:
            yield update
    else:
        yield Lines(lambda line: console.print(line, soft_wrap=True), label)


@contextmanager
def _bar(console: Console, label: str) -> Iterator[Callable[[Progress], None]]:
    from rich import progress as rich

    with rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
        console=console,
    ) as bar:
        task = bar.add_task(label, total=None)

        def update(done: Progress) -> None:
            bar.update(task, completed=done.done_bytes, total=done.total_bytes)

        yield update


class Lines:
    """Prints a line every 30 s.

    Args:
        print_line: Prints a line.
        label: What is being done.
        clock: Seconds, from any start.
    """

    def __init__(
        self,
        print_line: Callable[[str], None],
        label: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._print_line = print_line
        self._label = label
        self._clock = clock
        self._began = self._last = clock()

    def __call__(self, progress: Progress) -> None:
        """Print a line if it is time."""
        now = self._clock()
        if now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        rate = progress.done_bytes / (now - self._began)
        left = progress.total_bytes - progress.done_bytes
        remaining = f", {words.duration(left / rate)} left" if rate else ""
        self._print_line(
            f"{self._label}: {words.size(progress.done_bytes)} of "
            f"{words.size(progress.total_bytes)}, {words.size(rate)}/s{remaining}"
        )
