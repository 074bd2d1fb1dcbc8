"""Weights that are cast on gather in parts that no FSDP2 gathers: products are those of the whole weight, quantized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of, on
from models import recipe_module
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layoutc
from layoutc.runtime.errors import LayoutError

SIZE = 256
STYLES: dict[str, Any] = {
    "rows": lambda: ColwiseParallel(output_layouts=Replicate()),
    "columns": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def parts(recipe: str, style: str, way: str = "parallelize_module") -> tuple[Any, Tensor]:
    """A layer whose weight is cut over all ranks, and the whole weight, whose largest value one rank holds."""
    values = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    values[-1, -1] = 9.0
    model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False))
    model[0].weight.data.copy_(values)
    layoutc.cast_on_gather_(model, recipe)
    mesh = mesh_of(dist.get_world_size())
    if way != "parallelize_module":  # by hand; the layer gets DTensors as well
        dim, source = (0 if style == "rows" else 1), (None if way == "no source" else 0)
        weight = distribute_tensor(model[0].weight, mesh, [Shard(dim)], src_data_rank=source)
        model[0].weight = nn.Parameter(weight)
    parallelize_module(model, mesh, {"0": STYLES[style]()})
    return model, values


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["parallelize_module", "distribute_tensor", "no source"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4", "nvfp4_1d", "fp8_block"])
@on("two")
def test_products_of_parts_are_those_of_the_whole_weight(recipe: str, style: str, way: str) -> None:
    """In both passes, before and after a write, and with a precomputed amax. Products with an identity are exact."""
    model, values = parts(recipe, style, way)
    identity = torch.eye(SIZE)
    for step in range(3):
        quantized = recipe_module(recipe).quantize(values)
        x = identity.clone().requires_grad_()
        out = model(x)
        out.backward(identity)
        assert torch.equal(out.t(), quantized.dequantize())
        columnwise = "columnwise" if "columnwise" in quantized.orientations else "rowwise"
        assert torch.equal(x.grad, recipe_module(recipe).quantize(values, orientations=[columnwise]).dequantize())  # type: ignore[arg-type]
        assert torch.equal(model(identity).t(), quantized.dequantize())  # without a gradient of x
        with torch.no_grad():
            model[0].weight.mul_(3)
            values *= 3
        if step:
            layoutc.precompute_amaxes(model)


def moves_and_multiplies(recipe: str, style: str, way: str) -> None:
    model, values = parts(recipe, style, way)
    assert torch.equal(model[0].weight.full_tensor(), values)  # parts by hand may move values
    model(torch.eye(SIZE))


def is_refused(recipe: str, style: str, way: str) -> str:
    """Where ranks would quantize parts of a block by themselves: before anything is sent, on all of them."""
    with pytest.raises(LayoutError) as caught:
        moves_and_multiplies(recipe, style, way)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("way", ["parallelize_module", "distribute_tensor"])
@pytest.mark.parametrize(("recipe", "style", "said"), [("fp8_rowwise", "columns", "one scale covers a whole row")])
def test_cuts_of_what_a_scale_covers_are_refused(two: Ranks, recipe: str, style: str, way: str, said: str) -> None:
    assert all(said in message for message in two.run(is_refused, recipe, style, way))


@pytest.mark.parametrize("way", ["parallelize_module", "distribute_tensor"])
def test_cuts_inside_of_blocks_are_refused(four: Ranks, way: str) -> None:
    messages = four.run(is_refused, "fp8_block", "rows", way)
    assert all("on dim 0 every 64 rows, but a cut must fall at a multiple of 128" in said for said in messages)


@pytest.mark.thorough
@on("two")
def test_graphs_do_not_quantize_parts_by_themselves() -> None:
    """A graph holds no collective of an amax: it breaks there, or is refused."""
    recipe = "fp8_current"
    model, values = parts(recipe, "rows")
    whole = recipe_module(recipe).quantize(values).dequantize()
    assert torch.equal(torch.compile(model, backend="aot_eager")(torch.eye(SIZE)).t(), whole)
    torch.compiler.reset()
    with pytest.raises(Exception, match="shares an amax with those of other ranks"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.eye(SIZE))
    dist.barrier()
