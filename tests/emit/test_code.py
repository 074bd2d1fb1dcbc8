"""Lines of code that are broken where they are too long."""

from __future__ import annotations

import ast

from hypothesis import given, settings
from hypothesis import strategies as st

from layoutc.emit.code import balanced, wrapped

NAMES = st.sampled_from(["x", "block", "a_long_name_of_something", "first(x, y)", "(a + b)"])


@given(st.text("()a, ", max_size=12))
def test_what_is_balanced(text: str) -> None:
    """By definition: each closing parenthesis has an opening one before it, and none is left."""
    reduced = "".join(one for one in text if one in "()")
    while "()" in reduced:
        reduced = reduced.replace("()", "")
    assert balanced(text) == (not reduced)


@settings(max_examples=30)
@given(st.lists(NAMES, min_size=1, max_size=12), st.integers(40, 90), st.sampled_from(["", "    "]))
def test_a_call_that_is_broken_is_the_same_call(arguments: list[str], width: int, indent: str) -> None:
    """With as many arguments on a line as fit, where it is longer than a line may be."""
    line = f"{indent}made = function({', '.join(arguments)})"
    broken = wrapped((line,), width)
    code = "\n".join(one.removeprefix(indent) for one in broken)
    assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(line.strip()))
    filled: list[str] = []
    for argument in arguments:
        if filled and len(indent) + 4 + len(filled[-1]) + 1 + len(argument) + 1 <= width:
            filled[-1] += f" {argument},"
        else:
            filled.append(f"{argument},")
    if len(broken) > 1:
        assert len(line) > width
        assert [one.removeprefix(f"{indent}    ") for one in broken[1:-1]] == filled
    else:
        assert len(line) <= width or len(indent) + 4 + len(", ".join(arguments)) <= width


def test_a_line_that_is_no_call_stays() -> None:
    line = f"value = (first) + function({'argument, ' * 9}last)"
    assert wrapped((line, "x"), 40) == (line, "x")
