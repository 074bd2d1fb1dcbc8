"""Amaxes that the optimizer's launch raises: the bytes are those of the reference, whatever a step does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_on_cpu import use_kernels
from torch import Tensor, nn

import layoutc
from layoutc.runtime.kernels import batches, direct
from layoutc.runtime.optim import by_rule, launches, rules
from layoutc.runtime.quantize import prepared
from layoutc.runtime.train import steps as train_steps

FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "8bit": {"state": "8bit"},
    "bf16 masters, 8bit": {"masters": "bf16", "state": "8bit"},
    "f24 masters, fp8": {"masters": "f24", "state": "fp8"},
}
RECIPES = ("nvfp4", "nvfp4_4over6", "nvfp4_modelopt", "fp8_current", "fp8_delayed")


def build(recipe: str, **options: Any) -> nn.Sequential:
    """Sizes that tiles divide, and others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 32, dtype=torch.bfloat16), nn.Linear(32, 48, bias=False, dtype=torch.bfloat16))
    layoutc.quantize_(model, recipe, **options)
    return model


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def bytes_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        for key, value in {"weight": param, **optimizer.state.get(param, {})}.items():
            planes = value.planes() if hasattr(value, "planes") else {"": value}
            found |= {f"{name} {key} {n}": x.detach().clone().flatten().view(torch.uint8) for n, x in planes.items()}
    return found


def nothing(model: Any, optimizer: Any) -> None:
    """A step like the others."""


def skipped(model: Any, optimizer: Any) -> None:
    optimizer.found_inf = torch.ones(())


def one_without_gradient(model: Any, optimizer: Any) -> None:
    model[1].weight.grad = None


def larger(model: Any, optimizer: Any) -> None:
    """Masters that others write, in a step that changes none."""
    with torch.no_grad():
        for param, master in optimizer.masters().items():
            master.copy_(master * (3 if param.dim() > 1 else 1))
    skipped(model, optimizer)


def strided(model: Any, optimizer: Any) -> None:
    """A gradient that kernels can't read: plain torch steps its weight."""
    model[1].weight.grad = model[1].weight.grad.t().contiguous().t()


def stops(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.0


def moves_again(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.01


def infinite(model: Any, optimizer: Any) -> None:
    model[0].weight.grad[3, 5] = float("inf")


EVENTS: tuple[Callable[[Any, Any], None], ...] = (
    *(skipped, nothing, one_without_gradient, larger, strided, stops, moves_again, infinite),
)


def after_each(model: nn.Module, form: dict[str, Any], events: Any = EVENTS) -> list[dict[str, Tensor]]:
    optimizer: Any = layoutc.AdamW(model.parameters(), lr=0.01, **form)
    found = []
    for step, event in enumerate(events):
        give_gradients(model, step)
        optimizer.found_inf = torch.zeros(())
        event(model, optimizer)
        optimizer.step()
        found.append(bytes_of(model, optimizer))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_of_the_reference(recipe: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped steps, written masters, gradients that are missing or strided, infinity: amaxes are the masters'."""
    monkeypatch.setattr(rules, "sqrt", rules.exact_sqrt)
    expected = after_each(build(recipe), FORMS[form])
    use_kernels(monkeypatch)
    for event, one, other in zip(EVENTS, after_each(build(recipe), FORMS[form]), expected, strict=True):
        assert [name for name in other if not torch.equal(one[name], other[name])] == [], event.__name__


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_current", "nvfp4_modelopt"])
def test_weights_that_share_one_amax(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if one of them has no gradient, so that other launches find all amaxes."""
    options = {"share_amax": [["0", "1"]]}
    monkeypatch.setattr(rules, "sqrt", rules.exact_sqrt)
    events = (nothing, one_without_gradient, nothing, skipped)
    expected = after_each(build(recipe, **options), FORMS["8bit"], events)
    use_kernels(monkeypatch)
    found = after_each(build(recipe, **options), FORMS["8bit"], events)
    for one, other in zip(found, expected, strict=True):
        assert [name for name in other if not torch.equal(one[name], other[name])] == []


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of launches, which take the place of references."""
    use_kernels(monkeypatch)
    found: list[str] = []
    run = direct.run
    monkeypatch.setattr(direct, "run", lambda kernel, *rest: (found.append(kernel.__name__), run(kernel, *rest))[1])
    return found


def test_amaxes_are_found_by_the_update(launched: list[str]) -> None:
    """No other launch reads masters for an amax; copies go on as the original does."""
    model = build("fp8_current")
    optimizer = layoutc.AdamW(model.parameters(), lr=0.01)
    launched.clear()
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    assert not [name for name in launched if "amax" in name]
    twin, its_own = copy.deepcopy((model, optimizer))
    for one, trained in ((model, optimizer), (twin, its_own)):
        give_gradients(one, 2)
        trained.step()
    one, other = bytes_of(model, optimizer), bytes_of(twin, its_own)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_a_graph_quantizes_all_weights_at_once(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tables of the step before, which live as long as the optimizer, also when copies and steps drop them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 16, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    layoutc.quantize_(model, "nvfp4")
    optimizer, steps = layoutc.AdamW(model.parameters(), lr=0.01), []
    twin, its_own = copy.deepcopy((model, optimizer))
    for captured in (False, True):
        with monkeypatch.context() as patched:
            for module in (batches, prepared, train_steps, by_rule, launches) if captured else ():
                patched.setattr(module, "capturing", lambda device: True)
            launched.clear()
            give_gradients(model, 0)
            optimizer.step()
            steps.append(launched.copy())
        give_gradients(twin, 0)
        its_own.step()
    assert steps == [["scalars_kernel", "update_kernel", "quantize_kernel"]] * 2
    one, other = bytes_of(model, optimizer), bytes_of(twin, its_own)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    rewriting: Any = optimizer._rewriting
    used = [*optimizer._updates.values(), *(batch.prepared for batch in rewriting._batches)]
    copy.deepcopy(optimizer)
    assert [*map(id, optimizer._captured)] == [*map(id, used)]
