"""Experts that are stored as (experts, k, n) and read as `x @ w`: the products of those that are read transposed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grouped_kernels
import product_modes
import pytest
import torch
import torch.nn.functional as F
from quantized_cases import module, same_bits, weight
from test_expert_products import (
    EXPERTS,
    SIZES,
    WITH_KERNELS,
    K,
    N,
    exact_inputs,
    offsets,
    uneven,
    whole_numbers,
)
from torch import Tensor, nn
from weight_recipes import PRODUCTS

import layoutc
from layoutc.runtime.products import choice, grouped, scaled_grouped_mm
from layoutc.runtime.weight import operators


class Experts(nn.Module):
    """(experts, k, n)."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(values)

    def forward(self, x: Tensor, offs: Tensor | None) -> Tensor:
        """(tokens, k) in groups, or (experts, tokens, k)."""
        w = self.gate_up_proj
        return torch.bmm(x, w) if offs is None else F.grouped_mm(x, w, offs=offs)


def run(
    recipe: str, x: Tensor, w: Tensor, g: Tensor, offs: Tensor | None, how: Any, use: str = "quantize_", **options: Any
) -> list[Tensor]:
    """The output, and the gradients of the input and of w (experts, n, k), of which the transpose is quantized."""
    layer = Experts(w.transpose(1, 2).contiguous())
    assert getattr(layoutc, use)(layer, recipe, param_filter=["gate_up_proj"]) == ["gate_up_proj"]
    called: Any = torch.compile(layer, fullgraph=True, backend="aot_eager") if options.get("compiled") else layer
    x = x.clone().requires_grad_()
    with product_modes.products(how):
        out = called(x, offs)
        out.backward(g)
    assert x.grad is not None
    assert layer.gate_up_proj.grad is not None
    assert layer.gate_up_proj.grad.is_contiguous()
    return [out.detach(), x.grad, layer.gate_up_proj.grad.transpose(1, 2)]


@pytest.mark.sample(8)
@pytest.mark.parametrize("use", ["quantize_", "cast_on_gather_"])
@pytest.mark.parametrize("how", ["reference", "low_precision", "dequantize"])
@pytest.mark.parametrize("recipe", PRODUCTS)
def test_products_are_exact_where_nothing_rounds(recipe: str, how: Any, use: str) -> None:
    sizes = SIZES["mixed"]
    x, w, g = exact_inputs(recipe, sizes)
    found = run(recipe, x, w, g, offsets(sizes), how, use)
    rounds = how == "reference" and module(module(recipe).LAYOUT.products.activation[0]).LAYOUT.not_weights
    for one, whole in list(zip(found, whole_numbers(x, w, g, sizes), strict=True))[: 2 if rounds else 3]:
        assert same_bits(one, whole)


