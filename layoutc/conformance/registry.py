"""What a check is, how it says that something is wrong, and the list of all checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from layoutc.conformance.subject import Subject

Kind = Literal["bytes", "facts"]


@dataclass
class Tally:
    """What the check that runs has compared so far: bytes of arrays, and facts, which are all else that it expects."""

    bytes: int = 0
    facts: int = 0

    def clear(self) -> None:
        """Before a check."""
        self.bytes = self.facts = 0


TALLY = Tally()


class Failure(Exception):
    """What a check found. `details` says where: shape, seed, plane, byte, logical (i, j), found and expected."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = {key: value for key, value in details.items() if value is not None}

    def within(self, **details: Any) -> Failure:
        """The same failure, knowing more about where it happened; what is known already stays."""
        self.details = {**{key: value for key, value in details.items() if value is not None}, **self.details}
        return self


class Skipped(Exception):
    """A check that does not apply, and why."""


@dataclass(frozen=True)
class Check:
    """One check: its name on the command line, and one sentence that says what passing means.

    `compares` is what it must have compared some of to pass.
    """

    name: str
    meaning: str
    run: Callable[[Subject], None]
    needs_processes: bool = False
    compares: Kind = "bytes"


@dataclass
class Registry:
    """All checks, in the order in which they run: the first that fails is the one to read."""

    checks: list[Check] = field(default_factory=list)

    def check(
        self, name: str, meaning: str, *, needs_processes: bool = False, compares: Kind = "bytes"
    ) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
        """Decorator: adds a check."""

        def add(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
            self.checks.append(Check(name, meaning, function, needs_processes, compares))
            return function

        return add


REGISTRY = Registry()
check = REGISTRY.check


def all_checks() -> list[Check]:
    """Every check. Imports torch."""
    from importlib import import_module

    for module in ("codecs", "maps", "reference", "hooks", "dispatch", "products", "kernels", "state", "processes"):
        import_module(f"layoutc.conformance.checks.{module}")
    return list(REGISTRY.checks)
