"""One process with two cards, of which the first is the current one: weights on the second are served by kernels too.

That is what `device_map`, and pipelines within a process, make of a model.

    python tests/gpu/test_other_card.py

prints how long quantize, dequantize and F.linear take on each card.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import product_modes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc.bench import clocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)
SHAPE = (256, 512)


def module(recipe: str) -> Any:
    return import_module(f"layoutc.recipes.{recipe}")


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(autouse=True)
def first_card() -> Iterator[None]:
    """It is the current one before and after each test."""
    with torch.cuda.device(HERE):
        yield
        assert torch.cuda.current_device() == HERE.index


def on_cpus_alone(reference: Any, first: Any, *args: Any, **options: Any) -> Any:
    """What a reference gives, of values or planes that are on no card."""
    tensors = [first] if isinstance(first, Tensor) else first.values()
    assert not any(one.is_cuda for one in tensors), f"{reference.__name__} on a card"
    return reference(first, *args, **options)


@pytest.fixture
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Called with a recipe: from then on its reference refuses tensors on cards."""

    def refuse(recipe: str) -> None:
        reference = module(recipe).Tensor.REFERENCE
        for name in ("quantize_reference", "dequantize_reference"):
            monkeypatch.setattr(reference, name, partial(on_cpus_alone, getattr(reference, name)))

    return refuse


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_run_where_tensors_are(recipe: str, kernels_alone: Any) -> None:
    """Each twice, as the second launch passes Triton's launcher by: planes, buffers, values; the reference's bytes."""
    kernels_alone(recipe)
    x, quantize = values(0, *SHAPE), module(recipe).quantize
    expected, options = quantize(x), {"swizzled": bool(module(recipe).LAYOUT.swizzled)}
    for device in (THERE, HERE, THERE, HERE):
        found = quantize(x.to(device))
        assert found.device == device
        pairs = [(found.planes(), expected.planes()), (found.buffers(**options), expected.buffers(**options))]
        made = module(recipe).quantize_buffers(x.to(device), **options)
        pairs.append((made, module(recipe).quantize_buffers(x, **options)))
        for ours, theirs in pairs:
            for name, one in theirs.items():
                assert ours[name].device == device, name
                assert torch.equal(ours[name].cpu().view(torch.uint8), one.view(torch.uint8)), (name, device)
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(found.dequantize(dtype).cpu(), expected.dequantize(dtype)), device


@pytest.mark.parametrize("mode", ["dequantize", "low_precision", "reference"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_give_what_they_give_on_the_current_card(recipe: str, mode: Any, kernels_alone: Any) -> None:
    """F.linear and its gradients, three calls each: what later ones keep is of their card."""
    if mode != "reference":  # which multiplies what the reference quantized, where the card has no product
        kernels_alone(recipe)
    found: dict[torch.device, list[Tensor]] = {}
    for device in (HERE, THERE):
        torch.manual_seed(5)  # of all cards: gradients are rounded by random bits
        weight = nn.Parameter(module(recipe).quantize(values(0, *SHAPE).to(device)))
        bias = nn.Parameter(values(1, SHAPE[0]).to(device))
        found[device] = []
        for call in range(3):
            x = values(2 + call, 128, SHAPE[1]).to(device).requires_grad_()
            with product_modes.products(mode):
                out = F.linear(x, weight, bias)
                out.backward(values(9, *out.shape).to(device))  # type: ignore[no-untyped-call]
            assert x.grad is not None
            assert weight.grad is not None
            found[device] += [out.detach(), x.grad, weight.grad.clone()]
            weight.grad = None
    for there, here in zip(found[THERE], found[HERE], strict=True):
        assert there.device == THERE
        assert torch.equal(there.cpu(), here.cpu())


def trained(recipe: str, devices: list[torch.device]) -> tuple[list[float], dict[str, Any]]:
    """The losses of some steps of a model with a layer on each of the devices, and its weights in the end."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(256, 256, dtype=torch.bfloat16) for _ in devices])
    for layer, device in zip(model, devices, strict=True):
        layer.to(device)
    layoutc.quantize_(model, recipe)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        x = values(step, 64, 256)
        for layer, device in zip(model, devices, strict=True):
            x = layer(x.to(device))
        loss = x.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_over_two_cards_trains_as_on_one(recipe: str, kernels_alone: Any) -> None:
    """Weights that share amaxes are requantized with those of their card."""
    kernels_alone(recipe)
    with layoutc.dequantize("layer"):
        found, weights = trained(recipe, [HERE, THERE, HERE, THERE])
        expected, on_one = trained(recipe, [HERE] * 4)
    assert found == expected
    for name, one in weights.items():
        whole = one.planes() if hasattr(one, "planes") else {"values": one}
        for plane, other in (on_one[name].planes() if hasattr(one, "planes") else {"values": on_one[name]}).items():
            assert torch.equal(whole[plane].cpu().view(torch.uint8), other.cpu().view(torch.uint8)), (name, plane)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """One rank, over NCCL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("use", ["quantized", "cast", "values"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_gathers_of_a_part_on_each_card(recipe: str, use: str, kernels_alone: Any) -> None:
    """Each part is sharded with its card as the current one, and runs with the first one: gathers equal the part."""
    kernels_alone(recipe)
    found: dict[torch.device, list[Tensor]] = {}
    for device in (HERE, THERE):
        torch.manual_seed(0)
        part: Any = nn.Sequential(*[nn.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(2)])
        part.to(device)
        if use == "cast":
            layoutc.cast_on_gather_(part, recipe)
        else:
            layoutc.quantize_(part, recipe)
        with torch.cuda.device(device):
            for layer in part:
                fully_shard(layer)
            fully_shard(part)
        layoutc.set_products_(
            part, "dequantize", dequantize="gather" if use == "values" and recipe == "nvfp4" else "layer"
        )
        found[device] = []
        for step in range(3):
            out = part(values(step, 64, 256).to(device))
            out.float().square().mean().backward()
            gradients = [param.grad.to_local() for param in part.parameters()]
            assert all(one.device == device for one in (out, *gradients))
            found[device] += [out.detach(), *[one.clone() for one in gradients]]
            part.zero_grad()
    for there, here in zip(found[THERE], found[HERE], strict=True):
        assert torch.equal(there.cpu(), here.cpu())


def timings(recipe: str = "nvfp4", size: int = 4096) -> Iterator[str]:
    """How long three calls take on each card, in microseconds, while the first one is the current one."""
    torch.cuda.set_device(HERE)
    for device in (HERE, THERE):
        x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        weight = module(recipe).quantize(x)
        calls = {
            "quantize": lambda x=x: module(recipe).quantize(x),
            "dequantize": lambda weight=weight: weight.dequantize(),
            "F.linear": lambda x=x, weight=weight: F.linear(x[:128], weight),
        }
        for name, call in calls.items():
            took, host = timed(call, device), clocks.host(call)
            yield f"{recipe} {size}x{size}, {device}: {name} {took:.0f} us, of the host {host:.0f} us"


def timed(call: Any, device: torch.device) -> float:
    """Of one call among many, until the card is done."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(50):
            call()
        torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - start) / 50 * 1e6)
    return best


if __name__ == "__main__":
    for line in timings():
        print(line, flush=True)
