"""What the `aiter` target must hold, computed a second time and the slow way.

Written from the layout documents alone and sharing no code with the package: every permutation is
a plain loop over the documented offset formula. Input is assumed to be valid; what this module does
not cover raises NotImplementedError, so that a missing case cannot look like a passing one.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1}
RUNTIME = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
FLOATS = {"F16": "<f2", "F32": "<f4"}
PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
PROJECTIONS |= {"w1": "gate", "w3": "up", "w2": "down"}
KINDS = {"weight": "weight", "weight_packed": "weight", "bias": "bias"}
KINDS |= {"weight_scale": "scale", "weight_scale_inv": "scale", "scale": "scale"}
FUSED_KINDS = {"blocks": "weight", "scales": "scale", "bias": "bias"}
PER_EXPERT = re.compile(r"((?:.+\.)?experts)\.(\d+)\.([^.]+)\.(.+)")
FUSED = re.compile(r"((?:.+\.)?experts)\.(gate_up_proj|down_proj)_(blocks|scales|bias)")


@dataclass(frozen=True)
class Expected:
    """One prepared tensor as it must be stored."""

    dtype: str
    runtime_dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Source:
    """One tensor of the checkpoint, as it lies in the file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def rows(self) -> Bytes:
        """Return the bytes as `[rows, bytes in a row]`; a vector has one element in a row."""
        table = np.frombuffer(self.data, dtype=np.uint8)
        return table.reshape(self.shape[0], len(self.data) // self.shape[0])


@dataclass
class Layer:
    """The routed experts of one layer, keyed by (expert, gate / up / down, weight / scale / bias).

    `gpt_oss` marks the fused form, which has its own slicing and its own rule for the w2 bias.
    """

    gpt_oss: bool = False
    scale_name: str = "weight_scale"
    parts: dict[tuple[int, str, str], Source] = field(default_factory=dict)

    def all(self, projection: str, kind: str) -> list[Source]:
        """Return one part of every expert, by expert id; empty if the layer has no such part."""
        experts = sorted(e for e, p, k in self.parts if (p, k) == (projection, kind))
        return [self.parts[e, projection, kind] for e in experts]


# Reading


def read_safetensors(path: Path) -> dict[str, Source]:
    """Read every tensor of one file."""
    raw = path.read_bytes()
    (header_size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + header_size])
    body = raw[8 + header_size :]
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = Source(entry["dtype"], tuple(entry["shape"]), body[begin:end])
    return tensors


