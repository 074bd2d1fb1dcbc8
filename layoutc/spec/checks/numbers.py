"""Checks of a spec's numbers: scale rules and their parameters, the tensor level, the history.

Formats and rules are data (formats.yaml, rules.yaml), and all requirements here follow from that data, so that a new
rule is checked like the old ones.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import replace

from layoutc.diagnostics.diagnostic import Diagnostic, Span, did_you_mean, listed, quoted
from layoutc.spec import formats
from layoutc.spec.checks.formats import (
    element_format_holds_elements,
    holds_scales,
    no_element,
    own_formats_are_sound,
    scale_format_holds_scales,
    sound_format,
)
from layoutc.spec.checks.rules import (
    bound_fits_scale,
    candidates_differ,
    candidates_need_blocks,
    constants_fit_fp32,
    formats_exist,
    misfit,
    zeros_stay_zeros,
)
from layoutc.spec.formats import BUILTIN
from layoutc.spec.rules import RULES, Parameter, Rule
from layoutc.spec.schema import Scale, Spec, Super
from layoutc.spec.source import Path, Source

_INTEGER_RANGE = 126  # integer parameters are exponents: two to their power must be a normal fp32 number


def parameters_fit_rules(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Each parameter of the scale's rule, and of that of its level, belongs there and is a number to compute with."""
    yield from _parameters_fit(spec.scale, ("scale",), source)
    if spec.scale.super is not None:
        yield from _parameters_fit(spec.scale.super, ("scale", "super"), source)


