"""`layoutc bench --experts`: whether products of experts are faster by kernels than dequantized, on this card.

Each product by itself, with what it takes to quantize tokens or to dequantize weights, in a CUDA graph. What
`layoutc bench --experts --json` prints is an entry of layoutc/runtime/products/measured.json, from which
`layoutc.products("low_precision")` chooses.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any

import torch
from torch import Tensor

from layoutc.bench import clocks
from layoutc.runtime.products import choice, grouped
from layoutc.runtime.products.choice import NAMES, ProductName, Sizes

RECIPES = ("fp8_rowwise", "fp8_rowwise_all", "fp8_current", "mxfp8", "nvfp4")  # those that some card has kernels for
SHAPES = ((64, 1536, 2048), (64, 2048, 768), (8, 28672, 4096), (8, 4096, 14336))  # experts, n, k: of Qwen3-MoE, Mixtral
TOKENS = (64, 512, 2048, 8192)  # of each expert
DEVICE = "cuda"
MOST = 2**30  # values of a product's operands


def run(say: Callable[[str], object]) -> dict[str, Any]:
    """Measures, and reports each product to `say`. Raises ValueError without a card."""
    if not torch.cuda.is_available():
        raise ValueError("--experts needs a CUDA device, and there is none")
    card = {"card": torch.cuda.get_device_name(), "capability": list(torch.cuda.get_device_capability())}
    found = {**card, "torch": torch.__version__, "date": date.today().isoformat(), "rows": list(_rows(say))}
    return found


def _rows(say: Callable[[str], object]) -> Iterator[dict[str, Any]]:
    for recipe in RECIPES:
        module = importlib.import_module(f"layoutc.recipes.{recipe}")
        for experts, n, k in SHAPES:
            with torch.no_grad():
                weight = module.quantize(torch.randn(experts, n, k, device=DEVICE, dtype=torch.bfloat16))
            for each in TOKENS:
                if experts * each * (n + k) > MOST:
                    continue
                for product in NAMES:
                    row = _row(product, weight, experts * each)
                    if row is None:
                        continue
                    yield {"recipe": recipe, "product": product, "experts": experts, "n": n, "k": k} | row
                    times = f"kernel {row['kernel']:8.1f} us, dequantized {row['dequantized']:8.1f}"
                    say(f"{recipe:12} {product:11} {experts:3} x {n}x{k}, {each:5} tokens each: {times}")


def _row(product: ProductName, weight: Any, tokens: int) -> dict[str, Any] | None:
    """None where there is no kernel."""
    experts, n, k = weight.shape
    ends = torch.arange(1, experts + 1, device=DEVICE, dtype=torch.int32) * (tokens // experts)
    right = weight.transpose(-2, -1)
    sizes = Sizes(experts, n, k, tokens)
    if choice.choose(type(weight), product, sizes, ends.device, "reference").way != "kernel":
        return None

    def make(mode: Any) -> clocks.Make:
        def one() -> clocks.Work:
            x, grad = (torch.randn(tokens, size, device=DEVICE, dtype=torch.bfloat16) for size in (k, n))
            return lambda: _multiply(product, x, grad, right, ends, mode)

        return one

    nbytes = 2 * tokens * (n + k)
    ways = {"kernel": "reference", "dequantized": "dequantize"}
    times = {way: clocks.rotated(make(mode), nbytes) for way, mode in ways.items()}
    torch.cuda.empty_cache()
    return {"tokens": tokens, **{way: round(time, 1) for way, time in times.items()}}


@torch.no_grad()
def _multiply(product: ProductName, x: Tensor, grad: Tensor, right: Any, ends: Tensor, mode: Any) -> Tensor:
    if product == "forward":
        return grouped.forward(x, right, ends, mode, "nothing")[0]
    needs_input = product == "grad_input"
    return grouped.backward(grad, right, [x], ends, mode, needs_input, "nothing" if needs_input else "input")[0]
