"""Findings about a machine: lines with a verdict each. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fine", "missing", "without"]  # missing: needed; without: something is slower or impossible


@dataclass(frozen=True)
class Line:
    """What was checked, what was found, and what to do if it is not fine."""

    about: str
    verdict: Verdict
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Runs:
    """How a recipe runs on this machine. kernels: what quantizes and lays out. products: what multiplies."""

    recipe: str
    package: str
    kernels: str
    products: str


def is_healthy(lines: Iterable[Line]) -> bool:
    """True if no verdict is "missing"."""
    return all(line.verdict != "missing" for line in lines)
