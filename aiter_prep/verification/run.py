"""Runs the checks of a prepared folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aiter_prep.errors import DataMismatch, InvalidUsage
from aiter_prep.manifest import read_manifest
from aiter_prep.storage.files import local_path
from aiter_prep.storage.guards import finish_hint
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.output import is_unfinished
from aiter_prep.storage.threads import checked_workers
from aiter_prep.verification.findings import Findings
from aiter_prep.verification.stored import StoredCheck

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiter_prep.progress import Progress
    from aiter_prep.storage.checkpoint import Checkpoint
    from aiter_prep.verification.report import Report


def verify(
    folder: str | Path,
    *,
    source: Checkpoint | None = None,
    quick: bool = False,
    sha256: bool = False,
    workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Check a prepared folder.

    Args:
        folder: The prepared folder.
        source: Also undo every layout and compare with this checkpoint, byte by byte.
        quick: Read headers and sizes only.
        sha256: Also compute the SHA-256 of every file, from what is read anyway.
        workers: Threads; one per usable core by default.
        progress: Called now and then.

    Returns:
        A report; damage is in it, not raised.

    Raises:
        DataMismatch: There is no manifest that could be checked against.
        AiterPrepError: A file may not be read by us, so nothing can be said of it.
        InvalidUsage: `quick` contradicts `source` and `sha256`, or there are too many workers.
    """
    if quick and source is not None:
        raise InvalidUsage("--quick reads no tensor, so it cannot compare with a --source")
    if quick and sha256:
        raise InvalidUsage("--quick reads no tensor, so it has no --sha256sums")
    folder = local_path(folder, "the prepared folder", "fetch it first")
    if is_unfinished(folder):
        raise DataMismatch(
            f"`{printable(str(folder))}` is unfinished: a run has begun it and not sealed it",
            finish_hint(folder),
        )
    manifest = read_manifest(folder, with_links=True)
    total = sum(shard.size for shard in manifest.shards)
    total += 0 if source is None else source.total_bytes
    findings = Findings(folder, manifest, total, checked_workers(workers), progress)
    stored = StoredCheck(findings, with_sha256=sha256)
    stored.names()
    stored.headers()
    stored.files()
    stored.manifest_file()
    is_left = source is not None and not sha256 and not findings.problems
    if not quick:
        stored.data(only_lossy=is_left)
    if source is not None and (is_left or not findings.problems):
        from aiter_prep.verification.source import SourceCheck  # and with it, all that plans

        SourceCheck(findings).against(source)
    stored.unchanged()
    return findings.report(stored.sha256)
