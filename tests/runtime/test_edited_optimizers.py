"""Optimizers whose groups and states users edit between steps: masters go on as parameters of torch's AdamW do."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_on_cpu import use_kernels
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import layoutc
from layoutc.runtime.dispatch import update_warnings
from layoutc.runtime.optim import rules

WIDTH = 64
STEPS = 4
Edit = Callable[[torch.optim.Optimizer, list[nn.Parameter]], None]
ADAMW: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "masters": lambda params: layoutc.MasterWeights(torch.optim.AdamW, params, lr=1e-2),
    "by rule": lambda params: layoutc.AdamW(params, lr=1e-2),
}


def values_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def edited(kind: str, edit: Edit) -> list[Tensor]:
    """Three weights, of which two are quantized, and a bias after steps; edited after the second. Those that are in a
    group then."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=index == 2) for index in range(3)))
    params = list(model.parameters())
    for seed, param in enumerate(params):
        param.data = values_of(seed, *param.shape)
    if kind != "torch":
        layoutc.quantize_(model, "fp8_block", param_filter=["0.weight", "1.weight"])
        params = list(model.parameters())
    optimizer = ADAMW[kind]([{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}])
    for step in range(STEPS):
        if step == 2:
            edit(optimizer, params)
        for seed, param in enumerate(params):
            param.grad = values_of(100 * step + seed, *param.shape)
        optimizer.step()
    held = [
        param for param in params if any(param is one for group in optimizer.param_groups for one in group["params"])
    ]
    masters = (
        optimizer.masters() if isinstance(optimizer, layoutc.MasterWeights) else dict(zip(held, held, strict=True))
    )
    return [masters[param].detach() for param in held]


def reversed_params(optimizer: Any, params: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


def nothing(optimizer: Any, params: Any) -> None:
    """Steps are those of torch's."""


def cleared(optimizer: Any, params: Any) -> None:
    optimizer.state.clear()


def set_anew(optimizer: Any, params: Any) -> None:
    optimizer.state = defaultdict(dict)


def deleted(optimizer: Any, params: Any) -> None:
    del optimizer.state[params[0]], optimizer.state[params[3]]


def emptied(optimizer: Any, params: Any) -> None:
    optimizer.state[params[1]].clear()


def moments_set(optimizer: Any, params: Any) -> None:
    for param in params[1:]:
        optimizer.state[param]["exp_avg"] = values_of(7, *param.shape)
        optimizer.state[param]["exp_avg_sq"] = values_of(8, *param.shape).square()


def steps_set(optimizer: Any, params: Any) -> None:
    for param in params:
        optimizer.state[param]["step"] = torch.tensor(100.0)


def states_put(optimizer: Any, params: Any) -> None:
    """As a function does that copies the states of another optimizer."""
    for param in params:
        moment = values_of(9, *param.shape)
        optimizer.state[param] = {"step": torch.tensor(9.0), "exp_avg": moment, "exp_avg_sq": moment.square()}


def moved_and_set(optimizer: Any, params: Any) -> None:
    reversed_params(optimizer, params)
    moments_set(optimizer, params)


def copied_and_cleared(optimizer: Any, params: Any) -> None:
    copy.deepcopy(optimizer)
    optimizer.state.clear()


def dropped(optimizer: Any, params: Any) -> None:
    """As for pruned or frozen weights."""
    optimizer.param_groups[0]["params"] = [params[0], params[2]]


def dropped_and_deleted(optimizer: Any, params: Any) -> None:
    dropped(optimizer, params)
    del optimizer.state[params[1]]


def group_dropped(optimizer: Any, params: Any) -> None:
    del optimizer.param_groups[0]


def groups_swapped(optimizer: Any, params: Any) -> None:
    optimizer.param_groups.reverse()


def moved_to_another_group(optimizer: Any, params: Any) -> None:
    first, second = optimizer.param_groups
    first["params"], second["params"] = params[1:3], [params[3], params[0]]


def moved_to_a_new_group(optimizer: Any, params: Any) -> None:
    optimizer.param_groups[0]["params"] = params[:2]
    optimizer.add_param_group({"params": [params[2]], "lr": 0.5})


def group_replaced(optimizer: Any, params: Any) -> None:
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.5}


def emptied_and_dropped(optimizer: Any, params: Any) -> None:
    optimizer.param_groups[0]["params"] = []
    optimizer.step()
    del optimizer.param_groups[0]


