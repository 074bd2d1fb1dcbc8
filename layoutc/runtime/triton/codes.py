"""Triton functions that encode and decode in generated kernels: the counterpart of numerics.py, on tiles.

Values are fp32. Codes are int32 until they are stored. Every function gives the same bytes as its counterpart in
numerics.py. With `CVT_LEVEL`, the card converts. Without it, integer arithmetic gives the same bytes on every card and
in Triton's interpreter, whose casts to bf16 and fp8 do not round to nearest even.
"""

from __future__ import annotations

import triton
import triton.language as tl

F32_MAX = tl.constexpr(3.4028234663852886e38)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
TWOS_COMPLEMENT = tl.constexpr(-(1 << 16))  # instead of an offset


@triton.constexpr_function
def power_above(size):
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


# ------------------------------------------------------------------------------------------------------ fp32 arithmetic
@triton.jit
def bits_of(x):
    """The bits of fp32 values, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """The fp32 values with the given bits, int32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bits_of_half(x):
    """The bits of fp16 or bf16 values, int32."""
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def as_stored(entries, DTYPE: tl.constexpr):
    """fp32 values, codes, or int32 bits of fp16 or bf16 values -> DTYPE, as a plane or buffer stores them."""
    if entries.dtype == tl.int32 and (tl.float16 == DTYPE or tl.bfloat16 == DTYPE):
        return entries.to(tl.int16).to(DTYPE, bitcast=True)
    return entries.to(DTYPE)


@triton.jit
def like(x, value):
    """An fp32 tensor of x's shape, filled with `value`."""
    return tl.full(x.shape, value, tl.float32)


@triton.jit
def divide(a, b):
    """a / b, for tensors of the same shape, correctly rounded; `/` is only an approximation."""
    return tl.div_rn(a, b)


@triton.jit
def root(x):
    """The square root of max(x, 0), rounded to nearest even."""
    x = maximum(x, 0.0)
    if INTERPRETED:
        return tl.sqrt_rn(x) + 0.0  # no negative zero
    else:  # branch-free, like `root_inside`
        is_small = x < 2.0**-100
        inside = tl.where(is_small, x * 2.0**64, x)
        near = _root(inside, tl.maximum(inside, 2.0**-100))
        near = tl.where(is_small, near * 2.0**-32, near)
        return tl.where(x == float("inf"), x, near)


@triton.jit
def root_inside(x):
    """The square root of x in [2^-100, 2^100], rounded to nearest even.

    `tl.sqrt_rn` is equal, but its branch for other numbers keeps a thread from interleaving several roots.
    """
    if INTERPRETED:
        return tl.sqrt_rn(x)
    else:
        return _root(x, x)


@triton.jit
def _root(x, positive):
    """The square root of x, which is 2^-100 or more, or 0. `positive` is x, or any positive number if x is 0."""
    over = approximately("rsqrt.approx.ftz.f32 $0, $1;", positive)
    near = x * over
    return tl.fma(tl.fma(negative(near), near, x), 0.5 * over, near)


@triton.jit
def inverse_inside(x):
    """1 / x for x in [2^-100, 2^100], rounded to nearest even; branch-free, like `root_inside`."""
    if INTERPRETED:
        return rdiv(1.0, x)
    else:
        over = approximately("rcp.approx.ftz.f32 $0, $1;", x)
        return tl.fma(tl.fma(negative(x), over, 1.0), over, over)


@triton.jit
def negative(x):
    """-x, by the sign bit. Triton's `-x` is 0 - x."""
    return float_of(bits_of(x) ^ -0x80000000)


