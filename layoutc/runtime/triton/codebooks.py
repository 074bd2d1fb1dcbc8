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
    """(Bits that number a bucket of |x| leave, the first bucket, buckets, steps at most 0) for `words_of`.

    No bits: steps are too close for buckets of one each, or subnormal.
    """
    bits = [bits_of_size(one) for one in STEPS]
    for shift in range(20, 8, -1):  # buckets as wide as may be, of one step at most
        keys = [(one < 0, bit >> shift) for one, bit in zip(STEPS, bits, strict=True)]
        if len(set(keys)) == len(keys) and min(bits) >= 1 << 23:
            break
    else:
        return 0, 0, 0, 0
    places = [key for _, key in keys]
    return shift, min(places) - 1, max(places) - min(places) + 3, sum(one <= 0 for one in STEPS)


def words_of(steps: Sequence[float]) -> list[int]:
    """A word for each bucket of |x|, of positive x, and then of negative ones if they have steps.

    A word and the low bits of |x| add up to the number of steps that x reaches, above 2^shift; negative x subtract.
    Without buckets of one step each there are none.
    """
    shift, first, count, zero = buckets_of(steps)
    if not shift:
        return []
    one, found = 1 << shift, []
    bits = [(step, bits_of_size(step)) for step in steps]
    above = {bit >> shift: bit & (one - 1) for step, bit in bits if step > 0}
    below = {bit >> shift: bit & (one - 1) for step, bit in bits if step < 0}
    reached = zero
    for key in range(first, first + count):
        found.append(reached * one + (one - above[key] if key in above else 0))
        reached += key in above
    reached = zero
    for key in range(first, first + count) if below else ():
        low = below.get(key, one - 1)  # x >= step while the low bits are no more
        found.append(reached * one + low)
        reached -= key in below
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
    if count_of(SLOPES) > 0 and codebooks is not None and buckets_of(STEPS)[0] > 0:
        return steps_by_words(x, codebooks + AT + COUNT, buckets_of(STEPS), ZERO)
    # No x reaches the steps that fill a table up.
    steps = held(STEPS, COUNT - 1, COUNT, float("nan"), tl.float32) if codebooks is None else codebooks + AT
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
        return below + tl.where(x < step_at(below, steps), 0, 1)
    reached = tl.zeros(x.shape, tl.int32)
    for bit in tl.static_range(7, -1, -1):  # a code has at most 8
        if 1 << bit < SIZE:
            reached += tl.where(x >= step_at(reached + ((1 << bit) - 1), steps), 1 << bit, 0)
    return reached


@triton.jit
def steps_by_words(x, words, BUCKETS: tl.constexpr, ZERO: tl.constexpr):
    """`steps_reached`, by a look at the word of x's bucket (`words_of`)."""
    SHIFT: tl.constexpr = BUCKETS[0]
    FIRST: tl.constexpr = BUCKETS[1]
    COUNT: tl.constexpr = BUCKETS[2]
    bits = bits_of(x)
    size = bits & 0x7FFFFFFF if ZERO else bits
    place = tl.minimum(tl.maximum((size >> SHIFT) - FIRST, 0), COUNT - 1)
    low = size & ((1 << SHIFT) - 1)
    if ZERO:
        is_negative = bits < 0
        place += tl.where(is_negative, COUNT, 0)
        low = tl.where(is_negative, -low, low)
    return (bits_of(gathered(words, place)) + low) >> SHIFT


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
def step_at(places, steps):
    """steps[place] for each place, in memory or in a table that the program holds."""
    if steps.dtype.is_ptr():
        return gathered(steps, places)
    else:
        return held_at(places, steps)


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
    return gathered(codebooks + FIRST, codes & (COUNT - 1))


@triton.jit
def gathered(table, places):
    """table[place], fp32, for each place of a tile, whose values stay in the threads that have the places.

    As loads, Triton would give neighbours to different warps, and all of the tile would move through shared memory.
    """
    if INTERPRETED:
        return tl.load(table + places)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .u64 at; mad.wide.u32 at, $2, 4, $1; ld.global.nc.f32 $0, [at]; }",
            "=f,l,r",
            [tl.broadcast_to(table.to(tl.int64), places.shape), places],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
