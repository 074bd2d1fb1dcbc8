"""Which codebooks kernels look up in memory, and where each begins."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_models import recipe_layout

from layoutc.plan.codebooks import Codebook, codebooks_of
from layoutc.plan.conversions import lines_of
from layoutc.spec.formats import BUILTIN, codebook_thresholds, make


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("adam_v8", {"dynamic8_unsigned": Codebook("", "element", 0, 256)}),
        ("adam_m4", {"dynamic4": Codebook("", "element", 0, 16)}),
        ("nf4", {"dynamic8": Codebook("_of_scales", "element", 0)}),
        ("mxfp8", {}),
        ("int4_packed128_zeros", {}),
    ],
)
def test_codebooks_of_scales_and_states_are_looked_up(recipe: str, expected: dict[str, Codebook]) -> None:
    """Those of elements are not, but of states: a program holds them."""
    found = codebooks_of(recipe_layout(recipe))
    assert {fmt.name: book for fmt, book in found.items()} == expected


@pytest.mark.parametrize("name", ["dynamic8", "dynamic8_unsigned", "nf4"])
def test_lines_are_at_most_one_step_behind(name: str) -> None:
    """In fp32, at each step and at the numbers beside it: cut off, they are the steps that are reached, or one less."""
    fmt = BUILTIN[name]
    lines, steps = lines_of(fmt), np.array(codebook_thresholds(fmt), np.float32)
    x = np.concatenate([np.nextafter(steps, np.float32(-9)), steps, np.nextafter(steps, np.float32(9))])
    slopes, ends, spans = (np.array(lines[key], np.float32)[:, None] for key in ("SLOPES", "ENDS", "SPANS"))
    missing = spans * np.clip(ends - (np.abs(x) if lines["ZERO"] else x) * slopes, 0, 1)
    at = np.float32(len(steps) - 0.5 - lines["ZERO"]) - missing.sum(0, dtype=np.float32)
    assert at.min() >= 0
    below = np.maximum(np.floor(np.where((x < 0) & (lines["ZERO"] > 0), -at, at)) + lines["ZERO"], 0)
    behind = (steps <= x[:, None]).sum(1) - below
    assert set(behind.tolist()) == {0, 1}


def test_a_codebook_whose_steps_narrow_has_no_lines() -> None:
    assert lines_of(make("narrowing", {"values": [0.0, 8.0, 12.0, 14.0, 15.0, 15.5]})) == {}
