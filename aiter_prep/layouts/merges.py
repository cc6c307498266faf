"""Merges: values that are computed from more than one source tensor of an expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aiter_prep.errors import NoRule
from aiter_prep.layouts.fp8 import E4M3FN, E4M3FNUZ, Fp8

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from aiter_prep.storage.buffers import ByteArray

F32 = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Merge:
    """A value computed from the parts of an expert and their scales.

    Attributes:
        name: What manifests call it.
        meaning: What it does, for people.
        forward: From the parts (uint8 `[experts, rows, bytes]` each, converted already) and the
            scale of each (F32 `[experts]`) to the parts that are stored. Nothing leads back.
    """

    name: str
    meaning: str
    forward: Callable[[Sequence[ByteArray], Sequence[npt.NDArray[np.float32]]], list[ByteArray]]


def _larger(scales: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    larger: npt.NDArray[np.float32] = np.maximum.reduce(list(scales))
    return larger


def _as_bytes(values: npt.NDArray[np.float32]) -> ByteArray:
    """Return F32 `[experts]` as uint8 `[experts, 1, 4]`."""
    return np.ascontiguousarray(values, F32).view(np.uint8).reshape(len(values), 1, F32.itemsize)


def _requantise(fp8: Fp8) -> Callable[..., list[ByteArray]]:
    """Return a function that brings parts under the larger of their scales.

    mirrors vllm/model_executor/layers/quantization/utils/fp8_utils.py::
    process_fp8_weight_tensor_strategy_moe (0.33), on a GPU: an F16 tensor times a 0-d F32 scale
    rounds the scale to F16 first; static_scaled_fp8_quant multiplies with the F32 reciprocal.
    """

    def forward(
        parts: Sequence[ByteArray], scales: Sequence[npt.NDArray[np.float32]]
    ) -> list[ByteArray]:
        with np.errstate(divide="ignore"):
            reciprocal = np.float32(1) / _larger(scales)
        return [
            _requantised(part, scale, reciprocal, fp8)
            for part, scale in zip(parts, scales, strict=True)
        ]

    return forward


def _requantised(
    part: ByteArray,
    scale: npt.NDArray[np.float32],
    reciprocal: npt.NDArray[np.float32],
    fp8: Fp8,
) -> ByteArray:
    shape = (-1, 1, 1)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        half = scale.astype(np.float16).astype(np.float32).reshape(shape)
        values = (fp8.decode(part) * half).astype(np.float16).astype(np.float32)
        scaled = values * reciprocal.reshape(shape)
    if not np.isfinite(scaled).all():
        raise NoRule(
            "an FP8 weight cannot be brought under the larger of two scales: a value is not finite",
            "mend the checkpoint",
        )
    return fp8.encode(scaled)


def _larger_scale(
    _parts: Sequence[ByteArray], scales: Sequence[npt.NDArray[np.float32]]
) -> list[ByteArray]:
    return [_as_bytes(_larger(scales))]


def _fold_into_rows(
    parts: Sequence[ByteArray], scales: Sequence[npt.NDArray[np.float32]]
) -> list[ByteArray]:
    """Mirrors QuarkW4A8Fp8MoEMethod.process_weights_after_loading of vLLM 0.33, in its order."""
    larger = _larger(scales)
    folded: list[ByteArray] = []
    for part, scale in zip(parts, scales, strict=True):
        rows = part.view(F32)
        if len(parts) > 1:
            ratio = np.where(scale == larger, np.float32(1), scale / larger)
            rows = rows * ratio.reshape(-1, 1, 1)
        rows = (rows * larger.reshape(-1, 1, 1)).astype(F32)
        folded.append(np.ascontiguousarray(rows).view(np.uint8))
    return folded


MERGES: dict[str, Merge] = {
    merge.name: merge
    for merge in (
        Merge(
            "requantise_e4m3fn",
            "gate and up under the larger of their two scales, rounded again",
            _requantise(E4M3FN),
        ),
        Merge(
            "requantise_e4m3fnuz",
            "gate and up under the larger of their two scales, rounded again",
            _requantise(E4M3FNUZ),
        ),
        Merge("larger_scale", "the larger of gate's and up's scale", _larger_scale),
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
