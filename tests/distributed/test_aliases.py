"""Aliases of shards and pieces of gathered weights mean what the weight means, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Ranks, on
from models import RECIPES, assert_equal_on_all_ranks, recipe_module, shared_bytes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import layoutc
from layoutc.runtime.errors import LayoutError

WRITES: dict[str, Callable[[Any, DTensor], object]] = {
    "param": lambda p, d: p.copy_(d),
    "data": lambda p, d: p.data.copy_(d),
    "detach": lambda p, d: p.detach().copy_(d),
    "view": lambda p, d: p.view(p.shape).copy_(d),
    "local": lambda p, d: p.to_local().copy_(d.to_local()),
}


def sharded(recipe: str, rows: int = 512) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(256, rows, bias=False)
    layoutc.quantize_(model, recipe)
    fully_shard(model)
    return model


def uneven(rows: int = 512) -> Tensor:
    """Rows whose magnitudes grow, so that each rank's own amax is another."""
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(3))
    return x * torch.linspace(0.1, 10, rows).unsqueeze(1)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("recipe", "how"), [*zip(RECIPES, WRITES, strict=True), ("nvfp4", "data"), ("fp8_delayed", "local")]
)
@on("two")
def test_values_written_through_any_alias_of_a_shard_share_their_amax(recipe: str, how: str) -> None:
    model, values = sharded(recipe), uneven()
    with torch.no_grad():
        WRITES[how](model.weight, distribute_tensor(values, model.weight.device_mesh, [Shard(0)]))
    assert_equal_on_all_ranks(shared_bytes(model))
    model.unshard()
    expected = recipe_module(recipe).quantize(values)
    for name, plane in model.weight.data.planes().items():
        assert torch.equal(plane, expected.planes()[name]), name


class Fused(nn.Module):
    """Uses pieces of a weight: in products, and in an ordinary operator whose operands autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 768, bias=False)
        self.mask = nn.Parameter(torch.ones(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear.weight.split(256)
        return F.linear(x, q) + F.linear(x, k[:128]).repeat(1, 2) + F.linear(x, v * self.mask)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("recipe", "reshard"), [(recipe, at % 2 == 0) for at, recipe in enumerate(RECIPES)])
@on("two")
def test_pieces_of_a_gathered_weight_are_right_in_backward(recipe: str, reshard: bool) -> None:
    gradients = []
    for shard in (False, True):
        torch.manual_seed(0)
        model = Fused()
        layoutc.quantize_(model, recipe)
        if shard:
            fully_shard(model, reshard_after_forward=reshard)
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1)).requires_grad_()
        model(x).square().sum().backward()
        grad = model.mask.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        gradients.append((x.grad, whole))
    for alone, gathered in zip(*gradients, strict=True):
        assert torch.equal(alone, gathered)


def takes_rows_that_are_cut_elsewhere(recipe: str) -> str:
    """A shard that cuts blocks, and rows that were quantized by themselves."""
    module = recipe_module(recipe)
    model = nn.Linear(64, 3 * module.LAYOUT.block_rows, bias=False)
    layoutc.quantize_(model, recipe)
    fully_shard(model)
    local: Any = model.weight._local_tensor  # type: ignore[union-attr]
    start = module.LAYOUT.block_rows // 4
    other = module.quantize(torch.randn(6 * module.LAYOUT.block_rows, 64))[start : start + local.shape[0]]
    with pytest.raises(LayoutError) as caught, torch.no_grad():
        local.copy_(other)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_shard_that_cuts_blocks_takes_no_rows_that_are_cut_elsewhere(two: Ranks, recipe: str) -> None:
    messages = two.run(takes_rows_that_are_cut_elsewhere, recipe)
    assert all("whose cuts fall inside blocks" in message for message in messages), messages
