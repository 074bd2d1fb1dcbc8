"""F.linear of quantized weights in high precision: the bits of torch's own way through the class, in one function."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import product_modes
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from layoutc.runtime.errors import ValuesAlone
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.product_mode import Mode
from layoutc.runtime.products import autograd
from layoutc.runtime.torch_private import without_torch_function
from layoutc.runtime.weight import operators

# Codes of both orientations and of one, packed codes, no products in low precision, one orientation.
RECIPES = ("fp8_block", "mxfp8", "nvfp4", "int4_group32", "mxfp8_frozen")
SHAPES = [(64,), (2, 3)]
Linear = Callable[..., Tensor]


def through_the_class(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As torch divides F.linear up: a transposed weight and a product."""
    with without_torch_function():
        return F.linear(x, weight, bias)


def case(name: str, shape: tuple[int, ...], dtype: torch.dtype, with_bias: bool) -> tuple[Tensor, Any, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    recipe = importlib.import_module(f"layoutc.recipes.{name}")
    weight = nn.Parameter(recipe.quantize(torch.randn(256, 128, generator=generator).to(dtype)))
    x = torch.randn(*shape, 128, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(256, generator=generator).to(dtype).requires_grad_() if with_bias else None
    return x, weight, bias


def results(linear: Linear, x: Tensor, weight: Any, bias: Tensor | None) -> list[Tensor]:
    """The output, and the gradients of all that has one."""
    out = linear(x, weight, bias)
    wanted = [one for one in (x, weight, bias) if one is not None and one.requires_grad]
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


@pytest.mark.sample(6)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("dtype", "shape"), list(zip([torch.bfloat16, torch.float32], SHAPES, strict=True)), ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_outputs_and_gradients_have_the_bits_of_the_class(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, with_bias: bool
) -> None:
    x, weight, bias = case(name, shape, dtype, with_bias)
    assert type(F.linear(x, weight, bias).grad_fn).__name__ == "DequantizedLinearBackward"
    for found, expected in zip(
        results(F.linear, x, weight, bias), results(through_the_class, x, weight, bias), strict=True
    ):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    with torch.no_grad():
        assert torch.equal(F.linear(x, weight, bias), F.linear(x, weight.values_of("rowwise", dtype), bias))


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_what_needs_no_gradient_has_none_and_is_not_kept(frozen: str) -> None:
    x, weight, bias = case("fp8_block", (5,), torch.bfloat16, True)
    {"x": x, "weight": weight, "bias": bias}[frozen].requires_grad_(False)
    for found, expected in zip(
        results(F.linear, x, weight, bias), results(through_the_class, x, weight, bias), strict=True
    ):
        assert torch.equal(found, expected)
    out = F.linear(x, weight, bias)  # with torch 2.11 what is kept goes with it
    kept = out.grad_fn.saved_tensors
    assert [one is None for one in kept] == [frozen == "weight", frozen == "x"]


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_gradients_are_differentiated_again(name: str) -> None:
    x, weight, bias = case(name, (7,), torch.float32, True)

    def of_gradient(linear: Linear) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(linear(x, weight, bias).pow(3).sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), (x, weight, bias))

    for found, expected in zip(of_gradient(F.linear), of_gradient(through_the_class), strict=True):
        assert torch.equal(found, expected)


def test_transforms_autocast_and_other_dtypes_are_left_to_the_class() -> None:
    x, weight, _ = case("fp8_block", (5,), torch.float32, False)
    detached, frozen = x.detach(), weight.detach()
    by_function = torch.func.grad(lambda one: F.linear(one, frozen).square().sum())(detached)
    assert torch.equal(by_function, results(through_the_class, x, weight, None)[1])
    assert torch.equal(torch.func.vmap(lambda one: F.linear(one, frozen))(detached), F.linear(detached, frozen))
    _, tangent = torch.func.jvp(lambda one: F.linear(one, frozen), (detached,), (torch.ones_like(detached),))
    assert torch.equal(tangent, F.linear(torch.ones_like(detached), frozen))
    with torch.autocast("cpu", torch.bfloat16):
        out = F.linear(x, weight)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, F.linear(x.bfloat16(), weight.values_of("rowwise", torch.bfloat16)))
    half = x.detach().bfloat16()
    assert torch.equal(F.linear(half, weight), F.linear(half, weight.values_of("rowwise", torch.bfloat16)))
    with torch.inference_mode():
        assert torch.equal(F.linear(detached, weight), F.linear(detached, weight.values_of("rowwise", torch.float32)))


