"""Changes of values are exact, can be undone, and are refused where they would lose something."""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt
import pytest

from aiter_prep.errors import NoRule
from aiter_prep.layouts.conversions import CONVERSIONS, Conversion, conversion_named
from aiter_prep.layouts.fp8 import E4M3FN, E4M3FNUZ, Fp8
from aiter_prep.layouts.merges import MERGES, merge_named

Bytes = npt.NDArray[np.uint8]
ALL_BYTES = np.arange(256, dtype=np.uint8)
ALL_HALVES = np.arange(65536, dtype="<u2")
FNUZ = CONVERSIONS["e4m3fn_to_e4m3fnuz"]

# Conversion to the kind of number that it reads and the factor of its values.
READS = {
    "f16_to_f32": ("F16", 1),
    "e8m0_to_f32": ("E8M0", 1),
    "bf16_to_f32": ("BF16", 1),
    "bf16_to_f32_times_2": ("BF16", 2),
    "f16_to_f32_times_2": ("F16", 2),
    "e8m0_to_f32_times_2": ("E8M0", 2),
    "f32_times_2": ("F32", 2),
    "f16_times_2": ("F16", 2),
    "bf16_times_2": ("BF16", 2),
}


def bf16_values(data: Bytes) -> npt.NDArray[np.float64]:
    bits = data.view("<u2").astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).astype(np.float64)


def values(kind: str, data: Bytes) -> npt.NDArray[np.float64]:
    """Return the numbers that bytes mean, by formulas of this test alone."""
    if kind == "BF16":
        return bf16_values(data)
    if kind == "E8M0":
        return np.where(data == 0xFF, np.nan, 2.0 ** (data.astype(np.float64) - 127))
    return data.view("<f4" if kind == "F32" else "<f2").astype(np.float64)


def some_f32() -> Bytes:
    """Return F32 numbers of every exponent, sign and some mantissas, subnormal ones among them."""
    rng = np.random.default_rng(0)
    exponents = np.repeat(np.arange(256, dtype=np.uint32), 40)
    mantissas = rng.integers(0, 2**23, exponents.size, dtype=np.uint32)
    mantissas[::5] = rng.choice(np.array([0, 1, 2**22, 2**23 - 1], np.uint32), mantissas[::5].size)
    signs = rng.integers(0, 2, exponents.size, dtype=np.uint32)
    return ((signs << 31) | (exponents << 23) | mantissas).astype("<u4").view(np.uint8)


def inputs(kind: str) -> Bytes:
    """Return every number of a kind, or many of F32."""
    if kind == "E8M0":
        return ALL_BYTES
    return some_f32() if kind == "F32" else ALL_HALVES.view(np.uint8)


def finite(conversion: Conversion, kind: str, factor: int) -> Bytes:
    """Return those inputs whose result is finite."""
    data = inputs(kind).reshape(-1, conversion.source_bytes)
    limit = 65504 if conversion.name == "f16_times_2" else float(np.finfo(np.float32).max)
    if conversion.name == "bf16_times_2":
        limit = float(bf16_values(np.array([0x7F, 0x7F], np.uint8)[::1])[0])
    with np.errstate(invalid="ignore"):
        size = np.abs(values(kind, data.reshape(-1))) * factor
    keep = np.isfinite(size) & (size <= limit)
    kept: Bytes = data[keep].reshape(-1)
    return kept


def test_the_table_above_names_every_conversion() -> None:
    assert set(READS) | {"e4m3fn_to_e4m3fnuz", "int4_to_int8"} == set(CONVERSIONS)


@pytest.mark.parametrize("name", READS)
def test_every_finite_number_keeps_its_value_and_comes_back(name: str) -> None:
    conversion, (kind, factor) = CONVERSIONS[name], READS[name]
    data = finite(conversion, kind, factor)
    stored = conversion.forward(data)
    assert stored.nbytes * conversion.source_bytes == data.nbytes * conversion.stored_bytes
    after = {4: "F32", 2: kind, 1: kind}[conversion.stored_bytes]
    assert np.array_equal(values(after, stored), values(kind, data) * factor)
    assert np.array_equal(conversion.inverse(stored), data)
    assert conversion.lost is None
    assert conversion.normal(data) is data


