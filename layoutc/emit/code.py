"""Pieces of generated code: calls with their constants by name, lines that are not too long."""

from __future__ import annotations

import re
import textwrap

from layoutc.plan.conversions import Constant, Conversion, Dtype, NanCode

Lines = tuple[str, ...]


def call(function: str, *values: str, **constants: str | int | float | bool) -> str:
    """A call: values as they are written, constants by their names."""
    named = (f"{name}={value if isinstance(value, str) else repr(value)}" for name, value in constants.items())
    return f"{function}({', '.join([*values, *named])})"


def converted(conversion: Conversion, value: str, prefix: str) -> str:
    """A value converted, where constants of the format begin with a prefix (`SCALE`)."""

    def spelled(constant: Constant) -> str:
        match constant:
            case Dtype():
                return f"tl.{constant.name}"
            case NanCode():
                return f"{prefix}_NAN"
            case str():
                return f'"{constant}"'
            case _:
                return repr(constant)

    constants = {name: spelled(constant) for name, constant in conversion.constants.items()}
    return call(f"lt.{conversion.function}", value, *(["HARDWARE"] if conversion.takes_hardware else []), **constants)


def constants(*names: str) -> str:
    """Parameters that are known when a kernel is compiled."""
    return " ".join(f"{name}: tl.constexpr," for name in names)


def indented(lines: Lines, steps: int = 1) -> Lines:
    """Lines further to the right."""
    return tuple(f"{'    ' * steps}{line}" if line else "" for line in lines)


def wrapped(lines: Lines, width: int) -> Lines:
    """Calls that the formatter would write with an argument a line, filled up to the width instead."""
    found: list[str] = []
    for line in lines:
        start = line[: len(line) - len(line.lstrip())]
        opened, arguments = line.find("("), line[line.find("(") + 1 : -1]
        one_call = line.endswith(")") and balanced(arguments)
        if len(line) <= width or not one_call or len(start) + 4 + len(arguments) <= width:
            found.append(line)
            continue
        whole = re.sub(r"\([^()]*\)", lambda one: one[0].replace(" ", "\0"), f"{arguments},")  # stays on one line
        filled = textwrap.wrap(whole, width - len(start) - 4, break_long_words=False, break_on_hyphens=False)
        kept = (f"{start}    {one}".replace("\0", " ") for one in filled)
        found += [line[: opened + 1], *kept, f"{start})  # fmt: skip"]
    return tuple(found)


def balanced(text: str) -> bool:
    """True where no parenthesis in a text closes one that stands before it."""
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return False
    return depth == 0
