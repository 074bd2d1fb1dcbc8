"""Codes in generated kernels, as Triton functions: what numerics.py is on tensors, on tiles of a program.

Values are fp32, codes int32 until they are stored. Every function gives the bytes of its counterpart in numerics.py.
With `HARDWARE`, casts are the card's own; without, they are integer arithmetic, which every card and Triton's
interpreter do alike (the interpreter's casts to bf16 and fp8 do not round to nearest even).
"""

from __future__ import annotations

import triton
import triton.language as tl

F32_MAX = tl.constexpr(3.4028234663852886e38)


# ------------------------------------------------------------------------------------------------------ fp32 arithmetic
@triton.jit
def bits_of(x):
    """fp32 -> its bits, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """int32 bits -> fp32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def like(x, value):
    """`value` in the shape of x, fp32."""
    return tl.full(x.shape, value, tl.float32)


@triton.jit
def divide(a, b):
    """a / b, rounded once; `/` would be an approximation. Both are tensors of one shape."""
    return tl.div_rn(a, b)


@triton.jit
def over(value, x):
    """value / x of a number and a tensor, rounded once."""
    return divide(like(x, value), x)


@triton.jit
def divide_by(x, value):
    """x / value of a tensor and a number, rounded once."""
    return divide(x, like(x, value))


@triton.jit
def maximum(a, b):
    """The larger; NaN propagates."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    """The smaller; NaN propagates."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def isnan(x):
    """True where x is NaN."""
    return x != x


@triton.jit
def isinf(x):
    """True where x is infinite."""
    return (bits_of(x) & 0x7FFFFFFF) == 0x7F800000


@triton.jit
def floor_power_of_two(x):
    """Clears the mantissa of positive values; NaN stays NaN."""
    return tl.where(isnan(x), x, float_of(bits_of(x) & 0x7F800000))


# ---------------------------------------------------------------------------------------------------------------- codes
@triton.jit
def cast_to_codes(x, DTYPE: tl.constexpr, NAN: tl.constexpr, CANONICAL: tl.constexpr):
    """By the card's conversion: nearest even, saturating. CANONICAL: the code that it gives a NaN."""
    codes = x.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)
    if NAN != CANONICAL:
        codes = tl.where(isnan(x), NAN, codes)
    return codes


@triton.jit
def cast_from_codes(codes, DTYPE: tl.constexpr):
    """By the card's conversion, exact."""
    return codes.to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def to_small_codes(
    x,
    HARDWARE: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SIGN_BIT: tl.constexpr,
    MAX: tl.constexpr,
    LAST: tl.constexpr,
    NAN: tl.constexpr,
):
    """Elements of a format well inside fp32's range, with subnormals and a mantissa: nearest even, saturating.

    Adding 1.5 * 2^(23 - mantissa bits) binades rounds |x| to the format's grid; what that adds to the sum's bits counts
    steps of the grid. `x` must come out of an operation, so that its NaN has no sign on the card.
    """
    LEAST: tl.constexpr = 128 - BIAS
    size = tl.minimum(tl.abs(x), MAX)
    binade = tl.maximum(bits_of(size) & 0x7F800000, LEAST << 23)
    anchor = binade + (((23 - MANTISSA) << 23) | 0x400000)
    steps = bits_of(size + float_of(anchor)) - anchor
    codes = ((binade >> (23 - MANTISSA)) - (LEAST << MANTISSA)) + steps
    codes = codes | ((bits_of(x) >> (31 - SIGN_BIT)) & (1 << SIGN_BIT))
    # On the card a NaN has become MAX by now, and has no sign.
    if NAN != LAST or not HARDWARE:
        codes = tl.where(isnan(x), NAN, codes)
    return codes


