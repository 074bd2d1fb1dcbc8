"""Scale rules printed as torch code: the one place where a rule's program becomes text."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from layoutc.layout import Quantization
from layoutc.rules import names

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


def steps(quantization: Quantization, suffix: str) -> list[str]:
    """The rule's active steps as assignments, in order."""
    active = quantization.definition.active_steps(dict(quantization.parameters))
    return [f"{step.name} = {expression(step.expression, quantization, {}, suffix)}" for step in active]


def error_steps(quantization: Quantization, suffix: str) -> list[str]:
    """What an element misses of x, as assignments, in order."""
    active = quantization.definition.active_error(dict(quantization.parameters))
    return [f"{step.name} = {expression(step.expression, quantization, {}, suffix)}" for step in active]


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


def expression(text: str, quantization: Quantization, known: Mapping[str, str], suffix: str) -> str:
    """One expression of a rule as torch code. Division is spelled so that it is rounded once."""
    constants = constant_names(quantization, suffix)
    spelled = {**constants, **known}
    coded = not quantization.scale.is_f32

    def is_constant(node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in constants
        if isinstance(node, ast.BinOp):
            return is_constant(node.left) and is_constant(node.right)
        return isinstance(node, ast.Constant)

    def call(node: ast.Call) -> str:
        assert isinstance(node.func, ast.Name)
        arguments = [show(argument) for argument in node.args]
        match node.func.id:
            case "to_scale":
                return f"encode_scale{suffix}({arguments[0]})" if coded else arguments[0]
            case "from_scale":
                return f"decode_scale{suffix}({arguments[0]})" if coded else arguments[0]
            case "to_zero":
                return f"encode_zero{suffix}({arguments[0]})"
            case "maximum":
                return f"{arguments[0]}.clamp(min={arguments[1]})"
            case "minimum":
                first = f"({arguments[0]})" if _is_operation(node.args[0]) else arguments[0]
                return f"{first}.clamp(max={arguments[1]})"
            case "where":
                values = [f"{a}.0" if a.isdigit() else a for a in arguments[1:]]
                return f"torch.where({arguments[0]}, {', '.join(values)})"
            case "isinf" | "isnan" | "abs":
                inner = f"({arguments[0]})" if _is_operation(node.args[0]) else arguments[0]
                return f"{inner}.{node.func.id}()"
            case name:
                return f"{name}({', '.join(arguments)})"

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
                left = f"{show(node.left)}.0" if isinstance(node.left, ast.Constant) else show(node.left)
                return f"divide({left}, {show(node.right)})"
            case ast.BinOp():
                left = f"({show(node.left)})" if _needs_parentheses(node.left, node, right=False) else show(node.left)
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
