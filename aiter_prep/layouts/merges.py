"""Merges: values that are computed from more than one source tensor of an expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt

from aiter_prep.errors import NoRule
from aiter_prep.layouts.fp8 import E4M3FN, E4M3FNUZ, Fp8
from aiter_prep.layouts.unfit import UnfitValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiter_prep.storage.buffers import ByteArray

F32 = np.dtype("<f4")
MEND = "mend the checkpoint: write the scale anew, or quantise the expert again"
SMALLEST_NORMAL = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True)
class Merge:
    """A value computed from the parts of an expert and their scales.

    Attributes:
        name: What manifests call it.
        meaning: What it does, for people.
        forward: From the parts (uint8 `[experts, rows, bytes]` each, converted already) and the
            scale of each (F32 `[experts]`) to the parts that are stored. Nothing leads back.
            Raises `UnfitValue` where the result would not be finite, or would depend on the GPU.
        fills_rows: The one row that `forward` gives stands in every row of the matrix.
    """

    name: str
    meaning: str
    forward: Callable[[Sequence[ByteArray], Sequence[npt.NDArray[np.float32]]], list[ByteArray]]
    fills_rows: bool = False


def _larger(scales: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    larger: npt.NDArray[np.float32] = np.maximum.reduce(list(scales))
    return larger


def _check_scales(scales: Sequence[npt.NDArray[np.float32]], *, divides: bool) -> None:
    """Refuse scales that engines cannot merge, or merge in another way on each GPU.

    The larger of two with a sign, as engines choose it, is not the one that holds both. Quark's
    method stops at zeros; the others divide by them. Subnormal numbers may be flushed to zero.

    Raises:
        UnfitValue: One is NaN, infinite, negative or subnormal, or the larger, by which values
            are divided, is zero.
    """
    for part, values in enumerate(scales):
        bad = (
            ~np.isfinite(values) | (values < 0) | ((values != 0) & (abs(values) < SMALLEST_NORMAL))
        )
        if bad.any():
            _refuse_scale(
                "no scale that can be merged with another is NaN, infinite, negative or below "
                f"{float(SMALLEST_NORMAL):.3g}",
                scales,
                part,
                bad,
            )
    zero = _larger(scales) == 0
    if divides and zero.any():
        _refuse_scale("the engine divides by the larger of the scales", scales, 0, zero)


def _refuse_scale(
    reason: str,
    scales: Sequence[npt.NDArray[np.float32]],
    part: int,
    bad: npt.NDArray[np.bool_],
) -> NoReturn:
    expert = int(np.argmax(bad))
    raise UnfitValue(
        reason,
        MEND,
        value=repr(float(scales[part][expert])),
        expert=expert,
        part=part,
        is_scale=True,
    )


def _as_bytes(values: npt.NDArray[np.float32]) -> ByteArray:
    """Return F32 `[experts]` as uint8 `[experts, 1, 4]`."""
    return np.ascontiguousarray(values, F32).view(np.uint8).reshape(len(values), 1, F32.itemsize)


_Scaled = Callable[
    [npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]],
    npt.NDArray[np.float32],
]


def _through_f16(
    values: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float32],
    larger: npt.NDArray[np.float32],
) -> npt.NDArray[np.float32]:
    """Mirrors process_fp8_weight_tensor_strategy_moe of vLLM 0.33 (fp8_utils.py), on a GPU.

    An F16 tensor times a 0-d F32 scale rounds the scale to F16 first; static_scaled_fp8_quant
    multiplies with the F32 reciprocal. SGLang 0.5.23 does the same (quantization/fp8.py).
    """
    half = scale.astype(np.float16).astype(np.float32)
    rounded = (values * half).astype(np.float16).astype(np.float32)
    scaled: npt.NDArray[np.float32] = rounded * (np.float32(1) / larger)
    return scaled


def _through_f32(
    values: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float32],
    larger: npt.NDArray[np.float32],
) -> npt.NDArray[np.float32]:
    """Mirrors CompressedTensorsFp8MoEMethod of ATOM (model_ops/moe.py): F32 all the way."""
    scaled: npt.NDArray[np.float32] = (values * scale) / larger
    return scaled


def _requantise(fp8: Fp8, scaled: _Scaled) -> Callable[..., list[ByteArray]]:
    """Return a function that brings parts under the larger of their scales."""

    def forward(
        parts: Sequence[ByteArray], scales: Sequence[npt.NDArray[np.float32]]
    ) -> list[ByteArray]:
        _check_scales(scales, divides=True)
        larger = _larger(scales)
        return [
            _requantised(number, part, scale, larger, fp8, scaled)
            for number, (part, scale) in enumerate(zip(parts, scales, strict=True))
        ]

    return forward


def _requantised(
    number: int,
    part: ByteArray,
    scale: npt.NDArray[np.float32],
    larger: npt.NDArray[np.float32],
    fp8: Fp8,
    scaled_by: _Scaled,
) -> ByteArray:
    shape = (-1, 1, 1)
    values = fp8.decode(part)
    with np.errstate(all="ignore"):
        scaled = scaled_by(values, scale.reshape(shape), larger.reshape(shape))
    finite = np.isfinite(scaled)
    if not finite.all():
        first = tuple(np.argwhere(~finite)[0])
        byte = f"byte 0x{int(part[first]):02X}"
        value = float(values[first])
        raise UnfitValue(
            f"times its scale {float(scale[first[0]])!r} it is not finite, and cannot be brought "
            f"under the larger scale {float(larger[first[0]])!r}",
            MEND,
            value=f"a NaN ({byte})" if np.isnan(value) else f"{value!r} ({byte})",
            expert=int(first[0]),
            part=number,
        )
    return fp8.encode(scaled)


def _larger_scale(
    _parts: Sequence[ByteArray], scales: Sequence[npt.NDArray[np.float32]]
) -> list[ByteArray]:
    if len(scales) > 1:  # one alone is stored as it is
        _check_scales(scales, divides=True)
    return [_as_bytes(_larger(scales))]


def _fold_into_rows(
    parts: Sequence[ByteArray], scales: Sequence[npt.NDArray[np.float32]]
) -> list[ByteArray]:
    """Mirrors QuarkW4A8Fp8MoEMethod.process_weights_after_loading of vLLM 0.33, in its order."""
    _check_scales(scales, divides=len(parts) > 1)
    larger = _larger(scales)
    folded: list[ByteArray] = []
    for number, (part, scale) in enumerate(zip(parts, scales, strict=True)):
        factors = rows = part.view(F32)
        with np.errstate(all="ignore"):
            if len(parts) > 1:
                ratio = np.where(scale == larger, np.float32(1), scale / larger)
                rows = rows * ratio.reshape(-1, 1, 1)
            rows = (rows * larger.reshape(-1, 1, 1)).astype(F32)
        finite = np.isfinite(rows)
        if not finite.all():
            first = tuple(np.argwhere(~finite)[0])
            raise UnfitValue(
                f"times the scale {float(scale[first[0]])!r} it is not finite",
                MEND,
                value=repr(float(factors[first])),
                expert=int(first[0]),
                part=number,
            )
        folded.append(np.ascontiguousarray(rows).view(np.uint8))
    return folded


_REQUANTISED = "gate and up under the larger of their two scales, rounded again"

MERGES: dict[str, Merge] = {
    merge.name: merge
    for merge in (
        *(
            Merge(f"requantise_{name}{suffix}", f"{_REQUANTISED}{how}", _requantise(fp8, scaled))
            for name, fp8 in (("e4m3fn", E4M3FN), ("e4m3fnuz", E4M3FNUZ))
            for suffix, how, scaled in (
                ("", "", _through_f16),
                ("_f32", ", all in F32", _through_f32),
            )
        ),
        Merge("larger_scale", "the larger of gate's and up's scale", _larger_scale),
        Merge(
            "larger_scale_in_every_row",
            "the larger of gate's and up's scale, once for each row",
            _larger_scale,
            fills_rows=True,
        ),
        Merge("fold_scale_into_rows", "row factors times the FP8 scale", _fold_into_rows),
    )
}


def merge_named(name: str) -> Merge:
    """Return the merge of this name.

    Raises:
        NoRule: There is none.
    """
    try:
        return MERGES[name]
    except KeyError:
        raise NoRule(f"merge `{name}` is not known", f"known merges: {', '.join(MERGES)}") from None
