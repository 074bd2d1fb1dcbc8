"""The table of formats that people exchange: how many of them the language states, and specs of some that are."""

from __future__ import annotations

import re

import pytest
from places import SPECS

from layoutc.spec.checks.read import read_spec

# The formats, as words that a row of the table names.
FORMATS = (
    *("gpt-oss MXFP4", "DeepSeek-V3", "DeepSeek-V4", "FP8 per channel", "NVFP4 of compressed-tensors", "and ModelOpt"),
    *("MXFP8", "DeepGEMM", "AITER", "MSFP12", "UE5M3", "E4M3FNUZ", "BitNet", "pack-quantized int4"),
    *("NF4 with double quantization", "AWQ", "GPTQ", "HQQ", "GGUF Q8_0", "Q4_0", "IQ4_NL", "Q4_K", "Q6_K", "tinygemm"),
    *("Marlin", "MX9, MX6", "VS-Quant", "a second level for each row", "posit8", "2:4", "permuted channels"),
)
MICRO = """
formats:
  micro: {sign: 0, exponent: 1, mantissa: 0, bias: 1, subnormals: false}
shape: {k: 16}
element: {format: int8}
scale: {format: micro, rule: shared-exponent, super: {format: e8m0, rule: shared-exponent, block: {m: 1, k: 16}}}
orientations:
  rowwise:
    block: {m: 1, k: 2}
    data: {layout: m k}
    scale: {layout: m k/2}
"""
ROWS = """
formats:
  uint4: {integer: 4, offset: 0}
shape: {k: 32}
element: {format: int4}
scale: {format: uint4, rule: scale-first, super: {format: f32, rule: scale-first, of-max: true, block: {m: 1, k: all}}}
orientations:
  rowwise:
    block: {m: 1, k: 16}
    data: {layout: m k}
    scale: {layout: m k/16}
"""


def rows() -> list[tuple[str, str, str]]:
    """The rows of the table: names, whether they are stated, and the lines that say them."""
    text = (SPECS / "README.md").read_text(encoding="utf-8")
    table = text.partition("## What people exchange")[2].partition("\n## ")[0]
    cells = [re.split(r"(?<!\\)\|", line)[1:4] for line in table.splitlines() if line.startswith("| ")]
    return [(names.strip(), how.strip(), lines.strip()) for names, how, lines in cells[1:]]


def test_most_formats_are_stated() -> None:
    """27 of 31 at least; each is in a row of its own or with others like it, and each row has lines."""
    found = {name: [row for row in rows() if name in row[0]] for name in FORMATS}
    assert len(FORMATS) == 31
    assert all(found.values()), [name for name, rows_of in found.items() if not rows_of]
    assert all(lines for _, _, lines in rows())
    stated = [name for name, (row, *_) in found.items() if row[1].startswith("stated")]
    assert len(stated) >= 27, sorted(set(FORMATS) - set(stated))
    assert [names for names, how, _ in rows() if how.startswith("stated") and "compared" not in how] == []


@pytest.mark.parametrize("text", [MICRO, ROWS], ids=["micro-exponents", "rows"])
def test_levels_of_the_table_are_sound(text: str) -> None:
    assert read_spec(f"layoutc: 1\nname: one\nsummary: one of the table\n{text.lstrip()}", "one.yaml")[1] == []
