"""Formats against ml_dtypes and exact arithmetic: what every code means, and which code every input gets.

ml_dtypes overflows to NaN or inf in some formats, where layoutc saturates, so its inputs are clamped to the largest
finite value first.
"""

from __future__ import annotations

import bisect
import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy_models import Array, all_bf16

from layoutc.runtime import numerics
from layoutc.spec.formats import BUILTIN, F32_MAX, Format, f32, make, thresholds

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
SIGNED = [name for name in DTYPES if name != "e8m0"]
NATIVE = ["e4m3", "e5m2"]
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7D, "e2m1": 0x07, "e3m2": 0x1F, "e2m3": 0x1F, "e8m0": 0xFF}


def encode(name: str, x: Array, rounding: str = "nearest") -> Array:
    """Codes by thresholds."""
    fmt = BUILTIN[name]
    sign_bit = fmt.exponent + fmt.mantissa if fmt.sign else None
    return numerics.to_codes(torch.from_numpy(x), thresholds(fmt, rounding), sign_bit, NAN_CODE[name]).numpy()


def encode_by_cast(name: str, x: Array) -> Array:
    """Codes by torch's conversion."""
    fmt = BUILTIN[name]
    assert fmt.torch is not None
    return numerics.cast_to_codes(torch.from_numpy(x), getattr(torch, fmt.torch), fmt.max, NAN_CODE[name]).numpy()


def expected_codes(name: str, x: Array) -> Array:
    """ml_dtypes' codes of inputs without NaN, clamped first."""
    largest = np.float32(BUILTIN[name].max)
    return np.clip(x, -largest, largest).astype(DTYPES[name]).view(np.uint8)


def exact_code(values: list[Fraction], x: Fraction, rounding: str) -> int:
    """The code of a magnitude among ascending values, in exact arithmetic, saturating at both ends."""
    above = bisect.bisect_left(values, x)  # the first value >= x
    if above == len(values):
        return len(values) - 1
    if values[above] == x or above == 0:
        return above
    if rounding != "nearest":
        return above if rounding == "up" else above - 1
    low, high = x - values[above - 1], values[above] - x
    return above - 1 if low < high or (low == high and (above - 1) % 2 == 0) else above


def neighbours(value: float) -> list[float]:
    """An fp32 value, the next below and the next above, those that are finite and not negative."""
    with np.errstate(over="ignore"):
        below, above = (float(np.nextafter(np.float32(value), np.float32(end))) for end in (-np.inf, np.inf))
    return [v for v in (below, value, above) if 0 <= v <= F32_MAX]


def check_thresholds(fmt: Format, rounding: str) -> None:
    """Every fp32 value at and beside each value, midpoint and threshold gets the code that exact arithmetic gives."""
    steps = thresholds(fmt, rounding)
    assert len(steps) == len(fmt.magnitudes) - 1
    assert list(steps) == sorted(steps)
    assert all(f32(step) == step for step in steps)
    values = [Fraction(value) for value in fmt.magnitudes]
    middles = [f32((a + b) / 2) for a, b in itertools.pairwise(fmt.magnitudes)]
    for point in (*fmt.magnitudes, *middles, *steps, 0.0, F32_MAX, 2.0**-149):
        for x in neighbours(point):
            assert bisect.bisect_right(steps, x) == exact_code(values, Fraction(x), rounding), (x, rounding)


@pytest.mark.parametrize("name", DTYPES)
def test_every_code_decodes_as_in_ml_dtypes(name: str) -> None:
    fmt = BUILTIN[name]
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    expected = codes.view(DTYPES[name]).astype(np.float64)
    values = np.array([fmt.value(int(code)) for code in codes])
    np.testing.assert_array_equal(values, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(values[numbers]), np.signbit(expected[numbers]))
    by_table = numerics.from_codes(torch.from_numpy(codes), [fmt.value(int(code)) for code in codes]).numpy()
    np.testing.assert_array_equal(by_table, expected.astype(np.float32))


@pytest.mark.parametrize("name", NATIVE)
def test_torch_decodes_every_code_as_the_definition_says(name: str) -> None:
    fmt = BUILTIN[name]
    assert fmt.torch is not None
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    decoded = numerics.cast_from_codes(codes, getattr(torch, fmt.torch)).numpy()
    np.testing.assert_array_equal(decoded, np.array([fmt.value(code) for code in range(256)], dtype=np.float32))


