"""YAML 1.1's surprising readings of unquoted text, and plain words for its parser's errors.

Pure functions of strings; source.py handles positions.
"""

from __future__ import annotations

import re
from typing import Any

# How YAML 1.1 reads a plain scalar. The first match decides; anything else is text.
NULL = re.compile(r"~|null|Null|NULL|")
_BOOLEAN = re.compile(r"true|false", re.IGNORECASE)
_WORD_BOOLEAN = re.compile(r"yes|no|on|off|y|n", re.IGNORECASE)
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,8}")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
LONG_INTEGER = re.compile(r"[-+]?[1-9][0-9]{18,}")
_ZERO_LED = re.compile(r"[-+]?0[0-9_]+")
_BINARY = re.compile(r"[-+]?0b[01_]+")
_GROUPED = re.compile(r"[-+]?[1-9][0-9]*(_[0-9]+)+")
_BASE_60 = re.compile(r"[-+]?[0-9]{1,9}(:[0-5]?[0-9])+(\.[0-9]*)?")
_EXPONENT = re.compile(r"([-+]?)([0-9]+\.?[0-9]*|\.[0-9]+)[eE]([-+]?)([0-9]+)")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?")


def plain_value(text: str) -> tuple[Any, tuple[str, str, str] | None]:
    """The value of a plain scalar, and (what YAML reads, label, help) for a surprising one, else None."""
    if _BOOLEAN.fullmatch(text):
        return text.lower() == "true", None
    if _INTEGER.fullmatch(text):
        return int(text), None
    if _HEX.fullmatch(text):
        return int(text, 16), None
    if _FLOAT.fullmatch(text):
        return float(text.replace(".inf", "inf").replace(".nan", "nan").lower().lstrip(".")), None
    if _WORD_BOOLEAN.fullmatch(text):
        truth = "true" if text.lower() in ("yes", "on", "y") else "false"
        return text, ("a boolean", f"is {truth}", f"write `{truth}`, or quote it to keep the text")
    if _ZERO_LED.fullmatch(text):
        digits = text.lstrip("+-").replace("_", "")
        decimal = digits.lstrip("0") or "0"
        what, label = "text", "is not a number"
        if set(digits) <= set("01234567") and len(digits) < 20:
            what, label = f"an octal number, {int(digits, 8)}", f"is {int(digits, 8)}"
        return text, (what, label, f"write `{decimal}` without the leading zero")
    if _BINARY.fullmatch(text) and len(text) < 64:
        number = int(text.replace("_", ""), 2)
        return text, (f"a binary number, {number}", f"is {number}", f"write `{number}` or `0x{number:x}`")
    if _GROUPED.fullmatch(text):
        return text, ("a number with digit groups", "is text to other readers", f"write `{text.replace('_', '')}`")
    if _BASE_60.fullmatch(text):
        total = 0
        for part in text.lstrip("+-").split(".")[0].split(":"):
            total = total * 60 + int(part)
        pair = text.lstrip("+-").replace(":", ", ")
        help = f"write `[{pair}]` for a list, or quote it to keep the text"
        return text, (f"a base-60 integer, {total}", f"is {total}", help)
    if match := _EXPONENT.fullmatch(text):
        whole, _, fraction = match[2].partition(".")
        spelled = f"{match[1]}{whole or '0'}.{fraction or '0'}e{match[3] or '+'}{match[4]}"
        return text, ("text", "is not a number", f"write `{spelled}`: YAML 1.1 requires the dot and the sign")
    if _DATE.fullmatch(text):
        return text, ("a date", "", "quote it to keep the text")
    return text, None


def syntax_advice(problem: str) -> tuple[str, str, bool]:
    """Words for a parser's error: label, help, and whether to point at its context instead."""
    ends = problem.replace("got '<stream end>'", "the file ends")
    lines, indent = (
        "write `key: value` lines of equal indentation",
        "indent the keys of one mapping by the same number of spaces",
    )
    close = "close the bracket before the line ends, or write the list one item per line with `- `"
    blocks = r"expected <block end>, but found"
    table = (
        (
            r"mapping values are not allowed",
            "a second `: `",
            "quote the value, or start a new line for the new key",
            False,
        ),
        (rf"{blocks} '(-|<block (sequence|mapping) start>)'", "indented unlike the lines above it", indent, False),
        (blocks, "does not fit what the lines above began", lines, False),
        (r"expected ',' or '\]'", ends, close, False),
        (r"expected ',' or '\}'", ends, "close the brace, or separate the items with commas", False),
        (r"unexpected end of stream", "the file ends inside quotes", "close the quotes", False),
        (r"could not find expected ':'", "expected `: ` after this key", "write `key: value`", True),
        (r"cannot start any token", "can't start a value", "quote the value", False),
        (r"unknown escape", "not an escape", "use single quotes, in which backslashes mean themselves", False),
    )
    for pattern, label, help, at_context in table:
        if re.search(pattern, problem):
            return label, help, at_context
    return problem.replace("<", "").replace(">", ""), "quote the value if it holds special characters", False
