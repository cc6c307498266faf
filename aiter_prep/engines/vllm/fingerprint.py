"""Compares what the layouts of a folder mean with what the installed AITER does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiter_prep.engines.mismatch import EngineMismatch, convert_command
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiter_prep.layouts.permutation import Layout
    from aiter_prep.manifest import Manifest
    from aiter_prep.storage.buffers import ByteArray

_NOT_OF_AITER = frozenset({"row_major", "int4_scale"})
_EXPERTS, _ROWS, _COLUMNS = 2, 128, 64  # whole tiles of every layout: no padding, no fresh memory


def check_fingerprint(manifest: Manifest) -> None:
    """Lay a small matrix out with the installed AITER, and as the manifest describes it.

    Raises:
        EngineMismatch: AITER is missing, or lays it out in another way.
    """
    names = {record.layout for record in manifest.tensors if record.layout is not None}
    for name in sorted(names - _NOT_OF_AITER):
        layout = manifest.layout(name)
        if not np.array_equal(_ours(layout), _theirs(name, manifest)):
            raise EngineMismatch(
                f"the installed AITER lays out `{printable(name)}` in another way than the folder",
                "install the AITER that this engine was released with, or prepare it anew with an "
                f"aiter-prep that knows this one: {convert_command(manifest)}",
            )


def _matrix() -> ByteArray:
    """Return bytes no two of which within a tile are alike in both digits."""
    numbers = np.arange(_EXPERTS * _ROWS * _COLUMNS, dtype=np.uint32)
    mixed = (numbers * np.uint32(2654435761)) >> np.uint32(24)
    return mixed.astype(np.uint8).reshape(_EXPERTS, _ROWS, _COLUMNS)


def _ours(layout: Layout) -> ByteArray:
    matrix = _matrix()
    if layout.row_pad > 1:  # experts are folded into rows before they are padded
        matrix = matrix.reshape(1, -1, _COLUMNS)
    return layout.apply(matrix).reshape(-1)


def _theirs(name: str, manifest: Manifest) -> ByteArray:
    matrix = torch.from_numpy(_matrix())
    folded = matrix.reshape(-1, _COLUMNS)
    calls: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
        "tile_16x16": ("shuffle", "shuffle_weight", lambda f: f(matrix, (16, 16))),
        "tile_16x16_interleaved_16": (
            "shuffle",
            "shuffle_weight_a16w4",
            lambda f: f(matrix, 16, True),  # noqa: FBT003  # AITER's arguments have these places
        ),
        "e8m0": ("fp4", "e8m0_shuffle", lambda f: f(folded)),
        "e8m0_interleaved_16": (
            "shuffle",
            "shuffle_scale_a16w4",
            lambda f: f(folded, _EXPERTS, True),  # noqa: FBT003
        ),
        "e8m0_unpadded_rows": (
            "shuffle",
            "shuffle_scale_a16w4",
            lambda f: f(folded, _EXPERTS, False),  # noqa: FBT003
        ),
    }
    if name not in calls:
        raise EngineMismatch(
            f"layout `{printable(name)}` cannot be compared with the installed AITER",
            f"prepare it with this version of aiter-prep: {convert_command(manifest)}",
        )
    module, function, call = calls[name]
    shuffled = call(_aiter_function(module, function))
    return np.array(shuffled.view(torch.uint8).numpy()).reshape(-1)


_MODULES = {"shuffle": "aiter.ops.shuffle", "fp4": "aiter.utility.fp4_utils"}


def _aiter_function(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(_MODULES[module]), name)
    except (ImportError, AttributeError) as fault:
        raise EngineMismatch(
            f"AITER is not installed, or has no `{_MODULES[module]}.{name}`: {fault}",
            "install AMD's AITER: `pip install amd-aiter`, or use a ROCm image of vLLM; the "
            "package `aiter` on PyPI is another project",
        ) from fault
