"""Weights that other code changes in place between steps: their masters are what weights of a plain fp32 model are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layoutc
from layoutc.runtime.dispatch import fallback, update_warnings
from layoutc.runtime.errors import UnsupportedOperator

WIDTH = 128
Update = Callable[[list[Any]], Any]
OURS: dict[str, Callable[..., Any]] = {
    "masters": partial(layoutc.MasterWeights, torch.optim.AdamW),
    "by rule": layoutc.AdamW,
}


def values_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model_of(recipe: str | None, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two layers of values that bf16 can hold; in fp32 for None."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    for seed, param in enumerate(model.parameters()):
        param.data = (values_of(seed, *param.shape) / WIDTH).bfloat16().to(dtype if recipe else torch.float32)
    if recipe is not None:
        layoutc.quantize_(model, recipe)
    return model


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    for seed, param in enumerate(params):
        param.grad = values_of(100 * step + seed, *param.shape).bfloat16().to(param.dtype)


def decayed(params: Any) -> None:
    for param in params:
        param.mul_(0.999)


def decayed_as_a_list(params: Any) -> None:
    torch._foreach_mul_(params, 0.999)


def decayed_as_data(params: Any) -> None:
    for param in params:
        param.data.mul_(0.999)


def clipped(params: Any) -> None:
    for param in params:
        param.clamp_(-0.01, 0.01)


def rows_halved(params: Any) -> None:
    for param in params[::2]:
        param[:32].mul_(0.5)
        param[64:96].zero_()


def pulled(params: Any) -> None:
    """To values of the model's dtype."""
    for seed, param in enumerate(params):
        param.lerp_(values_of(seed, *param.shape).bfloat16().to(param.dtype), 0.25)


def moved(params: Any) -> None:
    for seed, param in enumerate(params):
        param.add_(values_of(seed, *param.shape).bfloat16().to(param.dtype), alpha=0.125)


def moved_by_pow(params: Any) -> None:
    """As adaptive SAM, from values that the weight dequantizes to; put back, they leave nothing."""
    kept = [param.clone() for param in params]
    for param, old in zip(params, kept, strict=True):
        param.add_(torch.pow(param, 2) * 0.5)
        param.copy_(old)


def there_and_back(params: Any) -> None:
    """As SAM does."""
    moved(params)
    for seed, param in enumerate(params):
        param.sub_(values_of(seed, *param.shape).bfloat16().to(param.dtype), alpha=0.125)


def copied_back(params: Any) -> None:
    kept = [param.detach().clone() for param in params]
    moved(params)
    for param, old in zip(params, kept, strict=True):
        param.copy_(old)


def set_back(params: Any) -> None:
    kept = [param.data.clone() for param in params]
    moved(params)
    for param, old in zip(params, kept, strict=True):
        param.data = old


def decayed_then_copied_back(params: Any) -> None:
    decayed(params)
    copied_back(params)


def stepped(recipe: str | None, make: Callable[..., Any], update: Update, dtype: torch.dtype) -> list[Tensor]:
    """Masters, or parameters in fp32, after four steps that updates follow."""
    model = model_of(recipe, dtype)
    params = list(model.parameters())
    optimizer = make(params, lr=1e-3)
    for step in range(4):
        give_gradients(params, step)
        optimizer.step()
        with torch.no_grad():
            update(params)
    return list(optimizer.masters().values()) if recipe else params


UPDATES = [decayed, decayed_as_a_list, decayed_as_data, clipped, pulled, moved, moved_by_pow, there_and_back]
UPDATES += [copied_back, set_back, decayed_then_copied_back]