@pytest.mark.parametrize("name", DTYPES)
def test_limits_agree_with_ml_dtypes(name: str) -> None:
    fmt, info = BUILTIN[name], ml_dtypes.finfo(DTYPES[name])
    assert fmt.max == float(info.max)
    assert fmt.bits == info.bits
    if fmt.subnormals:
        assert fmt.magnitudes[:2] == (0.0, float(info.smallest_subnormal))


def test_f32_is_ieee_binary32() -> None:
    fmt = BUILTIN["f32"]
    assert fmt.is_f32
    assert fmt.bits == 32
    assert fmt.max == F32_MAX == float(np.finfo(np.float32).max)


@pytest.mark.parametrize("name", SIGNED)
def test_every_bf16_input_encodes_as_in_ml_dtypes(name: str) -> None:
    x = all_bf16()
    x = x[~np.isnan(x)]
    np.testing.assert_array_equal(encode(name, x), expected_codes(name, x))


def test_every_normal_bf16_input_encodes_to_e8m0_as_in_ml_dtypes_but_for_ties() -> None:
    """ml_dtypes rounds ties up, where layoutc goes to the even code.

    fp32 subnormals are left out: above 2^-127, ml_dtypes rounds all of them up, which is not nearest.
    """
    x = all_bf16()
    x = x[(x >= 2.0**-126) & np.isfinite(x)]
    codes, tie = encode("e8m0", x), np.frexp(x)[0] == 0.75
    assert tie.sum() > 200
    np.testing.assert_array_equal(codes[~tie], expected_codes("e8m0", x[~tie]))
    assert (codes[tie & (x < 2.0**127)] % 2 == 0).all()


def test_every_bf16_magnitude_rounds_to_e8m0_exactly() -> None:
    x = all_bf16()
    x = x[(x >= 0) & np.isfinite(x)]
    fraction, exponent = np.frexp(x.astype(np.float64))  # x = fraction * 2 ** exponent, fraction in [0.5, 1)
    low = np.where(x == 0, -127, exponent - 1) + 127  # the code at or below, were there codes below 0
    half = np.where(low % 2, fraction >= 0.75, fraction > 0.75)  # a tie goes up from an odd code
    for rounding, goes_up in (("down", False), ("up", fraction != 0.5), ("nearest", half)):
        expected = np.clip(low + np.where(x == 0, 0, goes_up), 0, 254)
        np.testing.assert_array_equal(encode("e8m0", x, rounding), expected, err_msg=rounding)


@pytest.mark.parametrize("name", SIGNED)
def test_ties_go_to_the_even_code_with_either_sign(name: str) -> None:
    magnitudes = BUILTIN[name].magnitudes
    middles = np.array([(a + b) / 2 for a, b in itertools.pairwise(magnitudes)], np.float32)
    codes = encode(name, middles)
    assert (codes % 2 == 0).all()
    low = np.arange(len(middles))
    assert ((codes == low) | (codes == low + 1)).all()
    sign = 2 ** (BUILTIN[name].bits - 1)
    np.testing.assert_array_equal(encode(name, -middles), codes | sign)


@pytest.mark.parametrize("name", SIGNED)
def test_zero_keeps_its_sign_and_so_does_what_rounds_to_zero(name: str) -> None:
    sign = 2 ** (BUILTIN[name].bits - 1)
    tiny = BUILTIN[name].magnitudes[1] / 4
    assert (
        encode(name, np.array([0.0, -0.0, tiny, -tiny, 2.0**-149, -(2.0**-149)], np.float32)).tolist() == [0, sign] * 3
    )


