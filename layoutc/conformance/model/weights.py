"""A second reading of a spec's arithmetic: rules.yaml, evaluated in numpy fp32, with codes by definition.

It shares only the spec, the text of the rules and the layout's integers with the generated references. A new function
or constant of the rules' language needs one more entry in the tables below.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import yaml

from layoutc.conformance.model.codes import F32, Array, codes_of, pack, power, rounded, unpack
from layoutc.conformance.model.hadamard import growth, transformed
from layoutc.conformance.model.philox import element_bits
from layoutc.layout.layout import Layout, Plane, Quantization, Source

FLT_MAX = np.finfo(np.float32).max
Planes = dict[str, Array]


@cache
def programs() -> dict[str, Any]:
    """The rules as rules.yaml has them."""
    text = files("layoutc.spec").joinpath("rules.yaml").read_text(encoding="utf-8")
    rules: dict[str, Any] = yaml.safe_load(text)
    return rules


def planes_of(source: Source) -> tuple[Plane, ...]:
    """Every plane of a source, data first."""
    values = (getattr(source, field.name) for field in fields(source))
    return tuple(value for value in values if isinstance(value, Plane))


# ------------------------------------------------------------------------------------------------ the rules' language
def _largest(q: Quantization) -> Fraction:
    return codes_of(q.element).largest


def _largest_scale(q: Quantization) -> Fraction:
    return Fraction(float(FLT_MAX)) if q.scale.is_f32 else codes_of(q.scale).largest


def _smallest(q: Quantization) -> Fraction:
    return min(codes_of(q.element).finite.values())


def _power_below(value: Fraction) -> Fraction:
    """The largest power of two up to a value."""
    power = Fraction(1)
    while power > value:
        power /= 2
    while power * 2 <= value:
        power *= 2
    return power


def _below_largest(q: Quantization) -> Fraction:
    return sorted(set(codes_of(q.element).finite.values()))[-2]


def _bound(q: Quantization) -> Fraction:
    return Fraction(float(dict(q.parameters)["bound"]))


CONSTANTS: dict[str, Callable[[Quantization], Fraction]] = {
    "element_max": _largest,
    "inverse_element_max": lambda q: 1 / _largest(q),
    "element_min": _smallest,
    "element_half_range": lambda q: (_largest(q) - _smallest(q)) / 2,
    "element_step": lambda q: _largest(q) / _below_largest(q),
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
    """A constant of the rules' language, as an fp32 operation takes it."""
    return rounded(CONSTANTS[name](quantization))


@cache
def parsed(text: str) -> ast.expr:
    """An expression of the rules' language."""
    return ast.parse(text, mode="eval").body


def _floor_power_of_two(x: Array) -> Array:
    """2^floor(log2 x); zero if that is not a normal number; NaN and inf stay."""
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
    """Evaluates expressions of one quantization's rule; every operation is one fp32 operation of numpy."""

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
            return arguments[0] if q.scale.is_f32 else codes_of(q.scale).encode(arguments[0], q.rounding)
        if name == "from_scale":
            return arguments[0] if q.scale.is_f32 else codes_of(q.scale).decode(arguments[0])
        if name == "to_zero" and q.zero is not None:
            return codes_of(q.zero).encode(arguments[0], "nearest")
        if name not in FUNCTIONS:
            raise NotImplementedError(f"the independent model does not know `{name}()`")
        return FUNCTIONS[name](*arguments)


# ------------------------------------------------------------------------------------------------------------- blocks
def block_reduce(reduce: np.ufunc, x: Array, bm: int, bk: int) -> Array:
    """A reduction of each block, also of partial ones; minimum and maximum propagate NaN."""
    rows = reduce.reduceat(x, np.arange(0, x.shape[0], bm), axis=0)
    reduced: Array = reduce.reduceat(rows, np.arange(0, x.shape[1], bk), axis=1)
    return reduced