@triton.jit
def to_codes(
    x,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    SIGN_BIT: tl.constexpr,
    LAST: tl.constexpr,
    NAN: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """Any format and rounding (nearest, up, down), saturating, by integers. SIGN_BIT -1: the format has no sign."""
    LEAST: tl.constexpr = (128 if SUBNORMALS else 127) - BIAS
    size = tl.abs(x)
    is_small = bits_of(size) < 0x00800000
    normal = bits_of(tl.where(is_small, size * 4294967296.0, size))
    exponent = (normal >> 23) - tl.where(is_small, 32, 0)
    fraction = (normal & 0x7FFFFF) | 0x800000
    binade = tl.maximum(exponent, LEAST)
    drop = tl.minimum(23 - MANTISSA + binade - exponent, 25)
    kept = fraction >> drop
    rest = fraction & ((1 << drop) - 1)
    codes = ((binade - LEAST) << MANTISSA) + kept - (0 if SUBNORMALS else 1 << MANTISSA)
    if ROUNDING == "up":
        codes += tl.where(rest != 0, 1, 0)
    if ROUNDING == "nearest":
        half = 1 << (drop - 1)
        codes += tl.where((rest > half) | ((rest == half) & ((codes & 1) == 1)), 1, 0)
    codes = tl.minimum(tl.maximum(codes, 0), LAST)
    codes = tl.where(size == 0, 0, codes)
    if SIGN_BIT >= 0:
        codes = codes | ((bits_of(x) >> (31 - SIGN_BIT)) & (1 << SIGN_BIT))
    return tl.where(isnan(x), NAN, codes)


@triton.jit
def from_codes(
    codes,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SIGN_BIT: tl.constexpr,
    INF_FROM: tl.constexpr,
    NAN_FROM: tl.constexpr,
):
    """Codes of a format with subnormals -> fp32, exact. From INF_FROM on codes are infinities, from NAN_FROM on NaN."""
    size = codes & ((1 << SIGN_BIT) - 1)
    values = float_of(size << (23 - MANTISSA)) * (2.0 ** (127 - BIAS))
    if INF_FROM < NAN_FROM:
        values = tl.where(size >= INF_FROM, float("inf"), values)
    if NAN_FROM < 1 << SIGN_BIT:
        values = tl.where(size >= NAN_FROM, float("nan"), values)
    return float_of(bits_of(values) | ((codes >> SIGN_BIT) << 31))


@triton.jit
def to_exponents(x, BIAS: tl.constexpr, LAST: tl.constexpr, NAN: tl.constexpr, ROUNDING: tl.constexpr):
    """Non-negative values -> codes that are exponents alone, without a zero; saturating at both ends."""
    is_small = bits_of(x) < 0x00800000
    normal = bits_of(tl.where(is_small, x * 4294967296.0, x))
    codes = (normal >> 23) + tl.where(is_small, BIAS - 159, BIAS - 127)
    fraction = normal & 0x7FFFFF
    if ROUNDING == "up":
        codes += tl.where(fraction != 0, 1, 0)
    if ROUNDING == "nearest":
        codes += tl.where(fraction + (codes & 1) > 0x400000, 1, 0)
    codes = tl.minimum(tl.maximum(codes, 0), LAST)
    return tl.where(isnan(x), NAN, codes)


@triton.jit
def power_of_two(exponent):
    """2 ** exponent, fp32, exact, subnormals included."""
    half = exponent >> 1
    return float_of((half + 127) << 23) * float_of((exponent - half + 127) << 23)


@triton.jit
def from_exponents(codes, BIAS: tl.constexpr, NAN_FROM: tl.constexpr):
    """Codes that are exponents alone, without a zero -> fp32 powers of two, exact."""
    return tl.where(codes >= NAN_FROM, float("nan"), power_of_two(codes - BIAS))


@triton.jit
def over_exponents(codes, BIAS: tl.constexpr, NAN_FROM: tl.constexpr):
    """1 / from_exponents(codes), exact, without a division."""
    return tl.where(codes >= NAN_FROM, float("nan"), power_of_two(BIAS - codes))


@triton.jit
def to_integer_codes(x, BITS: tl.constexpr, LOWEST: tl.constexpr, FRACTION: tl.constexpr, NAN: tl.constexpr):
    """Two's complement in steps of 2^-FRACTION: nearest even, saturating. Adding 1.5 * 2^23 rounds to integers."""
    HIGHEST: tl.constexpr = (1 << (BITS - 1)) - 1
    steps = tl.minimum(tl.maximum(x * (1 << FRACTION), LOWEST), HIGHEST)
    codes = (bits_of(steps + 12582912.0) - 0x4B400000) & ((1 << BITS) - 1)
    return tl.where(isnan(x), NAN, codes)


@triton.jit
def from_integer_codes(codes, BITS: tl.constexpr, FRACTION: tl.constexpr):
    """Two's complement codes -> fp32, exact."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    return ((codes ^ HALF) - HALF).to(tl.float32) * (1.0 / (1 << FRACTION))


@triton.jit
def pack(codes, BITS: tl.constexpr, GROUP: tl.constexpr, LOW_FIRST: tl.constexpr):
    """Codes (rows, columns) -> words (rows, columns / GROUP), each a run of GROUP codes that fills whole bytes."""
    lanes = tl.reshape(codes, (codes.shape[0], codes.shape[1] // GROUP, GROUP))
    if GROUP * BITS >= 32:
        lanes = lanes.to(tl.int64)
    offsets = tl.arange(0, GROUP) * BITS
    shifts = offsets if LOW_FIRST else (GROUP - 1) * BITS - offsets
    return tl.sum(lanes << shifts[None, None, :], axis=2)


@triton.jit
def unpack(words, BITS: tl.constexpr, GROUP: tl.constexpr, LOW_FIRST: tl.constexpr):
    """Inverse of pack."""
    offsets = tl.arange(0, GROUP) * BITS
    shifts = offsets if LOW_FIRST else (GROUP - 1) * BITS - offsets
    lanes = (words[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(lanes, (words.shape[0], words.shape[1] * GROUP)).to(tl.int32)
