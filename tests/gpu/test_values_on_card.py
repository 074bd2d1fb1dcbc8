"""Weights where others ask for values, on a card: torch.einsum, arrays, and collectives that are called by hand."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RECIPES = ("fp8_block", "mxfp8", "nvfp4")
HEADS, ROWS, COLUMNS = 8, 1024, 512


def weights(recipe: str) -> dict[str, Any]:
    """A quantized weight, and values that are cast to the same."""
    module = importlib.import_module(f"layoutc.recipes.{recipe}")
    values = torch.randn(ROWS, COLUMNS, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    return {"quantized": nn.Parameter(module.quantize(values)), "cast": nn.Parameter(module.CastTensor(values))}


def contracted(x: Tensor, weight: Any) -> Tensor:
    return torch.einsum("bk,hdk->bhd", x, weight.view(HEADS, -1, COLUMNS))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("use", ["quantized", "cast"])
def test_einsum_has_the_bits_of_the_values(recipe: str, use: str) -> None:
    """Eager and in one graph, gradients too; from forward to backward no copy in bf16 lives."""
    weight = weights(recipe)[use]
    plain = (weight.quantize() if use == "cast" else weight).detach().dequantize().requires_grad_()
    x = torch.randn(16, COLUMNS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected = contracted(x, plain)
    wanted = torch.autograd.grad(expected.square().sum(), (x, plain))
    for multiply in (contracted, torch.compile(contracted, fullgraph=True)):
        torch._dynamo.reset()
        before = torch.cuda.memory_allocated()
        found = multiply(x, weight)
        if multiply is contracted and use == "quantized":
            assert torch.cuda.memory_allocated() - before < weight.numel()
        assert torch.equal(found, expected)
        assert all(map(torch.equal, torch.autograd.grad(found.square().sum(), (x, weight)), wanted))
    with torch.no_grad():
        assert torch.equal(contracted(x, weight), expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_arrays_never_read_codes(recipe: str) -> None:
    found = weights(recipe)
    quantized, cast = (found[use].detach() for use in ("quantized", "cast"))
    assert not hasattr(quantized, "__cuda_array_interface__")
    for refused in (quantized.__dlpack__, lambda: torch.from_dlpack(quantized)):
        with pytest.raises(BufferError, match="holds codes"):
            refused()
    assert torch.equal(torch.from_dlpack(cast), cast.plain)
    assert torch.from_dlpack(cast).data_ptr() == cast.plain.data_ptr()
    halves = importlib.import_module(f"layoutc.recipes.{recipe}").CastTensor(cast.plain.half())
    assert halves.__cuda_array_interface__ == halves.plain.__cuda_array_interface__
    assert quantized.tolist() == quantized.dequantize().tolist()


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """One rank, over NCCL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sum_over_nccl_is_quantized(recipe: str, is_async: bool) -> None:
    """On the stream that called; the work of a call that is not asynchronous can't be waited for."""
    for use, weight in weights(recipe).items():
        values = weight.detach().dequantize() if use == "quantized" else weight.plain
        expected = weight.detach().clone()
        expected.copy_(values * 1.0)
        work: Any = dist.all_reduce(weight.data, async_op=is_async)
        if is_async:
            work.wait()
        assert torch.equal(weight.detach(), expected)
        assert weight.detach().float().isfinite().all()
