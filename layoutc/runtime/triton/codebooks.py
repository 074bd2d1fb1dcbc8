"""Triton functions for codebooks in generated kernels: the counterpart of numerics.py, on tiles."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from layoutc.runtime.triton.codes import bits_of, isnan, like, power_above

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
COMPARED = tl.constexpr(16)  # the longest codebook whose steps are compared one by one; others are searched


@triton.constexpr_function
def in_order(codes):
    """Whether codes count up from the first and wrap to 0 after the largest, like two's complement."""
    size = 1 << max(codes).bit_length()
    return all(code == (codes[0] + place) % size for place, code in enumerate(codes))


@triton.constexpr_function
def bits_of_size(x):
    """The bits of |x|, a normal fp32 number."""
    above, below = abs(x).as_integer_ratio()
    exponent = above.bit_length() - below.bit_length()
    return ((exponent + 126) << 23) + (above << 183) // (below << (160 + exponent))


@triton.constexpr_function
def buckets_of(STEPS):
    """(shift from a key to its bucket, first bucket, least, largest, whether steps are negative) for `words_of`. x is
    clamped to [least, largest]. Shift 0: no buckets: steps are subnormal, -1 or below, or too close for one per bucket.

    The key of x is bits(x). If steps are negative, it is bits(x) - bits(-x), each of at least the least number.
    """
    sizes = [bits_of_size(one) for one in STEPS]
    for shift in range(20, 8, -1):  # the widest buckets with at most one step each
        least = (min(sizes) - 1) >> shift << shift
        if len({key >> shift for key in keys_of(STEPS, least)}) == len(STEPS) and least >= 1 << 23 and min(STEPS) > -1:
            first = (least - bits_of_size(1.0) if min(STEPS) < 0 else least) >> shift
            return shift, first, of_bits(least), max(STEPS), min(STEPS) < 0
    return 0, 0, 0, 0, False


@triton.constexpr_function
def keys_of(STEPS, least):
    """The smallest key that reaches each step. least: bits of the least number."""
    if min(STEPS) > 0:
        return [bits_of_size(one) for one in STEPS]
    return [(bits_of_size(one) - least) * (1 if one > 0 else -1) for one in STEPS]


@triton.constexpr_function
def of_bits(bits):
    """The normal fp32 number with these bits."""
    return 2.0 ** ((bits >> 23) - 127) * (1 + (bits & 0x7FFFFF) / 2**23)


def words_of(steps: Sequence[float]) -> list[int]:
    """A word for each bucket of keys. The top byte of word + (key << (24 - shift)) counts the steps it reaches.

    Empty if there are no buckets.
    """
    shift, first, least, *_ = buckets_of(steps)
    if not shift:
        return []
    keys = keys_of(steps, bits_of_size(least))
    own = {key >> shift: -key % (1 << shift) or 1 << shift for key in keys}
    found, reached = [], 0
    for bucket in range(first, max(own) + 1):
        word = (((reached - bucket) << shift) + own.get(bucket, 0)) << (24 - shift)
        found.append((word + (1 << 31)) % (1 << 32) - (1 << 31))
        reached += bucket in own
    return found


@triton.constexpr_function
def last_of_bits(codes):
    """The largest code with as many bits as the largest of these."""
    return (1 << max(codes).bit_length()) - 1


@triton.jit
def to_codebook(
    x, STEPS: tl.constexpr, CODES: tl.constexpr, COUNT: tl.constexpr, NAN: tl.constexpr, AT: tl.constexpr = 0,
    codebooks=None,
):  # fmt: skip
    """fp32 -> codes of the nearest of COUNT values. CODES: by ascending value. From STEPS[i] on: value i + 1.

    codebooks: memory with the steps, or their words, from index AT on; None: they are constants.
    """
    if COUNT > COMPARED or codebooks is not None:
        BY_WORDS: tl.constexpr = codebooks is not None and buckets_of(STEPS)[0] > 0
        if BY_WORDS:
            reached = steps_by_words(x, codebooks, AT, buckets_of(STEPS))
        else:
            reached = steps_reached(x, STEPS, COUNT, codebooks, AT)
        if in_order(CODES):
            codes = (reached + CODES[0]) & last_of_bits(CODES) if CODES[0] else reached
        else:
            codes = held_at(reached, held(CODES, COUNT, COUNT, 0, tl.int32))
        if BY_WORDS and CODES[COUNT - 1] == NAN and not INTERPRETED:
            return codes  # NaN, which has no sign on a card, has the largest value's code
        return tl.where(isnan(x), NAN, codes)
    codes = tl.full(x.shape, CODES[0], tl.int32)
    for i in tl.static_range(COUNT - 1):
        codes = tl.where(x >= STEPS[i], CODES[i + 1], codes)
    return tl.where(isnan(x), NAN, codes)


