"""Pieces of a quantized weight that share scales, in any order, some of them twice: written together, or not at all."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest
import torch
from numpy_models import recipe

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.storage import pending_writes
from layoutc.runtime.weight.tensor import QuantizedTensor

ROWS = 64
PIECES = list(pairwise((0, 8, 40, ROWS - 1, ROWS)))  # the last one is the last row
# Each has a scale that all of these rows share: an amax, or that of a larger block.
RECIPES = ["nvfp4", "fp8_current", "fp8_block"]


def weight(name: str, seed: int) -> QuantizedTensor:
    values = torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(seed))
    made: QuantizedTensor = recipe(name).quantize(10.0**seed * values)
    return made


def raw(tensor: QuantizedTensor) -> list[bytes]:
    return [plane.contiguous().view(torch.uint8).numpy().tobytes() for plane in tensor.planes().values()]


@pytest.mark.parametrize("again", range(len(PIECES) - 1))
@pytest.mark.parametrize("name", RECIPES)
def test_pieces_are_written_when_the_last_has_come(name: str, again: int) -> None:
    """In every order; one of them comes twice before the last."""
    source, target = weight(name, 1), weight(name, 2)
    before, wanted = raw(target), raw(source)
    assert before != wanted
    for order in permutations(PIECES):
        target.copy_(weight(name, 2))
        for first, last in (*order[:-1], order[again]):
            target[first:last].copy_(source[first:last])
            assert raw(target) == before, f"{order}: rows {first} to {last} were written before the others had come"
            with pytest.raises(LayoutError, match="It holds what it held before"):
                target.dequantize()
        first, last = order[-1]
        target[first:last].copy_(source[first:last])
        assert raw(target) == wanted, order
        assert not target.store.writes.waiting


@pytest.mark.parametrize("name", RECIPES)
def test_of_a_piece_that_came_twice_the_second_is_written(name: str) -> None:
    """From another weight than the first time, whose pieces then are what is missing."""
    source, other, target = weight(name, 1), weight(name, 3), weight(name, 2)
    for first, last in PIECES[:-1]:
        target[first:last].copy_(source[first:last])
    with pytest.raises(LayoutError, match="were not quantized together"):
        target[ROWS - 1 :].copy_(other[ROWS - 1 :])
    target[ROWS - 1 :].copy_(source[ROWS - 1 :])
    assert raw(target) == raw(source)


def test_a_piece_that_begins_where_a_tensor_ends_is_not_its_own() -> None:
    """A tensor that is the first rows of another drops what waits for its rows when it is written, and no more."""
    tensor = weight("nvfp4", 1)

    def waits(first: int, last: int) -> pending_writes.Piece:
        covers = pending_writes.Rect(first, last, 0, ROWS)
        return pending_writes.Piece(tensor.store, tensor.store, covers, (), lambda: None)

    within, at_the_last, beyond, further = waits(0, 8), waits(ROWS - 1, ROWS), waits(ROWS, ROWS + 1), waits(80, 96)
    tensor.store.writes.waiting[:] = [within, at_the_last, beyond, further]
    pending_writes.forget(tensor.store)
    assert tensor.store.writes.waiting == [beyond, further]


@pytest.mark.parametrize("name", RECIPES)
def test_data_that_is_assigned_takes_the_place_of_what_waits(name: str) -> None:
    """Plain values; those that a weight dequantizes to are its own bytes, but for a weight that can't be read."""
    source, target = weight(name, 1), weight(name, 2)
    target[:8].copy_(source[:8])
    values = torch.randn(ROWS, ROWS)
    target.data = values
    assert raw(target) == raw(recipe(name).quantize(values))
    before = raw(target)
    target.data = target.dequantize()
    assert raw(target) == before
