"""Number formats by definition: the value of each code of an element or scale format.

Pure Python. A format is data (formats.yaml, or `formats:` in a spec), never a special case in code.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from layoutc.spec import shipped

F32_MAX = (2 - 2**-23) * 2.0**127


def f32(value: float) -> float:
    """`value` rounded to the nearest fp32, ties to even."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@dataclass(frozen=True)
class Format:
    """A number format by its bits: floating point (sign | exponent | mantissa, most significant first), or integer.

    `inf` and `nan` list codes without the sign bit. `torch` names the torch dtype that holds one code per byte and
    rounds to nearest even, if there is one. `integer` > 0: two's complement of that many bits in steps of 2**-fraction.
    `symmetric` leaves the lowest code unused, since it has no negative. With an `offset`, codes are steps plus it.

    `values`: a codebook; code c means values[c], codes beyond its end mean 0. Ties between two values go to the lower
    one (`ties` is down), or to the one whose code is even.
    """

    name: str = field(compare=False)  # formats are equal if their bits have the same values
    sign: int = 1
    exponent: int = 0
    mantissa: int = 0
    bias: int = 0
    integer: int = 0
    fraction: int = 0
    symmetric: bool = False
    offset: int | None = None
    values: tuple[float, ...] = ()
    ties: str = "down"
    subnormals: bool = True
    inf: tuple[int, ...] = ()
    nan: tuple[int, ...] = ()
    torch: str | None = field(default=None, compare=False)

    @property
    def bits(self) -> int:
        """Bits per code."""
        if self.values:
            return max(1, (len(self.values) - 1).bit_length())
        return self.integer or self.sign + self.exponent + self.mantissa

    @property
    def is_f32(self) -> bool:
        """True for IEEE binary32, which is stored unchanged."""
        return self.bits == 32

    @property
    def is_wide(self) -> bool:
        """True for 16- and 32-bit formats, stored as a torch dtype; the highest exponent is infinity and NaN."""
        return self.bits > 8

    @property
    def has_zero(self) -> bool:
        """True if a code means 0."""
        return self.is_wide or self.magnitudes[0] == 0

    @property
    def is_exponent(self) -> bool:
        """True if codes are only exponents: powers of two, without sign, zero or infinities."""
        return not (self.integer or self.sign or self.mantissa or self.subnormals or self.inf)

    @cached_property
    def magnitudes(self) -> tuple[float, ...]:
        """The finite magnitudes, ascending: code c has magnitudes[c]. Only for up to 8 bits.

        Codes of inf and NaN must be the highest, so that the others form a prefix. For an integer, the values from 0.
        """
        if self.values:
            return tuple(sorted({0.0, *(value for value in self.values if value > 0)}))
        if self.integer:
            return tuple(math.ldexp(steps, -self.fraction) for steps in range(self.highest + 1))
        special = set(self.inf) | set(self.nan)
        codes = range(2 ** (self.exponent + self.mantissa))
        return tuple(self._magnitude(code) for code in codes if code not in special)

    @property
    def lowest(self) -> int:
        """For an integer, the smallest used number of steps."""
        if self.offset is not None:
            return -self.highest if self.symmetric else -self.offset
        return int(self.symmetric) - (1 << (self.integer - 1))

    @property
    def highest(self) -> int:
        """For an integer, the largest number of steps."""
        return (1 << (self.integer - 1)) - 1 if self.offset is None else (1 << self.integer) - 1 - self.offset

    @property
    def nan_is_minus_zero(self) -> bool:
        """True if the code of only the sign bit is NaN, so that there is one zero."""
        return not self.values and self.nan == (1 << (self.exponent + self.mantissa),)

    @property
    def max(self) -> float:
        """The largest finite value."""
        if self.is_wide:
            return math.ldexp(2 - 2.0**-self.mantissa, (1 << self.exponent) - 2 - self.bias)
        return self.magnitudes[-1]

    @property
    def smallest(self) -> float:
        """The smallest value above 0."""
        if self.is_wide:
            return math.ldexp(1, 1 - self.bias - self.mantissa)
        return next(value for value in self.magnitudes if value > 0)

    @property
    def last(self) -> int:
        """The code of the largest finite value, without a sign bit."""
        if self.is_wide:
            return (((1 << self.exponent) - 1) << self.mantissa) - 1
        if self.values:
            return self.values.index(self.max)
        return self.highest + (self.offset or 0) if self.integer else len(self.magnitudes) - 1

    @property
    def least_code(self) -> int:
        """The code of 0, or of the smallest value if all are above 0. A codebook without 0 rounds it."""
        if self.values:
            return codebook_order(self)[sum(step <= 0 for step in codebook_thresholds(self))]
        return 0 if self.offset is None else max(self.offset, 0)

    @property
    def nan_code(self) -> int:
        """The first code of NaN, the quiet one for wide formats; without a NaN, the code of the largest magnitude."""
        if self.is_wide:
            return self.last + 1 + (1 << (self.mantissa - 1))
        return self.nan[0] if self.nan else self.last

    def value(self, code: int) -> float:
        """The value of a code, including its sign bit."""
        if self.values:
            return self.values[code] if code < len(self.values) else 0.0
        if self.offset is not None:
            return math.ldexp(code - self.offset, -self.fraction)
        if self.integer:
            return math.ldexp(code - (code >> (self.integer - 1) << self.integer), -self.fraction)
        magnitude_bits = self.exponent + self.mantissa
        negative, magnitude = divmod(code, 2**magnitude_bits)
        sign = -1.0 if negative else 1.0
        if negative and not magnitude and self.nan_is_minus_zero:
            return math.nan
        infinite = magnitude == self.last + 1 if self.is_wide else magnitude in self.inf
        if magnitude in self.nan or (self.is_wide and magnitude > self.last + 1):
            return math.nan
        return sign * math.inf if infinite else sign * self._magnitude(magnitude)

    def _magnitude(self, code: int) -> float:
        exponent, mantissa = divmod(code, 2**self.mantissa)
        if exponent == 0 and self.subnormals:
            return math.ldexp(mantissa, 1 - self.bias - self.mantissa)
        return math.ldexp(2**self.mantissa + mantissa, exponent - self.bias - self.mantissa)


