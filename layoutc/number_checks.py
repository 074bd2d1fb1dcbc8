"""Whether a spec's numbers make sense: formats, scale rules and their parameters, the tensor level, the history.

Which formats and rules there are is data (formats.yaml, rules.yaml). What is asked of them here follows from that data,
so that a new rule is judged like the old ones.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator

from layoutc import formats, rules
from layoutc.diagnostics import Diagnostic, did_you_mean, listed, quoted
from layoutc.formats import BUILTIN, Format
from layoutc.rules import RULES, Parameter, Rule
from layoutc.schema import FormatDef, Spec
from layoutc.source import Path, Source

_INTEGER_RANGE = 126  # integer parameters are exponents: two to their power must be a normal fp32 number


def own_formats_are_sound(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A spec's own formats have usable names, at most 8 bits, and values that fp32 can tell apart."""
    for name, definition in spec.formats.items():
        where: Path = ("formats", name)
        if name in BUILTIN:
            message = f"`{name}` is a built-in format and can't be defined again"
            yield source.find("LC306", message, source.key(where), help=f"rename it, for instance `my_{name}`")
        elif not re.fullmatch(r"[a-z][a-z0-9_]{0,19}", name):
            help = "lower-case letters, digits and underscores, a letter first, at most 20"
            yield source.find("LC305", f"{quoted(name)} can't name a format", source.key(where), help=help)
        elif problem := _unsound(name, definition):
            key, message, help = problem
            yield source.find("LC305", f"format `{name}` {message}", source.value((*where, key)), help=help)
        elif definition.torch is not None and definition.torch not in _torch_names(_own(name, definition)):
            wanted = {fmt.torch: fmt.name for fmt in BUILTIN.values() if fmt.torch}
            is_known = definition.torch in wanted
            label = source.value((*where, "torch"), "" if is_known else did_you_mean(definition.torch, wanted))
            why = "a dtype whose codes mean other numbers would change values without a word"
            help = f"delete `torch`; it may name {listed(wanted)}, for a format with the same bits"
            yield source.find(
                "LC305", f"format `{name}` is not torch's {quoted(definition.torch)}", label, why=why, help=help
            )
        elif name not in (spec.element.format, spec.scale.format):
            help = "use it in `element` or `scale`, or delete it"
            yield source.find("LC350", f"format `{name}` is defined and not used", source.key(where), help=help)


