"""Pairs of a card's conversion and the integer arithmetic that must give the same codes, as Triton functions.

Both functions of a pair take a tile of fp32 values, and return int32 of equal shapes. The formats are fixed by the
conversions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.codes import cast_to_codes, to_exponents, to_small_codes
from layoutc.runtime.triton.conversions import (
    convert_to_e2m1,
    convert_to_e2m3,
    convert_to_e3m2,
    convert_up_to_e8m0,
    to_e2m1_words,
)
from layoutc.runtime.triton.tiles import pack


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
