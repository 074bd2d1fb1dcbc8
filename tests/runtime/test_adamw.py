"""Optimizers by a rule: their steps and options are those of torch.optim, their kernels' bytes the reference's."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kernels_on_cpu import use_kernels
from torch import Tensor, nn

import layoutc
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.kernels import direct
from layoutc.runtime.optim import rules, states
from layoutc.runtime.optim.f24 import F24Tensor
from layoutc.runtime.optim.rules import Chance


def build(recipe: str | None = "mxfp8", dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Two weights, in a recipe if there is one, and biases."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 160, dtype=dtype), nn.Linear(160, 96, dtype=dtype))
    if recipe:
        layoutc.quantize_(model, recipe)
    return model


def give_gradients(model: nn.Module, step: int, dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(dtype or param.dtype)


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def bytes_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Of all planes, plain parameters and states."""
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        held = {"weight": param, **optimizer.state.get(param, {})}
        for key, value in held.items():
            planes = value.planes() if hasattr(value, "planes") else {"": value}
            found |= {f"{name} {key} {plane}": raw(one) for plane, one in planes.items()}
    return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


def trained(model: nn.Module, optimizer: Any, steps: int = 3) -> dict[str, Tensor]:
    for step in range(steps):
        give_gradients(model, step)
        optimizer.step()
    return bytes_of(model, optimizer)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    weights = [param for param in model.parameters() if param.dim() > 1]
    biases = [param for param in model.parameters() if param.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1, "betas": (0.4, 0.9)}, {"params": biases, "lr": 0.02}]


