"""The picture of a folder: which bytes of it are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiter_prep.errors import InvalidUsage
from aiter_prep.inspection.chart import Row, chart, tp_rows
from aiter_prep.inspection.measures import measure_prepared, measure_source
from aiter_prep.inspection.prepared import PreparedInspection
from aiter_prep.inspection.serving import sharing_words
from aiter_prep.inspection.source import SourceInspection
from aiter_prep.manifest import read_manifest
from aiter_prep.quantities import size
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from pathlib import Path

    from aiter_prep.inspection.picture import Picture
    from aiter_prep.inspection.show import Inspection


def plot_of(found: Inspection, folder: Path) -> Picture:
    """Return a picture of a folder.

    Args:
        found: What `inspect_path` said of it.
        folder: The folder.

    Raises:
        InvalidUsage: It is not finished.
        DataMismatch: Its manifest is damaged.
    """
    if isinstance(found, SourceInspection):
        measures = measure_source(open_checkpoint(folder))
        more = {"What conversions would write": tp_rows(found.outlooks)}
        return chart(found.name, f"{found.architecture}, {size(found.total_bytes)}", measures, more)
    if isinstance(found, PreparedInspection):
        measures = measure_prepared(read_manifest(folder))
        target = found.target
        made_for = f"{target['name']} on {target['gfx']}, {sharing_words(target)}"
        below = f"{size(found.total_bytes)} for {made_for}"
        rows = [
            Row(
                "all ranks" if entry.rank is None else f"rank {entry.rank}",
                (("c0" if entry.rank is not None else "c2", entry.total_bytes),),
                size(entry.total_bytes),
            )
            for entry in found.ranks
        ]
        return chart(folder.resolve().name, below, measures, {"Shards by rank": rows})
    raise InvalidUsage(
        f"`{printable(str(folder))}` is unfinished: there is nothing to draw yet",
        "finish it with `aiter-prep convert --resume`",
    )
