"""`aiter-prep convert --engine ray`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiter_prep.errors import InvalidUsage
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aiter_prep.cli.convert_flags import Request
    from aiter_prep.manifest import Manifest
    from aiter_prep.plan import Plan
    from aiter_prep.progress import Progress

ENGINES = ("local", "ray")


def is_asked_for(request: Request) -> bool:
    """Return whether Ray is to do the work.

    Raises:
        InvalidUsage: There is no such engine, or it contradicts another flag.
    """
    if request.engine not in ENGINES:
        raise InvalidUsage(
            f"--engine {printable(request.engine)} is not known", f"use one of {', '.join(ENGINES)}"
        )
    if request.engine != "ray":
        return False
    if request.part is not None:
        raise InvalidUsage(
            "--engine ray and --part exclude each other: Ray shares the work among its nodes",
            "leave one of them out",
        )
    return True


def convert(
    request: Request, plan: Plan, out: Path, progress: Callable[[Progress], None] | None
) -> Manifest:
    """Convert on a Ray cluster."""
    from aiter_prep.execution.ray_run import Settings, execute_on_ray

    settings = Settings(
        request.backend, request.device, request.device_memory, request.workers or 1
    )
    return execute_on_ray(
        plan,
        out,
        address=request.ray_address,
        settings=settings,
        overwrite=request.overwrite,
        progress=progress,
    )
