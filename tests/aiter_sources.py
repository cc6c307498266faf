"""Loads AITER's own functions from its source files, without a GPU, a compiler or the package."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "AITER_PREP_TEST_AITER_SOURCES"


def sources() -> Path:
    """The folder `aiter/` of an unpacked `amd-aiter` wheel or checkout; skips the test without."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(
            f"AITER's own functions are NOT compared: {VARIABLE} does not name the folder `aiter/` "
            "of an unpacked amd-aiter wheel"
        )
    assert (Path(folder) / "ops" / "shuffle.py").is_file(), f"{VARIABLE}={folder} holds no AITER"
    return Path(folder)


def stand_in(name: str, **attributes: Any) -> types.ModuleType:
    """Return a module that has any attribute: a decorator that changes nothing."""
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update({"__getattr__": _any, **attributes})
    return module


def _any(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _decorator


def _decorator(*arguments: Any, **_options: Any) -> Any:
    plain = len(arguments) == 1 and isinstance(arguments[0], types.FunctionType)
    return arguments[0] if plain else _decorator


@contextmanager
def stand_ins(*modules: types.ModuleType) -> Iterator[None]:
    """Let modules be found while AITER's files are loaded, and nothing afterwards."""
    saved = {module.__name__: sys.modules.get(module.__name__) for module in modules}
    sys.modules.update({module.__name__: module for module in modules})
    try:
        yield
    finally:
        for name, module in saved.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def load(folder: Path, file: str, name: str) -> types.ModuleType:
    """Run one of AITER's files as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, folder / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def modules_of_aiter(folder: Path) -> dict[str, types.ModuleType]:
    """Load the modules of AITER that hold the functions which the product calls."""
    importlib.import_module("torch")  # before it could see a stand-in
    triton = stand_in("triton", constexpr=object)
    triton.__dict__["language"] = stand_in("triton.language", constexpr=object)
    names = ("aiter", "aiter.ops", "aiter.utility", "aiter.utility.dtypes", "aiter.jit")
    others = ("aiter.jit.utils", "aiter.jit.utils.chip_info", "aiter.utility.mx_types")
    absent = [stand_in(name) for name in (*names, *others, "aiter.jit.core")]
    with stand_ins(*absent, triton, triton.__dict__["language"]):
        return {
            name: load(folder, file, name)
            for name, file in (
                ("aiter.ops.shuffle", "ops/shuffle.py"),
                ("aiter.utility.fp4_utils", "utility/fp4_utils.py"),
            )
        }
