"""Copies of views of cast weights: a model multiplies with them as with the views, whether autograd records or not."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layoutc
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

RECIPES = ["fp8_block", "mxfp8", "nvfp4", "fp8_current"]
MODES: dict[str, Any] = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda w: w.t().contiguous().t(),
    "expanded": lambda w: w.expand(3, -1, -1).contiguous()[1],
    "expanded_and_viewed": lambda w: w.expand(2, -1, -1).clone().view(-1, 256)[256:],
    "rows": lambda w: w[:128].clone(),
    "converted": lambda w: w[128:].double().float(),
    "twice": lambda w: w.t().contiguous()[:, :128].clone().t(),
}


def cast(recipe: str) -> tuple[nn.Linear, Tensor]:
    """A layer that is cast, with rows of unlike sizes, and the values that it multiplies with."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 256, bias=False)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-2, 2, 256).unsqueeze(1))
    values = importlib.import_module(f"layoutc.recipes.{recipe}").quantize(layer.weight.detach()).dequantize()
    layoutc.cast_on_gather_(layer, recipe)
    return layer, values


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_of_a_view_is_multiplied_as_the_view(recipe: str) -> None:
    """As by FSDP2, which gathers the quantized weight: blocks are those of the weight, and not of the copy."""
    layer, values = cast(recipe)
    x = torch.randn(4, 256)
    for (mode, entered), (copies, copied) in product(MODES.items(), COPIES.items()):
        with entered():
            found, expected = copied(layer.weight), copied(values)
            expected = expected.contiguous()  # some CPUs multiply matrices that lie otherwise in another order
            assert torch.equal(x @ found.t(), x @ expected.t()), (mode, copies)


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_of_a_view_has_its_values(mode: str) -> None:
    layer, _ = cast("nvfp4")
    with MODES[mode]():
        assert torch.equal(layer.weight.t().contiguous().plain, layer.weight.plain.t())  # type: ignore[attr-defined]
        made = nn.Parameter(layer.weight[:128].clone())
    assert torch.equal(made.plain, layer.weight.plain[:128])  # type: ignore[attr-defined]


def test_gradients_of_a_copy_are_those_of_the_view() -> None:
    layer, _ = cast("mxfp8")
    x, grads = torch.randn(4, 256), []
    for weight in (layer.weight.t().contiguous().t(), layer.weight):
        (x @ weight.t()).square().sum().backward()
        grads.append(layer.weight.grad)
        layer.weight.grad = None
    assert torch.equal(*grads)


@pytest.mark.parametrize("written", ["weight", "copy"])
def test_blocks_of_a_copy_that_was_written_are_not_guessed(written: str) -> None:
    layer, _ = cast("nvfp4")
    with torch.no_grad():
        copy = layer.weight.t().contiguous()
        (layer.weight if written == "weight" else copy).mul_(2)
        with pytest.raises(LayoutError, match=r"one of the two was written since.*copy view\.detach\(\)"):
            torch.randn(4, 256) @ copy


@pytest.mark.parametrize("how", ["detached", "parameter", "weight_gone"])
def test_a_weight_by_itself_has_blocks_of_its_own(how: str) -> None:
    layer, _ = cast("nvfp4")
    with torch.no_grad():
        rows = layer.weight[:128]
        copy: Any = rows.detach().clone() if how == "detached" else rows.clone()
        copy = nn.Parameter(copy) if how == "parameter" else copy
        del rows
        if how == "weight_gone":
            del layer
            gc.collect()
        made = copy.quantize()
    assert isinstance(made, QuantizedTensor)
    module = importlib.import_module("layoutc.recipes.nvfp4")
    assert torch.equal(made.dequantize(), module.quantize(copy.plain).dequantize())


@pytest.mark.parametrize("mode", MODES)
def test_a_vector_of_parameters_has_their_values(mode: str) -> None:
    """So that vector_to_parameters, which others call to restore weights, changes nothing."""
    layer, _ = cast("nvfp4")
    before = layer.weight.plain.clone()  # type: ignore[attr-defined]
    with MODES[mode]():
        vector = nn.utils.parameters_to_vector(layer.parameters())
    assert torch.equal(vector.view(256, 256), before)
    nn.utils.vector_to_parameters(vector.clone(), layer.parameters())
    assert torch.equal(layer.weight.plain, before)  # type: ignore[attr-defined]
