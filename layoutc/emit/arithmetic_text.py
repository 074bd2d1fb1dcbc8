"""The text of a quantization's arithmetic in torch: codecs, the scale rule, levels of scales, constants."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from layoutc.emit import rule_text
from layoutc.emit.code import Lines, call, commented
from layoutc.layout.layout import Level, Quantization
from layoutc.plan import conversions
from layoutc.plan.kernels import inputs_of, level_suffix
from layoutc.spec.formats import Format, codebook_order, codebook_thresholds, thresholds
from layoutc.spec.rule_constants import CONSTANTS, constant

LONGEST = 120  # of a line with its comment, as files are formatted
_LONG = 32  # tables with more entries are printed as a formula, if there is one


@dataclass(frozen=True)
class CandidatesText:
    """How a rule that tries several scales chooses one of them."""

    name: str
    tried: str
    error: list[str]
    arguments: str
    passed: str


@dataclass(frozen=True)
class RuleText:
    """A scale rule as a function."""

    returns: str
    results: str
    made: str
    measured: str
    arguments: str
    summary: str
    steps: list[str]
    candidates: CandidatesText | None


@dataclass(frozen=True)
class ArithmeticText:
    """Codecs and the scale rule of one quantization. `suffix`: of its functions' names.

    codecs: one line per format, with a comment. levels: how scales and zero points of super-blocks are stored.
    """

    suffix: str
    codecs: list[str]
    rule: RuleText
    levels: list[LevelText]


@dataclass(frozen=True)
class LevelText:
    """The functions that store scales, or zero points, under scales of super-blocks."""

    name: str
    doc: str
    encode: list[str]
    decode: list[str]


@dataclass(frozen=True)
class ConstantText:
    """A constant: its name, its value as code, and a comment."""

    name: str
    value: str
    doc: str


def arithmetic_text(quantization: Quantization, suffix: str) -> ArithmeticText:
    """Codecs and the scale rule of one quantization."""
    return ArithmeticText(
        suffix,
        codecs=[line for what, fmt, how in _coded(quantization) for line in _codec(what, fmt, how, suffix)],
        rule=_rule(quantization, suffix),
        levels=[_level(kind, level, suffix) for kind, level in quantization.own_levels.items()],
    )


def _level(kind: str, level: Level, suffix: str) -> LevelText:
    """Functions that encode blocks' values under their level, and decode them."""
    q, of = level.quantization, level_suffix(kind, suffix)
    block, factor = f"{q.block.m}, {q.block.k}", rule_text.factor(q)
    stored = ["codes", "scale", *(["offset"] if level.centered else [])]
    values, encode = "x", ["m, k = x.shape"]
    if level.centered:
        encode.append(f"offset = num.block_mean(x, {block})")
        values = f"x - num.per_element(offset, {block}, m, k)"
    encode += [
        f"blocks = num.to_blocks({values}, {block})",
        f"scale, {factor} = scales{of}(num.block_amax(blocks))",
        f"codes = encode{of}(num.from_blocks({rule_text.scaled('blocks', q)}, m, k))",
        f"return {', '.join(stored)}",
    ]
    by = rule_text.expression(q.definition.decode, q, {}, of)
    decoded = f"decode{of}(codes) * num.per_element({by}, {block}, *codes.shape)"
    if level.centered:
        decoded += f" + num.per_element(offset, {block}, *codes.shape)"
    decode = [f"{', '.join(stored)} = stored", f"return {decoded}"]
    what = {"scale": "Scales", "zero": "Zero points"}[kind]
    size = f"{level.covers.m or 'all'}x{level.covers.k or 'all'}"
    doc = f"{what} of blocks -> their {q.element.name} codes, and their {q.scale.name} scale of each {size} super-block"
    doc += ", with the mean that was subtracted before" if level.centered else ""
    return LevelText(f"{kind}{suffix}", doc, encode, decode)


