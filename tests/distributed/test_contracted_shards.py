"""A model that contracts views of its weights, as of heads, trains under FSDP2 as in one process, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ranks
from models import make_uneven
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import layoutc

HEADS, WIDTH, STEPS = 4, 128, 3


class Latent(nn.Module):
    """Queries that absorb a projection, and an output that another one is multiplied into: one equation each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(n, WIDTH) -> the same."""
        heads = torch.einsum("bk,hdk->bhd", x, self.up.weight.view(HEADS, -1, WIDTH))
        return x + torch.einsum("bhd,hdk->bk", heads.tanh(), self.down.weight.view(HEADS, -1, WIDTH))


def losses(recipe: str, use: str, sharded: bool) -> list[float]:
    """All ranks have the same data, so that the mean of their gradients is that of one."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(Latent(), Latent())
    make_uneven(model)
    (layoutc.quantize_ if use == "quantized" else layoutc.cast_on_gather_)(model, recipe)
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    adam = torch.optim.AdamW
    parameters = model.parameters()
    optimizer = layoutc.MasterWeights(adam, parameters, lr=0.01) if use == "quantized" else adam(parameters, lr=0.01)
    found = []
    for step in range(STEPS):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("use", ["quantized", "cast"])
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "nvfp4"])
def test_two_ranks_contract_as_one(two: Ranks, recipe: str, use: str) -> None:
    """Blocks across ranks and across heads, and two levels of scales."""
    alone = losses(recipe, use, sharded=False)
    assert len(set(alone)) == STEPS
    assert two.run(losses, recipe, use, True) == [alone, alone]
