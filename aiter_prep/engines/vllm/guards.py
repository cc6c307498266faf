"""Keeps vLLM's own loaders from reading prepared folders."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from aiter_prep.engines.mismatch import EngineMismatch
from aiter_prep.engines.vllm.config import is_prepared
from aiter_prep.storage.checkpoint import METHOD
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_ENTRIES = ("load_model", "load_weights")
_GUARDED = "_aiter_prep_guarded"


def guard(loaders: Iterable[type], allowed: tuple[type, ...]) -> None:
    """Make loaders refuse prepared folders.

    vLLM maps old names of expert tensors to new ones, so a loader that takes the shards for an
    ordinary checkpoint would put one rank's shuffled bytes on every rank and shuffle them again.

    Args:
        loaders: Classes of loaders; twice is harmless.
        allowed: Those whose objects may read them, or read nothing at all.
    """
    for loader in loaders:
        for owner in loader.__mro__:
            for name in _ENTRIES:
                method = vars(owner).get(name)
                if method is not None and not hasattr(method, _GUARDED):
                    setattr(owner, name, _guarded(method, allowed))


def _guarded(method: Callable[..., Any], allowed: tuple[type, ...]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, allowed):
            for argument in (*args, *kwargs.values()):
                _refuse(argument, self.load_config.load_format)
        return method(self, *args, **kwargs)

    setattr(run, _GUARDED, True)
    return run


def _refuse(argument: Any, load_format: object) -> None:
    """Refuse a model config of a prepared folder; let anything else pass."""
    folder = getattr(argument, "model", None)
    if is_prepared(folder):
        raise EngineMismatch(
            f"`{printable(str(folder))}` is a prepared folder: load format `{load_format}` would "
            "shuffle its weights a second time",
            f"serve it with `--load-format {METHOD}`",
        )
