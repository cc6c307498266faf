"""Changes of values, rather than of places, that a target asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aiter_prep.errors import NoRule
from aiter_prep.layouts.unfit import UnfitValue

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from aiter_prep.storage.buffers import ByteArray

NEGATIVE_ZERO = 0x80
FP8_NANS = (0x7F, 0xFF)
E8M0_NAN = 0xFF


@dataclass(frozen=True, slots=True)
class Conversion:
    """A change of values, element by element.

    Attributes:
        name: What manifests call it.
        meaning: What it does, for people.
        source_bytes: Bytes of an element of the source.
        stored_bytes: Bytes of an element afterwards.
        forward: uint8 `[..., columns * source_bytes]` to uint8 `[..., columns * stored_bytes]`.
        inverse: The way back.
        lost: Which byte of the source does not come back, and as what; None if all do.

    Law: `inverse(forward(x)) == x`, but for `lost`.
    """

    name: str
    meaning: str
    source_bytes: int
    stored_bytes: int
    forward: Callable[[ByteArray], ByteArray]
    inverse: Callable[[ByteArray], ByteArray]
    lost: tuple[int, int] | None = None

    def normal(self, source: ByteArray) -> ByteArray:
        """Return what `inverse(forward(source))` brings: the source, but for what is lost."""
        if self.lost is None:
            return source
        return np.where(source == self.lost[0], np.uint8(self.lost[1]), source)


def _e4m3fn_to_e4m3fnuz(data: ByteArray) -> ByteArray:
    """Keep every byte but 0x80: negative zero in e4m3fn, NaN in e4m3fnuz.

    mirrors vllm/model_executor/layers/quantization/utils/w8a8_utils.py::
    normalize_e4m3fn_to_e4m3fnuz; NaN bytes, which it turns into +-240, are refused.
    """
    nans = np.isin(data, FP8_NANS)
    if nans.any():
        first = np.argwhere(nans)[0]
        raise UnfitValue(
            "e4m3fnuz has no byte for it",
            "convert for gfx950, or mend the checkpoint",
            value=f"a NaN (byte 0x{int(data[tuple(first)]):02X})",
            expert=int(first[0]),
        )
    return np.where(data == NEGATIVE_ZERO, np.uint8(0), data)


def _same(data: ByteArray) -> ByteArray:
    return data


def _widen_bf16(data: ByteArray) -> ByteArray:
    return (data.view("<u2").astype("<u4") << np.uint32(16)).view(np.uint8)


def _narrow_to_bf16(data: ByteArray) -> ByteArray:
    return (data.view("<u4") >> np.uint32(16)).astype("<u2").view(np.uint8)


def _scaled(name: str, factor: float) -> Callable[[ByteArray], ByteArray]:
    """Return a function that multiplies F32, F16 or BF16 elements by a power of two, exactly."""

    def scale(data: ByteArray) -> ByteArray:
        values = _READ[name](data)
        with np.errstate(over="ignore", invalid="ignore"):
            # arithmetic would turn a signalling NaN into a quiet one
            scaled = np.where(np.isnan(values), values, values * values.dtype.type(factor))
        unlike = np.isfinite(values) != np.isfinite(scaled)
        if unlike.any():
            first = np.argwhere(unlike)[0]
            raise UnfitValue(
                "too large a scale to be doubled, as e4m3fnuz asks for",
                "convert for gfx950, or mend the checkpoint",
                value=repr(float(values[tuple(first)])),
                expert=int(first[0]),
            )
        return _WRITE[name](scaled)

    return scale


def _then(
    first: Callable[[ByteArray], ByteArray], second: Callable[[ByteArray], ByteArray]
) -> Callable[[ByteArray], ByteArray]:
    return lambda data: second(first(data))


def _as_f32(data: ByteArray) -> npt.NDArray[np.floating]:
    return data.view("<f4")


def _as_f16(data: ByteArray) -> npt.NDArray[np.floating]:
    return data.view("<f2")


def _bf16_as_f32(data: ByteArray) -> npt.NDArray[np.floating]:
    return _widen_bf16(data).view("<f4")


def _raw(values: npt.NDArray[np.floating]) -> ByteArray:
    return np.ascontiguousarray(values).view(np.uint8)


def _f32_to_bf16(values: npt.NDArray[np.floating]) -> ByteArray:
    return _narrow_to_bf16(_raw(values))


_READ = {"F32": _as_f32, "F16": _as_f16, "BF16": _bf16_as_f32}
_WRITE = {"F32": _raw, "F16": _raw, "BF16": _f32_to_bf16}


def _widen_f16(data: ByteArray) -> ByteArray:
    with np.errstate(invalid="ignore"):
        wide = data.view("<f2").astype("<f4").view(np.uint8)
        changed = _narrow_to_f16(wide).view("<u2") != data.view("<u2")
    if changed.any():
        first = np.argwhere(changed)[0]
        raise UnfitValue(
            "F32 does not keep it",
            "mend the checkpoint",
            value=f"a signalling NaN (F16 0x{int(data.view('<u2')[tuple(first)]):04X})",
            expert=int(first[0]),
        )
    return wide


def _narrow_to_f16(data: ByteArray) -> ByteArray:
    with np.errstate(over="ignore", invalid="ignore"):
        return data.view("<f4").astype("<f2").view(np.uint8)


def _e8m0_to_f32(data: ByteArray) -> ByteArray:
    """2^(byte - 127); 0x00 is subnormal in F32, and 0xFF is NaN."""
    bits = data.astype("<u4") << np.uint32(23)
    bits = np.where(data == 0, np.uint32(1 << 22), bits)
    return np.where(data == E8M0_NAN, np.uint32(0x7FC00000), bits).astype("<u4").view(np.uint8)


def _f32_to_e8m0(data: ByteArray) -> ByteArray:
    return (data.view("<u4") >> np.uint32(23)).astype(np.uint8)


def _unpack_int4(data: ByteArray) -> ByteArray:
    """Nibbles, low first, each 8 above its value, to one signed byte each."""
    pairs = np.stack([data & 0x0F, data >> np.uint8(4)], axis=-1)
    return (pairs - np.uint8(8)).reshape(*data.shape[:-1], -1)


def _pack_int4(data: ByteArray) -> ByteArray:
    nibbles = (data + np.uint8(8)) & 0x0F
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))).astype(np.uint8)


_CONVERSIONS = (
    Conversion("f16_to_f32", "the same values in F32", 2, 4, _widen_f16, _narrow_to_f16),
    Conversion("e8m0_to_f32", "the same powers of two in F32", 1, 4, _e8m0_to_f32, _f32_to_e8m0),
    Conversion(
        "int4_to_int8", "packed int4, stored 8 above, as bytes", 1, 2, _unpack_int4, _pack_int4
    ),
    Conversion(
        "e4m3fn_to_e4m3fnuz",
        "byte 0x80 becomes 0x00; the scales are doubled, so every value stays",
        1,
        1,
        _e4m3fn_to_e4m3fnuz,
        _same,
        lost=(NEGATIVE_ZERO, 0),
    ),
    Conversion("bf16_to_f32", "the same values in F32", 2, 4, _widen_bf16, _narrow_to_bf16),
    *(
        Conversion(
            f"{name}_times_2",
            "the same values in F32, doubled",
            width,
            4,
            _then(widen, _scaled("F32", 2.0)),
            _then(_scaled("F32", 0.5), narrow),
        )
        for name, width, widen, narrow in (
            ("bf16_to_f32", 2, _widen_bf16, _narrow_to_bf16),
            ("f16_to_f32", 2, _widen_f16, _narrow_to_f16),
            ("e8m0_to_f32", 1, _e8m0_to_f32, _f32_to_e8m0),
        )
    ),
    *(
        Conversion(
            f"{dtype.lower()}_times_2",
            "every element doubled",
            width,
            width,
            _scaled(dtype, 2.0),
            _scaled(dtype, 0.5),
        )
        for dtype, width in (("F32", 4), ("F16", 2), ("BF16", 2))
    ),
)

CONVERSIONS: dict[str, Conversion] = {item.name: item for item in _CONVERSIONS}


def conversion_named(name: str) -> Conversion:
    """Return the conversion of this name.

    Raises:
        NoRule: There is none.
    """
    try:
        return CONVERSIONS[name]
    except KeyError:
        raise NoRule(
            f"conversion `{name}` is not known", f"known conversions: {', '.join(CONVERSIONS)}"
        ) from None