def spread(values: Array, bm: int, bk: int, m: int, k: int) -> Array:
    """Values of blocks -> one for each element, by indexing."""
    values = np.atleast_2d(values)
    rows = np.minimum(np.arange(m) // bm, values.shape[0] - 1)
    columns = np.minimum(np.arange(k) // bk, values.shape[1] - 1)
    elements: Array = values[rows[:, None], columns[None, :]]
    return elements


def block_sum(values: Array, bm: int, bk: int, rowwise: bool) -> Array:
    """Sums of blocks as rules.yaml orders them: one by one along the contracted axis, then by halves."""
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


# ------------------------------------------------------------------------------------------------------ the whole spec
@dataclass(frozen=True)
class Model:
    """A recipe's quantization and dequantization, as the spec says."""

    layout: Layout
    seed: int = 0  # of random bits

    def quantize(self, x: Array, input_max: float = float(FLT_MAX), amax: Array | None = None) -> Planes:
        """(m, k) fp32 -> every plane as stored. amax: the one that shards share, if it is not that of x."""
        planes: Planes = {}
        for source in self.layout.sources:
            planes |= self.quantize_source(source, x, input_max, amax)
        if self.layout.tensor_amax or self.layout.history:
            stored = np.zeros(max(self.layout.history, 1), F32)
            stored[0] = (np.max(np.abs(x), initial=F32(0)) if amax is None else amax).reshape(-1)[0]
            q = self.layout.sources[0].quantization
            if "tensor" in programs()[q.rule]:
                stored = self.computed(q, {"tensor_amax": stored}, "tensor")["tensor_level"]
            planes["amax"] = stored
        return planes

    def quantize_source(self, source: Source, x: Array, input_max: float, amax: Array | None) -> Planes:
        """The planes of one source."""
        q, (m, k) = source.quantization, x.shape
        bm, bk = q.block.m or max(m, 1), q.block.k or k
        if q.transform is not None:
            largest = np.max(np.abs(x), initial=F32(0)) if amax is None else np.asarray(amax, F32)
            amax = np.asarray(largest * growth(q.transform), F32)
            x = transformed(q.transform, x)
        names = self.scales(source, x, input_max, amax)
        with np.errstate(all="ignore"):
            divides = "divisor" in names
            by = spread(names["divisor" if divides else "multiplier"], bm, bk, m, k)
            zero = F32(0) if q.zero is None else spread(codes_of(q.zero).decode(names["zero"]), bm, bk, m, k)
            of_values = programs()[q.rule].get("zero-is") == "value"
            x = x - zero if of_values else x
            scaled = x / by if divides else x * by
            if q.zero is not None and not of_values:
                scaled = scaled + zero
        codes = self.codes(source, scaled)
        planes = {source.data.name: pack(codes, source.data.bits, q.low_first)}
        for plane in planes_of(source)[1:]:
            planes[plane.name] = np.asarray(names[plane.kind]).reshape(plane.shape(m, k))
        return planes

    def codes(self, source: Source, scaled: Array) -> Array:
        """The codes of scaled values: the nearest, or what random bits say."""
        q, (m, k) = source.quantization, scaled.shape
        if not q.stochastic:
            return codes_of(q.element).encode(scaled, "nearest")
        bits = element_bits(self.seed, m, k, ("rowwise", "columnwise").index(source.name))
        return codes_of(q.element).encode_by_chance(scaled, bits)

    def scales(self, source: Source, x: Array, input_max: float, amax: Array | None) -> dict[str, Array]:
        """Everything that the rule computes for each block, by name."""
        q, (m, k) = source.quantization, x.shape
        bm, bk = q.block.m or max(m, 1), q.block.k or k
        shared = amax is not None and q.block.m is None
        names = {
            "amax": np.asarray(amax, F32).reshape(1, -1) if shared else block_reduce(np.maximum, np.abs(x), bm, bk),
            "lowest": block_reduce(np.minimum, x, bm, bk),
            "highest": block_reduce(np.maximum, x, bm, bk),
            "tensor_amax": np.max(np.abs(x)).reshape(1) if amax is None else np.asarray(amax, F32).reshape(-1),
        }
        tried = programs()[q.rule].get("candidates")
        if "tensor" in programs()[q.rule]:
            names = self.computed(q, names, "tensor")
        if tried is None:
            return self.computed(q, names, "steps", input_max)
        ((candidate, values),) = tried.items()
        candidates = (Evaluator(q, names, input_max).value(str(value)) for value in values)
        computed = [self.computed(q, names | {candidate: value}, "steps", input_max) for value in candidates]
        errors = [self.error(source, x, one) for one in computed]
        best = np.zeros(errors[0].shape, int)
        for number, error in enumerate(errors):
            best = np.where(error < np.choose(best, errors), number, best)
        kept = {name: np.choose(best, [one[name] for one in computed]) for name in ("scale", "multiplier")}
        return kept | {"candidate": best}

    def kept(self, source: Source, x: Array) -> Array:
        """Of a rule that tries several scales: the number of the candidate that each block keeps."""
        return self.scales(source, x, float(FLT_MAX), None)["candidate"]

    def error(self, source: Source, x: Array, names: dict[str, Array]) -> Array:
        """The error of a candidate's elements, summed over each block."""
        q, (m, k) = source.quantization, x.shape
        bm, bk = q.block.m or max(m, 1), q.block.k or k
        scale, multiplier = (spread(names[name], bm, bk, m, k) for name in ("scale", "multiplier"))
        with np.errstate(all="ignore"):
            element = codes_of(q.element).decode(codes_of(q.element).encode(x * multiplier, "nearest"))
        inputs = {"x": x, "element": element, "scale": scale, "tensor_amax": names["tensor_amax"]}
        with np.errstate(all="ignore"):
            return block_sum(self.computed(q, inputs, "error")["error"], bm, bk, source.name == "rowwise")

    def computed(
        self, q: Quantization, names: dict[str, Array], part: str, input_max: float = float(FLT_MAX)
    ) -> dict[str, Array]:
        """`names`, and the values that a part of the rule's program computes, in order."""
        names = dict(names)
        evaluator = Evaluator(q, names, input_max)
        for name, expression in self.steps(q, part):
            names[name] = evaluator.value(expression)
        return names

    def steps(self, q: Quantization, part: str) -> list[tuple[str, str]]:
        """The rule's steps that the parameters leave in."""
        parameters, active = dict(q.parameters), []
        for entry in programs()[q.rule][part]:
            on, off = entry.get("when"), entry.get("unless")
            if (on is None or parameters[on]) and not (off is not None and parameters[off]):
                active += [(key, str(text)) for key, text in entry.items() if key not in ("when", "unless")]
        return active

    def values(self, planes: Planes, orientation: str, m: int, k: int) -> Array:
        """The values of the planes in an orientation, (m, k) fp32."""
        source = self.layout.source(orientation)
        q = source.quantization
        names: dict[str, Array] = {plane.kind: planes[plane.name] for plane in planes_of(source)[1:]}
        if "amax" in planes:
            level = "tensor_level" if "tensor" in programs()[q.rule] else "tensor_amax"
            names[level] = planes["amax"] * (growth(q.transform) if q.transform else F32(1))
        factor = Evaluator(q, names).value(programs()[q.rule]["decode"])
        codes = unpack(planes[source.data.name], source.data.bits, q.low_first)
        bm, bk = q.block.m or max(m, 1), q.block.k or k
        elements = codes_of(q.element).decode(codes)
        with np.errstate(all="ignore"):
            zero = F32(0) if q.zero is None else spread(codes_of(q.zero).decode(names["zero"]), bm, bk, m, k)
            of_values = programs()[q.rule].get("zero-is") == "value"
            if q.zero is not None and not of_values:
                elements = elements - zero
            values: Array = elements * spread(factor, bm, bk, m, k)
            values = values + zero if of_values else values
        return values if q.transform is None else transformed(q.transform, values, inverse=True)