@pytest.mark.parametrize("recipe", PRODUCTS)
def test_low_precision_multiplies_quantized_values(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the recipes' own values in fp64, group by group: the weight's are those of the axis that is contracted,
    and activations are quantized as activations, though a weight that is not transposed is grad_input's."""
    monkeypatch.setattr(operators, "draw_seed", lambda x: torch.tensor([5]))
    sizes = (32, 0, 64, 32)
    x, w, g = weight(128, K, seed=1), weight(EXPERTS * N, K, seed=2).view(EXPERTS, N, K), weight(128, N, seed=3)
    products = module(recipe).LAYOUT.products
    activation, gradient = module(products.activation[0]), module(products.gradient[0])
    held = module(recipe).quantize(w.transpose(1, 2).contiguous())
    out, of_x, _ = run(recipe, x, w, g, offsets(sizes), "reference")

    def values(one: Any, data: Tensor) -> Tensor:
        return one.quantize(data).values_of("rowwise", torch.float32).double()

    for found, left, right in (
        (out, values(activation, x), held.values_of("columnwise", torch.float32).double()),
        (of_x, values(gradient, g), held.values_of("rowwise", torch.float32).double().transpose(1, 2)),
    ):
        groups = left.split(sizes)
        expected = torch.cat([a @ b for a, b in zip(groups, right, strict=True)])
        bound = torch.cat([a.abs() @ b.abs() for a, b in zip(groups, right, strict=True)])
        assert ((found.double() - expected).abs() <= left.shape[1] * 2**-23 * bound).all()


@pytest.mark.parametrize("how", ["reference", "dequantize"])
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_batches_are_exact_where_nothing_rounds(recipe: str, how: Any) -> None:
    x, w, g = exact_inputs(recipe, SIZES["equal"])
    found = run(recipe, x.view(EXPERTS, 32, K), w, g.view(EXPERTS, 32, N), None, how)
    expected = whole_numbers(x, w, g, SIZES["equal"])
    assert all(same_bits(a.reshape(b.shape), b) for a, b in zip(found, expected, strict=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "use"), [("fp8_current", "quantize_"), ("mxfp8", "cast_on_gather_")])
def test_compiled_equals_eager(recipe: str, use: str) -> None:
    sizes = SIZES["mixed"]
    x, g = weight(128, K, seed=1).bfloat16(), weight(128, N, seed=3).bfloat16()
    w = weight(EXPERTS * N, K, seed=2).view(EXPERTS, N, K).bfloat16()
    torch._dynamo.reset()
    for how in ("reference", "low_precision"):
        expected = run(recipe, x, w, g, offsets(sizes), how, use)
        assert all(map(same_bits, run(recipe, x, w, g, offsets(sizes), how, use, compiled=True), expected))


# -------------------------------------------------------------------------------------------------------------- kernels
@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPUs have all kernels: they read what cards would, as cards do."""
    monkeypatch.setattr(choice, "not_here", lambda cards, device: "")
    monkeypatch.setattr(choice, "scaled_grouped_mm_v2_is_traced", True)
    monkeypatch.setattr(scaled_grouped_mm, "scaled_grouped_mm", grouped_kernels.one_scale)
    monkeypatch.setattr(scaled_grouped_mm, "scaled_grouped_mm_v2", grouped_kernels.two_scales)
    choice.plan_of.cache_clear()
    yield
    choice.plan_of.cache_clear()


def ways_of(recipe: str, tokens: int, device: str) -> list[str]:
    sizes = choice.Sizes(EXPERTS, N, K, tokens, True)
    cls = module(recipe).Tensor
    return [choice.choose(cls, name, sizes, torch.device(device), "low_precision").way for name in choice.NAMES]


@pytest.mark.parametrize("recipe", WITH_KERNELS)
def test_kernels_read_what_was_quantized(recipe: str, kernels: None) -> None:
    """Tiles of scales of groups and of experts, rows and strides: exact, and rounded once to bf16."""
    sizes = SIZES["mixed"]
    x, w, g = (uneven(one, rows, rows) for one, rows in zip(exact_inputs(recipe, sizes), (1, 32, 1), strict=True))
    ways = ways_of(recipe, sum(sizes), "cpu")
    assert ways[0] == "kernel"
    assert (ways[1] == "kernel") == (recipe != "fp8_current")  # whose gradients are e5m2
    found = run(recipe, x, w, g, offsets(sizes), "low_precision")
    for one, expected, way in list(zip(found, whole_numbers(x, w, g, sizes), ways, strict=True))[:2]:
        if way == "kernel" and "nvfp4" in recipe:
            assert ((one - expected).abs() <= 2**-8 * expected.abs()).all()
        else:
            assert same_bits(one, expected.bfloat16().float() if way == "kernel" else expected)


@pytest.mark.parametrize("recipe", WITH_KERNELS)
def test_what_kernels_get_passes_the_checks_of_torch(recipe: str) -> None:
    """On the meta device torch checks dtypes, shapes and strides as it does on a card."""
    held = module(recipe).quantize(weight(EXPERTS * K, N).view(EXPERTS, K, N)).to("meta")
    x, g = (torch.empty(128, size, device="meta", dtype=torch.bfloat16) for size in (K, N))
    offs = torch.empty(EXPERTS, device="meta", dtype=torch.int32)
    out, *saved = grouped.forward(x, held, offs, "low_precision", "input")
    of_x, of_w = grouped.backward(g, held, saved or [x], offs, "low_precision", True, "input")
    assert (out.shape, of_x.shape, of_w.shape) == ((128, N), (128, K), (EXPERTS, N, K))


def test_sizes_that_kernels_do_not_take() -> None:
    """Tiles of an expert's scales lie along the axis that the other way to store has."""
    cls, meta = module("mxfp8").Tensor, torch.device("meta")

    def reason(name: Any, n: int, k: int) -> str:
        return choice.choose(cls, name, choice.Sizes(4, n, k, 128, True), meta, "low_precision").reason

    assert reason("forward", 256, 160).endswith("a contracted dim of experts in multiples of 128, not 160")
    assert reason("grad_input", 256, 160).endswith("a dim of experts in multiples of 128, not 160")
    assert reason("forward", 160, 256) == reason("grad_input", 160, 256) == ""


def test_explain_products_knows_such_weights() -> None:
    """Of modules that say so; of others only the product itself knows."""
    layer = Experts(torch.randn(4, 160, 256))
    layoutc.quantize_(layer, "mxfp8", param_filter=["gate_up_proj"])

    def reasons() -> list[str]:
        rows = layoutc.explain_products(layer, device="meta")
        return [row.reason.removeprefix("scaled_grouped_mm takes ").partition(" of ")[0] for row in rows[:2]]

    assert reasons() == ["a dim", "a contracted dim"]
    layer.is_transposed = True  # type: ignore[assignment]
    assert reasons() == ["a contracted dim", "a dim"]