@pytest.mark.sample(16)
@pytest.mark.parametrize(  # the recipes by turns: masters know none
    ("update", "recipe"), [(update, ("fp8_block", "nvfp4", "mxfp8")[at % 3]) for at, update in enumerate(UPDATES)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OURS)
def test_masters_move_as_plain_weights_do(kind: str, recipe: str, dtype: torch.dtype, update: Update) -> None:
    """Those of quantized weights, without a warning; a plain bf16 bias has its own arithmetic."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = stepped(recipe, OURS[kind], update, dtype)
    expected = stepped(None, torch.optim.AdamW, update, dtype)
    every = 1 if dtype == torch.float32 else 2
    for master, param in list(zip(ours, expected, strict=True))[::every]:
        assert torch.equal(master, param)


def test_rows_of_a_master_move_alone() -> None:
    expected = stepped(None, torch.optim.AdamW, rows_halved, torch.float32)
    ours = stepped("mxfp8", OURS["masters"], rows_halved, torch.float32)
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("masters", ["fp32", "f24"])
@pytest.mark.parametrize("cast", [False, True])
def test_a_bf16_parameter_that_is_clipped_keeps_what_its_master_knows(cast: bool, masters: str) -> None:
    """Where it is not written: as if nothing was."""
    found = []
    for clips in (False, True):
        layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        layer.weight.data = (values_of(0, WIDTH, WIDTH) / WIDTH).bfloat16()
        if cast:
            layoutc.cast_on_gather_(layer, "nvfp4")
        optimizer: Any = layoutc.AdamW([layer.weight], lr=1e-5, masters=masters, least=0)  # type: ignore[arg-type]
        for step in range(4):
            give_gradients([layer.weight], step)
            optimizer.step()
            with torch.no_grad():
                layer.weight.clamp_(*((-0.005, 0.005) if clips else (-9, 9)))
        (master,) = optimizer.masters().values()
        found.append(master.dequantize() if masters == "f24" else master)
    inside = found[0].abs() < 0.0049
    assert 0.1 < inside.float().mean() < 0.9
    assert torch.equal(found[0][inside], found[1][inside])
    assert found[1].abs().max() < 0.0051


class SAM(torch.optim.Optimizer):
    """Two steps around a base optimizer that it makes, whose groups it shares; the second puts weights back."""

    def __init__(self, params: Any, base_optimizer: Any, back: str, **options: Any) -> None:
        super().__init__(params, options)
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups, self.back = self.base_optimizer.param_groups, back

    @torch.no_grad()
    def first_step(self) -> None:
        """Up along gradients."""
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"old": param.data.clone(), "moved": 0.125 * param.grad}
                param.add_(self.state[param]["moved"])

    @torch.no_grad()
    def second_step(self) -> None:
        """Back, and the base's step."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if self.back == "sub":
                    param.sub_(state["moved"])
                elif self.back == "copy":
                    param.data.copy_(state["old"])
                else:
                    param.data = state["old"]
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:
        """With gradients of the first step."""
        self.first_step()
        closure()
        self.second_step()


@pytest.mark.parametrize(
    ("kind", "back"), [(kind, back) for at, kind in enumerate(OURS) for back in ("sub", "copy", "data")[at:]]
)
def test_sam_steps_masters_as_plain_weights(kind: str, back: str) -> None:
    found = []
    for recipe in ("nvfp4", None):
        params = list(model_of(recipe).parameters())
        optimizer: Any = SAM(params, OURS[kind] if recipe else torch.optim.AdamW, back, lr=1e-3)
        for step in range(4):
            give_gradients(params, step)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.step(partial(give_gradients, params, step + 50))
        found.append(list(optimizer.base_optimizer.masters().values()) if recipe else params)
    assert all(map(torch.equal, *found))


def test_sam_inside_is_refused_when_it_is_made() -> None:
    with pytest.raises(TypeError, match=r"^SAM evaluates its closure.*functools\.partial\(layoutc\.MasterWeights"):
        layoutc.MasterWeights(SAM, model_of("nvfp4").parameters(), base_optimizer=torch.optim.AdamW, back="sub")


def test_averages_with_codes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookahead around MasterWeights pulls weights to copies of them, which are codes."""
    monkeypatch.setattr(update_warnings, "_warned", set())
    params = list(model_of("nvfp4").parameters())
    slow = [param.detach().clone() for param in params]
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, params, lr=1e-3)
    give_gradients(params, 0)
    optimizer.step()
    with torch.no_grad(), pytest.warns(UserWarning, match=r"lerp_.*averages into.*optimizer\.masters\(\) gives"):
        torch._foreach_lerp_(params, slow, 0.5)


@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_written_since_the_step_is_saved_and_copied(dtype: torch.dtype, kind: str, how: str) -> None:
    """Masters that are loaded win over weights, so they hold it."""
    found = []
    for goes_on in (False, True):
        model = model_of("nvfp4", dtype)
        optimizer = OURS[kind](model.parameters(), lr=1e-3)
        for step in range(2):
            if step and not goes_on and how == "deepcopy":
                model, optimizer = copy.deepcopy((model, optimizer))
            elif step and not goes_on:
                state, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
                model = model_of("nvfp4", dtype)
                optimizer = OURS[kind](model.parameters(), lr=1e-3)
                optimizer.load_state_dict(state)
                model.load_state_dict(weights)
            params = list(model.parameters())
            give_gradients(params, step)
            optimizer.step()
            with torch.no_grad():
                clipped(params)
        found.append(list(optimizer.masters().values()))
    assert all(map(torch.equal, *found))


def test_a_graph_that_is_captured_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays would not tell the optimizer."""
    model = model_of("nvfp4")
    weight = model[0].weight.data
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters())
    give_gradients(list(model.parameters()), 0)
    optimizer.step()
    before = {name: plane.clone() for name, plane in weight.planes().items()}
    with monkeypatch.context() as patched:
        patched.setattr(fallback, "capturing", lambda device: True)
        with torch.no_grad(), pytest.raises(UnsupportedOperator, match="replays don't move its master"):
            weight.mul_(0.5)
        assert torch.equal(weight + 0, weight.dequantize())
    assert all(torch.equal(plane, before[name]) for name, plane in weight.planes().items())
    with torch.no_grad():
        weight.mul_(0.5)
