"""What the engines' targets must hold, computed a second time and the slow way.

As `oracle`, it is written from the layout documents alone and shares no code with the package:
rows are put in order by lists of their numbers, and bytes by loops over the documented formulas.
A `Recipe` says in a few words what an engine does with experts of one scheme.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from oracle import (
    RUNTIME,
    Bytes,
    Expected,
    Source,
    ceil_to,
    doubled,
    e8m0_offsets,
    rank_columns,
    read_checkpoint,
    tile_16x16,
    to_f32,
    to_fnuz,
)

WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4}
PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
PROJECTIONS |= {"w1": "gate", "w3": "up", "w2": "down"}
KINDS = {"weight": "weight", "weight_packed": "weight", "input_scale": "input_scale"}
KINDS |= {"weight_scale": "scale", "weight_scale_inv": "scale", "scale": "scale"}
PER_EXPERT = re.compile(r"((?:.+\.)?experts)\.(\d+)\.([^.]+)\.(.+)")
FUSED = re.compile(r"((?:.+\.)?experts)\.(gate_up_proj|down_proj)")
TRANSPOSED = ("llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text")
E8M0 = ("U8", "float8_e8m0fnu")
BYTES = ("U8", "uint8")


@dataclass(frozen=True)
class Recipe:
    """What becomes of the experts of one scheme.

    `intermediate` and `hidden` are what sizes are padded to; `stride` marks ranks that begin at
    multiples of the padded size. `scale` names the order of the scales of w13 and of w2: `rows`,
    `e8m0`, `e8m0_by_16` or `e8m0_unpadded`. `name` is what the scales are called, if not as in the
    source, and `fill` is the byte of their padding. On gfx1250, `n32k4` and `n32k4_by_1` are orders
    of scales, too, and `by_1` is the order of rows.
    """

    intermediate: int = 1
    hidden: int = 1
    small: tuple[int, int] = (0, 1)
    stride: bool = False
    by_16: bool = False
    by_1: bool = False
    weight: tuple[str, str] = ("", "")
    scale: tuple[str, str] = ("rows", "rows")
    scale_dtype: tuple[str, str] = ("", "")
    shape: str = "matrices"
    fill: int = 0
    name: str = ""
    every_row: bool = False
    through_f16: bool = True

    def padded(self, share: int) -> int:
        """Return one rank's intermediate size after padding."""
        largest, multiple = self.small
        return ceil_to(share, multiple if share <= largest else self.intermediate)


