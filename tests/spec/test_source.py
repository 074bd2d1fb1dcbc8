"""What source.py reads: data as typed, and a span under the exact text of every key and value."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from layoutc.diagnostics.diagnostic import Label, Span, nearest, quoted
from layoutc.diagnostics.renderers import render
from layoutc.spec.source import MAX_CHARACTERS, Source, read
from layoutc.spec.yaml11 import plain_value

SPECS = sorted((ROOT / "specs").glob("*.yaml"))


def good(text: str) -> Source:
    source, found = read(text, "x.yaml")
    assert found == []
    assert source is not None
    return source


def under(source: Source, label: Label) -> str:
    """The text that a label's carets stand under."""
    assert label.span.line == label.span.end_line
    return source.text.split("\n")[label.span.line - 1][label.span.column - 1 : label.span.end_column - 1]


@pytest.mark.sample(6)
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_spans_are_the_text_they_name(path: Path) -> None:
    source = good(path.read_text(encoding="utf-8"))
    for place in source.keys:
        assert under(source, source.key(place)).strip('"') == place[-1]
        value: Any = source.data
        for part in place:
            value = value[part]
        if isinstance(value, (str, int, float)):
            shown = under(source, source.value(place))
            if shown.startswith("0x"):
                assert int(shown, 16) == value
            else:
                text = str(value).lower() if isinstance(value, bool) else str(value)
                assert shown.strip('"') == text


def test_data_is_plain() -> None:
    source = good("a: {b: [1, 0x1f], c: 1.5e-3}\nd: 'no'\ne: true\nf: |\n  two\n  lines\n'g': -7\n")
    assert source.data == {"a": {"b": (1, 31), "c": 0.0015}, "d": "no", "e": True, "f": "two\nlines\n", "g": -7}


def test_part_of_a_value() -> None:
    source = good('plain: m k/16\nquoted: "m k/16"\nescaped: "m\\x20k/16"\nfolded: >\n  m k/16\n')
    for key in ("plain", "quoted"):
        assert under(source, source.value((key,), within=(2, 6))) == "k/16"
    assert under(source, source.value(("escaped",), within=(2, 6))) == '"m\\x20k/16"'  # the whole: offsets don't hold
    assert source.value(("folded",), within=(2, 6)).span == source.values[("folded",)]


def test_absent_places_point_at_what_encloses_them() -> None:
    source = good("a:\n  b: {c: 1}\n")
    assert under(source, source.value(("a", "b", "nothing"))) == "{c: 1}"
    assert under(source, source.key(("a", "nothing"))) == "a"
    assert under(source, source.value(("nothing",))) == "a"


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        ("1:32", "a base-60 integer, 92"),
        ("128:1", "a base-60 integer, 7681"),
        ("1:2:3", "a base-60 integer, 3723"),
        ("010", "an octal number, 8"),
        ("089", "text"),
        ("0b101", "a binary number, 5"),
        ("1_000", "a number with digit groups"),
        ("1e-3", "text"),
        ("1.5e3", "text"),
        (".5E3", "text"),
        ("yes", "a boolean"),
        ("Off", "a boolean"),
        ("n", "a boolean"),
        ("2026-01-31", "a date"),
    ],
)
def test_traps(text: str, reading: str) -> None:
    _, trap = plain_value(text)
    assert trap is not None
    assert trap[0] == reading


@pytest.mark.parametrize(("text", "number"), [("010", "10"), ("00", "0"), ("-08", "8"), ("0_0", "0")])
def test_numbers_without_their_leading_zeros(text: str, number: str) -> None:
    _, trap = plain_value(text)
    assert trap is not None
    assert trap[2] == f"write `{number}` without the leading zero"


@pytest.mark.parametrize("text", ["1e-3", "1.5e3", ".5E3", "2.e4", "-1e5"])
def test_numbers_are_spelled_so_that_yaml_reads_them(text: str) -> None:
    _, trap = plain_value(text)
    assert trap is not None
    assert plain_value(trap[2].split("`")[1]) == (float(text), None)


@pytest.mark.parametrize(
    "text", ["m k/16", "e4m3", "two-level", "1/2", "a:b", "1:99x", "-", "low-first", "1.2.3", "0x"]
)
def test_text_is_text(text: str) -> None:
    assert plain_value(text) == (text, None)


def test_line_ends_and_byte_order_marks_move_nothing() -> None:
    source = good("\ufeffa: 1\r\nb: 2\r\n")
    assert source.values[("b",)] == Span(2, 4, 2, 5)


def test_size_is_bounded() -> None:
    source, found = read("a: " + "b" * MAX_CHARACTERS, "x.yaml")
    assert source is None
    assert [item.code for item in found] == ["LC110"]


def test_excerpts_can_not_write_to_the_terminal() -> None:
    _, found = read("a: \x1b[31m\x07", "x.yaml")
    for form in ("full", "concise", "github"):
        assert "\x1b" not in render(found, form)
    assert "\x1b[1;31m" in render(found, "full", color=True)


def test_wide_characters_keep_carets_in_place() -> None:
    _, found = read("summary: {層: [1, 1:32]}\n", "x.yaml")
    lines = render(found, "full").splitlines()
    assert lines[4].index("^") == lines[3].index("1:32") + 1  # one wide character before it


def test_long_lines_are_cut_around_the_finding() -> None:
    _, found = read("a: [" + "1, " * 200 + "1:32]\n", "x.yaml")
    lines = render(found, "full").splitlines()
    assert max(map(len, lines)) < 160
    assert lines[3][lines[4].index("^") :].startswith("1:32")


def test_suggestions() -> None:
    assert nearest("colwise", ["rowwise", "columnwise"]) == "columnwise"
    assert nearest("F32_MAX", ["f32-max", "input-max"]) == "f32-max"
    assert nearest("zebra", ["rowwise", "columnwise"]) is None
    assert quoted("x" * 100) == "`" + "x" * 39 + "…`"


def test_the_compiler_needs_no_torch() -> None:
    code = (
        "import layoutc.spec.schema, layoutc.cli, sys;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'triton', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=SPECS[0].parent.parent).returncode == 0
