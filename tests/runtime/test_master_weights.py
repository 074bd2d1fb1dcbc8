"""MasterWeights around other optimizers, what is said where masters are missing, and averages of masters."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import layoutc
from layoutc.runtime.dispatch import update_warnings
from layoutc.runtime.errors import LayoutError, UnsupportedOperator
from layoutc.runtime.train import replaced_parameters

WIDTH = 64
PASS_THE_CLASS = r"pass the class, MasterWeights\(AdamW, model\.parameters\(\), \.\.\.\)"


def values_of(seed: int = 0, shape: tuple[int, ...] = (WIDTH, WIDTH)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model_of(recipe: str | None, width: int = WIDTH, **options: Any) -> nn.Sequential:
    """Two layers of the same values, plain for None."""
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
    for seed, layer in enumerate(model):
        layer.weight = nn.Parameter(values_of(seed, (width, width)) / width)
    if recipe is not None:
        layoutc.quantize_(model, recipe, **options)
    return model


def give_gradients(model: nn.Module, step: int) -> None:
    """The same in every model."""
    for seed, param in enumerate(model.parameters()):
        param.grad = values_of(100 * step + seed, tuple(param.shape))


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been said yet."""
    monkeypatch.setattr(update_warnings, "_warned", set())


def warned(action: Callable[[], Any]) -> list[str]:
    """What an action warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(one.message) for one in caught]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2, first: int = 0) -> None:
    for step in range(first, first + count):
        give_gradients(model, step)
        optimizer.step()


def states_of(optimizer: layoutc.MasterWeights) -> list[Tensor]:
    return [master.clone() for master in optimizer.masters().values()]


# ---------------------------------------------------------------------------------------------------------- a tensor lr
def test_a_tensor_learning_rate_stays_the_object_that_it_is() -> None:
    """Optimizers that keep it in a tensor, and graphs of compiled steps, read that tensor."""
    model, lr = model_of("mxfp8"), torch.tensor(1e-2)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=lr, capturable=False, foreach=False)
    inner = optimizer.inner.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.5
    steps(model, optimizer)
    assert optimizer.inner.param_groups[0]["lr"] is inner
    assert float(inner) == 0.5
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    steps(model, optimizer)
    assert optimizer.inner.param_groups[0]["lr"] is inner
    assert float(inner) == 0.25
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.inner.param_groups[0]["lr"] is inner


def test_who_sets_a_tensor_learning_rate_aside_gets_it_back() -> None:
    """get_optimizer_state_dict steps once with a learning rate of 0, and puts the other back."""
    model, lr = model_of("mxfp8"), torch.tensor(1e-2)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=lr, foreach=False)
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == pytest.approx(1e-2)
    before = states_of(optimizer)
    steps(model, optimizer, 1)
    assert all(not torch.equal(a, b) for a, b in zip(before, states_of(optimizer), strict=True))


def test_groups_take_learning_rates_of_their_own_from_a_state() -> None:
    """Also where both were made with one tensor."""
    model = model_of("mxfp8")
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, groups, lr=torch.tensor(1e-2), foreach=False)
    saved = optimizer.state_dict()
    for rate, group in zip((1e-3, 1e-4), saved["param_groups"], strict=True):
        group["lr"] = torch.tensor(rate)
    optimizer.load_state_dict(saved)
    assert [float(g["lr"]) for g in optimizer.inner.param_groups] == pytest.approx([1e-3, 1e-4])


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizers_of_torchao_step_masters_as_they_step_plain_weights(
    kind: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, under a schedule, and after their state has gone out and in."""
    optim = pytest.importorskip("torchao.optim", reason="needs torchao")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # their step compiles for a minute
    plain, model = model_of(None), model_of(recipe)
    theirs = getattr(optim, kind)(plain.parameters(), lr=1e-2, weight_decay=0.1)
    ours = layoutc.MasterWeights(getattr(optim, kind), model.parameters(), lr=1e-2, weight_decay=0.1)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.5**step) for one in (theirs, ours)]
    for step in range(4):
        for one, optimizer, schedule in zip((plain, model), (theirs, ours), schedules, strict=True):
            steps(one, optimizer, 1, step)
            schedule.step()
        if step == 1:
            file = io.BytesIO()
            torch.save((ours.state_dict(), model.state_dict()), file)
            file.seek(0)
            saved, weights = torch.load(file)
            model = model_of(recipe)
            ours = layoutc.MasterWeights(getattr(optim, kind), model.parameters(), lr=7.0)
            ours.load_state_dict(saved)
            model.load_state_dict(weights)
            schedules[1] = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 0.5**step, last_epoch=1)
    for param, master in zip(plain.parameters(), states_of(ours), strict=True):
        assert torch.equal(param, master)
    quantized = {type(value).__name__ for state in ours.inner.state.values() for value in state.values()}
    assert any(name.startswith("OptimState") for name in quantized), quantized


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current"])
def test_a_group_with_learning_rate_0_keeps_its_bytes(recipe: str) -> None:
    """Its history of amaxes as well, beside a group that trains, and when a state is asked for before any step."""
    model = model_of(recipe)
    still, moving = model.parameters()
    optimizer = layoutc.MasterWeights(
        torch.optim.AdamW, [{"params": [still], "lr": 0.0}, {"params": [moving]}], lr=1e-2, weight_decay=0.0
    )

    def planes(weight: Any) -> list[Tensor]:
        return [plane.clone() for plane in weight.planes().values()]

    before, other = planes(still), planes(moving)
    get_optimizer_state_dict(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(other, planes(moving), strict=True))
    steps(model, optimizer, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, planes(still), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(other, planes(moving), strict=True))