@dataclass
class Experts:
    """The routed experts of one module, as `[rows, bytes in a row]` tables."""

    tables: dict[tuple[int, str, str], Bytes] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    suffixes: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    order: dict[tuple[int, str], tuple[int, str]] = field(default_factory=dict)

    def add(self, expert: int, projection: str, kind: str, source: Source, table: Bytes) -> None:
        """Add one tensor."""
        self.tables[expert, projection, kind] = table
        self.dtypes[kind], self.shapes[kind] = source.dtype, source.shape

    def all(self, projection: str, kind: str) -> list[Bytes]:
        """Return one part of every expert, by expert id."""
        ids = sorted(e for e, p, k in self.tables if (p, k) == (projection, kind))
        return [self.tables[e, projection, kind] for e in ids]

    @property
    def scheme(self) -> str:
        """Name the source scheme."""
        weight, dtype = self.all("gate", "weight")[0], self.dtypes["weight"]
        if "scale" not in self.dtypes:
            return "plain"
        rows, width = weight.shape
        scale = self.all("gate", "scale")[0]
        columns = scale.shape[1] // WIDTH[self.dtypes["scale"]]
        if dtype == "I32":
            return "int4"
        if dtype in ("U8", "I8"):
            return "mxfp4"
        if self.dtypes["scale"] in ("U8", "F8_E8M0") and scale.shape == (rows, width // 32):
            return "mxfp8"
        if self.shapes["scale"] in ((), (1,)):
            return "tensor"
        return "channel" if columns == 1 and scale.shape[0] == rows else "block"


def transposed(table: Bytes, width: int) -> Bytes:
    """Return `[columns, rows]` elements as `[rows, columns]`."""
    columns, row_bytes = table.shape
    rows = row_bytes // width
    out = np.empty((rows, columns * width), np.uint8)
    for row in range(rows):
        for column in range(columns):
            element = table[column, row * width : (row + 1) * width]
            out[row, column * width : (column + 1) * width] = element
    return out


def experts_of(folder: Path) -> dict[str, Experts]:
    """Sort the routed experts of a checkpoint by the module that holds them."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    model = config.get("text_config", config).get("model_type", config["model_type"])
    found: dict[str, Experts] = {}
    for name, source in sorted(read_checkpoint(folder).items()):
        if match := PER_EXPERT.fullmatch(name):
            path, expert, projection, suffix = match.groups()
            if suffix == "weight_shape":
                continue
            rows = source.shape[0] if source.shape else 1
            table = np.frombuffer(source.data, np.uint8).reshape(rows, -1)
            block = found.setdefault(path, Experts())
            block.add(int(expert), PROJECTIONS[projection], KINDS[suffix], source, table)
            block.suffixes[KINDS[suffix]] = suffix
            if suffix == "input_scale" and projection not in ("down_proj", "w2"):
                block.order[int(expert), "last"] = (int(expert), PROJECTIONS[projection])
        elif match := FUSED.fullmatch(name):
            path, projection = match.groups()
            add_fused(found.setdefault(path, Experts()), projection, source, model in TRANSPOSED)
    return found


def add_fused(block: Experts, projection: str, source: Source, turned: bool) -> None:
    """Add a tensor that holds all experts."""
    experts, rows, _ = source.shape
    data = np.frombuffer(source.data, np.uint8).reshape(experts, rows, -1)
    for expert in range(experts):
        table = transposed(data[expert], WIDTH[source.dtype]) if turned else data[expert]
        if projection == "down_proj":
            block.add(expert, "down", "weight", source, table)
        else:
            half = len(table) // 2
            block.add(expert, "gate", "weight", source, table[:half])
            block.add(expert, "up", "weight", source, table[half:])


# Layouts


def rows_by_16(table: Bytes) -> Bytes:
    """Put the rows of `[E, 2I, ...]` in order: 16 of gate, 16 of up, 16 of gate, ..."""
    half = table.shape[1] // 2
    order: list[int] = []
    for first in range(0, half, 16):
        order += range(first, first + 16)
        order += range(half + first, half + first + 16)
    return table[:, order]


def rows_by_1(table: Bytes) -> Bytes:
    """Put the rows of `[E, 2I, ...]` in order: one of gate, one of up, one of gate, ..."""
    half = table.shape[1] // 2
    return table[:, [row for pair in zip(range(half), range(half, 2 * half)) for row in pair]]  # noqa: B905 - equal


def n32k4(table: Bytes) -> Bytes:
    """Put 32 rows of `[E, N, C]` in one: byte (r, c) at `c // 4 * 128 + r % 32 * 4 + c % 4`."""
    experts, rows, columns = table.shape
    out = np.empty((experts, rows // 32, columns * 32), np.uint8)
    for row in range(rows):
        for column in range(columns):
            at = column // 4 * 128 + row % 32 * 4 + column % 4
            out[:, row // 32, at] = table[:, row, column]
    return out


def e8m0(table: Bytes, pad_byte: int, row_multiple: int) -> Bytes:
    """Fold experts into rows, pad them and the columns to 8, and shuffle."""
    folded = np.concatenate(list(table))
    rows, columns = folded.shape
    wide = np.full((ceil_to(rows, row_multiple), ceil_to(columns, 8)), pad_byte, np.uint8)
    wide[:rows, :columns] = folded
    flat = np.empty(wide.size, np.uint8)
    flat[e8m0_offsets(*wide.shape)] = wide.ravel()
    return flat.reshape(wide.shape)


def laid_out_scale(table: Bytes, layout: str) -> Bytes:
    """Return a scale `[E, N, C]` in its layout."""
    if layout == "rows":
        return table
    if layout == "e8m0":
        return e8m0(table, 0x00, 256)
    if layout.startswith("n32k4"):
        return n32k4(rows_by_1(table) if layout.endswith("_by_1") else table)
    return e8m0(rows_by_16(table) if layout == "e8m0_by_16" else table, 0x7F, 1)


def joined(
    halves: list[list[Bytes]], rows: slice, columns: slice, shape: tuple[int, int], fill: int
) -> Bytes:
    """Place the chosen part of gate and of up, or of down, in padded matrices."""
    height, width = shape
    out = np.full((len(halves[0]), len(halves) * height, width), fill, np.uint8)
    for number, tables in enumerate(halves):
        for expert, table in enumerate(tables):
            part = table[rows, columns]
            out[expert, number * height : number * height + part.shape[0], : part.shape[1]] = part
    return out


# Values


@cache
def fp8_values(fnuz: bool) -> tuple[float, ...]:
    """Return the numbers that bytes 0x00 to 0x7E mean."""
    bias = 8 if fnuz else 7
    values = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        scaled = (
            (mantissa / 8) * 2 ** (1 - bias)
            if exponent == 0
            else (1 + mantissa / 8) * 2.0 ** (exponent - bias)
        )
        values.append(scaled)
    return tuple(values)


def to_fp8(value: float, fnuz: bool) -> int:
    """Return the nearest byte, ties to the even one."""
    values = fp8_values(fnuz)
    size = min(abs(value), values[-1])
    above = bisect_left(values, size)
    code = above
    if above and values[above] != size:
        low, high = size - values[above - 1], values[above] - size
        code = above - 1 if low < high or (low == high and above % 2) else above
    negative = str(value).startswith("-") and (code or not fnuz)
    return code | (0x80 if negative else 0)


def requantised(
    table: Bytes, scale: np.float32, larger: np.float32, how: Recipe, fnuz: bool
) -> Bytes:
    """Bring FP8 bytes from one scale under a larger one; ValueError where one has no place."""
    values = fp8_values(fnuz)
    new = np.zeros(256, np.uint8)
    for code in sorted(set(table.ravel().tolist())):
        if code & 0x7F == 0x7F or (fnuz and code == 0x80):
            raise ValueError(f"byte {code:#x} is no number")
        value = np.float32(values[code & 0x7F] * (-1 if code & 0x80 else 1))
        with np.errstate(over="ignore", invalid="ignore"):
            if how.through_f16:
                product = np.float32(np.float16(value * np.float32(np.float16(scale))))
                result = product * (np.float32(1) / larger)
            else:
                result = np.float32(value * scale) / larger
        if not abs(result) < float("inf"):
            raise ValueError(f"byte {code:#x} under {scale} is not finite under {larger}")
        new[code] = to_fp8(float(result), fnuz)
    return new[table]


def unpacked_int4(table: Bytes) -> Bytes:
    """Return each nibble, low first, less 8, as a byte."""
    out = np.empty((table.shape[0], table.shape[1] * 2), np.uint8)
    out[:, 0::2] = (table & 15) - 8
    out[:, 1::2] = (table >> 4) - 8
    return out


def packed_in_eights(flat: Bytes) -> Bytes:
    """Of eight values, put value i in the low half of byte i and value i + 4 in the high one."""
    out = np.empty(flat.size // 2, np.uint8)
    for start in range(0, flat.size, 8):
        for i in range(4):
            out[start // 2 + i] = (flat[start + i] & 15) | ((flat[start + i + 4] & 15) << 4)
    return out


def floats(block: Experts, projection: str, kind: str) -> list[npt.NDArray[np.float32]]:
    """Return scales as F32."""
    dtype = block.dtypes[kind]
    tables = block.all(projection, kind)
    sources = [Source(dtype, (t.size // WIDTH[dtype],), t.tobytes()) for t in tables]
    if dtype == "F8_E8M0":
        return [np.exp2(t.ravel().astype(np.float64) - 127).astype(np.float32) for t in tables]
    return [to_f32(source) for source in sources]


# The targets


def stored(
    table: Bytes, dtype: str, runtime: str, shape: tuple[int, ...] | None = None
) -> Expected:
    """Describe a byte table as a tensor."""
    own = (*table.shape[:-1], table.shape[-1] // WIDTH[dtype])
    return Expected(dtype, runtime, own if shape is None else shape, table.tobytes())


def expected_experts(
    block: Experts, how: Recipe, tp: int, gfx: str
) -> dict[tuple[int, str], Expected]:
    """Prepare the experts of one module; names are relative to its path."""
    scheme = block.scheme
    fnuz = gfx == "gfx942" and scheme in ("block", "channel", "tensor")
    weights = {p: block.all(p, "weight") for p in ("gate", "up", "down")}
    if scheme == "int4":
        return int4_experts(block, tp)
    if fnuz:
        weights = {p: [to_fnuz(table) for table in tables] for p, tables in weights.items()}
    out: dict[tuple[int, str], Expected] = {}
    if scheme == "tensor":
        out |= merge_scales(block, weights, how, tp, fnuz)
    dtype = block.dtypes["weight"]
    per_byte = {"plain": 0.5, "mxfp4": 2}.get(scheme, 1)
    inter, hidden = len(weights["gate"][0]), int(weights["gate"][0].shape[1] * per_byte)
    padded = how.padded(inter // tp)
    parts = strided(inter, tp, padded) if how.stride else rank_columns(inter, tp)
    tall, wide = ceil_to(hidden, how.hidden), int(ceil_to(hidden, how.hidden) / per_byte)
    meaning = how.weight if how.weight[0] else (dtype, RUNTIME[dtype])
    if fnuz:
        meaning = ("U8", "float8_e4m3fnuz")
    for rank, (low, high) in enumerate(parts):
        cut = slice(int(low / per_byte), int(high / per_byte))
        gate_up = [weights["gate"], weights["up"]]
        w13 = joined(gate_up, slice(low, high), slice(None), (padded, wide), 0)
        w2 = joined([weights["down"]], slice(None), cut, (tall, int(padded / per_byte)), 0)
        ordered = rows_by_16(w13) if how.by_16 else rows_by_1(w13) if how.by_1 else w13
        out[rank, "w13_weight"] = stored(tile_16x16(ordered), *meaning)
        out[rank, "w2_weight"] = stored(tile_16x16(w2), *meaning)
        if scheme in ("block", "channel", "mxfp4", "mxfp8"):
            out |= rank_scales(block, how, scheme, rank, (low, high), (padded, tall), fnuz)
    return out


def strided(size: int, tp: int, part: int) -> list[tuple[int, int]]:
    """Cut at multiples of a padded part."""
    return [(min(r * part, size), min((r + 1) * part, size)) for r in range(tp)]


def rank_scales(
    block: Experts,
    how: Recipe,
    scheme: str,
    rank: int,
    part: tuple[int, int],
    sizes: tuple[int, int],
    fnuz: bool,
) -> dict[tuple[int, str], Expected]:
    """Slice, place and order the scales of one rank."""
    rows, columns = {"block": (128, 128), "channel": (1, 0)}.get(scheme, (1, 32))
    tables, dtype, width = converted_scales(block, how, fnuz)
    (low, high), (padded, tall) = part, sizes
    across = slice(None)
    hidden_cells = ceil_to(tall, columns) // columns if columns else 1
    cells = -(-padded // columns) if columns else 1
    if columns:
        across = slice(low // columns * width, -(-high // columns) * width)
    s13 = joined(
        [tables["gate"], tables["up"]],
        slice(low // rows, -(-high // rows)),
        slice(None),
        (-(-padded // rows), hidden_cells * width),
        how.fill,
    )
    s2 = joined([tables["down"]], slice(None), across, (-(-tall // rows), cells * width), how.fill)
    name = how.name or ("weight_scale_inv" if "inv" in block.suffixes["scale"] else "weight_scale")
    out = {}
    for group, table, layout in (("w13", s13, how.scale[0]), ("w2", s2, how.scale[1])):
        laid = laid_out_scale(table, layout)
        shape: tuple[int, ...] = (*laid.shape[:-1], laid.shape[-1] // WIDTH[dtype[0]])
        if how.shape == "matrices" and layout != "rows":
            shape = (len(table), table.shape[1], laid.shape[1])
        if how.shape == "rows":
            shape = table.shape[:2]
        out[rank, f"{group}_{name}"] = stored(laid, *dtype, shape=shape)
    return out


def converted_scales(
    block: Experts, how: Recipe, fnuz: bool
) -> tuple[dict[str, list[Bytes]], tuple[str, str], int]:
    """Return the scales in the dtype that they are stored in: tables, dtypes, bytes of one."""
    kept = block.dtypes["scale"]
    tables = {p: block.all(p, "scale") for p in ("gate", "up", "down")}
    if how.scale_dtype == ("F32", "float32"):
        for p, original in tables.items():
            factor = np.float32(2 if fnuz else 1)
            values = [v * factor for v in floats(block, p, "scale")]
            tables[p] = [
                v.view(np.uint8).reshape(len(t), -1) for v, t in zip(values, original, strict=True)
            ]
        return tables, ("F32", "float32"), 4
    if fnuz:
        for p, original in tables.items():
            twice = [doubled(Source(kept, (t.size // WIDTH[kept],), t.tobytes())) for t in original]
            tables[p] = [
                np.frombuffer(d.data, np.uint8).reshape(t.shape)
                for d, t in zip(twice, original, strict=True)
            ]
    dtype = how.scale_dtype if how.scale_dtype[0] else (kept, RUNTIME[kept])
    return tables, dtype, WIDTH[dtype[0]]


def twice(value: np.float32, factor: np.float32) -> np.float32:
    """Return a scale times one or two; ValueError where that takes more than F32 has."""
    with np.errstate(over="ignore", invalid="ignore"):
        result = np.float32(value * factor)
    if np.isinf(result) and not np.isinf(value):
        raise ValueError(f"{value} cannot be doubled")
    return result


def merge_scales(
    block: Experts, weights: dict[str, list[Bytes]], how: Recipe, tp: int, fnuz: bool
) -> dict[tuple[int, str], Expected]:
    """Bring gate and up under one scale, in place; return the scales of every rank."""
    factor = np.float32(2 if fnuz else 1)
    scales = {p: [twice(v[0], factor) for v in floats(block, p, "scale")] for p in weights}
    for value in (*scales["gate"], *scales["up"]):
        # a quantiser writes the largest size of a tensor over 448: a normal number, or zero
        if value != 0 and not 2.0**-126 <= value < float("inf"):
            raise ValueError(f"scale {value} cannot be merged")
    larger = [max(pair) for pair in zip(scales["gate"], scales["up"], strict=True)]
    if 0 in larger:
        raise ValueError("both scales of an expert are zero")
    for p in ("gate", "up"):
        weights[p] = [
            requantised(*item, how, fnuz)
            for item in zip(weights[p], scales[p], larger, strict=True)
        ]
    out = {}
    inter, hidden = len(weights["gate"][0]) // tp, len(weights["down"][0])
    for rank in range(tp):
        for group, values, rows in (("w13", larger, 2 * inter), ("w2", scales["down"], hidden)):
            vector = np.array(values, np.float32)
            out[rank, f"{group}_weight_scale"] = Expected(
                "F32", "float32", vector.shape, vector.tobytes()
            )
            if how.every_row:
                matrix = np.repeat(vector[:, None], rows, 1)
                out[rank, f"{group}_weight_scale1"] = Expected(
                    "F32", "float32", matrix.shape, matrix.tobytes()
                )
        if "input_scale" in block.dtypes:
            out |= input_scales(block, how, rank, factor)
    return out


def input_scales(
    block: Experts, how: Recipe, rank: int, factor: np.float32
) -> dict[tuple[int, str], Expected]:
    """Return the largest of all experts; of gate and up, engines count the one they read last."""
    per = {p: [v[0] for v in floats(block, p, "input_scale")] for p in ("gate", "up", "down")}
    first = per["gate"] + per["up"]
    for value in (*first, *per["down"]):
        if not 0 <= value < float("inf"):
            raise ValueError(f"scale {value} of inputs")
    if how.name != "largest":
        first = [per[p][e] for e, p in (block.order[e, "last"] for e in range(len(per["gate"])))]
    out = {}
    for group, values in (("w13", first), ("w2", per["down"])):
        value = twice(np.float32(max(values)), factor)
        if value == 0:
            raise ValueError("all scales of inputs are zero")
        out[rank, f"{group}_input_scale"] = Expected("F32", "float32", (), value.tobytes())
    return out


def int4_experts(block: Experts, tp: int) -> dict[tuple[int, str], Expected]:
    """Prepare int4 experts for FlyDSL: tiled as bytes, packed in eights, groups in pairs."""
    tables = {p: [unpacked_int4(t) for t in block.all(p, "weight")] for p in ("gate", "up", "down")}
    scales = {p: block.all(p, "scale") for p in tables}
    inter, hidden = tables["gate"][0].shape
    out = {}
    for rank, (low, high) in enumerate(rank_columns(inter, tp)):
        share = high - low
        rows = slice(low, high)
        w13 = joined([tables["gate"], tables["up"]], rows, slice(None), (share, hidden), 0)
        w2 = joined([tables["down"]], slice(None), rows, (hidden, share), 0)
        groups = slice(low // 32 * 2, high // 32 * 2)
        s13 = joined([scales["gate"], scales["up"]], rows, slice(None), (share, hidden // 16), 0)
        s2 = joined([scales["down"]], slice(None), groups, (hidden, share // 16), 0)
        for group, weight, scale in (("w13", w13, s13), ("w2", w2, s2)):
            packed = packed_in_eights(tile_16x16(weight).ravel())
            out[rank, f"{group}_weight_packed"] = stored(packed, "I8", "int8")
            count, height, width = scale.shape
            pairs = scale.reshape(count, height, width // 4, 4)
            turned = np.concatenate([p[:, i] for p in pairs for i in range(width // 4)])
            out[rank, f"{group}_weight_scale"] = stored(turned.ravel(), "BF16", "bfloat16")
    return out


def expected(
    folder: Path, recipes: dict[str, Recipe], tp: int, gfx: str = "gfx950"
) -> dict[tuple[int, str], Expected]:
    """Return every prepared expert tensor, keyed by (rank, output name).

    `recipes` has one for each scheme.
    """
    out: dict[tuple[int, str], Expected] = {}
    for path, block in experts_of(folder).items():
        for (rank, name), tensor in expected_experts(block, recipes[block.scheme], tp, gfx).items():
            out[rank, f"{path}.{name}"] = tensor
    return out