def put_back(optimizer: Any, params: Any) -> None:
    """After a step without it."""
    dropped(optimizer, params)
    optimizer.step()
    optimizer.param_groups[1]["params"].append(params[1])


def written_and_put_back(optimizer: Any, params: Any) -> None:
    dropped(optimizer, params)
    optimizer.step()
    with torch.no_grad():
        params[1].copy_(torch.ones(WIDTH, WIDTH))
    optimizer.param_groups[0]["params"].append(params[1])


def put_back_as_a_group(optimizer: Any, params: Any) -> None:
    group_dropped(optimizer, params)
    optimizer.step()
    optimizer.add_param_group({"params": params[:3], "lr": 1e-2})


GROUPS = [reversed_params, dropped, dropped_and_deleted, group_dropped, groups_swapped, moved_to_another_group]
GROUPS += [moved_to_a_new_group, group_replaced, emptied_and_dropped]
GROUPS += [put_back, written_and_put_back, put_back_as_a_group]
STATES = [nothing, cleared, set_anew, deleted, emptied, moments_set, steps_set, states_put, moved_and_set]


@pytest.mark.sample(50)
@pytest.mark.parametrize("edit", [*GROUPS, *STATES, copied_and_cleared])
@pytest.mark.parametrize("kind", ["masters", "by rule"])
def test_steps_go_on_as_those_of_torch(kind: str, edit: Edit) -> None:
    for ours, expected in zip(edited(kind, edit), edited("torch", edit), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["masters", "by rule"])
@pytest.mark.parametrize("copied", [False, True])
def test_states_are_put_before_the_first_step_and_into_copies(kind: str, copied: bool) -> None:
    """A copy, whose states are cleared, steps as a new optimizer that starts from its masters."""
    found = []
    for name in ("torch", kind):
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        layer.weight.data = values_of(0, WIDTH, WIDTH)
        if name != "torch":
            layoutc.quantize_(layer, "fp8_block")
        optimizer = ADAMW[name]([layer.weight])
        for step in range(STEPS):
            if copied and step == 2:
                layer, optimizer = copy.deepcopy((layer, optimizer))
                optimizer.state.clear()
            elif step == 0 and not copied:
                states_put(optimizer, [layer.weight])
            layer.weight.grad = values_of(step, WIDTH, WIDTH)
            optimizer.step()
        found.append(optimizer.masters()[layer.weight] if name == kind else layer.weight.detach())
    assert torch.equal(*found)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["masters", "by rule"])
def test_a_master_that_is_set_is_stepped(kind: str) -> None:
    def master_set(optimizer: Any, params: Any) -> None:
        if not isinstance(optimizer, layoutc.MasterWeights):
            params[0].data.copy_(values_of(5, WIDTH, WIDTH))
            return
        optimizer.state[params[0]]["master"] = values_of(5, WIDTH, WIDTH)
        assert torch.equal(optimizer.masters()[params[0]], values_of(5, WIDTH, WIDTH))

    for ours, expected in zip(edited(kind, master_set), edited("torch", master_set), strict=True):
        assert torch.equal(ours, expected)


