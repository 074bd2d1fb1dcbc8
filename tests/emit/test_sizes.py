"""Sizes as expressions: in generated code a buffer has the shape that the layout gives it."""

from __future__ import annotations

from math import lcm
from pathlib import Path

import pytest
from numpy_models import RECIPES, layout_of, recipe_layout
from places import UNSHIPPED

from layoutc.emit.size_text import Sizes
from layoutc.ints.sizes import cdiv, up
from layoutc.layout.layout import Layout

BITS_OF_SCALES = """
layoutc: 1
name: bits
summary: scales of one bit, eight of which share a byte of a swizzled buffer
element: {format: e4m3}
scale:
  format: micro
  rule: shared-exponent
  super: {format: e8m0, rule: shared-exponent, block: {m: 8, k: 32}}
orientations:
  rowwise:
    block: {m: 1, k: 4}
    data: {layout: m k}
    scale: {layout: m k/4, pad: [32, 32], swizzle: "(a b) (c d) -> b c (d a)", a: 2, c: 2}
  columnwise:
    block: {m: 1, k: 4}
    data: {layout: k m}
    scale: {layout: k/4 m, pad: [32, 32], swizzle: "(a b) (c d) -> (c a b d)", a: 8, c: 4}
shape: {m: 128, k: 128}
formats:
  micro: {sign: 0, exponent: 1, mantissa: 0, bias: 1, subnormals: false}
"""
UNSHIPPED_SPECS = sorted(UNSHIPPED.rglob("*.yaml"))


def check(layout: Layout) -> None:
    unit = lcm(*(plane.row_multiple for plane in layout.planes)), lcm(*(p.column_multiple for p in layout.planes))
    sizes = Sizes(layout)
    for rows, columns in ((1, 1), (3, 2), (5, 7)):
        m, k = (
            lcm(least, one) * n
            for least, one, n in zip(unit, (layout.multiple_m, layout.multiple_k), (rows, columns), strict=True)
        )
        for buffer in layout.buffers:
            stated = eval(sizes.buffer(buffer), {"m": m, "k": k, "cdiv": cdiv, "up": up})
            assert stated == buffer.shape(m, k), (buffer.name, m, k)


@pytest.mark.parametrize("name", RECIPES)
def test_buffers_of_shipped_recipes(name: str) -> None:
    check(recipe_layout(name))


@pytest.mark.parametrize("path", UNSHIPPED_SPECS, ids=lambda path: path.stem)
def test_buffers_of_recipes_that_nobody_ships(path: Path) -> None:
    check(layout_of(path.read_text(encoding="utf-8"), path.stem))


def test_scales_of_one_bit_are_packed_in_swizzled_buffers() -> None:
    """Their count was stated, as where values have a byte each."""
    layout = layout_of(BITS_OF_SCALES, "bits")
    check(layout)
    scales = [buffer.shape(128, 128) for buffer in layout.buffers if buffer.kind == "scale"]
    assert scales == [(64, 2, 4), (512,)]
