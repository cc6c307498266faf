"""Counts the calls of AITER's layout functions while the engine loads, by who called them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

_MODULES = ("aiter.ops.shuffle", "aiter.utility.fp4_utils")


@dataclasses.dataclass
class Shuffles:
    """How often tensors were laid out.

    Attributes:
        experts: for layers of routed experts.
        others: for anything else, such as dense layers.
        fingerprints: for a small matrix, to see whether AITER does what a folder says.
    """

    experts: int = 0
    others: int = 0
    fingerprints: int = 0


_counts: list[Shuffles] = []


@contextlib.contextmanager
def counted() -> Iterator[Shuffles]:
    """Counts what happens meanwhile; the functions stay spied on for the rest of the process."""
    for name in _MODULES:
        functions = vars(importlib.import_module(name))
        for key, function in list(functions.items()):
            if "shuffle" in key and callable(function) and not hasattr(function, "spied"):
                _replace_everywhere(function, _spy(function))
    _counts.append(Shuffles())
    try:
        yield _counts[-1]
    finally:
        _counts.pop()


def _spy(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def spy(*args: Any, **kwargs: Any) -> Any:
        kind = _kind_of(sys._getframe(1))
        for counts in _counts:
            setattr(counts, kind, getattr(counts, kind) + 1)
        return function(*args, **kwargs)

    spy.__dict__["spied"] = True
    return spy


def _replace_everywhere(function: Callable[..., Any], spy: Callable[..., Any]) -> None:
    """Puts the spy wherever a module holds the function, under whatever name."""
    for module in list(sys.modules.values()):
        held = getattr(module, "__dict__", {})
        for name in [name for name, value in list(held.items()) if value is function]:
            held[name] = spy


def _kind_of(frame: Any) -> str:
    """Which of the counts a call belongs to, by who is among its callers."""
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts

    from aiter_prep.engines.vllm.fingerprint import check_fingerprint
    from aiter_prep.engines.vllm.layers import ExpertLayer

    kinds = (FusedMoEMethodBase, RoutedExperts, ExpertLayer)
    while frame is not None:
        if frame.f_code is check_fingerprint.__code__:
            return "fingerprints"
        if any(isinstance(value, kinds) for value in list(frame.f_locals.values())):
            return "experts"
        frame = frame.f_back
    return "others"
