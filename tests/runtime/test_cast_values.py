"""What operators see of a weight that is cast on gather: its values, or the quantized weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import layoutc

RECIPES = ("mxfp8", "nvfp4", "fp8_current")
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))


def module_of(recipe: str) -> Any:
    """The generated module."""
    return import_module(f"layoutc.recipes.{recipe}")


def values_for(seed: int = 0) -> Tensor:
    """(64, 64) in fp32."""
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))


ALIASES: dict[str, Callable[[Any], Any]] = {
    "parameter": lambda w: w,
    "view": lambda w: w.view(64, 64)[32:],
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "torch.detach": torch.detach,
    "view of data": lambda w: w.data[32:],
    "view of detach": lambda w: w.detach().view(2, 32, 64)[1],
    "detach of view": lambda w: w[32:].detach(),
    "clone of detach": lambda w: w.detach().clone(),
}
DETACHED = [name for name in ALIASES if "data" in name or "detach" in name]
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda w: F.linear(X, w),
    "matmul": lambda w: X @ w.t(),
    "mm": lambda w: torch.mm(X, w.t()),
    "columnwise": lambda w: X[:, : w.shape[0]] @ w,
    "addmm": lambda w: torch.addmm(torch.ones(4, w.shape[0]), X, w.t()),
    "bmm": lambda w: torch.bmm(X[None], w[None].transpose(-1, -2)),
}
PLAIN_STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda w: w.norm(),
    "vector_norm": lambda w: torch.linalg.vector_norm(w, 1),
    "mean": lambda w: w.mean(),
    "sum of rows": lambda w: w.sum(0),
    "max": lambda w: w.max(),
    "mul": lambda w: w * 3,
    "sub": lambda w: torch.ones(()) - w,
    "add_": lambda w: torch.ones(w.shape).add_(w, alpha=0.1),
    "lerp_": lambda w: torch.ones(w.shape).lerp_(w, 0.1),
    "foreach": lambda w: torch._foreach_mul([w], 2.0)[0],
    "cat": lambda w: torch.cat([w.reshape(-1), torch.ones(3)]),
}
USES: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda w: F.embedding(torch.tensor([3, 1]), w),
    "index": lambda w: w[torch.tensor([3, 1])],
    "stack of rows": lambda w: torch.cat([w, torch.ones(1, 64)]),
    "sort": lambda w: w.sort()[0],
}
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda w: w.clone().detach(),
    "to": lambda w: w.to(torch.bfloat16).detach().float(),
    "copy_": lambda w: torch.empty(w.shape).copy_(w).detach(),
    "view of bytes": lambda w: w.detach().view(torch.int32),
}


def expected(kind: str, alias: str, mode: str) -> str:
    """The rule, from CastOnGather's docstring."""
    if kind == "product":
        return "quantized"
    if kind == "copy" or alias in DETACHED:
        return "values"
    return "values" if kind == "step" and mode == "no_grad" else "quantized"


