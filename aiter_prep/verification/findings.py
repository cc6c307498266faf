"""Collects what is wrong with one folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiter_prep.execution import Progress
from aiter_prep.verification.report import Problem, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from aiter_prep.manifest import Manifest, TensorRecord


class Findings:
    """What was found so far, and how much was read.

    Args:
        folder: The prepared folder.
        manifest: Its manifest.
        total_bytes: Bytes that are to be read.
        progress: Called now and then.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        total_bytes: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self._total_bytes = total_bytes
        self._read_bytes = 0
        self._progress = progress

    def add(self, file: str, what: str, record: TensorRecord | None = None) -> None:
        """Note a problem with a file, or with a tensor in it."""
        name, rank = (None, None) if record is None else (record.name, record.rank)
        self.problems.append(Problem(file, name, rank, what))

    def advance(self, count: int) -> None:
        """Note that some bytes were read."""
        self._read_bytes += count
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
            tuple(self.notes),
            {} if self.problems else sha256,
        )
