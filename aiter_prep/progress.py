"""How far a run is, and what each worker does."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Doing:
    """What a worker does.

    Attributes:
        worker: Its number, from 0 on.
        what: The experts module that it converts, or `common tensors`.
        seconds: For how long.
    """

    worker: int
    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        done_bytes: Bytes that were read; of the result, where a cluster writes it.
        total_bytes: Bytes that this run reads.
        done_jobs: Experts modules, and batches of common tensors, that are done.
        total_jobs: How many this run does.
        doing: What each worker does, the longest first.
    """

    done_bytes: int
    total_bytes: int
    done_jobs: int = 0
    total_jobs: int = 0
    doing: tuple[Doing, ...] = ()


class Board:
    """What the workers of a run have done and do; safe to share between threads.

    Args:
        clock: Seconds, from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_bytes = 0
        self._total_jobs = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._done_jobs = 0
        self._workers: dict[int, int] = {}
        self._begun: dict[int, tuple[float, str]] = {}

    def expect(self, total_bytes: int, total_jobs: int) -> None:
        """Note how many source bytes the run reads, and how many jobs it does."""
        with self._lock:
            self._total_bytes, self._total_jobs = total_bytes, total_jobs

    def advance(self, count: int) -> None:
        """Note that some bytes were read."""
        with self._lock:
            self._done_bytes += count

    def run(self, what: str, job: Callable[[], None]) -> None:
        """Run a job in this thread, and let it be seen meanwhile."""
        thread = threading.get_ident()
        with self._lock:
            worker = self._workers.setdefault(thread, len(self._workers))
            self._begun[worker] = (self._clock(), what)
        try:
            job()
        finally:
            with self._lock:
                del self._begun[worker]
        with self._lock:
            self._done_jobs += 1

    def progress(self) -> Progress:
        """Return how far the run is."""
        with self._lock:
            now = self._clock()
            begun = sorted(self._begun.items(), key=lambda item: item[1][0])
            doing = tuple(Doing(worker, what, now - since) for worker, (since, what) in begun)
            return Progress(
                self._done_bytes, self._total_bytes, self._done_jobs, self._total_jobs, doing
            )
