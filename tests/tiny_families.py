"""Tiny checkpoints of every family, in the names and configs of the published ones, in numpy.

Names, dtypes and shapes follow docs/families.md; values are random, and no FP8 byte is NaN.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tiny import blocks_of, column_of, groups_of, vector_of

WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4}
WIDTH |= {"I64": 8}

GATED = ("gate_proj", "up_proj", "down_proj")
NUMBERED = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Tensor:
    """A tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Tensor]
Scale = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class Scheme:
    """How the matrices of an expert are stored: suffix, dtype and elements of a stored one."""

    weight: tuple[str, str, int]
    scale: tuple[str, str, Scale] | None = None
    static_inputs: bool = False
    weight_shape: str = ""


def _nothing(_rows: int, _columns: int) -> tuple[int, ...]:
    return ()


def _one(_rows: int, _columns: int) -> tuple[int, ...]:
    return (1,)


_FP8 = ("weight", "F8_E4M3", 1)
SCHEMES: dict[str, Scheme] = {
    "bf16": Scheme(("weight", "BF16", 1)),
    "fp8_block": Scheme(_FP8, ("weight_scale_inv", "F32", blocks_of)),
    "fp8_block_bf16": Scheme(_FP8, ("weight_scale_inv", "BF16", blocks_of)),
    "fp8_block_ct": Scheme(_FP8, ("weight_scale", "BF16", blocks_of)),
    "fp8_block_v4": Scheme(_FP8, ("scale", "F32", blocks_of)),
    "fp8_channel_quark": Scheme(_FP8, ("weight_scale", "F32", vector_of)),
    "fp8_channel_ct": Scheme(_FP8, ("weight_scale", "BF16", column_of)),
    "fp8_tensor": Scheme(_FP8, ("weight_scale", "F32", _nothing)),
    "fp8_tensor_static": Scheme(_FP8, ("weight_scale", "F32", _nothing), static_inputs=True),
    "fp8_tensor_ct": Scheme(_FP8, ("weight_scale", "BF16", _one)),
    "mxfp8_inv": Scheme(_FP8, ("weight_scale_inv", "U8", groups_of)),
    "mxfp8": Scheme(_FP8, ("weight_scale", "U8", groups_of)),
    "mxfp4": Scheme(("weight", "U8", 2), ("weight_scale", "U8", groups_of)),
    "mxfp4_static": Scheme(
        ("weight", "U8", 2), ("weight_scale", "U8", groups_of), static_inputs=True
    ),
    "mxfp4_v4": Scheme(("weight", "I8", 2), ("scale", "F8_E8M0", groups_of)),
    "mxfp4_packed": Scheme(("weight_packed", "U8", 2), ("weight_scale", "U8", groups_of)),
    "int4": Scheme(
        ("weight_packed", "I32", 8), ("weight_scale", "BF16", groups_of), weight_shape="I32"
    ),
}


@dataclass(frozen=True)
class Experts:
    """One module of routed experts.

    `fused` is `rows` or `columns` where one tensor holds all experts, the latter transposed, or
    `gpt_oss`; `gpt_oss_quark` has one gate_up tensor for each expert.
    """

    path: str
    scheme: str
    names: tuple[str, str, str] = GATED
    fused: str = ""
    experts: int = 4


@dataclass(frozen=True)
class Family:
    """A tiny checkpoint.

    `special` names what an engine does of its own with it, as the recipes of the oracle call it;
    `refused` are the targets that have no path; `options` are for a target that needs some.
    """

    model: Mapping[str, Any]
    modules: tuple[Experts, ...]
    quantization: Mapping[str, Any] | None = None
    hf_quant_config: Mapping[str, Any] | None = None
    common: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    hidden: int = 256
    intermediate: int = 256
    special: str = ""
    refused: frozenset[str] = frozenset()
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class Values:
    """Random bytes that mean ordinary numbers."""

    def __init__(self, name: str) -> None:
        self._random = np.random.default_rng(zlib.crc32(name.encode()))

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Return a weight."""
        count = prod(shape)
        data: Any = self._random.integers(0, 256, count * WIDTH[dtype], dtype=np.uint8)
        if dtype == "F8_E4M3":
            data = np.where(data & 0x7F == 0x7F, np.uint8(0x3F), data)
        if dtype == "BF16":
            small = self._random.standard_normal(count).astype(np.float32)
            data = (small.view(np.uint32) >> 16).astype("<u2")
        if dtype == "F32":
            data = self._random.standard_normal(count).astype("<f4")
        return Tensor(dtype, shape, data.tobytes())

    def scale(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Return a scale: between a thousandth and a hundredth, or the byte of such a power."""
        count = prod(shape)
        if dtype in ("U8", "F8_E8M0"):
            data: Any = self._random.integers(117, 124, count, dtype=np.uint8)
            return Tensor(dtype, shape, data.tobytes())
        values = self._random.uniform(1e-3, 1e-2, count).astype(np.float32)
        data = values.astype("<f4")
        if dtype == "BF16":
            data = (values.view(np.uint32) >> 16).astype("<u2")
        return Tensor(dtype, shape, data.tobytes())


