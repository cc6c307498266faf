"""Shows how far a run is: a bar on a terminal, lines now and then elsewhere, or JSON."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiter_prep.cli import words
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import TypeAlias

    from rich.console import Console, RenderableType

    from aiter_prep.progress import Progress

    Update: TypeAlias = Callable[[Progress], None]

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_OBJECTS = 5.0
SCHEMA = "aiter-prep/progress/1"
FORMS = ("auto", "bar", "lines", "json", "none")


@contextmanager
def showing(console: Console, label: str, *, form: str, verbose: bool) -> Iterator[Update | None]:
    """Show progress on a console while the context is open.

    Args:
        console: The console.
        label: What is being done.
        form: One of `FORMS`; `auto` is a bar on a terminal, and lines elsewhere.
        verbose: Also what each worker does.
    """
    if form == "auto":
        form = "bar" if console.is_terminal and not console.is_dumb_terminal else "lines"
    if form == "none":
        yield None
    elif form == "bar":
        with _bar(console, label, verbose=verbose) as update:
            yield update
    elif form == "json":
        objects = Objects(lambda line: console.print(line, soft_wrap=True), label)
        yield objects
        objects.end()
    else:
        yield Lines(lambda line: console.print(line, soft_wrap=True), label, verbose=verbose)


@contextmanager
def all_of(contexts: Iterable[Any]) -> Iterator[Update | None]:
    """Show progress in several places while the context is open; None where there is none."""
    with ExitStack() as stack:
        updates = [u for u in map(stack.enter_context, contexts) if u is not None]

        def update(progress: Progress) -> None:
            for each in updates:
                each(progress)

        yield update if updates else None


@contextmanager
def _bar(console: Console, label: str, *, verbose: bool) -> Iterator[Update]:
    from rich import progress as rich
    from rich.text import Text

    lines: list[str] = []

    class Bar(rich.Progress):
        """A bar, and below it what each worker does."""

        def get_renderables(self) -> Iterable[RenderableType]:
            yield from super().get_renderables()
            for line in lines:
                yield Text(line, no_wrap=True, overflow="ellipsis")

    with Bar(
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
            lines[:] = worker_lines(done) if verbose else [f"  at {w}" for w in _current(done)]

        yield update
        lines.clear()


class Lines:
    """Prints a line every 30 s.

    Args:
        print_line: Prints a line.
        label: What is being done.
        clock: Seconds, from any start.
        verbose: Also what each worker does, a line each.
    """

    def __init__(
        self,
        print_line: Callable[[str], None],
        label: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        verbose: bool = False,
    ) -> None:
        self._print_line = print_line
        self._label = label
        self._verbose = verbose
        self._pace = _Pace(SECONDS_BETWEEN_LINES, clock)

    def __call__(self, progress: Progress) -> None:
        """Print a line if it is time."""
        if not self._pace.is_due():
            return
        rate, left = self._pace.rate_and_left(progress)
        remaining = "" if left is None else f", {words.duration(left)} left"
        current = "".join(f", at {what}" for what in _current(progress))
        self._print_line(
            f"{self._label}: {words.size(progress.done_bytes)} of "
            f"{words.size(progress.total_bytes)}, {words.size(rate)}/s{remaining}{current}"
        )
        for line in worker_lines(progress) if self._verbose else ():
            self._print_line(line)


class Objects:
    """Prints a JSON object a line: at the first news, every 5 s, and at the end.

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
        self._pace = _Pace(SECONDS_BETWEEN_OBJECTS, clock, at_once=True)
        self._last: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        """Print an object if it is time."""
        self._last = progress
        if self._pace.is_due():
            self._print(progress, is_done=False)

    def end(self) -> None:
        """Print the last object, where all went well."""
        if self._last is not None:
            # what is checked by headers alone is not counted on the way
            self._print(replace(self._last, done_bytes=self._last.total_bytes), is_done=True)

    def _print(self, progress: Progress, *, is_done: bool) -> None:
        rate, left = self._pace.rate_and_left(progress)
        document = {
            "schema": SCHEMA,
            "label": self._label,
            "is_done": is_done,
            "seconds": round(self._pace.seconds, 3),
            "done_bytes": progress.done_bytes,
            "total_bytes": progress.total_bytes,
            "bytes_per_second": round(rate),
            "seconds_left": None if left is None else round(left, 1),
            "done_jobs": progress.done_jobs,
            "total_jobs": progress.total_jobs,
            "workers": [
                {"worker": d.worker, "doing": d.what, "seconds": round(d.seconds, 3)}
                for d in sorted(progress.doing, key=lambda doing: doing.worker)
            ],
        }
        self._print_line(json.dumps(document, allow_nan=False))


class _Pace:
    """Says when it is time, and how fast a run is."""

    def __init__(
        self, interval: float, clock: Callable[[], float], *, at_once: bool = False
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._began = clock()
        self._last = self._began - (interval if at_once else 0.0)

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    def is_due(self) -> bool:
        """Return whether it is time, and begin to wait anew."""
        now = self._clock()
        if now - self._last < self._interval:
            return False
        self._last = now
        return True

    def rate_and_left(self, progress: Progress) -> tuple[float, float | None]:
        """Return bytes a second so far, and the seconds that are left, where they can be told."""
        seconds = self.seconds
        rate = progress.done_bytes / seconds if seconds else 0.0
        left = progress.total_bytes - progress.done_bytes
        return rate, left / rate if rate else None


def worker_lines(progress: Progress) -> list[str]:
    """Return a line for each worker: what it does, and for how long."""
    in_order = sorted(progress.doing, key=lambda doing: doing.worker)
    return [
        f"  worker {d.worker}: {printable(d.what)}, {words.duration(d.seconds)}" for d in in_order
    ]


def _current(progress: Progress) -> list[str]:
    """Return what is being done for longest, if anything is."""
    return [printable(doing.what) for doing in progress.doing[:1]]
