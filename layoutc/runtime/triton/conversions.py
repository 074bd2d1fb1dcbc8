"""Conversions of cards with compute capability 10, which older cards do not have, as Triton functions.

An instruction converts two values. Functions that convert one value pass 0 as the other, whose code is 0 in every
format here. The bytes are those of to_small_codes and to_exponents. launch.hardware verifies that on each card before
kernels use these functions. The instructions are those of PTX ISA 8.6, cvt.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