# --------------------------------------------------------------------------------------------------------------- torch
@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_delayed"])
def test_steps_in_fp32_are_those_of_torch(recipe: str | None) -> None:
    """Masters, moments and codes, to the bit: groups of other options, weights of bf16 and fp32, amaxes, a schedule."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        models = build(recipe, dtype), build(recipe, dtype)
        ours = layoutc.AdamW(groups_of(models[0]), lr=0.01)
        theirs = layoutc.MasterWeights(torch.optim.AdamW, groups_of(models[1]), lr=0.01, foreach=True)
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            for step in range(5):
                give_gradients(model, step)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
        assert_same(bytes_of(models[0], ours), bytes_of(models[1], theirs))
        found.append(ours)
    assert found[0].state[found[0].param_groups[0]["params"][0]]["step"] == 5


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675, in the order of its authors' program."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                update = moment.clone().mul_(beta1).add_(param.grad, alpha=1 - beta1).sign_()
                param.add_(update, alpha=-group["lr"])
                moment.mul_(beta2).add_(param.grad, alpha=1 - beta2)


OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True, "betas": (0.4, 0.9)}),
    "decoupled Adam": (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "Nesterov": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01}),
    "Lion": (Lion, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_steps_of_others_in_fp32_are_those_of_torch(name: str) -> None:
    """Masters, moments and codes, to the bit; their states load, also where a class counts no steps."""
    kind, options = OTHERS[name]
    foreach = {} if kind is Lion else {"foreach": True}
    models = build("mxfp8"), build("mxfp8"), build("mxfp8")
    ours: Any = layoutc.MasterWeights(kind, models[0].parameters(), lr=0.01, state="fp32", **options)
    theirs: Any = layoutc.MasterWeights(kind, models[1].parameters(), lr=0.01, **foreach, **options)
    assert isinstance(ours, layoutc.MasterWeights)
    for model, optimizer in zip(models, (ours, theirs), strict=False):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(4):
            give_gradients(model, step)
            optimizer.step()
            schedule.step()
    expected = bytes_of(models[1], theirs)
    found = bytes_of(models[0], ours)
    assert_same({key: found[key] for key in expected}, expected)
    loaded: Any = layoutc.MasterWeights(kind, models[2].parameters(), lr=1.0, masters="fp32", **options)
    models[2].load_state_dict(models[1].state_dict())
    loaded.load_state_dict(copy.deepcopy(theirs.state_dict()))
    expected = trained(models[1], theirs)
    found = trained(models[2], loaded)
    assert_same({key: found[key] for key in expected if "step" not in key}, {
        key: value for key, value in expected.items() if "step" not in key
    })  # fmt: skip


def test_what_has_no_rule_is_refused() -> None:
    """In words, before anything is made; without state= and masters= each class steps by itself, as before."""
    weight = [nn.Parameter(torch.zeros(4, 4))]
    for kind, options, said in (
        (torch.optim.RMSprop, {}, "not with RMSprop: leave them out, and it keeps its own state"),
        (torch.optim.AdamW, {"amsgrad": True}, "AdamW with state= or masters= does not support amsgrad=True"),
        (torch.optim.SGD, {}, "give it momentum=0.9"),
    ):
        with pytest.raises(ValueError, match=said):
            layoutc.MasterWeights(kind, weight, lr=0.1, state="8bit", **options)
        assert type(layoutc.MasterWeights(kind, weight, lr=0.1, **options).inner) is kind


def test_multiply_and_add_is_rounded_once() -> None:
    """What torch's lerp and addcmul do on this CPU, which the kernel's arithmetic follows."""
    generator = torch.Generator().manual_seed(0)
    moment, square, grad = (torch.randn(4096, generator=generator) for _ in range(3))
    weight = torch.tensor(1 - 0.9).double()
    exact = weight.float().double() * (grad - moment).double() + moment.double()  # fits into fp64 but for its last bits
    assert torch.equal(torch.lerp(moment, grad, 1 - 0.9), exact.float())
    scaled = torch.tensor(1 - 0.999) * grad
    assert torch.equal(
        torch.addcmul(square, grad, grad, value=1 - 0.999), (scaled.double() * grad.double() + square.double()).float()
    )


# -------------------------------------------------------------------------------------------------------------- kernels
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recipe", "form", "dtype"),
    [
        (None, {"masters": "bf16"}, torch.bfloat16),
        ("mxfp8", {}, torch.bfloat16),
        ("fp8_block", {}, torch.float32),  # blocks of more rows than are updated at a time
        ("fp8_block_1d", {"masters": "bf16"}, torch.bfloat16),
        ("nvfp4", {}, torch.bfloat16),  # requantized after the launch
        ("fp8_block", {"state": "8bit"}, torch.float32),
        ("mxfp8", {"state": "4bit", "masters": "bf16"}, torch.bfloat16),
        (None, {"state": "fp8"}, torch.float32),
        ("nvfp4", {"state": "8bit", "masters": "f24"}, torch.bfloat16),
    ],
)
def test_kernels_write_the_bytes_of_the_reference(
    recipe: str | None, form: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "sqrt", rules.exact_sqrt)
    model = build(recipe, dtype)
    expected = trained(model, layoutc.AdamW(groups_of(model), lr=0.01, **form), 2)
    use_kernels(monkeypatch)
    model = build(recipe, dtype)
    optimizer = layoutc.AdamW(groups_of(model), lr=0.01, **form)
    assert_same(trained(model, optimizer, 2), expected)
    assert all(updates._launches for updates in optimizer._updates.values())
    assert len(optimizer._updates) == 1


def test_steps_under_another_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """After torch.set_default_device("cuda"), what names no device would be on a card; here it would be on none."""
    monkeypatch.setattr(rules, "sqrt", rules.exact_sqrt)
    use_kernels(monkeypatch)
    found = []
    for default in (nullcontext(), torch.device("meta")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32))
        give_gradients(model, 0)
        with default:
            optimizer = layoutc.AdamW(groups_of(model), lr=0.01, masters="f24")
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        found.append(bytes_of(model, optimizer))
    assert_same(*found)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "form"),
    [("Adam", {"masters": "bf16"}), ("Nesterov", {"state": "8bit"}), ("Lion", {"state": "fp8", "masters": "bf16"})],
)
def test_kernels_of_others_write_the_bytes_of_the_reference(
    name: str, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = OTHERS[name]
    monkeypatch.setattr(rules, "sqrt", rules.exact_sqrt)
    model = build("mxfp8")
    expected = trained(model, layoutc.MasterWeights(kind, model.parameters(), lr=0.01, **form, **options), 2)
    use_kernels(monkeypatch)
    model = build("mxfp8")
    optimizer: Any = layoutc.MasterWeights(kind, model.parameters(), lr=0.01, **form, **options)
    assert_same(trained(model, optimizer, 2), expected)
    assert all(updates._launches for updates in optimizer._updates.values())
    assert copy.deepcopy((model, optimizer))[1].param_groups[0]["lr"] == 0.01
    forms = [held.moments for held in optimizer.explain()]
    assert set(forms[0].values()) == {"8bit": {"adam_m8"}, "fp8": {"moment_fp8"}, None: {"fp32"}}[form.get("state")]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recipe", "form", "more"),
    [
        ("fp8_block", {}, []),
        ("mxfp8", {"state": "8bit"}, []),
        (None, {"state": "8bit", "masters": "bf16"}, []),
        ("fp8_current", {"masters": "f24"}, ["quantize"]),
    ],
)
def test_a_step_takes_one_launch_for_a_group_of_weights(
    recipe: str | None, form: dict[str, Any], more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many weights there are, of sizes that tiles divide: theirs, one of those that keep fp32 (a norm), and the
    scalars of all; where each weight has an amax, two more."""
    use_kernels(monkeypatch)
    launched: list[str] = []
    run = direct.run

    def counted(kernel: Any, *rest: Any) -> Any:
        launched.append(kernel.__name__.removesuffix("_kernel"))
        return run(kernel, *rest)

    monkeypatch.setattr(direct, "run", counted)
    for shapes in (((128, 256),), ((128, 256), (256, 256))):
        model = nn.Sequential(*(nn.Linear(k, m, bias=False, dtype=torch.bfloat16) for m, k in shapes))
        if recipe:
            layoutc.quantize_(model, recipe)
        model.append(nn.RMSNorm(8, dtype=torch.bfloat16))
        optimizer = layoutc.AdamW(model.parameters(), lr=0.01, **form)
        for step in range(2):
            give_gradients(model, step)
            launched.clear()
            optimizer.step()
            assert sorted(launched) == sorted(["scalars", "update", "update", *more])


