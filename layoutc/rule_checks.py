"""Whether the formats and blocks of a spec give a scale rule the numbers that it computes with."""

from __future__ import annotations

from collections.abc import Iterator

from layoutc import rules
from layoutc.constants import CONSTANTS, constant
from layoutc.diagnostics import Diagnostic
from layoutc.format_checks import holds_scales, no_element, sound_format
from layoutc.formats import BUILTIN, F32_MAX, Format
from layoutc.rules import RULES, Rule
from layoutc.schema import Spec
from layoutc.source import Source


def candidates_need_blocks(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Which scale errs least is a sum over the block, which no shard has whole if the block has no size."""
    for name in ("rowwise", "columnwise"):
        orientation = getattr(spec.orientations, name)
        rule = RULES.get((orientation.quantize.scale or spec.scale).rule) if orientation is not None else None
        if rule is None or not rule.candidates:
            continue
        for axis in ("m", "k"):
            if getattr(orientation.block, axis) == "all":
                label = source.value(("orientations", name, "block", axis), "a block without a size")
                used = source.value(
                    ("scale", "rule")
                    if orientation.quantize.scale is None
                    else ("orientations", name, "quantize", "scale", "rule"),
                    "tries several scales for each block",
                )
                message = f"{rule.name} adds up the errors of a block, and this one runs over all of {axis}"
                yield source.find("LC341", message, label, used, help="write a number, for instance 16")


def bound_fits_scale(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """What a rule takes for the largest scale is one that the scale's format has."""
    rule, fmt = RULES.get(spec.scale.rule), sound_format(spec, spec.scale.format)
    bound = spec.scale.parameters.get("bound")
    if rule is None or fmt is None or not holds_scales(fmt) or "bound" not in rule.parameters:
        return
    if isinstance(bound, float) and bound > fmt.max:
        given = "bound" in source.data["scale"]
        label = source.value(("scale", "bound" if given else "rule"), "" if given else f"bound: {bound:g}")
        used = source.value(("scale", "format"), f"holds up to {fmt.max:g}")
        help = f"write `bound: {fmt.max:g}`, or less"
        yield source.find("LC322", f"the largest scale of {fmt.name} is below `scale.bound`", label, used, help=help)


def candidates_differ(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A rule whose second candidate makes the amax the element below the largest needs one that is not zero."""
    rule, element = RULES.get(spec.scale.rule), sound_format(spec, spec.element.format)
    if rule is None or element is None or no_element(element):
        return
    if any("element_step" in rules.names(value) for value in rule.candidates) and not element.magnitudes[-2]:
        wide = next(name for name, fmt in BUILTIN.items() if fmt.bits == 4 and not fmt.integer)
        label = source.value(("element", "format"), f"its magnitudes are 0 and {element.max:g}")
        used = source.value(("scale", "rule"), "also tries the amax at the element below the largest")
        message = f"{rule.name} needs elements of at least two magnitudes beside 0"
        yield source.find("LC342", message, label, used, help=f"write `format: {wide}`, or another rule")


def constants_fit_fp32(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Every constant that the rule uses is an fp32 number, and none is rounded to zero."""
    rule, element, scale = (
        RULES.get(spec.scale.rule),
        sound_format(spec, spec.element.format),
        sound_format(spec, spec.scale.format),
    )
    if rule is None or element is None or scale is None or no_element(element) or not holds_scales(scale):
        return
    parameters = {key: parameter.default for key, parameter in rule.parameters.items()} | spec.scale.parameters
    if (name := _beyond_fp32(rule, element, scale, parameters)) is None:
        return
    label = source.value(("element", "format"), f"its largest number is {element.max:g}")
    used = source.value(("scale", "rule"), f"computes with {name.replace('_', ' ')}")
    help = "give the element's format a bias nearer to the middle"
    usual = {key: parameter.default for key, parameter in rule.parameters.items() if key == "bound"}
    if usual and _beyond_fp32(rule, element, scale, parameters | usual) is None:
        label = source.value(("scale", "bound"), f"times {element.max:g}, the largest element")
        help = f"delete `bound`, which is then {usual['bound']:g}"
    yield source.find("LC343", f"a constant of {rule.name} is beyond fp32", label, used, help=help)


def _beyond_fp32(rule: Rule, element: Format, scale: Format, parameters: rules.Parameters) -> str | None:
    """The first constant of a rule that fp32 can't hold."""
    used = frozenset().union(*(rules.names(expression) for _, expression in rule.program(parameters)))
    if "element_step" in used and not element.magnitudes[-2]:
        return None  # candidates_differ says so
    bound = parameters.get("bound", 1.0)
    if not isinstance(bound, float) or not 0 < bound <= F32_MAX:
        return None  # parameters_fit_rule says so
    for name in sorted(CONSTANTS.keys() & used - {"epsilon", "inverse_margin"}):
        try:
            fits = bool(constant(name, element, scale, parameters)[0])
        except (OverflowError, ZeroDivisionError):
            fits = False
        if not fits:
            return name
    return None