@pytest.mark.parametrize("name", READS)
def test_infinities_and_quiet_nans_come_back(name: str) -> None:
    conversion, (kind, _) = CONVERSIONS[name], READS[name]
    special = {
        "F32": np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001], "<u4").view(np.uint8),
        "BF16": np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFC1], "<u2").view(np.uint8),
        "F16": np.array([0x7C00, 0xFC00, 0x7E00, 0xFE01], "<u2").view(np.uint8),
        "E8M0": np.array([0xFF], np.uint8),
    }[kind]
    assert np.array_equal(conversion.inverse(conversion.forward(special)), special)


@pytest.mark.parametrize(
    "name",
    [
        "bf16_to_f32",
        *(
            pytest.param(name)
            for name in READS
            if name.endswith("_times_2") and not name.startswith("e8m0")
        ),
    ],
)
def test_signalling_nans_come_back_or_are_refused_and_nobody_is_warned(name: str) -> None:
    conversion, (kind, _) = CONVERSIONS[name], READS[name]
    signalling = {
        "F32": np.array([0x7F800001, 0xFFA00000], "<u4").view(np.uint8),
        "BF16": np.array([0x7F81, 0xFFA0], "<u2").view(np.uint8),
        "F16": np.array([0x7C01, 0xFD00], "<u2").view(np.uint8),
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            stored = conversion.forward(signalling)
        except NoRule:
            return
        assert np.array_equal(conversion.inverse(stored), signalling)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("f32_times_2", np.array([3e38], "<f4").view(np.uint8)),
        ("f32_times_2", np.array([1, -2e38, 2], "<f4").view(np.uint8)),
        ("f16_times_2", np.array([40000], "<f2").view(np.uint8)),
        ("bf16_times_2", np.array([0x7F00], "<u2").view(np.uint8)),
        ("bf16_to_f32_times_2", np.array([0x7F00], "<u2").view(np.uint8)),
        ("e8m0_to_f32_times_2", np.array([0xFE], np.uint8)),
    ],
)
def test_a_scale_that_cannot_be_doubled_is_refused(name: str, data: Bytes) -> None:
    with pytest.raises(NoRule, match="too large a scale to be doubled"):
        CONVERSIONS[name].forward(data)


def test_an_f16_scale_that_f32_holds_doubled_is_not_refused() -> None:
    data = np.array([65504], "<f2").view(np.uint8)
    assert CONVERSIONS["f16_to_f32_times_2"].forward(data).view("<f4")[0] == 131008


# --- fnuz ---------------------------------------------------------------------------------------


def test_fnuz_keeps_every_byte_but_negative_zero() -> None:
    data = ALL_BYTES[(ALL_BYTES != 0x7F) & (ALL_BYTES != 0xFF)]
    stored = FNUZ.forward(data)
    assert np.array_equal(stored, np.where(data == 0x80, 0, data))
    assert np.array_equal(FNUZ.inverse(stored), FNUZ.normal(data))
    assert FNUZ.lost == (0x80, 0x00)


def test_fnuz_means_half_of_what_the_same_byte_means_in_e4m3fn() -> None:
    data = ALL_BYTES[(ALL_BYTES & 0x7F) != 0x7F]
    half = E4M3FNUZ.decode(FNUZ.forward(data))
    assert np.array_equal(half * 2, E4M3FN.decode(data))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("at", [0, 57, 99])
def test_fnuz_refuses_a_nan_anywhere(byte: int, at: int) -> None:
    data = np.full(100, 0x30, np.uint8)
    data[at] = byte
    with pytest.raises(NoRule, match=rf"a NaN \(byte 0x{byte:02X}\): e4m3fnuz has no byte"):
        FNUZ.forward(data)


def test_fnuz_leaves_the_input_alone() -> None:
    data = np.array([0x80, 0x00, 0x81], np.uint8)
    FNUZ.forward(data)
    assert data.tolist() == [0x80, 0x00, 0x81]