def test_what_is_held_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each parameter: forms, bytes, and whether the launch writes the weight; before a step there are no moments."""
    use_kernels(monkeypatch)
    model = build("mxfp8", torch.float32)
    optimizer = layoutc.AdamW(model.parameters(), state="8bit", masters="bf16")
    assert [one.moments for one in optimizer.explain()] == [{}] * 4
    give_gradients(model, 0)
    optimizer.step()
    first, bias, *_ = optimizer.explain()
    assert (first.shape, first.master, first.codes) == ((160, 256), "bf16", "")
    assert first.moments == {"exp_avg": "adam_m8", "exp_avg_sq": "adam_v8"}
    assert first.nbytes == 160 * (2 * 256 + 2 * (256 + 4))
    assert (bias.master, bias.moments, bias.nbytes) == (
        "is its own",
        {"exp_avg": "fp32", "exp_avg_sq": "fp32"},
        8 * 160,
    )
    assert str(bias).startswith("a parameter (160): master is its own, exp_avg fp32, exp_avg_sq fp32; written with")


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("nvfp4", "scales of nvfp4 follow from an amax of the whole weight"),
        ("fp8_channel_bf16", "blocks of fp8_channel_bf16 span whole rows, or no power of two"),
    ],
)
def test_why_codes_are_written_apart_is_explained(recipe: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = layoutc.AdamW(build(recipe, torch.float32).parameters())
    use_kernels(monkeypatch)
    first, bias, *_ = optimizer.explain()
    assert (first.codes, bias.codes) == (why, "")


def test_special_values_go_through_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and infinite gradients, values at the ends of the range, subnormal ones."""
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -1e-40, 1e-45, 0.0, -0.0, 1e-20, 65504.0])
    monkeypatch.setattr(rules, "sqrt", rules.exact_sqrt)
    found = []
    for kernels in (False, True):
        for form in ({}, {"masters": "bf16"}, {"masters": "f24"}):
            if kernels:
                use_kernels(monkeypatch)
            weight = nn.Parameter(special.repeat(10).repeat(4, 1).to(torch.bfloat16))
            optimizer = layoutc.AdamW([weight], lr=0.1, **form)
            for step in range(2):
                weight.grad = special.repeat_interleave(10).repeat(4, 1).to(torch.bfloat16) * (step + 1)
                optimizer.step()
            values = {"weight": weight, **optimizer.state[weight]}
            found.append({name: value.detach().float() for name, value in values.items()})
    for one, other in zip(found[:3], found[3:], strict=True):
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=0, atol=0, equal_nan=True)


# -------------------------------------------------------------------------------------------------------------- masters
def test_bf16_masters_are_rounded_by_chance_without_bias() -> None:
    """A weight that moves by a hundredth of its last bit a step arrives where fp32 does."""
    weight = nn.Parameter(torch.full((64, 128), 1.0, dtype=torch.bfloat16))
    optimizer = layoutc.AdamW([weight], lr=2**-14, weight_decay=0.0, masters="bf16")
    for _ in range(200):
        weight.grad = torch.full_like(weight, 1.0)
        optimizer.step()
    moved = 1.0 - weight.detach().float().mean().item()
    assert abs(moved / (200 * 2**-14) - 1) < 0.02
    assert "master" not in optimizer.state[weight]


def test_masters_in_24_bits_are_nearest() -> None:
    """By fp64: 16 bits of a significand, ties to even; the bf16 beside the byte is the nearest, a tie away from 0."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator, dtype=torch.int64)
    bits[::4] = bits[::4] & ~0xFF | 0x80  # ties
    bits[1::4] = bits[1::4] & ~0xFFFF | 0x8000  # of bf16
    values = bits.to(torch.int32).view(torch.float32)
    values = torch.cat([values[values.isfinite()], torch.tensor([0.0, -0.0, 3.4028235e38, 1e-45, float("inf")])])[None]

    def nearest(x: Tensor, count: int, to_even: bool) -> Tensor:
        significand, exponent = torch.frexp(x.double())
        exponent = exponent.clamp(min=-125) - count  # from there on, values are subnormal
        steps = torch.ldexp(x.double(), -exponent)
        whole = steps.round() if to_even else steps.abs().add(0.5).floor().copysign(steps)
        return torch.ldexp(whole, exponent).where(significand.isfinite(), x.double()).float()

    held: Any = states.converted(values, F24Tensor)
    expected = nearest(values, 16, to_even=True)
    assert torch.equal(raw(states.read(held)), raw(expected))
    assert torch.equal(raw(held.rowwise_data.float()), raw(nearest(expected, 8, to_even=False)))
    assert sum(plane.nbytes for plane in held.planes().values()) == 3 * values.numel()


def test_masters_in_24_bits_keep_small_updates() -> None:
    """Steps of an eighth of a bf16's last place add up; the weight is the bf16 of its master, which begins as it."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.full((64, 128), 1.5, dtype=torch.bfloat16))
    optimizer = layoutc.AdamW([weight], lr=2**-10, weight_decay=0.0, masters="f24")
    for _ in range(20):
        weight.grad = torch.full_like(weight, 1.0)
        optimizer.step()
    master = optimizer.masters()[weight]
    values = master.dequantize()
    assert (values - (1.5 - 20 * 2**-10)).abs().max() < 2**-13
    assert torch.equal(weight, values.bfloat16())
    assert [(held.master, held.nbytes) for held in optimizer.explain()] == [("f24", 64 * 128 * (3 + 8))]


def test_random_bits_depend_on_place_step_and_seed() -> None:
    """Those of a part of a weight are that part's of the whole; others differ."""
    whole = rules.chance_bits(Chance(3, 1, 7, (0, 0)), 40, 64, torch.device("cpu"))
    part = rules.chance_bits(Chance(3, 1, 7, (24, 16)), 16, 48, torch.device("cpu"))
    assert torch.equal(part, whole[24:40, 16:])
    assert abs(whole.float().mean().item() - 2**15) < 1500
    for other in (Chance(4, 1, 7, (0, 0)), Chance(3, 2, 7, (0, 0)), Chance(3, 1, 8, (0, 0))):
        bits = rules.chance_bits(other, 40, 64, torch.device("cpu"))
        assert (bits == whole).float().mean() < 0.01


def test_small_weights_keep_fp32() -> None:
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.Linear(64, 63, dtype=torch.bfloat16))
    optimizer = layoutc.AdamW(model.parameters(), masters="bf16")
    trained(model, optimizer, 1)
    kept = {name: optimizer.state[param].get("master") for name, param in model.named_parameters()}
    assert kept["0.weight"] is None  # its own master
    assert {one.dtype for name, one in kept.items() if name != "0.weight"} == {torch.float32}


# ---------------------------------------------------------------------------------------------------------- life cycle
@pytest.mark.parametrize("masters", ["bf16", "f24"])
def test_states_come_back(masters: Any) -> None:
    """Saved and loaded, copied, pickled: the next steps are the same; masters become fp32, and those the nearest."""
    model = build()
    optimizer = layoutc.AdamW(groups_of(model), lr=0.01, masters=masters)
    trained(model, optimizer)
    saved = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), saved)
    other = build()
    loaded = layoutc.AdamW(groups_of(other), lr=0.5, masters=masters)
    saved.seek(0)
    weights, state = torch.load(saved, weights_only=False)
    other.load_state_dict(weights)
    loaded.load_state_dict(state)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    expected = trained(model, optimizer, 5)
    assert_same(trained(other, loaded, 5), expected)
    assert_same(trained(twin, twin_optimizer, 5), expected)
    wide = layoutc.AdamW(groups_of(build()), lr=0.01)
    wide.load_state_dict(optimizer.state_dict())
    pairs = zip(optimizer.masters().values(), wide.masters().values(), strict=True)
    assert all(torch.equal(one.float(), other) for one, other in pairs)
    trained(model, wide, 1)
    optimizer.load_state_dict(wide.state_dict())
    for param, fine in zip(optimizer.masters(), wide.masters().values(), strict=True):
        held: Any = optimizer.masters()[param]
        near = fine if fine.dim() < 2 else fine.bfloat16() if masters == "bf16" else states.converted(fine, F24Tensor)
        assert torch.equal(held.float(), near.float())


def test_added_groups_are_stepped() -> None:
    models = build(), build()
    optimizers: list[Any] = []
    for model, make in zip(models, (layoutc.AdamW, None), strict=True):
        first, second = list(model[0].parameters()), list(model[1].parameters())
        optimizer: Any = (
            make(first, lr=0.01) if make else layoutc.MasterWeights(torch.optim.AdamW, first, lr=0.01, foreach=True)
        )
        give_gradients(model, 9)
        optimizer.step()
        optimizer.add_param_group({"params": second, "lr": 0.3})
        optimizers.append(optimizer)
    assert_same(*(trained(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", [False, True])
def test_scaled_gradients_step_as_others_do(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """GradScaler leaves the scale to the launch; a step with an infinite gradient changes nothing."""
    if kernels:
        use_kernels(monkeypatch)
    found = []
    for scaled in (False, True):
        model = build()
        optimizer: Any = layoutc.AdamW(model.parameters(), lr=torch.tensor(0.01))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for step in range(3):
            give_gradients(model, step)
            if scaled:
                scaler.scale(torch.ones(()))
                for param in model.parameters():
                    param.grad *= 1024.0
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        found.append(bytes_of(model, optimizer))
        if scaled:
            give_gradients(model, 4)
            model[0].bias.grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 512.0
            found.append(bytes_of(model, optimizer))
    assert_same(found[0], found[1])
    assert_same(found[1], found[2])


@pytest.mark.parametrize(
    ("state", "masters", "kernels"),
    [("fp32", "fp32", False), ("8bit", "f24", False), ("fp32", "bf16", False), ("8bit", "f24", True)],
)
def test_the_order_of_memory_changes_no_value(
    state: Any, masters: Any, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights whose last dim is not contiguous, such as convolutions in channels_last, in bf16 and fp32."""
    if kernels:
        use_kernels(monkeypatch)
    found = []
    for order in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        wide, narrow = nn.Conv2d(4, 8, 2, bias=False), nn.Conv2d(8, 4, 2, bias=False, dtype=torch.bfloat16)
        model = nn.Sequential(wide, narrow).to(memory_format=order)
        before = wide.weight.detach().clone()
        optimizer = layoutc.AdamW(model.parameters(), lr=0.01, state=state, masters=masters, least=1)
        found.append(trained(model, optimizer, 2))
        assert not torch.equal(wide.weight, before)
    assert_same(*found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """They would be rounded to the masters' dtype, or lose their imaginary part."""
    weight = nn.Parameter(torch.zeros(8, 8, dtype=dtype))
    with pytest.raises(LayoutError, match=f"shape .8, 8. is {dtype}; .*an optimizer of torch's"):
        layoutc.AdamW([weight])
    frozen = layoutc.AdamW([nn.Parameter(torch.zeros(8)), weight.requires_grad_(False)])
    frozen.step()
    weight.requires_grad_()
    with pytest.raises(LayoutError, match=str(dtype)):
        frozen.step()
    other = layoutc.MasterWeights(torch.optim.AdamW, [weight], lr=0.1)
    weight.grad = torch.full_like(weight, 1j if dtype.is_complex else 1.0)
    alone = nn.Parameter(torch.zeros(8, 8, dtype=dtype))
    alone.grad = weight.grad.clone()
    other.step()
    torch.optim.AdamW([alone], lr=0.1).step()
    assert torch.equal(weight, alone)


def test_sparse_gradients_are_refused_before_the_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Embedding(8, 8, sparse=True))
    optimizer = layoutc.AdamW(model.parameters())
    before = bytes_of(model, optimizer)
    (model[0](torch.ones(8)).sum() + model[1](torch.tensor([1, 2])).sum()).backward()
    with pytest.raises(LayoutError, match=r"\(8, 8\) has a sparse gradient; .* sparse=False"):
        optimizer.step()
    assert_same(bytes_of(model, optimizer), before)


def test_options_out_of_range_are_refused() -> None:
    weight = [nn.Parameter(torch.zeros(4, 4))]
    with pytest.raises(ValueError, match="lr=-1"):
        layoutc.AdamW(weight, lr=-1)
    with pytest.raises(ValueError, match="one of fp32, 8bit, fp8, 4bit, or a dict"):
        layoutc.AdamW(weight, state="8bits")
    with pytest.raises(ValueError, match="one of fp32, bf16, f24, not 'fp16'"):
        layoutc.AdamW(weight, masters="fp16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="this optimizer has no state exp_avgs"):
        layoutc.AdamW(weight, state={"exp_avgs": "mxfp8"})
    with pytest.raises(ValueError, match="nvfp4 can't hold optimizer state"):
        layoutc.AdamW(weight, state={"exp_avg": "nvfp4"})


@pytest.mark.parametrize("quick", [False, True])
def test_update_is_what_its_options_say(quick: bool) -> None:
    """By hand, in fp64."""
    values, first, second = torch.ones(1, 1), torch.zeros(1, 1), torch.zeros(1, 1)
    rules.adam(values, torch.full((1, 1), 2.0), (first, second), 1, (0.1, 0.9, 0.99, 1e-8, 0.5), True, quick)
    assert values.item() == pytest.approx(1 - 0.05 - 0.1, abs=1e-6)
    assert (first.item(), second.item()) == pytest.approx((0.2, 0.04), abs=1e-6)
