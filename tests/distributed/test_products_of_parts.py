"""Linear layers that tensor parallelism has cut, after set_products_: all three products of the parts in low precision.

Whole numbers, which nothing rounds, are compared with Python's own products of the whole matrices.
"""

from __future__ import annotations

import copy
from typing import Any

import product_modes
import pytest
import torch
import torch.distributed as dist
from exact_products import exact
from exact_products import product as whole_numbers
from harness import Ranks, mesh_of, on
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layoutc
from layoutc.runtime.products import linear
from layoutc.runtime.products.parallel import LinearOfParts

TOKENS, WIDTH = 128, 256


def noted(seen: list[str]) -> Any:
    """Lists products in low precision; gives back what takes it away."""
    multiply, of_weight = linear._multiply, linear._grad_weight
    linear._multiply = lambda name, *args: (seen.append(name), multiply(name, *args))[1]  # type: ignore[assignment]
    linear._grad_weight = lambda *args: (seen.append("grad_weight"), of_weight(*args))[1]  # type: ignore[assignment]

    def forget() -> None:
        linear._multiply, linear._grad_weight = multiply, of_weight

    return forget


def is_exact(recipe: str, bias: bool, cast: bool) -> None:
    mesh = mesh_of(dist.get_world_size())
    x, w, grad = (exact(recipe, *size) for size in ((TOKENS, WIDTH, 1), (WIDTH, WIDTH, 2), (TOKENS, WIDTH, 3)))
    part = WIDTH // mesh.size()
    mine = slice(mesh.get_local_rank() * part, (mesh.get_local_rank() + 1) * part)
    out_of, in_of, w_of = (
        torch.from_numpy(whole_numbers(*pair)).float() for pair in ((x, w.t()), (grad, w), (grad.t(), x))
    )
    for cuts_rows in (True, False):
        layer = nn.Linear(WIDTH, WIDTH, bias=bias)
        with torch.no_grad():
            layer.weight.copy_(w)
            if bias:
                layer.bias.fill_(2.0)
        (layoutc.cast_on_gather_ if cast else layoutc.quantize_)(layer, recipe)
        made: Any = parallelize_module(layer, mesh, ColwiseParallel() if cuts_rows else RowwiseParallel())
        product_modes.set_products_(made, "reference")
        assert isinstance(made, LinearOfParts)
        given = (x if cuts_rows else x[:, mine]).clone().requires_grad_()
        seen: list[str] = []
        forget = noted(seen)
        try:
            out: Tensor = made(given)
            out.backward(grad[:, mine] if cuts_rows else grad)
        finally:
            forget()
        assert seen == ["forward", "grad_input", "grad_weight"]
        assert torch.equal(out, out_of[:, mine] + 2.0 * bias if cuts_rows else out_of + 2.0 * bias)
        assert torch.equal(given.grad, in_of if cuts_rows else in_of[:, mine])
        assert made.weight.grad.placements == made.weight.placements
        assert torch.equal(made.weight.grad._local_tensor, w_of[mine] if cuts_rows else w_of[:, mine])
        if bias:
            of_bias = torch.from_numpy(whole_numbers(torch.ones(1, TOKENS), grad)).float().flatten()
            assert torch.equal(made.bias.grad._local_tensor, of_bias[mine] if cuts_rows else of_bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_parts_multiply_exactly(two: Ranks, recipe: str, bias: bool) -> None:
    two.run(is_exact, recipe, bias, False)


def test_parts_that_are_cast_on_gather_multiply_exactly(two: Ranks) -> None:
    two.run(is_exact, "mxfp8", False, True)


class Block(nn.Module):
    """As in a transformer: rows of the first weight are cut, and columns of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def trained(recipe: str, mesh: Any, sharded: bool, compiled: bool) -> list[float]:
    """The losses of three steps: under tensor parallelism, with FSDP2 over the mesh's other dim or without."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    layoutc.quantize_(model, recipe)
    torch._dynamo.reset()
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if sharded:
            fully_shard(block, mesh=mesh["fsdp"])
    if sharded:
        fully_shard(model, mesh=mesh["fsdp"])
    product_modes.set_products_(model, "reference")
    for block in model if compiled else ():
        block.compile(backend="aot_eager")
    optimizer: Any = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.roll(1, 0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
@on("four")
def test_parts_train_under_fsdp2_as_without(recipe: str) -> None:
    """Ranks of one FSDP group have the same tokens here, so the mean of their gradients is that of each."""
    mesh = mesh_of(2, 2, names=("fsdp", "tp"))
    seen: list[str] = []
    forget = noted(seen)
    try:
        expected, losses = trained(recipe, mesh, False, False), trained(recipe, mesh, True, False)
    finally:
        forget()
    assert losses == expected
    assert len(set(losses)) == 3
    assert seen.count("grad_weight") == seen.count("forward") == 2 * 3 * 4


@pytest.mark.thorough
@on("two")
def test_compiled_parts_train_as_eager_ones() -> None:
    mesh = mesh_of(1, 2, names=("fsdp", "tp"))
    assert trained("mxfp8", mesh, False, True) == trained("mxfp8", mesh, False, False)
    layer = nn.Linear(WIDTH, WIDTH)
    layoutc.quantize_(layer, "mxfp8")
    made: Any = parallelize_module(layer, mesh["tp"], ColwiseParallel())
    product_modes.set_products_(made, "reference")
    compiled, x, found = torch.compile(made, backend="aot_eager"), torch.randn(TOKENS, WIDTH), []
    for mode in ("reference", "dequantize", "reference"):
        product_modes.set_products_(made, mode)
        found.append(made(x))
        assert torch.equal(compiled(x), found[-1]), mode
    assert not torch.equal(found[0], found[1])


@on("two")
def test_layers_of_parts_are_layers() -> None:
    """Other modes, other inputs, copies: as torch's own layer; and a layer that nothing cuts stays what it is."""
    mesh = mesh_of(dist.get_world_size())
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    layoutc.quantize_(layer, "mxfp8")
    product_modes.set_products_(layer, "reference")
    assert type(layer) is nn.Linear
    made: Any = parallelize_module(layer, mesh, ColwiseParallel())
    product_modes.set_products_(made, "dequantize")
    x = torch.randn(TOKENS, WIDTH)
    dequantized, copied = made(x), copy.deepcopy(made)
    product_modes.set_products_(copied, "reference")
    local = made.weight._local_tensor.dequantize()
    assert torch.equal(dequantized, nn.functional.linear(x, local, made.bias._local_tensor))
    assert not torch.equal(copied(x), dequantized)
    assert repr(copied) == repr(made) == "LinearOfParts(in_features=256, out_features=256, bias=True)"
    assert list(made.state_dict()) == ["weight", "bias"]
    given = DTensor.from_local(x.view(2, -1, WIDTH), mesh, [Replicate()], run_check=False)
    for other in (given, given.redistribute(placements=[torch.distributed.tensor.Shard(0)])):
        out: Any = made.forward(other)
        assert torch.equal(out.full_tensor()[0, :, : WIDTH // 2], made.forward(given).full_tensor()[0, :, : WIDTH // 2])
