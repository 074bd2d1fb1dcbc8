"""Products of weights that tensor parallelism has cut, on cards: exact where nothing rounds, then timed.

    torchrun --nproc-per-node 2 tests/gpu/parallel_products_nccl.py

Whole numbers are compared with products in fp64; where kernels round outputs to bf16, with a plain layer of the part.
Then a feed-forward part of a Llama block (4096 by 14336, 16,384 tokens) takes forward and backward, in bf16, with its
parts as DTensors, and with parts as one function (after set_products_); eager and compiled. Median of 20 and spread,
ms, of the slower rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from exact_products import exact

import layoutc

FORMS = (
    "bf16",
    "fp8_current",
    "fp8_current, parts",
    "fp8_rowwise",
    "fp8_rowwise, parts",
    "fp8_block",
    "fp8_block, parts",
)


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, ffn, bias=False), nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


STYLES = {"gate": ColwiseParallel, "up": ColwiseParallel, "down": RowwiseParallel}


def is_exact(recipe: str, mesh: Any) -> None:
    """Outputs and both gradients of a layer that is cut by rows, and by columns."""
    width, tokens, rank = 512, 256, mesh.get_local_rank()
    part = width // mesh.size()
    mine = slice(rank * part, (rank + 1) * part)
    x, w, grad = (exact(recipe, *size).cuda() for size in ((tokens, width, 1), (width, width, 2), (tokens, width, 3)))
    out_of, in_of, w_of = ((a.double() @ b.double()).float() for a, b in ((x, w.t()), (grad, w), (grad.t(), x)))
    for cuts_rows in (True, False):
        layer = nn.Linear(width, width, bias=False, device="cuda")
        with torch.no_grad():
            layer.weight.copy_(w)
        layoutc.quantize_(layer, recipe)
        made: Any = parallelize_module(layer, mesh, ColwiseParallel() if cuts_rows else RowwiseParallel())
        layoutc.set_products_(made, "low_precision")
        given = (x if cuts_rows else x[:, mine]).clone().requires_grad_()
        own_grad = grad[:, mine].contiguous() if cuts_rows else grad
        out: Tensor = made(given)
        out.backward(own_grad)
        found = (out, given.grad, made.weight.grad._local_tensor)
        if recipe == "fp8_current":
            expected = (out_of[:, mine], in_of, w_of[mine]) if cuts_rows else (out_of, in_of[:, mine], w_of[:, mine])
        else:
            plain, again = made.weight.to_local().detach().requires_grad_(), given.detach().clone().requires_grad_()
            whole = nn.functional.linear(again, plain)
            whole.backward(own_grad)
            summed = [whole.detach(), again.grad]
            dist.all_reduce(summed[1 if cuts_rows else 0])
            expected = (*summed, plain.grad)
        assert all(map(torch.equal, found, expected)), (recipe, cuts_rows, list(map(torch.equal, found, expected)))


def timed(form: str, mesh: Any, compiled: bool, dim: int, ffn: int, tokens: int) -> tuple[float, float]:
    """Median and spread, ms."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    recipe, _, parts = form.partition(", ")
    with torch.device("cuda"):
        model = FeedForward(dim, ffn).bfloat16()
    if recipe != "bf16":
        layoutc.quantize_(model, recipe)
    parallelize_module(model, mesh, {name: style() for name, style in STYLES.items()})
    if parts:
        layoutc.set_products_(model, "low_precision")
    run: Any = torch.compile(model) if compiled else model
    x = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    times = []
    with layoutc.products("low_precision" if recipe != "bf16" else "dequantize"):
        for _ in range(25):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            run(x).backward(grad)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
            model.zero_grad()
    times = times[5:]
    slower = torch.tensor([statistics.median(times), max(times) - min(times)], device="cuda")
    dist.all_reduce(slower, dist.ReduceOp.MAX)
    return slower[0].item(), slower[1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("dim", 4096), ("ffn", 14336), ("tokens", 16384)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for recipe in ("fp8_current", "fp8_rowwise", "fp8_block"):
        is_exact(recipe, mesh)
    if dist.get_rank() == 0:
        print("exact", flush=True)
    for compiled in (False, True):
        for form in FORMS:
            median, spread = timed(form, mesh, compiled, options.dim, options.ffn, options.tokens)
            if dist.get_rank() == 0:
                print(f"{'compiled' if compiled else 'eager':9} {form:20} {median:8.2f} {spread:7.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
