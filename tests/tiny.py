"""Writes tiny checkpoints of every scheme, with numpy alone.

It has a safetensors writer of its own, apart from the product's, so that a header may also lie.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4}
WIDTH |= {"I64": 8, "BOOL": 1}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FP8_MAX = 0x7E  # 0x7F and 0xFF are NaN


@dataclass(frozen=True)
class Tensor:
    """A tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Tensor]

# --- safetensors --------------------------------------------------------------------------------


def header_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return an honest header for tensors that follow each other."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        offsets = [at, at + len(tensor.data)]
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        at = offsets[1]
    return header


def file_of(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a safetensors file; the header may be JSON text, and its length may lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def write_shard(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write an honest shard."""
    header = {"__metadata__": dict(metadata or {"format": "pt"}), **header_of(tensors)}
    path.write_bytes(file_of(header, b"".join(tensor.data for tensor in tensors.values())))


def read_shard(path: Path) -> Tensors:
    """Read every tensor of a file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    data = raw[8 + length :]
    return {
        name: Tensor(entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in json.loads(raw[8 : 8 + length]).items()
        if name != "__metadata__"
    }


def read_metadata(path: Path) -> dict[str, str]:
    """Read the `__metadata__` of a file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    found: dict[str, str] = json.loads(raw[8 : 8 + length]).get("__metadata__", {})
    return found


def read_folder(folder: Path) -> Tensors:
    """Read the tensors that the index names, or those of the only file."""
    index = folder / INDEX
    if not index.exists():
        (only,) = folder.glob("*.safetensors")
        return read_shard(only)
    place = json.loads(index.read_text("utf-8"))["weight_map"]
    shards = {file: read_shard(folder / file) for file in set(place.values())}
    return {name: shards[file][name] for name, file in place.items()}


# --- schemes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """How a writer stores the weights of an expert."""

    weight: tuple[str, str]  # suffix, dtype
    pack: int = 1  # elements in one stored element
    scale: tuple[str, str] | None = None
    scale_shape: Callable[[int, int], tuple[int, ...]] = lambda _n, _k: ()
    extra: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    quantization: Mapping[str, Any] | None = None


def blocks_of(rows: int, columns: int) -> tuple[int, ...]:
    return (-(-rows // 128), -(-columns // 128))


def groups_of(rows: int, columns: int) -> tuple[int, ...]:
    return (rows, columns // 32)


def vector_of(rows: int, _columns: int) -> tuple[int, ...]:
    return (rows,)


def column_of(rows: int, _columns: int) -> tuple[int, ...]:
    return (rows, 1)


def _quark(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    spec = {"dtype": dtype, "qscheme": qscheme, "is_dynamic": False, "ch_axis": 0, **more}
    return {"quant_method": "quark", "global_quant_config": {"weight": spec}, "exclude": []}


def _compressed(written: str, kind: str, bits: int, strategy: str) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": bits, "strategy": strategy}
    group = {"targets": ["Linear"], "format": written, "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": written,
        "ignore": [],
    }


_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_E4M3 = ("weight", "F8_E4M3")
_MX = {"group_size": 32, "scale_format": "e8m0"}

KINDS: dict[str, Kind] = {
    "bf16": Kind(("weight", "BF16")),
    "f16": Kind(("weight", "F16")),
    "fp8_block_f32": Kind(_E4M3, 1, ("weight_scale_inv", "F32"), blocks_of, quantization=_FP8),
    "fp8_block_bf16": Kind(_E4M3, 1, ("weight_scale_inv", "BF16"), blocks_of, quantization=_FP8),
    "fp8_channel_1d": Kind(
        _E4M3,
        1,
        ("weight_scale", "F32"),
        vector_of,
        quantization=_quark("fp8_e4m3", "per_channel"),
    ),
    "fp8_channel_n1": Kind(
        _E4M3,
        1,
        ("weight_scale", "BF16"),
        column_of,
        quantization=_compressed("float-quantized", "float", 8, "channel"),
    ),
    "mxfp4_quark": Kind(
        ("weight", "U8"),
        2,
        ("weight_scale", "U8"),
        groups_of,
        quantization=_quark("fp4", "per_group", **_MX),
    ),
    "mxfp4_ct": Kind(
        ("weight_packed", "U8"),
        2,
        ("weight_scale", "U8"),
        groups_of,
        quantization=_compressed("mxfp4-pack-quantized", "float", 4, "group"),
    ),
    "mxfp4_v4": Kind(
        ("weight", "I8"),
        2,
        ("scale", "F8_E8M0"),
        groups_of,
        quantization={**_FP8, "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
    ),
    "mxfp8": Kind(
        _E4M3,
        1,
        ("weight_scale_inv", "U8"),
        groups_of,
        quantization={"quant_method": "mxfp8", "weight_block_size": [1, 32]},
    ),
    "mxfp4_gpt_oss": Kind(
        ("blocks", "U8"),
        2,
        ("scales", "U8"),
        groups_of,
        quantization={"quant_method": "mxfp4"},
    ),
    # what the target `aiter` cannot undo, or refuses
    "fp8_tensor": Kind(
        _E4M3,
        1,
        ("weight_scale", "F32"),
        extra=(("input_scale", "F32", ()),),
        quantization=_quark("fp8_e4m3", "per_tensor"),
    ),
    "nvfp4": Kind(
        ("weight_packed", "U8"),
        2,
        ("weight_scale", "F8_E4M3"),
        lambda n, k: (n, k // 16),
        extra=(("weight_global_scale", "F32", (1,)), ("input_global_scale", "F32", (1,))),
        quantization=_compressed("nvfp4-pack-quantized", "float", 4, "tensor_group"),
    ),
    "int4": Kind(
        ("weight_packed", "I32"),
        8,
        ("weight_scale", "BF16"),
        groups_of,
        extra=(("weight_shape", "I64", (2,)),),
        quantization=_compressed("pack-quantized", "int", 4, "group"),
    ),
    "int8": Kind(
        ("weight", "I8"),
        1,
        ("weight_scale", "BF16"),
        column_of,
        quantization=_compressed("int-quantized", "int", 8, "channel"),
    ),
}

REFUSED = ("nvfp4", "int4", "int8")
CONVERTIBLE = tuple(name for name in KINDS if name not in {*REFUSED, "fp8_tensor"})
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
W1_W3_W2 = ("w1", "w3", "w2")


# --- models -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What a tiny checkpoint holds; the defaults are one layer of two experts.

    `spread` says which shard a tensor goes to: `single` file without an index, `layers` (one
    shard a layer), `apart` (weights in one, scales in another, the rest in a third) or `scattered`
    (every third tensor in the same one of three).
    """

    kind: str = "bf16"
    projections: tuple[str, str, str] = GATE_UP_DOWN
    experts: int = 2
    layers: int = 1
    hidden: int = 128
    intermediate: int = 128
    prefix: str = "model."
    module: str = "mlp"
    spread: str = "single"
    seed: int = 0
    biases: bool = True  # of gpt-oss
    config: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})

    @property
    def scheme(self) -> Kind:
        """How its experts are stored."""
        return KINDS[self.kind]

    @property
    def is_gpt_oss(self) -> bool:
        """Whether one tensor holds all experts."""
        return self.kind == "mxfp4_gpt_oss"

    def experts_path(self, layer: int = 0) -> str:
        """Return the module that holds a layer's experts."""
        return f"{self.prefix}layers.{layer}.{self.module}.experts"

    def name(self, expert: int, projection: str, suffix: str, layer: int = 0) -> str:
        """Return the name of a per-expert tensor."""
        return f"{self.experts_path(layer)}.{expert}.{projection}.{suffix}"


def random_bytes(rng: np.random.Generator, dtype: str, count: int) -> bytes:
    """Return `count` random elements: no NaN, no infinity, scales that may be doubled."""
    if dtype == "F32":
        return (rng.random(count) * 2.0**-6 + 2.0**-9).astype("<f4").tobytes()
    if dtype in ("BF16", "F16"):  # an exponent of all ones would be a NaN or an infinity
        sign = rng.integers(0, 2, count, dtype=np.uint16) << np.uint16(15)
        return (sign | rng.integers(0x2000, 0x3C00, count, dtype=np.uint16)).astype("<u2").tobytes()
    if dtype == "F8_E4M3":  # 0x80, the negative zero, among them
        sign = rng.integers(0, 2, count, dtype=np.uint8) << np.uint8(7)
        return (sign | rng.integers(0, FP8_MAX + 1, count, dtype=np.uint8)).tobytes()
    if dtype == "F8_E8M0":
        return rng.integers(110, 135, count, dtype=np.uint8).tobytes()
    return rng.integers(0, 256, count * WIDTH[dtype], dtype=np.uint8).tobytes()


def tensor(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of random bytes."""
    return Tensor(dtype, shape, random_bytes(rng, dtype, prod(shape)))


Shape = tuple[str, tuple[int, ...]]  # dtype and shape


def shapes_of(model: Model) -> dict[str, Shape]:
    """Return dtype and shape of every tensor, experts and others, in the order of the layers."""
    found: dict[str, Shape] = {}
    for layer in range(model.layers):
        base = f"{model.prefix}layers.{layer}"
        found[f"{base}.input_layernorm.weight"] = ("BF16", (model.hidden,))
        found[f"{base}.{model.module}.gate.weight"] = ("BF16", (model.experts, model.hidden))
        experts = _fused if model.is_gpt_oss else _per_expert
        found.update(experts(model, layer))
    found[f"{model.prefix}embed_tokens.weight"] = ("BF16", (16, model.hidden))
    found[f"{model.prefix}norm.weight"] = ("BF16", (model.hidden,))
    return found


def tensors_of(model: Model) -> Tensors:
    """Return every tensor of a model, with random bytes."""
    rng = np.random.default_rng(model.seed)
    return {name: tensor(rng, *shape) for name, shape in shapes_of(model).items()}


def _per_expert(model: Model, layer: int) -> Iterator[tuple[str, Shape]]:
    gate, up, down = model.projections
    sizes = {
        gate: (model.intermediate, model.hidden),
        up: (model.intermediate, model.hidden),
        down: (model.hidden, model.intermediate),
    }
    kind = model.scheme
    for expert in range(model.experts):
        for projection, (rows, columns) in sizes.items():
            parts = [(*kind.weight, (rows, columns // kind.pack)), *kind.extra]
            if kind.scale is not None:
                parts.append((*kind.scale, kind.scale_shape(rows, columns)))
            for suffix, dtype, shape in parts:
                yield model.name(expert, projection, suffix, layer), (dtype, shape)


def _fused(model: Model, layer: int) -> Iterator[tuple[str, Shape]]:
    path = model.experts_path(layer)
    sizes = {
        "gate_up_proj": (2 * model.intermediate, model.hidden),
        "down_proj": (model.hidden, model.intermediate),
    }
    for projection, (rows, columns) in sizes.items():
        lead = (model.experts, rows, columns // 32)
        yield f"{path}.{projection}_blocks", ("U8", (*lead, 16))
        yield f"{path}.{projection}_scales", ("U8", lead)
        if model.biases:
            yield f"{path}.{projection}_bias", ("BF16", lead[:2])


def config_of(model: Model) -> dict[str, Any]:
    """Return a config that says what the tensors are."""
    config: dict[str, Any] = {
        "architectures": ["TinyMoeForCausalLM"],
        "model_type": "tiny_moe",
        "hidden_size": model.hidden,
        "moe_intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_experts": model.experts,
    }
    if model.scheme.quantization is not None:
        config["quantization_config"] = dict(model.scheme.quantization)
    return {**config, **model.config}


def shards_of(model: Model, tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """Spread tensors over shards as the model wants it."""
    if model.spread == "single":
        return {SINGLE: dict(tensors)}
    labels: dict[str, Tensors] = {}
    for number, (name, content) in enumerate(tensors.items()):
        labels.setdefault(_label(model, name, number), {})[name] = content
    count = len(labels)
    return {
        f"model-{part:05d}-of-{count:05d}.safetensors": content
        for part, (_, content) in enumerate(sorted(labels.items()), 1)
    }


def _label(model: Model, name: str, number: int) -> str:
    if model.spread == "scattered":
        return str(number % 3)
    if model.spread == "apart":
        if ".experts." not in name:
            return "rest"
        return "scales" if "scale" in name.rsplit(".", 1)[-1] else "weights"
    assert model.spread == "layers", model.spread
    after = name.partition("layers.")[2]
    return after.partition(".")[0] or "rest"


def write_shards(
    folder: Path,
    shards: Mapping[str, Mapping[str, Tensor]],
    config: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint of given shards; an index unless there is one file alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    for file, content in shards.items():
        write_shard(folder / file, content, metadata)
    if list(shards) != [SINGLE]:
        place = {name: file for file, content in shards.items() for name in content}
        total = sum(len(t.data) for content in shards.values() for t in content.values())
        index = {"metadata": {"total_size": total}, "weight_map": place}
        (folder / INDEX).write_text(json.dumps(index), "utf-8")
    return folder


def write_tensors(folder: Path, model: Model, tensors: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint with a model's config and spread, but these tensors."""
    return write_shards(folder, shards_of(model, tensors), config_of(model), model.metadata)


def write(folder: Path, model: Model | None = None, **changes: Any) -> Path:
    """Write a checkpoint: `write(tmp_path / "m", kind="mxfp8", layers=2)`."""
    model = replace(model or Model(), **changes)
    return write_tensors(folder, model, tensors_of(model))


# A model of every scheme, small, with a tensor-parallel size that pads and one that does not.
# (FP8 in blocks, per channel and MXFP8 are never padded by the `aiter` target.)
SAMPLES: dict[str, tuple[Model, int, int | None]] = {
    "bf16": (Model("bf16", hidden=64, intermediate=192), 1, 2),
    "f16": (Model("f16", hidden=64, intermediate=192, projections=W1_W3_W2), 1, 2),
    "fp8_block_f32": (Model("fp8_block_f32", hidden=256, intermediate=256), 2, None),
    "fp8_block_bf16": (Model("fp8_block_bf16", hidden=128, intermediate=384), 3, None),
    "fp8_channel_1d": (Model("fp8_channel_1d", hidden=96, intermediate=192), 3, None),
    "fp8_channel_n1": (Model("fp8_channel_n1", hidden=64, intermediate=128), 2, None),
    "mxfp4_quark": (Model("mxfp4_quark", hidden=256, intermediate=512), 2, 4),
    "mxfp4_ct": (Model("mxfp4_ct", hidden=256, intermediate=256), 1, 2),
    "mxfp4_v4": (
        Model(
            "mxfp4_v4",
            hidden=256,
            intermediate=256,
            prefix="",
            module="ffn",
            projections=W1_W3_W2,
        ),
        1,
        4,
    ),
    "mxfp8": (
        Model(
            "mxfp8",
            hidden=96,
            intermediate=192,
            prefix="language_model.model.",
            module="block_sparse_moe",
            projections=W1_W3_W2,
        ),
        3,
        None,
    ),
    "mxfp4_gpt_oss": (Model("mxfp4_gpt_oss", hidden=256, intermediate=512, experts=3), 2, 5),
}
