"""`aiter-prep convert --tp 4 --tp 8`: several folders of one reading of the source."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aiter_prep.cli import plan_words, words
from aiter_prep.cli.part import chosen_backend
from aiter_prep.errors import InvalidUsage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from aiter_prep.cli.convert_flags import Request
    from aiter_prep.cli.output import Output
    from aiter_prep.manifest import Manifest
    from aiter_prep.plan import Plan

SCHEMA = "aiter-prep/conversions/1"


def refuse_what_is_not_for_several(request: Request, *, dry_run: bool) -> None:
    """Refuse flags that are for one folder.

    Raises:
        InvalidUsage: One is given.
    """
    given = {
        "--dry-run": dry_run,
        "--part": request.part is not None,
        "--push": request.push is not None,
        "--engine": request.engine != "local",
        "--ranks": request.ranks is not None,
        "--ep": any(sharing.ep > 1 for sharing in request.sharings),
    }
    for flag, is_given in given.items():
        if is_given:
            raise InvalidUsage(f"{flag} is not for several --tp at once", "give one --tp at a time")


def check_room(out: Path, request: Request) -> None:
    """Refuse a folder that may not be written, before anything else takes its time."""
    from aiter_prep.execution.sealing import is_sealed
    from aiter_prep.inspection import room

    if not (request.resume and is_sealed(out)):  # that is looked at with its plan
        room.check_room(out, resume=request.resume, overwrite=request.overwrite)


def convert(
    output: Output, request: Request, plans: Mapping[Path, Plan], held: Mapping[Path, Manifest]
) -> None:
    """Write what is not held already, and say what there is."""
    from aiter_prep.execution.several import execute_several

    left = {out: plan for out, plan in plans.items() if out not in held}
    start = time.perf_counter()
    manifests = dict(held)
    if left:
        backend = chosen_backend(output, request, *left.values())
        first = next(iter(left.values()))
        sizes = " and ".join(plan_words.sharing(plan) for plan in left.values())
        with output.progress(f"converting for {first.gfx}, {sizes}") as progress:
            manifests |= execute_several(
                left,
                backend=backend,
                workers=request.workers,
                resume=request.resume,
                overwrite=request.overwrite,
                progress=progress,
            )
    seconds = time.perf_counter() - start
    for out, plan in left.items():
        output.lines(*plan_words.done_lines(plan, out, seconds))
    bodies = [
        plan_words.done_body(plan, out, manifests[out], seconds, was_needed=out in left)
        for out, plan in plans.items()
    ]
    output.document(SCHEMA, {"folders": bodies, "seconds": round(seconds, 3)})
    count = words.count(len(plans), "folder")
    output.hint(f"prove each of the {count} with: aiter-prep verify FOLDER")
