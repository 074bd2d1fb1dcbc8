"""Conversions of cards with compute capability 10, which older cards do not have, as Triton functions.

An instruction converts two values. Functions that convert one value pass 0 as the other, whose code is 0 in every
format here. The bytes are those of to_small_codes and to_exponents: COMPARISONS are the pairs, which take a tile of
fp32 values and return int32 of equal shapes. launch.hardware verifies them on each card before kernels rely on them.
The instructions are those of PTX ISA 8.6, cvt.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.codes import cast_to_codes, to_exponents, to_small_codes
from layoutc.runtime.triton.tiles import pack


@triton.jit
def _convert(x, CODE: tl.constexpr):
    """fp32 -> int32, by the assembly CODE."""
    return tl.inline_asm_elementwise(CODE, "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def convert_to_e2m1(x):
    """fp32 -> e2m1 codes, int32: to nearest even, saturating; NaN gives the largest code."""
    return _convert(x, "{ .reg .b8 code; cvt.rn.satfinite.e2m1x2.f32 code, 0f00000000, $1; cvt.u32.u8 $0, code; }")


@triton.jit
def convert_to_e2m3(x):
    """fp32 -> e2m3 codes, as convert_to_e2m1."""
    return _convert(x, "{ .reg .b16 code; cvt.rn.satfinite.e2m3x2.f32 code, 0f00000000, $1; cvt.u32.u16 $0, code; }")


@triton.jit
def convert_to_e3m2(x):
    """fp32 -> e3m2 codes, as convert_to_e2m1."""
    return _convert(x, "{ .reg .b16 code; cvt.rn.satfinite.e3m2x2.f32 code, 0f00000000, $1; cvt.u32.u16 $0, code; }")


@triton.jit
def convert_up_to_e8m0(x):
    """Non-negative fp32 -> e8m0 codes, int32: rounded up to a power of two, saturating at both ends; NaN stays NaN."""
    return _convert(x, "{ .reg .b16 code; cvt.rp.satfinite.ue8m0x2.f32 code, 0f00000000, $1; cvt.u32.u16 $0, code; }")


@triton.jit
def to_e2m1_words(x, LOW_FIRST: tl.constexpr):
    """(rows, columns) fp32 -> (rows, columns / 8) int32, each of eight e2m1 codes, rounded as by convert_to_e2m1."""
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

    An instruction puts the code of its first operand above that of its second.
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


# -------------------------------------------------------- conversions, and the arithmetic that must give the same codes
@triton.jit
def _cast_to_e4m3(x):
    return cast_to_codes(x, tl.float8e4nv, 0x7F, 0x7F)


@triton.jit
def _e4m3(x):
    return to_small_codes(x, 0, 3, 7, 7, 448.0, 126, 0x7F)


@triton.jit
def _cast_to_e5m2(x):
    return cast_to_codes(x, tl.float8e5, 0x7D, 0x7F)


@triton.jit
def _e5m2(x):
    return to_small_codes(x, 0, 2, 15, 7, 57344.0, 123, 0x7D)


@triton.jit
def _e2m1(x):
    return to_small_codes(x, 0, 1, 1, 3, 6.0, 7, 7)


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
    return to_exponents(tl.abs(x), 127, 254, 0xFF, "up")


# (PTX's name of a conversion, the conversion, the arithmetic), by the level that uses it (launch.level_of).
COMPARISONS = {
    90: (("e4m3x2", _cast_to_e4m3, _e4m3), ("e5m2x2", _cast_to_e5m2, _e5m2)),
    100: (
        ("e2m1x2", convert_to_e2m1, _e2m1),
        ("e2m1x2", _convert_to_words, _words),
        ("e2m1x2", _convert_to_high_first_words, _high_first_words),
        ("e2m3x2", convert_to_e2m3, _e2m3),
        ("e3m2x2", convert_to_e3m2, _e3m2),
        ("ue8m0x2", _convert_up_to_e8m0, _e8m0),
    ),
}


@triton.jit
def count_kernel(
    x, one, counts, CONVERT: tl.constexpr, EXPECT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sets counts[program] to how many results of CONVERT differ from EXPECT's, in a tile (ROWS, COLUMNS) of x * one.

    one: 1. The compiler does not know that, so values are results of an operation, as they are in kernels.
    """
    program = tl.program_id(0)
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    values = tl.load(x + program * ROWS * COLUMNS + offsets) * tl.load(one)
    differ = (CONVERT(values) != EXPECT(values)).to(tl.int32)
    tl.store(counts + program, tl.sum(tl.sum(differ, 1), 0))
