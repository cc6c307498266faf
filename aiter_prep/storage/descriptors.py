"""Descriptors of files that are being written, no more of them at once than a process may have."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_OPEN = 4096
LEAST_OPEN = 8


def limit_of_process() -> int:
    """Return how many files a process may have open: what `ulimit -n` shows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN * 2 if soft == resource.RLIM_INFINITY else soft


class _Entry:
    """A file: its descriptor, or -1, how many threads use it, and which file it is."""

    __slots__ = ("descriptor", "identity", "path", "users")

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.users = 0
        status = os.fstat(descriptor)
        self.identity = (status.st_dev, status.st_ino)


class DescriptorPool:
    """Keeps files open for writing, closes those that rest, and opens them again when needed.

    Safe to share between threads. What is lent is never closed, so that there may be as many more
    as there are threads.

    Args:
        most: How many may be open; half of what the process may have by default.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._open: OrderedDict[int, _Entry] = OrderedDict()
        self._next = 0

    def take(self, path: Path, descriptor: int) -> int:
        """Take a file that was just made; return a number that stands for it."""
        with self._lock:
            number = self._next
            self._next += 1
            entry = _Entry(path, descriptor)
            self._entries[number] = self._open[number] = entry
            self._close_some()
        return number

    @contextmanager
    def lent(self, number: int) -> Iterator[int]:
        """Lend the descriptor of a file.

        Raises:
            OSError: It cannot be opened again, or is another file by now.
        """
        with self._lock:
            entry = self._entries[number]
            if entry.descriptor < 0:
                _reopen(entry)
                self._open[number] = entry
            self._open.move_to_end(number)
            entry.users += 1
            self._close_some()
        try:
            yield entry.descriptor
        finally:
            with self._lock:
                entry.users -= 1

    def drop(self, number: int) -> None:
        """Close a file for good."""
        with self._lock:
            entry = self._entries.pop(number)
            self._open.pop(number, None)
            if entry.descriptor >= 0:
                os.close(entry.descriptor)
                entry.descriptor = -1

    def _close_some(self) -> None:
        most = self._most
        if most is None:
            most = min(MOST_OPEN, max(LEAST_OPEN, limit_of_process() // 2))
        spare = len(self._open) - most
        if spare <= 0:
            return
        for number, entry in list(self._open.items()):
            if spare > 0 and not entry.users:
                del self._open[number]
                # an error of the disk that nobody has seen waits for the next fsync of the file
                os.close(entry.descriptor)
                entry.descriptor = -1
                spare -= 1


def _reopen(entry: _Entry) -> None:
    descriptor = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != entry.identity:
        os.close(descriptor)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(entry.path))
    entry.descriptor = descriptor


SHARDS = DescriptorPool()