# --- int4 ---------------------------------------------------------------------------------------


def test_every_pair_of_int4_becomes_two_bytes_low_nibble_first() -> None:
    conversion = CONVERSIONS["int4_to_int8"]
    stored = conversion.forward(ALL_BYTES.reshape(16, 16))
    assert stored.shape == (16, 32)
    pairs = stored.reshape(-1, 2).view(np.int8)
    assert pairs[:, 0].tolist() == [byte % 16 - 8 for byte in range(256)]
    assert pairs[:, 1].tolist() == [byte // 16 - 8 for byte in range(256)]
    assert np.array_equal(conversion.inverse(stored), ALL_BYTES.reshape(16, 16))


# --- FP8 numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [E4M3FN, E4M3FNUZ], ids=lambda fp8: fp8.name)
def test_every_finite_fp8_number_encodes_to_its_own_byte(fp8: Fp8) -> None:
    decoded = fp8.decode(ALL_BYTES)
    with np.errstate(invalid="ignore"):
        keep = np.isfinite(decoded) & (np.abs(decoded) <= fp8.largest)
    assert np.array_equal(fp8.encode(decoded[keep]), ALL_BYTES[keep])


@pytest.mark.parametrize("fp8", [E4M3FN, E4M3FNUZ], ids=lambda fp8: fp8.name)
def test_encoding_rounds_to_the_nearest_and_ties_to_even(fp8: Fp8) -> None:
    decoded = fp8.decode(ALL_BYTES[:0x7F]).astype(np.float64)
    positive = decoded[np.isfinite(decoded) & (decoded <= fp8.largest)]
    middle = (positive[:-1] + positive[1:]) / 2
    codes = np.arange(len(positive))
    even = np.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    assert np.array_equal(fp8.encode(middle.astype(np.float32)), even)
    above = np.nextafter(middle.astype(np.float32), np.float32(np.inf))
    below = np.nextafter(middle.astype(np.float32), np.float32(0))
    assert np.array_equal(fp8.encode(above), codes[1:])
    assert np.array_equal(fp8.encode(below), codes[:-1])


@pytest.mark.parametrize("fp8", [E4M3FN, E4M3FNUZ], ids=lambda fp8: fp8.name)
def test_numbers_beyond_the_largest_are_clamped(fp8: Fp8) -> None:
    beyond = np.array([fp8.largest * 1.1, 1e30, -1e30], np.float32)
    assert np.array_equal(np.abs(fp8.decode(fp8.encode(beyond))), np.full(3, fp8.largest))


def test_only_e4m3fn_has_a_negative_zero() -> None:
    zeros = np.array([0.0, -0.0, -1e-30], np.float32)
    assert E4M3FN.encode(zeros).tolist() == [0x00, 0x80, 0x80]
    assert E4M3FNUZ.encode(zeros).tolist() == [0, 0, 0]


def test_gate_and_up_come_under_the_larger_of_their_scales() -> None:
    merge = MERGES["requantise_e4m3fn"]
    gate = np.array([[[0x38, 0x40, 0xB8]]], np.uint8)  # 1, 2, -1
    up = np.array([[[0x38, 0x00, 0x48]]], np.uint8)  # 1, 0, 4
    scales = [np.array([0.5], np.float32), np.array([2.0], np.float32)]
    found = merge.forward([gate, up], scales)
    assert E4M3FN.decode(found[0]).ravel().tolist() == [0.25, 0.5, -0.25]
    assert np.array_equal(found[1], up)
    (larger,) = MERGES["larger_scale"].forward([gate, up], scales)
    assert larger.view("<f4").ravel().tolist() == [2.0]


@pytest.mark.parametrize(
    ("named", "kind"), [(conversion_named, "conversion"), (merge_named, "merge")]
)
def test_an_unknown_change_is_refused_by_name(named: object, kind: str) -> None:
    assert callable(named)
    with pytest.raises(NoRule, match=f"{kind} `magic` is not known"):
        named("magic")