@pytest.mark.parametrize("name", SIGNED)
def test_every_value_and_subnormal_encodes_to_its_own_code(name: str) -> None:
    fmt = BUILTIN[name]
    finite = [code for code in range(2**fmt.bits) if math.isfinite(fmt.value(code))]
    values = np.array([fmt.value(code) for code in finite], np.float32)
    assert encode(name, values).tolist() == finite


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_too_large_saturates_inf_included(name: str) -> None:
    fmt = BUILTIN[name]
    top = len(fmt.magnitudes) - 1
    x = np.array([fmt.max, min(fmt.max * 1.5, F32_MAX), F32_MAX, np.inf], np.float32)
    for rounding in ("nearest", "up", "down"):
        assert encode(name, x, rounding).tolist() == [top] * 4
    if fmt.sign:
        assert encode(name, -x).tolist() == [top | 2 ** (fmt.bits - 1)] * 4


@pytest.mark.parametrize("name", DTYPES)
def test_every_nan_gets_one_code_whatever_its_sign_and_payload(name: str) -> None:
    x = all_bf16()
    x = x[np.isnan(x)]
    assert set(encode(name, x)) == {NAN_CODE[name]}
    if name in NATIVE:
        assert set(encode_by_cast(name, x)) == {NAN_CODE[name]}


@pytest.mark.parametrize("name", NATIVE)
def test_both_ways_to_encode_agree_on_every_bf16_input(name: str) -> None:
    x = all_bf16()
    np.testing.assert_array_equal(encode(name, x), encode_by_cast(name, x))


@pytest.mark.parametrize("name", NATIVE)
def test_both_ways_to_encode_agree_on_millions_of_fp32_bit_patterns(name: str) -> None:
    rng = np.random.default_rng(7)
    x = rng.integers(0, 2**32, 2_000_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    narrow = np.exp2(rng.uniform(-26, 18, 1_000_000)).astype(np.float32) * rng.choice([-1, 1], 1_000_000).astype(
        np.float32
    )
    for values in (x, narrow):
        np.testing.assert_array_equal(encode(name, values), encode_by_cast(name, values))


@pytest.mark.parametrize("rounding", ["nearest", "up", "down"])
@pytest.mark.parametrize("name", DTYPES)
def test_thresholds_give_the_code_that_exact_arithmetic_gives(name: str, rounding: str) -> None:
    check_thresholds(BUILTIN[name], rounding)


@given(
    exponent=st.integers(1, 5),
    mantissa=st.integers(0, 4),
    bias=st.integers(-10, 40),
    subnormals=st.booleans(),
    special=st.integers(0, 2),
    rounding=st.sampled_from(["nearest", "up", "down"]),
)
@settings(max_examples=30, deadline=None)
def test_thresholds_of_made_up_formats_are_exact_too(
    exponent: int, mantissa: int, bias: int, subnormals: bool, special: int, rounding: str
) -> None:
    top = 2 ** (exponent + mantissa)
    assume(exponent + mantissa <= 7 and top > special + 1)
    entry = {"sign": 1, "exponent": exponent, "mantissa": mantissa, "bias": bias, "subnormals": subnormals}
    fmt = make("mine", {**entry, "nan": list(range(top - special, top))})
    assert len(fmt.magnitudes) == top - special
    assert list(fmt.magnitudes) == sorted(set(fmt.magnitudes))
    for code, value in enumerate(fmt.magnitudes):
        assert fmt.value(code) == value
        assert fmt.value(code + top) == -value
    assert all(math.isnan(fmt.value(code)) for code in fmt.nan)
    check_thresholds(fmt, rounding)


@given(
    st.floats(min_value=0, max_value=F32_MAX, width=32),
    st.sampled_from(list(DTYPES)),
    st.sampled_from(["nearest", "up", "down"]),
)
@settings(max_examples=120, deadline=None)
def test_any_fp32_magnitude_gets_the_code_that_exact_arithmetic_gives(x: float, name: str, rounding: str) -> None:
    fmt = BUILTIN[name]
    expected = exact_code([Fraction(value) for value in fmt.magnitudes], Fraction(x), rounding)
    assert bisect.bisect_right(thresholds(fmt, rounding), x) == expected


def test_formats_are_the_same_when_their_bits_mean_the_same() -> None:
    same = make("renamed", {"sign": 1, "exponent": 4, "mantissa": 3, "bias": 7, "nan": [0x7F]})
    other = make("e4m3", {"sign": 1, "exponent": 4, "mantissa": 3, "bias": 8, "nan": [0x7F]})
    assert same == BUILTIN["e4m3"]
    assert other != BUILTIN["e4m3"]
