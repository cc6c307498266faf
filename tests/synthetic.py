"""Writes large checkpoints of random bytes, one shard a layer, in little memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

import tiny

POOL_ELEMENTS = 1 << 24


def write_model(folder: Path, model: tiny.Model) -> Path:
    """Write a model whose tensors are cut from random places of a pool of random elements."""
    model = replace(model, spread="layers")
    rng = np.random.default_rng(model.seed)
    pools: dict[tuple[str, bool], memoryview] = {}
    shards: dict[str, dict[str, tiny.Shape]] = {}
    for name, shape in tiny.shapes_of(model).items():
        layer = name.partition("layers.")[2].partition(".")[0]
        shards.setdefault(f"model-{layer or 'rest'}.safetensors", {})[name] = shape
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tiny.config_of(model), indent=2), "utf-8")
    weight_map = {name: file for file, shapes in shards.items() for name in shapes}
    (folder / tiny.INDEX).write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    for file, shapes in shards.items():
        with (folder / file).open("wb") as out:
            out.write(tiny.file_of(_header(shapes)))
            for name, shape in shapes.items():
                kind = (shape[0], "scale" in name)
                if kind not in pools:
                    pools[kind] = _pool(rng, *kind)
                for piece in _cut(pools[kind], _size(shape), rng):
                    out.write(piece)
    return folder


def _header(shapes: Mapping[str, tiny.Shape]) -> dict[str, object]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (dtype, shape) in shapes.items():
        end = start + _size((dtype, shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    return header


def _size(shape: tiny.Shape) -> int:
    return prod(shape[1]) * tiny.WIDTH[shape[0]]


def _pool(rng: np.random.Generator, dtype: str, is_scale: bool) -> memoryview:
    if is_scale and dtype == "U8":  # e8m0: powers of two around one
        dtype = "F8_E8M0"
    return memoryview(tiny.random_bytes(rng, dtype, POOL_ELEMENTS))


def _cut(pool: memoryview, size: int, rng: np.random.Generator) -> Iterator[memoryview]:
    """Yield `size` bytes of a pool, from a random place of its first half on, around its end."""
    start = int(rng.integers(0, len(pool) // 16)) * 8
    while size:
        piece = pool[start : start + size]
        yield piece
        size, start = size - len(piece), 0
