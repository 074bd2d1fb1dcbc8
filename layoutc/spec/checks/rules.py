"""Checks that a spec's formats and blocks fit its scale rule: all numbers that it computes with exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

from layoutc.diagnostics.diagnostic import Diagnostic, did_you_mean, listed, quoted
from layoutc.spec import rules
from layoutc.spec.checks.formats import holds_scales, level_format, no_element, sound_format
from layoutc.spec.checks.parts import AXES, sides
from layoutc.spec.formats import BUILTIN, F32_MAX, Format, aliases
from layoutc.spec.rule_constants import CONSTANTS, constant
from layoutc.spec.rules import RULES, Rule
from layoutc.spec.schema import Spec
from layoutc.spec.source import Source


def formats_exist(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Formats of elements and scales are built in or defined by the spec."""
    names = [*BUILTIN, *(name for name in spec.formats if name not in BUILTIN)]
    for part, name in (("element", spec.element.format), ("scale", spec.scale.format)):
        if name in names:
            continue
        fitting = [one for one in names if _can_be(spec, part, one)]
        alias = aliases()["formats"].get(name, name.casefold())
        label, help = "", f"one of: {listed(fitting)}; or define it under `formats`"
        if alias in fitting:
            label, help = f"is `{alias}` here", f"write `format: {alias}`"
        elif meant := did_you_mean(name, fitting):
            label = meant
        elif part == "scale":
            label = f"a scale is {' or '.join(name for name, one in BUILTIN.items() if one.is_wide)}, or fills a byte"
            of = f", as {spec.scale.rule} takes it" if spec.scale.rule in RULES else ""
            some = f"write `format: {'` or `'.join(fitting)}`{of}"
            help = some if fitting else "define one of 8 bits under `formats`"
        at, message = source.value((part, "format"), label), f"{quoted(name)} is not a known format"
        yield source.find("LC304", message, at, help=help)


def _can_be(spec: Spec, part: str, name: str) -> bool:
    """True if elements, or scales under this rule, can have the format."""
    fmt = sound_format(spec, name)
    if fmt is None:
        return False
    if part == "element":
        return not no_element(fmt, spec.use)
    rule, element = RULES.get(spec.scale.rule), sound_format(spec, spec.element.format)
    if spec.scale.super is not None:
        return level_format(fmt)
    if rule is None or element is None or no_element(element, spec.use):
        return holds_scales(fmt)
    return holds_scales(fmt) and misfit(rule, fmt, element, spec.scale.parameters) is None


def suggested_scale(scale: Format | None, element: Format | None) -> str:
    """A rule to type after `rule: ` for a scale format, with the parameters that it needs."""
    scale, element = scale or BUILTIN["f32"], element or next(iter(BUILTIN.values()))
    for rule in RULES.values():
        parameters = rule.defaults
        if rule.makes_zero or no_element(element, "state") or misfit(rule, scale, element, parameters) is not None:
            continue
        hides = not element.nan and hides_nan(rule, parameters)
        switch = next((key for key in parameters if hides and not hides_nan(rule, parameters | {key: True})), None)
        return rule.name + (f", {switch}: true" if switch else "")
    return next(iter(RULES))


def hides_nan(rule: Rule, parameters: rules.Parameters) -> bool:
    """True if the rule replaces an amax that is NaN."""
    return any("isnan" in step.expression for step in rule.active_steps(parameters) if step not in rule.tensor)


