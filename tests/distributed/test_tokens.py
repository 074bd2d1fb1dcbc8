"""Tokens that travel as codes: what arrives is what quantizing after the exchange gives, to the bit; bytes counted."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on
from torch import Tensor

import layoutc
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.fsdp2 import tokens

# Rows that each of two ranks sends to either: uneven; none to one; none at all from one.
SPLITS = (((3, 2), (1, 4)), ((0, 5), (2, 0)), ((0, 0), (3, 1)))
COLUMNS = 128
BYTES = {"fp8_rowwise": COLUMNS + 4, "mxfp8": COLUMNS + COLUMNS // 32, "fp8_block_1d": COLUMNS + 4}


def rounded(recipe: str, x: Tensor) -> Tensor:
    """By the recipe's reference."""
    module: Any = importlib.import_module(f"layoutc.recipes.{recipe}")
    filled = F.pad(x, (0, 0, 0, -len(x) % module.LAYOUT.multiple_m))
    planes = module.quantize_reference(filled, orientations=("rowwise",))
    values: Tensor = module.dequantize_reference(planes, *filled.shape, "rowwise")
    return values.to(x.dtype)[: len(x)]


def exchanged(x: Tensor, takes: list[int], sends: list[int]) -> Tensor:
    """By torch."""
    received = x.new_empty((sum(takes), x.shape[1]))
    dist.all_to_all_single(received, x, takes, sends)
    return received


@pytest.mark.parametrize(
    ("recipe", "dtype", "compiled"),
    [
        ("fp8_rowwise", torch.bfloat16, False),
        ("mxfp8", torch.float32, False),
        ("fp8_block_1d", torch.float16, False),
        ("fp8_rowwise", torch.bfloat16, True),
    ],
)
@on("two")
def test_what_arrives_is_what_quantizing_after_the_exchange_gives(
    recipe: str, dtype: torch.dtype, compiled: bool
) -> None:
    """Forward for tokens that are dispatched, backward for outputs that are combined; the other way is exact."""
    rank, sent = dist.get_rank(), []
    send = tokens._all_to_all
    exchange = layoutc.exchange_tokens
    if compiled:
        exchange = torch.compile(exchange, backend="aot_eager", fullgraph=True, dynamic=False)
    for case, splits in enumerate(SPLITS):
        sends, takes = list(splits[rank]), [row[rank] for row in splits]
        generator = torch.Generator().manual_seed(2 * case + rank)
        x, grad = (torch.randn(sum(n), COLUMNS, generator=generator).to(dtype) for n in (sends, takes))
        for names in ({"recipe": recipe}, {"gradients": recipe}):
            leaf = x.clone().requires_grad_()
            sent.clear()
            with pytest.MonkeyPatch.context() as patch:
                if not compiled:
                    patch.setattr(tokens, "_all_to_all", lambda x, *args: (sent.append(x.nbytes), send(x, *args))[1])
                out = exchange(leaf, takes, sends, dist.group.WORLD, **names)
                out.backward(grad)
            came, back = exchanged(x, takes, sends), exchanged(grad, sends, takes)
            expected = (rounded(recipe, came), back) if "recipe" in names else (came, rounded(recipe, back))
            assert torch.equal(out.detach(), expected[0])
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, expected[1])
            nbytes = [BYTES[recipe], COLUMNS * dtype.itemsize][:: 1 if "recipe" in names else -1]
            assert compiled or sum(sent) == sum(sends) * nbytes[0] + sum(takes) * nbytes[1]
            assert compiled or len(sent) == 3


@on("two")
def test_what_can_not_travel_is_refused_before_anything_is_sent() -> None:
    x, world = torch.zeros(4, COLUMNS), dist.group.WORLD
    for recipe, why in (
        ("fp8_current", "an amax of the whole matrix"),
        ("nvfp4", "amax"),
        ("fp8_block", "several rows"),
    ):
        said = f"{recipe} can't hold tokens that travel: .*{why}.*Recipes that can: .*fp8_rowwise.*mxfp8"
        with pytest.raises(LayoutError, match=said):
            layoutc.exchange_tokens(x, None, None, world, recipe=recipe)
    with pytest.raises(ValueError, match="takes rows in multiples of 32 and columns in multiples of 32"):
        layoutc.exchange_tokens(x[:, :40], None, None, world, gradients="mxfp8")
    with pytest.raises(
        ValueError,
        match=r"input_splits \[3, 2\] must have 2 entries that add up to 4 tokens, and output_splits \[2, 2\]",
    ):
        layoutc.exchange_tokens(x, None, [3, 2], world)
    with pytest.raises(ValueError, match=r"and output_splits \[2, 2, 0\] as many entries"):
        layoutc.exchange_tokens(x, [2, 2, 0], None, world)
    with pytest.raises(ValueError, match="3 tokens do not divide evenly among 2 ranks: pass input_splits"):
        layoutc.exchange_tokens(x[:3], None, None, world)
    with pytest.raises(
        ValueError, match=r"takes x of shape \(tokens, columns\) in fp32, bf16 or fp16, not \(4, 128\) in torch.int64"
    ):
        layoutc.exchange_tokens(x.long(), None, None, world)
    out = layoutc.exchange_tokens(x.requires_grad_(), None, None, world, recipe="fp8_rowwise")
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice.*once_differentiable"):
        grad.sum().backward()
