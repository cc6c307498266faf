"""Refuses flags that would have no effect: whoever gives one expects what does not come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiter_prep.errors import InvalidUsage

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    import typer

    from aiter_prep.cli.convert_flags import Request

    Rule: TypeAlias = tuple[str, Callable[[Request], bool], str]


def _is_streamed(request: Request) -> bool:
    from aiter_prep.storage.object_store import is_store_url

    return request.stream or is_store_url(request.source)


def makes_repository(repo_id: str | None) -> bool:
    """Return whether a push may make a repository, which may be private: a store has none."""
    from aiter_prep.storage.object_store import is_store_url

    return repo_id is not None and not is_store_url(repo_id)


# parameter: its flag, whether it has an effect, and what that takes
RULES: dict[str, Rule] = {
    "private": ("--private", lambda r: makes_repository(r.push), "--push to the Hub"),
    "stream_disk": ("--stream-disk", _is_streamed, "--stream"),
    "device_memory": ("--device-memory", lambda r: r.backend != "cpu", "a --backend for GPUs"),
    "ray_address": ("--ray-address", lambda r: r.engine == "ray", "--engine ray"),
}


def refuse_without_effect(context: typer.Context, request: Request) -> None:
    """Refuse flags of `convert` that would have no effect; defaults of the environment may stay.

    Raises:
        InvalidUsage: One is given on the command line.
    """
    for parameter, (flag, has_effect, need) in RULES.items():
        source = context.get_parameter_source(parameter)
        if source is not None and source.name == "COMMANDLINE" and not has_effect(request):
            raise without_effect(flag, need)


def without_effect(flag: str, need: str) -> InvalidUsage:
    """Return the refusal of a flag that would have no effect."""
    return InvalidUsage(f"{flag} has no effect without {need}", f"leave it out, or give {need}")
