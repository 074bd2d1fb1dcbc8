"""Experts that are chosen by name, under fully_shard: to the bit as in one process."""

from __future__ import annotations

from typing import Any

import product_modes
import pytest
import torch
from harness import on
from models import adam, my_share, recipe_module
from models_of_experts import Gated, Joined, Mixture, batch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import layoutc


def build(kind: str, recipe: str, use: str) -> Mixture:
    torch.manual_seed(0)
    model = Mixture(Gated) if kind == "gated" else Mixture(Joined, transposed=kind == "transposed")
    present = ["experts.w?"] if kind == "gated" else ["experts.*_proj"]
    names = getattr(layoutc, use)(model, recipe, param_filter=["mixed.weight", *present])
    assert len(names) == (4 if kind == "gated" else 3)
    return model


def step(model: nn.Module, optimizer: Any, number: int, share: float) -> float:
    tokens, offs = batch(number)
    torch.manual_seed(number)
    loss = model(tokens, offs).square().mean()
    (loss * share).backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "recipe", "use", "dim", "compiled"),
    [
        ("gated", "mxfp8", "quantize_", 1, False),
        ("gated", "fp8_current", "cast_on_gather_", 0, False),
        ("joined", "nvfp4", "quantize_", 0, False),
        ("joined", "mxfp8", "quantize_", 0, True),
        ("transposed", "mxfp8", "quantize_", 0, False),
        ("transposed", "fp8_current", "cast_on_gather_", 0, True),
    ],
)
@on("two")
def test_experts_by_name_train_as_one_process(kind: str, recipe: str, use: str, dim: int, compiled: bool) -> None:
    """A part of the weights in low precision by their own choice. Sharded: experts, or the rows of each."""
    reference, model = build(kind, recipe, use), build(kind, recipe, use)
    for one in (reference, model):
        product_modes.set_products_(one, "reference", filter_fn=lambda _, name: name == "experts")
    whole = layoutc.coverage(model)
    torch._dynamo.reset()
    if compiled:
        model.experts.compile(fullgraph=True, backend="aot_eager")
    fully_shard(model.experts, shard_placement_fn=lambda param: Shard(dim if param.dim() == 3 else 0))
    fully_shard(model)
    assert layoutc.coverage(model) == whole
    held: Any = getattr(model.experts, "w1" if kind == "gated" else "gate_up_proj")
    cls = recipe_module(recipe).Tensor if use == "quantize_" else recipe_module(recipe).CastTensor
    assert type(held._local_tensor) is cls
    optimizers = [
        adam(one) if use == "quantize_" else torch.optim.AdamW(one.parameters(), lr=1e-2, fused=True)
        for one in (reference, model)
    ]
    seen = set()
    for number in range(3):
        expected = step(reference, optimizers[0], number, 1.0)
        assert step(model, optimizers[1], number, my_share()) == expected, f"step {number}"
        seen.add(expected)
    assert len(seen) == 3
