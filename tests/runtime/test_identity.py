"""What must not depend on how a weight is spelled: aliases, .data, new owners, optimizers that come after loads."""

from __future__ import annotations

import copy

import pytest
import torch
from quantized_cases import RECIPES, make, module, same_tensors, snapshot, weight
from torch import Tensor, nn

import layoutc
from layoutc.runtime.errors import LayoutError

pytestmark = pytest.mark.parametrize("recipe", RECIPES)


def trained(recipe: str, *, lr: float = 1e-2, frozen: bool = False) -> tuple[nn.Module, layoutc.MasterWeights]:
    """A two-layer model with its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    layoutc.quantize_(model, recipe)
    model[0].weight.requires_grad_(not frozen)
    return model, layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=lr)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(weight(16, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def error(param: Tensor, values: Tensor) -> float:
    return (param.dequantize() - values).abs().mean().item()  # type: ignore[attr-defined]


def test_weights_loaded_after_the_optimizer_was_made_are_what_it_trains(recipe: str) -> None:
    for optimizer_steps in (0, 2):
        model, optimizer = trained(recipe, lr=1e-8)
        for _ in range(optimizer_steps):
            step(model, optimizer)
        new = weight(256, 256, seed=7)
        model.load_state_dict({"0.weight": new, "1.weight": new})
        before = error(model[0].weight, new)
        step(model, optimizer)
        assert error(model[0].weight, new) <= 1.5 * before
        model[0].weight.data.mul_(0.5)
        step(model, optimizer)
        assert error(model[0].weight, new * 0.5) <= 1.5 * before


def test_masters_that_were_loaded_win_over_weights_once(recipe: str) -> None:
    model, optimizer = trained(recipe)
    step(model, optimizer)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    step(model, optimizer)
    expected = snapshot(model[0].weight)
    other, again = trained(recipe)
    again.load_state_dict(saved)
    other.load_state_dict(weights)
    step(other, again)
    assert same_tensors(other[0].weight.planes(), expected)


def test_a_weight_without_a_gradient_keeps_its_bytes(recipe: str) -> None:
    model, optimizer = trained(recipe, frozen=True)
    before = snapshot(model[0].weight)
    step(model, optimizer)
    assert same_tensors(model[0].weight.planes(), before)
    assert "master" not in optimizer.state.get(model[0].weight, {})
    model[0].weight.requires_grad_(True)
    step(model, optimizer)
    assert not same_tensors(model[0].weight.planes(), before)
    before = snapshot(model[1].weight)
    model[0](weight(4, 256)).sum().backward()
    optimizer.step()
    assert same_tensors(model[1].weight.planes(), before)


def test_a_model_and_its_optimizer_copy_together(recipe: str) -> None:
    model, optimizer = trained(recipe)
    step(model, optimizer)
    other, again = copy.deepcopy((model, optimizer))
    step(model, optimizer)
    step(other, again)
    assert same_tensors(model[0].weight.planes(), other[0].weight.planes())
    assert model[0].weight.planes()["rowwise_data"].data_ptr() != other[0].weight.planes()["rowwise_data"].data_ptr()


def test_a_state_that_does_not_fit_changes_nothing(recipe: str) -> None:
    model, optimizer = trained(recipe)
    step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 99.0
    del saved["state"][1]["master"]
    master = optimizer.state[model[0].weight]["master"].clone()
    with pytest.raises(ValueError, match=r"1\.weight of shape .*: the state has no fp32 master.*\['state'\]\[1\]"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert torch.equal(optimizer.state[model[0].weight]["master"], master)


def test_a_plain_optimizer_s_moments_load_beside_masters(recipe: str) -> None:
    """As the refusal of such a state says."""
    model, optimizer = trained(recipe)
    plain = [nn.Parameter(one.clone()) for one in optimizer.masters().values()]
    before = torch.optim.AdamW(plain, lr=1e-2)
    for one in plain:
        one.grad = torch.ones_like(one)
    before.step()
    state = before.state_dict()
    for index, master in enumerate(optimizer.masters().values()):
        state["state"][index]["master"] = master
    optimizer.load_state_dict(state)
    step(model, optimizer)
    assert optimizer.state[model[0].weight]["step"] == 2


def test_assigning_data_replaces_what_is_held(recipe: str) -> None:
    q, other, x = nn.Parameter(make(recipe)), make(recipe, seed=5), weight(256, 256, seed=6)
    q.data = other
    assert same_tensors(q.planes(), other.planes())
    q.data = x
    assert isinstance(q, nn.Parameter)
    assert same_tensors(q.planes(), module(recipe).quantize(x).planes())
    smaller = make(recipe, 128, 256)
    q.data = smaller
    assert q.shape == (128, 256)
    assert torch.equal(q.dequantize(), smaller.dequantize())
    with pytest.raises(ValueError, match="plain values of shape"):
        q.data = x


def test_parameters_can_be_made_from_a_vector(recipe: str) -> None:
    model, _ = trained(recipe)
    nn.utils.vector_to_parameters(torch.ones(2 * 256 * 256), model.parameters())
    assert torch.equal(model[0].weight.dequantize(), torch.ones(256, 256))


@pytest.mark.parametrize("written", [False, True])
def test_assigned_data_brings_its_writes_along(recipe: str, written: bool) -> None:
    """What has not come yet of one weight is not waited for in another that has taken its place, nor forgotten."""
    rows = module(recipe).LAYOUT.block_rows
    if rows == 1:
        pytest.skip("no rows share a scale")
    q, other, source = nn.Parameter(make(recipe)), make(recipe, seed=5), make(recipe, seed=6)
    halves = (q if written else other)[: rows // 2], source[: rows // 2]
    with torch.no_grad():
        halves[0].copy_(halves[1])
    q.data = other
    if written:
        assert torch.equal(q.dequantize(), other.dequantize())
    else:
        with pytest.raises(LayoutError, match="bytes were copied into rows 0 to"):
            q.dequantize()


def test_a_write_after_forward_is_seen_by_autograd(recipe: str) -> None:
    model, optimizer = trained(recipe)
    step(model, optimizer)
    loss = model(weight(4, 256).requires_grad_()).sum()
    for param in model.parameters():
        param.grad = torch.ones(256, 256)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_mode_gives_what_no_grad_gives(recipe: str) -> None:
    model, _ = trained(recipe)
    for x in (weight(4, 256), weight(2, 3, 256).bfloat16()):
        with torch.no_grad():
            expected = model(x)
        with torch.inference_mode(), layoutc.strict():
            assert torch.equal(model(x), expected)
            assert model[0].weight.T.shape == (256, 256)


def test_nothing_is_quantized_unless_all_of_it_can_be(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"1\.weight.*float64"):
        layoutc.quantize_(model, recipe)
    assert type(model[0].weight) is nn.Parameter


def test_ties_hold_across_what_was_built_and_nothing_else_is_touched(recipe: str) -> None:
    outer = nn.Module()
    outer.old = nn.Linear(256, 256)
    with layoutc.quantized_init(recipe):
        first, second = nn.Linear(256, 256), nn.Linear(256, 256)
        second.weight = first.weight
        outer.new = nn.Linear(256, 256)
    assert first.weight is second.weight
    assert type(outer.new.weight) is module(recipe).Tensor
    assert type(outer.old.weight) is nn.Parameter
