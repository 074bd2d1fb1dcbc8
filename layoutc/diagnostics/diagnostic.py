"""What a finding is: a code, a headline, the places in the text, why, and what to type instead.

A diagnostic is a plain value. It knows nothing of how it is printed (renderers.py) and nothing of layouts; its code
must stand in the catalogue (catalogue.yaml), which also holds the page that `layoutc explain CODE` prints.
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
    """A stretch of text by 1-based line and column; the end is exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True)
class Label:
    """A span and the fact to write beside it."""

    span: Span
    text: str = ""


@dataclass(frozen=True)
class Entry:
    """One code of the catalogue. `base` names the spec on which `example` is shown, for the test that runs it."""

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
    """One finding in one file.

    `primary` is the smallest text that must change, `secondary` the other places involved, `why` the reason where the
    headline does not give it, `help` something to type. `source` is the whole text of the file, for excerpts; `detail`
    is preformatted text (a diff) for findings that are not about a place in a spec.
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
        """Refuses a code that nobody documented."""
        if self.code not in catalogue():
            raise KeyError(f"{self.code} is not in the catalogue")

    @property
    def severity(self) -> Severity:
        """What the catalogue says: an error stops the build, a warning does not."""
        return catalogue()[self.code].severity

    @property
    def sort_key(self) -> tuple[str, int, int, str, str]:
        """File, line, column, code, headline."""
        span = self.primary.span if self.primary else Span(0, 0, 0, 0)
        return (self.path, span.line, span.column, self.code, self.message)


@cache
def catalogue() -> dict[str, Entry]:
    """Every code that may be emitted. Read on first use only: a run without findings doesn't pay for it."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (Path(__file__).parent / "catalogue.yaml").read_text(encoding="utf-8")
    return {code: Entry(code=code, **{"severity": "error", **page}) for code, page in yaml.load(text, loader).items()}


def tidy(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Sorted, each once."""
    return sorted(dict.fromkeys(diagnostics), key=lambda item: item.sort_key)


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    """True when at least one finding is more than a warning."""
    return any(item.severity == "error" for item in diagnostics)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that `word` was probably meant to be, if one is near."""
    names = sorted(known)
    folded = {name.casefold().replace("_", "-"): name for name in names}
    close = difflib.get_close_matches(word.casefold().replace("_", "-")[:80], folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A label text: the nearest known name as a question, or nothing."""
    name = nearest(word, known)
    return f"did you mean `{name}`?" if name else ""


def listed(names: Iterable[str]) -> str:
    """Names for a help line, in the order given."""
    return ", ".join(names)


def quoted(value: object, limit: int = 40) -> str:
    """A value from the user's text, safe to print: one line, no control characters, cut when long."""
    text = printable(str(value).lower() if isinstance(value, bool) else str(value))
    return f"`{text[: limit - 1]}…`" if len(text) > limit else f"`{text}`"


def printable(text: str) -> str:
    """Text without characters that would move the cursor or colour a terminal."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "\ufffd" for char in text)
