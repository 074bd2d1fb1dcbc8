"""Prints scale rules as torch or Triton code. No other module turns a rule's program into text."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from layoutc.layout.layout import Quantization, Transform
from layoutc.plan.kernels import inputs_of
from layoutc.spec.rules import Step, names

ROUNDED = {
    "nearest": "rounded to nearest, ties to even",
    "up": "rounded up",
    "down": "rounded down",
    "stochastic": "rounded by random bits",
}
_OPERATORS = {ast.Mult: "*", ast.Add: "+", ast.Sub: "-", ast.BitOr: "|", ast.BitAnd: "&"}
_COMPARE = {ast.Eq: "==", ast.Lt: "<", ast.Gt: ">", ast.LtE: "<=", ast.GtE: ">="}


def prefix_of(suffix: str) -> str:
    """The prefix of a quantization's constants, from the suffix of its functions: `_rowwise` -> `ROWWISE_`."""
    return f"{suffix[1:].upper()}_" if suffix else ""


def constant_names(quantization: Quantization, suffix: str) -> dict[str, str]:
    """Each constant of a rule's language -> its name in generated code."""
    parameters, prefix = dict(quantization.parameters), prefix_of(suffix)
    own = (
        "element_min",
        "element_step",
        "bounded_range",
        "inverse_bounded_range",
        "inverse_element_span",
        "element_span",
        "element_half_range",
        "element_max",
        "inverse_element_max",
        "inverse_element_power",
        "scale_max",
        "scale_min",
        "inverse_range",
        "inverse_margin",
    )
    spelled = {name: prefix + name.upper() for name in own} | {"f32_max": "F32_MAX", "input_max": "input_max"}
    if "overflow" in parameters:
        spelled["overflow"] = "input_max" if parameters["overflow"] == "input-max" else "F32_MAX"
    if "epsilon" in parameters:
        spelled["epsilon"] = f"{prefix}EPSILON"
    if "of-zeros" in parameters:
        spelled["of_zeros"] = f"{prefix}OF_ZEROS"
    return spelled


@dataclass(frozen=True)
class Argument:
    """An argument of a scale rule's functions, with its type in torch. Triton code has only names."""

    name: str
    type: str

    @property
    def typed(self) -> str:
        """The parameter in torch code, with its type."""
        return f"{self.name}: {self.type}"


def shared_arguments(quantization: Quantization) -> tuple[Argument, ...]:
    """The arguments of the rule's functions that are the same for all blocks."""
    inputs = inputs_of(quantization)
    amax = (Argument("tensor_amax", "Tensor"),) if inputs.tensor_amax else ()
    return (*amax, Argument("input_max", "float")) if inputs.input_max else amax


def scale_arguments(quantization: Quantization) -> tuple[Argument, ...]:
    """The arguments of the function `scales`: per block, shared by all blocks, and the candidate to try."""
    rule = quantization.definition
    own = ("lowest", "highest") if inputs_of(quantization).block_range else ("amax",)
    tried = (Argument(rule.candidate, "float"),) if rule.candidates else ()
    return (*(Argument(name, "Tensor") for name in own), *shared_arguments(quantization), *tried)


def results(quantization: Quantization) -> str:
    """The names that the function `scales` returns, in order."""
    return f"scale, zero, {factor(quantization)}" if quantization.zero else f"scale, {factor(quantization)}"


def factor(quantization: Quantization) -> str:
    """The name of the factor that values are multiplied or divided by."""
    return "divisor" if quantization.divides else "multiplier"


def scaled(values: str, quantization: Quantization, *, in_blocks: bool = True, dialect: Dialect | None = None) -> str:
    """Code for values times their block's multiplier, or over its divisor; in_blocks false: the whole matrix's."""
    by = factor(quantization) + ("[:, None, :, None]" if in_blocks else "")
    return (dialect or TORCH).divide.format(values, by) if quantization.divides else f"{values} * {by}"


def shifted(values: str, quantization: Quantization, shift: str, *, dialect: Dialect | None = None) -> str:
    """Code for scaled values of blocks with their zero point, applied before or after scaling. "": no zero point."""
    if not shift:
        return scaled(values, quantization, dialect=dialect)
    if quantization.definition.zero_is_value:
        sign = "+" if quantization.definition.zero_is == "minimum" else "-"
        inner = f"{values} {sign} {shift}"
        return scaled(inner if quantization.divides else f"({inner})", quantization, dialect=dialect)
    return f"{scaled(values, quantization, dialect=dialect)} + {shift}"


