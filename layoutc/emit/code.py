"""Pieces of generated code: calls with named constants, indentation, line breaks."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from layoutc.plan.conversions import Constant, Conversion, Dtype, NanCode, Table

Lines = tuple[str, ...]


def call(function: str, *values: str, **constants: str | int | float | bool) -> str:
    """A call with values as positional arguments and constants as keyword arguments."""
    named = (f"{name}={value if isinstance(value, str) else repr(value)}" for name, value in constants.items())
    return f"{function}({', '.join([*values, *named])})"


def converted(conversion: Conversion, value: str, prefix: str) -> str:
    """The call that converts a value. prefix: of the format's named constants, such as `SCALE`."""

    def spelled(constant: Constant) -> str:
        match constant:
            case Dtype():
                return f"tl.{constant.name}"
            case NanCode():
                return f"0x{constant.value:02X}"
            case Table():
                return f"{prefix}_{constant.name}"
            case str():
                return f'"{constant}"'
            case _:
                return repr(constant)

    constants = {name: spelled(constant) for name, constant in conversion.constants.items()}
    constants |= {"codebooks": "codebooks"} if conversion.takes_codebooks else {}
    given = [*(["bits"] if conversion.takes_bits else []), *(["CVT_LEVEL"] if conversion.takes_hardware else [])]
    return call(f"lt.{conversion.function}", value, *given, **constants)


def commented(line: str, doc: str, longest: int) -> Lines:
    """A line with a comment: at its end, or above it if the result would exceed `longest`."""
    ended = f"{line}  # {doc}"
    return (ended,) if len(ended) <= longest else (f"# {doc}", line)


def indented(lines: Iterable[str]) -> list[str]:
    """Indents lines by one step."""
    return [f"    {line}" if line else "" for line in lines]


def wrapped(lines: Lines, width: int) -> Lines:
    """Breaks lines longer than `width` that are one call, with as many arguments per line as fit.

    `fmt: skip` keeps the formatter from writing one argument per line.
    """
    broken: list[str] = []
    for line in lines:
        start = line[: len(line) - len(line.lstrip())]
        opened, arguments = line.find("("), line[line.find("(") + 1 : -1]
        short = len(line) <= width or len(start) + 4 + len(arguments) <= width
        if short or not (line.endswith(")") and balanced(arguments)):
            broken.append(line)
            continue
        room = width - len(start) - 4
        kept = rf"\([^()]{{,{room // 2}}}\)"  # each of these stays on one line
        whole = re.sub(kept, lambda one: one[0].replace(" ", "\0"), f"{arguments},")
        parts = re.split(rf" (?=\w+=\([^()]{{{room // 2 + 1},}}\))", whole)  # a longer one begins on a new line
        filled = [
            one for part in parts for one in textwrap.wrap(part, room, break_long_words=False, break_on_hyphens=False)
        ]
        inner = (f"{start}    {one}".replace("\0", " ") for one in filled)
        broken += [line[: opened + 1], *inner, f"{start})  # fmt: skip"]
    return tuple(broken)


def balanced(text: str) -> bool:
    """True if a text closes no parenthesis that was opened before it."""
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return False
    return depth == 0
