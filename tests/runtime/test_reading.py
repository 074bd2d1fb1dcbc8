"""Many weights that are dequantized in one launch, whole and in parts of ranks, under Triton's interpreter: the values
of the reference to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from math import lcm
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from weight_recipes import WEIGHTS

from layoutc.runtime.kernels import batches, launch
from layoutc.runtime.parts import Parts

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
RECIPES = [name for name in WEIGHTS if import_module(f"layoutc.recipes.{name}").Tensor.KERNELS is not None]


def recipe_of(name: str) -> Any:
    return import_module(f"layoutc.recipes.{name}")


def weights_of(name: str, shapes: list[tuple[int, int]]) -> list[dict[str, Tensor]]:
    seeded = torch.Generator().manual_seed(len(name))
    return [recipe_of(name).quantize(torch.randn(shape, generator=seeded)).planes() for shape in shapes]


def expected(name: str, planes: Mapping[str, Tensor], shape: tuple[int, int], orientation: str) -> Tensor:
    values: Tensor = recipe_of(name).dequantize_reference(planes, *shape, orientation)
    return values.to(torch.bfloat16)


def dequantized(
    name: str, weights: list[Any], shapes: list[tuple[int, int]], orientation: str, parts: list[Parts | None]
) -> list[Tensor]:
    kernels = import_module(f"layoutc.recipes.{name}.kernels").KERNELS
    outs = [torch.full(shape, 7.0, dtype=torch.bfloat16) for shape in shapes]
    together, alone = kernels.into(weights, orientation, outs, parts)
    together()
    for plan, tensors in alone:
        plan.into(*tensors)
    return outs


def in_parts(name: str, planes: Mapping[str, Tensor], rows: int, ranks: int) -> tuple[dict[str, Tensor], Parts]:
    """As ranks send them, each its planes one after another, from multiples of 4 bytes on; those of the first rank."""
    layout = recipe_of(name).LAYOUT
    first, sent = dict(planes), [list[Tensor]() for _ in range(ranks)]
    names = [one for one in planes if layout.stored[one].rows_per_value is not None]
    for one in names:
        each, plane = rows // layout.stored[one].rows_per_value, planes[one]
        for rank, pieces in enumerate(sent):
            piece = plane[rank * each : (rank + 1) * each]
            full = torch.cat([piece, plane.new_zeros(each - piece.shape[0], *plane.shape[1:])])
            flat = full.reshape(-1).view(torch.uint8)
            pieces.append(F.pad(flat, (0, -flat.numel() % 4)))
    together, start = torch.cat([torch.cat(pieces) for pieces in sent]), 0
    for one, piece in zip(names, sent[0], strict=True):
        each, plane = rows // layout.stored[one].rows_per_value, planes[one]
        nbytes = each * plane[0].numel() * plane.element_size()
        first[one] = together[start : start + nbytes].view(plane.dtype).view(each, *plane.shape[1:])
        start += piece.numel()
    return first, Parts(ranks, rows, start)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "tables"), [(name, at % 2 == 0) for at, name in enumerate(RECIPES)])
def test_values_are_those_of_the_reference(name: str, tables: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole weights and weights in parts: even ones, a last part that is short, parts without rows."""
    monkeypatch.setattr(launch, "usable", lambda *_: True)
    if not tables:
        monkeypatch.setattr(batches, "tables_of", lambda _, covers, *rest: ((), range(len(covers))))
    layout = recipe_of(name).LAYOUT
    block, step = lcm(layout.block_rows, layout.multiple_m), layout.multiple_k
    step *= -(-64 // step)
    forms = [(None, block * 4), (2, block * 4), (3, block * 7), (4, block * 5), (None, block * 3)]
    shapes = [(rows, step * (1 + at % 2)) for at, (_, rows) in enumerate(forms)]
    weights = weights_of(name, shapes)
    for orientation in layout.orientations:
        given: list[Any] = []
        parts: list[Parts | None] = []
        for (ranks, rows), planes in zip(forms, weights, strict=True):
            each = -(-rows // block // ranks) * block if ranks else 0
            first, own = in_parts(name, planes, each, ranks) if ranks else (planes, None)
            given.append(first)
            parts.append(own)
        for planes, shape, found in zip(
            weights, shapes, dequantized(name, given, shapes, orientation, parts), strict=True
        ):
            assert torch.equal(found.view(torch.int16), expected(name, planes, shape, orientation).view(torch.int16))


@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 4), (2, 1, 5)])
def test_templates_have_no_memory(shape: tuple[int, ...]) -> None:
    template = launch.template(shape, torch.bfloat16, torch.device("cpu"))
    made, usual = torch.empty_like(template), torch.empty(shape, dtype=torch.bfloat16)
    assert template.untyped_storage().nbytes() == 0
    assert (made.shape, made.dtype, made.stride()) == (usual.shape, usual.dtype, usual.stride())
    assert made.untyped_storage().nbytes() == usual.untyped_storage().nbytes()
    assert made.data_ptr() != torch.empty_like(template).data_ptr()


def test_one_launch_takes_weights_of_any_rows() -> None:
    """Threads move 16 bytes at a time where columns are aligned, however many rows there are."""
    shapes = [(16, 64), (24, 64), (7, 64)]
    kernels, weights = import_module("layoutc.recipes.fp8_rowwise.kernels").KERNELS, weights_of("fp8_rowwise", shapes)
    outs = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    together, alone = kernels.into(weights, "rowwise", outs, [None] * 3)
    assert (len(together._launches), alone) == (1, [])