def assignments(
    steps: Sequence[Step], quantization: Quantization, suffix: str, dialect: Dialect | None = None
) -> list[str]:
    """Steps of a rule as assignments, in order. Default dialect: torch."""
    code = dialect or TORCH
    return [f"{step.name} = {expression(step.expression, quantization, {}, suffix, code)}" for step in steps]


def steps(quantization: Quantization, suffix: str, dialect: Dialect | None = None) -> list[str]:
    """The rule's active steps as assignments."""
    return assignments(quantization.definition.active_steps(quantization.conditions), quantization, suffix, dialect)


def error_steps(quantization: Quantization, suffix: str, dialect: Dialect | None = None) -> list[str]:
    """The steps that compute an element's error, as assignments."""
    return assignments(quantization.definition.active_error(quantization.conditions), quantization, suffix, dialect)


def candidates(quantization: Quantization, suffix: str) -> list[str]:
    """The values that the rule tries, as code."""
    spelled = (expression(value, quantization, {}, suffix) for value in quantization.definition.candidates)
    return [f"{value}.0" if value.isdigit() else value for value in spelled]


def decode(quantization: Quantization, scale: str, suffix: str, level: str = "amax") -> str:
    """The torch expression by which a decoded element is multiplied. `scale`: the scale plane's expression. level: the
    plane of what is stored of an amax."""
    stored = f'planes["{level}"]'
    variables = {"scale": scale, "tensor_amax": grown(stored, quantization), "tensor_level": stored}
    return expression(quantization.definition.decode, quantization, variables, suffix)


def grown(amax: str, quantization: Quantization) -> str:
    """The whole matrix's amax as a rule reads it: times the most that a transform may enlarge it."""
    return f"({amax} * {quantization.transform.headroom})" if quantization.transform else amax


def transform_arguments(transform: Transform) -> str:
    """The arguments of a transform in torch, after the values."""
    axis = ("m", "k").index(transform.axis)
    return f"{axis}, {transform.size}, 0x{transform.signs:X}, {transform.scale!r}"


def uses(quantization: Quantization) -> frozenset[str]:
    """Names that the active steps and the decoding use. Constants have their names in generated code, unprefixed."""
    program = quantization.definition.program(quantization.conditions)
    used = frozenset().union(*(names(expression) for _, expression in program))
    spelled = constant_names(quantization, "")
    return frozenset(spelled.get(name, name) for name in used)


@dataclass(frozen=True)
class Dialect:
    """How to write the rules' language in torch or Triton."""

    codec: str  # the arguments of codec calls after the value
    methods: dict[str, str]  # function -> code with {0}, {1}, ... for its arguments
    divide: str  # tensor {0} / tensor {1}
    divide_constant: str  # number {0} / tensor {1}
    divide_by_constant: str  # tensor {0} / number {1}
    constant: str  # number {1} as an operand with tensor {0}
    f32_max: str = "F32_MAX"
    over_exponent: str = ""  # 1 / a decoded scale that has only an exponent; empty: a division
    over_power: str = ""  # 1 / tensor {0} of powers of two; empty: a division


TORCH = Dialect(
    codec="",
    methods={
        "maximum": "{0}.clamp(min={1})",
        "minimum": "{0}.clamp(max={1})",
        "where": "torch.where({0}, {1}, {2})",
        "isinf": "{0}.isinf()",
        "isnan": "{0}.isnan()",
        "abs": "{0}.abs()",
        "floor_power_of_two": "num.floor_power_of_two({0})",
    },
    divide="num.divide({0}, {1})",
    divide_constant="num.divide({0}, {1})",
    divide_by_constant="num.divide({0}, {1})",
    constant="{1}",
    f32_max="num.F32_MAX",
)
TRITON = Dialect(
    codec=", CVT_LEVEL",
    methods={
        "maximum": "lt.maximum({0}, {1})",
        "minimum": "lt.minimum({0}, {1})",
        "where": "tl.where({0}, {1}, {2})",
        "isinf": "lt.isinf({0})",
        "isnan": "lt.isnan({0})",
        "abs": "tl.abs({0})",
        "floor_power_of_two": "lt.floor_power_of_two({0})",
    },
    divide="lt.divide({0}, {1})",
    divide_constant="lt.rdiv({0}, {1})",
    divide_by_constant="lt.divide_by({0}, {1})",
    constant="lt.like({0}, {1})",
    f32_max="lt.F32_MAX",
    over_exponent="over_scale{0}({1})",
    over_power="lt.over_power_of_two({0})",
)


