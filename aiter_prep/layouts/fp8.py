"""FP8 numbers to and from F32, as GPUs round them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from aiter_prep.storage.buffers import ByteArray

MANTISSA_BITS = 3
SIGN = 0x80


@dataclass(frozen=True, slots=True)
class Fp8:
    """An FP8 format with four exponent and three mantissa bits.

    Attributes:
        name: torch's name of it.
        bias: Exponent bias.
        largest: What values are clamped to before they are rounded, as engines do.
        has_negative_zero: Whether 0x80 is a zero; otherwise it is NaN.
    """

    name: str
    bias: int
    largest: float
    has_negative_zero: bool

    def decode(self, data: ByteArray) -> npt.NDArray[np.float32]:
        """Return the values of bytes, exactly."""
        return self._table()[data]

    def encode(self, values: npt.NDArray[np.float32]) -> ByteArray:
        """Return the nearest bytes, ties to even, after clamping to `largest`."""
        clamped = np.clip(values, -self.largest, self.largest)
        size = np.abs(clamped)
        smallest = 1 - self.bias  # exponent of the smallest normal number
        exponent = np.where(size == 0, smallest, np.maximum(np.frexp(size)[1] - 1, smallest))
        steps = np.rint(np.ldexp(size, MANTISSA_BITS - exponent)).astype(np.int32)
        code = (exponent + self.bias - 1) * (1 << MANTISSA_BITS) + steps
        sign = np.signbit(clamped) & ((steps != 0) | self.has_negative_zero)
        stored: ByteArray = (code + np.where(sign, SIGN, 0)).astype(np.uint8)
        return stored

    def _table(self) -> npt.NDArray[np.float32]:
        code = np.arange(256)
        exponent, mantissa = (code & 0x7F) >> MANTISSA_BITS, code & 0x07
        normal = np.ldexp(1 + mantissa / 8, exponent - self.bias)
        subnormal = np.ldexp(mantissa / 8, 1 - self.bias)
        size = np.where(exponent == 0, subnormal, normal)
        values = np.where(code & SIGN, -size, size)
        nans = [SIGN] if not self.has_negative_zero else [0x7F, 0xFF]
        values[nans] = np.nan
        return values.astype(np.float32)


E4M3FN = Fp8("float8_e4m3fn", 7, 448.0, has_negative_zero=True)
# engines clamp to 224, not to the format's own 240: vllm/csrc fp8 quantisation on ROCm
E4M3FNUZ = Fp8("float8_e4m3fnuz", 8, 224.0, has_negative_zero=False)
