"""`aiter-prep convert --if-needed`: leaves alone what is there already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiter_prep.errors import DataMismatch, OutputNotEmpty
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from pathlib import Path

    from aiter_prep.cli.output import Output
    from aiter_prep.manifest import Manifest
    from aiter_prep.plan import Plan

MAX_SHOWN = 5


def held(output: Output, plan: Plan, out: Path, *, overwrite: bool) -> Manifest | None:
    """Return the manifest of a folder that is what a plan leads to; None if it is to be written.

    Raises:
        OutputNotEmpty: The folder is prepared, but is another conversion or damaged, and may not be
            replaced.
        AiterPrepError: What it holds may not be read by us.
    """
    from aiter_prep.manifest import read_manifest
    from aiter_prep.storage.checkpoint import MANIFEST_FILE

    if not (out / MANIFEST_FILE).exists():
        return None
    state, different = _state(plan, out)
    if not different:
        manifest = read_manifest(out)
        output.lines(f"{out} holds exactly this conversion already; nothing was written")
        return manifest
    more = f" and {len(different) - MAX_SHOWN} more" if len(different) > MAX_SHOWN else ""
    what = f"{', '.join(different[:MAX_SHOWN])}{more}"
    if overwrite:
        output.note(f"{out} is replaced: {what}")
        return None
    raise OutputNotEmpty(
        f"`{printable(str(out))}` holds {state}: {what}",
        "replace it with --overwrite, or choose another output folder",
    )


def _state(plan: Plan, out: Path) -> tuple[str, list[str]]:
    """Return what a prepared folder holds, and in what it is not what a plan leads to."""
    from aiter_prep.execution.needed import differences
    from aiter_prep.verification import verify

    try:
        found = list(differences(plan, out))
        if found:
            return "another conversion", found
        problems = verify(out, quick=True).problems
    except DataMismatch as fault:
        return "a damaged conversion", [fault.message]
    is_named = [f"`{problem.file}`" in problem.what for problem in problems]
    return "this conversion, but it is damaged", [
        problem.what if named else f"`{problem.file}` {problem.what}"
        for problem, named in zip(problems, is_named, strict=True)
    ]
