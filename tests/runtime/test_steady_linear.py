"""Linear layers in straight-line code, with kernels under Triton's interpreter: the bytes of the ordinary calls."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
from quantized_cases import same_bits
from torch import Tensor

import layoutc
from layoutc.runtime.kernels import launch, plans
from layoutc.runtime.operands import launched, scaled_mm
from layoutc.runtime.products import autograd, choice, linear, steady_linear
from layoutc.runtime.storage.planes import GatheredPlanes, Home
from layoutc.runtime.torch_private import scaled_mm_on_cpus

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.skipif(not scaled_mm_on_cpus, reason="needs a torch whose scaled_mm multiplies on CPUs (2.13)"),
]
M, K, TOKENS = 128, 128, 32


multiplied: list[tuple[Any, ...]] = []  # what scaled_mm was given


def noted(a: scaled_mm.Side, b: scaled_mm.Side, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """In the place of a product, which CPUs have for few kinds of scales: its operands are kept, to be compared. Codes
    are multiplied, so that results have the shapes of products and depend on what was quantized."""
    multiplied.append((*a, *b, dtype, fast))
    return (a.codes.float() @ b.codes.float().t()).to(dtype)


def same_operands(ours: list[tuple[Any, ...]], theirs: list[tuple[Any, ...]]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor):
            return a.dtype == b.dtype and a.stride() == b.stride() and same_bits(a, b)
        return all(map(same, a, b)) if isinstance(a, list) else bool(a == b)

    return len(ours) == len(theirs) > 0 and all(
        same(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels on CPUs, and nothing kept from before."""
    monkeypatch.setattr(launch, "usable", lambda x, dtype=None: type(x) is Tensor and x.numel() > 0)
    monkeypatch.setattr(choice, "not_here", lambda cards, device: "")
    monkeypatch.setattr(scaled_mm, "multiply", noted)
    monkeypatch.setattr(scaled_mm, "multiply_into", lambda out, *args, **how: out.copy_(noted(*args, out.dtype, **how)))
    monkeypatch.setattr(plans, "cache", plans.Plans(2048))
    multiplied.clear()
    choice.plan_of.cache_clear()
    yield
    choice.plan_of.cache_clear()


def weight(recipe: str, seed: int = 0, rows: int = M) -> Any:
    values = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))
    return import_module(f"layoutc.recipes.{recipe}").quantize(values).requires_grad_()


def case(seed: int) -> tuple[Tensor, Tensor]:
    """x (1, tokens, k) and the gradient of the output."""
    seeded = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(1, TOKENS * 4, size, generator=seeded).bfloat16() * (seed + 1) for size in (K, M))
    return x.requires_grad_(), grad


def step(x: Tensor, held: Any, grad: Tensor, bias: Tensor | None = None) -> list[Tensor]:
    """The output, and gradients of x and of the weight."""
    x = x.detach().requires_grad_(x.requires_grad)
    held.grad = None
    out = F.linear(x, held, bias)
    out.backward(grad)  # type: ignore[no-untyped-call]
    return [out.detach(), *(one.grad for one in (x, held) if one.grad is not None)]


def found_of(kind: Any) -> list[Any]:
    return [found for found in plans.cache.values() if isinstance(found, kind)]


def ordinary(monkeypatch: pytest.MonkeyPatch, *args: Any) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(steady_linear, "forward", lambda *args: None)
        patch.setattr(steady_linear, "backward", lambda *args: None)
        return step(*args)


PRODUCTS = {"fp8_current": 3, "fp8_block": 3, "fp8_rowwise": 2}  # in low precision, of a step


