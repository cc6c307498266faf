"""`aiter-prep convert --tp 4 --tp 8`: several folders of one reading of the source."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiter_prep.cli import plan_words, words
from aiter_prep.cli.part import chosen_backend
from aiter_prep.cli.push import check_push, place_beside, push_converted
from aiter_prep.errors import InvalidUsage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from aiter_prep.cli.convert_flags import Request
    from aiter_prep.cli.output import Output
    from aiter_prep.manifest import Manifest
    from aiter_prep.plan import Plan

SCHEMA = "aiter-prep/conversions/1"


def refuse_what_is_not_for_several(request: Request) -> None:
    """Refuse flags that are for one folder.

    Raises:
        InvalidUsage: One is given.
    """
    given = {
        "--part": request.part is not None,
        "--engine": request.engine != "local",
        "--ep": any(sharing.ep > 1 for sharing in request.sharings),
    }
    for flag, is_given in given.items():
        if is_given:
            raise InvalidUsage(f"{flag} is not for several --tp at once", "give one --tp at a time")


def check_pushes(output: Output, request: Request) -> None:
    """Find out whether the pushes would be taken, before the conversion takes its time."""
    if request.push is not None:
        for repo_id in dict.fromkeys(place_beside(request.push, s.label) for s in request.sharings):
            check_push(output, repo_id, private=request.private)


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
    if not left:
        remote = next(iter(plans.values())).checkpoint.remote
        if remote is not None:
            remote.clear()
    else:
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
    bodies: list[dict[str, Any]] = []
    for out, plan in plans.items():
        repo_id = None if request.push is None else place_beside(request.push, out.name)
        pushed = push_converted(output, out, repo_id, private=request.private)
        was_needed = out in left
        body = plan_words.done_body(plan, out, manifests[out], seconds, was_needed=was_needed)
        bodies.append({**body, "pushed": pushed})
    output.document(SCHEMA, {"folders": bodies, "seconds": round(seconds, 3)})
    count = words.count(len(plans), "folder")
    output.hint(f"prove each of the {count} with: aiter-prep verify FOLDER")
