"""torch.einsum of weights and of their views: the bits, gradients too, of the weight's values in a plain tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_cases import RECIPES, each_recipe, make, module
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import layoutc
from layoutc.runtime.weight.tensor import QuantizedTensor

COLUMNS = 128
# By name: the equation, the weight's dims, whether it comes first, the dims of its view, and of what it multiplies.
CASES: dict[str, tuple[str, tuple[int, ...], bool, tuple[int, ...], tuple[int, ...]]] = {
    "linear": ("bk,mk->bm", (256, COLUMNS), False, (256, COLUMNS), (5, COLUMNS)),
    "first": ("mk,...k->...m", (256, COLUMNS), True, (256, COLUMNS), (2, 5, COLUMNS)),
    "heads": ("bk,hdk->bhd", (256, COLUMNS), False, (8, 32, COLUMNS), (5, COLUMNS)),
    "absorbed": ("bhd,hdk->bhk", (256, COLUMNS), False, (8, 32, COLUMNS), (5, 8, 32)),
    "output": ("bhd,hdk->bk", (256, COLUMNS), False, (8, 32, COLUMNS), (5, 8, 32)),
    "experts": ("ebk,emk->ebm", (4, 128, COLUMNS), False, (4, 128, COLUMNS), (4, 5, COLUMNS)),
    "each expert": ("bk,emk->bem", (4, 128, COLUMNS), False, (4, 128, COLUMNS), (5, COLUMNS)),
    "diagonal": ("bm,mm->bm", (256, 256), False, (256, 256), (5, 256)),
}


def weights(recipe: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """A quantized weight, and plain values that are cast to the same."""
    values = make(recipe, *shape).dequantize() * 1.1
    parts = module(recipe)
    return {"quantized": nn.Parameter(parts.quantize(values)), "cast": nn.Parameter(parts.CastTensor(values))}


def results(name: str, weight: Any, einsum: Any = torch.einsum) -> list[Tensor]:
    """The product, and the gradients of what was multiplied and of the weight."""
    equation, _, is_first, view, dims = CASES[name]
    x = torch.randn(dims, generator=torch.Generator().manual_seed(1)).requires_grad_()
    shown = weight.view(view)
    out = einsum(equation, *((shown, x) if is_first else (x, shown)))
    return [out, *torch.autograd.grad(out.square().sum(), (x, weight))]


@each_recipe
def test_bits_and_gradients_are_those_of_the_values(recipe: str) -> None:
    """No view of codes has such orders of dims, so torch.einsum asks for values; strict() does not mind."""
    for name, weight in ((case, one) for case in CASES for one in weights(recipe, CASES[case][1]).values()):
        plain = module(recipe).quantize(weight.plain) if hasattr(weight, "plain") else weight
        expected = results(name, plain.detach().dequantize().requires_grad_())
        with layoutc.strict():
            found = results(name, weight)
        assert all(map(torch.equal, found, expected)), name
        assert all(type(one) is Tensor for one in found), name
        with torch.no_grad():
            assert torch.equal(results_without_gradients(name, weight), expected[0])
        with torch.inference_mode():
            assert torch.equal(results_without_gradients(name, weight), expected[0])


def results_without_gradients(name: str, weight: Any) -> Tensor:
    """As a model is evaluated."""
    equation, _, is_first, view, dims = CASES[name]
    x, shown = torch.randn(dims, generator=torch.Generator().manual_seed(1)), weight.view(view)
    return torch.einsum(equation, *((shown, x) if is_first else (x, shown)))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("recipe", "use"),
    [
        (recipe, use)
        for recipe in RECIPES
        for use in ("quantized", "cast")
        if (recipe, use) != ("fp8_delayed", "cast")  # a history of amaxes, which no graph advances, is refused
    ],
)
def test_a_compiled_graph_has_the_same_bits(recipe: str, use: str) -> None:
    """In one graph, with gradients."""
    torch.compiler.reset()  # one function for all recipes would be compiled too often
    weight = weights(recipe, (256, COLUMNS))[use]
    x = torch.randn(5, COLUMNS, requires_grad=True)

    def contracted(x: Tensor) -> Tensor:
        return torch.einsum("bk,hdk->bhd", x, weight.view(8, 32, COLUMNS))

    compiled = torch.compile(contracted, fullgraph=True, backend="aot_eager")
    for found, expected in zip(gradients(compiled(x), x, weight), gradients(contracted(x), x, weight), strict=True):
        assert torch.equal(found, expected)


def gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    """The output and the gradients of its squares."""
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


def test_transforms_of_torch_func_follow_it() -> None:
    """vmap and grad; a weight that is cast is quantized under no_grad, too."""
    x = torch.randn(3, COLUMNS)

    def product(weight: Any) -> Any:
        return lambda row: torch.einsum("k,mk->m", row, weight)

    for weight in weights("mxfp8", (256, COLUMNS)).values():
        values = (module("mxfp8").quantize(weight.plain) if hasattr(weight, "plain") else weight).detach().dequantize()
        expected = torch.vmap(product(values))(x)
        assert torch.equal(torch.vmap(product(weight))(x), expected)
        with torch.no_grad():
            assert torch.equal(torch.vmap(product(weight))(x), expected)
        slopes = [torch.func.grad(lambda row, of=of: product(of)(row).sum())(x[0]) for of in (weight, values)]
        assert torch.equal(*slopes)


def test_backward_dequantizes_again_and_sees_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy in high precision lives from forward to backward."""
    weight = weights("mxfp8", (256, COLUMNS))["quantized"]
    made: list[StorageWeakRef] = []
    dequantize = QuantizedTensor.dequantize

    def watched(self: QuantizedTensor, *args: Any) -> Tensor:
        values = dequantize(self, *args)
        made.append(StorageWeakRef(values.untyped_storage()))
        return values

    monkeypatch.setattr(QuantizedTensor, "dequantize", watched)
    x = torch.randn(5, COLUMNS, requires_grad=True)
    out = torch.einsum("bk,hdk->bhd", x, weight.view(8, 32, COLUMNS))
    assert [one.expired() for one in made] == [True]
    out.sum().backward()
    assert [one.expired() for one in made] == [True, True]
    out = torch.einsum("bk,hdk->bhd", x, weight.view(8, 32, COLUMNS))
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="written between forward and backward"):
        out.sum().backward()
