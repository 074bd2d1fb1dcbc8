"""An independent implementation of the rules' language, rules.yaml in numpy fp32, of blocks, and of stored scales.

A new function or constant of the language needs an entry in the tables below.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any, NamedTuple

import numpy as np
import yaml

from layoutc.conformance.model.codes import F32, Array, codes_of, power, rounded
from layoutc.layout.layout import Level, Quantization
from layoutc.spec.formats import Format

FLT_MAX = np.finfo(np.float32).max


@cache
def programs() -> dict[str, Any]:
    """The content of rules.yaml."""
    text = files("layoutc.spec").joinpath("rules.yaml").read_text(encoding="utf-8")
    rules: dict[str, Any] = yaml.safe_load(text)
    return rules


# ------------------------------------------------------------------------------------------------ the rules' language
def _largest(q: Quantization) -> Fraction:
    return codes_of(q.element).largest


def _largest_scale(q: Quantization) -> Fraction:
    return Fraction(float(FLT_MAX)) if q.scale.is_f32 else codes_of(q.scale).largest


def _smallest(q: Quantization) -> Fraction:
    return min(codes_of(q.element).finite.values())


def _power_below(value: Fraction) -> Fraction:
    """The largest power of two that is at most a value."""
    power = Fraction(1)
    while power > value:
        power /= 2
    while power * 2 <= value:
        power *= 2
    return power


def _bound(q: Quantization) -> Fraction:
    return Fraction(float(dict(q.parameters)["bound"]))


CONSTANTS: dict[str, Callable[[Quantization], Fraction]] = {
    "element_max": _largest,
    "inverse_element_max": lambda q: 1 / _largest(q),
    "element_min": _smallest,
    "element_half_range": lambda q: (_largest(q) - _smallest(q)) / 2,
    "element_step": lambda q: _largest(q) / sorted(set(codes_of(q.element).finite.values()))[-2],
    "bounded_range": lambda q: _bound(q) * _largest(q),
    "inverse_bounded_range": lambda q: 1 / (_bound(q) * _largest(q)),
    "element_span": lambda q: _largest(q) - _smallest(q),
    "inverse_element_span": lambda q: 1 / (_largest(q) - _smallest(q)),
    "inverse_element_power": lambda q: 1 / _power_below(_largest(q)),
    "scale_max": _largest_scale,
    "scale_min": lambda q: min(value for value in codes_of(q.scale).finite.values() if value > 0),
    "inverse_range": lambda q: 1 / (_largest(q) * _largest_scale(q)),
    "inverse_margin": lambda q: power(-int(dict(q.parameters)["margin"])),
    "f32_max": lambda q: Fraction(float(FLT_MAX)),
}


@cache
def constant(name: str, quantization: Quantization) -> np.float32:
    """A constant of the rules' language, in fp32."""
    return rounded(CONSTANTS[name](quantization))


@cache
def parsed(text: str) -> ast.expr:
    """Parses an expression of the rules' language."""
    return ast.parse(text, mode="eval").body


def _floor_power_of_two(x: Array) -> Array:
    """2^floor(log2 x); zero if that is not a normal number; keeps NaN and inf."""
    _, exponent = np.frexp(np.where(np.isfinite(x) & (x > 0), x, F32(1)))
    power = np.where(exponent - 1 >= -126, np.ldexp(F32(1), exponent - 1), F32(0))
    power = np.where(x == 0, F32(0), power)
    result: Array = np.where(np.isfinite(x), power, x).astype(F32)
    return result


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "minimum": np.minimum,
    "maximum": np.maximum,
    "abs": np.abs,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "where": lambda test, a, b: np.where(test, a, b).astype(F32),
    "floor_power_of_two": _floor_power_of_two,
}
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.Eq: operator.eq,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
}


@dataclass
class Evaluator:
    """Evaluates expressions of a quantization's rule. Every operation is one fp32 operation in numpy."""

    quantization: Quantization
    names: dict[str, Array]
    input_max: float = float(FLT_MAX)

    def value(self, text: str) -> Array:
        """The value of an expression."""
        with np.errstate(all="ignore"):
            found: Array = self._value(parsed(str(text)))
        return found

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return F32(node.value)  # type: ignore[arg-type]
            case ast.Name():
                return self._name(node.id)
            case ast.BinOp():
                return OPERATORS[type(node.op)](self._value(node.left), self._value(node.right))
            case ast.Compare():
                return OPERATORS[type(node.ops[0])](self._value(node.left), self._value(node.comparators[0]))
            case ast.UnaryOp(op=ast.USub()):
                return -self._value(node.operand)
            case ast.Call(func=ast.Name(id=name)):
                return self._call(name, [self._value(argument) for argument in node.args])
        raise NotImplementedError(f"the independent model can't read {ast.dump(node)}")

    def _name(self, name: str) -> Any:
        parameters = dict(self.quantization.parameters)
        if name in self.names:
            return self.names[name]
        if name in CONSTANTS:
            return constant(name, self.quantization)
        parameter = parameters.get(name, parameters.get(name.replace("_", "-")))
        if name == "input_max" or parameter == "input-max":
            return F32(self.input_max)
        if parameter == "f32-max":
            return FLT_MAX
        if isinstance(parameter, int | float):
            return F32(parameter)
        raise NotImplementedError(f"the independent model does not know `{name}`")

    def _call(self, name: str, arguments: list[Any]) -> Any:
        q = self.quantization
        if name == "to_scale":
            return to_stored(q.scale, q.rounding, q.scales, arguments[0])
        if name == "from_scale":
            return from_stored(q.scale, q.scales, arguments[0])
        if name == "to_zero" and q.zero is not None:
            return to_stored(q.zero, "nearest", q.zeros, arguments[0])
        if name not in FUNCTIONS:
            raise NotImplementedError(f"the independent model does not know `{name}()`")
        return FUNCTIONS[name](*arguments)


