"""The values of a number format's codes, by definition, in exact fractions, and rounding as a search over all codes.

Independent of layoutc.spec.formats' arithmetic: it reads fields alone. A new kind needs a function in `meaning`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from itertools import pairwise
from math import inf, isinf, isnan, lcm, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layoutc.spec.formats import Format

Array = NDArray[Any]
Value = Fraction | float  # a float is NaN or an infinity
Pairs = list[tuple[Fraction, int]]
F32 = np.float32


def meaning(fmt: Format, code: int) -> Value:
    """The value of a code."""
    if fmt.values:
        return _listed(fmt, code)
    return _integer(fmt, code) if fmt.integer else _floating(fmt, code)


def _listed(fmt: Format, code: int) -> Value:
    """The entry in the list of values; 0 beyond its end."""
    value = fmt.values[code] if code < len(fmt.values) else 0.0
    return nan if isnan(value) else Fraction(value)


def _integer(fmt: Format, code: int) -> Value:
    """Two's complement, in steps of 2^-fraction."""
    steps = code - 2**fmt.bits if code >= 2 ** (fmt.bits - 1) else code
    if fmt.offset is not None:
        steps = code - fmt.offset
    return Fraction(steps, 2**fmt.fraction)


def _floating(fmt: Format, code: int) -> Value:
    """Sign, exponent, mantissa, from the most significant bit."""
    width = fmt.exponent + fmt.mantissa
    sign = -1 if code >> width else 1
    body = code & (2**width - 1)
    if fmt.bits > 8 and body >> fmt.mantissa == 2**fmt.exponent - 1:  # as in IEEE 754
        return nan if body & (2**fmt.mantissa - 1) else sign * inf
    if body in fmt.nan or (code >> width and not body and code in fmt.nan):
        return nan
    if body in fmt.inf:
        return sign * inf
    exponent, mantissa = body >> fmt.mantissa, Fraction(body & (2**fmt.mantissa - 1), 2**fmt.mantissa)
    if exponent == 0 and fmt.subnormals:
        return sign * mantissa * power(1 - fmt.bias)
    return sign * (1 + mantissa) * power(exponent - fmt.bias)


def power(exponent: int) -> Fraction:
    """2^exponent, exactly."""
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


