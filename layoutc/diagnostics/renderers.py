"""Diagnostics as text: full (with carets), concise (one line), github (annotations), json (objects), sarif (a log).

Pure functions from values to strings; the command line prints them.
"""

from __future__ import annotations

import json
import textwrap
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import get_args

from layoutc.diagnostics.diagnostic import Diagnostic, Entry, Label, Severity, Span, printable

Paint = Callable[[str, str], str]

_CODES = {"error": "1;31", "warning": "1;33", "bold": "1", "place": "34", "help": "36"}
_WIDTH = 140  # of an excerpt; longer lines are cut around their label


def plain(style: str, text: str) -> str:
    """Text without colors."""
    return text


def ansi(style: str, text: str) -> str:
    """Text in terminal colors."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if text else text


def render(diagnostics: Iterable[Diagnostic], form: str, color: bool = False) -> str:
    """All diagnostics in one of FORMS. Ends in a newline unless there are none."""
    paint = ansi if color else plain
    if form == "full":
        return "".join(full(item, paint) + "\n" for item in diagnostics)
    if form == "sarif":
        from layoutc.diagnostics.sarif import sarif

        return sarif(diagnostics)
    one = {"concise": concise, "github": github, "json": as_json}[form]
    return "".join(one(item) + "\n" for item in diagnostics)


FORMS = ("full", "concise", "github", "json", "sarif")


def full(item: Diagnostic, paint: Paint = plain) -> str:
    """Headline, position, excerpt with carets, why and help."""
    labels = [(item.primary, True)] if item.primary else []
    labels += [(label, False) for label in item.secondary]
    width = max((len(str(label.span.line)) for label, _ in labels), default=1)
    bar = paint("place", " " * width + " |")
    head = paint(item.severity, f"{item.severity}[{item.code}]") + paint("bold", f": {printable(item.message)}")
    lines = [head, " " * width + paint("place", "--> ") + _place(item)]
    if labels:
        lines += [bar, *_excerpt(item, labels, width, paint), bar]
    if item.detail:
        lines += [bar, *(f"{bar} {line}" for line in item.detail.splitlines()), bar]
    for name, text in (("why", item.why), ("help", item.help)):
        if text:
            first, *rest = text.splitlines()
            lines.append(" " * width + paint("help", f" = {name}: ") + first)
            lines += [" " * (width + 5 + len(name)) + line for line in rest]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def concise(item: Diagnostic) -> str:
    """path:line:col: severity[code] headline; with the help for findings about a whole file."""
    advice = f"; {printable(item.help)}" if item.help and item.primary is None else ""
    return f"{_place(item)}: {item.severity}[{item.code}] {printable(item.message)}{advice}"


def github(item: Diagnostic) -> str:
    """A workflow command that GitHub shows next to the changed line."""
    properties = {"title": f"layoutc ({item.code})", "file": item.path}
    if item.primary:
        span = _on_one_line(item.primary.span, item.source)
        properties |= {"line": str(span.line), "col": str(span.column)}
        properties |= {"endLine": str(span.end_line), "endColumn": str(span.end_column)}
    spelled = ",".join(f"{key}={_escape(value, ':,')}" for key, value in properties.items())
    return f"::{item.severity} {spelled}::{_escape(item.whole)}"


def as_json(item: Diagnostic) -> str:
    """One object: code, severity, message, file, span, label, others, why, help."""
    return json.dumps(
        {
            "code": item.code,
            "severity": item.severity,
            "message": item.message,
            "file": item.path,
            "span": asdict(item.primary.span) if item.primary else None,
            "label": item.primary.text if item.primary else None,
            "others": [{"span": asdict(label.span), "label": label.text} for label in item.secondary],
            "why": item.why,
            "help": item.help,
        }
    )


def page(entry: Entry) -> str:
    """The page that `layoutc explain` prints for a code."""
    lines = [f"{entry.code} ({entry.severity}): {entry.title}"]
    for head, text in (("What", entry.what), ("Why", entry.why)):
        lines += ["", head, *textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent="    ")]
    for head, text in (("Example", entry.example), ("Use instead", entry.instead)):
        lines += ["", head, *(f"    {line}" for line in text.splitlines())]
    return "\n".join(lines) + "\n"


def summary(checked: int, diagnostics: Iterable[Diagnostic]) -> str:
    """`5 specs, no problems` or `5 specs, 2 errors, 1 warning`."""
    severities = [item.severity for item in diagnostics]
    counts = [(severities.count(severity), severity) for severity in get_args(Severity)]
    problems = [_count(number, severity) for number, severity in counts if number]
    return ", ".join([_count(checked, "spec"), *(problems or ["no problems"])])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _place(item: Diagnostic) -> str:
    span = item.primary.span if item.primary else None
    return f"{item.path}:{span.line}:{span.column}" if span else item.path


def _escape(text: str, also: str = "") -> str:
    for char in "%\r\n" + also:  # the percent sign first, so that escapes are not escaped again
        text = text.replace(char, f"%{ord(char):02X}")
    return text


def _on_one_line(span: Span, source: str) -> Span:
    """The part of a span on its first line, at least one column wide."""
    lines = source.split("\n")
    line = lines[span.line - 1].rstrip("\r") if span.line <= len(lines) else ""
    end = span.end_column if span.end_line == span.line else len(line) + 1
    return Span(span.line, span.column, span.line, max(end, span.column + 1))


def _excerpt(item: Diagnostic, labels: list[tuple[Label, bool]], width: int, paint: Paint) -> list[str]:
    """The lines that have labels, each followed by its carets; `...` for omitted lines."""
    source, rows, last = item.source.split("\n"), [], 0
    bar = paint("place", " " * width + " | ")
    for number in sorted({label.span.line for label, _ in labels}):
        if last and number > last + 1:
            rows.append(paint("place", "..."))
        last = number
        text = printable(source[number - 1].rstrip("\r")) if number <= len(source) else ""
        here = [(_on_one_line(label.span, item.source), label, is_primary) for label, is_primary in labels]
        here = sorted((entry for entry in here if entry[0].line == number), key=lambda entry: entry[0].column)
        text, shift = _cut(text, here[0][0].column - 1)
        rows.append(paint("place", f"{number:>{width}} | ") + text)
        for span, label, is_primary in here:
            start = max(0, span.column - 1 - shift)
            marked = text[start : max(start + 1, span.end_column - 1 - shift)]
            marks = ("^" if is_primary else "-") * max(1, _cells(marked))
            words = f"{marks} {printable(label.text)}".rstrip()
            rows.append(bar + " " * _cells(text[:start]) + paint(item.severity if is_primary else "place", words))
    return rows


def _cut(text: str, column: int) -> tuple[str, int]:
    """A long line cut around a column, and how many characters the rest moved left."""
    if len(text) <= _WIDTH:
        return text, 0
    start = max(0, column - 40)
    kept = text[start : start + _WIDTH]
    tail = "…" if start + _WIDTH < len(text) else ""
    return ("…" + kept + tail, start - 1) if start else (kept + tail, 0)


def _cells(text: str) -> int:
    """How many terminal columns a text fills: combining marks none, wide characters two."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )
