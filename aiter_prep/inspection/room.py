"""What could keep a plan from being carried out, though it is sound."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from aiter_prep.errors import OutputNotEmpty
from aiter_prep.storage.checkpoint import MANIFEST_FILE
from aiter_prep.storage.guards import check_ours, check_room_for_writing
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aiter_prep.plan.make import Plan


def obstacles(
    plan: Plan, out: Path, *, resume: bool, overwrite: bool, beside_bytes: int = 0
) -> tuple[str, ...]:
    """Return why writing a plan into a folder would fail now; empty if nothing is in the way.

    Args:
        plan: The plan.
        out: The folder.
        resume: An unfinished folder may be gone on with.
        overwrite: A prepared or unfinished folder may be replaced.
        beside_bytes: What other folders of the same run take of the disk.
    """
    return tuple(_obstacles(plan, out, beside_bytes, resume=resume, overwrite=overwrite))


def needed_bytes(plan: Plan, out: Path, *, resume: bool) -> int:
    """Return the bytes that writing a plan into a folder takes of the disk."""
    return sum(
        shard.layout.total_bytes
        for shard in plan.shards
        if not (resume and (out / shard.file).exists())
    )


def check_room(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Check that a conversion may write into a folder, before anything else takes its time.

    Raises:
        OutputNotEmpty: It may not.
    """
    if overwrite and (out / MANIFEST_FILE).exists():
        check_ours(out)
    else:
        check_room_for_writing(out, resume=resume, overwrite=overwrite)


def free_bytes(out: Path) -> int:
    """Return the bytes that are free on the disk that would hold a folder."""
    folder = out.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _obstacles(
    plan: Plan, out: Path, beside_bytes: int, *, resume: bool, overwrite: bool
) -> Iterator[str]:
    try:
        check_room(out, resume=resume, overwrite=overwrite)
    except OutputNotEmpty as fault:
        yield f"{fault.message}; {fault.hint}" if fault.hint else fault.message
    needed, free = needed_bytes(plan, out, resume=resume), free_bytes(out)
    if free < needed + beside_bytes:
        beside = f" beside {beside_bytes} of the others" if beside_bytes else ""
        yield f"`{printable(str(out))}` needs {needed} bytes{beside}, its disk has {free} free"
