"""What MasterWeights keeps from step to step, where other weights are sharded over an equal mesh."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from harness import on
from torch import nn
from torch.distributed.fsdp import fully_shard

import layoutc


@on("two")
def test_gradients_are_converted_together() -> None:
    """Masters have a mesh that is equal to that of their parameters, and another object. DTensor's rules, while they
    are cached, give masters the mesh of whichever model asked first."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    layoutc.quantize_(model, "mxfp8")
    fully_shard(model)
    params: list[Any] = list(model.parameters())
    optimizer: Any = layoutc.MasterWeights(torch.optim.AdamW, params, lr=0.1)
    masters = optimizer.masters().values()
    other = copy.copy(params[0]._spec.mesh)
    for master, param in zip(masters, params, strict=True):
        master._spec = replace(master._spec, mesh=other)
        assert other == param._spec.mesh
        assert other is not param._spec.mesh
    for _ in range(2):
        model(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum().backward()
        assert all(param.grad.dtype is torch.bfloat16 for param in params)
        optimizer.step()
        assert len(optimizer._gradients._entries) == 3, "converted one by one"
        optimizer.zero_grad()
