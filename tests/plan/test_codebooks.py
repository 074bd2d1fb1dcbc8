"""Which codebooks kernels look up in memory, and where each begins."""

from __future__ import annotations

import pytest
from numpy_models import recipe_layout

from layoutc.plan.codebooks import Codebook, codebooks_of


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