@triton.jit
def from_codebook(codes, VALUES: tl.constexpr, COUNT: tl.constexpr, HELD: tl.constexpr):
    """Codes -> fp32 values: VALUES[code]. Results of `looked_up` are already values, and returned as they are.

    HELD: values are gathered through shared memory, unless the tile has no more codes than there are values.
    """
    if codes.dtype == tl.float32:
        return codes
    elif HELD and codes.numel > COUNT:
        return held_at(codes, held(VALUES, COUNT, COUNT, 0, tl.float32))
    else:
        values = tl.full(codes.shape, VALUES[0], tl.float32)
        for i in tl.static_range(1, COUNT):
            values = tl.where(codes == i, VALUES[i], values)
        return values


@triton.jit
def steps_reached(x, STEPS: tl.constexpr, COUNT: tl.constexpr, codebooks, AT: tl.constexpr):
    """How many of COUNT - 1 ascending STEPS are at most x, int32: by binary search. NaN reaches none."""
    SIZE: tl.constexpr = power_above(COUNT)
    # No x reaches the NaN steps that pad a table.
    steps = held(STEPS, COUNT - 1, COUNT, float("nan"), tl.float32) if codebooks is None else codebooks
    reached = tl.zeros(x.shape, tl.int32)
    for bit in tl.static_range(7, -1, -1):  # a code has at most 8 bits
        if 1 << bit < SIZE:
            reached += tl.where(x >= step_at(reached + ((1 << bit) - 1), steps, AT), 1 << bit, 0)
    return reached


@triton.jit
def steps_by_words(x, codebooks, AT: tl.constexpr, BUCKETS: tl.constexpr):
    """`steps_reached`, by one look-up: of the word of x's bucket (`words_of`). On a card, NaN reaches all steps."""
    SHIFT: tl.constexpr = BUCKETS[0]
    if INTERPRETED:
        x = tl.where(isnan(x), 0.0, x)
    key = bits_of(tl.maximum(tl.minimum(x, BUCKETS[3]), BUCKETS[2]))
    if BUCKETS[4]:
        key -= bits_of(tl.maximum(from_0_to_1(x, -1.0, 0.0), BUCKETS[2]))
    word = bits_of(gathered(codebooks, key >> SHIFT, AT - BUCKETS[1]))
    return upper_bytes(word + (key << (24 - SHIFT))).to(tl.int32)


@triton.jit
def upper_bytes(words):
    """The upper eight bits of 32-bit words, uint8."""
    if INTERPRETED:
        return (words >> 24).to(tl.uint8)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0073; prmt.b32 high, $3, $4, 0x0073; "
            "prmt.b32 $0, low, high, 0x5410; }",
            "=r,r,r,r,r",
            [words],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def from_0_to_1(x, slope, start):
    """x * slope + start, clamped to [0, 1]; 0 for NaN."""
    if INTERPRETED:
        value = tl.fma(x, like(x, slope), like(x, start))
        return tl.where(value > 0, tl.where(value < 1, value, 1.0), 0.0)
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            [x, like(x, slope), like(x, start)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def step_at(places, steps, AT: tl.constexpr):
    """steps[place] for each place: from a pointer, where steps begin at index AT, or from a table in registers."""
    if isinstance(steps.type, tl.block_type):
        return held_at(places, steps)
    else:
        return gathered(steps, places, AT)


@triton.jit
def held(VALUES: tl.constexpr, COUNT: tl.constexpr, ROOM: tl.constexpr, FILL: tl.constexpr, DTYPE: tl.constexpr):
    """A table in registers: the first COUNT of VALUES, padded with FILL to the power of two at or above ROOM."""
    SIZE: tl.constexpr = power_above(ROOM)
    places = tl.arange(0, SIZE)
    table = tl.full((SIZE,), FILL, DTYPE)
    for i in tl.static_range(COUNT):
        table = tl.where(places == i, VALUES[i], table)
    return table


@triton.jit
def held_at(places, table):
    """table[place] for each place, through shared memory."""
    return tl.reshape(tl.gather(table, tl.reshape(places, (places.numel,)), 0), places.shape)


@triton.jit
def looked_up(codebooks, codes, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The fp32 values of codes. The codebook is in memory from index FIRST on, with COUNT values, a power of two.

    Invalid codes, as in damaged files, lose their upper bits, so that no load leaves the codebook.
    """
    return gathered(codebooks, codes & (COUNT - 1), FIRST)


@triton.jit
def gathered(table, places, FIRST: tl.constexpr):
    """table[FIRST + place], fp32, for each place of a tile. Each thread gets the values of the places that it holds.

    For tl.load, Triton would assign neighbors to different warps, and move the whole tile through shared memory.
    """
    if INTERPRETED:
        return tl.load(table + FIRST + places)
    else:
        return tl.inline_asm_elementwise(
            joined("{ .reg .u64 at; mad.wide.s32 at, $2, 4, $1; ld.global.nc.f32 $0, [at+", 4 * FIRST, "]; }"),
            "=f,l,r",
            [tl.broadcast_to(table.to(tl.int64), places.shape), places],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.constexpr_function
def joined(before, number, after):
    """An instruction's text around a number."""
    return f"{before}{number}{after}"
