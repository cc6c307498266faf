"""Stands in for what an engine imports and never calls while it loads and post-processes experts.

`install` must run before anything of the engine is imported; one process per chip.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from conformance.fake_aiter import install_aiter
from conformance.fake_modules import module


class _AnyType(type):
    """A class any attribute of which is such a class again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _anything(name)
        setattr(cls, name, made)
        return made

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls


def _anything(name: str) -> Any:
    """Return a class that can stand for a class, a function, a decorator or a constant."""
    return _AnyType(
        name,
        (),
        {
            "__init__": lambda _self, *_a, **_k: None,
            "__call__": lambda _self, *a, **_k: a[0] if a and callable(a[0]) else None,
            "__getattr__": _attribute,
        },
    )


def _attribute(_self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _anything(name)


class _StubModule(types.ModuleType):
    """A module that has whatever is asked of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _anything(name)
        setattr(self, name, made)
        return made


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs for packages that are not installed, and for modules named by prefix."""

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self.prefixes = prefixes
        self.packages: set[str] = set()

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in self.packages or fullname.startswith(self.prefixes):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Settings:
    """An engine's settings: those that are given, and all others false, whatever is asked."""

    def __init__(self, **given: Any) -> None:
        """Remembers what is `given`."""
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Settings()

    def __bool__(self) -> bool:
        return bool(self.__dict__)

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


class GateMode(enum.Enum):
    """AITER's orders of gate and up, which signatures of operators mention as defaults."""

    SEPARATED = "separated"
    INTERLEAVE = "interleave"


def _pretend_a_gpu(gfx: str) -> None:
    """Makes torch say that it was built for ROCm and sees one chip."""
    chip = SimpleNamespace(
        gcnArchName=f"{gfx}:sramecc+:xnack-",
        multi_processor_count=256,
        name="conformance",
        total_memory=1 << 38,
        major=9,
        minor=5 if gfx == "gfx950" else 4,
    )
    answers = {
        "get_device_properties": chip,
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (chip.major, chip.minor),
        "get_device_name": "conformance",
        "empty_cache": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_a, answer=answer, **_k: answer)
    torch.version.hip = "7.2.0"


def static_per_tensor_quant(out: Any, value: Any, scale: Any) -> None:
    """AITER's per-tensor FP8 kernel, with an exact reciprocal where the chip approximates it."""
    largest = 448.0 if out.dtype == torch.float8_e4m3fn else 240.0
    scaled = value.float() * (1.0 / scale.float())
    out.copy_(scaled.clamp(-largest, largest).to(out.dtype))


def _gate_up_rows(rows: Any) -> Any:
    """gfx1250: a row of gate, a row of up, a row of gate, ..."""
    half = rows.shape[1] // 2
    return torch.stack([rows[:, :half], rows[:, half:]], dim=2).flatten(1, 2).contiguous()


def moe_shuffle_weight(
    weight: Any,
    experts_cnt: int = 0,
    is_guinterleave: bool = False,
    gate_up: bool = False,
) -> Any:
    """AITER's choice by chip, aiter/ops/shuffle.py of 0.1.18 and later."""
    del experts_cnt
    shuffle = importlib.import_module("aiter.ops.shuffle")
    if _gfx() != "gfx1250":
        return shuffle.shuffle_weight(weight, is_guinterleave=is_guinterleave, gate_up=gate_up)
    as_bytes = weight.view(torch.uint8) if weight.element_size() == 1 else weight
    ordered = _gate_up_rows(as_bytes) if is_guinterleave and gate_up else as_bytes
    shuffled = shuffle.shuffle_weight(ordered).view(weight.dtype)
    shuffled.is_shuffled = True
    return shuffled


def moe_shuffle_scale(
    scale: Any,
    experts_cnt: int = 0,
    is_guinterleave: bool = False,
    gate_up: bool = False,
) -> Any:
    """AITER's choice by chip, aiter/ops/shuffle.py of 0.1.18 and later."""
    shuffle = importlib.import_module("aiter.ops.shuffle")
    folded = scale.reshape(-1, scale.shape[-1])
    if _gfx() != "gfx1250":
        return shuffle.shuffle_scale(folded, experts_cnt, is_guinterleave, gate_up)
    rows = folded.view(torch.uint8).view(experts_cnt, -1, scale.shape[-1])
    rows = _gate_up_rows(rows) if is_guinterleave and gate_up else rows
    count, height, width = rows.shape
    blocks = rows.reshape(count, height // 32, 32, width // 4, 4).permute(0, 1, 3, 2, 4)
    return blocks.reshape(count, height // 32, width * 32).contiguous()


def _gfx() -> str:
    found: str = importlib.import_module("aiter.jit.utils.chip_info").get_gfx()
    return found


def install(aiter_sources: Path, gfx: str, prefixes: tuple[str, ...] = ()) -> _Stubs:
    """Puts all stand-ins in place; returns the finder of stubs, for `import_engine`.

    Args:
        aiter_sources: the folder of AITER that has `ops/`.
        gfx: the chip.
        prefixes: modules of the engine that are kernels and nothing else.
    """
    _pretend_a_gpu(gfx)
    install_aiter(aiter_sources, gfx)
    shuffle = importlib.import_module("aiter.ops.shuffle")
    shuffle.__dict__.update(
        moe_shuffle_weight=moe_shuffle_weight, moe_shuffle_scale=moe_shuffle_scale
    )
    sys.modules["aiter"].__dict__["static_per_tensor_quant"] = static_per_tensor_quant
    importlib.import_module("aiter.utility.fp4_utils")
    for name, held in list(sys.modules.items()):
        if name.partition(".")[0] == "aiter":
            held.__dict__.setdefault("__getattr__", lambda wanted: _attribute(None, wanted))
    module("aiter.ops.flydsl", Path(os.devnull))
    module("aiter.ops.flydsl.moe_common", GateMode=GateMode)
    module("dill", dumps=lambda *_a, **_k: b"", loads=lambda *_a, **_k: None)
    stubs = _Stubs(("aiter.", *prefixes))
    sys.meta_path.insert(0, stubs)
    return stubs


def import_engine(stubs: _Stubs, *names: str) -> list[Any]:
    """Imports modules of the engine; a package that they ask for and is not installed is a stub."""
    found = None
    while found is None:
        found = _imported(stubs, names)
    return found


def _imported(stubs: _Stubs, names: Sequence[str]) -> list[Any] | None:
    """Imports modules, or makes a stub of what they lack and forgets what was half imported."""
    package = names[0].partition(".")[0]
    try:
        return [importlib.import_module(name) for name in names]
    except ModuleNotFoundError as missing:
        top = str(missing.name).partition(".")[0]
        if top in stubs.packages or top == package:
            raise
        stubs.packages.add(top)
    for loaded in [held for held in sys.modules if held.partition(".")[0] == package]:
        del sys.modules[loaded]
    return None
