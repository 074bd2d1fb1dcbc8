"""Diagnostics: a finding's code, headline, positions in the text, reason, and what to type instead.

A diagnostic is a plain value. It knows nothing about printing (renderers.py) or layouts. Its code must be in the
catalogue (catalogue.yaml), which also has the page that `layoutc explain CODE` prints.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, order=True)
class Span:
    """A range of text by 1-based line and column; the end is exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True)
class Label:
    """A span and the text to print next to it."""

    span: Span
    text: str = ""


@dataclass(frozen=True)
class Entry:
    """A code in the catalogue. `base`: the spec that `example` changes, for the test that runs it."""

    code: str
    severity: Severity
    title: str
    what: str
    why: str
    example: str
    instead: str
    base: str | None = None


@dataclass(frozen=True)
class Diagnostic:
    """A finding in a file.

    `primary`: the smallest text that must change. `secondary`: other spans involved. `why`: the reason, if the headline
    does not give it. `help`: something to type. `source`: the file's whole text, for excerpts. `detail`: preformatted
    text (a diff) for findings without a position in a spec.
    """

    code: str
    message: str
    path: str
    primary: Label | None = None
    secondary: tuple[Label, ...] = ()
    why: str | None = None
    help: str | None = None
    detail: str | None = None
    source: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises KeyError for an undocumented code."""
        if self.code not in catalogue():
            raise KeyError(f"{self.code} is not in the catalogue")

    @property
    def severity(self) -> Severity:
        """The catalogue's severity: an error stops the build, a warning does not."""
        return catalogue()[self.code].severity

    @property
    def whole(self) -> str:
        """Headline, why and help, one per line."""
        parts = [f"{name}: {text}" for name, text in (("why", self.why), ("help", self.help)) if text]
        return "\n".join([printable(self.message), *parts])

    @property
    def sort_key(self) -> tuple[str, int, int, str, str]:
        """File, line, column, code, headline."""
        span = self.primary.span if self.primary else Span(0, 0, 0, 0)
        return (self.path, span.line, span.column, self.code, self.message)


@cache
def catalogue() -> dict[str, Entry]:
    """All codes that may be emitted. Read on first use, so that a run without findings does not pay for it."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (Path(__file__).parent / "catalogue.yaml").read_text(encoding="utf-8")
    return {code: Entry(code=code, **{"severity": "error", **page}) for code, page in yaml.load(text, loader).items()}


def tidy(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """The diagnostics, sorted, without duplicates."""
    return sorted(dict.fromkeys(diagnostics), key=lambda item: item.sort_key)


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    """True if at least one finding is an error."""
    return any(item.severity == "error" for item in diagnostics)


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that `word` probably means; None if no name is similar."""
    ordered = sorted(names)
    folded = {name.casefold().replace("_", "-"): name for name in ordered}
    close = difflib.get_close_matches(word.casefold().replace("_", "-")[:80], folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """A label text: the nearest name as a question; "" if no name is similar."""
    name = nearest(word, names)
    return f"did you mean `{name}`?" if name else ""


def listed(names: Iterable[str]) -> str:
    """Names for a help line, in the order given."""
    return ", ".join(names)


def quoted(value: object, limit: int = 40) -> str:
    """A value from the user's text, safe to print: one line, without control characters, truncated if long."""
    text = printable(str(value).lower() if isinstance(value, bool) else str(value))
    return f"`{text[: limit - 1]}…`" if len(text) > limit else f"`{text}`"


def printable(text: str) -> str:
    """Text without characters that would move a terminal's cursor or color it."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "\ufffd" for char in text)
