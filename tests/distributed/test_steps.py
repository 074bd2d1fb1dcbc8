"""What MasterWeights keeps from step to step, where other weights are sharded over an equal mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from harness import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import layoutc


def converts_gradients_together() -> None:
    """A second model has a mesh of its own, and its masters another that is equal.

    DTensor's rules, while they are cached, give masters the mesh of whichever model asked first.
    """
    plain: Any = nn.Linear(64, 64, bias=False)
    fully_shard(plain)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    layoutc.quantize_(model, "mxfp8")
    fully_shard(model)
    params: list[Any] = list(model.parameters())
    optimizer: Any = layoutc.MasterWeights(torch.optim.AdamW, params, lr=0.1)
    masters = optimizer.masters().values()
    for master, param in zip(masters, params, strict=True):
        master._spec = replace(master._spec, mesh=plain.weight._spec.mesh)
        assert master._spec.mesh is not param._spec.mesh
    for _ in range(2):
        model(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum().backward()
        assert all(param.grad.dtype is torch.bfloat16 for param in params)
        optimizer.step()
        assert len(optimizer._gradients._entries) == 3, "converted one by one"
        optimizer.zero_grad()


def test_gradients_are_converted_together(two: Ranks) -> None:
    two.run(converts_gradients_together)