@triton.jit
def approximately(INSTRUCTION: tl.constexpr, x):
    """Applies a PTX instruction to each value."""
    return tl.inline_asm_elementwise(INSTRUCTION, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rdiv(value, x):
    """value / x for a number and a tensor, correctly rounded."""
    if value == 1 and not INTERPRETED:
        return approximately("rcp.rn.f32 $0, $1;", x)
    return divide(like(x, value), x)


@triton.jit
def divide_by(x, value):
    """x / value for a tensor and a number, correctly rounded."""
    if value == 1:
        return x
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
    """Positive values rounded down to a power of two, by clearing the mantissa; NaN stays NaN."""
    return tl.where(isnan(x), x, float_of(bits_of(x) & 0x7F800000))


@triton.jit
def floor_power_of_two_over(value, x, overflow):
    """value / x rounded down to a power of two, without a division. Rounds down `overflow` if the quotient is infinite.

    value: a number, at least 4. x: 0, or positive and finite; the caller must replace results of other x. The quotient
    of the mantissas is at least 1, or at most 1 - 2^-24, so that rounding to fp32 never reaches the next power of two.
    Exponents and a comparison of mantissas therefore suffice.
    """
    whole = bits_of(like(x, value))
    exponent = (whole >> 23) + 127 - ((bits_of(x) + (0x7FFFFF - (whole & 0x7FFFFF))) >> 23)
    return tl.where(exponent > 254, floor_power_of_two(like(x, overflow)), float_of(exponent << 23))


@triton.jit
def over_power_of_two(x):
    """1 / x for normal powers of two, exact; subnormal for x = 2^127."""
    bits = 0x7F000000 - bits_of(x)
    return float_of(tl.where(bits == 0, 0x400000, bits))


# ---------------------------------------------------------------------------------------------------------------- codes
@triton.jit
def cast_to_codes(x, DTYPE: tl.constexpr, NAN: tl.constexpr, CANONICAL: tl.constexpr):
    """fp32 -> codes by the card's conversion, to nearest even, saturating.

    NAN: the code for NaN. CANONICAL: the code that the card gives NaN.
    """
    codes = x.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)
    if NAN != CANONICAL:
        codes = tl.where(isnan(x), NAN, codes)
    return codes


@triton.jit
def cast_from_codes(codes, DTYPE: tl.constexpr):
    """Codes -> fp32 by the card's conversion, exact."""
    return codes.to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def signed(codes, x, SIGN_BIT: tl.constexpr, NAN: tl.constexpr):
    """Codes of magnitudes with the signs of x; SIGN_BIT -1: without. If the sign bit alone is NaN, zero has no sign."""
    if SIGN_BIT >= 0:
        codes = codes | ((bits_of(x) >> (31 - SIGN_BIT)) & (1 << SIGN_BIT))
        if NAN == 1 << SIGN_BIT:
            codes = tl.where(codes == NAN, 0, codes)
    return codes


@triton.jit
def to_small_codes(
    x,
    CVT_LEVEL: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIGN_BIT: tl.constexpr, MAX: tl.constexpr,
    LAST: tl.constexpr, NAN: tl.constexpr,
):  # fmt: skip
    """fp32 -> codes of a signed format with a mantissa and subnormals, well inside fp32's range.

    Rounds to nearest even, saturating. Adding 1.5 * 2^(23 - MANTISSA) times the binade of |x| rounds |x| to the
    format's grid; the low bits of the sum then count grid steps. `x` must be the result of an operation, so that its
    NaN has no sign on the card. LAST: the largest finite code.
    """
    LEAST: tl.constexpr = 128 - BIAS
    size = tl.minimum(tl.abs(x), MAX)
    binade = tl.maximum(bits_of(size) & 0x7F800000, LEAST << 23)
    anchor = binade + (((23 - MANTISSA) << 23) | 0x400000)
    steps = bits_of(size + float_of(anchor)) - anchor
    codes = ((binade >> (23 - MANTISSA)) - (LEAST << MANTISSA)) + steps
    codes = signed(codes, x, SIGN_BIT, NAN)
    # On the card, NaN has no sign, and tl.minimum has replaced it by MAX.
    if NAN != LAST or not CVT_LEVEL:
        codes = tl.where(isnan(x), NAN, codes)
    return codes


