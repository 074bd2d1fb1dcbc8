"""Checks: their type, how they report failures, and the list of all checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from layoutc.conformance.subject import Subject

Kind = Literal["bytes", "facts"]


@dataclass
class Tally:
    """Counts what the running check has compared: bytes of arrays, and facts, which are all other expectations."""

    bytes: int = 0
    facts: int = 0

    def clear(self) -> None:
        """Resets the counts before a check."""
        self.bytes = self.facts = 0


TALLY = Tally()


class Failure(Exception):
    """A check's finding. `details` says where: shape, seed, plane, byte, logical (i, j), actual and expected value."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = {key: value for key, value in details.items() if value is not None}

    def within(self, **details: Any) -> Failure:
        """Adds details of where the failure happened, without replacing existing ones."""
        self.details = {**{key: value for key, value in details.items() if value is not None}, **self.details}
        return self


class Skipped(Exception):
    """Raised by a check that does not apply, with the reason."""


@dataclass(frozen=True)
class Check:
    """A check: its name on the command line, and a sentence that says what passing means.

    compares: what it counts; a check that compared none fails.
    """

    name: str
    meaning: str
    run: Callable[[Subject], None]
    needs_processes: bool = False
    of_weights: bool = False  # tests what only weights do; skipped for recipes that weights can't have
    compares: Kind = "bytes"


_CHECKS: list[Check] = []  # in the order they run: read the first failure first


def check(
    name: str, meaning: str, *, needs_processes: bool = False, of_weights: bool = False, compares: Kind = "bytes"
) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    """Decorator: adds a check."""

    def add(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
        _CHECKS.append(Check(name, meaning, function, needs_processes, of_weights or needs_processes, compares))
        return function

    return add


def all_checks() -> list[Check]:
    """Every check. Imports torch."""
    from importlib import import_module

    numerics = ("codecs", "maps", "reference")
    for module in (*numerics, "hooks", "dispatch", "products", "low_precision", "kernels", "state", "processes"):
        import_module(f"layoutc.conformance.checks.{module}")
    return list(_CHECKS)
