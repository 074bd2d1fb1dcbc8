"""Kernels of generated modules called with shapes, planes and outs that the recipe does not take: refused, by name."""

from __future__ import annotations

import re

import pytest
import torch
from test_kernels import NAMES, QUANTIZING, kernels, pytestmark, recipe, shapes
from weight_recipes import KINDS

__all__ = ["pytestmark"]
UNEVEN = [name for name in NAMES if max(recipe(name).LAYOUT.multiple_m, recipe(name).LAYOUT.multiple_k) > 1]


def bad_shapes(name: str) -> list[tuple[int, int, tuple[int, int]]]:
    """Shapes that are no multiples, a row or a column too many or too few, and the next that fits each."""
    layout = recipe(name).LAYOUT
    um, uk = layout.multiple_m, layout.multiple_k
    found = [(um + 1, uk, (2 * um, uk)), (um - 1, uk, (um, uk))] if um > 1 else []
    return found + ([(um, uk + 1, (um, 2 * uk)), (um, uk - 1, (um, uk))] if uk > 1 else [])


def rows_of(name: str) -> tuple[str, ...]:
    """Its rowwise orientation, which every recipe has."""
    assert "rowwise" in recipe(name).LAYOUT.sources
    return ("rowwise",)


@pytest.mark.parametrize("name", [name for name in KINDS if name in UNEVEN])
def test_shapes_that_are_no_multiples_are_refused_with_the_next_that_fits(name: str) -> None:
    made, layout = kernels(name), recipe(name).LAYOUT
    amax = torch.ones(1) if layout.shares_amax else None
    for m, k, near in bad_shapes(name):
        message = rf"{name} takes (rows|columns) in multiples of .* \({m} rows, {k} columns\).* {re.escape(str(near))}"
        x = torch.zeros(m, k)
        if made.quantize_tile is not None:
            with pytest.raises(ValueError, match=message):
                made.quantize(x, amax, rows_of(name))
            with pytest.raises(ValueError, match=message):
                made.quantize_buffers(x, amax, rows_of(name))
        with pytest.raises(ValueError, match=message):
            made.lay_out({}, m, k, rows_of(name))


@pytest.mark.parametrize("name", KINDS)
def test_planes_of_another_shape_or_dtype_are_refused(name: str) -> None:
    made, layout = kernels(name), recipe(name).LAYOUT
    m, k = shapes(name)[0]
    facts = {plane: fact for plane, fact in layout.planes(m, k).items() if plane != "amax"}
    planes = {plane: torch.zeros(fact.shape, dtype=fact.dtype) for plane, fact in facts.items()}
    for plane, fact in facts.items():
        others = (torch.zeros((*fact.shape, 1), dtype=fact.dtype), torch.zeros(fact.shape, dtype=torch.float64))
        for other in others:
            stated = rf"{name}: {plane} of a weight of \({m}, {k}\) is {fact.dtype} of shape"
            with pytest.raises(ValueError, match=stated):
                made.lay_out(planes | {plane: other}, m, k, rows_of(name))


@pytest.mark.parametrize("name", [name for name in KINDS if name in QUANTIZING])
def test_outs_of_another_shape_dtype_or_alignment_are_refused(name: str) -> None:
    """Before one of them is written."""
    made, layout = kernels(name), recipe(name).LAYOUT
    m, k = shapes(name)[0]
    written = layout.written(m, k, rows_of(name))
    outs = {plane: torch.zeros(fact.shape, dtype=fact.dtype) for plane, fact in written.items()}
    amax = torch.ones(1) if layout.shares_amax else None
    for plane, fact in written.items():
        several = torch.zeros((*fact.shape, 2), dtype=fact.dtype)
        near = torch.zeros(outs[plane].numel() * fact.dtype.itemsize + 8, dtype=torch.uint8)
        others = [several, several[..., 0], torch.zeros(fact.shape, dtype=torch.float64)]
        if fact.dtype.itemsize == 1:
            others.append(near[1 : 1 + outs[plane].numel()].view(fact.dtype).view(fact.shape))
        for other in others:
            if other.numel() <= 1 and other.shape == fact.shape and other.dtype == fact.dtype:
                continue
            with pytest.raises(ValueError, match=rf"{name}: {plane} must be contiguous {fact.dtype} of shape"):
                made.quantize(torch.ones(m, k), amax, rows_of(name), outs | {plane: other})
    assert not any(one.view(torch.uint8).any() for one in outs.values())
