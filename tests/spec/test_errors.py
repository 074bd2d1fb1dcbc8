"""Every message that a bad spec gets, letter by letter: errors/<name>.yaml is the spec, errors/<name>.txt the message.

A new check begins with two such files. `pytest --update-golden` writes the .txt.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT, TESTS

from layoutc.build import pipeline
from layoutc.diagnostics.diagnostic import Diagnostic, catalogue, has_errors
from layoutc.diagnostics.renderers import FORMS, page, render
from layoutc.spec.checks.read import read_spec, read_spec_bytes
from layoutc.spec.formats import BUILTIN
from layoutc.spec.rules import RULES
from layoutc.spec.schema import COLLECTED, Block, Buffer, Element, FormatDef, Scale, Spec

ERRORS = TESTS / "errors"
SPECS = ROOT / "specs"
CASES = sorted(ERRORS.glob("*.yaml"))
NOT_OF_A_SPEC = ("LC4", "LC6", "LC9")  # about a weight's shape, a revision or a file, so no spec can show them
GOOD = {path.stem: path.read_text(encoding="utf-8") for path in sorted(SPECS.glob("*.yaml"))}


@cache
def read(path: Path) -> tuple[Spec | None, list[Diagnostic]]:
    return read_spec_bytes(path.read_bytes(), f"specs/{path.name}")


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_message(case: Path, golden: Callable[[Path, str], None]) -> None:
    """And what each owes its reader: a short headline, a place, carets on real text, something to do."""
    spec, found = read(case)
    assert found, "a case in errors/ has something to find"
    assert (spec is None) == has_errors(found)
    golden(case.with_suffix(".txt"), render(found, "full"))
    lines = case.read_text(encoding="utf-8").split("\n")
    for item in found:
        assert len(item.message) < 90
        assert item.help
        assert item.primary is not None
        for label in (item.primary, *item.secondary):
            assert 1 <= label.span.line <= len(lines)
            assert 1 <= label.span.column <= len(lines[label.span.line - 1]) + 1
            assert (label.span.line, label.span.column) < (label.span.end_line, label.span.end_column)


def test_every_expected_message_has_its_spec() -> None:
    assert {path.stem for path in ERRORS.glob("*.txt")} == {path.stem for path in CASES}


def test_every_code_of_a_spec_has_a_case() -> None:
    seen = {item.code for case in CASES for item in read(case)[1]}
    assert {code for code in catalogue() if not code.startswith(NOT_OF_A_SPEC)} == seen


def test_a_code_outside_the_catalogue_is_refused() -> None:
    with pytest.raises(KeyError, match="LC999"):
        Diagnostic("LC999", "no such code", "specs/x.yaml")


def patched(base: str | None, example: str) -> str:
    """A good spec with the top-level keys of `example` in place of its own."""
    if base is None:
        return example
    parts = re.split(r"(?m)^(?=[a-z_]+:)", GOOD[base])
    given_keys = set(re.findall(r"(?m)^[a-z_]+:", example))
    return "".join(part for part in parts if part.split(" ")[0].strip() not in given_keys) + example.rstrip() + "\n"


@pytest.mark.parametrize("code", [code for code in catalogue() if not code.startswith(NOT_OF_A_SPEC)])
def test_explained_examples_do_what_they_say(code: str) -> None:
    entry = catalogue()[code]
    path = f"specs/{entry.base}.yaml"
    assert code in {item.code for item in read_spec(patched(entry.base, entry.example), path)[1]}
    cured = read_spec(patched(entry.base, entry.instead), path)[1]
    assert cured == [] if entry.base else code not in {item.code for item in cured}


def test_every_code_has_a_page() -> None:
    for entry in catalogue().values():
        text = page(entry)
        assert all(head in text for head in ("What\n", "Why\n", "Example\n", "Use instead\n"))
        assert entry.severity in ("error", "warning")


def never_raises(text: str) -> None:
    spec, found = read_spec(text, "specs/nvfp4.yaml")
    assert (spec is None) == has_errors(found)
    assert found == sorted(found, key=lambda item: item.sort_key)
    assert len(set(found)) == len(found)
    for form in FORMS:
        render(found, form)


MARKS = "{}[]:,-?&*!|>'\"%@`#~\n\t \r\x00\ufeff\ud800\u2028"
WHOLE = (
    "  ",
    ": ",
    "- ",
    "---\n",
    "...\n",
    "<<: *a",
    "!!int ",
    "&a ",
    "*a",
    "layoutc: 1\n",
    "scale:",
    "m k/16",
    "null",
)
YAML_PIECES = st.sampled_from([*MARKS, *WHOLE, "1:32", "0x7f", "1e-3", "1" * 5000, "[" * 300, "{a: " * 100])


@pytest.mark.thorough
@settings(max_examples=120, deadline=None)
@given(st.one_of(st.text(), st.lists(st.one_of(YAML_PIECES, st.text(max_size=5)), max_size=30).map("".join)))
def test_never_raises_on_any_text(text: str) -> None:
    never_raises(text)


@settings(max_examples=120, deadline=None)
@given(st.binary(max_size=200))
def test_never_raises_on_any_bytes(content: bytes) -> None:
    read_spec_bytes(content, "specs/x.yaml")


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(GOOD.values())), st.data())
def test_never_raises_on_damaged_specs(text: str, data: st.DataObject) -> None:
    """Cut, doubled and replaced pieces of good specs."""
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 40)))
        text = (
            text[:start]
            + data.draw(st.one_of(YAML_PIECES, st.just(text[start:end] * 2), st.text(max_size=3)))
            + text[end:]
        )
    never_raises(text)


def test_never_raises_where_codes_of_files_have_other_bits() -> None:
    """A codebook that has become longer has codes of 5 bits, of which no one fills a byte."""
    never_raises(GOOD["fp4_bitsandbytes"].replace("0.0052083333,", "0.0052083333, 0.3, 0.4,", 1))


TOKEN = re.compile(r"[A-Za-z_][\w-]*|\d+")
WORDS = sorted(
    {word for text in GOOD.values() for word in TOKEN.findall(text)} | {"0", "-1", "3", "7", "129", "e3m2", "x"}
)


@pytest.mark.thorough
@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(GOOD)), st.data())
def test_never_raises_on_exchanged_words(name: str, data: st.DataObject) -> None:
    """Still YAML, mostly still the right keys: reaches the later checks. What passes must also compile to a layout."""
    text = GOOD[name]
    for _ in range(data.draw(st.integers(1, 3))):
        match = data.draw(st.sampled_from(list(TOKEN.finditer(text))))
        text = text[: match.start()] + data.draw(st.sampled_from(WORDS)) + text[match.end() :]
    never_raises(text)
    spec, _ = read_spec(text, f"specs/{name}.yaml")
    if spec is not None:
        pipeline.plan_for(spec)


def test_the_language_page_shows_what_there_is() -> None:
    """Its example is a spec that passes; its names of rules, parameters and formats are those in the data."""
    text = (SPECS / "README.md").read_text(encoding="utf-8")
    first, second, third = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert read_spec(first, "specs/nvfp4.yaml")[1] == []
    assert read_spec(patched("fp8_e5m2_current", second), "specs/fp8_e5m2_current.yaml")[1] == []
    assert read_spec(patched("q8_0", third), "specs/q8_0.yaml")[1] == []
    for name in (*RULES, *BUILTIN, *(key for rule in RULES.values() for key in rule.parameters)):
        assert re.search(rf"(`|\b){name}(`|\b)", text), f"specs/README.md says nothing of {name}"
    keys = {key for model in (Spec, Scale, Buffer, Block, Element, FormatDef) for key in model.model_fields}
    for key in keys - COLLECTED:
        assert re.search(rf"\b{key}\b", text), f"specs/README.md says nothing of {key}"


# case: what its author typed, and what the message says to type in its place
CURES: dict[str, tuple[str, str]] = {
    "block_scalar": ("block: 32", "block: {m: 1, k: 32}"),
    "dtype_key": ("dtype", "format"),
    "equals": ("format=e4m3", "format: e4m3"),
    "float4_e2m1fn_x2": ("format: float4_e2m1fn_x2", "format: e2m1"),
    "float8_e8m0fnu": ("format: float8_e8m0fnu", "format: e8m0"),
    "fmt": ("fmt", "format"),
    "granularity_te": ("block: [1, 32]", "block: {m: 1, k: 32}"),
    "group_size": ("group_size", "k"),
    "history_number": ("history: 1024", "history: {length: 1024, pick: max}"),
    "int5": ("shape: {m: 4, k: 4}", "shape: {m: 8, k: 8}"),
    "layout_comma": ('layout: "m, k"', "layout: m k"),
    "layout_mk": ("layout: mk", "layout: m k"),
    "minus_one": ("k: -1", "all"),
    "one_magnitude": ("format: int2", "format: e2m1"),
    "pad_order": ("pad: [128, 4]", "pad: [4, 128]"),
    "round_ceil": ("ceil", "up"),
    "rule_rceil": ("rule: rceil", "rule: power-of-two, round: up"),
    "scale_bf16": ("format: bf16", "format: f32"),
    "scale_f16": ("format: f16", "format: f32"),
    "scale_fp32": ("format: fp32", "format: f32"),
    "scale_nf4": ("format: nf4", "format: f32"),
    "scale_no_rule": ("format: e8m0", "rule: power-of-two"),
    "scale_without_tensor": ("scale: {format: e4m3", "rule: two-level"),
    "summary_hash": ("summary: weights of block #2 of the model", "summary: 'weights of block #2 of the model'"),
    "swizzle_name": ("{swizzle: 128x4}", "{swizzle: (rt a b) (ct c) -> rt ct b a c, a: 4, b: 32, c: 4}"),
    "tensor_scale": ("tensor: {scale", "amax"),
    "torch_name": ("format: float8_e4m3fn", "format: e4m3"),
    "trailing_comma": ("},\n", ""),
    "unsigned": (", signed: false", ""),
    "value_comma": ("spec,", "spec"),
    "own_swizzle_cuts_tile": ("shape: {m: 4, k: 32}", "shape: {m: 8, k: 32}"),
    "own_swizzle_pad": ("pad: [1, 12]", "pad: [1, 24]"),
    "own_swizzle_missing_size": ("swizzle: m (a b) -> m b a", "swizzle: m (ko a b) -> m (ko b a), a: 4, b: 2"),
    "words_cut": ("shape: {k: 2}", "shape: {k: 8}"),
    "words_high_first": ("pack: high-first", "pack: low-first"),
    "zero_int4": ("zero: int4", "zero: int8"),
    "zeros_cut_byte": ("shape: {m: 32, k: 32}", "shape: {m: 32, k: 64}"),
    "zeros_cut_byte_as_scales": ("    scale: {layout: m k/32}\n", "zero: {layout: m k/32, pad: [1, 2]}"),
    "zeros_leave_out_axis": ("zero: {layout: m}", "layout: m k/32"),
    "zeros_of_scalar": ("shape: {m: 32, k: 64}", "shape: {m: 64, k: 64}"),
    "zero_point": ("zero_point", "zero"),
    "super_half_range": ("{format: f16, rule: scale-first, block", "of-max: true"),
    "super_all_rows": ("m: all, k: 256", "m: 1"),
    "super_cuts_block": ("k: 80", "k: 96"),
    "super_of_rows": ("k: 256}}}", "k: all"),
    "super_narrow_scales": ("shape: {k: 64}", "shape: {k: 128}"),
    "super_layout_all": ("layout: m k/256", "layout: m"),
    "super_layout_axis": ("super: {layout: m}", "layout: m k/256"),
    "super_layout_divided": ("layout: m k/512", "layout: m k/256"),
    "super_hides_nan": ("{format: f32, rule: amax-over-max, block", "nan-scale: true"),
    "super_rule_misspelt": ("scale-frist", "scale-first"),
    "super_wide_scale": ("format: f16, rule: scale-first, super", "format: int8"),
    "super_zero_bias": ("scale-and-bias", "scale-and-minimum"),
    "record_cuts_block": ("size: 48", "size: 64"),
    "record_missing": ("        - data 0:16\n", "data 16:32 bits 0:8"),
    "record_shape": ("shape: {k: 16}", "shape: {k: 32}"),
}
# What remains to be typed where the message names a word, not the text around it, or asks for a second thing.
FINISHED = {
    "trailing_comma": (("{format: e4m3scale", "{format: e4m3}\nscale"),),
    "zeros_cut_byte_as_scales": (
        ("zero: {layout: m k/32, pad", "    scale: {layout: m k/32}\n    zero: {layout: m k/32, pad"),
    ),
    "zeros_leave_out_axis": (("    layout: m k/32", "    zero: {layout: m k/32}"),),
    "super_half_range": (("super: of-max: true", "super: {of-max: true, format: f16, rule: scale-first, block"),),
    "super_all_rows": (("{m: 1}", "{m: 1, k: 256}"),),
    "super_of_rows": (("k: all\n", "k: all}}}\n"),),
    "super_layout_axis": (("    layout: m k/256", "    super: {layout: m k/256}"),),
    "super_hides_nan": (
        ("super: nan-scale: true", "super: {nan-scale: true, format: f32, rule: amax-over-max, block"),
    ),
    "super_wide_scale": (("{format: int8: ", "{format: int8, rule: scale-first, super: "),),
    "record_missing": (("data 16:32 bits 0:8", "        - data 0:16\n        - data 16:32 bits 0:8\n"),),
    "minus_one": (("    block: {m: 1, all}", "    block: {m: 1, k: all}"), ("layout: m k/32", "layout: m")),
    "one_magnitude": (("  int2: {integer: 2, symmetric: true}\n", ""), ("formats:\n", "")),
    "scale_no_rule": (("{rule: power-of-two}", "{format: e8m0, rule: power-of-two}"),),
    "scale_without_tensor": (("rule: two-level}", "scale: {format: e4m3, rule: two-level}\ntensor: {amax: f32}"),),
    "tensor_scale": (("amax: f32}\n", "tensor: {amax: f32}\n"),),
    "unsigned": (
        ("{format: e8m0, rule: power-of-two}\n", "{format: f32, rule: min-max, zero: int8}\nshape: {k: 2}\n"),
    ),
}


@pytest.mark.parametrize("name", CURES)
def test_what_a_message_says_to_type_works(name: str) -> None:
    """The text stands in the message, and with it in place of what was typed, nothing is found any more."""
    wrong, right = CURES[name]
    message, text = ((ERRORS / f"{name}{suffix}").read_text(encoding="utf-8") for suffix in (".txt", ".yaml"))
    assert right in message
    head, body = text.split("summary", 1)  # names of recipes are those of their mistakes
    assert wrong in f"summary{body}"
    text = head + f"summary{body}".replace(wrong, right, 1)
    for half, whole in FINISHED.get(name, ()):
        assert half in text
        text = text.replace(half, whole, 1)
    assert [item.message for item in read_spec(text, f"specs/{name}.yaml")[1]] == []