# ------------------------------------------------------------------------------------------- what is stored of scales
class Stored(NamedTuple):
    """Scales or zero points of blocks in super-blocks: their codes, a scale per super-block, and the mean."""

    codes: Array
    scale: Array
    offset: Array | None


def to_stored(fmt: Format, rounding: str, level: Level | None, values: Array) -> Any:
    """Scales or zero points as stored: fp32 values, codes, or codes and what a super-block shares."""
    if level is not None:
        return to_level(level, values)
    return values if fmt.is_f32 else codes_of(fmt).encode(values, rounding)


def from_stored(fmt: Format, level: Level | None, stored: Any) -> Array:
    """The fp32 values of stored scales or zero points."""
    if level is not None:
        return from_level(level, Stored(*stored))
    values: Array = stored if fmt.is_f32 else codes_of(fmt).decode(stored)
    return values


def to_level(level: Level, values: Array) -> Stored:
    """Quantizes scales of blocks by the level's rule: codes, and a scale per super-block."""
    q, (rows, columns) = level.quantization, values.shape
    bm, bk = q.block.m or rows, q.block.k or columns
    offset = None
    if level.centered:
        counts = block_reduce(np.add, np.ones_like(values), bm, bk)
        offset = block_sum(values, bm, bk, True) / counts
        values = values - spread(offset, bm, bk, rows, columns)
    names: dict[str, Array] = {"amax": block_reduce(np.maximum, np.abs(values), bm, bk)}
    for name, expression in steps_of(q, "steps"):
        names[name] = Evaluator(q, names).value(expression)
    by = spread(names["divisor" if "divisor" in names else "multiplier"], bm, bk, rows, columns)
    with np.errstate(all="ignore"):
        scaled = values / by if "divisor" in names else values * by
    return Stored(codes_of(q.element).encode(scaled, "nearest"), names["scale"], offset)


def from_level(level: Level, stored: Stored) -> Array:
    """The fp32 values of codes with super-block scales."""
    q, shape = level.quantization, stored.codes.shape
    bm, bk = q.block.m or shape[0], q.block.k or shape[1]
    factor = Evaluator(q, {"scale": stored.scale}).value(programs()[q.rule]["decode"])
    with np.errstate(all="ignore"):
        values = codes_of(q.element).decode(stored.codes) * spread(factor, bm, bk, *shape)
        return values if stored.offset is None else values + spread(stored.offset, bm, bk, *shape)


def steps_of(q: Quantization, part: str) -> list[tuple[str, str]]:
    """The active steps of a part of a rule's program, given the parameters."""
    parameters, active = {**dict(q.parameters), "inverse-overflows": _inverse_overflows(q)}, []
    for entry in programs()[q.rule][part]:
        on, off = (np.atleast_1d(entry.get(key) or []).tolist() for key in ("when", "unless"))
        if all(parameters[one] for one in on) and not any(parameters[one] for one in off):
            active += [(key, str(text)) for key, text in entry.items() if key not in ("when", "unless")]
    return active


@cache
def _inverse_overflows(q: Quantization) -> bool:
    """True if 1 / (smallest scale * smallest super-block scale) overflows fp32."""
    if q.scale.is_f32 or (q.scales is not None and (q.scales.centered or q.scales.quantization.scale.is_f32)):
        return True
    formats = [q.scale] if q.scales is None else [q.scale, q.scales.quantization.scale]
    finite = [[abs(value) for value in codes_of(fmt).finite.values()] for fmt in formats]
    if len(formats) == 2 and 0 in finite[1]:
        return True
    least = prod(min(value for value in values if value) for values in finite)
    return 1 / least > Fraction(float(FLT_MAX))


# ------------------------------------------------------------------------------------------------------------- blocks
def block_reduce(reduce: np.ufunc, x: Array, bm: int, bk: int) -> Array:
    """Reduces each block, including partial ones; minimum and maximum propagate NaN."""
    rows = reduce.reduceat(x, np.arange(0, x.shape[0], bm), axis=0)
    reduced: Array = reduce.reduceat(rows, np.arange(0, x.shape[1], bk), axis=1)
    return reduced


def spread(values: Array, bm: int, bk: int, m: int, k: int) -> Array:
    """Broadcasts values of blocks to their elements, by indexing."""
    values = np.atleast_2d(values)
    rows = np.minimum(np.arange(m) // bm, values.shape[0] - 1)
    columns = np.minimum(np.arange(k) // bk, values.shape[1] - 1)
    elements: Array = values[rows[:, None], columns[None, :]]
    return elements


def block_sum(values: Array, bm: int, bk: int, rowwise: bool) -> Array:
    """Sums of blocks in rules.yaml's order: one by one along the contracted axis, then pairwise by halves."""
    if not rowwise:
        return block_sum(values.T, bk, bm, True).T
    rows, columns = -(-values.shape[0] // bm), -(-values.shape[1] // bk)
    sums = np.zeros((rows, columns), F32)
    for i, j in np.ndindex(rows, columns):
        block = values[i * bm : (i + 1) * bm, j * bk : (j + 1) * bk]
        lines = [F32(np.add.accumulate(line, dtype=F32)[-1]) for line in block]
        lines += [F32(0)] * ((1 << (bm - 1).bit_length()) - len(lines))
        while len(lines) > 1:
            half = len(lines) // 2
            lines = [low + high for low, high in zip(lines[:half], lines[half:], strict=True)]
        sums[i, j] = lines[0]
    return sums
