"""Spreads work over threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from aiter_prep.errors import InvalidUsage

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator

MAX_WORKERS = 256
MOST_BY_DEFAULT = 16

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def default_workers() -> int:
    """Return one worker per usable core, at most 16."""
    return min(MOST_BY_DEFAULT, len(os.sched_getaffinity(0)))


def checked_workers(workers: int | None) -> int:
    """Return a number of threads, by default one per usable core.

    Raises:
        InvalidUsage: They are too few or too many.
    """
    if workers is None:
        return default_workers()
    if not 1 <= workers <= MAX_WORKERS:
        raise InvalidUsage(f"--workers {workers} is out of range: 1 to {MAX_WORKERS}")
    return workers


def spread(
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    workers: int,
    stop: threading.Event,
) -> Iterator[_Result]:
    """Yield what a function returns for each item, in their order, computed by several threads.

    When the first one fails, or the caller leaves, no further one begins and all threads end.

    Args:
        function: Is to leave early when `stop` is set.
        items: What to call it with.
        workers: Number of threads.
        stop: Set when the threads are to end.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="aiter-prep")
    try:
        for future in [pool.submit(function, item) for item in items]:
            yield future.result()
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
