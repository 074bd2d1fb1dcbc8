"""Weights of experts in low precision, sharded by FSDP2 and over ranks of experts: to the bit as in one process."""

from __future__ import annotations

from typing import Any

import product_modes
import pytest
import torch
import torch.nn.functional as F
from harness import mesh_of, on
from models import adam, local, my_share, recipe_module
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import layoutc
from layoutc.runtime.product_mode import Mode

EXPERTS = 4
SIZES = ((24, 0, 1, 39), (7, 32, 25, 0), (16, 16, 16, 16))


def sizes(recipe: str) -> tuple[int, int]:
    """Width and inner width: two ranks have whole blocks of the rows of each."""
    width = max(64, 2 * recipe_module(recipe).LAYOUT.block_rows)
    return width, 2 * width


class Matrices(nn.Module):
    """A matrix for each expert."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        uneven = torch.logspace(-1, 1, rows, 2.0)[:, None] * torch.logspace(1, -1, columns, 2.0)
        self.weight = nn.Parameter(torch.randn(EXPERTS, rows, columns) / 16 * uneven)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """Tokens in groups that end at offs, of the experts that this rank has."""
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=offs)


class Experts(nn.Module):
    """Two weights of experts; each matrix sees the tokens of its group."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.width = width
        self.up, self.down = Matrices(inner, width), Matrices(width, inner)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """(tokens, width) -> (tokens, width)."""
        out: Tensor = self.down(F.gelu(self.up(x, offs)), offs)
        return out


def build(recipe: str, use: str, mesh: Any = None) -> Experts:
    """The same model on every rank, or this rank's experts of it."""
    torch.manual_seed(0)
    model = Experts(*sizes(recipe))
    for one in (model.up, model.down) if mesh is not None else ():
        one.weight = nn.Parameter(distribute_tensor(one.weight.detach(), mesh, [Shard(0)]))
    names = getattr(layoutc, use)(model, recipe, filter_fn=lambda module, _: isinstance(module, Matrices))
    assert names == ["up.weight", "down.weight"]
    return model


def batch(step: int, width: int) -> tuple[Tensor, Tensor, list[int]]:
    """Tokens, what they should become, and where the groups end."""
    generator = torch.Generator().manual_seed(step)
    ends = torch.tensor(SIZES[step]).cumsum(0)
    x, y = (torch.randn(int(ends[-1]), width, generator=generator) for _ in range(2))
    return x, y, ends.tolist()


def train_step(model: Experts, optimizer: Any, step: int, share: float, first: int = 0, last: int = EXPERTS) -> Tensor:
    """One step of some experts, on their tokens; what the tokens became before it."""
    x, y, ends = batch(step, model.width)
    start, end = [0, *ends][first], ends[last - 1]
    offs = torch.tensor(ends[first:last], dtype=torch.int32) - start
    torch.manual_seed(step)
    out: Tensor = model(x[start:end], offs)
    ((out - y[start:end]).square().sum() * (share / y.numel())).backward()
    optimizer.step()
    optimizer.zero_grad()
    return out.detach()


def multiplied(model: Experts) -> Tensor:
    """What the first step's tokens become."""
    x, _, ends = batch(0, model.width)
    with torch.no_grad():
        out: Tensor = model(x, torch.tensor(ends, dtype=torch.int32))
    return out


def optimizer_of(model: nn.Module, use: str) -> Any:
    return adam(model) if use == "quantize_" else torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "use", "mode", "keeps", "compiled"),
    [
        ("nvfp4", "quantize_", "low_precision", False, False),
        ("fp8_block", "quantize_", "reference", False, False),
        ("fp8_rowwise", "quantize_", "low_precision", True, False),
        ("nvfp4", "cast_on_gather_", "reference", True, False),
        ("mxfp8", "cast_on_gather_", "reference", False, True),
    ],
)
@on("two")
def test_experts_under_fsdp2_train_as_one_process(
    recipe: str, use: str, mode: Mode, keeps: bool, compiled: bool
) -> None:
    """Sharded by FSDP2 alone: each rank has some of the experts."""
    reference, model = build(recipe, use), build(recipe, use)
    torch._dynamo.reset()
    if compiled:
        model.compile(fullgraph=True, backend="aot_eager")
    fully_shard(model, reshard_after_forward=not keeps)
    optimizers = [optimizer_of(one, use) for one in (reference, model)]
    dequantized = multiplied(reference)
    with product_modes.products(mode):
        assert torch.equal(multiplied(reference), dequantized) == (mode == "low_precision")  # CPUs have no kernel
        for step in range(len(SIZES)):
            expected = train_step(reference, optimizers[0], step, 1.0)
            assert torch.equal(train_step(model, optimizers[1], step, my_share()), expected), f"step {step}"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "mode", "dim", "compiled"),
    [
        ("fp8_block", "reference", 1, False),
        ("nvfp4", "low_precision", 1, False),
        ("fp8_rowwise", "reference", 0, False),
        ("mxfp8", "reference", 1, True),
    ],
)
@on("four")
def test_experts_over_ranks_and_their_rows_over_others_train_as_one_process(
    recipe: str, mode: Mode, dim: int, compiled: bool
) -> None:
    """Recipes with a scale of the tensor in high precision: each rank's activations have one of their own. Experts over
    one dim of a mesh, and a dim of their weights by FSDP2 over the other: each rank multiplies the tokens of its
    experts."""
    mesh, use = mesh_of(2, 2, names=("fsdp", "experts")), "quantize_"
    reference, model = build(recipe, use), build(recipe, use, mesh["experts"])
    torch._dynamo.reset()
    if compiled:
        model.compile(fullgraph=True, backend="aot_eager")
    fully_shard(model, mesh=mesh["fsdp"], shard_placement_fn=lambda _: Shard(dim))
    held = local(model.up.weight)
    assert type(held) is recipe_module(recipe).Tensor
    width, inner = sizes(recipe)
    assert held.shape == ((1, inner, width), (2, inner // 2, width))[dim]
    first = mesh["experts"].get_local_rank() * 2
    share = 2.0 if mesh["fsdp"].get_local_rank() == 0 else 0.0
    optimizers = [optimizer_of(one, use) for one in (reference, model)]
    dequantized = multiplied(reference)
    with product_modes.products(mode):
        assert torch.equal(multiplied(reference), dequantized) == (mode == "low_precision")  # CPUs have no kernel
        for step in range(len(SIZES)):
            _, _, ends = batch(step, model.width)
            expected = train_step(reference, optimizers[0], step, 1.0)
            found = train_step(model, optimizers[1], step, share, first, first + 2)
            assert torch.equal(found, expected[[0, *ends][first] : ends[first + 1]]), f"step {step}"