def candidates_need_blocks(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A candidate's error is a sum over the block, and no shard has all of a block that spans an axis."""
    for side in sides(spec):
        for axis in AXES if side.rule is not None and side.rule.candidates else ():
            if getattr(side.orientation.block, axis) == "all":
                label = source.value((*side.where, "block", axis), "a block without a size")
                used = source.value((*side.scale_at, "rule"), "tries several scales for each block")
                message = f"{side.scale.rule} sums the errors of a block, but this block covers all of {axis}"
                yield source.find("LC341", message, label, used, help="write a number, for instance 16")


def bound_fits_scale(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The scale's format reaches `bound`, the rule's largest scale."""
    rule, fmt = RULES.get(spec.scale.rule), sound_format(spec, spec.scale.format)
    bound = spec.scale.parameters.get("bound")
    if rule is None or fmt is None or not holds_scales(fmt) or "bound" not in rule.parameters:
        return
    if isinstance(bound, float) and bound > fmt.max:
        is_stated = "bound" in source.data["scale"]
        label = source.value(("scale", "bound" if is_stated else "rule"), "" if is_stated else f"bound: {bound:g}")
        used = source.value(("scale", "format"), f"holds up to {fmt.max:g}")
        help = f"write `bound: {fmt.max:g}`, or less"
        yield source.find("LC322", f"the largest scale of {fmt.name} is below `scale.bound`", label, used, help=help)


def candidates_differ(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """If a rule's second candidate maps the amax to the second largest element, that element must not be zero."""
    rule, element = RULES.get(spec.scale.rule), sound_format(spec, spec.element.format)
    if rule is None or element is None or no_element(element, spec.use):
        return
    if any("element_step" in rules.names(value) for value in rule.candidates) and not element.magnitudes[-2]:
        wide = next(name for name, fmt in BUILTIN.items() if fmt.bits == 4 and not fmt.integer)
        label = source.value(("element", "format"), f"its magnitudes are 0 and {element.max:g}")
        used = source.value(("scale", "rule"), "also tries the amax at the element below the largest")
        message = f"{rule.name} needs elements with at least two nonzero magnitudes"
        yield source.find("LC342", message, label, used, help=f"write `format: {wide}`, or another rule")


def zeros_stay_zeros(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Some element is 0, or the scale of a block of zeros is 0.

    `zero_`, new tensors, padding and experts without tokens rely on zeros being read back as zeros.
    """
    element, scale = sound_format(spec, spec.element.format), sound_format(spec, spec.scale.format)
    rule = RULES.get(spec.scale.rule)
    if rule is None or element is None or scale is None or not element.values or 0 in element.values:
        return
    parameters = spec.scale.parameters
    holds_zero = 0 in scale.values if scale.values else scale.has_zero
    if holds_zero and rule.scales_zeros_by_zero(parameters):
        return
    value = min(element.values, key=abs)
    raised = [name for name in rule.zero_scale or () if parameters[name]]
    used: tuple[str, ...] = ("scale", "format")
    what = f"{scale.name} has no 0"
    if holds_zero:
        used = ("scale", *raised[:1]) if raised else ("scale", "rule")
        what = "gives a block of zeros a nonzero scale"
    help = "add 0 to `values`"
    if holds_zero:
        help += f", or delete `{raised[0]}`" if raised else ", or write `rule: scale-first`"
    elif not spec.scale.super:
        help += ", or write `scale: {format: f32, rule: scale-first}`"
    message = f"zeros would be read back as {value:g} times a scale: {element.name} has no 0"
    yield source.find("LC307", message, ("element", "format"), source.value(used, what), help=help)


def constants_fit_fp32(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Every constant that the rule uses fits fp32, and none rounds to zero."""
    rule, element = RULES.get(spec.scale.rule), sound_format(spec, spec.element.format)
    scale = sound_format(spec, spec.scale.format)
    is_scale = scale is not None and (holds_scales(scale) or spec.scale.super is not None)
    if rule is None or element is None or scale is None or no_element(element, spec.use) or not is_scale:
        return
    if (name := beyond_fp32(rule, element, scale, spec.scale.parameters)) is None:
        return
    label = source.value(("element", "format"), f"its largest number is {element.max:g}")
    used = source.value(("scale", "rule"), f"computes with {name.replace('_', ' ')}")
    help = "give the element's format a bias nearer to the middle"
    usual = rule.defaults.get("bound")
    if usual is not None and beyond_fp32(rule, element, scale, spec.scale.parameters | {"bound": usual}) is None:
        label = source.value(("scale", "bound"), f"times {element.max:g}, the largest element")
        help = f"delete `bound`, which is then {usual:g}"
    yield source.find("LC343", f"a constant of {rule.name} is beyond fp32", label, used, help=help)


def _rounding_first(fmt: Format, element: Format) -> str:
    """A rule that scales elements by the rounded scale, so that any scale format works."""
    plain = (rule for rule in RULES.values() if not (rule.makes_zero or rule.candidates or rule.needs_tensor_amax))
    reading = (rule for rule in plain if "from_scale" in _reads(rule.element_step(rule.defaults).expression))
    return next(rule.name for rule in reading if misfit(rule, fmt, element, rule.defaults) is None)


def beyond_fp32(rule: Rule, element: Format, scale: Format, parameters: rules.Parameters) -> str | None:
    """The first constant of a rule that fp32 can't hold."""
    used = frozenset().union(*(rules.names(expression) for _, expression in rule.program(parameters)))
    if "element_step" in used and not element.magnitudes[-2]:
        return None  # candidates_differ reports it
    bound = parameters.get("bound", 1.0)
    if not isinstance(bound, float) or not 0 < bound <= F32_MAX:
        return None  # parameters_fit_rules reports it
    for name in sorted(CONSTANTS.keys() & used - {"epsilon", "inverse_margin", "of_zeros"}):
        try:
            fits = bool(constant(name, element, scale, parameters)[0]) or name == "element_min"  # it may be 0
        except (OverflowError, ZeroDivisionError):
            fits = False
        if not fits:
            return name
    return None


def misfit(rule: Rule, fmt: Format, element: Format, parameters: rules.Parameters) -> tuple[str, str, str] | None:
    """(headline, why, help) if the scale's format can't hold what the rule computes; else None."""
    read = _reads(rule.element_step(parameters).expression)
    self_consistent = "from_scale" in read or parameters.get("unrounded") is True
    rounding = next((s.when[0] for s in rule.steps if s.when and "floor_power_of_two" in s.expression), None)
    powers_only = rounding is not None and parameters.get(rounding) is True
    wide = fmt.mantissa == 0 and not fmt.has_zero and fmt.magnitudes[0] <= 2.0**-127 and fmt.max >= 2.0**127
    if not self_consistent and not fmt.is_f32 and not (powers_only and wide):
        holds = "powers of two only" if fmt.mantissa == 0 else f"{fmt.mantissa + 1} significant bits"
        message = f"{rule.name} computes a scale that {fmt.name} can't hold exactly: {holds}"
        help = "write `format: f32`" + (f", or add `{rounding}: true`" if wide and rounding else "")
        help += f", or `rule: {_rounding_first(fmt, element)}`" if fmt.mantissa else ""
        return message, "elements would be encoded with one multiplier and decoded with another", help
    guarded = {"minimum", "where"} & read
    if self_consistent and not guarded and fmt.has_zero:
        why = f"a block of zeros would get the scale 0, and the multiplier 1 / 0; {fmt.name} has a zero"
        return f"{rule.name} needs a scale format without a zero", why, "write `format: e8m0`, or another rule"
    uses_range = any("scale_max" in rules.names(step.expression) for step in (*rule.tensor, *rule.steps))
    if uses_range and (fmt.is_f32 or fmt.max * element.max > 2.0**120):
        scales = ((name, one) for name, one in BUILTIN.items() if holds_scales(one) and one.mantissa)
        narrower = next((name for name, one in scales if one.max * element.max <= 2.0**120), None)
        message = f"{rule.name} needs {'a scale' if narrower else 'an element'} format of a narrower range"
        why = f"it spreads the tensor over {fmt.name}'s range times {element.name}'s, which overflows fp32"
        return message, why, f"write `format: {narrower}`" if narrower else "give the element's format a larger bias"
    return None


def _reads(expression: str) -> frozenset[str]:
    """Every name and function that an expression mentions."""
    return rules.names(expression) | frozenset(re.findall(r"(\w+)\(", expression))
