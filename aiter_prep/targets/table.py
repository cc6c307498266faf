"""Every target, by name."""

from __future__ import annotations

from aiter_prep.errors import NoRule
from aiter_prep.targets.aiter import TARGET as AITER
from aiter_prep.targets.atom import TARGET as ATOM
from aiter_prep.targets.model import Target
from aiter_prep.targets.sglang import TARGET as SGLANG
from aiter_prep.targets.vllm import TARGET as VLLM

DEFAULT_TARGET = "aiter"

_TARGETS = (AITER, VLLM, SGLANG, ATOM)

TARGETS: dict[str, Target] = {target.name: target for target in _TARGETS}
_BY_NAME = TARGETS | {alias: target for target in _TARGETS for alias in target.aliases}


def target_named(name: str) -> Target:
    """Return the target of this name or alias.

    Raises:
        NoRule: There is none; a version that is not in the table is never guessed.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise NoRule(
            f"target `{name}` is not known", f"known targets: {', '.join(sorted(_BY_NAME))}"
        ) from None
