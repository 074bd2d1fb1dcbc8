"""Scale rules printed as torch or Triton code: the one place where a rule's program becomes text."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from layoutc.layout.layout import Quantization
from layoutc.plan.kernels import inputs_of
from layoutc.spec.rules import names

_OPERATORS = {ast.Mult: "*", ast.Add: "+", ast.Sub: "-", ast.BitOr: "|", ast.BitAnd: "&"}
_COMPARE = {ast.Eq: "==", ast.Lt: "<", ast.Gt: ">", ast.LtE: "<=", ast.GtE: ">="}


def prefix_of(suffix: str) -> str:
    """What constants of a quantization begin with, where functions end with `suffix`: `_rowwise` -> `ROWWISE_`."""
    return f"{suffix[1:].upper()}_" if suffix else ""


def constant_names(quantization: Quantization, suffix: str) -> dict[str, str]:
    """How each constant of a rule is spelled in generated code."""
    parameters, prefix = dict(quantization.parameters), prefix_of(suffix)
    own = (
        "element_min",
        "element_step",
        "bounded_range",
        "inverse_bounded_range",
        "inverse_element_span",
        "element_max",
        "inverse_element_max",
        "inverse_element_power",
        "scale_max",
        "inverse_range",
        "inverse_margin",
    )
    spelled = {name: prefix + name.upper() for name in own} | {"f32_max": "F32_MAX", "input_max": "input_max"}
    if "overflow" in parameters:
        spelled["overflow"] = "input_max" if parameters["overflow"] == "input-max" else "F32_MAX"
    if "epsilon" in parameters:
        spelled["epsilon"] = f"{prefix}EPSILON"
    return spelled


@dataclass(frozen=True)
class Argument:
    """An argument of a scale rule's functions, and its type in torch. Triton code has the names alone."""

    name: str
    type: str

    @property
    def typed(self) -> str:
        """As a parameter in torch."""
        return f"{self.name}: {self.type}"


def shared_arguments(quantization: Quantization) -> tuple[Argument, ...]:
    """What the rule's functions read that is the same for all blocks."""
    inputs = inputs_of(quantization)
    amax = (Argument("tensor_amax", "Tensor"),) if inputs.tensor_amax else ()
    return (*amax, Argument("input_max", "float")) if inputs.input_max else amax


def scale_arguments(quantization: Quantization) -> tuple[Argument, ...]:
    """The arguments of the function `scales`: what each block has of its own, what all share, the candidate to try."""
    rule = quantization.definition
    own = ("lowest", "highest") if inputs_of(quantization).block_range else ("amax",)
    tried = (Argument(rule.candidate, "float"),) if rule.candidates else ()
    return (*(Argument(name, "Tensor") for name in own), *shared_arguments(quantization), *tried)


def results(quantization: Quantization) -> str:
    """The names of what a scale rule returns, in order."""
    return "scale, zero, multiplier" if quantization.zero else "scale, multiplier"


def steps(quantization: Quantization, suffix: str, dialect: Dialect | None = None) -> list[str]:
    """The rule's active steps as assignments, in order; in torch where no dialect is given."""
    active = quantization.definition.active_steps(dict(quantization.parameters))
    spoken = dialect or TORCH
    return [f"{step.name} = {expression(step.expression, quantization, {}, suffix, spoken)}" for step in active]


def error_steps(quantization: Quantization, suffix: str, dialect: Dialect | None = None) -> list[str]:
    """What an element misses of x, as assignments, in order; in torch where no dialect is given."""
    active = quantization.definition.active_error(dict(quantization.parameters))
    spoken = dialect or TORCH
    return [f"{step.name} = {expression(step.expression, quantization, {}, suffix, spoken)}" for step in active]


def candidates(quantization: Quantization, suffix: str) -> list[str]:
    """The values that the rule tries."""
    spelled = (expression(value, quantization, {}, suffix) for value in quantization.definition.candidates)
    return [f"{value}.0" if value.isdigit() else value for value in spelled]


def decode(quantization: Quantization, scale: str, suffix: str) -> str:
    """What a decoded element is multiplied by, from the stored scale plane `scale`."""
    known = {"scale": scale, "tensor_amax": 'planes["amax"]'}
    return expression(quantization.definition.decode, quantization, known, suffix)


def uses(quantization: Quantization) -> frozenset[str]:
    """Names that the active steps and the decode use, parameters replaced by the constants that they stand for."""
    program = quantization.definition.program(dict(quantization.parameters))
    found = frozenset().union(*(names(expression) for _, expression in program))
    spelled = constant_names(quantization, "")
    return frozenset(spelled.get(name, name) for name in found)


@dataclass(frozen=True)
class Dialect:
    """How the functions of the rules' language are spelled in one kind of generated code."""

    codec: str  # what a call of a codec passes beside the value
    methods: dict[str, str]  # function -> text with {0}, {1}, ...
    divide: str
    divide_constant: str  # a number {0} over {1}
    divide_by_constant: str  # {0} over a number {1}
    constant: str  # a number in the shape of the other operand {0}
    f32_max: str = "F32_MAX"
    over_exponent: str = ""  # 1 / a scale whose codes are exponents alone, where that is not a division


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
    codec=", HARDWARE",
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
    divide_constant="lt.over({0}, {1})",
    divide_by_constant="lt.divide_by({0}, {1})",
    constant="lt.like({0}, {1})",
    f32_max="lt.F32_MAX",
    over_exponent="over_scale{0}({1})",
)


def expression(
    text: str, quantization: Quantization, known: Mapping[str, str], suffix: str, dialect: Dialect = TORCH
) -> str:
    """One expression of a rule as code. Division is spelled so that it is rounded once."""
    constants = constant_names(quantization, suffix)
    spelled = {
        **{name: dialect.f32_max if text == "F32_MAX" else text for name, text in constants.items()},
        **known,
    }
    coded = not quantization.scale.is_f32

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
                return f"encode_scale{suffix}({arguments[0]}{dialect.codec})" if coded else arguments[0]
            case "from_scale":
                return f"decode_scale{suffix}({arguments[0]}{dialect.codec})" if coded else arguments[0]
            case "to_zero":
                return f"encode_zero{suffix}({arguments[0]}{dialect.codec})"
            case name:
                if name == "where":
                    arguments[1:] = [f"{a}.0" if a.isdigit() else a for a in arguments[1:]]
                elif dialect.methods[name].startswith("{0}.") and _is_operation(node.args[0]):
                    arguments[0] = f"({arguments[0]})"
                return dialect.methods[name].format(*arguments)

    def divided(node: ast.BinOp) -> str:
        scale = node.right
        if isinstance(scale, ast.Call) and isinstance(scale.func, ast.Name) and scale.func.id == "from_scale":
            one = isinstance(node.left, ast.Constant) and node.left.value == 1
            if one and dialect.over_exponent and quantization.scale.is_exponent:
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
    """True where an operand must be parenthesised to keep the order of operations. A division is printed as a call."""
    if isinstance(inner, ast.Compare):
        return True
    return isinstance(inner, ast.BinOp) and _is_operation(inner) and (right or type(inner.op) is not type(outer.op))


def _is_operation(node: ast.expr) -> bool:
    """True for what is printed with an operator in it. A division is printed as a call."""
    return isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Div)
