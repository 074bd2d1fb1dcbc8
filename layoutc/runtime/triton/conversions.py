"""Conversions named by format, and the conversion instructions that are new with compute capability 10.

An instruction converts two values. Functions that convert one value pass 0 as the other; its code is 0 in every format
here. The bytes equal those of to_small_codes and to_exponents. COMPARISONS lists the pairs of functions; both map a
tile of fp32 values to int32 of the same shape. launch.hardware verifies them on each card before kernels use them.
Source of the instructions: PTX ISA 8.6, cvt.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.codes import (
    cast_from_codes,
    cast_to_codes,
    from_codes,
    from_exponents,
    from_integer_codes,
    over_exponents,
    to_codes,
    to_exponents,
    to_integer_codes,
    to_small_codes,
)
from layoutc.runtime.triton.tiles import pack


@triton.jit
def _convert(x, CODE: tl.constexpr):
    """fp32 -> int32 by the PTX in CODE."""
    return tl.inline_asm_elementwise(CODE, "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def convert_to_e2m1(x):
    """fp32 -> e2m1 codes, int32: to nearest even, saturating; NaN gives the largest code."""
    return _convert(x, "{ .reg .b8 code; cvt.rn.satfinite.e2m1x2.f32 code, 0f00000000, $1; cvt.u32.u8 $0, code; }")


@triton.jit
def convert_to_e2m3(x):
    """fp32 -> e2m3 codes, like convert_to_e2m1."""
    return _convert(x, "{ .reg .b16 code; cvt.rn.satfinite.e2m3x2.f32 code, 0f00000000, $1; cvt.u32.u16 $0, code; }")


@triton.jit
def convert_to_e3m2(x):
    """fp32 -> e3m2 codes, like convert_to_e2m1."""
    return _convert(x, "{ .reg .b16 code; cvt.rn.satfinite.e3m2x2.f32 code, 0f00000000, $1; cvt.u32.u16 $0, code; }")


@triton.jit
def convert_up_to_e8m0(x):
    """Non-negative fp32 -> e8m0 codes, int32: rounded up to a power of two, saturating at both ends; NaN stays NaN."""
    return _convert(x, "{ .reg .b16 code; cvt.rp.satfinite.ue8m0x2.f32 code, 0f00000000, $1; cvt.u32.u16 $0, code; }")


@triton.jit
def to_e2m1_words(x, LOW_FIRST: tl.constexpr):
    """(rows, columns) fp32 -> (rows, columns / 8) int32: eight e2m1 codes per word, rounded like convert_to_e2m1."""
    lanes = tl.reshape(x, (x.shape[0], x.shape[1] // 8, 2, 2, 2))
    v0246, v1357 = tl.split(lanes)
    v04, v26 = tl.split(v0246)
    v15, v37 = tl.split(v1357)
    v0, v4 = tl.split(v04)
    v1, v5 = tl.split(v15)
    v2, v6 = tl.split(v26)
    v3, v7 = tl.split(v37)
    if LOW_FIRST:
        return _eight_codes(v0, v1, v2, v3, v4, v5, v6, v7)
    else:
        return _eight_codes(v1, v0, v3, v2, v5, v4, v7, v6)


@triton.jit
def _eight_codes(v0, v1, v2, v3, v4, v5, v6, v7):
    """Eight fp32 values -> their e2m1 codes in one word, the first lowest.

    An instruction puts its first operand's code above its second's.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, $2, $1; cvt.rn.satfinite.e2m1x2.f32 b, $4, $3; "
        "cvt.rn.satfinite.e2m1x2.f32 c, $6, $5; cvt.rn.satfinite.e2m1x2.f32 d, $8, $7; mov.b32 $0, {a, b, c, d}; }",
        "=r,f,f,f,f,f,f,f,f",
        [v0, v1, v2, v3, v4, v5, v6, v7],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


# ----------------------------------------------------------------------------------------------- formats by their names
@triton.jit
def to_e4m3(x, CVT_LEVEL: tl.constexpr):
    """fp32 -> e4m3 codes, int32: to nearest even, saturating."""
    if CVT_LEVEL:
        return cast_to_codes(x, DTYPE=tl.float8e4nv, NAN=0x7F, CANONICAL=0x7F)
    return to_small_codes(x, CVT_LEVEL, MANTISSA=3, BIAS=7, SIGN_BIT=7, MAX=448.0, LAST=126, NAN=0x7F)