@pytest.mark.parametrize("products", ["dequantize", "reference"])
@pytest.mark.parametrize("by_grad", [False, True], ids=["backward", "autograd.grad"])
def test_checkpointed_layers_have_the_same_gradients(by_grad: bool, products: Any) -> None:
    """Also where torch.autograd.grad is given the weight, and so is itself a call of the weight's class."""
    x, weight, bias = case("mxfp8", (2, 32), torch.bfloat16, True)

    def recomputed(*args: Any) -> Tensor:
        return checkpoint(F.linear, *args, use_reentrant=False)  # type: ignore[return-value]

    with product_modes.products(products):
        expected = results(F.linear, x, weight, bias)[1:]
        if by_grad:
            found = results(recomputed, x, weight, bias)[1:]
        else:
            recomputed(x, weight, bias).square().sum().backward()
            found = [one.grad for one in (x, weight, bias)]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_gradients_by_name_of_one_weight_and_of_none() -> None:
    x, weight, _ = case("fp8_block", (5,), torch.float32, False)
    other = torch.ones(2, requires_grad=True)
    out = F.linear(x, weight).sum()
    expected = torch.autograd.grad(through_the_class(x, weight, None).sum(), weight)
    assert torch.equal(torch.autograd.grad(out, weight, retain_graph=True)[0], expected[0])
    named = torch.autograd.grad(outputs=out, inputs=[weight, other], allow_unused=True, retain_graph=True)
    assert torch.equal(named[0], expected[0])
    assert named[1] is None
    zeros = torch.autograd.grad(out, [other, weight], allow_unused=True, materialize_grads=True, retain_graph=True)
    assert not zeros[0].any()
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(out, [weight, other], retain_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(out, weight.detach())


def test_a_wrong_width_is_refused_in_torchs_words() -> None:
    _, weight, _ = case("fp8_block", (5,), torch.float32, False)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        F.linear(torch.ones(3, 127), weight)


# ----------------------------------------------------------------------------------------------- launches that are kept
class Launched:
    """In place of a bound launch: writes how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        self.calls += 1
        tensors[-1].fill_(self.calls)


def again(kept: LaunchPlan, planes: Any) -> Tensor | None:
    """The values of planes, if they are as the launch reads them."""
    return None if (read := kept.read_of(planes)) is None else kept(*read)[0]


@pytest.fixture
def kept() -> tuple[LaunchPlan, dict[str, Tensor], Launched]:
    """A plan of two planes, on the CPU as under Triton's interpreter."""
    planes = {"data": torch.zeros(64, dtype=torch.uint8), "scale": torch.zeros(4)}
    launched: Any = Launched()
    launched.takes, launched.card = 3, -1
    plan = LaunchPlan([launched]).reading(planes).making({"values": torch.empty(8, 8, dtype=torch.bfloat16)})
    return plan, planes, launched


def test_a_kept_launch_follows_memory_that_is_freed_and_allocated_anew(kept: Any) -> None:
    """As FSDP2 does after each pass: freed planes are for the ordinary way, which says so."""
    plan, planes, launched = kept
    out = again(plan, planes)
    assert out.shape == (8, 8)
    assert out.dtype == torch.bfloat16
    assert out[0, 0] == 1
    storage = planes["data"].untyped_storage()
    storage.resize_(0)
    assert again(plan, planes) is None
    storage.resize_(64)
    assert again(plan, planes)[0, 0] == 2 == launched.calls


def test_a_kept_launch_is_for_planes_as_kernels_read_them(kept: Any) -> None:
    plan, planes, launched = kept
    again(plan, {**planes, "data": planes["data"].clone()})
    assert launched.calls == 1
    assert again(plan, {"data": planes["data"]}) is None
    assert again(plan, {**planes, "data": torch.zeros(68, dtype=torch.uint8)[1:65]}) is None
    assert again(plan, {**planes, "data": torch.zeros(128, dtype=torch.uint8)[::2]}) is None
    assert again(plan, {**planes, "data": planes["data"].to("meta")}) is None
    assert launched.calls == 1


class OnCard:
    """A plane on a card that is not there."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return 64

    def get_device(self) -> int:
        """The card."""
        return self.device.index


@pytest.mark.parametrize("mode", ["dequantize", "reference"])
@pytest.mark.parametrize("name", ["input", "bias"])
def test_what_a_transform_has_left_is_followed(mode: Mode, name: str) -> None:
    """A tensor that outlives torch.func.grad wraps the one that has gradients."""
    quantize = importlib.import_module("layoutc.recipes.fp8_current").quantize
    weight = quantize(torch.randn(64, 32, dtype=torch.float32)).requires_grad_()
    values = {"input": torch.randn(5, 32), "bias": torch.randn(64)}
    found: list[list[Tensor | None]] = []
    for outlives in (False, True):
        leaves = {key: one.clone().requires_grad_() for key, one in values.items()}
        left: list[Tensor] = [leaves[name]]

        def keep(one: Tensor, left: list[Tensor] = left) -> Tensor:
            left.append(one)
            return one.square().sum()

        if outlives:
            torch.func.grad(keep)(leaves[name])
        with product_modes.products(mode):
            out = F.linear(weight=weight, **{**leaves, name: left[-1]})
            out.sum().backward()  # type: ignore[no-untyped-call]
        found.append([one.grad for one in leaves.values()])
    for plainly, followed in zip(*found, strict=True):
        assert plainly is not None
        assert followed is not None
        assert torch.equal(plainly, followed)


def test_a_kept_launch_is_for_planes_of_one_card() -> None:
    launched: Any = Launched()
    launched.takes, launched.card = 1, 1
    plan, held = LaunchPlan([launched]).reading(("data",)), OnCard(1)
    assert plan.read_of({"data": held}) == [held]  # type: ignore[dict-item]
    assert plan.read_of({"data": OnCard(0)}) is None  # type: ignore[dict-item]


@pytest.mark.parametrize("change", ["pieces wait", "rows of others"])
def test_a_kept_launch_is_not_asked_where_it_does_not_fit(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While pieces wait, reading a weight raises; FSDP2's copies of shards may take over other planes."""
    _, weight, _ = case("fp8_block", (5,), torch.float32, False)
    monkeypatch.setattr(operators, "values_again", lambda *_: torch.zeros(256, 128))
    assert not autograd.values_of(weight, "rowwise", torch.float32).any()
    if change == "pieces wait":
        monkeypatch.setattr(weight.store.writes, "waiting", [object()])
    else:
        monkeypatch.setattr(weight.store, "halo", weight.store.halo._replace(before=128))
    monkeypatch.setattr(type(weight), "values_of", lambda *_: torch.ones(256, 128))
    assert autograd.values_of(weight, "rowwise", torch.float32).all()


def as_values(tensor: Tensor) -> Tensor:
    """As save_on_cpu(pin_memory=True) keeps a tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def as_bytes(tensor: Tensor) -> io.BytesIO:
    """As hooks keep tensors in files."""
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("mode", ["dequantize", "reference"])
@pytest.mark.parametrize("use", ["quantized", "cast"])
@pytest.mark.parametrize("pack", [torch.Tensor.cpu, as_bytes, as_values])
def test_hooks_of_saved_tensors_keep_weights_or_are_refused(
    use: str, pack: Callable[[Tensor], Any], mode: Mode
) -> None:
    """Gradients are those without hooks; values alone have no codes, and multiplied unquantized, or not at all."""
    x, weight, bias = case("mxfp8", (64,), torch.float32, with_bias=True)
    if use == "cast":
        recipe = importlib.import_module("layoutc.recipes.mxfp8")
        weight = nn.Parameter(recipe.CastTensor(weight.detach().dequantize()))

    def unpack(kept: Any) -> Tensor:
        back: Tensor = torch.load(kept, weights_only=True) if isinstance(kept, io.BytesIO) else kept
        return back

    with product_modes.products(mode):
        expected = results(F.linear, x, weight, bias)
        refused = pack is as_values or (pack is as_bytes and (use, mode) == ("cast", "dequantize"))
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, unpack),
            pytest.raises(ValuesAlone, match="have the hook move the tensor") if refused else nullcontext(),
        ):
            found = results(F.linear, x, weight, bias)
    assert refused or all(map(torch.equal, found, expected))
