"""Tensors of random but valid values, as raw bytes, and the checkpoints made of them."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]
Named = tuple[str, "RawTensor"]


@dataclass(frozen=True)
class RawTensor:
    """A tensor as a file holds it: safetensors dtype name, shape, little-endian bytes."""

    dtype: str
    shape: Shape
    data: bytes


class Values:
    """A seeded source of tensors; the same seed gives the same checkpoint."""

    def __init__(self, seed: int) -> None:
        """Starts the source at `seed`."""
        self._random = np.random.default_rng(seed)

    def _bytes(self, shape: Shape) -> npt.NDArray[np.uint8]:
        return self._random.integers(0, 256, size=shape, dtype=np.uint8)

    def _normal(self, shape: Shape) -> npt.NDArray[np.float32]:
        return (self._random.standard_normal(shape) * 0.02).astype(np.float32)

    def _scales(self, shape: Shape) -> npt.NDArray[np.float32]:
        return np.exp(self._random.uniform(-8.0, -4.0, size=shape)).astype(np.float32)

    def bf16(self, *shape: int) -> RawTensor:
        """Weights around zero."""
        return RawTensor("BF16", shape, _to_bf16(self._normal(shape)))

    def f32(self, *shape: int) -> RawTensor:
        """Weights around zero."""
        return RawTensor("F32", shape, self._normal(shape).tobytes())

    def i64(self, below: int, *shape: int) -> RawTensor:
        """Indices from 0 to `below` - 1."""
        return RawTensor("I64", shape, self._random.integers(0, below, size=shape).tobytes())

    def size(self, *numbers: int) -> RawTensor:
        """The tensor that tells a packed tensor's logical shape."""
        return RawTensor("I64", (len(numbers),), np.asarray(numbers, dtype="<i8").tobytes())

    def i32(self, *shape: int) -> RawTensor:
        """Any 32 bits: eight int4 values."""
        return RawTensor("I32", shape, self._bytes((*shape, 4)).tobytes())

    def fp8(self, *shape: int) -> RawTensor:
        """Any e4m3 byte but the NaNs 0x7F and 0xFF; 0x80, minus zero, occurs."""
        drawn = self._bytes(shape)
        return RawTensor("F8_E4M3", shape, np.where(drawn & 0x7F == 0x7F, 0, drawn).tobytes())

    def fp4(self, dtype: str, *shape: int) -> RawTensor:
        """Any byte: two e2m1 values; `dtype` is how the checkpoint calls it, `U8` or `I8`."""
        return RawTensor(dtype, shape, self._bytes(shape).tobytes())

    def e8m0(self, dtype: str, *shape: int) -> RawTensor:
        """Exponent bytes of scales far from overflow, as `U8` or `F8_E8M0`."""
        drawn = self._random.integers(100, 130, size=shape, dtype=np.uint8)
        return RawTensor(dtype, shape, drawn.tobytes())

    def scale(self, dtype: str, *shape: int) -> RawTensor:
        """Positive scales, as `F32`, `BF16` or `F8_E8M0`."""
        if dtype == "F8_E8M0":
            return self.e8m0(dtype, *shape)
        drawn = self._scales(shape)
        return RawTensor(dtype, shape, drawn.tobytes() if dtype == "F32" else _to_bf16(drawn))


def input_scale(dtype: str, shape: Shape, name: str) -> RawTensor:
    """The activations' scale of the linear `name`: an expert's gate and up share their input."""
    expert, _, leaf = name.rpartition(".")
    shared = f"{expert} {leaf in {'down_proj', 'w2'}}"
    value = np.exp(np.full(shape, -8 + zlib.crc32(shared.encode()) / 2**30)).astype(np.float32)
    return RawTensor(dtype, shape, value.tobytes() if dtype == "F32" else _to_bf16(value))


def _to_bf16(values: npt.NDArray[np.float32]) -> bytes:
    bits = np.asarray(values, dtype="<f4").view("<u4")
    return np.asarray(bits >> np.uint32(16), dtype="<u2").tobytes()


def save_tensors(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """Writes one safetensors file, by hand, so that every dtype name can be used."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.data)


def _parts(tensors: Mapping[str, RawTensor], count: int) -> list[dict[str, RawTensor]]:
    """Splits by name order, so that the tensors of one expert can lie in different parts."""
    names = sorted(tensors)
    size = math.ceil(len(names) / count)
    return [
        {name: tensors[name] for name in names[i : i + size]} for i in range(0, len(names), size)
    ]


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, RawTensor],
    config: Mapping[str, Any],
    extra: Mapping[str, Mapping[str, Any]] | None = None,
    shards: int = 2,
) -> None:
    """Writes a checkpoint folder: shards, index, `config.json` and `extra` JSON files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = _parts(tensors, shards)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_tensors(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    total = sum(len(tensor.data) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    documents = {"config.json": config, "model.safetensors.index.json": index, **(extra or {})}
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
