"""A format's values and thresholds as code: made once for each format, since most recipes share a few."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache

from layoutc.spec.formats import Format, codebook_order, codebook_thresholds, thresholds


@cache
def values(fmt: Format) -> str:
    """The value of each code."""
    return _table(fmt.value(code) for code in range(2**fmt.bits))


@cache
def magnitudes(fmt: Format) -> str:
    """The finite values without a sign, ascending."""
    return _table(fmt.magnitudes)


@cache
def steps(fmt: Format, rounding: str) -> str:
    """The thresholds at which codes step up."""
    return _table(thresholds(fmt, rounding))


@cache
def codebook_steps(fmt: Format) -> str:
    """The thresholds between a codebook's values."""
    return _table(codebook_thresholds(fmt))


@cache
def codebook_codes(fmt: Format) -> str:
    """The codes of a codebook's numbers, by ascending value."""
    return _lines(", ".join(map(str, codebook_order(fmt))) + ",")


def _table(values: Iterable[float]) -> str:
    """A tuple of fp32 values as code: a formula if one gives exactly these values, else the values themselves."""
    items = list(values)
    if len(items) > 32 and items[1] > 0:
        for formula in _formulas(items):
            if list(map(repr, eval(formula, {"float": float, "range": range}))) == list(map(repr, items)):
                return formula
    special = {"nan": 'float("nan")', "inf": 'float("inf")', "-inf": '-float("inf")'}
    text = ", ".join(special.get(repr(value), repr(value)) for value in items) + ","
    return _lines(text)


def _lines(text: str) -> str:
    """Entries, each with a comma after it, as a tuple."""
    if len(text) <= 80:
        return f"({text[:-1] if text.count(',') > 1 else text})"
    lines = textwrap.wrap(text, 112, break_long_words=False, break_on_hyphens=False)
    return "(\n" + "".join(f"    {line}\n" for line in lines) + ")"


def _formulas(items: list[float]) -> Iterator[str]:
    """Formulas for tables of powers of two: values, and thresholds for rounding down, up and to nearest."""
    first = round(math.log2(items[1]))
    exponents = f"range({first}, {first + len(items) - 1})"
    yield f'({items[0]!r}, *(2.0**e for e in range({first}, {first + len(items) - 2})), float("nan"))'
    yield f"({items[0]!r}, *(2.0**e for e in {exponents}))"
    yield f"({items[0]!r}, *(2.0**e * (1 + 2**-23) for e in {exponents}))"
    first = math.floor(math.log2(items[1]))
    exponents = f"range({first}, {first + len(items) - 1})"
    for odd in (0, 1):
        yield f"({items[0]!r}, *(2.0**e * (1.5 + (e % 2 == {odd}) * 2**-23) for e in {exponents}))"
