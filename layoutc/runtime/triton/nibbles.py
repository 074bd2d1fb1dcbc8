"""Triton functions for 4-bit codes in generated kernels, through e4m3 on cards that convert only to that."""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.blocks import from_blocks, least_of_pairs, to_blocks, to_float, to_pairs
from layoutc.runtime.triton.codes import bits_of, float_of
from layoutc.runtime.triton.conversions import to_e2m1_words
from layoutc.runtime.triton.tiles import load, load_codes
from layoutc.runtime.triton.transposes import permute_bytes, put_words, store_codes


@triton.jit
def _reciprocal(x):
    """1 / x for normal x, with a relative error of about 2^-23."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def store_nibbles(
    scaled, plane, transposed_out, at,
    EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr, ENCODE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    MAX: tl.constexpr, LOW_FIRST: tl.constexpr, CARD_CONVERTS: tl.constexpr,
):  # fmt: skip
    """Like store_codes of ENCODE(scaled) for a tile of fp32 values; eight codes at a time if the card has conversions.

    CARD_CONVERTS: the format is e2m1, to which cards convert at level 100.
    """
    if CVT_LEVEL >= 100 and CARD_CONVERTS:
        put_words(to_e2m1_words(scaled, LOW_FIRST), plane, transposed_out, at, 4, EVEN, CVT_LEVEL)
    elif CVT_LEVEL:
        words = to_nibbles(scaled, MANTISSA, BIAS, MAX, LOW_FIRST)
        put_words(words, plane, transposed_out, at, 4, EVEN, CVT_LEVEL)
    else:
        store_codes(ENCODE(scaled, CVT_LEVEL), plane, transposed_out, at, EVEN, CVT_LEVEL, 4, LOW_FIRST)


@triton.jit
def store_fp4(
    scaled, source, tile, amax, multiplier, plane, transposed_out, at,
    EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr, ENCODE: tl.constexpr, BLOCK: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, MAX: tl.constexpr, LOW_FIRST: tl.constexpr, CARD_CONVERTS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Like store_nibbles, but faster because the blocks' amaxes are known.

    scaled: the tile times the multipliers. source: (x, stride_m, stride_k), or None if x is no matrix. tile: of x, in
    its dtype. amax, multiplier: one per block. BOUNDED: amax * multiplier rounds to at most MAX.
    """
    if CVT_LEVEL and not (CVT_LEVEL >= 100 and CARD_CONVERTS):
        FORM: tl.constexpr = (MANTISSA, BIAS, MAX, LOW_FIRST)
        _put_nibbles_of_blocks(
            (plane, transposed_out), source, tile, (amax, multiplier), at, EVEN, (BLOCK[0], BLOCK[1], BOUNDED), FORM
        )
    else:
        store_nibbles(
            scaled, plane, transposed_out, at, EVEN, CVT_LEVEL, ENCODE, MANTISSA, BIAS, MAX, LOW_FIRST, CARD_CONVERTS
        )


