"""What MasterWeights keeps from step to step, where other weights are sharded over an equal mesh."""

from __future__ import annotations

from typing import Any

import torch
from harness import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import layoutc


def converts_gradients_together() -> None:
    """A second model has a mesh of its own; DTensor's rules, which are cached, give its masters that of the first."""
    plain = nn.Linear(64, 64, bias=False)
    fully_shard(plain)
    torch.zeros_like(plain.weight)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    layoutc.quantize_(model, "mxfp8")
    fully_shard(model)
    params: list[Any] = list(model.parameters())
    optimizer: Any = layoutc.MasterWeights(torch.optim.AdamW, params, lr=0.1)
    masters = optimizer.masters().values()
    assert all(one._spec.mesh is not param._spec.mesh for one, param in zip(masters, params, strict=True))
    for _ in range(2):
        model(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum().backward()
        assert all(param.grad.dtype is torch.bfloat16 for param in params)
        optimizer.step()
        assert len(optimizer._gradients._entries) == 3, "converted one by one"
        optimizer.zero_grad()


def test_gradients_are_converted_together(two: Ranks) -> None:
    two.run(converts_gradients_together)