@triton.jit
def from_e4m3(codes, CVT_LEVEL: tl.constexpr):
    """e4m3 codes -> fp32, exact."""
    if CVT_LEVEL:
        return cast_from_codes(codes, DTYPE=tl.float8e4nv)
    return from_codes(codes, MANTISSA=3, BIAS=7, SIGN_BIT=7, INF_FROM=127, NAN_FROM=127)


@triton.jit
def to_e5m2(x, CVT_LEVEL: tl.constexpr):
    """fp32 -> e5m2 codes, int32: to nearest even, saturating."""
    if CVT_LEVEL:
        return cast_to_codes(x, DTYPE=tl.float8e5, NAN=0x7D, CANONICAL=0x7F)
    return to_small_codes(x, CVT_LEVEL, MANTISSA=2, BIAS=15, SIGN_BIT=7, MAX=57344.0, LAST=123, NAN=0x7D)


@triton.jit
def from_e5m2(codes, CVT_LEVEL: tl.constexpr):
    """e5m2 codes -> fp32, exact."""
    if CVT_LEVEL:
        return cast_from_codes(codes, DTYPE=tl.float8e5)
    return from_codes(codes, MANTISSA=2, BIAS=15, SIGN_BIT=7, INF_FROM=124, NAN_FROM=125)


@triton.jit
def to_e2m1(x, CVT_LEVEL: tl.constexpr):
    """fp32 -> e2m1 codes, int32: to nearest even, saturating; NaN gives the largest code."""
    if CVT_LEVEL >= 100:
        return convert_to_e2m1(x)
    return to_small_codes(x, CVT_LEVEL, MANTISSA=1, BIAS=1, SIGN_BIT=3, MAX=6.0, LAST=7, NAN=0x07)


@triton.jit
def from_e2m1(codes, CVT_LEVEL: tl.constexpr):
    """e2m1 codes -> fp32, exact; the same on all cards."""
    return from_codes(codes, MANTISSA=1, BIAS=1, SIGN_BIT=3, INF_FROM=8, NAN_FROM=8)


@triton.jit
def up_to_e8m0(x, CVT_LEVEL: tl.constexpr):
    """Non-negative fp32 -> e8m0 codes, int32: rounded up to a power of two, saturating."""
    if CVT_LEVEL >= 100:
        return convert_up_to_e8m0(x)
    return to_exponents(x, BIAS=127, LAST=254, NAN=0xFF, ROUNDING="up")


@triton.jit
def to_e8m0(x):
    """Non-negative fp32 -> e8m0 codes, int32: rounded to the nearest power of two, ties to even, saturating."""
    return to_exponents(x, BIAS=127, LAST=254, NAN=0xFF, ROUNDING="nearest")


@triton.jit
def from_e8m0(codes):
    """e8m0 codes -> fp32, exact."""
    return from_exponents(codes, BIAS=127, NAN_FROM=255)


@triton.jit
def over_e8m0(codes):
    """1 / from_e8m0(codes), exact."""
    return over_exponents(codes, BIAS=127, NAN_FROM=255)


@triton.jit
def to_bf16(x):
    """fp32 -> the bits of bf16, int32: to nearest even, saturating."""
    return to_codes(x, MANTISSA=7, BIAS=127, SUBNORMALS=True, SIGN_BIT=15, LAST=0x7F7F, NAN=0x7FC0, ROUNDING="nearest")


@triton.jit
def from_bf16(bits):
    """The bits of bf16 -> fp32, exact."""
    return from_codes(bits, MANTISSA=7, BIAS=127, SIGN_BIT=15, INF_FROM=0x7F80, NAN_FROM=0x7F81)


@triton.jit
def to_f16(x):
    """fp32 -> the bits of fp16, int32: to nearest even, saturating."""
    return to_codes(x, MANTISSA=10, BIAS=15, SUBNORMALS=True, SIGN_BIT=15, LAST=0x7BFF, NAN=0x7E00, ROUNDING="nearest")


