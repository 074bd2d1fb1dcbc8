"""Codebooks in generated kernels, as Triton functions: the counterpart of numerics.py, for tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.codes import isnan, like, power_above

COMPARED = tl.constexpr(16)  # codebooks of so many values are compared one by one; longer ones are searched by halves


@triton.constexpr_function
def in_order(codes):
    """Whether codes count up from the first, and go on at 0 after the last of their bits, as two's complement does."""
    size = 1 << max(codes).bit_length()
    return all(code == (codes[0] + place) % size for place, code in enumerate(codes))


@triton.constexpr_function
def line_of(decade, decades, first):
    """The line of a decade of a dynamic map: slope, and value at 0, less the most that steps lie beside it."""
    steps = first * 2**decade
    return steps * 10.0 ** (decades - 1 - decade) / 0.9, steps * 8 / 9 - (first - 1) - 0.21


@triton.constexpr_function
def last_of_bits(codes):
    """The largest code that has the bits of the largest of these."""
    return (1 << max(codes).bit_length()) - 1


@triton.jit
def to_codebook(
    x, STEPS: tl.constexpr, CODES: tl.constexpr, COUNT: tl.constexpr, NAN: tl.constexpr, DECADES: tl.constexpr = 0,
    FIRST: tl.constexpr = 1, ZERO: tl.constexpr = 0,
):  # fmt: skip
    """fp32 -> codes of the nearest of COUNT values, by ascending value in CODES; from STEPS[i] on, value i + 1.

    DECADES, FIRST, ZERO: see `steps_reached`."""
    if COUNT > COMPARED:
        reached = steps_reached(x, STEPS, COUNT, DECADES, FIRST, ZERO)
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
    if HELD and codes.numel > COUNT:
        return held_at(codes, held(VALUES, COUNT, COUNT, 0, tl.float32))
    values = tl.full(codes.shape, VALUES[0], tl.float32)
    for i in tl.static_range(1, COUNT):
        values = tl.where(codes == i, VALUES[i], values)
    return values


@triton.jit
def steps_reached(
    x, STEPS: tl.constexpr, COUNT: tl.constexpr, DECADES: tl.constexpr, FIRST: tl.constexpr, ZERO: tl.constexpr
):
    """How many of COUNT - 1 ascending STEPS are at most x: int32. Of a dynamic map by one look at them, else by halves.

    DECADES of a map that ends at 1; 0: of no map. They have FIRST steps, twice as many, and so on; ZERO lie below 0. So
    over |x| each decade is a line, whose least is the number of steps above 0, or up to one more.
    """
    SIZE: tl.constexpr = power_above(COUNT)
    steps = held(STEPS, COUNT - 1, COUNT, float("nan"), tl.float32)  # no x reaches those that fill the table up
    if DECADES > 0:
        at = like(x, COUNT)
        for i in tl.static_range(DECADES):
            at = tl.minimum(at, tl.abs(x) * line_of(i, DECADES, FIRST)[0] + line_of(i, DECADES, FIRST)[1])
        below = tl.where(x < 0, ZERO - 1 - at.to(tl.int32), ZERO + at.to(tl.int32))
        below = tl.minimum(tl.maximum(below, 0), COUNT - 2)
        return below + (x >= held_at(below, steps)).to(tl.int32)
    reached = tl.zeros(x.shape, tl.int32)
    for bit in tl.static_range(7, -1, -1):  # a code has at most 8
        if 1 << bit < SIZE:
            reached += tl.where(x >= held_at(reached + ((1 << bit) - 1), steps), 1 << bit, 0)
    return reached


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
    return tl.load(codebooks + (FIRST + (codes & (COUNT - 1))))