def write(folder: Path, name: str, family: Family) -> Path:
    """Write a family's checkpoint; the same name gives the same bytes."""
    values = Values(name)
    tensors: Tensors = {}
    for module in family.modules:
        tensors |= _module(values, module, family.hidden, family.intermediate)
    for common, (dtype, shape) in family.common.items():
        tensors[common] = values.tensor(dtype, shape)
    folder.mkdir(parents=True)
    _save(folder / "model.safetensors", dict(sorted(tensors.items())))
    config = json.loads(json.dumps(family.model))
    text = config.get("text_config", config)
    text["hidden_size"] = family.hidden
    text["moe_intermediate_size"] = text["intermediate_size"] = family.intermediate
    if family.quantization is not None:
        holder = (
            config if "text_config" not in config or _outside(family) else config["text_config"]
        )
        holder["quantization_config"] = family.quantization
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if family.hf_quant_config is not None:
        text = json.dumps(family.hf_quant_config)
        (folder / "hf_quant_config.json").write_text(text, "utf-8")
    return folder


def _outside(family: Family) -> bool:
    """Kimi-K2.5 and K3 say how they are quantised inside `text_config`, all others outside."""
    return not str(family.model["model_type"]).startswith("kimi")


def _module(values: Values, module: Experts, hidden: int, inter: int) -> Tensors:
    if module.fused == "gpt_oss":
        return _gpt_oss(values, module, hidden, inter)
    if module.fused == "gpt_oss_quark":
        return _gpt_oss_quark(values, module, hidden, inter)
    shapes = dict(
        zip(module.names, ((inter, hidden), (inter, hidden), (hidden, inter)), strict=True)
    )
    if module.fused:
        fused = {"gate_up_proj": (2 * inter, hidden), "down_proj": (hidden, inter)}
        return {
            f"{module.path}.{name}": values.tensor(
                "BF16", (module.experts, *(shape[::-1] if module.fused == "columns" else shape))
            )
            for name, shape in fused.items()
        }
    tensors: Tensors = {}
    for expert in range(module.experts):
        for name, shape in shapes.items():
            tensors |= _matrix(values, f"{module.path}.{expert}.{name}", module.scheme, shape)
    return tensors


def _gpt_oss(values: Values, module: Experts, hidden: int, inter: int) -> Tensors:
    count = module.experts
    found: Tensors = {}
    for name, rows, columns in (("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)):
        groups = (count, rows, columns // 32)
        found[f"{module.path}.{name}_blocks"] = values.tensor("U8", (*groups, 16))
        found[f"{module.path}.{name}_scales"] = values.scale("U8", groups)
        found[f"{module.path}.{name}_bias"] = values.tensor("BF16", (count, rows))
    return found


def _gpt_oss_quark(values: Values, module: Experts, hidden: int, inter: int) -> Tensors:
    found: Tensors = {}
    for expert in range(module.experts):
        for name, shape in (("gate_up_proj", (2 * inter, hidden)), ("down_proj", (hidden, inter))):
            path = f"{module.path}.{expert}.{name}"
            found |= _matrix(values, path, module.scheme, shape)
            found[f"{path}.bias"] = values.tensor("BF16", shape[:1])
    return found


def _matrix(values: Values, name: str, scheme: str, shape: tuple[int, int]) -> Tensors:
    how = SCHEMES[scheme]
    suffix, dtype, per_element = how.weight
    rows, columns = shape
    found = {f"{name}.{suffix}": values.tensor(dtype, (rows, columns // per_element))}
    if how.scale is not None:
        suffix, dtype, of = how.scale
        found[f"{name}.{suffix}"] = values.scale(dtype, of(rows, columns))
    if how.static_inputs:
        found[f"{name}.input_scale"] = values.scale("F32", ())
    if how.weight_shape:
        sizes = np.array(shape, "<i4").tobytes()
        found[f"{name}.weight_shape"] = Tensor(how.weight_shape, (2,), sizes)
    return found


def _save(path: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        end = at + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    data = b"".join(tensor.data for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
