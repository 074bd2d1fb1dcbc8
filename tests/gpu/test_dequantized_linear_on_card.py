"""F.linear by dequantized values on a card: launches that are kept, of planes whose bytes and memory change."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layoutc.runtime.kernels import plans
from layoutc.runtime.torch_private import without_torch_function

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EVERY = importlib.import_module("layoutc.recipes").RECIPES
NAMES = [name for name in EVERY if not importlib.import_module(f"layoutc.recipes.{name}").LAYOUT.not_weights]


def results(x: Tensor, weight: Any, kept: bool) -> list[Tensor]:
    """The output and both gradients: by kept launches, or through the class."""
    if kept:
        out = F.linear(x, weight)
        out.square().sum().backward()
    else:
        with without_torch_function():
            out = F.linear(x, weight)
            out.square().sum().backward()
    made = [out.detach(), x.grad, weight.grad]
    x.grad = weight.grad = None
    return made  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kept_launches_read_what_is_there_now(name: str, dtype: torch.dtype) -> None:
    """Other bytes, memory that was freed and allocated anew, and other planes: the bits of the class each time."""
    recipe = importlib.import_module(f"layoutc.recipes.{name}")
    first, second = (torch.randn(256, 512, device="cuda", dtype=dtype) for _ in range(2))
    weight = nn.Parameter(recipe.quantize(first))
    before = {key: plane.clone() for key, plane in weight.store.planes.items()}  # some recipes round by chance
    x = torch.randn(3, 32, 512, device="cuda", dtype=dtype, requires_grad=True)
    other = recipe.quantize(second).store.planes
    expected = {}
    for which, planes in (("first", weight.store.planes), ("second", other)):
        apart = nn.Parameter(recipe.Tensor({key: one.clone() for key, one in planes.items()}, (256, 512), dtype))
        expected[which] = results(x, apart, kept=False)
    for _ in range(3):
        assert all(map(torch.equal, results(x, weight, kept=True), expected["first"]))
    assert [key for key in plans.cache if key[0] is recipe.Tensor]
    for plane in weight.store.planes.values():  # as FSDP2 does between passes
        size = plane.untyped_storage().nbytes()
        plane.untyped_storage().resize_(0)
        plane.untyped_storage().resize_(size)
    in_the_way = torch.zeros(1 << 20, device="cuda")
    for key, plane in weight.store.planes.items():
        plane.copy_(other[key])
    assert all(map(torch.equal, results(x, weight, kept=True), expected["second"]))
    weight.store.planes.update(before)
    assert all(map(torch.equal, results(x, weight, kept=True), expected["first"]))
    assert not in_the_way.any()