@triton.jit
def _put_nibbles_of_blocks(into, source, tile, scales, at, EVEN: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Writes the codes of a tile of x times its blocks' multipliers, like put_words.

    into: (plane, transposed_out). scales: (amax, multiplier). BLOCK: (rows, columns, BOUNDED). FORM: (MANTISSA, BIAS,
    MAX, LOW_FIRST). bf16 has a fast path, which is wrong for blocks with NaN, infinities or extreme multipliers. If a
    tile has such a block, its program reads the tile again and overwrites the codes.
    """
    amax, multiplier = scales
    BIAS: tl.constexpr = FORM[1]
    if tl.bfloat16 == tile.dtype and source is not None:
        x, stride_m, stride_k = source
        factor = multiplier * (2.0 ** (BIAS - 7))
        words = _pairs_to_nibbles(to_pairs(tile), factor, BLOCK, FORM)
        put_words(words, into[0], into[1], at, 4, EVEN, True)
        ordinary = (factor >= 2.0**-126) & (factor < float("inf")) & (amax < float("inf"))
        if tl.min(tl.min(ordinary.to(tl.int32), 1), 0) == 0:
            tile = load(x, at[:4], (stride_m, stride_k), tile.shape, EVEN, at[4:])
            words = _values_to_nibbles(tile, multiplier, BLOCK, FORM)
            tl.debug_barrier()  # other threads may have written these words just before
            put_words(words, into[0], into[1], at, 4, EVEN, True)
    else:
        put_words(_values_to_nibbles(tile, multiplier, BLOCK, FORM), into[0], into[1], at, 4, EVEN, True)


@triton.jit
def _values_to_nibbles(tile, multiplier, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Like _pairs_to_nibbles, for any dtype, values and multipliers."""
    blocks = to_blocks(to_float(tile), BLOCK[0], BLOCK[1])
    return to_nibbles(from_blocks(blocks * multiplier[:, None, :, None]), FORM[0], FORM[1], FORM[2], FORM[3])


@triton.jit
def to_nibbles(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, LOW_FIRST: tl.constexpr):
    """(rows, columns) fp32 -> (rows, columns / 8) int32: eight 4-bit codes per word, rounded like to_small_codes.

    For cards that convert to e4m3. |x| is scaled so that the format's lowest binade becomes e4m3's, then rounded to the
    format's grid. e4m3 represents the result exactly; the code is the upper bits of the byte's magnitude.
    """
    size = _to_grid(tl.minimum(tl.abs(x), MAX) * (2.0 ** (BIAS - 7)), MANTISSA)
    signed = float_of(bits_of(size) | (bits_of(x) & (-1 << 31)))
    even, odd = tl.split(tl.reshape(signed, (x.shape[0], x.shape[1] // 2, 2)))
    return _merged(_bytes_of_four(even), _bytes_of_four(odd), MANTISSA, LOW_FIRST)


@triton.jit
def _pairs_to_nibbles(pairs, factor, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Like to_nibbles, for bf16 in pairs, (rows, columns / 2) int32.

    factor: multipliers that also scale the format's lowest binade to e4m3's. Magnitudes are clamped two at a time
    before scaling. Signs are merged four at a time afterwards. Factors must be normal, and values not NaN.
    """
    BLOCK_K: tl.constexpr = BLOCK[1]
    MANTISSA: tl.constexpr = FORM[0]
    BIAS: tl.constexpr = FORM[1]
    if BLOCK_K == 1:
        even_factor, odd_factor = tl.split(tl.reshape(factor, (factor.shape[0], factor.shape[1] // 2, 2)))
    else:
        even_factor = factor
        odd_factor = factor
    WIDTH: tl.constexpr = BLOCK_K // 2 if BLOCK_K > 1 else 1
    blocks = to_blocks(pairs, BLOCK[0], WIDTH)
    if not BLOCK[2]:
        MOST: tl.constexpr = FORM[2] * 2.0 ** (BIAS - 7)
        even_most = bits_of(_reciprocal(even_factor) * MOST)  # MAX, or slightly more, after scaling
        odd_most = bits_of(_reciprocal(odd_factor) * MOST)
        most = ((even_most >> 16) & 0xFFFF) | (odd_most & -0x10000)
        blocks = least_of_pairs(blocks, most[:, None, :, None])
    even = from_blocks(tl.abs(float_of(blocks << 16)) * even_factor[:, None, :, None])
    odd = from_blocks(tl.abs(float_of(blocks & -0x10000)) * odd_factor[:, None, :, None])
    even_bytes = _bytes_of_four(_to_grid(even, MANTISSA))
    odd_bytes = _bytes_of_four(_to_grid(odd, MANTISSA))
    lanes = tl.reshape(pairs, (pairs.shape[0], pairs.shape[1] // 4, 2, 2))
    w02, w13 = tl.split(lanes)
    w0, w2 = tl.split(w02)
    w1, w3 = tl.split(w13)
    first = permute_bytes(w0, w1, "prmt.b32 $0, $1, $2, 0x7351;")  # the upper bytes of columns 0 2 1 3
    second = permute_bytes(w2, w3, "prmt.b32 $0, $1, $2, 0x7351;")
    even_bytes |= permute_bytes(first, second, "prmt.b32 $0, $1, $2, 0x5410;") & -0x7F7F7F80
    odd_bytes |= permute_bytes(first, second, "prmt.b32 $0, $1, $2, 0x7632;") & -0x7F7F7F80
    return _merged(even_bytes, odd_bytes, MANTISSA, FORM[3])


@triton.jit
def _to_grid(size, MANTISSA: tl.constexpr):
    """Rounds magnitudes to MANTISSA bits, to nearest even. Below 2^-6, steps are those of [2^-6, 2^-5).

    anchor = 2^(23 - MANTISSA) * size is a multiple of the step in size's binade, and an even multiple if size is midway
    between two steps. Subtracting it and adding it back rounds size to that step, or to a finer one next to a power of
    two.
    """
    ANCHOR: tl.constexpr = 2.0 ** (23 - MANTISSA)
    LEAST: tl.constexpr = 2.0**-6 * (1 + 2.0 ** ((MANTISSA if MANTISSA else 1) - 23))
    anchored = tl.maximum(size, LEAST)
    return tl.fma(anchored, ANCHOR, tl.fma(anchored, -ANCHOR, size))


@triton.jit
def _bytes_of_four(x):
    """(rows, n) fp32 -> (rows, n / 4) int32: the e4m3 bytes of four values, the first lowest."""
    lanes = tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2))
    v02, v13 = tl.split(lanes)
    v0, v2 = tl.split(v02)
    v1, v3 = tl.split(v13)
    return _four_bytes(v0, v1, v2, v3)


@triton.jit
def _merged(even, odd, MANTISSA: tl.constexpr, LOW_FIRST: tl.constexpr):
    """Signed e4m3 bytes of even and odd columns -> words of nibbles, which are the bytes' sign and upper bits."""
    SHIFT: tl.constexpr = 3 - MANTISSA
    low = even if LOW_FIRST else odd
    high = odd if LOW_FIRST else even
    word = ((low >> SHIFT) & 0x07070707) | ((low >> 4) & 0x08080808)
    return word | ((high << (4 - SHIFT)) & 0x70707070) | (high & -0x7F7F7F80)


@triton.jit
def _four_bytes(v0, v1, v2, v3):
    """Four fp32 values -> their e4m3 bytes in one word, the first value lowest."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f",
        [v0, v1, v2, v3],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def load_nibbles(
    plane, at,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr, DECODE: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, LOW_FIRST: tl.constexpr,
):  # fmt: skip
    """Loads a tile of codes as fp32 values: eight codes at a time, or by DECODE if the card does not convert e4m3."""
    row, column, m, k = at
    if CVT_LEVEL:
        words_at = plane.to(tl.pointer_type(tl.int32))
        words = load(words_at, (row, column // 8, m, k // 8), (k // 8, 1), (TILE_M, TILE_K // 8), EVEN)
        return from_nibbles(words, MANTISSA, BIAS, LOW_FIRST)
    else:
        return DECODE(load_codes(plane, at, TILE_M, TILE_K, 4, LOW_FIRST), CVT_LEVEL)


@triton.jit
def from_nibbles(words, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LOW_FIRST: tl.constexpr):
    """Inverse of to_nibbles: (rows, n) words -> (rows, n * 8) fp32, exact."""
    SHIFT: tl.constexpr = 3 - MANTISSA
    low = ((words << SHIFT) & (0x01010101 * (0x7 << SHIFT))) | ((words << 4) & -0x7F7F7F80)
    high = ((words >> (4 - SHIFT)) & (0x01010101 * (0x7 << SHIFT))) | (words & -0x7F7F7F80)
    c0, c2, c4, c6 = _four_values(low if LOW_FIRST else high)
    c1, c3, c5, c7 = _four_values(high if LOW_FIRST else low)
    even = tl.join(tl.join(c0, c4), tl.join(c2, c6))
    odd = tl.join(tl.join(c1, c5), tl.join(c3, c7))
    return tl.reshape(tl.join(even, odd), (words.shape[0], words.shape[1] * 8)) * (2.0 ** (7 - BIAS))


@triton.jit
def _four_values(bytes_):
    """Four e4m3 bytes in a word -> their fp32 values, the lowest byte's first."""
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high, a, b, c, d; .reg .b32 first, second; mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high; mov.b32 {a, b}, first; mov.b32 {c, d}, second;
        cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }""",
        "=f,=f,=f,=f,r",
        [bytes_],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
