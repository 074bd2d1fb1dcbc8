"""Scale rules as data (rules.yaml): small straight-line fp32 programs from an amax to a scale and a multiplier."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

from layoutc.spec import shipped

Parameters = dict[str, float | int | bool | str]
INVERSE_OVERFLOWS = "inverse-overflows"  # 1 / smallest scale overflows fp32; formats decide it, not parameters
ZeroIs = Literal["element", "value", "minimum"]  # the element of 0; the value of element 0; that value negated


@dataclass(frozen=True)
class Parameter:
    """A rule's parameter, stated inline under `scale:`."""

    type: str
    default: float | int | bool | str
    doc: str
    choices: tuple[str, ...] = ()
    positive: bool = False


@dataclass(frozen=True)
class Step:
    """name = expression. Active if all parameters of `when` are set and none of `unless` is."""

    name: str
    expression: str
    when: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A scale rule: steps that end in `scale` and `multiplier` or `divisor`, and the factor of decoded elements.

    A rule may try several values of one name, its `candidates`; a block keeps the one with the smallest `error`.
    `tensor` computes the `tensor_level` that a weight stores in place of its amax; without it, the amax is stored.
    """

    name: str
    summary: str
    parameters: dict[str, Parameter]
    steps: tuple[Step, ...]
    decode: str
    tensor: tuple[Step, ...] = ()
    candidate: str = ""
    candidates: tuple[str, ...] = ()
    error: tuple[Step, ...] = ()
    zero_is: ZeroIs = "element"
    zero_scale: tuple[str, ...] | None = None  # parameters that keep a zero block's scale from 0; None: it never is 0

    @property
    def defaults(self) -> Parameters:
        """The parameters' defaults."""
        return {key: parameter.default for key, parameter in self.parameters.items()}

    @property
    def needs_tensor_amax(self) -> bool:
        """True if the rule reads the whole weight's amax, so that shards must share it."""
        return any("tensor_amax" in names(step.expression) for step in (*self.tensor, *self.steps))

    @property
    def zero_is_value(self) -> bool:
        """True if a zero point is a value, subtracted before scaling and added back after decoding."""
        return self.zero_is != "element"

    @property
    def makes_zero(self) -> bool:
        """True if the rule gives each block a zero point in addition to its scale."""
        return any(step.name == "zero" for step in self.steps)

    def scales_zeros_by_zero(self, parameters: Parameters) -> bool:
        """True if a block of zeros gets the scale 0, in formats that have a 0."""
        return self.zero_scale is not None and not any(parameters[name] for name in self.zero_scale)

    def active_steps(self, parameters: Parameters) -> tuple[Step, ...]:
        """The steps from amaxes on that are active with these parameters."""
        return _active((*self.tensor, *self.steps), parameters)

    def element_step(self, parameters: Parameters) -> Step:
        """The last step: the `multiplier` or the `divisor` of values."""
        return [step for step in self.active_steps(parameters) if step.name in ("multiplier", "divisor")][-1]

    def active_error(self, parameters: Parameters) -> tuple[Step, ...]:
        """The steps of the error that are active with these parameters."""
        return _active(self.error, parameters)

    def program(self, parameters: Parameters) -> list[tuple[str, str]]:
        """All (name, expression) pairs that decide stored bytes and decoded values, in order."""
        tried = [(self.candidate, value) for value in self.candidates]
        steps = (*self.active_steps(parameters), *self.active_error(parameters))
        return [*tried, *((step.name, step.expression) for step in steps), ("decode", self.decode)]


def _active(steps: tuple[Step, ...], parameters: Parameters) -> tuple[Step, ...]:
    known = {INVERSE_OVERFLOWS: False, **parameters}  # formats may be unknown here
    return tuple(
        step
        for step in steps
        if all(known[name] for name in step.when) and not any(known[name] for name in step.unless)
    )


@cache
def names(expression: str) -> frozenset[str]:
    """The names that an expression uses, without those of functions."""
    tree = ast.parse(expression, mode="eval")
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) - called


def _make(name: str, entry: dict[str, object]) -> Rule:
    parameters = {
        key: Parameter(**{**value, "choices": tuple(value.get("choices", ()))})
        for key, value in (entry.get("parameters") or {}).items()  # type: ignore[attr-defined]
    }
    steps, error, tensor = (
        tuple(map(_step, entry.get(key) or ()))  # type: ignore[call-overload]
        for key in ("steps", "error", "tensor")
    )
    ((candidate, values),) = (entry.get("candidates") or {"": ()}).items()  # type: ignore[attr-defined]
    candidates = tuple(map(str, values))
    zero = cast(ZeroIs, entry.get("zero-is", "element"))
    summary, decode = str(entry["summary"]), str(entry["decode"])
    unless = entry.get("zero-scale")
    zero_scale = None if unless is None else tuple(cast(list[str], unless))
    return Rule(name, summary, parameters, steps, decode, tensor, candidate, candidates, error, zero, zero_scale)


def _step(item: dict[str, str]) -> Step:
    ((target, expression),) = ((key, value) for key, value in item.items() if key not in ("when", "unless"))
    when, unless = (item.get(key) or () for key in ("when", "unless"))
    return Step(target, str(expression), *((one,) if isinstance(one, str) else tuple(one) for one in (when, unless)))


def _load() -> dict[str, Rule]:
    return {name: _make(name, entry) for name, entry in shipped.load("rules.yaml").items()}


RULES = _load()