def test_moments_that_are_set_are_converted_to_their_recipes() -> None:
    """To what they are if they are written in place."""
    found = []
    for in_place in (False, True):
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        layer.weight.data = values_of(0, WIDTH, WIDTH)
        layoutc.quantize_(layer, "fp8_block")
        optimizer = layoutc.AdamW([layer.weight], lr=1e-2, state="8bit", least=0)
        for step in range(STEPS):
            if step == 2 and in_place:
                optimizer.state[layer.weight]["exp_avg"].copy_(values_of(9, WIDTH, WIDTH))
            elif step == 2:
                optimizer.state[layer.weight]["exp_avg"] = values_of(9, WIDTH, WIDTH)
            layer.weight.grad = values_of(step, WIDTH, WIDTH)
            optimizer.step()
        assert layoutc.recipes.adam_m8.Tensor is type(optimizer.state[layer.weight]["exp_avg"])
        found.append(optimizer.masters()[layer.weight])
    assert torch.equal(*found)


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("kind", "name", "value", "said"),
    [
        (
            "masters",
            "master",
            torch.zeros(8, 64),
            r"has Tensor master of shape \(8, 64\) in torch\.float32 for weight of shape \(64, 64\)",
        ),
        (
            "masters",
            "exp_avg",
            torch.zeros(8, 64),
            r"exp_avg of shape \(8, 64\).*torch\.zeros_like\(optimizer\.masters",
        ),
        ("by rule", "exp_avg", torch.zeros(()), r"exp_avg of shape \(\)"),
        ("by rule", "exp_avg_sq", 0, r"has int exp_avg_sq for"),
        ("by rule", "exp_avg_sq", None, r"has no exp_avg_sq for weight"),
        ("by rule", "step", None, r"no step, by which their bias is corrected"),
    ],
)
def test_states_that_do_not_fit_are_refused_before_the_step(kind: str, name: str, value: Any, said: str) -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    layoutc.quantize_(layer, "fp8_block")
    optimizer: Any = ADAMW[kind]([layer.weight])
    layer.weight.grad = values_of(1, WIDTH, WIDTH)
    optimizer.step()
    before = optimizer.masters()[layer.weight].clone()
    kept = optimizer.state[layer.weight].pop(name)
    if value is not None:
        optimizer.state[layer.weight][name] = value
    with pytest.raises(ValueError, match=said):
        optimizer.step()
    optimizer.state[layer.weight][name] = kept
    assert torch.equal(optimizer.masters()[layer.weight], before)


@pytest.mark.sample(8)
@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize("value", [torch.zeros(8, 64), torch.zeros(4096), torch.zeros(())])
@pytest.mark.parametrize("kind", ["masters", "by rule"])
def test_loaded_moments_of_other_shapes_are_refused_before_a_change(kind: str, value: Tensor, position: int) -> None:
    """Of quantized weights, and of a plain one. torch's AdamW refuses a number in its step."""
    if kind == "masters" and not value.dim():
        return
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    layoutc.quantize_(model, "fp8_block", param_filter=["0.weight", "1.weight"])
    optimizer = ADAMW[kind](list(model.parameters()))
    for seed, param in enumerate(model.parameters()):
        param.grad = values_of(seed, WIDTH, WIDTH)
    optimizer.step()
    before, states = copy.deepcopy(optimizer.state_dict()), optimizer.state_dict()
    states["param_groups"][0]["lr"] = 0.5
    states["state"] = {key: dict(state) for key, state in states["state"].items()}
    states["state"][position]["exp_avg"] = value
    states["state"][0]["master"] = values_of(9, WIDTH, WIDTH)
    said = rf"state\['state'\]\[{position}\] has Tensor exp_avg of shape \({', '.join(map(str, value.shape))}"
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(states)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        assert all(torch.equal(state[name], after["state"][key][name]) for name in state)


