"""Prepares mixture-of-experts checkpoints ahead of time for the kernels of AMD's AITER.

    folder --open_checkpoint--> Checkpoint --make_plan--> Plan --execute--> shards + Manifest
           --verify--> Report

    from aiter_prep import execute, make_plan, open_checkpoint, verify

    checkpoint = open_checkpoint("models/Qwen3-30B-A3B")
    plan = make_plan(checkpoint, tp=2)
    execute(plan, "models/Qwen3-30B-A3B-aiter-tp2-gfx950")
    assert verify("models/Qwen3-30B-A3B-aiter-tp2-gfx950", source=checkpoint).is_clean

Every failure that a caller can cause is an `AiterPrepError` with a message, a hint and the exit
code that it stands for; `aiter_prep.errors` draws their tree.
"""

from __future__ import annotations

from aiter_prep._version import __version__

# not of `typing`: until the program has its own handler, Ctrl-C shows what is being imported
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from aiter_prep.engines.plain import attach, load
    from aiter_prep.errors import AiterPrepError
    from aiter_prep.execution import Part, execute, execute_part, seal
    from aiter_prep.inspection import inspect_path as inspect
    from aiter_prep.manifest import Manifest
    from aiter_prep.plan import Plan, make_plan
    from aiter_prep.publication import Pushed, push
    from aiter_prep.restoration import Restored, restore
    from aiter_prep.storage.checkpoint import Checkpoint, open_checkpoint
    from aiter_prep.verification import Report, verify

__all__ = [
    "AiterPrepError",
    "Checkpoint",
    "Manifest",
    "Part",
    "Plan",
    "Pushed",
    "Report",
    "Restored",
    "__version__",
    "attach",
    "execute",
    "execute_part",
    "inspect",
    "load",
    "make_plan",
    "open_checkpoint",
    "push",
    "restore",
    "seal",
    "verify",
]

# Loaded on first use: numpy alone takes longer than `aiter-prep --version` may.
_HOMES = {
    "AiterPrepError": ("aiter_prep.errors", "AiterPrepError"),
    "Checkpoint": ("aiter_prep.storage.checkpoint", "Checkpoint"),
    "Manifest": ("aiter_prep.manifest", "Manifest"),
    "Part": ("aiter_prep.execution", "Part"),
    "Plan": ("aiter_prep.plan", "Plan"),
    "Pushed": ("aiter_prep.publication", "Pushed"),
    "Report": ("aiter_prep.verification", "Report"),
    "Restored": ("aiter_prep.restoration", "Restored"),
    "attach": ("aiter_prep.engines.plain", "attach"),
    "execute": ("aiter_prep.execution", "execute"),
    "execute_part": ("aiter_prep.execution", "execute_part"),
    "inspect": ("aiter_prep.inspection", "inspect_path"),
    "load": ("aiter_prep.engines.plain", "load"),
    "make_plan": ("aiter_prep.plan", "make_plan"),
    "open_checkpoint": ("aiter_prep.storage.checkpoint", "open_checkpoint"),
    "push": ("aiter_prep.publication", "push"),
    "restore": ("aiter_prep.restoration", "restore"),
    "seal": ("aiter_prep.execution", "seal"),
    "verify": ("aiter_prep.verification", "verify"),
}


def __getattr__(name: str) -> Any:
    """Return a public name, loaded from its home.

    Raises:
        AttributeError: It is not public.
    """
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