def _rule(quantization: Quantization, suffix: str) -> RuleText:
    rule, zero = quantization.definition, quantization.zero
    levels = [quantization.scales, *([quantization.zeros] if zero else [])]
    made = ["scale as stored", *(["zero point as stored"] if zero else [])]
    made.append(f"{rule_text.factor(quantization)} of the elements")
    return RuleText(
        returns=", ".join([*("tuple[Tensor, ...]" if level else "Tensor" for level in levels), "Tensor"]),
        results=rule_text.results(quantization),
        made=f"({', '.join(made)})",
        measured="range" if inputs_of(quantization).block_range else "amax",
        arguments=", ".join(one.typed for one in rule_text.scale_arguments(quantization)),
        summary=rule.summary[0].upper() + rule.summary[1:],
        steps=_steps(quantization, suffix),
        candidates=_candidates(quantization, suffix),
    )


def _steps(quantization: Quantization, suffix: str) -> list[str]:
    """The rule's steps, except those that compute an amax's stored level, which are a separate function."""
    lines, levels = rule_text.steps(quantization, suffix), len(quantization.definition.tensor)
    return ["tensor_level = level_of(tensor_amax)", *lines[levels:]] if levels else lines


def _candidates(quantization: Quantization, suffix: str) -> CandidatesText | None:
    rule = quantization.definition
    if not rule.candidates:
        return None
    shared = rule_text.shared_arguments(quantization)
    return CandidatesText(
        name=rule.candidate or "",
        tried=", ".join(rule_text.candidates(quantization, suffix)),
        error=rule_text.error_steps(quantization, suffix),
        arguments="".join(f", {one.typed}" for one in shared),
        passed="".join(f", {one.name}" for one in shared),
    )


def _coded(quantization: Quantization) -> Iterator[tuple[str, Format, str]]:
    """What is stored as codes, with format and rounding; scales and zero points under levels are left out."""
    yield "element", quantization.element, quantization.element_rounding
    if not (quantization.scales or quantization.scale.is_f32):
        yield "scale", quantization.scale, quantization.rounding
    if quantization.zero and not (quantization.zeros or quantization.zero.is_f32):
        yield "zero", quantization.zero, "nearest"


def _codec(what: str, fmt: Format, rounding: str, suffix: str) -> Lines:
    """Lines that encode and decode a format: by torch's dtype, or by tables of thresholds and values."""
    prefix, by_chance = f"{rule_text.prefix_of(suffix)}{what.upper()}", rounding == "stochastic"
    sign_bit = fmt.exponent + fmt.mantissa if fmt.sign else None
    nan: dict[str, str | int] = {"nan": f"0x{fmt.nan_code:02X}"}
    if named := _named(fmt, rounding):
        made = f"codecs.{named}"
    elif fmt.values:
        made = call("codecs.codebook", f"{prefix}_STEPS", f"{prefix}_CODES", f"{prefix}_VALUES", **nan)
    elif fmt.integer:
        nan |= {"fraction": fmt.fraction} if fmt.fraction else {}
        nan |= {} if fmt.offset is None else {"offset": fmt.offset}
        function = "integer_by_chance" if by_chance else "integer"
        made = call(f"codecs.{function}", bits=fmt.integer, lowest=fmt.lowest, **nan)
    elif by_chance:
        values = f"torch.{fmt.torch}" if fmt.torch else f"{prefix}_VALUES"
        made = call("codecs.by_chance", f"{prefix}_MAGNITUDES", values, str(sign_bit), **nan)
    elif fmt.is_wide or (fmt.torch and rounding == "nearest"):
        function = "half" if fmt.is_wide else "cast"
        made = call(f"codecs.{function}", f"torch.{fmt.torch}", repr(fmt.max), **nan)
    else:
        made = call("codecs.table", f"{prefix}_STEPS", f"{prefix}_VALUES", str(sign_bit), **nan)
    # A format without NaN encodes NaN as its largest positive value, the most conspicuous code.
    doc = f"{fmt.name}, {rule_text.ROUNDED[rounding]}" + ("" if fmt.nan or fmt.is_wide else "; no NaN: the largest")
    of = f"{'' if what == 'element' else f'_{what}'}{suffix}"
    return commented(f"encode{of}, decode{of} = {made}", doc, LONGEST)


def _named(fmt: Format, rounding: str) -> str:
    """The runtime's name of a format, whose tables the reference then omits; "" for other formats."""
    names = conversions.named(fmt, rounding)
    return names.codec if names else ""


def constants_of(quantization: Quantization, suffix: str) -> list[ConstantText]:
    """The constants of one quantization's codecs and rule."""
    used, prefix = rule_text.uses(quantization), rule_text.prefix_of(suffix)
    constants: list[ConstantText] = []

    def add(name: str, value: str, doc: str = "") -> None:
        constants.append(ConstantText(prefix + name, value, doc))

    for what, fmt, rounding in _coded(quantization):
        kind, native, by_chance = what.upper(), fmt.torch and rounding == "nearest", rounding == "stochastic"
        if f"{kind}_MAX" in used:
            add(f"{kind}_MAX", repr(fmt.max))
        if fmt.values:
            by_formula = len(fmt.values) > _LONG and fmt.ties == "down"  # a table of thresholds would be long
            if by_formula:
                add(f"{kind}_VALUES", table_of_values(fmt), "the value of each code")
            count = len(fmt.values)  # the list's; the table has 0 for each code past its end
            listed = "" if count == 1 << fmt.bits else f"[:{count}]"
            by_values = f"num.codebook_steps({prefix}{kind}_VALUES{listed})"
            steps = by_values if by_formula else table_of_codebook_steps(fmt)
            add(f"{kind}_STEPS", steps, "thresholds: from here on, x gets the next value")
            add(f"{kind}_CODES", table_of_codebook_codes(fmt), "by ascending value")
            if not by_formula:
                add(f"{kind}_VALUES", table_of_values(fmt), "the value of each code")
        if fmt.values or _named(fmt, rounding):
            continue
        if by_chance and not fmt.integer:
            add(f"{kind}_MAGNITUDES", table_of_magnitudes(fmt), "without a sign, ascending")
            if not fmt.torch:
                add(f"{kind}_VALUES", table_of_values(fmt), "the value of each code")
        elif not native and not fmt.integer:
            add(f"{kind}_STEPS", table_of_steps(fmt, rounding), "thresholds: from here on, |x| gets the next code")
            add(f"{kind}_VALUES", table_of_values(fmt), "the value of each code")
    for name in CONSTANTS:
        if name.upper() in used:
            value, doc = constant(name, quantization.element, quantization.scale, dict(quantization.parameters))
            add(name.upper(), repr(value), doc)
    return constants


# ------------------------------------------------- tables: built once per format, because recipes share a few formats
@cache
def table_of_values(fmt: Format) -> str:
    """The value of each code."""
    return _table(fmt.value(code) for code in range(2**fmt.bits))


@cache
def table_of_magnitudes(fmt: Format) -> str:
    """The finite magnitudes, ascending."""
    return _table(fmt.magnitudes)


@cache
def table_of_steps(fmt: Format, rounding: str) -> str:
    """The thresholds at which codes step up."""
    return _table(thresholds(fmt, rounding))


@cache
def table_of_codebook_steps(fmt: Format) -> str:
    """The thresholds between a codebook's values."""
    return _table(codebook_thresholds(fmt))


@cache
def table_of_codebook_codes(fmt: Format) -> str:
    """A codebook's codes, by ascending value."""
    order = codebook_order(fmt)
    if len(order) > _LONG and order == tuple(range(len(order))):
        return f"tuple(range({len(order)}))"
    return _lines(", ".join(map(str, codebook_order(fmt))) + ",")


def _table(values: Iterable[float]) -> str:
    """A tuple of fp32 values as code: a formula that gives exactly these values if there is one, else the values."""
    items = list(values)
    if len(items) > _LONG and items[1] > 0:
        for formula in _formulas(items):
            if list(map(repr, eval(formula, {"float": float, "range": range}))) == list(map(repr, items)):
                return formula
    special = {"nan": 'float("nan")', "inf": 'float("inf")', "-inf": '-float("inf")'}
    text = ", ".join(special.get(repr(value), repr(value)) for value in items) + ","
    return _lines(text)


def _lines(text: str) -> str:
    """A tuple from entries that each end in a comma."""
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
