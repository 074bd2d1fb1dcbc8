"""Triton functions that fill swizzled buffers in generated kernels: each position finds its value in the plane."""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.tiles import round_up

AT_ONCE = tl.constexpr(512)  # the most bytes or values that a program looks up at a time


@triton.jit
def scales_of_128x4(free, contracted, free_count, contracted_count):
    """The flat index of scale (free, contracted) in 128 x 4 tiles, as cards with compute capability 10 read them:
    (rt a b) (ct c) -> rt ct b a c."""
    at_b = free % 32
    at_a = free // 32 % 4
    at_rt = free // 128
    at_c = contracted % 4
    at_ct = contracted // 4
    return (((at_rt * (contracted_count // 4) + at_ct) * 32 + at_b) * 4 + at_a) * 4 + at_c


@triton.jit
def move_swizzled(
    plane, out, at,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, ORIGIN: tl.constexpr, PER: tl.constexpr, PAD: tl.constexpr,
    BITS: tl.constexpr = 8, LOW_FIRST: tl.constexpr = True, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Fills a tile's share of a buffer from a plane; does nothing if the buffer is None.

    ORIGIN: the recipe's function (position in the buffer, m, k) -> (index of a value in the plane, whether there is
    one); other positions are zeros. PER: rows and columns per entry of the padded buffer; 0 for an axis with one entry.
    PAD: what the counts of entries are rounded up to. BITS: of a code, if less than 8; 8: values of the plane's dtype.
    WHOLE: the plane has a byte per code, and the buffer packs codes.

    Programs share entries by number, as if entry number i * columns + j were at row i and column j of a matrix.
    """
    row, column, m, k = at
    if out is not None:
        GROUP: tl.constexpr = 8 if BITS % 2 else (4 if BITS % 4 else (2 if BITS % 8 else 1))
        STEP: tl.constexpr = TILE_M if TILE_M * TILE_K <= AT_ONCE else max(1, AT_ONCE // TILE_K)
        rows = round_up(tl.cdiv(m, PER[0]), PAD[0]) if PER[0] else 1
        columns = round_up(tl.cdiv(k, PER[1]), PAD[1]) if PER[1] else 1
        to = out.to(tl.pointer_type(plane.dtype.element_ty))
        j = column + tl.arange(0, TILE_K)[None, :]
        for first in range(0, TILE_M, STEP):
            i = row + first + tl.arange(0, STEP)[:, None]
            number = i * columns + j
            mine = (i < rows) & (j < columns) & (number < rows * columns // GROUP)
            if GROUP == 1:
                value, there = ORIGIN(number, m, k)
                tl.store(to + number, tl.load(plane + value, mask=mine & there, other=0), mask=mine)
            else:
                _put_group((plane, to), number, mine, (m, k), ORIGIN, (BITS, GROUP, LOW_FIRST, WHOLE))


@triton.jit
def _put_group(planes, number, mine, sizes, ORIGIN: tl.constexpr, FORM: tl.constexpr):
    """Writes group `number` of codes, which fills whole bytes, where `mine` is set.

    planes: (plane, to). sizes: (m, k). FORM: (BITS, GROUP, LOW_FIRST, WHOLE).
    """
    plane, to = planes
    BITS: tl.constexpr = FORM[0]
    GROUP: tl.constexpr = FORM[1]
    LOW_FIRST: tl.constexpr = FORM[2]
    NBYTES: tl.constexpr = BITS * GROUP // 8
    words = tl.zeros(number.shape, tl.int64 if NBYTES > 4 else tl.int32)
    for c in tl.static_range(GROUP):
        value, there = ORIGIN(number * GROUP + c, sizes[0], sizes[1])
        if FORM[3]:
            code = tl.load(plane + value, mask=mine & there, other=0).to(words.dtype)
        else:
            code = _code_at(plane, value, mine & there, BITS, LOW_FIRST).to(words.dtype)
        words |= code << (c * BITS if LOW_FIRST else (GROUP - 1 - c) * BITS)
    for b in tl.static_range(NBYTES):
        byte = words >> (8 * b if LOW_FIRST else 8 * (NBYTES - 1 - b))
        tl.store(to + number * NBYTES + b, (byte & 0xFF).to(tl.uint8), mask=mine)


@triton.jit
def _code_at(plane, value, there, BITS: tl.constexpr, LOW_FIRST: tl.constexpr):
    """Code number `value` of a plane whose rows are whole bytes, int32; 0 unless `there`."""
    byte = value * BITS // 8
    begins = (value * BITS % 8).to(tl.int32)
    lane = tl.load(plane + byte, mask=there, other=0).to(tl.int32)
    if 8 % BITS:  # a code may continue in the next byte
        after = tl.load(plane + byte + 1, mask=there & (begins + BITS > 8), other=0).to(tl.int32)
        lane = lane | (after << 8) if LOW_FIRST else (lane << 8) | after
    WIDTH: tl.constexpr = 16 if 8 % BITS else 8
    return (lane >> (begins if LOW_FIRST else WIDTH - BITS - begins)) & ((1 << BITS) - 1)
