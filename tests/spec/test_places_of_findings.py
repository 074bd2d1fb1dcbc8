"""Where findings point: at the same words, whatever stands around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from places import TESTS

from layoutc.diagnostics.diagnostic import Diagnostic
from layoutc.spec.checks.read import read_spec_bytes

CASES = {path.stem: path.read_bytes() for path in sorted((TESTS / "errors").glob("*.yaml"))[::2]}
# How a text ends, what a line is indented by, and whether there is a line at all, is what these findings are about.
BLANKS_MATTER, LINES_MATTER = {"block_scalar", "open_quote", "tab"}, {"empty"}


@cache
def as_written(case: str) -> list[tuple[object, ...]]:
    """What is said of a case before anything is changed."""
    return facts(read_spec_bytes(CASES[case], "a.yaml")[1])


def facts(found: list[Diagnostic], lines: int = 0) -> list[tuple[object, ...]]:
    """What is said and where, `lines` further up."""
    return [
        (
            item.code,
            *(
                (label.text, span.line - lines, span.column, span.end_line - lines, span.end_column)
                for label in (item.primary, *item.secondary)
                if label is not None and (span := label.span)
            ),
        )
        for item in found
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (lambda text: b"# a comment\n\n" + text, 2),
        (lambda text: text.replace(b"\n", b"   \n"), 0),
        (lambda text: text.replace(b"\n", b"\r\n"), 0),
        (lambda text: text.replace(b"layoutc: 1\n", b"layoutc: 1  # \xc3\xa9t\xc3\xa9\n"), 0),
    ],
    ids=["lines before", "blanks behind", "lines of Windows", "a comment of two-byte letters"],
)
def test_findings_stay_at_their_words(change: Callable[[bytes], bytes], lines: int) -> None:
    moved = {}
    for case in CASES.keys() - (LINES_MATTER if lines else BLANKS_MATTER):
        expected = as_written(case)
        found = facts(read_spec_bytes(change(CASES[case]), "a.yaml")[1], lines)
        if found != expected:
            moved[case] = expected, found
    assert moved == {}


@pytest.mark.parametrize("line", [1, 2, 7])
def test_bytes_that_are_no_text_are_found_in_their_line(line: int) -> None:
    lines = [b"# a comment"] * 9
    lines[line - 1] = b"# caf\xe9"
    spec, found = read_spec_bytes(b"\n".join(lines), "a.yaml")
    assert spec is None
    assert facts(found) == [("LC107", ("byte 0xe9", line, 1, line, 2))]
