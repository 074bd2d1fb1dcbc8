"""Constants of scale rules: fp32 numbers that follow from formats and parameters. rules.yaml describes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from layoutc.spec.formats import Format, f32

Parameters = Mapping[str, float | int | bool | str]
Value = tuple[float, str]


def constant(name: str, element: Format, scale: Format, parameters: Parameters) -> Value:
    """A constant's fp32 value and its description in words. Raises OverflowError if it is beyond fp32."""
    value, doc = CONSTANTS[name](element, scale, parameters)
    return f32(value), doc


def _lowest(element: Format) -> float:
    if element.values:
        return min(value for value in element.values if not math.isnan(value))
    return math.ldexp(element.lowest, -element.fraction) if element.integer else -element.max


def _power(element: Format) -> float:
    return float(2.0 ** math.floor(math.log2(element.max)))


def _scale_min(element: Format, scale: Format, parameters: Parameters) -> Value:
    least = next(magnitude for magnitude in scale.magnitudes if magnitude)
    return least, f"2^{int(math.log2(least))}" if math.frexp(least)[0] == 0.5 else ""


def _bounded(element: Format, parameters: Parameters) -> float:
    return float(parameters["bound"]) * element.max


# By name in rules. Computed only for rules that use them, since some formats lack some constants.
CONSTANTS: dict[str, Callable[[Format, Format, Parameters], Value]] = {
    "element_min": lambda e, s, p: (_lowest(e), ""),
    "element_step": lambda e, s, p: (e.max / e.magnitudes[-2], f"{e.max:g} / {e.magnitudes[-2]:g}"),
    "bounded_range": lambda e, s, p: (_bounded(e, p), f"{p['bound']:g} * {e.max:g}"),
    "inverse_bounded_range": lambda e, s, p: (1 / _bounded(e, p), f"fp32(1 / ({e.max:g} * {p['bound']:g}))"),
    "inverse_element_span": lambda e, s, p: (1 / (e.max - _lowest(e)), f"fp32(1 / {e.max - _lowest(e):g})"),
    "element_span": lambda e, s, p: (e.max - _lowest(e), f"from {_lowest(e):g} to {e.max:g}"),
    "element_half_range": lambda e, s, p: (
        (e.max - _lowest(e)) / 2,
        f"half the range from {_lowest(e):g} to {e.max:g}",
    ),
    "inverse_element_max": lambda e, s, p: (1 / e.max, f"fp32(1 / {e.max:g})"),
    "inverse_element_power": lambda e, s, p: (
        1 / _power(e),
        f"1 / {_power(e):g}, the largest power of two up to {e.max:g}",
    ),
    "inverse_range": lambda e, s, p: (1 / (e.max * s.max), f"fp32(1 / ({e.max:g} * {s.max:g}))"),
    "scale_min": _scale_min,
    "inverse_margin": lambda e, s, p: (2.0 ** -float(p["margin"]), "2 to minus the margin"),
    "epsilon": lambda e, s, p: (float(p["epsilon"]), ""),
    "of_zeros": lambda e, s, p: (float(p["of-zeros"]), "the scale of a block whose own would be 0"),
}