@triton.jit
def from_f16(bits):
    """The bits of fp16 -> fp32, exact."""
    return from_codes(bits, MANTISSA=10, BIAS=15, SIGN_BIT=15, INF_FROM=0x7C00, NAN_FROM=0x7C01)


@triton.jit
def to_uint4(x):
    """fp32 -> codes 0 to 15 for 0 to 15, int32: to nearest even, saturating; NaN gives the largest."""
    return to_integer_codes(x, BITS=4, LOWEST=0, FRACTION=0, NAN=0x0F, OFFSET=0)


@triton.jit
def from_uint4(codes):
    """Inverse of to_uint4."""
    return from_integer_codes(codes, BITS=4, FRACTION=0, OFFSET=0)


@triton.jit
def to_int4_offset(x):
    """fp32 -> codes 0 to 15 for -8 to 7, int32: to nearest even, saturating; NaN gives the largest."""
    return to_integer_codes(x, BITS=4, LOWEST=-8, FRACTION=0, NAN=0x0F, OFFSET=8)


@triton.jit
def from_int4_offset(codes):
    """Inverse of to_int4_offset."""
    return from_integer_codes(codes, BITS=4, FRACTION=0, OFFSET=8)


@triton.jit
def to_uint6(x):
    """fp32 -> codes 0 to 63 for 0 to 63, int32: to nearest even, saturating; NaN gives the largest."""
    return to_integer_codes(x, BITS=6, LOWEST=0, FRACTION=0, NAN=0x3F, OFFSET=0)


@triton.jit
def from_uint6(codes):
    """Inverse of to_uint6."""
    return from_integer_codes(codes, BITS=6, FRACTION=0, OFFSET=0)


@triton.jit
def to_int8(x):
    """fp32 -> codes in two's complement of -127 to 127, int32: to nearest even, saturating; NaN gives the largest."""
    return to_integer_codes(x, BITS=8, LOWEST=-127, FRACTION=0, NAN=0x7F)


@triton.jit
def from_int8(codes):
    """Inverse of to_int8."""
    return from_integer_codes(codes, BITS=8, FRACTION=0)


# -------------------------------------------------------- conversions, and the arithmetic that must give the same codes
@triton.jit
def _e2m1(x):
    return to_e2m1(x, 0)


@triton.jit
def _convert_to_words(x):
    return to_e2m1_words(x, True)


@triton.jit
def _words(x):
    return pack(_e2m1(x), 4, 8, True).to(tl.int32)


@triton.jit
def _convert_to_high_first_words(x):
    return to_e2m1_words(x, False)


@triton.jit
def _high_first_words(x):
    bytes_ = pack(_e2m1(x), 4, 2, False)
    return pack(bytes_, 8, 4, True).to(tl.int32)


@triton.jit
def _e2m3(x):
    return to_small_codes(x, 0, 3, 1, 5, 7.5, 31, 31)


@triton.jit
def _e3m2(x):
    return to_small_codes(x, 0, 2, 3, 5, 28.0, 31, 31)


@triton.jit
def _convert_up_to_e8m0(x):
    return convert_up_to_e8m0(tl.abs(x))


@triton.jit
def _e8m0(x):
    return up_to_e8m0(tl.abs(x), 0)


# (PTX name of a conversion, the conversion, the arithmetic), of level 100 (launch.level_of).
COMPARISONS = (
    ("e2m1x2", convert_to_e2m1, _e2m1),
    ("e2m1x2", _convert_to_words, _words),
    ("e2m1x2", _convert_to_high_first_words, _high_first_words),
    ("e2m3x2", convert_to_e2m3, _e2m3),
    ("e3m2x2", convert_to_e3m2, _e3m2),
    ("ue8m0x2", _convert_up_to_e8m0, _e8m0),
)


@triton.jit
def count_kernel(
    x, one, counts, CONVERT: tl.constexpr, EXPECT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sets counts[program] to the number of results of CONVERT that differ from EXPECT in a (ROWS, COLUMNS) tile of
    x * one. one: 1, which the compiler can't know, so that values are results of an operation, as in kernels.
    """
    program = tl.program_id(0)
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    values = tl.load(x + program * ROWS * COLUMNS + offsets) * tl.load(one)
    differ = (CONVERT(values) != EXPECT(values)).to(tl.int32)
    tl.store(counts + program, tl.sum(tl.sum(differ, 1), 0))
