"""Constants of scale rules: fp32 numbers computed from formats and parameters. rules.yaml describes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from layoutc.spec.formats import Format, f32

Parameters = Mapping[str, float | int | bool | str]
Value = tuple[float, str]


def constant(name: str, element: Format, scale: Format, parameters: Parameters) -> Value:
    """A constant's fp32 value, and what it is in words. Raises OverflowError if it is beyond fp32."""
    value, doc = CONSTANTS[name](element, scale, parameters)
    return f32(value), doc


def _element_min(element: Format, scale: Format, parameters: Parameters) -> Value:
    if element.values:
        return min(value for value in element.values if not math.isnan(value)), ""
    return (math.ldexp(element.lowest, -element.fraction) if element.integer else -element.max), ""


def _element_step(element: Format, scale: Format, parameters: Parameters) -> Value:
    below = element.magnitudes[-2]
    return element.max / below, f"{element.max:g} / {below:g}"


def _bounded_range(element: Format, scale: Format, parameters: Parameters) -> Value:
    bound = float(parameters["bound"])
    return bound * element.max, f"{bound:g} * {element.max:g}"


def _inverse_bounded_range(element: Format, scale: Format, parameters: Parameters) -> Value:
    bound = float(parameters["bound"])
    return 1 / (bound * element.max), f"fp32(1 / ({element.max:g} * {bound:g}))"


def _inverse_element_span(element: Format, scale: Format, parameters: Parameters) -> Value:
    span = element.max - _element_min(element, scale, parameters)[0]
    return 1 / span, f"fp32(1 / {span:g})"


def _element_span(element: Format, scale: Format, parameters: Parameters) -> Value:
    lowest = _element_min(element, scale, parameters)[0]
    return element.max - lowest, f"from {lowest:g} to {element.max:g}"


def _element_half_range(element: Format, scale: Format, parameters: Parameters) -> Value:
    lowest = _element_min(element, scale, parameters)[0]
    return (element.max - lowest) / 2, f"half the range from {lowest:g} to {element.max:g}"


def _inverse_element_max(element: Format, scale: Format, parameters: Parameters) -> Value:
    return 1 / element.max, f"fp32(1 / {element.max:g})"


def _inverse_element_power(element: Format, scale: Format, parameters: Parameters) -> Value:
    power = 2.0 ** math.floor(math.log2(element.max))
    return 1 / power, f"1 / {power:g}, the largest power of two up to {element.max:g}"


def _inverse_range(element: Format, scale: Format, parameters: Parameters) -> Value:
    return 1 / (element.max * scale.max), f"fp32(1 / ({element.max:g} * {scale.max:g}))"


def _scale_min(element: Format, scale: Format, parameters: Parameters) -> Value:
    least = next(magnitude for magnitude in scale.magnitudes if magnitude)
    return least, f"2^{int(math.log2(least))}" if math.frexp(least)[0] == 0.5 else ""


def _inverse_margin(element: Format, scale: Format, parameters: Parameters) -> Value:
    return 2.0 ** -float(parameters["margin"]), "2 to minus the margin"


def _of_zeros(element: Format, scale: Format, parameters: Parameters) -> Value:
    return float(parameters["of-zeros"]), "the scale of a block whose own would be 0"


def _epsilon(element: Format, scale: Format, parameters: Parameters) -> Value:
    return float(parameters["epsilon"]), ""


# By their names in rules. Computed only for rules that use them, since not every format has every constant.
CONSTANTS: dict[str, Callable[[Format, Format, Parameters], Value]] = {
    "element_min": _element_min,
    "element_step": _element_step,
    "bounded_range": _bounded_range,
    "inverse_bounded_range": _inverse_bounded_range,
    "inverse_element_span": _inverse_element_span,
    "element_span": _element_span,
    "element_half_range": _element_half_range,
    "inverse_element_max": _inverse_element_max,
    "inverse_element_power": _inverse_element_power,
    "inverse_range": _inverse_range,
    "scale_min": _scale_min,
    "inverse_margin": _inverse_margin,
    "epsilon": _epsilon,
    "of_zeros": _of_zeros,
}