def thresholds(fmt: Format, rounding: str) -> tuple[float, ...]:
    """The magnitudes at which codes increase: code = number of thresholds <= |x|, for fp32 x. Saturating.

    rounding: nearest (ties to even), up (away from zero) or down (toward zero). Each threshold is an fp32 value, so
    comparisons with fp32 inputs are exact. Raises ValueError if a midpoint is not an fp32 value.
    """
    values = fmt.magnitudes
    steps = []
    for code, (low, high) in enumerate(itertools.pairwise(values)):
        if rounding == "down":
            steps.append(high)
        elif rounding == "up":
            steps.append(_next_f32(low))
        else:
            middle = (low + high) / 2
            if f32(middle) != middle:
                raise ValueError(f"{fmt.name}: the midpoint of codes {code} and {code + 1} is not an fp32 value")
            steps.append(middle if code % 2 else _next_f32(middle))  # ties go to the even code
    return tuple(steps)


def codebook_order(fmt: Format) -> tuple[int, ...]:
    """The codes of a codebook's numbers, by ascending value. Of two codes of 0, only the first."""
    codes = (code for code, value in enumerate(fmt.values) if not math.isnan(value) and fmt.values.index(value) == code)
    return tuple(sorted(codes, key=lambda code: fmt.values[code]))


def codebook_thresholds(fmt: Format) -> tuple[float, ...]:
    """The ascending numbers from which on a codebook's next value is nearest, one per pair of neighbors.

    Midpoints are rounded to fp32; x equal to one is a tie.
    """
    steps = []
    for low, high in itertools.pairwise(codebook_order(fmt)):
        middle = f32((fmt.values[low] + fmt.values[high]) / 2)
        steps.append(middle if fmt.ties == "even" and high % 2 == 0 else _next_f32(middle))
    return tuple(steps)


def _next_f32(value: float) -> float:
    """The next larger fp32 value."""
    if value == 0:
        return 2.0**-149
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return float(struct.unpack("<f", struct.pack("<I", bits + 1 if value > 0 else bits - 1))[0])


@cache
def builtin() -> dict[str, Format]:
    """The formats of formats.yaml, by name."""
    return {name: make(name, entry) for name, entry in shipped.load("formats.yaml").items()}


@cache
def aliases() -> dict[str, dict[str, str]]:
    """Other projects' names for formats, rules, words and keys: kind -> {their name: ours}. Read on first use."""
    tables: dict[str, dict[str, str]] = shipped.load("aliases.yaml")
    return {kind: {str(word): str(ours) for word, ours in words.items()} for kind, words in tables.items()}


def make(name: str, entry: Mapping[str, Any]) -> Format:
    """Makes a format from its entry in formats.yaml or in a spec's `formats:`."""
    lists = {key: tuple(entry.get(key) or ()) for key in ("inf", "nan")}
    if stated := entry.get("values"):
        values = tuple(f32(float(value)) for value in stated)
        signed = int(any(value < 0 for value in values))
        nan = tuple(code for code, value in enumerate(values) if math.isnan(value))
        lists |= {"values": values, "nan": nan}
        entry = {**entry, "sign": signed}
    rest = {key: value for key, value in entry.items() if value is not None and key != "values"}
    return Format(name=name, **{**rest, **lists})


BUILTIN = builtin()
