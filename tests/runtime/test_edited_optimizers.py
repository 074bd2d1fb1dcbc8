"""Optimizers whose groups and states users edit between steps: masters go on as parameters of torch's AdamW do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layoutc

WIDTH = 64
STEPS = 4
Edit = Callable[[torch.optim.Optimizer, list[nn.Parameter]], None]
ADAMW: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "masters": lambda params: layoutc.MasterWeights(torch.optim.AdamW, params, lr=1e-2),
    "by rule": lambda params: layoutc.AdamW(params, lr=1e-2),
}


def values_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def edited(kind: str, edit: Edit) -> list[Tensor]:
    """What three weights and a bias are after steps, edited after the second; two weights are quantized."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=index == 2) for index in range(3)))
    params = list(model.parameters())
    for seed, param in enumerate(params):
        param.data = values_of(seed, *param.shape)
    if kind != "torch":
        layoutc.quantize_(model, "fp8_block", param_filter=["0.weight", "1.weight"])
        params = list(model.parameters())
    optimizer = ADAMW[kind]([{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}])
    for step in range(STEPS):
        if step == 2:
            edit(optimizer, params)
        for seed, param in enumerate(params):
            param.grad = values_of(100 * step + seed, *param.shape)
        optimizer.step()
    masters = optimizer.masters() if isinstance(optimizer, layoutc.MasterWeights) else {}
    return [masters.get(param, param).detach() for param in params]


def reversed_params(optimizer: Any, params: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


@pytest.mark.parametrize("edit", [reversed_params])
@pytest.mark.parametrize("kind", ["masters", "by rule"])
def test_groups_that_are_edited(kind: str, edit: Edit) -> None:
    for ours, expected in zip(edited(kind, edit), edited("torch", edit), strict=True):
        assert torch.equal(ours, expected)
