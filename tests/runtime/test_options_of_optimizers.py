"""Optimizers that keep in their groups what they have found so far, or whose weights differ in evaluation."""

from __future__ import annotations

import copy
import importlib
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layoutc

STEPS = 5


class Averages(torch.optim.Optimizer):
    """A schedule-free SGD: parameters are an average in evaluation, and lie beside it in training."""

    def __init__(self, params: Any, lr: float = 0.1, total: Any = 0.0) -> None:
        super().__init__(params, {"lr": lr, "total": total, "averages": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """z walks; the average, a tenth of the way to z, follows with the weight of a step among all so far."""
        for group in self.param_groups:
            assert not group["averages"], "call train() first"
            group["total"] = group["total"] + group["lr"]
            for param in group["params"]:
                z = self.state[param].setdefault("z", param.clone())
                z.sub_(param.grad, alpha=group["lr"])
                param.lerp_(z, float(group["lr"] / group["total"]))

    @torch.no_grad()
    def _show(self, averages: bool, weight: float) -> None:
        for group in self.param_groups:
            for param in group["params"] if group["averages"] is not averages else ():
                if self.state[param]:
                    param.lerp_(self.state[param]["z"], weight)
            group["averages"] = averages

    def train(self) -> None:
        """Moves a tenth of the way to z."""
        self._show(False, 0.1)

    def eval(self) -> None:
        """Moves back."""
        self._show(True, 1 - 1 / 0.9)


def pair(recipe: str = "nvfp4") -> tuple[nn.Linear, nn.Linear]:
    """A quantized layer, and one of fp32 values equal to those that it was quantized from."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 64)
    layer = copy.deepcopy(plain)
    layoutc.quantize_(layer, recipe)
    return layer, plain


def step(layer: nn.Linear, optimizer: Any, seed: int) -> None:
    """One step with gradients that follow from the seed."""
    torch.manual_seed(seed)
    for param in layer.parameters():
        param.grad = torch.randn(param.shape)
    optimizer.step()


def assert_follows(layer: Any, optimizer: Any, plain: nn.Linear, recipe: str = "nvfp4") -> None:
    """Masters equal plain parameters, and the weight is what these are quantized to."""
    masters = optimizer.masters()
    for param, value in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(masters[param], value)
    quantized = importlib.import_module(f"layoutc.recipes.{recipe}").quantize(plain.weight.detach())
    for name, plane in quantized.planes().items():
        assert torch.equal(layer.weight.planes()[name].view(torch.uint8), plane.view(torch.uint8)), name


@pytest.mark.parametrize("total", [0.0, torch.zeros(())], ids=["number", "tensor"])
def test_masters_step_with_what_the_optimizer_has_found(total: float | Tensor) -> None:
    """And evaluation has the average's weights. Without, each step would be the first."""
    layer, plain = pair()
    ours = layoutc.MasterWeights(Averages, layer.parameters(), total=total)
    theirs = Averages(plain.parameters(), total=copy.deepcopy(total))
    for seed in range(STEPS):
        for optimizer in (ours, theirs):
            optimizer.train()  # type: ignore[union-attr]
        step(layer, ours, seed)
        step(plain, theirs, seed)
        assert_follows(layer, ours, plain)
        ours.eval()
        theirs.eval()
        assert_follows(layer, ours, plain)


def test_what_the_optimizer_has_found_is_in_its_state() -> None:
    """So a run that resumes goes on as if it had not stopped."""
    (layer, plain), (other, _) = pair(), pair()
    first = layoutc.MasterWeights(Averages, layer.parameters())
    theirs = Averages(plain.parameters())
    for optimizer in (first, theirs):
        optimizer.train()  # type: ignore[union-attr]
    for seed in range(2):
        step(layer, first, seed)
        step(plain, theirs, seed)
    second = layoutc.MasterWeights(Averages, other.parameters())
    other.load_state_dict(layer.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.param_groups[0]["total"] == pytest.approx(0.2)
    for seed in range(2, STEPS):
        step(other, second, seed)
        step(plain, theirs, seed)
    assert_follows(other, second, plain)


class OwnRate(torch.optim.Optimizer):
    """Finds its step size itself, as Adafactor does, and leaves the groups' learning rate None, or sets none."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Moves by a hundredth of each weight's norm."""
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=0.01 * float(param.norm() / param.grad.norm()))


@pytest.mark.parametrize("options", [{"lr": None}, {}], ids=["none", "absent"])
def test_weights_follow_an_optimizer_without_a_learning_rate(options: dict[str, Any]) -> None:
    layer, plain = pair()
    ours, theirs = layoutc.MasterWeights(OwnRate, layer.parameters(), **options), OwnRate(plain.parameters(), **options)
    for seed in range(STEPS):
        step(layer, ours, seed)
        step(plain, theirs, seed)
        assert_follows(layer, ours, plain)


def test_schedulers_still_set_learning_rates() -> None:
    layer, plain = pair()
    ours, theirs = (
        layoutc.MasterWeights(torch.optim.SGD, layer.parameters(), lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1) for one in (ours, theirs)]
    for seed in range(3):
        step(layer, ours, seed)
        step(plain, theirs, seed)
        for scheduler in schedulers:
            scheduler.step()
    assert_follows(layer, ours, plain)


class Slow(torch.optim.SGD):
    """What a wrapper does: every second step it goes half of the way back to where it was, and writes that."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        super().step()
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.detach().clone())
                if group["taken"] % 2 == 0:
                    slow.lerp_(param.detach(), 0.5)
                    param.data.copy_(slow)


def test_what_an_optimizer_writes_by_data_is_written_to_masters() -> None:
    layer, plain = pair()
    ours = layoutc.MasterWeights(lambda params, **options: Slow(params, **options), layer.parameters(), lr=0.1)
    theirs = Slow(plain.parameters(), lr=0.1)
    for seed in range(STEPS):
        step(layer, ours, seed)
        step(plain, theirs, seed)
        assert_follows(layer, ours, plain)


def test_other_optimizers_have_no_modes() -> None:
    """Trainers ask."""
    layer, _ = pair()
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, layer.parameters())
    assert not hasattr(optimizer, "train")
    assert not hasattr(optimizer, "eval")


OTHERS = {"schedulefree": ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"), "prodigyopt": ("Prodigy",)}


@pytest.mark.parametrize(("package", "name"), [(package, name) for package, names in OTHERS.items() for name in names])
def test_packages_step_masters_as_plain_parameters(package: str, name: str) -> None:
    """Prodigy keeps its step size in its groups, ScheduleFree the weight of its average."""
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install {package}")
    cls = getattr(importlib.import_module(package), name)
    layer, plain = pair()
    lr = 1.0 if package == "prodigyopt" else 1e-2
    ours, theirs = layoutc.MasterWeights(cls, layer.parameters(), lr=lr), cls(plain.parameters(), lr=lr)
    for _ in range(2 * STEPS):
        for optimizer in (ours, theirs):
            if package == "schedulefree":
                optimizer.train()
        step(layer, ours, 0)  # the same way each time, so that Prodigy finds larger steps
        step(plain, theirs, 0)
        if package == "schedulefree":
            ours.eval()
            theirs.eval()
        assert_follows(layer, ours, plain)


@pytest.mark.parametrize("grouped", [False, True])
def test_names_of_parameters_are_kept_where_plain_torch_keeps_them(grouped: bool) -> None:
    """In both optimizers' groups, in those that are added, and in states that are loaded."""

    def groups(quantized: bool, kind: Any) -> list[list[Any]]:
        model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))
        if quantized:
            layoutc.quantize_(model, "nvfp4")
        named = list(model.named_parameters())
        given = [{"params": named[:2], "lr": 1e-3}, {"params": iter(named[2:])}] if grouped else iter(named)
        optimizer = kind(given, lr=1e-2)
        optimizer.add_param_group({"params": [("extra", nn.Parameter(torch.ones(4)))]})
        optimizer.load_state_dict(optimizer.state_dict())
        found = [optimizer, optimizer.inner] if quantized else [optimizer]
        return [[group["param_names"] for group in one.param_groups] for one in found]

    expected = groups(False, torch.optim.AdamW)
    assert groups(True, partial(layoutc.MasterWeights, torch.optim.AdamW)) == expected * 2
