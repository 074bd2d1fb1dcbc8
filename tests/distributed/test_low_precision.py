"""Products in low precision under fully_shard and tensor parallelism: to the bit those of one process."""

from __future__ import annotations

from typing import Any

import product_modes
import pytest
import torch
import torch.distributed as dist
from exact_products import exact
from exact_products import product as whole_numbers
from harness import mesh_of, on
from models import Layer, adam, recipe_module, train_step, width_for
from test_training import trains_as_one_process
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layoutc
from layoutc.runtime.product_mode import Mode


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "keeps", "mode"),
    [
        ("fp8_current", False, "low_precision"),  # what CPUs have kernels for
        ("mxfp8", True, "reference"),
        ("fp8_rowwise", False, "reference"),
        ("nvfp4", False, "reference"),
        ("fp8_block", False, "reference"),
    ],
)
@on("two")
def test_training_in_low_precision_equals_one_process(recipe: str, keeps: bool, mode: Mode) -> None:
    """Losses, bytes and collectives of quantized weights, as without low precision."""
    with product_modes.products(mode):
        trains_as_one_process(recipe, keeps, True, None, None)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "compiled"), [("fp8_block", False), ("mxfp8", True), ("nvfp4", False)])
@on("two")
def test_weights_that_are_cast_on_gather_train_as_one_process(recipe: str, compiled: bool) -> None:
    """Weights in high precision, quantized by the gather; each block compiled, or none."""
    width = width_for(recipe, dist.get_world_size())

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(Layer(width, width), nn.ReLU(), Layer(width, width, bias=False))
        layoutc.cast_on_gather_(model, recipe)
        return model

    reference, model = build(), build()
    torch._dynamo.reset()
    for block in (model[0], model[2]):
        if compiled:
            block.compile(fullgraph=True, backend="aot_eager")
        fully_shard(block)
    fully_shard(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, fused=True) for one in (reference, model)]
    share = float(dist.get_world_size()) if dist.get_rank() == 0 else 0.0
    with product_modes.products("reference"):
        for step in range(3):
            losses = [
                train_step(one, optimizer, step, width, part)
                for one, optimizer, part in zip((reference, model), optimizers, (1.0, share), strict=True)
            ]
            assert losses[0] == losses[1], f"step {step}: {losses}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("compiled", [False, True])
@on("two")
def test_gradients_are_rounded_on_ranks_as_in_one_process(compiled: bool) -> None:
    """Tokens that the recipes take: each step draws seeds for gradients, the same on ranks as in one process."""
    width, rank = 64, dist.get_rank()

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(Layer(width, width), nn.ReLU(), Layer(width, width, bias=False))
        layoutc.quantize_(model, "nvfp4")
        return model

    reference, model = build(), build()
    torch._dynamo.reset()
    for block in (model[0], model[2]):
        if compiled:
            block.compile(fullgraph=True, backend="aot_eager")
        fully_shard(block)
    fully_shard(model)
    optimizers = [adam(one) for one in (reference, model)]
    share = float(dist.get_world_size()) if rank == 0 else 0.0
    before = layoutc.products_without_kernel()
    with product_modes.products("reference"):
        seen = set()
        for step in range(3):
            x, y = torch.randn(2, 32, width, generator=torch.Generator().manual_seed(step)).unbind()
            losses = []
            for one, optimizer, part in zip((reference, model), optimizers, (1.0, share), strict=True):
                torch.manual_seed(step)
                loss = (one(x) - y).square().mean()
                (loss * part).backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1], f"step {step}: {losses}"
            seen.add(losses[0])
        assert len(seen) == 3
    counted = layoutc.products_without_kernel() - before
    assert counted
    assert all("CPUs have no kernel" in name for name in counted)  # none was dequantized for its number of tokens


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4"])
@on("two")
def test_tensor_parallel_products_are_exact(recipe: str) -> None:
    """Shards of rows and of columns multiply in low precision; no rounding, so whole numbers are what they give."""
    mode = "reference"
    mesh = mesh_of(dist.get_world_size())
    tokens, width = 128, 256
    x, up, down = exact(recipe, tokens, width, 1), exact(recipe, width, width, 2), exact(recipe, width, width, 3)
    rank, part = mesh.get_local_rank(), width // mesh.size()
    mine = slice(rank * part, (rank + 1) * part)
    for cuts_rows, w in ((True, up), (False, down)):
        layer = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            layer.weight.copy_(w)
        layoutc.quantize_(layer, recipe)
        made: Any = parallelize_module(layer, mesh, ColwiseParallel() if cuts_rows else RowwiseParallel())
        assert isinstance(made.weight, DTensor)
        assert isinstance(made.weight._local_tensor, recipe_module(recipe).Tensor)
        with product_modes.products(mode):
            out: Tensor = made(x if cuts_rows else x[:, mine].contiguous())
        whole = torch.from_numpy(whole_numbers(x, w.t())).float()
        assert torch.equal(out, whole[:, mine] if cuts_rows else whole)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
@on("two")
def test_shards_of_a_tensor_parallel_weight_multiply_in_low_precision(recipe: str) -> None:
    """Which products shards of a DTensor compute in low precision: forward and the gradient of the input."""
    from layoutc.runtime.products import linear

    seen: list[str] = []
    multiply = linear._multiply

    def noted(name: Any, *args: Any) -> Tensor:
        seen.append(name)
        return multiply(name, *args)

    mesh = mesh_of(dist.get_world_size())
    layer = nn.Linear(256, 256, bias=False)
    layoutc.quantize_(layer, recipe)
    made: Any = parallelize_module(layer, mesh, ColwiseParallel())
    linear._multiply = noted  # type: ignore[assignment]
    try:
        with product_modes.products("reference"):
            made(torch.randn(128, 256, requires_grad=True)).sum().backward()
    finally:
        linear._multiply = multiply
    assert seen == ["forward", "grad_input"]


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
@on("two")
def test_activations_that_are_being_gathered_are_waited_for(recipe: str) -> None:
    """An activation that is still being gathered gives what it gives when it has arrived; and so do its gradients."""
    world, width = dist.get_world_size(), 256
    layer = nn.Linear(width, width, bias=False)
    torch.manual_seed(0)
    nn.init.normal_(layer.weight)
    layoutc.quantize_(layer, recipe)
    x = torch.randn(world * 64, width, generator=torch.Generator().manual_seed(1))
    mine = x.chunk(world)[dist.get_rank()].contiguous()
    with product_modes.products("reference"):
        expected = layer(x)
        gathered = functional.all_gather_tensor(mine, 0, mesh_of(world))
        assert isinstance(gathered, functional.AsyncCollectiveTensor)
        out = layer(gathered)
        expected.sum().backward()
        of_w, layer.weight.grad = layer.weight.grad, None
        out.sum().backward()
    assert type(out) is Tensor
    assert torch.equal(out, expected)
    assert torch.equal(layer.weight.grad, of_w)
