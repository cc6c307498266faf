"""The same tensors a second time, in plain numpy, from what is written down about each path.

A check of the harness: where a recipe and the engine agree, the engine ran the path that the table
means. Nothing here is shared with the product.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from conformance.checkpoint_models import Sizes
from conformance.checkpoint_values import RawTensor

Rows = npt.NDArray[np.uint8]
"""Bytes, the last axis one row of a tensor."""

Tensors = dict[str, RawTensor]
Expected = dict[str, Rows]
"""The leaf names that a rank must hold, with their bytes."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the checkpoint one rank of one layer finds its experts.

    A rank's columns follow the previous rank's; `stride` says where they begin if not there.
    """

    tensors: Tensors
    experts: str
    names: tuple[str, str, str]
    sizes: Sizes
    rank: int
    tp: int
    stride: int | None = None

    def rows(self, expert: int, projection: str, leaf: str) -> Rows:
        """All bytes of one tensor as `[rows, bytes of a row]`; a 1-D one has one element a row."""
        tensor = self.tensors[f"{self.experts}.{expert}.{projection}.{leaf}"]
        count = tensor.shape[0] if tensor.shape else 1
        return np.frombuffer(tensor.data, dtype=np.uint8).reshape(count, -1)

    def share(self, size: int) -> slice:
        """The rank's part of an axis."""
        own = size // self.tp
        if self.stride is not None:
            own = size * self.stride // self.sizes.intermediate
        return slice(own * self.rank, own * (self.rank + 1))

    def w13(self, leaf: str, half: int, width: int, fill: bytes = b"\0") -> Rows:
        """Gate rows at 0, up rows at `half`, in rows of `width` bytes; sliced by rows."""
        fused = filled((self.sizes.experts, 2 * half, width), fill)
        gate, _, up = self.names
        for expert in range(self.sizes.experts):
            for start, name in ((0, gate), (half, up)):
                part = self.rows(expert, name, leaf)
                part = part[self.share(len(part))]
                fused[expert, start : start + len(part), : part.shape[1]] = part
        return fused

    def w2(
        self, leaf: str, height: int, width: int, fill: bytes = b"\0", *, sliced: bool = True
    ) -> Rows:
        """Down rows, sliced by columns."""
        down = filled((self.sizes.experts, height, width), fill)
        for expert in range(self.sizes.experts):
            part = self.rows(expert, self.names[1], leaf)
            part = part[:, self.share(part.shape[1])] if sliced else part
            down[expert, : len(part), : part.shape[1]] = part
        return down


def filled(shape: tuple[int, ...], fill: bytes) -> Rows:
    """An array of `fill` over and over."""
    return np.resize(np.frombuffer(fill, dtype=np.uint8), shape)


def padded(size: int, multiple: int) -> int:
    """`size` rounded up."""
    return math.ceil(size / multiple) * multiple


