"""A static proof: a statement about a layout, how it was shown, and whether it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Proof:
    """A proved or refuted statement about a layout. `counter`: the first counterexample if it does not hold."""

    about: str
    statement: str
    method: str
    holds: bool
    counter: str = ""


def proof(about: str, statement: str, method: str, counter: str) -> Proof:
    """A proof that holds if there is no counterexample."""
    return Proof(about, statement, method, not counter, counter)