@pytest.mark.sample(1)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("recipe", PRODUCTS)
def test_later_calls_are_straight_line_code(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They call nothing of `linear`, and give its bytes: for other values, other weights, and with a bias."""
    bias = torch.randn(M, generator=torch.Generator().manual_seed(2)).bfloat16()
    held, other = weight(recipe), weight(recipe, 1)
    with layoutc.products("low_precision"):
        for one in (held, other):
            step(case(0)[0], one, case(0)[1])
        expected = [
            ordinary(monkeypatch, x, one, grad, added)
            for one in (held, other)
            for added in (None, bias)
            for x, grad in [case(1)]
        ]
        theirs = multiplied.copy()[2 * PRODUCTS[recipe] :]
        multiplied.clear()
        monkeypatch.setattr(autograd, "call", None)
        found = [step(x, one, grad, added) for one in (held, other) for added in (None, bias) for x, grad in [case(1)]]
    assert same_operands(multiplied, theirs)
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs) == 3
        assert all(map(same_bits, ours, theirs))


@pytest.mark.usefixtures("kernels")
def test_autocast_rounds_no_gradient_of_a_weight() -> None:
    """Forward outside of it and backward inside: the ordinary call turns it off."""
    held, (x, grad) = weight("fp8_rowwise"), case(0)
    given: Any = (grad, held, [x.detach()], "low_precision", True, "quantized")
    assert steady_linear.backward(*given) is not None
    with torch.autocast("cpu", torch.float16):
        assert steady_linear.backward(*given) is None


@pytest.mark.usefixtures("kernels")
def test_weights_whose_passes_gather_other_planes() -> None:
    """Each pass finds its own, and what a product has left of forward's serves forward alone."""
    held, (x, grad) = weight("fp8_rowwise"), case(0)
    every, home = dict(held.store.planes), Home(lambda: None, lambda *_: {})
    held.store.planes = planes = GatheredPlanes(
        {name: every[name] for name in ("rowwise_data", "rowwise_scale")}, home, (M, K)
    )
    assert (
        steady_linear.forward(x, held, None, "low_precision", "quantized") is None
    )  # nothing is kept of the weight yet
    expected = linear.forward(x.detach(), held, None, "low_precision", "quantized")
    found = steady_linear.forward(x, held, None, "low_precision", "quantized")
    assert found is not None
    assert all(map(same_bits, found, expected))
    planes.clear()
    planes.update({name: every[name] for name in ("columnwise_data", "columnwise_scale")})
    assert steady_linear.forward(x, held, None, "low_precision", "quantized") is None
    gradients = linear.backward(grad, held, [x.detach()], "low_precision", True, "quantized")
    found = steady_linear.backward(grad, held, [x.detach()], "low_precision", True, "quantized")
    assert found is not None
    assert all(map(same_bits, found, gradients))


@pytest.mark.sample(1)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("recipe", "needs_input", "trains"),
    [
        *((recipe, True, False) for recipe in PRODUCTS),
        *((recipe, False, True) for recipe in PRODUCTS if PRODUCTS[recipe] == 3),
    ],
)
def test_one_gradient_alone(recipe: str, needs_input: bool, trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held, (x, grad) = weight(recipe).requires_grad_(trains), case(1)
    x.requires_grad_(needs_input)
    with layoutc.products("low_precision"):
        expected = ordinary(monkeypatch, x, held, grad)
        theirs = multiplied.copy()
        step(x, held, grad)
        multiplied.clear()
        monkeypatch.setattr(autograd, "call", None)
        found = step(x, held, grad)
    assert len(found) == 2
    assert same_operands(multiplied, theirs)
    assert all(map(same_bits, found, expected))


@pytest.mark.usefixtures("kernels")
def test_weights_that_share_an_input_quantize_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held, (x, _) = weight("fp8_current"), case(0)
    other = weight("fp8_current", 1, rows=64)  # of another size, as keys and values are
    with layoutc.products("low_precision"):
        F.linear(x, held), F.linear(x, other)
        launches: list[Any] = []
        quantize = launched.quantize
        monkeypatch.setattr(launched, "quantize", lambda plan, x: (launches.append(x), quantize(plan, x))[1])
        y = x * 2
        first, second = F.linear(y, held), F.linear(y, other)
        assert len(launches) == 1
        y.data.mul_(3)  # not seen by autograd, nor by us
        with torch.no_grad():
            y.mul_(2)
        assert not torch.equal(F.linear(y, held), first)
        assert len(launches) == 2
    assert not torch.equal(first[..., :64], second)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
def test_it_follows_the_weight(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes into planes, planes that take their place, and those that FSDP2 has freed."""
    held, (x, grad) = weight(recipe), case(1)
    with layoutc.products("low_precision"):
        before = [step(x, held, grad) for _ in range(2)][1]
        with torch.no_grad():
            held.copy_(weight(recipe, 1))
        after = step(x, held, grad)
        assert not torch.equal(after[0], before[0])
        assert all(map(same_bits, after, ordinary(monkeypatch, x, held, grad)))
        held.store.planes["rowwise_data"] = weight(recipe).store.planes["rowwise_data"]
        assert all(map(same_bits, step(x, held, grad), ordinary(monkeypatch, x, held, grad)))
        (laid,) = found_of(steady_linear.Backward)
        assert laid.weight is not None
        held.store.planes["rowwise_data"].untyped_storage().resize_(0)
        assert steady_linear.forward(x, held, None, "low_precision", "quantized") is None
        assert laid(grad, held, []) is None


@pytest.mark.usefixtures("kernels")
def test_codes_that_an_ordinary_forward_has_saved() -> None:
    """They may be bytes, where several launches made them; straight-line code reads them as scaled_mm wants them."""
    held, (x, grad) = weight("fp8_current"), case(1)
    with layoutc.products("low_precision"):
        expected = step(x, held, grad)
        _, *saved = linear.forward(x.detach(), held, None, "low_precision", "quantized")
        found = steady_linear.backward(
            grad, held, [one.view(torch.uint8) for one in saved], "low_precision", True, "quantized"
        )
    assert found is not None
    assert all(same_bits(ours.to(theirs.dtype), theirs) for ours, theirs in zip(found, expected[1:], strict=True))


@pytest.mark.usefixtures("kernels")
def test_what_can_not_be_read_is_not_remembered() -> None:
    """A weight that FSDP2 has freed says so, and the next one of its size is multiplied as ever."""
    held, (x, _) = weight("fp8_block"), case(0)
    held.store.planes["rowwise_data"].untyped_storage().resize_(0)
    assert steady_linear.forward(x, held, None, "low_precision", "quantized") is None
    assert not found_of(steady_linear.Forward)
    assert steady_linear.forward(x, weight("fp8_block"), None, "low_precision", "quantized") is not None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("recipe", "why"),
    [("nvfp4", "an amax beside"), ("mxfp8", "codes that are transposed")],
)
def test_others_are_left_to_ordinary_calls(recipe: str, why: str) -> None:
    held, (x, grad) = weight(recipe), case(0)
    assert steady_linear.Backward.of(held, grad, "low_precision", True, True) is None, why
    if recipe != "mxfp8":
        assert steady_linear.Forward.of(held, x, "low_precision", "quantized") is None, why


@pytest.mark.usefixtures("kernels")
def test_gradients_of_gradients_are_refused() -> None:
    held, (x, _) = weight("fp8_current"), case(0)
    with layoutc.products("low_precision"):
        for _ in range(2):
            out = F.linear(x, held)
            (of_x,) = torch.autograd.grad((out * out).sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                of_x.sum().backward()  # type: ignore[no-untyped-call]
