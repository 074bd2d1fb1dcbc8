"""Tokens that travel as codes on cards: bytes of what arrives, and how long a layer of experts on two ranks takes.

    torchrun --nproc-per-node 2 tests/gpu/tokens_nccl.py [--tokens 16384] [--json FILE]

First what arrives is compared with what the recipe's reference makes of it after the exchange, to the bit. Then a layer
with experts of its own on each rank goes forward and backward: as torch has it, in bf16; by layoutc, tokens as they
are; and as codes. Printed: milliseconds of the slowest rank, and bytes that a rank sends for a token, forward and back.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import layoutc
from layoutc.runtime import installed
from layoutc.runtime.operands.expert_rows import FromExperts, ToExperts, routes_of
from layoutc.runtime.products.experts import gated_experts

SIZES = {"qwen3_moe": (2048, 768, 64, 8), "mixtral": (4096, 14336, 8, 2)}  # columns, inner, experts, a token's


def bytes_of_token(recipe: str, columns: int) -> int:
    """How many bytes a token of so many columns travels as."""
    tokens: Any = installed.find(recipe).quantize(torch.zeros(128, columns), orientations=("rowwise",))
    return sum(plane.nbytes for plane in tokens.planes().values()) // 128


def layer(x: Tensor, chosen: Tensor, by: Tensor, up: Tensor, down: Tensor, recipe: str | None) -> Tensor:
    """x (tokens, columns) by experts of all ranks, of which this one has up and down, as they are multiplied."""
    ranks, own = dist.get_world_size(), len(up)
    routes = routes_of(chosen, ranks * own)
    counts = torch.diff(routes.ends, prepend=routes.ends.new_zeros(1))
    came = torch.empty_like(counts)
    dist.all_to_all_single(came, counts)
    sends, takes = (one.view(ranks, own).sum(1).tolist() for one in (counts, came))
    rows: Tensor = ToExperts.apply(x, *routes)  # type: ignore[no-untyped-call]
    y = layoutc.exchange_tokens(rows, takes, sends, dist.group.WORLD, recipe=recipe)
    local = torch.arange(own, device=x.device).repeat(ranks).repeat_interleave(came.long(), output_size=sum(takes))
    ones = torch.ones(len(y), 1, dtype=torch.float32, device=x.device)
    made = gated_experts(y, local[:, None], ones, up, down)
    back = layoutc.exchange_tokens(made, sends, takes, dist.group.WORLD, gradients=recipe)
    out: Tensor = FromExperts.apply(back, by, *routes)  # type: ignore[no-untyped-call]
    return out


def arrives(recipe: str, device: torch.device) -> bool:
    """To the bit, both ways."""
    module: Any = import_module(f"layoutc.recipes.{recipe}")

    def rounded(x: Tensor) -> Tensor:
        planes = module.quantize_reference(
            F.pad(x, (0, 0, 0, -len(x) % module.LAYOUT.multiple_m)), orientations=("rowwise",)
        )
        count = -(-len(x) // module.LAYOUT.multiple_m) * module.LAYOUT.multiple_m
        return module.dequantize_reference(planes, count, x.shape[1], "rowwise").to(x.dtype)[: len(x)]  # type: ignore[no-any-return]

    rank, splits = dist.get_rank(), ((1000, 7), (0, 300))
    sends, takes = list(splits[rank]), [row[rank] for row in splits]
    x, grad = (torch.randn(sum(n), 2048, device=device).bfloat16() for n in (sends, takes))
    came, back = x.new_empty(sum(takes), 2048), x.new_empty(sum(sends), 2048)
    dist.all_to_all_single(came, x, takes, sends)
    dist.all_to_all_single(back, grad, sends, takes)
    x.requires_grad_()
    out = layoutc.exchange_tokens(x, takes, sends, dist.group.WORLD, recipe=recipe, gradients=recipe)
    out.backward(grad)
    assert x.grad is not None
    equal = torch.equal(out.detach(), rounded(came)) and torch.equal(x.grad, rounded(back))
    said = torch.tensor(float(equal), device=device)
    dist.all_reduce(said, dist.ReduceOp.MIN)
    return bool(said)


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of the slowest rank: the median of ten after four."""
    times = []
    for index in range(14):
        dist.barrier()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        step()
        ended.record()
        torch.cuda.synchronize()
        if index >= 4:
            times.append(began.elapsed_time(ended))
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def measured(name: str, tokens: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """A layer of a model's sizes; bytes of a row on its way to an expert, and of the gradient of an expert's output."""
    columns, inner, experts, each = SIZES[name]
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    own = experts // dist.get_world_size()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator) / 16

    x, grad = normal(tokens, columns).requires_grad_(), normal(tokens, columns)
    chosen = torch.rand(tokens, experts, device=device, generator=generator).topk(each).indices
    by = torch.rand(tokens, each, device=device, generator=generator).requires_grad_()
    plain = [normal(own, 2 * inner, columns), normal(own, columns, inner)]
    for weights, mode, recipe in (
        ("bf16", "dequantize", None),
        ("fp8_rowwise", "low_precision", None),
        ("fp8_rowwise", "low_precision", "fp8_rowwise"),
        ("bf16", "dequantize", "fp8_rowwise"),
    ):
        quantize: Any = torch.clone if weights == "bf16" else import_module(f"layoutc.recipes.{weights}").quantize
        both = [quantize(one).requires_grad_() for one in plain]

        def step(both: Any = both, recipe: str | None = recipe, mode: Any = mode) -> None:
            with layoutc.products(mode):
                layer(x, chosen, by, *(one.transpose(-2, -1) for one in both), recipe).backward(grad)
            for one in (x, by, *both):
                one.grad = None

        token = 2 * columns if recipe is None else bytes_of_token(recipe, columns)
        yield {"model": name, "weights": weights, "as": recipe or "bf16", "ms": timed(step, device), "bytes": token}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    first, rows = dist.get_rank() == 0, []
    for recipe in ("fp8_rowwise", "mxfp8", "fp8_block_1d", "int8_rowwise"):
        equal = arrives(recipe, device)
        if first:
            print(f"{recipe}: {'equal' if equal else 'DIFFERENT'}", flush=True)
    for name in SIZES:
        for row in measured(name, options.tokens, device):
            rows.append(row)
            if first:
                print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if options.json and first:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"kind": "tokens", "device": torch.cuda.get_device_name(), "rows": rows}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