@dataclass(frozen=True)
class Codes:
    """All codes of a format with up to 16 bits."""

    format: Format

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """The value of each code."""
        return tuple(meaning(self.format, code) for code in range(2**self.format.bits))

    @cached_property
    def finite(self) -> dict[int, Fraction]:
        """Code -> value, for codes that rounding can give."""
        found = {c: v for c, v in enumerate(self.values) if isinstance(v, Fraction)}
        if self.format.values:
            return {c: v for c, v in found.items() if c < len(self.format.values) and v not in self.values[:c]}
        if not (self.format.integer and self.format.symmetric):
            return found
        return {code: value for code, value in found.items() if -value in found.values()}

    @property
    def has_sign_bit(self) -> bool:
        """True if a negative number's code is its magnitude's code with a sign bit."""
        return not self.format.integer and not self.format.values and bool(self.format.sign)

    @property
    def nan_code(self) -> int:
        """The format's code for NaN; without one, the code of its largest number."""
        if self.format.bits > 8:  # the quiet one
            return ((1 << (self.format.exponent + 1)) - 1) << (self.format.mantissa - 1)
        if self.format.nan:
            return self.format.nan[0]
        return max(self.finite, key=lambda code: self.finite[code])

    @property
    def dtype(self) -> Any:
        """The numpy dtype of codes."""
        return np.uint8 if self.format.bits <= 8 else np.uint16

    @cached_property
    def largest(self) -> Fraction:
        """The largest finite value."""
        return max(self.finite.values())

    @cached_property
    def candidates(self) -> tuple[Pairs, Pairs]:
        """Ascending (value, code) pairs that numbers of a sign can round to; magnitudes if there is a sign bit."""
        top = 2 ** (self.format.bits - 1)
        if not self.has_sign_bit:
            every = sorted((v, c) for c, v in self.finite.items())
            return every, every
        positive, negative = ([(abs(v), c) for c, v in self.finite.items() if (c >= top) == sign] for sign in (0, 1))
        if top not in self.finite and top in self.format.nan:  # both signs share one zero
            negative.append((Fraction(0), 0))
        return sorted(positive), sorted(negative)

    @cached_property
    def _unit(self) -> int:
        """All values are multiples of 1 / _unit."""
        return lcm(*(value.denominator for value in self.finite.values()))

    @cached_property
    def _in_units(self) -> list[list[tuple[int, int]]]:
        """The candidates, with each value as a multiple of 1 / _unit."""
        return [[(int(value * self._unit), code) for value, code in found] for found in self.candidates]

    def search(self, x: float, rounding: str) -> int:
        """fp32 -> code, by definition: the nearest of all codes, ties to even, saturating."""
        if isnan(x):
            return self.nan_code
        negative = str(x).startswith("-")
        pairs = self.candidates[negative]
        if self.format.values:
            return self._nearest_listed(x)
        size = x if self.format.integer else abs(x)
        if isinf(size):
            return pairs[-1][1] if size > 0 else pairs[0][1]
        # Integers in a common unit, since fractions are ten times slower.
        exact = Fraction(size)
        whole, by = exact.numerator * self._unit, exact.denominator
        units = [(steps * by, code) for steps, code in self._near(whole // by, self._in_units[negative])]
        if rounding == "up":
            return next((code for value, code in units if value >= whole), pairs[-1][1])
        if rounding == "down":
            return next((code for value, code in reversed(units) if value <= whole), pairs[0][1])
        return min(units, key=lambda pair: (abs(pair[0] - whole), self.is_odd(pair[1])))[1]

    def _nearest_listed(self, x: float) -> int:
        """The listed value on x's side of the fp32 midpoint between neighbors; ties go down, or to the even code."""
        pairs = self.candidates[0]
        for middle, ((_, code), (_, above)) in zip(self._middles, pairwise(pairs), strict=True):
            if x < middle or (x == middle and not (self.format.ties == "even" and above % 2 == 0)):
                return code
        return pairs[-1][1]

    @cached_property
    def _middles(self) -> list[float]:
        """Midpoints between neighbors in the list, in fp32."""
        return [float(rounded((low + high) / 2)) for (low, _), (high, _) in pairwise(self.candidates[0])]

    def is_odd(self, code: Any) -> Any:
        """Whether ties go to a code's neighbor: the code, or the number of steps it stands for, is odd."""
        return (code - (self.format.offset or 0)) % 2 == 1

    def _near(self, steps: int, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """All codes, or those near `steps` if there are thousands."""
        if len(pairs) < 1000:
            return pairs
        at = bisect_left(pairs, (steps, 0))
        return pairs[max(0, at - 3) : at + 3] or pairs[-3:]

    @cached_property
    def neighbours(self) -> tuple[Pairs, Pairs]:
        """The (magnitude, code) pairs of each sign, ascending from zero, that stochastic rounding chooses from."""
        if self.has_sign_bit:
            return self.candidates
        up = sorted((v, c) for c, v in self.finite.items() if v >= 0)
        return up, sorted((-v, c) for c, v in self.finite.items() if v <= 0)

    def search_by_chance(self, x: float, bits: int) -> int:
        """fp32 and 32 random bits -> code, by definition, in exact fractions."""
        if isnan(x):
            return self.nan_code
        pairs = self.neighbours[str(x).startswith("-")]
        if isinf(x) or Fraction(abs(x)) >= pairs[-1][0]:
            return pairs[-1][1]
        size = Fraction(abs(x))
        (low, kept), (high, away) = next(pair for pair in pairwise(pairs) if pair[0][0] <= size < pair[1][0])
        share = int(2**32 * (size - low) / (high - low))  # truncates, so rounds down
        return away if bits + share >= 2**32 else kept

    def encode_by_chance(self, x: Array, bits: Array) -> Array:
        """`search_by_chance`, vectorized; must give equal codes. Exact in fp64."""
        x = np.asarray(x, F32)
        codes = np.empty(x.shape, np.uint8)
        size = np.nan_to_num(np.abs(x).astype(np.float64))
        for negative in (False, True):
            pairs = self.neighbours[negative]
            values = np.array([float(value) for value, _ in pairs])
            of = np.array([code for _, code in pairs], np.uint8)
            last = len(values) - 1
            low = np.searchsorted(values, size, side="right") - 1
            high = np.minimum(low + 1, last)
            step = np.where(low < last, values[high] - values[low], 1.0)
            share = np.floor(np.where(low < last, (size - values[low]) / step, 0.0) * 2.0**32)
            chosen = of[np.where(share + bits.astype(np.float64) >= 2.0**32, high, low)]
            codes = np.where(np.signbit(x) == negative, chosen, codes)
        return np.where(np.isnan(x), np.uint8(self.nan_code), codes)

    def encode(self, x: Array, rounding: str) -> Array:
        """`search`, vectorized; must give equal codes. Exact in fp64."""
        x = np.asarray(x, F32)
        codes = np.empty(x.shape, self.dtype)
        negative = np.signbit(x)
        if self.format.values:
            pairs = self.candidates[0]
            middles = self._bounds
            even = np.array([self.format.ties == "even" and code % 2 == 0 for _, code in pairs[1:]])
            with np.errstate(invalid="ignore"):
                above = (x[..., None] > middles) | ((x[..., None] == middles) & even)
            codes = np.array([code for _, code in pairs], np.uint8)[above.sum(-1)]
            return np.where(np.isnan(x), np.uint8(self.nan_code), codes)
        size = (x if self.format.integer else np.abs(x)).astype(np.float64)
        for sign in (False, True):
            here = negative == sign
            codes[here] = self._encode(size[here], sign, rounding)
        codes[np.isnan(x)] = self.nan_code
        return codes

    @cached_property
    def _bounds(self) -> Array:
        """Midpoints of listed values, computed separately from `_middles`, so that an error in either shows."""
        return np.array([rounded((low + high) / 2) for (low, _), (high, _) in pairwise(self.candidates[0])], F32)

    def _encode(self, size: Array, negative: bool, rounding: str) -> Array:
        values, codes = self._sorted[negative]
        low = np.clip(np.searchsorted(values, size, side="right") - 1, 0, len(values) - 1)
        high = np.minimum(low + 1, len(values) - 1)
        past = size > values[low]
        if rounding == "nearest":
            with np.errstate(invalid="ignore"):
                twice, middle = 2 * size, values[low] + values[high]
            past &= (twice > middle) | ((twice == middle) & self.is_odd(codes[low].astype(int)))
        return codes[np.where(past, high, low) if rounding != "down" else low]

    @cached_property
    def _sorted(self) -> list[tuple[Array, Array]]:
        """The candidates' values and codes as arrays."""
        return [
            (np.array([float(value) for value, _ in pairs]), np.array([code for _, code in pairs], self.dtype))
            for pairs in self.candidates
        ]

    def decode(self, codes: Array) -> Array:
        """Codes -> fp32, which holds every value exactly."""
        return self._table[codes]

    @cached_property
    def _table(self) -> Array:
        table = np.array([F32(float(value)) for value in self.values], F32)
        negative_zeros = [c for c, v in enumerate(self.values) if v == 0 and c and self.has_sign_bit]
        table[negative_zeros] = F32(-0.0)
        return table


@cache
def codes_of(fmt: Format) -> Codes:
    """The codes of a format."""
    return Codes(fmt)


def rounded(value: Fraction) -> np.float32:
    """An exact value, rounded once to fp32, to nearest even."""
    near = F32(float(value))
    around = [np.nextafter(near, F32(-inf)), near, np.nextafter(near, F32(inf))]
    finite = [one for one in around if np.isfinite(one)]
    return F32(min(finite, key=lambda one: (abs(Fraction(float(one)) - value), int(one.view(np.uint32)) & 1)))


def pack(codes: Array, bits: int, low_first: bool) -> Array:
    """Packs codes into bytes along the last dim, as one bit stream from each byte's low or high end."""
    if bits >= 8:
        return codes
    order: Any = "little" if low_first else "big"
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    stream = stream if low_first else stream[..., ::-1]
    return np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder=order)


def unpack(packed: Array, bits: int, low_first: bool) -> Array:
    """The inverse of `pack`."""
    if bits >= 8:
        return packed
    order: Any = "little" if low_first else "big"
    stream = np.unpackbits(packed, axis=-1, bitorder=order).reshape(*packed.shape[:-1], -1, bits)
    stream = stream if low_first else stream[..., ::-1]
    return np.packbits(stream, axis=-1, bitorder="little")[..., 0]