# ---------------------------------------------------------------------------------------------------- what is said once
def test_masters_that_start_from_codes_are_said_once() -> None:
    """At the first step that moves them; not while a state is loaded, nor after it."""
    model = model_of("mxfp8", keep_values=False)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    assert not warned(lambda: get_optimizer_state_dict(model, optimizer))
    (message,) = warned(lambda: steps(model, optimizer))
    assert (
        "masters of quantized weights (0.weight in mxfp8 first, 2 in all) start as the dequantized weights" in message
    )
    assert "layoutc.checkpoint.load(state, folder, convert=True)" in message
    assert not warned(lambda: steps(model, optimizer, 3))
    fresh = model_of("mxfp8")
    assert not warned(lambda: steps(fresh, layoutc.MasterWeights(torch.optim.SGD, fresh.parameters(), lr=1e-3)))


def test_masters_that_are_loaded_are_not_said_to_start_from_codes() -> None:
    """A checkpoint of weights and optimizer holds the masters."""
    model = model_of("mxfp8")
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    steps(model, optimizer)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    resumed = model_of("mxfp8", keep_values=False)
    resumed.load_state_dict(weights)
    other = layoutc.MasterWeights(torch.optim.AdamW, resumed.parameters(), lr=1e-3)
    other.load_state_dict(state)
    assert not warned(lambda: steps(resumed, other))
    with torch.no_grad():
        resumed[0].weight.copy_(values_of(5))
    other.load_state_dict(state)
    steps(resumed, other)
    assert resumed[0].weight.store.writes.initial is None, "not taken, and not kept either"  # type: ignore[union-attr]
    assert not warned(lambda: steps(model, optimizer))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_plain_optimizer_is_told_of_master_weights(kind: Any, foreach: bool) -> None:
    """Once, with what to write; also where the weights still have their values, which it does not get."""
    model = model_of("mxfp8")
    optimizer = kind(model.parameters(), lr=1e-5, foreach=foreach)
    (message,) = warned(lambda: steps(model, optimizer, 3))
    assert f"{kind.__name__} steps quantized weights themselves (0.weight of shape (64, 64) in mxfp8 first)" in message
    assert f"layoutc.MasterWeights(torch.optim.{kind.__name__}, model.parameters(), ...)" in message
    assert all(param.store.writes.initial is None for param in model.parameters())  # type: ignore[attr-defined]


def rounds(
    model: nn.Module, inner: torch.optim.Optimizer, held: list[Tensor], after: Callable[[], None]
) -> list[float]:
    """The last loss of each round of local training: 20 steps, and one of an outer optimizer on what is `held`."""
    x, losses = values_of(9), []
    outer = torch.optim.SGD(held, lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(6):
        backups = [one.detach().clone() for one in held]
        for _ in range(20):
            loss = (model(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            inner.step()
            inner.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            for one, backup in zip(held, backups, strict=True):
                one.grad = backup - one
                one.copy_(backup)
        outer.step()
        outer.zero_grad()
        after()
    return losses


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_an_outer_optimizer_steps_masters(recipe: str) -> None:
    """Losses fall as those of plain weights, and weights have the bytes of their masters after each outer step."""
    plain, model = model_of(None), model_of(recipe)
    expected = rounds(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), list(plain.parameters()), lambda: None)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    masters = list(optimizer.masters().values())

    def after() -> None:
        optimizer.write_back()
        for weight, master in optimizer.masters().items():
            again = model_of(None)[0]
            again.weight = nn.Parameter(master.clone())
            layoutc.quantize_(again, recipe)
            for name, plane in again.weight.planes().items():  # type: ignore[operator]
                assert torch.equal(plane.view(torch.uint8), weight.planes()[name].view(torch.uint8)), name  # type: ignore[attr-defined]

    losses = rounds(model, optimizer, masters, after)
    assert losses == sorted(losses, reverse=True)
    assert all(loss < 1.25 * plain for loss, plain in zip(losses, expected, strict=True)), (losses, expected)


def test_an_outer_optimizer_on_quantized_weights_is_told_of_masters() -> None:
    model = model_of("nvfp4")
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    steps(model, optimizer)
    (message,) = warned(lambda: steps(model, outer))
    assert "optimizer.masters().values(), and call optimizer.write_back() after it" in message


def test_an_optimizer_that_is_no_torch_optimizer_is_told_as_well() -> None:
    """By its in-place operators."""
    model = model_of("mxfp8", keep_values=False)
    with torch.no_grad():
        (message,) = warned(lambda: model[0].weight.add_(values_of(), alpha=-1e-5))
    assert "aten.add_.Tensor updates 0.weight of shape (64, 64) in mxfp8 in place" in message
    assert "layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), ...)" in message


def test_an_update_of_a_list_is_told_of_the_weight_in_it() -> None:
    """Plain parameters may come first."""
    model, bias = model_of("mxfp8", keep_values=False), torch.zeros(64)
    with torch.no_grad():
        (message,) = warned(lambda: torch._foreach_add_([bias, model[0].weight], [torch.ones(64), values_of()]))
    assert "updates 0.weight of shape (64, 64) in mxfp8 in place" in message


def test_initializers_and_master_weights_are_told_nothing() -> None:
    """With and without values, frozen weights included."""
    model = model_of("mxfp8")
    model[1].weight.requires_grad_(False)

    def act() -> None:
        for one in (model_of("mxfp8"), model_of("mxfp8", keep_values=False)):
            with torch.no_grad():
                for weight in one.parameters():
                    nn.init.trunc_normal_(weight)
                    weight.mul_(2).add_(0.5).clamp_(-1, 1)
                    weight.mul_(torch.tensor(0.5))
                    weight.copy_(values_of())
                torch._foreach_copy_(list(one.parameters()), [values_of(), values_of(1)])
        steps(model, layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3))

    assert not warned(act)


@pytest.mark.sample(1)
@pytest.mark.parametrize("use", ["quantize_", "cast_on_gather_"])
def test_compiled_steps_are_left_to_eager_code(use: str) -> None:
    """torch.compile of `step`, and of a function that calls it, end at the bytes of eager steps."""
    found = []
    for wrap in ("no", "method", "function"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        for seed, param in enumerate(model.parameters()):
            param.data = values_of(seed, tuple(param.shape)) / WIDTH
        getattr(layoutc, use)(model, "fp8_current")
        optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)

        def of_function(optimizer: Any = optimizer) -> None:
            optimizer.step()

        given: Any = {"no": optimizer.step, "method": optimizer.step, "function": of_function}[wrap]
        step: Any = given if wrap == "no" else torch.compile(given, backend="eager")
        for count in range(2):
            give_gradients(model, count)
            step()
        found.append([master.tolist() for master in optimizer.masters().values()])
        found[-1] += [param.detach().dequantize().tolist() for param in model.parameters()]
    assert found[0] == found[1] == found[2]


# ------------------------------------------------------------------------------------------------------------- averages
@pytest.mark.parametrize("how", ["average", "ema", "foreach ema"])
def test_an_averaged_model_says_that_its_averages_are_quantized(how: str) -> None:
    """torch's AveragedModel copies the weights, which are quantized, and averages into them."""
    model = model_of("mxfp8")
    options: dict[str, Any] = {
        "average": {},
        "ema": {"avg_fn": get_ema_avg_fn(0.9)},
        "foreach ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    }[how]
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    averaged = AveragedModel(model, **options)

    def act() -> None:
        for step in range(3):
            steps(model, optimizer, 1, step)
            averaged.update_parameters(model)

    (message,) = warned(act)
    assert "average what optimizer.masters() gives" in message


def copied(average: Tensor, weight: Tensor) -> None:
    average.copy_(0.999 * average + (1 - 0.999) * weight)  # as timm's ModelEmaV2 does


def copied_from_floats(average: Tensor, weight: Tensor) -> None:
    average.copy_(0.999 * average.float() + (1 - 0.999) * weight.float())


def assigned(average: Tensor, weight: Tensor) -> None:
    average.data = torch.lerp(average.data, weight.data, 1 - 0.999)


def interpolated(average: Tensor, weight: Tensor) -> None:
    average.lerp_(weight, 1 - 0.999)


def scaled_and_added(average: Tensor, weight: Tensor) -> None:
    average.mul_(0.999).add_(weight, alpha=1 - 0.999)


def subtracted(average: Tensor, weight: Tensor) -> None:
    average.sub_((1 - 0.999) * (average - weight))  # as diffusers' EMAModel does


@pytest.mark.parametrize("update", [copied, copied_from_floats, assigned, interpolated, scaled_and_added, subtracted])
@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4"])
def test_averages_by_hand_are_told_once_that_they_are_quantized(
    recipe: str, update: Callable[[Tensor, Tensor], None]
) -> None:
    """Once for a run, of whichever weights; scales of fp8_block stay where they are, those of nvfp4 move."""
    model, averaged = (model_of(recipe, 128, keep_values=False) for _ in range(2))

    @torch.no_grad()
    def act() -> None:
        for seed in range(2):
            for weight, average in zip(model.parameters(), averaged.parameters(), strict=True):
                weight.copy_(values_of(seed, (128, 128)) / 128)
                update(average, weight)

    (message,) = warned(act)
    assert "weight of shape (128, 128)" in message
    assert "average what optimizer.masters() gives" in message


def test_values_that_codes_can_hold_are_told_nothing() -> None:
    """A weight that is read, and then doubled or loaded."""
    model = model_of("fp8_block", keep_values=False)

    @torch.no_grad()
    def act() -> None:
        weight = model[0].weight
        weight.copy_(2 * weight)
        assert (weight * weight).sum() > 0
        weight.copy_(values_of(7))
        weight.copy_(1 * weight)

    assert warned(act) == []


def test_an_average_of_masters_is_that_of_plain_weights() -> None:
    """As README has it, to the bit; and it can be put into the model and taken out again."""
    model, plain = model_of("nvfp4"), model_of(None)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    ema = {param: master.clone() for param, master in optimizer.masters().items()}
    expected = [param.detach().clone() for param in plain.parameters()]
    for step in range(4):
        steps(model, optimizer, 1, step)
        steps(plain, other, 1, step)
        for param, master in optimizer.masters().items():
            ema[param].lerp_(master, 0.1)
        for average, param in zip(expected, plain.parameters(), strict=True):
            average.lerp_(param.detach(), 0.1)
        for average, own in zip(expected, ema.values(), strict=True):
            assert torch.equal(average, own)
        held = {param: master.clone() for param, master in optimizer.masters().items()}
        planes = [p.clone() for param in model.parameters() for p in param.planes().values()]  # type: ignore[attr-defined]
        with torch.no_grad():
            for source in (ema, held):
                for param in model.parameters():
                    param.copy_(source[param])
        again = [p for param in model.parameters() for p in param.planes().values()]  # type: ignore[attr-defined]
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(planes, again, strict=True))


def test_masters_of_plain_parameters() -> None:
    """fp32 ones are their own; bf16 ones have fp32 copies."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    optimizer = layoutc.MasterWeights(torch.optim.SGD, model.parameters(), lr=1e-3)
    for param, master in optimizer.masters().items():
        assert master.dtype == torch.float32
        assert torch.equal(master, param.float())
        assert (master.data_ptr() == param.data_ptr()) == (param.dtype == torch.float32)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_an_empty_state_that_is_loaded_changes_nothing(recipe: str) -> None:
    """accelerate does so as it takes an optimizer: torch's checkpoints still initialize the state, and weights that are
    written later still become masters."""
    model, other = model_of(recipe), model_of(recipe)
    optimizer, untouched = (layoutc.MasterWeights(torch.optim.AdamW, m.parameters(), lr=1e-2) for m in (model, other))
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state
    for one in (model, other):
        with torch.no_grad():
            for seed, param in enumerate(one.parameters()):
                param.copy_(values_of(seed + 7))
    steps(model, optimizer)
    steps(other, untouched)
    for a, b in zip(optimizer.masters().values(), untouched.masters().values(), strict=True):
        assert torch.equal(a, b)
    fresh = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    fresh.load_state_dict(fresh.state_dict())
    state = get_optimizer_state_dict(model, fresh)["state"]
    assert all({"exp_avg", "exp_avg_sq", "master"} <= set(entry) for entry in state.values())


def test_a_state_of_some_parameters_is_loaded() -> None:
    """A frozen weight has none. The masters that are loaded win over weights that are loaded after them."""
    model, other = model_of("mxfp8"), model_of("mxfp8")
    model[1].weight.requires_grad_(False)
    optimizers = [layoutc.MasterWeights(torch.optim.AdamW, one.parameters(), lr=1e-4) for one in (model, other)]
    model[0].weight.grad = values_of(3)
    optimizers[0].step()
    saved = copy.deepcopy(optimizers[0].state_dict())
    assert [bool(saved["state"].get(number)) for number in range(2)] == [True, False]
    other[1].weight.requires_grad_(False)
    optimizers[1].load_state_dict(saved)
    other.load_state_dict(model.state_dict())
    first = next(iter(optimizers[1].masters().values()))
    assert torch.equal(first, saved["state"][0]["master"])
    assert not torch.equal(first, other[0].weight.dequantize(torch.float32))


def test_a_state_dict_is_that_of_the_parameters_in_the_groups() -> None:
    """accelerate puts others there."""
    model = model_of("mxfp8")
    optimizer = layoutc.MasterWeights(torch.optim.SGD, model.parameters(), lr=1e-2)
    replaced = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    optimizer.param_groups[0]["params"] = list(replaced)
    assert optimizer.state_dict()["param_groups"][0]["params"] == [0, 1]
    assert list(optimizer.masters()) == replaced


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_masters_stay_as_fine_as_they_are_where_a_module_is_moved(recipe: str) -> None:
    """accelerate and Lightning move a model after its optimizer was made; nothing is written by that."""
    model, other = model_of(recipe), model_of(recipe)
    optimizer, untouched = (layoutc.MasterWeights(torch.optim.AdamW, m.parameters(), lr=1e-5) for m in (model, other))
    before = states_of(optimizer)
    model.to("cpu")
    for param in model.parameters():
        param.data = param.data
    assert all(torch.equal(a, b) for a, b in zip(before, states_of(optimizer), strict=True))
    assert not warned(lambda: steps(model, optimizer))
    steps(other, untouched)
    assert all(torch.equal(a, b) for a, b in zip(states_of(untouched), states_of(optimizer), strict=True))


def test_where_parameters_are_is_known_of_converted_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's collector, which looks at every object of the process, is asked about other parameters alone."""
    asked: list[set[int]] = []
    referrers = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *of: (asked.append({id(one) for one in of}), referrers(*of))[1])
    converted = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    layoutc.quantize_(converted, "mxfp8")
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    alone = nn.Parameter(torch.zeros(3))

    def expected(model: nn.Module) -> dict[torch.Tensor, tuple[int, str]]:
        every = [(name, module, param) for module in model.modules() for name, param in module._parameters.items()]
        return {param: (id(module._parameters), name) for name, module, param in every if param is not None}

    def found(*params: torch.Tensor) -> dict[torch.Tensor, tuple[int, str]]:
        return {param: (id(owner), name) for param, (owner, name) in replaced_parameters.places(params).items()}

    assert found(*converted.parameters()) == expected(converted)
    assert asked == []
    assert found(*converted.parameters(), *plain.parameters(), alone) == expected(converted) | expected(plain)
    assert asked[0] == {id(param) for param in (*plain.parameters(), alone)}


@pytest.mark.parametrize("convert", [layoutc.quantize_, layoutc.cast_on_gather_])
@pytest.mark.parametrize("wrapped", [True, False])
def test_optimizer_from_before_the_conversion_is_refused(convert: Any, wrapped: bool) -> None:
    """It would hold the plain weights, which no module has any more; the loss would fall through biases alone."""
    model = nn.Sequential(nn.Linear(64, 64))
    params = model.parameters()
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, params) if wrapped else torch.optim.AdamW(params)
    convert(model, "mxfp8")
    model(torch.randn(2, 64)).sum().backward()
    name = "MasterWeights" if wrapped else "AdamW"
    with pytest.raises(
        LayoutError, match=rf"{convert.__name__} replaced 0\.weight of shape \(64, 64\), and {name} would step"
    ):
        optimizer.step()


def test_weight_that_another_model_still_trains_is_no_leftover() -> None:
    """Of two models with one parameter one is converted: the other's optimizer goes on."""
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    optimizer = torch.optim.SGD(second.parameters(), lr=1.0)
    layoutc.quantize_(first, "mxfp8")
    before = second.weight.detach().clone()
    second(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    assert not torch.equal(second.weight, before)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda model: layoutc.MasterWeights(torch.optim.AdamW(model.parameters()), model.parameters()),
            PASS_THE_CLASS,
        ),
        (lambda model: layoutc.MasterWeights(torch.optim.AdamW(model.parameters())), PASS_THE_CLASS),
        (
            lambda model: layoutc.MasterWeights(model.parameters(), lr=1e-3),
            r"MasterWeights takes the optimizer's class f",
        ),
        (
            lambda model: layoutc.MasterWeights(model, torch.optim.AdamW),
            r"first: MasterWeights\(torch\.optim\.AdamW, mo",
        ),
        (lambda model: layoutc.MasterWeights(torch.optim.AdamW, model), r"not a Linear: pass model\.parameters\(\)"),
        (
            lambda model: layoutc.MasterWeights(torch.optim.AdamW, lr=1e-3),
            r"no parameters to step: pass model\.parameters",
        ),
        (lambda model: layoutc.AdamW(model), r"AdamW takes parameters, not a Linear: pass model\.parameters\(\)"),
    ],
    ids=["optimizer", "optimizer alone", "no class", "swapped", "model", "no parameters", "own AdamW"],
)
def test_what_is_no_class_and_no_parameters_is_refused(make: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        make(nn.Linear(64, 64))


class SAM(torch.optim.SGD):
    """As the optimizers of that name do it: a step without a closure is an assertion."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        return super().step(closure)


def test_optimizers_that_evaluate_the_model_are_refused() -> None:
    """As they are made, where their step tells."""
    model = model_of("nvfp4")
    with pytest.raises(TypeError, match="LBFGS evaluates its closure at intermediate points"):
        layoutc.MasterWeights(torch.optim.LBFGS, model.parameters(), lr=0.1)
    optimizer = layoutc.MasterWeights(SAM, model.parameters(), lr=0.1)
    give_gradients(model, 0)
    with pytest.raises(TypeError, match="SAM evaluates its closure at intermediate points"):
        optimizer.step(lambda: torch.ones(()))


def test_torch_jit_trace_is_refused_in_words() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        with pytest.raises(UnsupportedOperator, match=r"torch\.jit\.trace can't record nvfp4 weights"):
            torch.jit.trace(model_of("nvfp4"), torch.ones(2, WIDTH))
        torch.jit.trace(model_of(None), torch.ones(2, WIDTH))
