"""Checks of a spec's numbers: scale rules and their parameters, the tensor level, the history.

Formats and rules are data (formats.yaml, rules.yaml). All requirements follow from that data, so a new rule is checked
like the existing ones.
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
from layoutc.spec.checks.parts import sides
from layoutc.spec.checks.rules import (
    bound_fits_scale,
    candidates_differ,
    candidates_need_blocks,
    constants_fit_fp32,
    formats_exist,
    hides_nan,
    misfit,
    zeros_stay_zeros,
)
from layoutc.spec.formats import BUILTIN
from layoutc.spec.rules import RULES, Parameter, Rule
from layoutc.spec.schema import Scale, Spec, Super
from layoutc.spec.source import Path, Source

_INTEGER_RANGE = 126  # integer parameters are exponents: two to their power must be a normal fp32 number


def parameters_fit_rules(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Each parameter of the rules of scales and super-blocks belongs to its rule and has a usable value."""
    yield from _parameters_fit(spec.scale, ("scale",), source)
    if spec.scale.super is not None:
        yield from _parameters_fit(spec.scale.super, ("scale", "super"), source)


def rule_exists(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The scale rule is known."""
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
            own = f"parameters: {listed(rule.parameters)}" if rule.parameters else "takes no parameters"
            message = f"`{key}` is a parameter of {' and '.join(owners)}, not of {rule.name}"
            used, help = source.value((*at, "rule"), own), f"delete it, or write `rule: {owners[0]}`"
            yield source.find("LC321", message, source.key(where), used, help=help)
        elif problem := _parameter_problem(parameter, value):
            label = source.value(where, did_you_mean(str(value), parameter.choices))
            message = f"{quoted(value)} is not a valid `{'.'.join(map(str, where))}`"
            yield source.find("LC322", message, label, help=problem)


def tensor_level_is_needed(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """`tensor` is stated if and only if a rule reads the tensor's amax."""
    used = _rules(spec)
    if not used:
        return
    needing = [(rule, path) for rule, path in used if rule.needs_tensor_amax]
    if needing and spec.tensor is None:
        rule, path = needing[0]
        help = "add `tensor: {amax: f32}` at the top level"
        message = f"{rule.name} reads the whole tensor's amax, which is not kept"
        yield source.find("LC323", message, path, help=help)
    elif not needing and spec.tensor is not None:
        other = next((name for name, one in RULES.items() if one.needs_tensor_amax), "")
        rule, path = used[0]
        label, reads = source.key(("tensor",)), source.value(path, "reads the amax of a block only")
        message, help = (
            f"`tensor` is given, but {rule.name} does not use it",
            f"delete `tensor`, or write `rule: {other}`",
        )
        yield source.find("LC324", message, label, reads, help=help)


def stored_level_is_one(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A weight stores one level in place of its amax, so all orientations compute the same one."""
    if not any(rule.tensor for rule, _ in _rules(spec)):
        return
    for side in sides(spec):
        own = [path for path in (side.element_at, side.scale_at) if len(path) > 1]
        own += [(*side.where, "transform")] if side.orientation.transform is not None else []
        if own:
            message = f"{side.name} would need its own level for the whole tensor"
            why = "the weight stores one level instead of its amax, and all orientations decode with it"
            help = "delete it, or write `rule: two-level`, which stores the amax"
            yield source.find("LC337", message, source.key(own[0]), why=why, help=help)


def history_is_for_whole_tensors(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A history keeps one amax per step, so the weight must have one scale."""
    for side in sides(spec):
        if side.orientation.quantize.scale is not None and (side.scale.history or spec.scale.history):
            message = "an amax history needs the same scale in all orientations"
            label = source.key(side.scale_at, f"{side.name} has a scale of its own")
            yield source.find("LC325", message, label, help="delete `history`, or this `scale`")
    if spec.scale.history is None:
        return
    label = source.key(("scale", "history"), "keeps one amax for each step")
    for side in sides(spec):
        block = side.orientation.block
        if (block.m, block.k) != ("all", "all"):
            message = f"an amax history needs one scale for the whole tensor, but {side.name} has many"
            stated = source.value((*side.where, "block"), f"blocks of {block.m} x {block.k}")
            help = "delete `history`, or write `block: {m: all, k: all}`"
            yield source.find("LC325", message, label, stated, help=help)
    if spec.tensor is not None:
        tensor, message = (
            source.key(("tensor",), "takes the amax of this step"),
            "an amax history can't be combined with a tensor level",
        )
        yield source.find("LC325", message, label, tensor, help="delete one of the two")


def scale_format_fits_rule(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The scale's format holds what the rule computes, so that decoding undoes encoding."""
    rule, fmt = RULES.get(spec.scale.rule), sound_format(spec, spec.scale.format)
    element = sound_format(spec, spec.element.format)
    is_scale = fmt is not None and (holds_scales(fmt) or (spec.scale.super is not None and not fmt.is_wide))
    if rule is None or fmt is None or element is None or not is_scale or no_element(element, spec.use):
        return
    label = source.value(("scale", "format"))
    if fmt.is_wide and spec.scale.round != "nearest":
        rounding, message = "is not nearest", f"{fmt.name} scales are rounded to nearest, ties to even"
        if fmt.is_f32:
            rounding, message = "has nothing to round", "an f32 scale is stored as it is computed"
        yield source.find("LC326", message, source.value(("scale", "round"), rounding), label, help="delete `round`")
    if problem := misfit(rule, fmt, element, spec.scale.parameters):
        message, why, help = problem
        used = source.value(("scale", "rule"), "computes this scale")
        yield source.find("LC327", message, label, used, why=why, help=help)


def zero_points_fit(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A rule that makes zero points has a format for them and integer elements to shift; no other rule has."""
    rule = RULES.get(spec.scale.rule)
    if rule is None:
        return
    element, zero = sound_format(spec, spec.element.format), spec.scale.zero
    used = source.value(("scale", "rule"))
    if not rule.makes_zero:
        if zero is not None:
            making = "` or `rule: ".join(name for name, one in RULES.items() if one.makes_zero)
            help = f"delete `zero`, or write `rule: {making}`"
            yield source.find(
                "LC340", f"{rule.name} makes no zero points", source.key(("scale", "zero")), used, help=help
            )
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
        message = f"the zero points of {rule.name} have no format"
        yield source.find("LC340", message, used, help=f"add `zero: {bytes_}`")
    elif (fmt := sound_format(spec, zero)) is None or not (fmt.integer or fmt.bits == 16):
        help = f"write `zero: {bytes_}`, another integer of up to 8 bits, f16 or bf16"
        yield source.find("LC340", f"{quoted(zero)} can't hold zero points", ("scale", "zero"), used, help=help)
    if element is not None and not element.integer:
        label = source.value(("element", "format"), "is not an integer")
        yield source.find("LC340", f"{rule.name} shifts integers", label, used, help=f"one of: {listed(integers)}")


def zero_points_need_whole_blocks(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Zero points need a block's minimum. If the block covers all rows, other shards have parts of it."""
    for side in sides(spec):
        if side.orientation.block.m == "all" and side.rule is not None and side.rule.makes_zero:
            label = source.value((*side.where, "block", "m"), "a block covers rows of all shards")
            message = "zero points need the range of a block, but shards share only its amax"
            yield source.find("LC340", message, label, help="write a number of rows")


def nan_survives(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A NaN in the weight survives, in its code or its block's scale. No rule may turn it into a number."""
    rule, element = RULES.get(spec.scale.rule), sound_format(spec, spec.element.format)
    if rule is None or element is None or no_element(element, spec.use) or element.nan:
        return
    if hides_nan(rule, spec.scale.parameters):
        keeping = [f"rule {name}" for name, one in RULES.items() if not hides_nan(one, one.defaults)]
        switch = next((key for key in rule.parameters if not hides_nan(rule, rule.defaults | {key: True})), None)
        message = f"{element.name} has no NaN, and {rule.name} would hide one"
        label, used = (("element", "format"), "can't hold a NaN"), (("scale", "rule"), "replaces a NaN amax")
        help = (f"add `{switch}: true`, or " if switch else "") + f"use {listed(keeping)}"
        yield source.find("LC328", message, source.value(*label), source.value(*used), help=help)


def shards_share_one_amax(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """All scales that depend on other shards' rows follow from one shared amax of one shape."""
    wanted = dict[int | str, Path]()
    for side in sides(spec):
        if side.orientation.block.m == "all":
            wanted[side.orientation.block.k] = (*side.where, "block")
    if spec.tensor is not None and any(rule.needs_tensor_amax for rule, _ in _rules(spec)):
        wanted["all"] = ("tensor",)
    if len(wanted) > 1:
        first, second = (
            source.value(where, "needs one for the whole weight" if columns == "all" else f"one for {columns} columns")
            for columns, where in list(wanted.items())[:2]
        )
        message = "shards would have to share two amaxes of different shapes"
        help = "give both the same columns, or blocks of a finite number of rows"
        yield source.find("LC329", message, second, first, help=help)


# Run once per spec.
CROSS_CHECKS = (
    own_formats_are_sound,
    tensor_level_is_needed,
    stored_level_is_one,
    history_is_for_whole_tensors,
    shards_share_one_amax,
    zero_points_need_whole_blocks,
    candidates_need_blocks,
)

# Run for the recipe's element and scale, and for each orientation's.
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
    """The spec, and for each orientation that quantizes differently, the spec as that orientation sees it.

    There, the orientation's `element` and `scale` replace the recipe's, with their spans in the text.
    """
    yield spec, source
    for side in sides(spec):
        quantize = side.orientation.quantize
        if own := {part: one for part in ("element", "scale") if (one := getattr(quantize, part)) is not None}:
            prefix: Path = (*side.where, "quantize")
            data = source.data | {part: source.data["orientations"][side.name]["quantize"][part] for part in own}
            keys, values = (_moved(spans, prefix, own) for spans in (source.keys, source.values))
            yield spec.model_copy(update=own), replace(source, data=data, keys=keys, values=values)


def _moved(spans: dict[Path, Span], prefix: Path, parts: Container[object]) -> dict[Path, Span]:
    """Spans by path, with those of `parts` below `prefix` moved to the recipe's paths."""
    kept = {path: span for path, span in spans.items() if not path or path[0] not in parts}
    depth = len(prefix)
    return kept | {
        path[depth:]: span
        for path, span in spans.items()
        if path[:depth] == prefix and len(path) > depth and path[depth] in parts
    }


def _rules(spec: Spec) -> list[tuple[Rule, Path]]:
    """All rules that the spec uses, with the paths that name them."""
    used = dict.fromkeys((side.scale.rule, (*side.scale_at, "rule")) for side in sides(spec))
    return [(RULES[rule], path) for rule, path in used if rule in RULES]


def _parameter_problem(parameter: Parameter, value: float | bool | str) -> str:
    """What a parameter's value must be; "" if it is sound."""
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
