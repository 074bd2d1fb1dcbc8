"""Where findings point: at the same words, whatever stands around them."""

from __future__ import annotations

import re
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


BEFORE = {
    "itself": "",  # under another name, right or wrong as it is
    "tensors": """\
    summary: of tensors
    tensors: {data: {name: "{name}.a", dtype: U8}}
    config: {quant_method: a}
    recognize: [quant_method]
""",
    "a record": """\
    summary: of records
    record: {container: gguf, type: Q9, number: 99}
""",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("before", BEFORE)
def test_files_that_are_bound_before_hide_nothing(before: str) -> None:
    hidden = {}
    for path in sorted((TESTS / "errors").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if (bound := re.search(r"^files:\n  [\w-]+:\n((?:    .*\n)+)", text, re.MULTILINE)) is None:
            continue
        more = f"  before:\n{BEFORE[before] or bound[1]}"
        twice = text.replace("files:\n", f"files:\n{more}", 1)
        expected = [one[:2] for one in facts(read_spec_bytes(text.encode(), "a.yaml")[1])]
        found = [one[:2] for one in facts(read_spec_bytes(twice.encode(), "a.yaml")[1], more.count("\n"))]
        at = text[: bound.start()].count("\n") + 1  # what is above has not moved
        if lost := [one for one in expected if one[1][1] > at and one not in found]:
            hidden[path.stem] = lost, found
    assert hidden == {}


# What is wrong with rows alone, with one orientation by name, or with text that ends there.
OF_ROWS = {"matrix_amaxes_block", "own_swizzle_cuts_tile", "super_history", "super_layout_all", "wire_with_amax"}
OF_ROWS |= {"open_bracket", "zero_without_format", "zeros_of_scalar"}
SOUND = "    block: {m: 1, k: 32}\n    data: {layout: m k}\n    scale: {layout: m k/32}\n"


@pytest.mark.parametrize("rowwise", ["itself", "sound"])
def test_what_is_wrong_rowwise_is_as_wrong_columnwise(rowwise: str) -> None:
    """The other orientation with the same words, but for the axes, after a rowwise one that is wrong, too, or sound."""
    hidden = {}
    for path in sorted((TESTS / "errors").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        stated = re.search(r"^orientations:\n  rowwise:\n((?:    .*\n)+)", text, re.MULTILINE)
        if stated is None or "columnwise:" in text or path.stem in OF_ROWS:
            continue
        turned = re.sub(r"\b[mk]\b", lambda axis: {"m": "k", "k": "m"}[axis[0]], stated[1])
        before = SOUND if rowwise == "sound" else stated[1]
        both = f"{text[: stated.start(1)]}{before}  columnwise:\n{turned}{text[stated.end() :]}"
        first, lines = text[: stated.start(1)].count("\n") + 1, stated[1].count("\n")
        expected = [one for one in places(text) if first <= one[1] < first + lines]
        found = places(both, before.count("\n") + 1)
        if lost := [one for one in expected if one not in found]:
            hidden[path.stem] = lost, found
    assert hidden == {}


def places(text: str, lines: int = 0) -> list[tuple[str, int, int]]:
    """What is found where, `lines` further up: words differ in names of axes."""
    spans = [(item.code, item.primary.span) for item in read_spec_bytes(text.encode(), "a.yaml")[1] if item.primary]
    return [(code, span.line - lines, span.column) for code, span in spans if span]