CASES = [
    *(("product", name, f) for name, f in PRODUCTS.items()),
    *(("step", name, f) for name, f in PLAIN_STEPS.items()),
    *(("use", name, f) for name, f in USES.items()),
    *(("copy", name, f) for name, f in COPIES.items()),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_an_operator_sees(recipe: str) -> None:
    """Operators x aliases x modes, against plain values and against the quantized weight."""
    values = values_for()
    weight, quantized = nn.Parameter(module_of(recipe).CastTensor(values)), module_of(recipe).quantize(values)
    for alias, of in ALIASES.items():
        shown: dict[str, Any] = {"values": of(values), "quantized": of(quantized)}
        for (mode, entered), (kind, name, function) in product(MODES.items(), CASES):
            given = of(weight)
            with entered():
                want, got = function(shown[expected(kind, alias, mode)]), function(given)
            got = getattr(got, "plain", got)
            assert torch.equal(got.detach(), want.detach()), (name, alias, mode, expected(kind, alias, mode))


def plain_and_cast(recipe: str = "nvfp4", layers: int = 2) -> tuple[nn.Module, nn.Module]:
    """A model, and the same one whose weights are cast on gather."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
    cast = copy.deepcopy(plain)
    layoutc.cast_on_gather_(cast, recipe)
    return plain, cast


def values_of(model: nn.Module) -> list[Tensor]:
    """All parameters as plain tensors."""
    return [getattr(param.data, "plain", param.data).clone() for param in model.parameters()]


def averaged_by_hand(average: dict[str, Tensor], model: nn.Module) -> None:
    """As people write it, with and without no_grad, by .data and .detach()."""
    for name, param in model.named_parameters():
        average[name].mul_(0.9).add_(param.data, alpha=0.1)
        average[name].lerp_(param.detach(), 0.1)
        with torch.no_grad():
            average[name].lerp_(param, 0.1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_averages_of_weights_are_those_of_plain_ones(recipe: str) -> None:
    """torch's AveragedModel, and ones by hand: plain tensors, and clones of what they average."""
    found = []
    for model in plain_and_cast(recipe):
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        plain = {name: torch.zeros(param.shape) for name, param in model.named_parameters()}
        clones = {name: param.detach().clone() for name, param in model.named_parameters()}
        for step in range(3):
            with torch.no_grad():
                for seed, param in enumerate(model.parameters()):
                    param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + seed)))
            averaged.update_parameters(model)
            averaged_by_hand(plain, model)
            averaged_by_hand(clones, model)
        held = [*values_of(averaged), *plain.values(), *(getattr(one, "plain", one) for one in clones.values())]
        found.append([*held, *(one.norm() for one in clones.values())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_an_optimizer_that_steps_in_backward_reads_values() -> None:
    """Hooks run while autograd does, but what they do is no part of the model."""
    models = plain_and_cast()
    for model in models:
        for param in model.parameters():
            optimizer = torch.optim.SGD([param], lr=0.1, weight_decay=0.5, foreach=False)
            param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    grads = [torch.randn(64, 64), torch.randn(64)] * 2
    for model in models:
        torch.autograd.backward([param * 1 for param in model.parameters()], grads)
    for one, other in zip(*(values_of(model) for model in models), strict=True):
        assert torch.equal(one, other)


class Steps(torch.optim.Optimizer):
    """Writes what a function computes from each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step, and then the closure."""
        for group in self.param_groups:
            for param in group["params"]:
                param.copy_(group["of"](param))
        return None if closure is None else closure()


@pytest.mark.parametrize(
    "of",
    [
        lambda w: w.index_put((w > 0,), 0.9 * w[w > 0]),
        lambda w: w[torch.arange(64).flip(0)],
        lambda w: torch.cat([w[:32].sort(1)[0], w[32:].roll(1, 0)]),
        lambda w: w - 0.1 * w @ w.T @ w,
        lambda w: torch.einsum("ij,kj->ik", w, w),
        lambda w: F.linear(torch.eye(64), w),
        lambda w: torch.bmm(torch.eye(64)[None], w[None])[0],
    ],
)
@pytest.mark.parametrize("mode", ["dequantize", "low_precision"])
def test_whatever_an_optimizer_reads_are_values(of: Callable[[Tensor], Tensor], mode: Any) -> None:
    """Its step would write rounded values into the weight; the model that its closure calls is quantized."""
    recipe = "fp8_current"
    expected, weight = nn.Parameter(values_for()), nn.Parameter(module_of(recipe).CastTensor(values_for()))
    model = nn.Linear(64, 64, bias=False)
    model.weight = weight
    with layoutc.products(mode):
        Steps([expected], {"of": of}).step()
        loss = Steps([weight], {"of": of}).step(partial(model, X))
        assert torch.equal(loss, model(X))
    assert torch.equal(weight.plain, expected)
    if mode == "dequantize":
        assert torch.equal(loss, F.linear(X, module_of(recipe).quantize(expected.detach()).dequantize()))


class Scaled(torch.autograd.Function):
    """x * w, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        with torch.enable_grad():
            return (x * w).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return grad * w, grad * x


@pytest.mark.parametrize("product", [lambda x, w: x * w, Scaled.apply, lambda x, w: x @ w.t()])
def test_backward_has_what_forward_had(product: Callable[..., Tensor]) -> None:
    """Directly, with recomputed activations, and with hooks on what is saved, which see a detached alias."""
    recipe = "nvfp4"
    expected_x = torch.ones(64, 64, requires_grad=True)
    product(expected_x, module_of(recipe).quantize(values_for())).sin().sum().backward()
    weight = nn.Parameter(module_of(recipe).CastTensor(values_for()))

    def hooked(x: Tensor, w: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return product(x, w)

    ways: list[Callable[..., Any]] = [
        product,
        hooked,
        partial(checkpoint, product, use_reentrant=False),
    ]
    for way in ways:
        x = torch.ones(64, 64, requires_grad=True)
        way(x, weight).sin().sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, expected_x.grad), way


def test_a_functional_call_multiplies_with_the_quantized_weight() -> None:
    _, model = plain_and_cast(layers=1)
    x = torch.randn(4, 64)
    for params in (dict(model.named_parameters()), {n: p.detach() for n, p in model.named_parameters()}):
        assert torch.equal(torch.func.functional_call(model, params, x), model(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_graphs_see_what_eager_calls_see(recipe: str) -> None:
    """A parameter, its views and its detached aliases, made in the graph and outside of it."""

    def model(x: Tensor, w: Tensor, outside: Tensor) -> Tensor:
        steps = x + w * 2 + w.detach().sin() + w.view(64, 64).cos() + w.data.exp() + outside * 3
        return steps + x @ w.t() + x @ w.detach()

    weight, x = nn.Parameter(module_of(recipe).CastTensor(values_for())), torch.randn(64, 64)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for outside in (weight.detach(), weight.data[:], weight.view(64, 64)):
        grads = []
        for way in (model, compiled):
            weight.grad = None
            out = way(x, weight, outside)
            out.sin().sum().backward()
            grads.append((out, weight.grad))
        assert torch.equal(grads[0][0], grads[1][0])
        assert torch.equal(grads[0][1], grads[1][1])
    with torch.no_grad():
        assert torch.equal(model(x, weight, weight), compiled(x, weight, weight))


@torch.compile(backend="aot_eager", fullgraph=True)
def add(first: Tensor, second: Tensor) -> None:
    """As a compiled optimizer writes."""
    first.add_(1)
    second.mul_(2)


@torch.no_grad()
def test_graphs_write_to_views() -> None:
    """Of every kind, and to two of one weight, and leave the rest alone."""
    for first, second in (
        (lambda w: w.data[:32], lambda w: w.data[32:]),
        (lambda w: w.view(-1)[:2048], lambda w: w.detach().view(-1)[2048:]),
        (lambda w: w.t()[:, :32], lambda w: w.data.t()[:, 48:]),
        (lambda w: w[:, :32], lambda w: w.data[::2, 48:]),
    ):
        weight, expected = nn.Parameter(module_of("mxfp8").CastTensor(values_for())), values_for()
        torch._dynamo.reset()
        add(first(weight), second(weight))
        first(expected).add_(1)
        second(expected).mul_(2)
        assert torch.equal(weight.data[:].plain, expected)


@torch.no_grad()
def test_graphs_that_write_and_multiply_a_view_they_are_given_are_refused() -> None:
    """Blocks of the view would be those of the weight from before. Views that the graph makes itself are right."""

    def inside(x: Tensor, weight: Tensor) -> Tensor:
        return outside(x, weight[:32])

    def outside(x: Tensor, rows: Tensor) -> Tensor:
        rows.add_(1)
        return F.linear(x, rows)

    weights = [nn.Parameter(module_of("mxfp8").CastTensor(values_for())) for _ in range(2)]
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"give it the weight, and view that in the function"):
        torch.compile(outside, backend="aot_eager")(X, weights[0][:32])
    assert torch.equal(torch.compile(inside, backend="aot_eager")(X, weights[0]), inside(X, weights[1]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_has_values_of_its_own(recipe: str) -> None:
    """Writing to either leaves the other as it was."""
    weight = nn.Parameter(module_of(recipe).CastTensor(values_for()))
    other = copy.deepcopy(weight)
    assert torch.equal(other.data.plain, values_for())  # type: ignore[attr-defined]
    with torch.no_grad():
        weight.mul_(2)
        other.mul_(3)
    assert torch.equal(weight.data.plain, values_for() * 2)  # type: ignore[attr-defined]
    assert torch.equal(other.data.plain, values_for() * 3)  # type: ignore[attr-defined]


def test_a_copy_of_a_weight_made_of_a_parameter_keeps_no_graph() -> None:
    """Else each copy would hold all those before it."""
    weight = module_of("fp8_current").CastTensor(nn.Parameter(values_for()))
    other = copy.deepcopy(copy.deepcopy(weight))
    assert not any(plane.requires_grad for plane in other.store.values())


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_current", "fp8_delayed"])
def test_assigned_data_is_quantized_by_its_own_amax(recipe: str) -> None:
    """What was found ahead of gathers belongs to the values before."""
    module = module_of(recipe)
    model = nn.Linear(64, 64, bias=False)
    layoutc.cast_on_gather_(model, module)
    others: list[Any] = [values_for(1) * 7, module.CastTensor(values_for(2) / 9)]
    for other in others:
        layoutc.precompute_amaxes(model)
        model.weight.data = other
        expected = module.quantize(getattr(other, "plain", other))
        assert torch.equal(model.weight.data.quantize().dequantize(), expected.dequantize())  # type: ignore[attr-defined, operator]


@pytest.mark.parametrize("made", ["quantize", "CastTensor"])
def test_graphs_of_weights_that_train_are_others(made: str) -> None:
    """Backward is a part of what is compiled."""
    weight = getattr(module_of("mxfp8"), made)(values_for())
    hashes = {nn.Parameter(weight, trains)._stable_hash_for_caching() for trains in (False, True)}  # type: ignore
    assert len(hashes) == 2


@pytest.mark.parametrize("made", ["quantize", "CastTensor"])
def test_a_reshape_that_need_not_copy_is_a_view(made: str) -> None:
    """What reshape() is on some devices."""
    weight = getattr(module_of("mxfp8"), made)(values_for())
    view = torch.ops.aten._reshape_alias(weight, [2, 32, 64], [2048, 64, 1])
    assert type(view) is type(weight)
    assert view.shape == (2, 32, 64)
    assert view.data_ptr() == weight.data_ptr()
    with torch.no_grad():
        view[1].zero_()
    whole = weight.dequantize() if made == "quantize" else weight.plain
    assert not whole[32:].any()
    assert whole[:32].any()
