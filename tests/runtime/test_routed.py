"""Experts of a layer as one call: kernels as torch computes it, the same numbers as by indices, and one graph."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import grouped_kernels
import pytest
import torch
import torch.nn.functional as F
from kernels_on_cpu import use_kernels
from torch import Tensor

import layoutc
from layoutc.recipes import fp8_block, fp8_rowwise, fp8_rowwise_all
from layoutc.runtime.operands import expert_rows
from layoutc.runtime.operands.expert_rows import gated as gated_silu
from layoutc.runtime.operands.expert_rows import of_experts, routes_of, sum_of_experts
from layoutc.runtime.products import autograd, choice, scaled_grouped_mm
from layoutc.runtime.products.experts import gated_experts, routed_experts

SHAPES = ((13, 64), (13, 3), (5, 96, 64), (5, 64, 48))  # x, weights of routes, gate_up, down
BF16, FP32 = torch.bfloat16, torch.float32


def chosen_by(tokens: int, each: int, experts: int, seed: int = 0) -> Tensor:
    """Different experts for each token; the second one has none."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.tensor([i for i in range(experts) if i != 1])
    return torch.stack([others[torch.randperm(len(others), generator=generator)[:each]] for _ in range(tokens)])


def whole(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    """Small whole numbers, whose sums are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("each", "columns", "dtype", "weighted"),
    [(1, 64, BF16, BF16), (2, 1500, BF16, FP32), (3, 1024, torch.float16, torch.float16), (8, 96, FP32, FP32)],
)
def test_kernels_write_the_bytes_of_torch(
    each: int, columns: int, dtype: torch.dtype, weighted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that belong to no expert of this rank hold NaN, and are not seen."""
    tokens, experts = 13, 10
    chosen = chosen_by(tokens, each, experts)
    _, rows, ends = routes_of(chosen, experts - 1)  # the last expert is another rank's
    last = int(ends[-1])
    assert last < tokens * each or each == 1
    y = torch.randn(tokens * each, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights = torch.rand(tokens, each, generator=torch.Generator().manual_seed(2)).to(weighted)
    y[last:] = float("nan")
    exact, grad = whole(tokens * each, columns, seed=3, dtype=dtype), whole(tokens, columns, seed=4, dtype=dtype)
    exact[last:] = float("nan")

    def found() -> list[Tensor]:
        sums = [sum_of_experts(y, rows, by, ends) for by in (weights, None)]
        return [*sums, *of_experts(grad, exact, rows, weights, ends)]

    expected = found()
    assert not any(one.isnan().any() for one in expected)
    assert [one.dtype for one in expected] == [dtype, dtype, dtype, weighted]
    use_kernels(monkeypatch)
    assert all(map(torch.equal, found(), expected))


def test_routes_are_in_the_order_of_experts() -> None:
    """Groups of no tokens among them; rows and order are inverse."""
    chosen = torch.tensor([[3, 0], [0, 2], [2, 3]])
    order, rows, ends = routes_of(chosen, 4)
    assert ends.dtype == torch.int32
    assert ends.tolist() == [2, 2, 4, 6]
    assert order.tolist() == [1, 2, 3, 4, 0, 5]
    assert torch.equal(rows.flatten()[order], torch.arange(6))


def gated(x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        gate, value = F.grouped_mm(rows, up.transpose(-2, -1), offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * value, down.transpose(-2, -1), offs=ends)

    return routed_experts(x, chosen, weights, len(up), compute)


def by_indices(x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same, each expert by itself, in fp64."""
    out = torch.zeros_like(x)
    for expert in range(len(up)):
        token, place = torch.where(chosen == expert)
        gate, value = (x[token] @ up[expert].t()).chunk(2, -1)
        out = out.index_add(0, token, (F.silu(gate) * value) @ down[expert].t() * weights[token, place, None])
    return out


@pytest.mark.parametrize("compiled", [False, True])
def test_experts_and_all_gradients(compiled: bool) -> None:
    """Against fp64; one graph gives the bits of eager."""
    tokens, experts, columns, inner = 24, 5, 32, 48
    chosen = chosen_by(tokens, 3, experts)
    shapes = ((tokens, columns), (tokens, 3), (experts, 2 * inner, columns), (experts, columns, inner))
    made = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) / 4 for i, shape in enumerate(shapes)]

    def run(function: object, dtype: torch.dtype) -> list[Tensor]:
        x, weights, up, down = (one.detach().to(dtype).clone().requires_grad_() for one in made)
        out: Tensor = function(x, chosen, weights, up, down)  # type: ignore[operator]
        out.backward(out.detach().cos())
        return [out.detach(), *(one.grad for one in (x, weights, up, down) if one.grad is not None)]

    if compiled:
        program = torch.compile(gated, fullgraph=True, backend="aot_eager")
        assert all(map(torch.equal, run(program, BF16), run(gated, BF16)))
        return
    found, expected = run(gated, FP32), run(by_indices, torch.float64)
    assert len(found) == len(expected) == 5
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shape", "dtype"), [((5, 192), BF16), ((3, 10000), FP32), ((2, 3, 64), torch.float16)])
def test_gates_are_one_launch_each_way(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded once from fp32: within half a unit in the last place, and what fp32 leaves; nothing but the input is
    kept."""
    generator = torch.Generator().manual_seed(0)
    both = (torch.randn(shape, generator=generator) * 3).to(dtype).requires_grad_()
    grad = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator).to(dtype)
    double = both.detach().double().requires_grad_()
    expected = gated_silu(double)
    expected.backward(grad.double())
    use_kernels(monkeypatch)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        found = gated_silu(both)
    found.backward(grad)
    assert [one.data_ptr() for one in kept] == [both.data_ptr()]
    assert both.grad is not None
    assert double.grad is not None
    assert (found.dtype, both.grad.dtype) == (dtype, dtype)
    half = torch.finfo(dtype).eps / 2
    for one, other in ((found.detach(), expected.detach()), (both.grad, double.grad)):
        assert ((one.double() - other).abs() <= other.abs() * (half + 2**-20) + 4e-6).all()


# --------------------------------------------------------------------------------- rows quantized where they are made
def by_one_step_after_the_other(
    x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor, experts: int
) -> Tensor:
    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(gated_silu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)

    return routed_experts(x, chosen, weights, experts, compute)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels of rows as a card has them, on a CPU. Holds the names of operators that quantize rows."""
    names: list[str] = []
    monkeypatch.setattr(choice, "not_here", lambda cards, device: "")
    monkeypatch.setattr(scaled_grouped_mm, "scaled_grouped_mm", as_operator())
    for name in ("gated_rows", "gated_rows_backward", "of_experts"):
        monkeypatch.setattr(expert_rows, name, noted(names, name, getattr(expert_rows, name)))
    choice.plan_of.cache_clear()
    yield names
    choice.plan_of.cache_clear()


def noted(names: list[str], name: str, function: Any) -> Any:
    def call(*args: Any) -> Any:
        if name != "of_experts" or len(args) > 5:  # with the recipe in which it quantizes
            names.append(name)
        return function(*args)

    return call


@cache
def as_operator() -> Any:
    """The kernel of groups of rows as an operator, which traces do not look into."""

    @torch.library.custom_op("layoutc_tests::groups_of_rows", mutates_args=())
    def multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
        return grouped_kernels.one_scale(a, b, scale_a, scale_b, offs, None, None, BF16)

    def made(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
        shape = (len(offs), a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[2])
        return a.new_empty(shape, dtype=BF16)

    multiply.register_fake(made)
    return lambda a, b, scale_a, scale_b, offs, *_: multiply(a, b, scale_a, scale_b, offs)


@pytest.mark.parametrize(
    ("recipe", "columns", "inner", "by_columns", "frozen"),
    [
        (fp8_rowwise_all, 80, 32, True, ()),
        (fp8_rowwise, 32, 80, False, ("up",)),
        (fp8_rowwise_all, 48, 32, False, ("x", "down")),
    ],
    ids=str,
)
def test_rows_quantized_where_they_are_made_have_the_same_bytes(
    recipe: Any, columns: int, inner: int, by_columns: bool, frozen: tuple[str, ...], hopper: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As one step after the other: the output and all gradients; an expert without tokens, and one of another rank."""
    tokens, experts = 13, 5
    chosen = chosen_by(tokens, 3, experts + 1)
    names = ("x", "weights", "up", "down")
    up, down = (experts, columns, 2 * inner), (experts, inner, columns)
    stored = [shape if by_columns else (shape[0], shape[2], shape[1]) for shape in (up, down)]
    shapes = ((tokens, columns), (tokens, 3), *stored)
    made = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(BF16) for i, shape in enumerate(shapes)]
    made[2:] = [recipe.quantize(one) for one in made[2:]]
    use_kernels(monkeypatch)

    def run(function: Any) -> list[Tensor]:
        leaves = [
            one.detach().clone().requires_grad_(name not in frozen) for name, one in zip(names, made, strict=True)
        ]
        x, weights, *both = leaves
        read = both if by_columns else [one.transpose(-2, -1) for one in both]
        with layoutc.products("low_precision"):
            out: Tensor = function(x, chosen, weights, *read, experts)
            out.backward(out.detach().cos())
        return [out.detach(), *(one.grad for one in leaves if one.grad is not None)]

    expected = run(by_one_step_after_the_other)
    assert not hopper
    found = run(lambda *args: gated_experts(*args[:-1]))
    assert hopper == ["gated_rows", "of_experts", "gated_rows_backward"]
    assert len(found) == len(expected) == 5 - len(frozen)
    assert all(map(torch.equal, found, expected))


def test_rows_quantized_where_they_are_made_are_in_one_graph(
    hopper: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has the bits of eager, and asks nothing of a recipe that has no such rows. Nothing that is traced asks for
    autocast, which torch 2.11 can't trace; what operators run may."""
    monkeypatch.setattr(autograd, "_can_autocast", torch.compiler.disable(autograd._can_autocast))
    chosen = chosen_by(13, 3, 5)
    made = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(BF16) for i, shape in enumerate(SHAPES)]

    def call(*given: Tensor) -> Tensor:
        x, weights, up, down = given
        return gated_experts(x, chosen, weights, up.transpose(-2, -1), down.transpose(-2, -1))

    def run(function: Any, quantize: Any) -> list[Tensor]:
        leaves = [one.clone().requires_grad_() for one in (*made[:2], *map(quantize, made[2:]))]
        with layoutc.products("low_precision"):
            out: Tensor = function(*leaves)
            out.backward(out.detach().cos())
        return [out.detach(), *(one.grad for one in leaves if one.grad is not None)]

    program = torch.compile(call, fullgraph=True, backend="aot_eager")
    for recipe, used in ((fp8_rowwise_all, 3), (fp8_block, 0)):
        hopper.clear()
        expected = run(call, recipe.quantize)
        assert len(hopper) == used
        found = run(program, recipe.quantize)
        assert (len(hopper) > used) == bool(used)
        assert len(found) == 5
        assert all(map(torch.equal, found, expected))
