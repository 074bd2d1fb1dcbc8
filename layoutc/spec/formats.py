"""Number formats by definition: the value of every code of an element or scale format.

Pure Python; a format is data (formats.yaml, or `formats:` in a spec), never a case in code.
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

    `inf` and `nan` list codes without their sign bit. `torch` names the torch dtype that holds one code in a byte and
    rounds to nearest even, if there is one. `integer` > 0: two's complement of that many bits, in steps of
    2**-fraction; `symmetric` leaves the lowest code unused, since it has no opposite.
    """

    name: str = field(compare=False)  # formats are equal if their bits have the same values
    sign: int = 1
    exponent: int = 0
    mantissa: int = 0
    bias: int = 0
    integer: int = 0
    fraction: int = 0
    symmetric: bool = False
    subnormals: bool = True
    inf: tuple[int, ...] = ()
    nan: tuple[int, ...] = ()
    torch: str | None = field(default=None, compare=False)

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return self.integer or self.sign + self.exponent + self.mantissa

    @property
    def is_f32(self) -> bool:
        """True for IEEE binary32, which is stored as it is."""
        return self.bits == 32

    @property
    def is_exponent(self) -> bool:
        """True if codes are only exponents: powers of two, without a sign, a zero or infinities."""
        return not (self.integer or self.sign or self.mantissa or self.subnormals or self.inf)

    @cached_property
    def magnitudes(self) -> tuple[float, ...]:
        """The finite values without sign, ascending: code c has the magnitude magnitudes[c]. Up to 8 bits only.

        Codes of inf and NaN must be the highest, so that the others are a prefix. For an integer, its values from 0 up.
        """
        if self.integer:
            return tuple(math.ldexp(code, -self.fraction) for code in range(2 ** (self.integer - 1)))
        special = set(self.inf) | set(self.nan)
        codes = range(2 ** (self.exponent + self.mantissa))
        return tuple(self._magnitude(code) for code in codes if code not in special)

    @property
    def lowest(self) -> int:
        """For an integer, the smallest number of steps that is used."""
        return int(self.symmetric) - (1 << (self.integer - 1))

    @property
    def max(self) -> float:
        """Largest finite value."""
        return F32_MAX if self.is_f32 else self.magnitudes[-1]

    def value(self, code: int) -> float:
        """The value of a code, sign bit included."""
        if self.integer:
            return math.ldexp(code - (code >> (self.integer - 1) << self.integer), -self.fraction)
        magnitude_bits = self.exponent + self.mantissa
        negative, magnitude = divmod(code, 2**magnitude_bits)
        sign = -1.0 if negative else 1.0
        if magnitude in self.nan:
            return math.nan
        return sign * math.inf if magnitude in self.inf else sign * self._magnitude(magnitude)

    def _magnitude(self, code: int) -> float:
        exponent, mantissa = divmod(code, 2**self.mantissa)
        if exponent == 0 and self.subnormals:
            return math.ldexp(mantissa, 1 - self.bias - self.mantissa)
        return math.ldexp(2**self.mantissa + mantissa, exponent - self.bias - self.mantissa)


def thresholds(fmt: Format, rounding: str) -> tuple[float, ...]:
    """The magnitudes at which codes step up: code = number of thresholds <= |x|, for fp32 x. Saturating.

    rounding: nearest (ties to even), up (away from zero) or down (towards zero). Each threshold is an fp32 value, so
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
            steps.append(middle if code % 2 else _next_f32(middle))  # a tie goes to the even code
    return tuple(steps)


def _next_f32(value: float) -> float:
    """The fp32 value just above a non-negative fp32 value."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return float(struct.unpack("<f", struct.pack("<I", bits + 1))[0])


@cache
def builtin() -> dict[str, Format]:
    """The formats of formats.yaml, by name."""
    return {name: make(name, entry) for name, entry in shipped.load("formats.yaml").items()}


@cache
def aliases() -> dict[str, dict[str, str]]:
    """Other projects' names for formats, rules, words and keys: kind -> {their name: ours}. Read at first use."""
    tables: dict[str, dict[str, str]] = shipped.load("aliases.yaml")
    return {kind: {str(word): str(ours) for word, ours in words.items()} for kind, words in tables.items()}


def make(name: str, entry: Mapping[str, Any]) -> Format:
    """A format from its entry in formats.yaml or in a spec's `formats:`."""
    lists = {key: tuple(entry.get(key) or ()) for key in ("inf", "nan")}
    rest = {key: value for key, value in entry.items() if value is not None}
    return Format(name=name, **{**rest, **lists})


BUILTIN = builtin()
