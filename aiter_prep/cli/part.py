"""`aiter-prep convert --part`: one of several processes that share a conversion."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aiter_prep.cli import plan_words, words
from aiter_prep.cli.output import PROGRAM
from aiter_prep.errors import InvalidUsage
from aiter_prep.storage.shell import command_line

if TYPE_CHECKING:
    from pathlib import Path

    from aiter_prep.backends.table import Backend
    from aiter_prep.cli.convert_flags import Request
    from aiter_prep.cli.output import Output
    from aiter_prep.execution.bundles import Part
    from aiter_prep.plan import Plan

SCHEMA = "aiter-prep/part/1"


def read_part(output: Output, request: Request) -> Part | None:
    """Return the part that was asked for, or None for all; say where it was taken from.

    Raises:
        InvalidUsage: There is no such part, or it contradicts another flag.
    """
    from aiter_prep.cli.schedulers import part_of

    if request.part is None:
        return None
    if request.push is not None:
        raise InvalidUsage(
            "--part and --push exclude each other: a part is no folder yet",
            "push the folder when it is sealed, with `aiter-prep push`",
        )
    part, origin = part_of(request.part)
    if origin != "--part":
        output.note(f"this is part {part}: {origin}")
    return part


def write_part(output: Output, request: Request, plan: Plan, out: Path, part: Part) -> None:
    """Write a part, and say what was written."""
    from aiter_prep.execution import execute_part

    backend = chosen_backend(output, request, plan)
    start = time.perf_counter()
    label = f"converting part {part} for {plan.gfx}, {plan_words.sharing(plan)}"
    with output.progress(label) as progress:
        share = execute_part(
            plan,
            out,
            part,
            backend=backend,
            workers=request.workers,
            overwrite=request.overwrite,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    kept_bytes = share.total_bytes - share.written_bytes
    facts = [
        ("folder", str(out)),
        ("shards", f"{len(share.digests):,} of {len(plan.shards):,}"),
        ("size", words.size(share.total_bytes)),
        ("time", words.duration(seconds)),
    ]
    if kept_bytes:
        facts.insert(3, ("kept", f"{words.size(kept_bytes)} of an earlier run"))
    output.lines(f"part {part} of {plan.checkpoint.name} is written", *words.columns(facts))
    output.document(
        SCHEMA,
        {
            "folder": str(out),
            "part": part.number,
            "parts": part.count,
            "shards": [{"file": f, "digest": d} for f, d in share.digests.items()],
            "total_bytes": share.total_bytes,
            "written_bytes": share.written_bytes,
            "seconds": round(seconds, 3),
        },
    )
    seal = command_line(PROGRAM, "seal", out)
    output.hint(f"when every part has ended, complete the folder with: {seal}")


def chosen_backend(output: Output, request: Request, *plans: Plan) -> Backend:
    """Return the backend for some plans, and say which one it is."""
    from aiter_prep.backends.table import choose_backend
    from aiter_prep.execution import layouts_of

    backend, reason = choose_backend(
        request.backend,
        request.device,
        layouts={layout for plan in plans for layout in layouts_of(plan)},
        device_memory=request.device_memory,
    )
    if backend.name != "cpu" or output.verbose:
        output.note(f"backend {backend.name} on {backend.device}: {reason}")
    return backend