def formats_exist(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The element's and the scale's formats are built in or the spec's own."""
    known = [*BUILTIN, *(name for name in spec.formats if name not in BUILTIN)]
    for part, name in (("element", spec.element.format), ("scale", spec.scale.format)):
        if name not in known:
            label = source.value((part, "format"), did_you_mean(name, known))
            help = f"one of: {listed(known)}; or define it under `formats`"
            yield source.find("LC304", f"{quoted(name)} is not a known format", label, help=help)


def element_format_holds_elements(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Elements have up to 8 bits, a sign and a zero; packing is stated only where codes are packed."""
    fmt, label = _format(spec, spec.element.format), source.value(("element", "format"))
    if fmt is None:
        return
    help = f"built-in formats for elements: {listed(name for name, one in BUILTIN.items() if not _no_element(one))}"
    if reason := _no_element(fmt):
        yield source.find("LC307", f"{fmt.name} can't be an element format: {reason}", label, help=help)
    elif fmt.bits == 8 and "pack" in spec.element.model_fields_set:
        label = source.value(("element", "pack"), "has no effect")
        width = source.value(("element", "format"), "fills a byte")
        yield source.find("LC351", "8-bit codes are not packed", label, width, help="delete `pack`")


def scale_format_holds_scales(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A scale takes whole bytes, and can say NaN: for narrow elements it is the only place where a NaN survives."""
    fmt, label = _format(spec, spec.scale.format), source.value(("scale", "format"))
    if fmt is None or fmt.is_f32:
        return
    help = f"built-in formats for scales: {listed(name for name, one in BUILTIN.items() if _holds_scales(one))}"
    if fmt.bits != 8:
        message = f"{fmt.name} can't be a scale format: it has {fmt.bits} bits, and a scale fills a byte"
        yield source.find("LC308", message, label, help=help)
    elif not fmt.nan:
        message = f"{fmt.name} can't be a scale format: it has no NaN"
        why = "a block that holds a NaN gets a NaN scale; without one it would turn into numbers"
        yield source.find("LC308", message, label, why=why, help=help)


def rule_exists(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The scale rule is a known one."""
    if spec.scale.rule not in RULES:
        label = source.value(("scale", "rule"), did_you_mean(spec.scale.rule, RULES))
        yield source.find(
            "LC320", f"{quoted(spec.scale.rule)} is not a known scale rule", label, help=f"one of: {listed(RULES)}"
        )


def parameters_fit_rule(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Each parameter belongs to the rule, has its type, and is a number that the arithmetic can use."""
    rule = RULES.get(spec.scale.rule)
    if rule is None:
        return
    for key, value in spec.scale.parameters.items():
        where: Path = ("scale", key)
        parameter = rule.parameters.get(key)
        if parameter is None:
            owners = [name for name, other in RULES.items() if key in other.parameters]
            own = listed(rule.parameters)
            yield source.find(
                "LC321",
                f"`{key}` is a parameter of {' and '.join(owners)}, not of {rule.name}",
                source.key(where),
                source.value(("scale", "rule"), f"parameters: {own}" if own else "takes no parameters"),
                help=f"delete it, or write `rule: {owners[0]}`",
            )
        elif problem := _parameter_problem(parameter, value):
            label = source.value(where, did_you_mean(str(value), parameter.choices))
            yield source.find("LC322", f"{quoted(value)} is not a valid `scale.{key}`", label, help=problem)


def tensor_level_is_needed(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A rule that reads the tensor's amax has it, and no other rule asks for it."""
    rule = RULES.get(spec.scale.rule)
    if rule is None:
        return
    label = source.value(("scale", "rule"))
    if rule.needs_tensor_amax and spec.tensor is None:
        help = "add `tensor: {amax: f32}` at the top level"
        yield source.find("LC323", f"{rule.name} reads the whole tensor's amax, which is not kept", label, help=help)
    elif not rule.needs_tensor_amax and spec.tensor is not None:
        other = next((name for name, one in RULES.items() if one.needs_tensor_amax), "")
        yield source.find(
            "LC324",
            f"`tensor` is given, but {rule.name} does not use it",
            source.key(("tensor",)),
            source.value(("scale", "rule"), "reads the amax of a block only"),
            help=f"delete `tensor`, or write `rule: {other}`",
        )


def history_is_for_whole_tensors(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A history keeps one amax a step, so there must be one scale."""
    if spec.scale.history is None:
        return
    label = source.key(("scale", "history"), "keeps one amax for each step")
    for name in ("rowwise", "columnwise"):
        orientation = getattr(spec.orientations, name)
        if orientation is not None and (orientation.block.m, orientation.block.k) != ("all", "all"):
            where: Path = ("orientations", name, "block")
            message = f"a history needs one scale for the whole tensor, but {name} has many"
            block = source.value(where, f"blocks of {orientation.block.m} x {orientation.block.k}")
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
        _format(spec, spec.scale.format),
        _format(spec, spec.element.format),
    )
    if rule is None or fmt is None or element is None or not _holds_scales(fmt) or _no_element(element):
        return
    label = source.value(("scale", "format"))
    if fmt.is_f32 and spec.scale.round != "nearest":
        rounding = source.value(("scale", "round"), "has nothing to round")
        yield source.find("LC326", "an f32 scale is stored as it is computed", rounding, label, help="delete `round`")
    used = source.value(("scale", "rule"), "computes this scale")
    problem = _misfit(rule, fmt, element, spec.scale.parameters)
    if problem:
        message, why, help = problem
        yield source.find("LC327", message, label, used, why=why, help=help)


def nan_survives(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A NaN in the weight stays one, in its code or in its block's scale: no rule may turn it into a number."""
    rule, element = RULES.get(spec.scale.rule), _format(spec, spec.element.format)
    if rule is None or element is None or _no_element(element) or element.nan:
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
    rule, wanted = RULES.get(spec.scale.rule), dict[int | str, Path]()
    for name in ("rowwise", "columnwise"):
        orientation = getattr(spec.orientations, name)
        if orientation is not None and orientation.block.m == "all":
            wanted[orientation.block.k] = ("orientations", name, "block")
    if rule is not None and rule.needs_tensor_amax and spec.tensor is not None:
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


CHECKS = (
    own_formats_are_sound,
    formats_exist,
    element_format_holds_elements,
    scale_format_holds_scales,
    rule_exists,
    parameters_fit_rule,
    tensor_level_is_needed,
    history_is_for_whole_tensors,
    scale_format_fits_rule,
    nan_survives,
    shards_share_one_amax,
)


def _defaults(rule: Rule) -> dict[str, float | int | bool | str]:
    return {key: parameter.default for key, parameter in rule.parameters.items()}


def _replaces_nan(rule: Rule, parameters: dict[str, float | int | bool | str]) -> bool:
    return any("isnan" in step.expression for step in rule.active_steps({**_defaults(rule), **parameters}))


def element_bits(spec: Spec) -> int | None:
    """Bits of an element; None where its format is refused."""
    fmt = _format(spec, spec.element.format)
    return None if fmt is None or _no_element(fmt) else fmt.bits


def _own(name: str, definition: FormatDef) -> Format:
    return formats.make(name, definition.model_dump())


def _format(spec: Spec, name: str) -> Format | None:
    """A sound format by name; None where it is unknown or refused."""
    if name in BUILTIN:
        return BUILTIN[name]
    definition = spec.formats.get(name)
    return None if definition is None or _unsound(name, definition) else _own(name, definition)


def _unsound(name: str, definition: FormatDef) -> tuple[str, str, str] | None:
    """(key, what is wrong, help) for a format that no code could be written for."""
    fmt = _own(name, definition)
    floating = ("sign", "exponent", "mantissa", "bias")
    given = [key for key in (*floating, "inf", "nan", "torch") if key in definition.model_fields_set]
    if definition.integer is not None:
        if given:
            return given[0], f"is an integer, which has no `{given[0]}`", "delete one of the two"
        return None
    if missing := [key for key in floating if getattr(definition, key) is None]:
        key = given[0] if given else next(iter(definition.model_fields_set), "sign")
        return key, f"lacks {listed(missing)}", "state sign, exponent, mantissa and bias, or `integer`"
    codes = 2 ** (fmt.exponent + fmt.mantissa)
    special = sorted({*definition.inf, *definition.nan})
    if fmt.bits > 8:
        return "exponent", f"has {fmt.bits} bits", "sign + exponent + mantissa must be at most 8 bits"
    if special and special[-1] >= codes:
        key = "nan" if special[-1] in definition.nan else "inf"
        return key, f"has no code 0x{special[-1]:02x}", f"codes without their sign bit go from 0 to 0x{codes - 1:02x}"
    if both := set(definition.inf) & set(definition.nan):
        return "nan", f"takes code 0x{min(both):02x} for both inf and NaN", "list each code once"
    if special != list(range(codes - len(special), codes)):
        return (
            "nan" if definition.nan else "inf",
            "has numbers above its inf or NaN",
            "inf and NaN take the highest codes",
        )
    if codes - len(special) < 2:
        return "exponent", "has fewer than two numbers", "give it more bits or fewer NaN codes"
    try:
        exact = all(formats.f32(value) == value for value in fmt.magnitudes)
        for rounding in ("nearest", "up", "down"):
            formats.thresholds(fmt, rounding)
    except (ValueError, OverflowError, struct.error):
        exact = False
    if not exact:
        return "bias", "has values that fp32 can't hold or round between", "choose a bias nearer to the middle"
    return None


def _torch_names(fmt: Format) -> set[str]:
    """Torch dtypes whose codes mean what this format's codes mean."""
    return {builtin.torch for builtin in BUILTIN.values() if builtin == fmt and builtin.torch}


def _no_element(fmt: Format) -> str:
    """Why a format can't hold elements, or nothing."""
    if fmt.bits > 8:
        return f"it has {fmt.bits} bits, an element at most 8"
    if not fmt.sign:
        return "it has no sign"
    return "" if fmt.subnormals else "it has no zero"


def _holds_scales(fmt: Format) -> bool:
    return fmt.is_f32 or (not fmt.integer and (fmt.bits == 8 and bool(fmt.nan)))


def _parameter_problem(parameter: Parameter, value: float | bool | str) -> str:
    """What a parameter's value must be, where it isn't."""
    if parameter.type == "choice":
        return "" if value in parameter.choices else f"one of: {listed(parameter.choices)}"
    if parameter.type == "boolean":
        return "" if isinstance(value, bool) else "write true or false"
    if isinstance(value, (bool, str)) or (parameter.type == "integer" and not isinstance(value, int)):
        return "write a whole number" if parameter.type == "integer" else "write a number"
    if parameter.type == "integer":
        return "" if abs(value) <= _INTEGER_RANGE else f"a whole number from -{_INTEGER_RANGE} to {_INTEGER_RANGE}"
    fits = math.isfinite(value) and (value == 0 or 2.0**-126 <= value <= formats.F32_MAX)
    return "" if fits else "zero, or a positive number that fp32 can hold"


def _reads(rule: Rule, name: str) -> frozenset[str]:
    """Every name and function that the last step called `name` mentions."""
    expression = [step.expression for step in rule.steps if step.name == name][-1]
    return rules.names(expression) | frozenset(re.findall(r"(\w+)\(", expression))


def _misfit(
    rule: Rule, fmt: Format, element: Format, parameters: dict[str, float | int | bool | str]
) -> tuple[str, str, str] | None:
    """(headline, why, help) where the scale's format can't hold what the rule computes."""
    self_consistent = "from_scale" in _reads(rule, "multiplier")
    rounding = next((s.when for s in rule.steps if s.when and "floor_power_of_two" in s.expression), None)
    powers_only = rounding is not None and parameters.get(rounding) is True
    wide = fmt.mantissa == 0 and fmt.magnitudes[0] <= 2.0**-127 and fmt.max >= 2.0**127
    if not self_consistent and not fmt.is_f32 and not (powers_only and wide):
        holds = "powers of two only" if fmt.mantissa == 0 else f"{fmt.mantissa + 1} significant bits"
        return (
            f"{rule.name} computes a scale that {fmt.name} can't hold exactly: {holds}",
            "elements would be encoded with one multiplier and decoded with another",
            "write `format: f32`" + (f", or add `{rounding}: true`" if wide and rounding else ""),
        )
    if self_consistent and "minimum" not in _reads(rule, "multiplier") and (fmt.is_f32 or fmt.magnitudes[0] == 0):
        return (
            f"{rule.name} needs a scale format without a zero",
            f"a block of zeros would get the scale 0, and the multiplier 1 / 0; {fmt.name} has a zero",
            "write `format: e8m0`, or another rule",
        )
    uses_range = any("scale_max" in rules.names(step.expression) for step in rule.steps)
    if uses_range and (fmt.is_f32 or fmt.max * element.max > 2.0**120):
        return (
            f"{rule.name} needs a scale format of a narrower range",
            f"it spreads the tensor over {fmt.name}'s range times {element.name}'s, which overflows fp32",
            "write `format: e4m3`",
        )
    return None