def read_checkpoint(folder: Path) -> dict[str, Source]:
    """Read the tensors the index names, or those of the files there are when there is no index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        return {name: t for file in files for name, t in read_safetensors(file).items()}
    place = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    content = {file: read_safetensors(folder / file) for file in sorted(set(place.values()))}
    return {name: content[file][name] for name, file in place.items()}


def take_rows(source: Source, expert: int, rows: Sequence[int]) -> Source:
    """Take the listed rows of one expert out of a fused tensor `[E, N, ...]`."""
    experts, count = source.shape[:2]
    size = len(source.data) // (experts * count)
    starts = [(expert * count + row) * size for row in rows]
    data = b"".join(source.data[start : start + size] for start in starts)
    if len(source.shape) == 2:
        return Source(source.dtype, (len(rows),), data)
    return Source(source.dtype, (len(rows), size // WIDTH[source.dtype]), data)


def routed_experts(tensors: dict[str, Source]) -> dict[str, Layer]:
    """Sort the routed experts of a checkpoint by the module path that holds them."""
    layers: dict[str, Layer] = {}
    for name, source in tensors.items():
        if match := PER_EXPERT.fullmatch(name):
            path, expert, projection, suffix = match.groups()
            if projection not in PROJECTIONS or suffix not in KINDS:
                raise NotImplementedError(name)
            layer = layers.setdefault(path, Layer())
            layer.parts[int(expert), PROJECTIONS[projection], KINDS[suffix]] = source
            if suffix == "weight_scale_inv":
                layer.scale_name = suffix
        elif match := FUSED.fullmatch(name):
            path, projection, suffix = match.groups()
            layer = layers.setdefault(path, Layer())
            layer.gpt_oss = True
            kind, rows = FUSED_KINDS[suffix], source.shape[1]
            for expert in range(source.shape[0]):
                if projection == "down_proj":
                    layer.parts[expert, "down", kind] = take_rows(source, expert, range(rows))
                else:  # row 2i is gate i, row 2i + 1 is up i
                    even, odd = range(0, rows, 2), range(1, rows, 2)
                    layer.parts[expert, "gate", kind] = take_rows(source, expert, even)
                    layer.parts[expert, "up", kind] = take_rows(source, expert, odd)
        elif "experts" in name.split("."):
            raise NotImplementedError(name)
    return layers


# Sizes


def ceil_to(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


def scheme_of(weight: Source, scale: Source | None) -> str:
    """Name the source scheme: plain, block, channel, mxfp4 or mxfp8."""
    n, k = weight.shape
    if scale is None:
        if weight.dtype in ("BF16", "F16"):
            return "plain"
    elif scale.dtype in ("U8", "F8_E8M0"):
        if weight.dtype in ("U8", "I8") and scale.shape == (n, k * 2 // 32):
            return "mxfp4"
        if weight.dtype == "F8_E4M3" and scale.shape == (n, k // 32):
            return "mxfp8"
    elif weight.dtype == "F8_E4M3" and scale.dtype in ("F32", "BF16", "F16"):
        if scale.shape in ((n,), (n, 1)):
            return "channel"
        if scale.shape == (-(-n // 128), -(-k // 128)):
            return "block"
    kind = "no scale" if scale is None else f"scale {scale.dtype} {scale.shape}"
    raise NotImplementedError(f"weight {weight.dtype} {weight.shape}, {kind}")


def rank_columns(inter: int, tp: int, gpt_oss: bool = False) -> list[tuple[int, int]]:
    """Return (start, stop) of every rank's share of the intermediate size."""
    if gpt_oss:
        share = -(-(inter // 32) // tp) * 32
        return [(min(r * share, inter), min((r + 1) * share, inter)) for r in range(tp)]
    if inter % tp:
        raise ValueError(f"{inter} does not divide by {tp}")
    share = inter // tp
    return [(r * share, (r + 1) * share) for r in range(tp)]


def padded_sizes(scheme: str, share: int, hidden: int) -> tuple[int, int]:
    """Return one rank's intermediate size and the hidden size after padding."""
    if scheme == "plain":
        return ceil_to(share, 64 if share <= 192 else 128), hidden
    if scheme == "mxfp4":
        unit, sizes = 32, (ceil_to(share, 256), ceil_to(hidden, 256))
    else:
        unit, sizes = {"mxfp8": 32, "block": 128, "channel": 1}[scheme], (share, hidden)
    if share % unit or hidden % unit:
        raise ValueError(f"{share} or {hidden} is not a multiple of {unit}")
    return sizes


# Layouts


@cache
def tile_offsets(n_rows: int, row_bytes: int) -> npt.NDArray[np.int64]:
    """Where each byte of a weight goes when it is cut into tiles of 16 rows x 16 bytes."""
    if n_rows % 16 or row_bytes % 32:
        raise ValueError(f"[{n_rows}, {row_bytes}] bytes cannot be tiled")
    offsets = np.empty(n_rows * row_bytes, dtype=np.int64)
    i = 0
    for n in range(n_rows):
        for kb in range(row_bytes):
            tile = (n // 16) * (row_bytes // 16) + kb // 16
            offsets[i] = tile * 256 + (n % 16) * 16 + kb % 16
            i += 1
    return offsets


@cache
def e8m0_offsets(n_rows: int, n_cols: int) -> npt.NDArray[np.int64]:
    """Where each byte of a padded scale goes in `e8m0_shuffle`.

    Row = (r0, r1 of 2, r2 of 16) and column = (c0, c1 of 2, c2 of 4), stored in the order
    r0, c0, c2, r2, c1, r1.
    """
    offsets = np.empty(n_rows * n_cols, dtype=np.int64)
    i = 0
    for row in range(n_rows):
        r0, r1, r2 = row // 32, row % 32 // 16, row % 16
        for col in range(n_cols):
            c0, c1, c2 = col // 8, col % 8 // 4, col % 4
            offsets[i] = (r0 * (n_cols // 8) + c0) * 256 + c2 * 64 + r2 * 4 + c1 * 2 + r1
            i += 1
    return offsets


def tile_16x16(weight: Bytes) -> Bytes:
    """Tile `[N, KB]` or `[E, N, KB]` bytes, every expert on its own."""
    if weight.ndim == 3:
        return np.stack([tile_16x16(expert) for expert in weight])
    flat = np.empty(weight.size, dtype=np.uint8)
    flat[tile_offsets(*weight.shape)] = weight.ravel()
    return flat.reshape(weight.shape)


def shuffle_e8m0(scale: Bytes) -> Bytes:
    """Pad `[rows, columns]` to 256 and 8 with 0x00, then shuffle."""
    rows, cols = scale.shape
    padded = np.zeros((ceil_to(rows, 256), ceil_to(cols, 8)), dtype=np.uint8)
    padded[:rows, :cols] = scale
    flat = np.empty(padded.size, dtype=np.uint8)
    flat[e8m0_offsets(*padded.shape)] = padded.ravel()
    return flat.reshape(padded.shape)


def join_w13(gate: list[Bytes], up: list[Bytes], rows: slice, half: int, width: int) -> Bytes:
    """Build `[E, 2 * half, width]`: the chosen gate rows from 0, the chosen up rows from `half`."""
    out = np.zeros((len(gate), 2 * half, width), dtype=np.uint8)
    for e, (g, u) in enumerate(zip(gate, up, strict=True)):
        count, size = g[rows].shape
        out[e, :count, :size] = g[rows]
        out[e, half : half + count, :size] = u[rows]
    return out


def join_w2(down: list[Bytes], columns: slice, height: int, width: int) -> Bytes:
    """Build `[E, height, width]` from the chosen byte columns."""
    out = np.zeros((len(down), height, width), dtype=np.uint8)
    for e, d in enumerate(down):
        count, size = d[:, columns].shape
        out[e, :count, :size] = d[:, columns]
    return out


# Values


def to_fnuz(weight: Bytes) -> Bytes:
    """Rewrite e4m3fn bytes for e4m3fnuz, where 0x80 is NaN and every value counts half."""
    if np.any((weight == 0x7F) | (weight == 0xFF)):
        raise ValueError("NaN has no byte in e4m3fnuz that means the same")
    return np.where(weight == 0x80, np.uint8(0), weight)


def to_f32(source: Source) -> npt.NDArray[np.float32]:
    """Widen BF16, F16 or F32 values, exactly."""
    if source.dtype == "BF16":
        bits = np.frombuffer(source.data, dtype="<u2").astype(np.uint32) << np.uint32(16)
        return np.asarray(bits.view(np.float32))
    return np.frombuffer(source.data, dtype=FLOATS[source.dtype]).astype(np.float32)


def doubled(source: Source) -> Source:
    """Multiply by two in the tensor's own dtype; only the exponent changes, so nothing rounds."""
    twice = to_f32(source) * np.float32(2)
    if source.dtype == "BF16":
        data = (twice.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    else:
        data = twice.astype(FLOATS[source.dtype]).tobytes()
    return Source(source.dtype, source.shape, data)


def f32_rows(source: Source) -> Bytes:
    """Return a bias as `[N, 4]` bytes of F32."""
    return Source("F32", source.shape, to_f32(source).astype("<f4").tobytes()).rows()


# The target


def stored(table: Bytes, dtype: str, runtime: str | None = None) -> Expected:
    """Describe a byte table as a tensor; its last axis becomes elements of `dtype`."""
    shape = (*table.shape[:-1], table.shape[-1] // WIDTH[dtype])
    return Expected(dtype, runtime or RUNTIME[dtype], shape, table.tobytes())


def expected_layer(layer: Layer, tp: int, gfx: str) -> dict[tuple[int, str], Expected]:
    """Prepare the experts of one layer; names are relative to the experts' path."""
    gate, up, down = (layer.all(p, "weight") for p in ("gate", "up", "down"))
    scales = {p: layer.all(p, "scale") for p in ("gate", "up", "down")}
    scheme = scheme_of(gate[0], scales["gate"][0] if scales["gate"] else None)
    fnuz = gfx == "gfx942" and scheme in ("block", "channel")
    weights = {"gate": gate, "up": up, "down": down}
    tables = {p: [source.rows() for source in weights[p]] for p in weights}
    if fnuz:
        tables = {p: [to_fnuz(table) for table in tables[p]] for p in tables}
        scales = {p: [doubled(source) for source in scales[p]] for p in scales}
    scale_tables = {p: [source.rows() for source in scales[p]] for p in scales}

    def row_bytes(k: int) -> int:
        return {"plain": 2 * k, "mxfp4": k // 2}.get(scheme, k)

    inter = gate[0].shape[0]
    hidden = gate[0].shape[1] * (2 if scheme == "mxfp4" else 1)
    columns = rank_columns(inter, tp, layer.gpt_oss)
    inter_p, hidden_p = padded_sizes(scheme, columns[0][1] - columns[0][0], hidden)
    if scheme == "mxfp4":
        meaning = ("U8", "float4_e2m1fn_x2")
    else:
        meaning = ("U8", "float8_e4m3fnuz") if fnuz else (gate[0].dtype, RUNTIME[gate[0].dtype])

    out: dict[tuple[int, str], Expected] = {}
    for rank, (lo, hi) in enumerate(columns):
        rows, cut = slice(lo, hi), slice(row_bytes(lo), row_bytes(hi))
        w13 = join_w13(tables["gate"], tables["up"], rows, inter_p, row_bytes(hidden_p))
        w2 = join_w2(tables["down"], cut, hidden_p, row_bytes(inter_p))
        out[rank, "w13_weight"] = stored(tile_16x16(w13), *meaning)
        out[rank, "w2_weight"] = stored(tile_16x16(w2), *meaning)
        if scheme != "plain":
            s13, s2 = rank_scales(scheme, scale_tables, rows, inter_p, hidden_p)
            dtype = scales["gate"][0].dtype
            how = ("U8", "float8_e8m0fnu") if scheme.startswith("mx") else (dtype, RUNTIME[dtype])
            out[rank, f"w13_{layer.scale_name}"] = stored(s13, *how)
            out[rank, f"w2_{layer.scale_name}"] = stored(s2, *how)
        bias = {p: [f32_rows(source) for source in layer.all(p, "bias")] for p in weights}
        if bias["gate"]:
            b13 = join_w13(bias["gate"], bias["up"], rows, inter_p, 4)
            out[rank, "w13_bias"] = as_vector(b13)
        if bias["down"]:
            whole = rank == 0 or not layer.gpt_oss
            b2 = join_w2(bias["down"], slice(0, 4 if whole else 0), hidden_p, 4)
            out[rank, "w2_bias"] = as_vector(b2)
    return out


def rank_scales(
    scheme: str, tables: dict[str, list[Bytes]], rows: slice, inter_p: int, hidden_p: int
) -> tuple[Bytes, Bytes]:
    """Slice and place the scales of one rank, as bytes."""
    gate, up, down = tables["gate"], tables["up"], tables["down"]
    if scheme == "channel":  # one scale per output row: w2 has all its rows on every rank
        width = gate[0].shape[1]
        s13 = join_w13(gate, up, rows, inter_p, width)
        return s13, join_w2(down, slice(0, width), hidden_p, width)
    if scheme == "block":
        width = gate[0].shape[1] // (hidden_p // 128)
        blocks = slice(rows.start // 128, rows.stop // 128)
        s13 = join_w13(gate, up, blocks, inter_p // 128, hidden_p // 128 * width)
        cut = slice(blocks.start * width, blocks.stop * width)
        return s13, join_w2(down, cut, hidden_p // 128, inter_p // 128 * width)
    s13 = join_w13(gate, up, rows, inter_p, hidden_p // 32)
    s2 = join_w2(down, slice(rows.start // 32, rows.stop // 32), hidden_p, inter_p // 32)
    return shuffle_e8m0(np.concatenate(list(s13))), shuffle_e8m0(np.concatenate(list(s2)))


def as_vector(table: Bytes) -> Expected:
    """Describe `[E, N, 4]` bytes as F32 `[E, N]`."""
    return Expected("F32", "float32", table.shape[:2], table.tobytes())


def expected(folder: Path, tp: int, gfx: str = "gfx950") -> dict[tuple[int, str], Expected]:
    """Return every prepared expert tensor of target `aiter`, keyed by (rank, output name)."""
    if gfx not in ("gfx950", "gfx942"):
        raise NotImplementedError(gfx)
    out: dict[tuple[int, str], Expected] = {}
    for path, layer in routed_experts(read_checkpoint(folder)).items():
        for (rank, name), tensor in expected_layer(layer, tp, gfx).items():
            out[rank, f"{path}.{name}"] = tensor
    return out
