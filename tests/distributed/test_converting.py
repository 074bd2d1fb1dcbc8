"""module.to(dtype) after fully_shard: shards stay what they are, and train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import on
from models import adam, batch, build, my_share, raw, recipe_module, shard, width_for
from torch import nn
from torch.distributed.tensor import DTensor

CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "layers": lambda model: [layer.to(torch.bfloat16) for layer in (*model.layers, model.head)],  # type: ignore
}


def built(recipe: str, use: str, width: int) -> Any:
    """The model of tests/distributed/models.py, quantized or cast on gather."""
    if use == "quantized":
        return build(recipe, width)
    from test_cast_on_gather import build_cast

    return build_cast(recipe, width)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "use", "how"),
    [
        ("fp8_current", "quantized", "to"),
        ("nvfp4", "cast", "layers"),
        ("mxfp8", "quantized", "half"),
        ("mxfp8", "cast", "to"),
    ],
)
@on("two")
def test_shards_stay_what_they_are(recipe: str, use: str, how: str) -> None:
    """Both uses, by the module and by its parts; nothing is dequantized. Against the same model converted before it is
    sharded, and against one process."""
    width, convert = width_for(recipe, dist.get_world_size()), CONVERSIONS[how]
    alone, early, late = (built(recipe, use, width) for _ in range(3))
    shard(late)
    kinds = [type(param._local_tensor) for param in late.parameters()]
    before = [param._local_tensor for param in late.parameters()]
    planes = [[raw(p) for p in one.planes().values()] if hasattr(one, "planes") else None for one in before]
    for model in (alone, early, late):
        convert(model)
    shard(early)
    for param, kind, held in zip(late.parameters(), kinds, planes, strict=True):
        assert isinstance(param, nn.Parameter)
        assert isinstance(param, DTensor)
        local: Any = param._local_tensor
        assert type(local) is kind, (type(local), kind)
        assert local.dtype == param.dtype != torch.float32
        if held is not None:
            assert all(torch.equal(raw(a), b) for a, b in zip(local.planes().values(), held, strict=True))
    losses = []
    for model, share in ((alone, 1.0), (early, my_share()), (late, my_share())):
        optimizer = adam(model)
        losses.append([])
        for step in range(3):
            x, y = batch(step, width)
            loss = (model(x.to(model.head.weight.dtype)) - y).square().mean()
            (loss * share).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    assert losses[1] == losses[2], losses
    assert losses[0] == losses[1] or how == "half", losses  # fp16 gradients of a doubled loss are rounded elsewhere
    assert isinstance(late.head.weight._local_tensor, recipe_module(recipe).Tensor if use == "quantized" else object)
