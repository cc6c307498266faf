"""Modules that exist only in this process."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any


def module(name: str, path: Path | None = None, **attributes: Any) -> types.ModuleType:
    """Registers an importable module `name`; with `path` it is a package whose files lie there."""
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=path is not None)
    if path is not None:
        made.__path__ = [str(path)]
        made.__spec__.submodule_search_locations = [str(path)]
    made.__dict__.update(attributes)
    sys.modules[name] = made
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, made)
    return made


def never_called(*_args: Any, **_kwargs: Any) -> None:
    """Stands for every GPU kernel."""
    raise RuntimeError("a GPU kernel was called: conformance runs load weights and compute nothing")
