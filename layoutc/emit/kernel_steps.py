"""A scale rule's steps in Triton, without divisions whose result is a power of two: a division costs a thread more than
all other steps of a rule."""

from __future__ import annotations

from collections.abc import Sequence

from layoutc.emit import rule_text
from layoutc.layout.layout import Quantization
from layoutc.spec.rules import Step

_LEAST = 4  # a constant over a finite fp32 value is then no subnormal number


def scale_steps(quantization: Quantization, suffix: str) -> list[str]:
    """The rule's active steps as assignments, in order; the values are those of the steps as they are written."""
    remaining = list(quantization.definition.active_steps(dict(quantization.parameters)))
    powers: set[str] = set()
    lines: list[str] = []
    while remaining:
        step = remaining.pop(0)
        if _begins_power_of_two(step, remaining, quantization):
            constants = rule_text.constant_names(quantization, suffix)
            overflow = constants["overflow"].replace("F32_MAX", rule_text.TRITON.f32_max)
            lines.append(f"{step.name} = lt.floor_power_of_two_over({constants['element_max']}, amax, {overflow})")
            powers.add(step.name)
            del remaining[:2]
            continue
        value = rule_text.expression(step.expression, quantization, {}, suffix, rule_text.TRITON, powers)
        lines.append(f"{step.name} = {value}")
        if not step.expression.endswith(f", 1, {step.name})"):  # `where(..., 1, power)` is one
            powers.discard(step.name)
    return lines


def _begins_power_of_two(step: Step, following: Sequence[Step], quantization: Quantization) -> bool:
    """Whether a step divides by the amax, and the next ones replace what overflows and round down to a power of two.

    The one after them must replace results of an amax that is not finite: the kernels' function is for finite ones.
    """
    name = step.name
    written = (
        f"where(isinf({name}), overflow, {name})",
        f"floor_power_of_two({name})",
        f"where((amax == 0) | isinf(amax) | isnan(amax), 1, {name})",
    )
    follow = tuple(one.expression for one in following[:3]) == written and {one.name for one in following[:3]} == {name}
    return follow and step.expression == "element_max / amax" and quantization.element.max >= _LEAST
