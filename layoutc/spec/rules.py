"""Scale rules as data (rules.yaml): small straight-line fp32 programs from an amax to a scale and a multiplier."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

from layoutc.spec import shipped

Parameters = dict[str, float | int | bool | str]
INVERSE_OVERFLOWS = "inverse-overflows"  # of the smallest scale, in fp32: follows from formats, beside the parameters
ZeroIs = Literal["element", "value", "minimum"]  # of 0; of element 0; the latter without its sign, for it is below 0


@dataclass(frozen=True)
class Parameter:
    """A parameter of a rule, given inline under `scale:`."""

    type: str
    default: float | int | bool | str
    doc: str
    choices: tuple[str, ...] = ()
    positive: bool = False


@dataclass(frozen=True)
class Step:
    """name = expression; left out unless all parameters of `when` are set, and none of `unless` is."""

    name: str
    expression: str
    when: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A scale rule: steps that end in `scale` and `multiplier` or `divisor`, and the factor of decoded elements.

    A rule may try several values of one name, its `candidates`; a block keeps the one with the least `error`. `tensor`
    makes what a weight stores of its amax, the `tensor_level`; without it, that is the amax.
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
    zero_scale: tuple[str, ...] | None = None  # what keeps blocks of zeros from having the scale 0; None: all does

    @property
    def defaults(self) -> Parameters:
        """Its parameters, where a spec states none."""
        return {key: parameter.default for key, parameter in self.parameters.items()}

    @property
    def needs_tensor_amax(self) -> bool:
        """True if the rule reads the amax of the whole weight, so that shards must share it."""
        return any("tensor_amax" in names(step.expression) for step in (*self.tensor, *self.steps))

    @property
    def zero_is_value(self) -> bool:
        """True if a zero point is a value that is taken from values before they are scaled, and added after."""
        return self.zero_is != "element"

    @property
    def makes_zero(self) -> bool:
        """True if the rule gives each block a zero point beside its scale."""
        return any(step.name == "zero" for step in self.steps)

    def scales_zeros_by_zero(self, parameters: Parameters) -> bool:
        """True if a block of zeros has the scale 0, in a format that has one."""
        return self.zero_scale is not None and not any(parameters[name] for name in self.zero_scale)

    def active_steps(self, parameters: Parameters) -> tuple[Step, ...]:
        """The steps that these parameters leave in, from amaxes on."""
        return _active((*self.tensor, *self.steps), parameters)

    def element_step(self, parameters: Parameters) -> Step:
        """The last step, which says what values are multiplied by, `multiplier`, or divided by, `divisor`."""
        return [step for step in self.active_steps(parameters) if step.name in ("multiplier", "divisor")][-1]

    def active_error(self, parameters: Parameters) -> tuple[Step, ...]:
        """The steps of the error that these parameters leave in."""
        return _active(self.error, parameters)

    def program(self, parameters: Parameters) -> list[tuple[str, str]]:
        """Every (name, expression) that decides stored bytes and decoded values, in order."""
        tried = [(self.candidate, value) for value in self.candidates]
        steps = (*self.active_steps(parameters), *self.active_error(parameters))
        return [*tried, *((step.name, step.expression) for step in steps), ("decode", self.decode)]


def _active(steps: tuple[Step, ...], parameters: Parameters) -> tuple[Step, ...]:
    known = {INVERSE_OVERFLOWS: False, **parameters}  # formats may not be known yet
    return tuple(
        step
        for step in steps
        if all(known[name] for name in step.when) and not any(known[name] for name in step.unless)
    )


@cache
def names(expression: str) -> frozenset[str]:
    """The names that an expression uses, without functions."""
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
