"""Tells sources, prepared folders and unfinished ones apart."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from aiter_prep.errors import BadSource
from aiter_prep.inspection.prepared import (
    PreparedInspection,
    UnfinishedInspection,
    inspect_prepared,
)
from aiter_prep.inspection.source import SourceInspection, inspect_source
from aiter_prep.storage.checkpoint import MANIFEST_FILE, open_checkpoint
from aiter_prep.storage.folder import SHARD_NAME
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.output import is_unfinished
from aiter_prep.storage.parts import shards_waiting

Inspection: TypeAlias = "SourceInspection | PreparedInspection | UnfinishedInspection"


def inspect_path(path: str | Path) -> Inspection:
    """Tell what a local folder holds; no tensor is read.

    Args:
        path: A source checkpoint, a prepared folder, or one that a conversion has begun.

    Raises:
        BadSource: It is no folder, or a source that is not whole.
        NoRule: A source with a dtype that is not known.
        DataMismatch: A prepared folder whose manifest is damaged.
    """
    folder = Path(path)
    try:
        if is_unfinished(folder):
            return _unfinished(folder)
        if (folder / MANIFEST_FILE).exists():
            return inspect_prepared(folder)
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise BadSource(
                f"`{printable(str(folder))}` {what}", "give a local folder: nothing is downloaded"
            )
        return inspect_source(open_checkpoint(folder))
    except OSError as fault:
        raise BadSource(
            f"cannot read `{printable(str(folder))}`: {printable(str(fault.strerror))}"
        ) from None


def _unfinished(folder: Path) -> UnfinishedInspection:
    found = [path for path in folder.iterdir() if SHARD_NAME.fullmatch(path.name)]
    sizes = [path.stat().st_size for path in (*found, *shards_waiting(folder))]
    return UnfinishedInspection(folder, len(sizes), sum(sizes))
