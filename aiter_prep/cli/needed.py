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
        OutputNotEmpty: The folder is prepared, but is another conversion, and may not be replaced.
    """
    from aiter_prep.manifest import read_manifest
    from aiter_prep.storage.checkpoint import MANIFEST_FILE

    if not (out / MANIFEST_FILE).exists():
        return None
    different = _differences(plan, out)
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
        f"`{printable(str(out))}` holds another conversion: {what}",
        "replace it with --overwrite, or choose another output folder",
    )


def _differences(plan: Plan, out: Path) -> list[str]:
    from aiter_prep.execution.needed import differences
    from aiter_prep.verification import verify

    try:
        found = list(differences(plan, out))
        if not found:
            report = verify(out, quick=True)
            found = [f"`{p.file}` {p.what}" for p in report.problems]
    except DataMismatch as fault:
        return [fault.message]
    return found