def expression(
    text: str,
    quantization: Quantization,
    variables: Mapping[str, str],
    suffix: str,
    dialect: Dialect = TORCH,
    powers: Set[str] = frozenset(),
) -> str:
    """One expression of a rule as code. Divisions are correctly rounded. variables: name -> code that replaces it.

    powers: names of positive powers of two, by which a dialect may divide without a division.

    Raises ValueError for an operation that the language does not have.
    """
    constants = constant_names(quantization, suffix)
    spelled = {
        **{name: dialect.f32_max if text == "F32_MAX" else text for name, text in constants.items()},
        **variables,
    }
    coded = not quantization.scale.is_f32
    inside = ", inside" if dialect.codec and quantization.scales and quantization.scales.centered else ""

    def is_constant(node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in constants
        if isinstance(node, ast.BinOp):
            return is_constant(node.left) and is_constant(node.right)
        return isinstance(node, ast.Constant)

    def tensors_of(node: ast.expr) -> list[str]:
        return [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and not is_constant(one)]

    def call(node: ast.Call) -> str:
        assert isinstance(node.func, ast.Name)
        arguments = [show(argument) for argument in node.args]
        match node.func.id:
            case "to_scale":
                return f"encode_scale{suffix}({arguments[0]}{inside}{dialect.codec})" if coded else arguments[0]
            case "from_scale":
                return f"decode_scale{suffix}({arguments[0]}{dialect.codec})" if coded else arguments[0]
            case "to_zero":
                return f"encode_{quantization.zeros_as}{suffix}({arguments[0]}{dialect.codec})"
            case name:
                if name == "where":
                    arguments[1:] = [f"{a}.0" if a.isdigit() else a for a in arguments[1:]]
                elif dialect.methods[name].startswith("{0}.") and _is_operation(node.args[0]):
                    arguments[0] = f"({arguments[0]})"
                return dialect.methods[name].format(*arguments)

    def divided(node: ast.BinOp) -> str:
        scale, one = node.right, isinstance(node.left, ast.Constant) and node.left.value == 1
        if one and dialect.over_power and isinstance(scale, ast.Name) and scale.id in powers:
            return dialect.over_power.format(show(scale))
        exponents = one and bool(dialect.over_exponent) and quantization.scale.is_exponent and not quantization.scales
        if exponents and isinstance(scale, ast.Call) and ast.unparse(scale.func) == "from_scale":
            return dialect.over_exponent.format(suffix, show(scale.args[0]))
        left = f"{show(node.left)}.0" if isinstance(node.left, ast.Constant) else show(node.left)
        right = show(node.right)
        if is_constant(node.left):
            return dialect.divide_constant.format(left, right)
        return (dialect.divide_by_constant if is_constant(node.right) else dialect.divide).format(left, right)

    def show(node: ast.expr) -> str:
        match node:
            case ast.Name():
                return spelled.get(node.id, node.id)
            case ast.Constant():
                return str(node.value)
            case ast.Call():
                return call(node)
            case ast.Compare():
                return f"{show(node.left)} {_COMPARE[type(node.ops[0])]} {show(node.comparators[0])}"
            case ast.BinOp(op=ast.Div()):
                return divided(node)
            case ast.BinOp():
                left = f"({show(node.left)})" if _needs_parentheses(node.left, node, right=False) else show(node.left)
                if is_constant(node.left) and (tensors := tensors_of(node.right)):
                    left = dialect.constant.format(tensors[0], left)
                right = (
                    f"({show(node.right)})" if _needs_parentheses(node.right, node, right=True) else show(node.right)
                )
                return f"{left} {_OPERATORS[type(node.op)]} {right}"
        raise ValueError(f"a rule can't use {ast.dump(node)}")

    return show(ast.parse(text, mode="eval").body)


def _needs_parentheses(inner: ast.expr, outer: ast.BinOp, *, right: bool) -> bool:
    """True if an operand needs parentheses to keep the order of operations. Divisions are printed as calls."""
    if isinstance(inner, ast.Compare):
        return True
    return isinstance(inner, ast.BinOp) and _is_operation(inner) and (right or type(inner.op) is not type(outer.op))


def _is_operation(node: ast.expr) -> bool:
    """True for a node that is printed with an operator. Divisions are printed as calls."""
    return isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Div)
