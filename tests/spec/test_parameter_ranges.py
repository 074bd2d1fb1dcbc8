"""The numbers that a spec can state: the last that is taken at each end of a range, and the first that is not."""

from __future__ import annotations

import math

import pytest

from layoutc.spec.checks.read import read_spec
from layoutc.spec.formats import F32_MAX

LARGEST = 126  # a power of two with it, and with its negative, is a normal number of fp32
TINIEST = 2.0**-126  # the smallest normal number of fp32


def codes(parameter: str, value: object) -> set[str]:
    """What is found in a spec with this parameter of amax-over-max."""
    text = (
        "layoutc: 1\nname: one\nsummary: One scale for the whole weight\nelement: {format: e4m3}\n"
        f"scale: {{format: f32, rule: amax-over-max, {parameter}: {value}}}\n"
        "orientations:\n  rowwise: {block: {m: all, k: all}, data: {layout: m k}, scale: {layout: scalar}}\n"
    )
    return {item.code for item in read_spec(text, "one.yaml")[1] if parameter in item.message}


TAKEN = {"epsilon": [0.0, TINIEST, 1.0, F32_MAX], "margin": [0, 1, -1, LARGEST, -LARGEST]}
REFUSED = {
    "epsilon": [-1.0, math.nextafter(TINIEST, 0), math.nextafter(F32_MAX, math.inf)],
    "margin": [LARGEST + 1, -LARGEST - 1, 10**9, -(10**9)],
}


@pytest.mark.parametrize("parameter", TAKEN)
def test_ends_of_a_range(parameter: str) -> None:
    written = {value: f"{value:.20e}" if parameter == "epsilon" else str(value) for value in TAKEN[parameter]}
    assert {value for value, text in written.items() if codes(parameter, text)} == set()
    written = {value: f"{value:.20e}" if parameter == "epsilon" else str(value) for value in REFUSED[parameter]}
    assert {value for value, text in written.items() if codes(parameter, text) != {"LC322"}} == set()


@pytest.mark.parametrize("exponent", [-126, -125, -121, -120, 0, 125, 126, 127])
def test_magnitudes_of_a_codebook(exponent: int) -> None:
    """From 2^-120, below which fp32 has no room to round between two values, to 2^126."""
    largest = f"{2.0**exponent:.17e}"
    text = (
        "layoutc: 1\nname: book\nsummary: a codebook of three values\nshape: {k: 32}\n"
        f"formats:\n  c2: {{values: [-{largest}, 0, {largest}]}}\n"
        "element: {format: c2}\nscale: {format: f32, rule: scale-first}\n"
        "orientations:\n  rowwise: {block: {m: 1, k: 32}, data: {layout: m k}, scale: {layout: m k/32}}\n"
    )
    found = [(item.code, item.message) for item in read_spec(text, "book.yaml")[1]]
    inside = -120 <= exponent <= 126
    assert found == [] if inside else [code for code, message in found if "fp32 can't hold" in message] == ["LC305"]
