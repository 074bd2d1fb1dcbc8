"""module.to(dtype) of quantized weights: what they dequantize to changes, and no byte does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantized_cases import make, module, same_tensors, snapshot, weight
from torch import nn
from weight_recipes import CUT_APART

import layoutc

CONVERSIONS: dict[str, tuple[torch.dtype, Callable[[nn.Module], Any]]] = {
    "to": (torch.bfloat16, lambda model: model.to(torch.bfloat16)),
    "to device": (torch.float16, lambda model: model.to("cpu", torch.float16)),
    "bfloat16": (torch.bfloat16, lambda model: model.bfloat16()),
    "half": (torch.float16, lambda model: model.half()),
    "double": (torch.float64, lambda model: model.double()),
    "type": (torch.bfloat16, lambda model: model.type(torch.bfloat16)),
    "_apply": (torch.bfloat16, lambda model: model._apply(lambda t: t.to(torch.bfloat16))),
}


# Every way with one recipe, whose planes are of many kinds, and by turns with one of those that are stored alike.
WAYS = [
    (recipe, how)
    for number, recipe in enumerate(CUT_APART)
    for turn, how in enumerate(CONVERSIONS)
    if recipe == "nvfp4" or turn == number % len(CONVERSIONS)
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("recipe", "how"), WAYS)
def test_converting_a_model_changes_no_byte_of_its_weights(recipe: str, how: str) -> None:
    """It changes what they dequantize to: nothing is dequantized, and no master is made anew."""
    dtype, convert = CONVERSIONS[how]
    torch.manual_seed(0)
    size = max(128, module(recipe).LAYOUT.multiple_k)
    model = nn.Sequential(nn.Linear(size, 128))
    layoutc.quantize_(model, recipe)
    optimizer, param = layoutc.MasterWeights(torch.optim.AdamW, model.parameters()), model[0].weight
    model(weight(16, size)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    planes, master, before = dict(param.planes()), optimizer.state[param]["master"].clone(), snapshot(param)
    exact = param.dequantize(torch.float32)
    with layoutc.strict():
        convert(model)
    assert model[0].weight is param
    assert isinstance(param, nn.Parameter)
    assert type(param) is module(recipe).Tensor
    assert param.dtype == dtype
    assert param.requires_grad
    assert all(param.planes()[name] is plane for name, plane in planes.items())
    assert same_tensors(param.planes(), before)
    assert torch.equal(param.dequantize(), exact.to(dtype))
    assert model(weight(4, size).to(dtype)).dtype == dtype
    optimizer._refresh_masters()
    assert torch.equal(optimizer.state[param]["master"], master)
    model.to(torch.float32)
    assert same_tensors(param.planes(), before)
    assert torch.equal(param.dequantize(), exact)


@pytest.mark.parametrize("recipe", CUT_APART)
def test_converting_by_data_changes_no_byte(recipe: str) -> None:
    """As accelerate does for mixed precision: values that a weight has already say only what it dequantizes to."""
    size = max(128, module(recipe).LAYOUT.multiple_k)
    param = nn.Parameter(make(recipe, 128, size))
    before, other = snapshot(param), make(recipe, 128, size, seed=5)
    for dtype in (torch.bfloat16, torch.float32):
        param.data = param.data.to(dtype)
        assert param.dtype == dtype
        assert same_tensors(param.planes(), before)
    param.data = other.dequantize()
    assert same_tensors(param.planes(), module(recipe).quantize(other.dequantize()).planes())
