"""Lines of code that are broken where they are too long."""

from __future__ import annotations

import ast

from hypothesis import given, settings
from hypothesis import strategies as st

from layoutc.emit.code import balanced, wrapped

NAMES = st.sampled_from(["x", "block", "a_long_name_of_something", "first(x, y)", "(a + b)", "f(g(h), 1)"])


@given(st.text("()a, ", max_size=12))
def test_what_is_balanced(text: str) -> None:
    """By definition: each closing parenthesis has an opening one before it, and none is left."""
    reduced = "".join(one for one in text if one in "()")
    while "()" in reduced:
        reduced = reduced.replace("()", "")
    assert balanced(text) == (not reduced)


@settings(max_examples=60)
@given(st.lists(NAMES, min_size=1, max_size=12), st.integers(30, 90), st.sampled_from(["", "    "]))
def test_a_call_that_is_broken_is_the_same_call(arguments: list[str], width: int, indent: str) -> None:
    """With lines as long as they may be, and none longer that could be broken."""
    line = f"{indent}made = function({', '.join(arguments)})"
    broken = wrapped((line,), width)
    code = "\n".join(one.removeprefix(indent) for one in broken)
    assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(line.strip()))
    assert len(broken) == 1 or len(line) > width
    inner = broken[1:-1]
    assert all(one.startswith(f"{indent}    ") and len(one) <= width for one in inner)
    assert len(inner) <= 1 or max(map(len, inner)) > width - 25  # as many on a line as fit: the longest takes 23


def test_a_line_that_is_no_call_stays() -> None:
    line = f"value = (first) + function({'argument, ' * 9}last)"
    assert wrapped((line, "x"), 40) == (line, "x")