@triton.jit
def to_codes(
    x,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, SUBNORMALS: tl.constexpr, SIGN_BIT: tl.constexpr, LAST: tl.constexpr,
    NAN: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """fp32 -> codes of any floating-point format by integer arithmetic, saturating.

    ROUNDING: "nearest" (ties to even), "up" or "down". SIGN_BIT: -1: unsigned. LAST: the largest finite code.
    """
    LEAST: tl.constexpr = (128 if SUBNORMALS else 127) - BIAS
    size = tl.abs(x)
    is_small = bits_of(size) < 0x00800000
    normal = bits_of(tl.where(is_small, size * 4294967296.0, size))
    exponent = (normal >> 23) - tl.where(is_small, 32, 0)
    fraction = (normal & 0x7FFFFF) | 0x800000
    binade = tl.maximum(exponent, LEAST)
    drop = tl.minimum(23 - MANTISSA + binade - exponent, 25)
    high = fraction >> drop
    rest = fraction & ((1 << drop) - 1)
    codes = ((binade - LEAST) << MANTISSA) + high - (0 if SUBNORMALS else 1 << MANTISSA)
    if ROUNDING == "up":
        codes += tl.where(rest != 0, 1, 0)
    if ROUNDING == "nearest":
        half = 1 << (drop - 1)
        codes += tl.where((rest > half) | ((rest == half) & ((codes & 1) == 1)), 1, 0)
    codes = tl.minimum(tl.maximum(codes, 0), LAST)
    codes = tl.where(size == 0, 0, codes)
    return tl.where(isnan(x), NAN, signed(codes, x, SIGN_BIT, NAN))


@triton.jit
def from_codes(
    codes,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIGN_BIT: tl.constexpr, INF_FROM: tl.constexpr, NAN_FROM: tl.constexpr,
    MINUS_ZERO: tl.constexpr = True,
):  # fmt: skip
    """Codes of a format with subnormals -> fp32, exact. Codes from INF_FROM on are infinite; from NAN_FROM on, NaN.

    MINUS_ZERO: false if the sign bit alone is NaN.
    """
    size = codes & ((1 << SIGN_BIT) - 1)
    values = float_of(size << (23 - MANTISSA)) * (2.0 ** (127 - BIAS))
    if INF_FROM < NAN_FROM:
        values = tl.where(size >= INF_FROM, float("inf"), values)
    if NAN_FROM < 1 << SIGN_BIT:
        values = tl.where(size >= NAN_FROM, float("nan"), values)
    if not MINUS_ZERO:
        values = tl.where(codes == 1 << SIGN_BIT, float("nan"), values)
    return float_of(bits_of(values) | ((codes >> SIGN_BIT) << 31))


@triton.jit
def to_exponents(x, BIAS: tl.constexpr, LAST: tl.constexpr, NAN: tl.constexpr, ROUNDING: tl.constexpr):
    """Non-negative fp32 -> codes of an exponent-only format without zero, saturating at both ends."""
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
    """2 ** exponent in fp32, exact, also for subnormal results."""
    half = exponent >> 1
    return float_of((half + 127) << 23) * float_of((exponent - half + 127) << 23)


@triton.jit
def from_exponents(codes, BIAS: tl.constexpr, NAN_FROM: tl.constexpr):
    """Codes of an exponent-only format without zero -> fp32 powers of two, exact."""
    return tl.where(codes >= NAN_FROM, float("nan"), power_of_two(codes - BIAS))


@triton.jit
def over_exponents(codes, BIAS: tl.constexpr, NAN_FROM: tl.constexpr):
    """1 / from_exponents(codes), exact, without a division."""
    return tl.where(codes >= NAN_FROM, float("nan"), power_of_two(BIAS - codes))


@triton.jit
def to_integer_codes(
    x,
    BITS: tl.constexpr, LOWEST: tl.constexpr, FRACTION: tl.constexpr, NAN: tl.constexpr,
    OFFSET: tl.constexpr = TWOS_COMPLEMENT,
):  # fmt: skip
    """fp32 -> two's complement in steps of 2^-FRACTION, to nearest even, saturating. With OFFSET: steps + OFFSET.

    Adding 12582912 = 1.5 * 2^23 rounds to an integer.
    """
    HIGHEST: tl.constexpr = (1 << (BITS - 1)) - 1 if OFFSET == TWOS_COMPLEMENT else (1 << BITS) - 1 - OFFSET
    ADDED: tl.constexpr = 0 if OFFSET == TWOS_COMPLEMENT else OFFSET
    steps = tl.minimum(tl.maximum(x * (1 << FRACTION), LOWEST), HIGHEST)
    codes = (bits_of(steps + 12582912.0) - (0x4B400000 - ADDED)) & ((1 << BITS) - 1)
    return tl.where(isnan(x), NAN, codes)


@triton.jit
def from_integer_codes(codes, BITS: tl.constexpr, FRACTION: tl.constexpr, OFFSET: tl.constexpr = TWOS_COMPLEMENT):
    """Two's complement codes, or steps + OFFSET -> fp32, exact."""
    if OFFSET != TWOS_COMPLEMENT:
        return (codes - OFFSET).to(tl.float32) * (1.0 / (1 << FRACTION))
    HALF: tl.constexpr = 1 << (BITS - 1)
    return ((codes ^ HALF) - HALF).to(tl.float32) * (1.0 / (1 << FRACTION))
