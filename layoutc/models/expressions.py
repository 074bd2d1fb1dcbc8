"""Evaluates sizes as text, e.g. `num_attention_heads * head_dim`: numbers, names, and arithmetic on them.

Also comparisons, `and`, `or`, `not`, `if`/`else` and membership in a list; no calls, no attributes.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import isfinite
from typing import Any

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


@lru_cache(maxsize=1024)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def evaluate(text: str | int | float | bool, names: Mapping[str, Any]) -> Any:
    """The value of an expression. Raises KeyError for an unknown name, ValueError for a NaN or infinite value or
    unsupported syntax, TypeError for arithmetic on non-numbers, ArithmeticError like Python."""
    return text if isinstance(text, int | float) else _value(_parsed(text), names)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() | bool() | None | str()):
            return node.value
        case ast.Name():
            if isinstance(value := names[node.id], float) and not isfinite(value):
                raise ValueError(f"{node.id} is {value}")
            return value
        case ast.BinOp() if type(node.op) in _BINARY:
            left, right = _value(node.left, names), _value(node.right, names)
            if not (isinstance(left, int | float) and isinstance(right, int | float)):
                raise TypeError(f"{ast.unparse(node)} has an operand that is not a number")
            return _BINARY[type(node.op)](left, right)
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, names)
        case ast.BoolOp():
            values = (_value(one, names) for one in node.values)
            return all(values) if isinstance(node.op, ast.And) else any(values)
        case ast.IfExp():
            return _value(node.body if _value(node.test, names) else node.orelse, names)
        case ast.Compare(ops=[op], comparators=[other]) if type(op) in _COMPARE:
            return _COMPARE[type(op)](_value(node.left, names), _value(other, names))
    raise ValueError(f"{ast.unparse(node)} is not arithmetic on sizes")
