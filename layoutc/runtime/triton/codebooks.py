"""Codebooks in generated kernels, as Triton functions: the counterpart of numerics.py, for tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.codes import bits_of, isnan, like, power_above

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
def last_of_bits(codes):
    """The largest code that has the bits of the largest of these."""
    return (1 << max(codes).bit_length()) - 1


@triton.jit
def to_codebook(
    x, STEPS: tl.constexpr, CODES: tl.constexpr, COUNT: tl.constexpr, NAN: tl.constexpr,
    SLOPES: tl.constexpr = NO_LINES, STARTS: tl.constexpr = NO_LINES, ZERO: tl.constexpr = 0, AT: tl.constexpr = 0,
    codebooks=None,
):  # fmt: skip
    """fp32 -> codes of the nearest of COUNT values, by ascending value in CODES; from STEPS[i] on, value i + 1.

    codebooks: memory that has the steps from place AT on; None: the program holds them. The rest: `steps_reached`.
    """
    if COUNT > COMPARED or codebooks is not None:
        reached = steps_reached(x, STEPS, COUNT, SLOPES, STARTS, ZERO, codebooks, AT)
        if in_order(CODES):
            codes = (reached + CODES[0]) & last_of_bits(CODES) if CODES[0] else reached
        else:
            codes = held_at(reached, held(CODES, COUNT, COUNT, 0, tl.int32))
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
    x, STEPS: tl.constexpr, COUNT: tl.constexpr, SLOPES: tl.constexpr, STARTS: tl.constexpr, ZERO: tl.constexpr,
    codebooks, AT: tl.constexpr,
):  # fmt: skip
    """How many of COUNT - 1 ascending STEPS are at most x: int32. By one look at them, or without lines by halves.

    SLOPES, STARTS: of lines whose least, over |x|, is about the number of steps above 0 that x reaches: cut off, it is
    that or one less. ZERO steps lie below 0. The plan finds them (plan/conversions.py).
    """
    SIZE: tl.constexpr = power_above(COUNT)
    # No x reaches the steps that fill a table up.
    steps = held(STEPS, COUNT - 1, COUNT, float("nan"), tl.float32) if codebooks is None else codebooks + AT
    if count_of(SLOPES) > 0:
        at = like(x, COUNT - 1.5 - ZERO)
        for i in tl.static_range(count_of(SLOPES)):
            at = tl.minimum(at, tl.fma(tl.abs(x), like(x, SLOPES[i]), like(x, STARTS[i])))
        if INTERPRETED:
            at = tl.where(isnan(x), 0.0, at)  # as cards' minimum, which leaves NaN out
        below = (at.to(tl.int32) ^ (bits_of(x) >> 31)) + ZERO  # the sign turns n into -1 - n
        below = tl.maximum(below, 0)
        return below + (x >= step_at(below, steps)).to(tl.int32)
    reached = tl.zeros(x.shape, tl.int32)
    for bit in tl.static_range(7, -1, -1):  # a code has at most 8
        if 1 << bit < SIZE:
            reached += tl.where(x >= step_at(reached + ((1 << bit) - 1), steps), 1 << bit, 0)
    return reached


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
            "ld.global.nc.f32 $0, [$1];",
            "=f,l",
            [(table + places).to(tl.int64)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