@pytest.mark.parametrize("kind", ["masters", "by rule"])
def test_masters_that_a_wrapper_has_cast_are_refused(kind: str) -> None:
    """torch's load_state_dict, of an optimizer that shares states, casts them to the dtype of parameters."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    layoutc.quantize_(layer, "fp8_block")
    optimizer = ADAMW[kind]([layer.weight])
    wrapper = torch.optim.Optimizer(optimizer.param_groups, {})
    wrapper.param_groups, wrapper.state = optimizer.param_groups, optimizer.state
    layer.weight.grad = values_of(1, WIDTH, WIDTH).bfloat16()
    optimizer.step()
    wrapper.load_state_dict(copy.deepcopy(wrapper.state_dict()))
    optimizer.param_groups, optimizer.state = wrapper.param_groups, wrapper.state
    with pytest.raises(
        ValueError, match=r"master of shape \(64, 64\) in torch\.bfloat16.*base_optimizer\.load_state_dict"
    ):
        optimizer.step()


@pytest.mark.parametrize("kind", ["masters", "by rule"])
def test_what_is_dropped_keeps_its_bytes_and_is_forgotten_with_its_state(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state dict is without it; put back, it starts as a new parameter, and the step says from what."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    monkeypatch.setattr(update_warnings, "_warned", set())
    layoutc.quantize_(model, "fp8_block")
    first, second = params = list(model.parameters())
    optimizer: Any = ADAMW[kind](params)

    def step(seed: int) -> None:
        for param in params:
            param.grad = values_of(seed, WIDTH, WIDTH)
        optimizer.step()

    step(0)
    optimizer.param_groups[0]["params"] = [first]
    before = {name: plane.clone() for name, plane in second.planes().items()}
    step(1)
    assert all(
        torch.equal(plane.view(torch.uint8), before[name].view(torch.uint8)) for name, plane in second.planes().items()
    )
    assert list(optimizer.state_dict()["state"]) == [0]
    assert list(optimizer.masters()) == [first]
    assert second in optimizer.state
    del optimizer.state[second]
    optimizer.add_param_group({"params": [second]})
    with pytest.warns(UserWarning, match="start as the dequantized weights"):
        step(2)


def test_launches_follow_a_weight_into_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """With that group's options, though no parameter has changed its position."""
    monkeypatch.setattr(rules, "sqrt", rules.exact_sqrt)
    found = []
    for kernels in (False, True):
        if kernels:
            use_kernels(monkeypatch)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
        for seed, layer in enumerate(layers):
            layer.weight.data = values_of(seed, WIDTH, WIDTH)
            layoutc.quantize_(layer, "fp8_block")
        first, second = (layer.weight for layer in layers)
        optimizer = layoutc.AdamW([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=1e-2)
        for step in range(3):
            if step == 1:
                optimizer.param_groups[0]["params"], optimizer.param_groups[1]["params"] = [first, second], []
            first.grad, second.grad = values_of(step, WIDTH, WIDTH), values_of(step + 9, WIDTH, WIDTH)
            optimizer.step()
        found.append(list(optimizer.masters().values()))
        assert bool(optimizer._updates) == kernels
    assert all(map(torch.equal, *found))


def test_hooks_of_loads_are_called() -> None:
    """As torch's own optimizers call them, before states of other optimizers are translated."""
    called: dict[str, list[Any]] = {}
    for kind, adamw in ADAMW.items():
        optimizer, said = adamw([nn.Parameter(torch.zeros(2, 2))]), called.setdefault(kind, [])
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2, 2)
        optimizer.step()

        def halves(_: Any, state: dict[str, Any], said: list[Any] = said) -> dict[str, Any]:
            said.append(sorted(state["state"][0].keys() - {"master"}))
            return {**state, "param_groups": [{**state["param_groups"][0], "lr": 5e-3}]}

        optimizer.register_load_state_dict_pre_hook(halves)
        optimizer.register_load_state_dict_post_hook(lambda one, said=said: said.append(one.param_groups[0]["lr"]))
        optimizer.load_state_dict(optimizer.state_dict())
    assert called["masters"] == called["by rule"] == called["torch"] == [["exp_avg", "exp_avg_sq", "step"], 5e-3]


@pytest.mark.parametrize("how", ["by hand", "torch"])
@pytest.mark.parametrize("kind", ["masters", "by rule", "f24"])
def test_a_state_dict_that_is_loaded_in_place_keeps_its_masters(kind: str, how: str) -> None:
    """As torch.distributed.checkpoint loads weights and masters, whose memory state dicts share: masters go on from
    what was loaded, and not from what the codes hold, also if a state dict is asked for again."""

    def trained(seed: int) -> tuple[nn.Module, Any]:
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        model.weight.data = values_of(seed, WIDTH, WIDTH)
        layoutc.quantize_(model, "fp8_block")
        made = layoutc.AdamW(model.parameters(), masters="f24") if kind == "f24" else ADAMW[kind](model.parameters())
        model.weight.grad = values_of(seed + 7, WIDTH, WIDTH)
        made.step()
        return model, made

    def load(state: dict[str, Any], saved: dict[str, Any]) -> None:
        for name, value in state.items():
            if isinstance(value, Tensor):
                value.copy_(saved[name])
            elif isinstance(value, dict):
                load(value, saved[name])

    full = StateDictOptions(full_state_dict=True)
    (one, saved), (other, loaded) = trained(0), trained(1)
    weights, moments = copy.deepcopy(get_state_dict(one, saved, options=full))
    own_weights, own_moments = get_state_dict(other, loaded, options=full)
    with torch.no_grad():
        load(own_weights, weights)
        load(own_moments, moments)
    if how == "torch":
        set_state_dict(other, loaded, model_state_dict=own_weights, optim_state_dict=own_moments, options=full)
    for model, optimizer in ((one, saved), (other, loaded)):
        model.weight.grad = values_of(3, WIDTH, WIDTH)
        optimizer.step()
    assert torch.equal(one.weight, other.weight)
    masters = [next(iter(optimizer.masters().values())) for optimizer in (saved, loaded)]
    assert torch.equal(*masters)