def tiled(rows: Rows) -> Rows:
    """Tiles of 16 rows by 16 bytes, one after another."""
    experts, height, width = rows.shape
    tiles = rows.reshape(experts, height // 16, 16, width // 16, 16)
    return tiles.transpose(0, 1, 3, 2, 4).reshape(rows.shape)


def by_16(rows: Rows) -> Rows:
    """Gate half and up half to 16 gate rows, 16 up rows, and so on."""
    experts, height, width = rows.shape
    parts = rows.reshape(experts, 2, height // 32, 16, width)
    return parts.transpose(0, 2, 1, 3, 4).reshape(rows.shape)


def halves(rows: Rows) -> Rows:
    """Alternating gate and up rows to a gate half and an up half."""
    experts, height, width = rows.shape
    return rows.reshape(experts, height // 2, 2, width).transpose(0, 2, 1, 3).reshape(rows.shape)


def scale_tiled(rows: Rows, fill: int, multiple: int) -> Rows:
    """The tile of exponent scales: experts folded into rows, padded with `fill`."""
    flat = rows.reshape(-1, rows.shape[-1])
    height, width = padded(len(flat), multiple), padded(flat.shape[1], 8)
    full = np.full((height, width), fill, dtype=np.uint8)
    full[: len(flat), : flat.shape[1]] = flat
    tiles = full.reshape(height // 32, 2, 16, width // 8, 2, 4)
    return tiles.transpose(0, 3, 5, 2, 4, 1).reshape(height, width)


def bf16(place: Place) -> Expected:
    """Unquantised: the intermediate size padded to 64 below 192, else to 128."""
    own = place.sizes.intermediate // place.tp
    wide = padded(own, 64 if own <= 192 else 128)
    w13 = place.w13("weight", wide, place.sizes.hidden * 2)
    w2 = place.w2("weight", place.sizes.hidden, wide * 2)
    return {"w13_weight": tiled(w13), "w2_weight": tiled(w2)}


ONE = b"\0\0\x80\x3f"
"""1.0 in float32."""


def fp8_block(place: Place, leaf: str = "weight_scale_inv") -> Expected:
    """FP8 in blocks of 128, float32 scales of the source; whole blocks, padded with scales of 1."""
    own = padded(place.sizes.intermediate // place.tp, 128)
    place = dataclasses.replace(place, stride=own)
    hidden = place.sizes.hidden
    return {
        "w13_weight": tiled(place.w13("weight", own, hidden)),
        "w2_weight": tiled(place.w2("weight", hidden, own)),
        f"w13_{leaf}": place.w13(leaf, own // 128, hidden // 128 * 4, ONE),
        f"w2_{leaf}": place.w2(leaf, hidden // 128, own // 128 * 4, ONE),
    }


def ptpc(place: Place) -> Expected:
    """FP8 with a float32 scale a row; those of down are not sliced."""
    own, hidden = place.sizes.intermediate // place.tp, place.sizes.hidden
    return {
        "w13_weight": tiled(place.w13("weight", own, hidden)),
        "w2_weight": tiled(place.w2("weight", hidden, own)),
        "w13_weight_scale": place.w13("weight_scale", own, 4),
        "w2_weight_scale": place.w2("weight_scale", hidden, 4, sliced=False),
    }


def mxfp8(place: Place, leaf: str = "weight_scale") -> Expected:
    """MXFP8: gate and up by 16 rows, also in their scales; down's scales padded to 256 rows."""
    own, hidden = place.sizes.intermediate // place.tp, place.sizes.hidden
    w13_scale, w2_scale = place.w13(leaf, own, hidden // 32), place.w2(leaf, hidden, own // 32)
    return {
        "w13_weight": tiled(by_16(place.w13("weight", own, hidden))),
        "w2_weight": tiled(place.w2("weight", hidden, own)),
        "w13_weight_scale": scale_tiled(by_16(w13_scale), 0x7F, 1),
        "w2_weight_scale": scale_tiled(w2_scale, 0, 256),
    }


def _mxfp4(
    place: Place, aligned: tuple[int, int], leaves: tuple[str, str], fill: bytes = b"\0"
) -> tuple[Rows, Rows, Rows, Rows]:
    """Weights and scales of both, in the source's row order, padded to `aligned`."""
    wide = padded(place.sizes.intermediate // place.tp, aligned[0])
    hidden = padded(place.sizes.hidden, aligned[1])
    weight, scale = leaves
    return (
        place.w13(weight, wide, hidden // 2),
        place.w2(weight, hidden, wide // 2),
        place.w13(scale, wide, hidden // 32, fill),
        place.w2(scale, hidden, wide // 32, fill),
    )


def mxfp4_a16w4(place: Place, leaves: tuple[str, str], aligned: tuple[int, int]) -> Expected:
    """DeepSeek-V4's default: everything of w13 by 16 rows, scales padded to 8 columns with 0x7F."""
    w13, w2, w13_scale, w2_scale = _mxfp4(place, aligned, leaves)
    return {
        "w13_weight": tiled(by_16(w13)),
        "w2_weight": tiled(w2),
        "w13_weight_scale": scale_tiled(by_16(w13_scale), 0x7F, 1),
        "w2_weight_scale": scale_tiled(w2_scale, 0x7F, 1),
    }


def mxfp4_separated(
    place: Place, leaves: tuple[str, str], aligned: tuple[int, int], fill: bytes = b"\0"
) -> Expected:
    """FP4 activations: gate half and up half, scales padded to 256 rows and 8 columns."""
    w13, w2, w13_scale, w2_scale = _mxfp4(place, aligned, leaves, fill)
    return {
        "w13_weight": tiled(w13),
        "w2_weight": tiled(w2),
        "w13_weight_scale": scale_tiled(w13_scale, 0, 256),
        "w2_weight_scale": scale_tiled(w2_scale, 0, 256),
    }


def kimi_k3(place: Place, *, interleaved: bool) -> Expected:
    """Kimi-K3: gate and up by 16 rows for FP8 activations only; down's scales as `e8m0_shuffle`."""
    w13, w2, w13_scale, w2_scale = _mxfp4(place, (128, 128), ("weight_packed", "weight_scale"))
    order: Callable[[Rows], Rows] = by_16 if interleaved else _unchanged
    return {
        "w13_weight": tiled(order(w13)),
        "w2_weight": tiled(w2),
        "w13_weight_scale": scale_tiled(order(w13_scale), 0x7F, 1),
        "w2_weight_scale": scale_tiled(w2_scale, 0, 256),
    }


def _unchanged(rows: Rows) -> Rows:
    return rows


def fnuz(expected: Expected) -> Expected:
    """gfx942: minus zero becomes zero, the bytes are read as fnuz, so every scale doubles."""
    return {
        leaf: (rows.view(np.float32) * np.float32(2)).view(np.uint8)
        if "scale" in leaf
        else np.where(rows == 0x80, 0, rows).astype(np.uint8)
        for leaf, rows in expected.items()
    }


def gpt_oss(place: Place) -> Expected:
    """gpt-oss: shares in blocks of 32, alternating rows parted, both sizes padded to 256."""
    sizes, own = place.sizes, math.ceil(place.sizes.intermediate // 32 / place.tp) * 32
    start = min(place.rank * own, sizes.intermediate)
    count = min(own, sizes.intermediate - start)
    wide = padded(sizes.intermediate // place.tp, 256)
    hidden = padded(sizes.hidden, 256)

    def read(leaf: str, width: int) -> Rows:
        data = np.frombuffer(place.tensors[f"{place.experts}.{leaf}"].data, dtype=np.uint8)
        return data.reshape(sizes.experts, -1, width)

    def put(rows: Rows, shape: tuple[int, int]) -> Rows:
        full = np.zeros((sizes.experts, *shape), dtype=np.uint8)
        full[:, : rows.shape[1], : rows.shape[2]] = rows
        return full

    def w13(leaf: str, group: int) -> Rows:
        rows = read(f"gate_up_proj_{leaf}", sizes.hidden // group)
        rows = rows[:, 2 * start : 2 * (start + count)]
        return halves(put(rows, (2 * wide, hidden // group)))

    def w2(leaf: str, group: int) -> Rows:
        rows = read(f"down_proj_{leaf}", sizes.intermediate // group)
        rows = rows[..., start // group : (start + count) // group]
        return put(rows, (hidden, wide // group))

    gate_up = read("gate_up_proj_bias", 2)[:, 2 * start : 2 * (start + count)]
    down = read("down_proj_bias", 2) if place.rank == 0 else read("down_proj_bias", 2) * 0
    return {
        "w13_weight": tiled(by_16(w13("blocks", 2))),
        "w2_weight": tiled(w2("blocks", 2)),
        "w13_weight_scale": scale_tiled(by_16(w13("scales", 32)), 0x7F, 1),
        "w2_weight_scale": scale_tiled(w2("scales", 32), 0x7F, 1),
        "w13_bias": halves(put(_to_f32(gate_up), (2 * wide, 4))),
        "w2_bias": put(_to_f32(down), (hidden, 4)),
    }


def _to_f32(rows: Rows) -> Rows:
    """bf16 bytes to float32 bytes: the same bits, two zero bytes before them."""
    return np.concatenate([np.zeros_like(rows), rows], axis=-1)


_V4 = ("weight", "scale")
_U8 = ("weight", "weight_scale")

RECIPES: dict[str, Callable[[Place], Expected]] = {
    "bf16": bf16,
    "bf16_i352": bf16,
    "bf16_i400": bf16,
    "bf16_mixtral": bf16,
    "bf16_gfx942": bf16,
    "fp8_block": fp8_block,
    "fp8_block_mixtral": fp8_block,
    "fp8_block_padded": fp8_block,
    "fp8_block_padded_gfx942": lambda place: fnuz(fp8_block(place)),
    "fp8_block_gfx1250": fp8_block,
    "quark_fp8_block": lambda place: fp8_block(place, "weight_scale"),
    "fp8_block_gfx942": lambda place: fnuz(fp8_block(place)),
    "quark_ptpc_fp8": ptpc,
    "quark_ptpc_fp8_gfx942": lambda place: fnuz(ptpc(place)),
    "gpt_oss": gpt_oss,
    "gpt_oss_i288": gpt_oss,
    "ct_mxfp8": mxfp8,
    "quark_mxfp8": mxfp8,
    "ct_mxfp8_e3": mxfp8,
    "ct_mxfp8_gfx1250": mxfp8,
    "bf16_gfx1250": bf16,
    "minimax_m3_mxfp8": lambda place: mxfp8(place, "weight_scale_inv"),
    "deepseek_v4": lambda place: mxfp4_a16w4(place, _V4, (128, 128)),
    "deepseek_v4_i768": lambda place: mxfp4_a16w4(place, _V4, (128, 128)),
    "deepseek_v41": lambda place: mxfp4_a16w4(place, _V4, (128, 128)),
    "deepseek_v41_i576": lambda place: mxfp4_a16w4(place, _V4, (128, 128)),
    "deepseek_v41_a4w4_e3": lambda place: mxfp4_separated(place, _V4, (128, 128)),
    "deepseek_v41_a4w4": lambda place: mxfp4_separated(place, _V4, (128, 128)),
    "kimi_k3": lambda place: kimi_k3(place, interleaved=False),
    "kimi_k3_e3": lambda place: kimi_k3(place, interleaved=False),
    "kimi_k3_a16w4": lambda place: kimi_k3(place, interleaved=False),
    "kimi_k3_a8w4": lambda place: kimi_k3(place, interleaved=True),
    "quark_mxfp4": lambda place: mxfp4_separated(place, _U8, (128, 256), fill=b"\1"),
    "quark_mxfp4_i384": lambda place: mxfp4_separated(place, _U8, (128, 256), fill=b"\1"),
}
"""One recipe for each path whose bytes need no arithmetic."""
