"""Diagnostics as one SARIF 2.1.0 log, for code scanning services and editors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from layoutc.diagnostics.diagnostic import Diagnostic, Entry, Label, catalogue, printable

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(diagnostics: Iterable[Diagnostic]) -> str:
    """The whole log: one run, the violated rules, one result per finding."""
    items = list(diagnostics)
    codes = sorted({item.code for item in items})
    driver = {"name": "layoutc", "rules": [_rule(catalogue()[code]) for code in codes]}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(item, codes.index(item.code)) for item in items],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(entry: Entry) -> dict[str, object]:
    help = f"{entry.what} {entry.why}\n\nExample:\n{entry.example}\n\nUse instead:\n{entry.instead}"
    return {
        "id": entry.code,
        "shortDescription": {"text": entry.title},
        "fullDescription": {"text": entry.what},
        "help": {"text": help},
        "defaultConfiguration": {"level": entry.severity},
    }


def _result(item: Diagnostic, rule: int) -> dict[str, object]:
    result: dict[str, object] = {
        "ruleId": item.code,
        "ruleIndex": rule,
        "level": item.severity,
        "message": {"text": item.whole},
        "locations": [_location(item.path, item.primary)],
    }
    if item.secondary:
        result["relatedLocations"] = [_location(item.path, one, at) for at, one in enumerate(item.secondary)]
    return result


def _location(path: str, label: Label | None, number: int | None = None) -> dict[str, object]:
    physical: dict[str, object] = {"artifactLocation": {"uri": _uri(path)}}
    location: dict[str, object] = {"physicalLocation": physical}
    if label is not None:
        span = label.span
        physical["region"] = {
            "startLine": span.line,
            "startColumn": span.column,
            "endLine": span.end_line,
            "endColumn": span.end_column,
        }
        if label.text:
            location["message"] = {"text": printable(label.text)}
    if number is not None:
        location["id"] = number
    return location


def _uri(path: str) -> str:
    """A relative path stays relative to the command's working directory; an absolute one becomes a file URI."""
    pure = Path(path)
    return pure.as_uri() if pure.is_absolute() else quote(pure.as_posix(), errors="replace")
