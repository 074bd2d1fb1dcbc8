"""Codebooks in generated kernels, as Triton functions: the counterpart of numerics.py, for tiles."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from layoutc.runtime.triton.codes import approximately, bits_of, float_of, isnan, like, power_above

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
NO_LINES = tl.constexpr(())  # as a default, Triton 3.6 takes no bare tuple
COMPARED = tl.constexpr(16)  # codebooks of so many values are compared one by one; longer ones are searched by halves


@triton.constexpr_function
def in_order(codes):
    """Whether codes count up from the first, and go on at 0 after the last of their bits, as two's complement does."""
    size = 1 << max(codes).bit_length()
    return all(code == (codes[0] + place) % size for place, code in enumerate(codes))


@triton.constexpr_function
def count_of(values):
    """How many there are."""
    return len(values)


@triton.constexpr_function
def reaches_nan(slopes, codes, nan):
    """Whether what is found by SLOPES for NaN is its code."""
    return len(slopes) > 0 and codes[-1] == nan


@triton.constexpr_function
def bits_of_size(x):
    """The bits of |x|, a normal number of fp32."""
    above, below = abs(x).as_integer_ratio()
    exponent = above.bit_length() - below.bit_length()
    return ((exponent + 126) << 23) + (above << 183) // (below << (160 + exponent))


@triton.constexpr_function
def buckets_of(STEPS):
    """(Bits that number a key's bucket leave, the first bucket, the least and the largest number that differ from those
    beside them) for `words_of`. No bits: steps are too close for buckets of one each, or subnormal, or -1 or below.

    The key of x is the bits of x, or where steps are negative, those of x less those of -x, no less than the least.
    """
    sizes = [bits_of_size(one) for one in STEPS]
    for shift in range(20, 8, -1):  # buckets as wide as may be, of one step at most
        least = (min(sizes) - 1) >> shift << shift
        if len({key >> shift for key in keys_of(STEPS, least)}) == len(STEPS) and least >= 1 << 23 and min(STEPS) > -1:
            first = (least - bits_of_size(1.0) if min(STEPS) < 0 else least) >> shift
            return shift, first, of_bits(least), max(STEPS)
    return 0, 0, 0, 0


@triton.constexpr_function
def keys_of(STEPS, least):
    """The least key of numbers that reach each step. least: bits of the least number."""
    if min(STEPS) > 0:
        return [bits_of_size(one) for one in STEPS]
    return [(bits_of_size(one) - least) * (1 if one > 0 else -1) for one in STEPS]


@triton.constexpr_function
def of_bits(bits):
    """The normal number of fp32 that has these bits."""
    return 2.0 ** ((bits >> 23) - 127) * (1 + (bits & 0x7FFFFF) / 2**23)


def words_of(steps: Sequence[float]) -> list[int]:
    """A word for each bucket of keys: in the upper eight bits of its sum with a key, whose low bits are moved below
    them, is the number of steps that are reached.

    Without buckets of one step each there are none.
    """
    shift, first, least, _ = buckets_of(steps)
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
    """The largest code that has the bits of the largest of these."""
    return (1 << max(codes).bit_length()) - 1


@triton.jit
def to_codebook(
    x, STEPS: tl.constexpr, CODES: tl.constexpr, COUNT: tl.constexpr, NAN: tl.constexpr,
    SLOPES: tl.constexpr = NO_LINES, ENDS: tl.constexpr = NO_LINES, SPANS: tl.constexpr = NO_LINES,
    ZERO: tl.constexpr = 0, AT: tl.constexpr = 0, codebooks=None,
):  # fmt: skip
    """fp32 -> codes of the nearest of COUNT values, by ascending value in CODES; from STEPS[i] on, value i + 1.

    codebooks: memory that has the steps from place AT on; None: the program holds them. The rest: `steps_reached`.
    """
    if COUNT > COMPARED or codebooks is not None:
        reached = steps_reached(x, STEPS, COUNT, SLOPES, ENDS, SPANS, ZERO, codebooks, AT)
        if in_order(CODES):
            codes = (reached + CODES[0]) & last_of_bits(CODES) if CODES[0] else reached
        else:
            codes = held_at(reached, held(CODES, COUNT, COUNT, 0, tl.int32))
        if reaches_nan(SLOPES, CODES, NAN) and not INTERPRETED:
            return codes  # of NaN, which has no sign on a card, that of the largest value
        return tl.where(isnan(x), NAN, codes)
    codes = tl.full(x.shape, CODES[0], tl.int32)
    for i in tl.static_range(COUNT - 1):
        codes = tl.where(x >= STEPS[i], CODES[i + 1], codes)
    return tl.where(isnan(x), NAN, codes)


@triton.jit
def from_codebook(codes, VALUES: tl.constexpr, COUNT: tl.constexpr, HELD: tl.constexpr):
    """Codes -> fp32 values: VALUES[code]. codes: also what `looked_up` gives, which are values already.

    HELD: the program holds the values in shared memory, unless it has fewer codes.
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
def steps_reached(
    x, STEPS: tl.constexpr, COUNT: tl.constexpr, SLOPES: tl.constexpr, ENDS: tl.constexpr, SPANS: tl.constexpr,
    ZERO: tl.constexpr, codebooks, AT: tl.constexpr,
):  # fmt: skip
    """How many of COUNT - 1 ascending STEPS are at most x: int32. By one look at them, or without lines by halves.

    SLOPES, ENDS, SPANS: of parts of |x|, whose sum is about the number of steps above 0 that x reaches: cut off, it is
    that or one less. ZERO steps lie below 0. The plan finds them (plan/conversions.py). Multiplying and adding takes
    cards half as long as comparing.
    """
    SIZE: tl.constexpr = power_above(COUNT)
    if codebooks is not None and buckets_of(STEPS)[0] > 0:
        return steps_by_words(x, codebooks, AT, buckets_of(STEPS), ZERO)
    # No x reaches the steps that fill a table up.
    steps = held(STEPS, COUNT - 1, COUNT, float("nan"), tl.float32) if codebooks is None else codebooks
    if count_of(SLOPES) > 0:
        size = tl.abs(x) if ZERO else x
        at = like(x, COUNT - 1.5 - ZERO)
        for i in tl.static_range(count_of(SLOPES)):
            at = tl.fma(from_0_to_1(-size, SLOPES[i], ENDS[i]), like(x, -SPANS[i]), at)
        if ZERO:
            at = float_of(bits_of(at) | (bits_of(x) & -0x80000000))  # at is not below 0
        below = whole_below(at) + ZERO
        if ZERO:
            below = tl.maximum(below, 0)
        return below + tl.where(x < step_at(below, steps, AT), 0, 1)
    reached = tl.zeros(x.shape, tl.int32)
    for bit in tl.static_range(7, -1, -1):  # a code has at most 8
        if 1 << bit < SIZE:
            reached += tl.where(x >= step_at(reached + ((1 << bit) - 1), steps, AT), 1 << bit, 0)
    return reached


@triton.jit
def steps_by_words(x, codebooks, AT: tl.constexpr, BUCKETS: tl.constexpr, ZERO: tl.constexpr):
    """`steps_reached`, by a look at the word of x's bucket (`words_of`). On a card NaN reaches all steps."""
    SHIFT: tl.constexpr = BUCKETS[0]
    if INTERPRETED:
        x = tl.where(isnan(x), 0.0, x)
    key = bits_of(tl.maximum(tl.minimum(x, BUCKETS[3]), BUCKETS[2]))
    if ZERO:
        key -= bits_of(tl.maximum(from_0_to_1(x, -1.0, 0.0), BUCKETS[2]))
    word = bits_of(gathered(codebooks, key >> SHIFT, AT - BUCKETS[1]))
    return upper_bytes(word + (key << (24 - SHIFT))).to(tl.int32)


@triton.jit
def upper_bytes(words):
    """The upper eight bits of 32: uint8."""
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
    """x * slope + start, no less than 0 and no more than 1; of NaN, 0."""
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
def whole_below(x):
    """The largest integer that is no more than x, of a few bits: by adding, which takes cards less than converting."""
    if INTERPRETED:
        return tl.floor(x).to(tl.int32)
    else:
        return bits_of(approximately("add.rm.f32 $0, $1, 0f4B400000;", x)) - 0x4B400000  # 1.5 * 2^23


@triton.jit
def step_at(places, steps, AT: tl.constexpr):
    """The step of each place, in memory from place AT on, or in a table that the program holds."""
    if isinstance(steps.type, tl.block_type):
        return held_at(places, steps)
    else:
        return gathered(steps, places, AT)


@triton.jit
def held(VALUES: tl.constexpr, COUNT: tl.constexpr, ROOM: tl.constexpr, FILL: tl.constexpr, DTYPE: tl.constexpr):
    """A table that the program holds: the first COUNT of VALUES, then FILL, up to the power of two from ROOM on."""
    SIZE: tl.constexpr = power_above(ROOM)
    places = tl.arange(0, SIZE)
    table = tl.full((SIZE,), FILL, DTYPE)
    for i in tl.static_range(COUNT):
        table = tl.where(places == i, VALUES[i], table)
    return table


@triton.jit
def held_at(places, table):
    """table[place] for each place, by way of shared memory."""
    return tl.reshape(tl.gather(table, tl.reshape(places, (places.numel,)), 0), places.shape)


@triton.jit
def looked_up(codebooks, codes, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The fp32 values of codes in the codebook that begins at FIRST, in memory, and has COUNT values, a power of two.

    Codes that no format has, as damaged files may hold them, lose their upper bits: they read nothing beside it.
    """
    return gathered(codebooks, codes & (COUNT - 1), FIRST)


@triton.jit
def gathered(table, places, FIRST: tl.constexpr):
    """table[FIRST + place], fp32, for each place of a tile, whose values stay in the threads that have the places.

    As loads, Triton would give neighbours to different warps, and all of the tile would move through shared memory.
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
    """An instruction with a number in it."""
    return f"{before}{number}{after}"
