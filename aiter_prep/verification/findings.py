"""Collects what is wrong with one folder, and spreads the checks over threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from aiter_prep.errors import Interrupted
from aiter_prep.progress import Progress
from aiter_prep.storage.threads import spread
from aiter_prep.verification.report import Problem, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from aiter_prep.manifest import Manifest, TensorRecord


OTHER_BYTES = "has other bytes than the manifest says"

_Item = TypeVar("_Item")


class Findings:
    """What was found so far, and how much was read; safe to share between threads.

    Args:
        folder: The prepared folder.
        manifest: Its manifest.
        total_bytes: Bytes that are to be read.
        workers: How many threads check.
        progress: Called now and then.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        total_bytes: int,
        workers: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self._total_bytes = total_bytes
        self._workers = workers
        self._read_bytes = 0
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def add(self, file: str, what: str, record: TensorRecord | None = None) -> None:
        """Note a problem with a file, or with a tensor in it."""
        self.problems.append(problem_with(file, what, record))

    def spread(self, check: Callable[[_Item], Iterable[Problem]], items: Iterable[_Item]) -> None:
        """Check items side by side; note their problems in the order of the items.

        Args:
            check: Says `advance` for what it read, and so leaves when another one failed.
            items: What to check.
        """
        try:
            for problems in spread(check, items, self._workers, self._stop):
                self.problems.extend(problems)
        finally:
            self._stop.clear()  # every thread has ended

    def advance(self, count: int) -> None:
        """Note that some bytes were read.

        Raises:
            Interrupted: The other threads have ended.
        """
        with self._lock:
            self._read_bytes += count
            if self._stop.is_set():
                raise Interrupted("stopped")
            if self._progress is not None:
                self._progress(Progress(self._read_bytes, max(self._total_bytes, self._read_bytes)))

    def report(self, sha256: Mapping[str, str]) -> Report:
        """Return the report."""
        return Report(
            self.folder,
            tuple(self.problems),
            len(self.manifest.shards),
            len(self.manifest.tensors),
            self._read_bytes,
            len(self.manifest.lossy),
            tuple(self.notes),
            {} if self.problems else sha256,
        )


def problem_with(file: str, what: str, record: TensorRecord | None = None) -> Problem:
    """Return a problem with a file, or with a tensor in it."""
    name, rank = (None, None) if record is None else (record.name, record.rank)
    return Problem(file, name, rank, what)