def rule_exists(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The scale rule is a known one."""
    if spec.scale.rule not in RULES:
        label, help = did_you_mean(spec.scale.rule, RULES), f"one of: {listed(RULES)}"
        if alias := formats.aliases()["rules"].get(spec.scale.rule.casefold()):
            label, help = "", f"write `rule: {alias}`"
        message = f"{quoted(spec.scale.rule)} is not a known scale rule"
        yield source.find("LC320", message, source.value(("scale", "rule"), label), help=help)


def _parameters_fit(stated: Scale | Super, at: Path, source: Source) -> Iterator[Diagnostic]:
    rule = RULES.get(stated.rule)
    if rule is None:
        return
    for key, value in stated.parameters.items():
        where: Path = (*at, key)
        parameter = rule.parameters.get(key)
        if parameter is None:
            owners = [name for name, other in RULES.items() if key in other.parameters]
            own = listed(rule.parameters)
            yield source.find(
                "LC321",
                f"`{key}` is a parameter of {' and '.join(owners)}, not of {rule.name}",
                source.key(where),
                source.value((*at, "rule"), f"parameters: {own}" if own else "takes no parameters"),
                help=f"delete it, or write `rule: {owners[0]}`",
            )
        elif problem := _parameter_problem(parameter, value):
            label = source.value(where, did_you_mean(str(value), parameter.choices))
            yield source.find(
                "LC322", f"{quoted(value)} is not a valid `{'.'.join(map(str, where))}`", label, help=problem
            )


def tensor_level_is_needed(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """`tensor` is given if, and only if, a rule reads the tensor's amax."""
    used = _rules(spec)
    if not used:
        return
    needing = [(rule, path) for rule, path in used if rule.needs_tensor_amax]
    if needing and spec.tensor is None:
        rule, path = needing[0]
        help = "add `tensor: {amax: f32}` at the top level"
        message = f"{rule.name} reads the whole tensor's amax, which is not kept"
        yield source.find("LC323", message, source.value(path), help=help)
    elif not needing and spec.tensor is not None:
        other = next((name for name, one in RULES.items() if one.needs_tensor_amax), "")
        rule, path = used[0]
        yield source.find(
            "LC324",
            f"`tensor` is given, but {rule.name} does not use it",
            source.key(("tensor",)),
            source.value(path, "reads the amax of a block only"),
            help=f"delete `tensor`, or write `rule: {other}`",
        )


def stored_level_is_one(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A weight stores one level in place of its amax, so all orientations make the same one of it."""
    if not any(rule.tensor for rule, _ in _rules(spec)):
        return
    for name in ("rowwise", "columnwise"):
        orientation = getattr(spec.orientations, name)
        if orientation is None:
            continue
        own = next((part for part in ("element", "scale") if getattr(orientation.quantize, part) is not None), None)
        where: Path | None = ("orientations", name, "quantize", own) if own else None
        if where is None and orientation.transform is not None:
            where = ("orientations", name, "transform")
        if where is not None:
            yield source.find(
                "LC337",
                f"{name} would need a second level of its own",
                source.key(where),
                why="the weight stores one number in place of its amax, which all orientations decode by",
                help="delete it, or write `rule: two-level`, which stores the amax",
            )


def history_is_for_whole_tensors(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A history keeps one amax for each step, so there must be one scale."""
    for name in ("rowwise", "columnwise"):
        orientation = getattr(spec.orientations, name)
        own = orientation.quantize.scale if orientation is not None else None
        if own is not None and (own.history or spec.scale.history):
            where: Path = ("orientations", name, "quantize", "scale")
            message = "a history needs one scale for the whole tensor, not another for one orientation"
            label = source.key(where, f"{name} has a scale of its own")
            yield source.find("LC325", message, label, help="delete `history`, or this `scale`")
    if spec.scale.history is None:
        return
    label = source.key(("scale", "history"), "keeps one amax for each step")
    for name in ("rowwise", "columnwise"):
        orientation = getattr(spec.orientations, name)
        if orientation is not None and (orientation.block.m, orientation.block.k) != ("all", "all"):
            block_place: Path = ("orientations", name, "block")
            message = f"a history needs one scale for the whole tensor, but {name} has many"
            block = source.value(block_place, f"blocks of {orientation.block.m} x {orientation.block.k}")
            help = "delete `history`, or write `block: {m: all, k: all}`"
            yield source.find("LC325", message, label, block, help=help)
    if spec.tensor is not None:
        tensor = source.key(("tensor",), "takes the amax of this step")
        yield source.find(
            "LC325", "a history does not go with a tensor level", label, tensor, help="delete one of the two"
        )


def scale_format_fits_rule(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The stored scale can hold what the rule computes, so that decoding undoes encoding."""
    rule, fmt, element = (
        RULES.get(spec.scale.rule),
        sound_format(spec, spec.scale.format),
        sound_format(spec, spec.element.format),
    )
    is_scale = fmt is not None and (holds_scales(fmt) or (spec.scale.super is not None and not fmt.is_wide))
    if rule is None or fmt is None or element is None or not is_scale or no_element(element, spec.use):
        return
    label = source.value(("scale", "format"))
    if fmt.is_wide and not fmt.is_f32 and spec.scale.round != "nearest":
        rounding = source.value(("scale", "round"), "is another way")
        message = f"{fmt.name} scales are rounded to nearest, ties to even"
        yield source.find("LC326", message, rounding, label, help="delete `round`")
    if fmt.is_f32 and spec.scale.round != "nearest":
        rounding = source.value(("scale", "round"), "has nothing to round")
        yield source.find("LC326", "an f32 scale is stored as it is computed", rounding, label, help="delete `round`")
    used = source.value(("scale", "rule"), "computes this scale")
    problem = misfit(rule, fmt, element, spec.scale.parameters)
    if problem:
        message, why, help = problem
        yield source.find("LC327", message, label, used, why=why, help=help)


def zero_points_fit(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A rule that makes zero points has a format for them and integers to shift, and no other rule has."""
    rule = RULES.get(spec.scale.rule)
    if rule is None:
        return
    element, zero = sound_format(spec, spec.element.format), spec.scale.zero
    used = source.value(("scale", "rule"))
    if not rule.makes_zero:
        if zero is not None:
            making = "` or `rule: ".join(name for name, one in RULES.items() if one.makes_zero)
            message = f"{rule.name} makes no zero points"
            label = source.key(("scale", "zero"))
            yield source.find("LC340", message, label, used, help=f"delete `zero`, or write `rule: {making}`")
        if element is not None and element.integer and element.lowest == 0:
            making = next(name for name, one in RULES.items() if one.makes_zero)
            integer = next(name for name, fmt in BUILTIN.items() if fmt.integer and fmt.bits == 8)
            message = f"{element.name} has no negative numbers, and {rule.name} makes no zero points to shift it"
            label = source.value(("element", "format"), "begins at 0")
            help = f"write `rule: {making}, zero: {integer}`, or `offset: {1 << (element.integer - 1)}`"
            yield source.find("LC340", message, label, used, help=help)
        return
    integers = [name for name, fmt in BUILTIN.items() if fmt.integer]
    bytes_ = listed(name for name in integers if BUILTIN[name].bits == 8)
    if zero is None:
        message = f"{rule.name} makes zero points, which have no format"
        yield source.find("LC340", message, used, help=f"add `zero: {bytes_}`")
    elif (fmt := sound_format(spec, zero)) is None or not (fmt.integer or fmt.bits == 16):
        label = source.value(("scale", "zero"))
        yield source.find(
            "LC340",
            f"{quoted(zero)} can't hold zero points",
            label,
            used,
            help=f"write `zero: {bytes_}`, another integer of up to 8 bits, f16 or bf16",
        )
    if element is not None and not element.integer:
        label = source.value(("element", "format"), "is not an integer")
        yield source.find("LC340", f"{rule.name} shifts integers", label, used, help=f"one of: {listed(integers)}")


def zero_points_need_whole_blocks(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Zero points need a block's smallest value; if the block covers all rows, other shards have parts of it."""
    for name in ("rowwise", "columnwise"):
        orientation = getattr(spec.orientations, name)
        if orientation is None or orientation.block.m != "all":
            continue
        rule = RULES.get((orientation.quantize.scale or spec.scale).rule)
        if rule is not None and rule.makes_zero:
            label = source.value(("orientations", name, "block", "m"), "a block covers rows of all shards")
            message = "zero points need the range of a block, and shards share only its amax"
            yield source.find("LC340", message, label, help="write a number of rows")


def nan_survives(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A NaN in the weight survives, in its code or in its block's scale; no rule may turn it into a number."""
    rule, element = RULES.get(spec.scale.rule), sound_format(spec, spec.element.format)
    if rule is None or element is None or no_element(element, spec.use) or element.nan:
        return
    parameters = spec.scale.parameters
    if _replaces_nan(rule, parameters):
        keeping = [f"rule {name}" for name, one in RULES.items() if not _replaces_nan(one, _defaults(one))]
        switch = next((k for k in rule.parameters if not _replaces_nan(rule, {**_defaults(rule), k: True})), None)
        yield source.find(
            "LC328",
            f"{element.name} has no NaN, and {rule.name} would hide one",
            source.value(("element", "format"), "can't hold a NaN"),
            source.value(("scale", "rule"), "replaces a NaN amax"),
            help=(f"add `{switch}: true`, or " if switch else "") + f"use {listed(keeping)}",
        )


def shards_share_one_amax(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Scales that depend on rows of other shards all follow from one shared amax, of one shape."""
    wanted = dict[int | str, Path]()
    for name in ("rowwise", "columnwise"):
        orientation = getattr(spec.orientations, name)
        if orientation is not None and orientation.block.m == "all":
            wanted[orientation.block.k] = ("orientations", name, "block")
    if spec.tensor is not None and any(rule.needs_tensor_amax for rule, _ in _rules(spec)):
        wanted["all"] = ("tensor",)
    if len(wanted) > 1:
        first, second = list(wanted.items())[:2]
        yield source.find(
            "LC329",
            "shards would have to share two amaxes of different shapes",
            source.value(
                second[1], "needs one for the whole weight" if second[0] == "all" else f"one for {second[0]} columns"
            ),
            source.value(
                first[1], "needs one for the whole weight" if first[0] == "all" else f"one for {first[0]} columns"
            ),
            help="give both the same columns, or blocks of a finite number of rows",
        )


# Run once for each spec.
CROSS_CHECKS = (
    own_formats_are_sound,
    tensor_level_is_needed,
    stored_level_is_one,
    history_is_for_whole_tensors,
    shards_share_one_amax,
    zero_points_need_whole_blocks,
    candidates_need_blocks,
)

# Run for the recipe's element and scale, and for those of each orientation.
CHECKS = (
    formats_exist,
    element_format_holds_elements,
    scale_format_holds_scales,
    rule_exists,
    parameters_fit_rules,
    scale_format_fits_rule,
    nan_survives,
    zero_points_fit,
    bound_fits_scale,
    candidates_differ,
    constants_fit_fp32,
    zeros_stay_zeros,
)


def scopes(spec: Spec, source: Source) -> Iterator[tuple[Spec, Source]]:
    """The spec itself, and for each orientation that quantizes differently the spec as that orientation sees it.

    In the latter, the orientation's own `element` and `scale` replace the recipe's, with their own spans in the text.
    """
    yield spec, source
    for name in ("rowwise", "columnwise"):
        orientation = getattr(spec.orientations, name)
        if orientation is None:
            continue
        own = {
            part: value for part in ("element", "scale") if (value := getattr(orientation.quantize, part)) is not None
        }
        if own:
            prefix: Path = ("orientations", name, "quantize")
            data = source.data | {part: source.data["orientations"][name]["quantize"][part] for part in own}
            places = (_moved(spans, prefix, own) for spans in (source.keys, source.values))
            keys, values = places
            yield spec.model_copy(update=own), replace(source, data=data, keys=keys, values=values)


def _moved(spans: dict[Path, Span], prefix: Path, parts: Container[object]) -> dict[Path, Span]:
    """Spans by path, with those of `parts` below `prefix` moved to where the recipe's own are."""
    kept = {path: span for path, span in spans.items() if not path or path[0] not in parts}
    depth = len(prefix)
    return kept | {
        path[depth:]: span
        for path, span in spans.items()
        if path[:depth] == prefix and len(path) > depth and path[depth] in parts
    }


def _rules(spec: Spec) -> list[tuple[Rule, Path]]:
    """Every rule that the spec uses, with the path where it is named."""
    used: list[tuple[str, Path]] = []
    for name in ("rowwise", "columnwise"):
        orientation = getattr(spec.orientations, name)
        if orientation is not None:
            own = orientation.quantize.scale
            path: Path = ("orientations", name, "quantize", "scale", "rule") if own else ("scale", "rule")
            used.append(((own or spec.scale).rule, path))
    return [(RULES[rule], path) for rule, path in dict.fromkeys(used) if rule in RULES]


def _defaults(rule: Rule) -> dict[str, float | int | bool | str]:
    return {key: parameter.default for key, parameter in rule.parameters.items()}


def _replaces_nan(rule: Rule, parameters: dict[str, float | int | bool | str]) -> bool:
    steps = rule.active_steps({**_defaults(rule), **parameters})
    return any("isnan" in step.expression for step in steps if step not in rule.tensor)


def _parameter_problem(parameter: Parameter, value: float | bool | str) -> str:
    """What a parameter's value must be; "" if it is."""
    if parameter.type == "choice":
        return "" if value in parameter.choices else f"one of: {listed(parameter.choices)}"
    if parameter.type == "boolean":
        return "" if isinstance(value, bool) else "write true or false"
    if isinstance(value, (bool, str)) or (parameter.type == "integer" and not isinstance(value, int)):
        return "write a whole number" if parameter.type == "integer" else "write a number"
    if parameter.type == "integer":
        return "" if abs(value) <= _INTEGER_RANGE else f"a whole number from -{_INTEGER_RANGE} to {_INTEGER_RANGE}"
    fits = math.isfinite(value) and (value == 0 or 2.0**-126 <= value <= formats.F32_MAX)
    if parameter.positive:
        return "" if fits and value else "a positive number that fp32 can hold"
    return "" if fits else "zero, or a positive number that fp32 can hold"
