"""Which gathers leave values where nobody has chosen, and that this changes no number: not by itself, and not where the
mode of all weights changes in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import product_modes
import pytest
import torch
import torch.distributed as dist
from harness import Ranks, on
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import layoutc
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.fsdp2.steady_group import SteadyGroup
from layoutc.runtime.sharding import gathered, registry
from layoutc.runtime.torch_private import fsdp2

WIDTH = 128
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Two layers that are gathered together, with a bias and a norm."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner, bias=False), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(n, WIDTH) -> the same."""
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Single(nn.Module):
    """A layer that is gathered by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(n, WIDTH) -> the same."""
        return self.only(x)  # type: ignore[no-any-return]


def built(
    recipe: str,
    *,
    cast: bool = False,
    policy: MixedPrecisionPolicy = BF16,
    inner: int = 256,
    prepare: Callable[[Any], object] | None = None,
    **options: Any,
) -> Any:
    """Two blocks, a layer of its own and a head, which is in the root's group."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(inner), Block(inner), Single(), nn.Linear(WIDTH, WIDTH))
    (layoutc.cast_on_gather_ if cast else layoutc.quantize_)(model, recipe)
    if prepare is not None:
        prepare(model)
    for block in model[:3]:
        fully_shard(block, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy)


def loss_of(model: Any, number: int) -> Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def left_by(model: Any) -> dict[str, bool]:
    """Name of each weight -> whether its gathers leave values, of what has been gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    names = {id(param): name for name, param in model.named_parameters()}
    found = {}
    for param, _ in registry.parameters():
        if id(param.sharded_param) in names and (decision := gathered.decision_of(param)) is not None:
            assert decision.values == (not hasattr(fsdp2.gathered_of(param), "QUANTIZED"))
            found[names[id(param.sharded_param)]] = decision.values
    return found


NAMES = ("0.up.weight", "0.down.weight", "1.up.weight", "1.down.weight", "2.only.weight", "3.weight")
ALL, NONE, FIRST_NOT = NAMES[:4], (), NAMES[2:4]


def chooses_low(model: Any) -> None:
    product_modes.set_products_(model, "reference", filter_fn=lambda _, name: name == "0.up")


def leaves(options: dict[str, Any], mode: Any, expected: tuple[str, ...]) -> None:
    with product_modes.products(mode) if mode else nullcontext():
        model = built(**options)
        for number in range(3):
            loss_of(model, number).backward()
    assert left_by(model) == {name: name in expected for name in NAMES}


KEPT = {"reshard_after_forward": False}
FP32 = {"policy": MixedPrecisionPolicy()}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "mode", "expected"),
    [
        pytest.param({}, None, ALL, id="by default"),
        pytest.param({"cast": True}, None, ALL, id="cast on gather"),
        pytest.param({}, "gather", ALL, id="asked for"),
        pytest.param({}, "dequantize", NONE, id="by layers"),
        pytest.param({}, "low_precision", NONE, id="low precision"),
        pytest.param(KEPT, None, NONE, id="kept after forward"),
        pytest.param(FP32, None, NONE, id="fp32"),
        pytest.param({"inner": 208}, None, NONE, id="cuts inside of blocks"),
        pytest.param({"recipe": "mxfp8"}, None, NONE, id="passes of codes of their own"),
        pytest.param({"prepare": chooses_low}, None, FIRST_NOT, id="one in low precision"),
    ],
)
def test_gathers_leave_values_where_that_costs_nothing(
    two: Ranks, options: dict[str, Any], mode: str | None, expected: tuple[str, ...]
) -> None:
    two.run(leaves, {"recipe": "nvfp4", **options}, mode, expected)


def train(model: Any, modes: list[str | None], inside: str = "step") -> list[Tensor]:
    """Losses of a step under each mode, and what shards hold then. inside: `step`, or the `forward` alone, after which
    it is that of before."""
    optimizer: Any = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    found = []
    for number, mode in enumerate(modes):
        with product_modes.products(mode) if mode else nullcontext():  # type: ignore[arg-type]
            loss = loss_of(model, number)
            if inside == "step":
                loss.backward()
        if inside == "forward":
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    for param in model.parameters():
        held = param._local_tensor
        found += [one.clone() for one in (held.planes().values() if hasattr(held, "planes") else [held.detach()])]
    return found


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


SWITCHED = (None, None, "low_precision", "low_precision", None, "dequantize", None)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "cast", "modes"),
    [
        ("nvfp4", False, SWITCHED),
        ("nvfp4", True, SWITCHED),
        ("fp8_current", True, (None,) * 3),
        ("mxfp8_2d", False, (None,) * 3),
    ],
)
@on("two")
def test_numbers_are_those_of_layers(recipe: str, cast: bool, modes: tuple[str | None, ...]) -> None:
    """Also where the mode of all weights changes between steps. `auto` dequantizes on a CPU, which has no kernels."""
    expected = train(built(recipe, cast=cast), ["dequantize"] * len(modes))
    model = built(recipe, cast=cast)
    assert_alike(train(model, [*modes]), expected)
    assert left_by(model) == {name: modes[-1] is None and name in ALL for name in NAMES}


@on("two")
def test_backward_follows_its_forward() -> None:
    """A gather for backward leaves what that for forward has left."""
    runs = []
    for outside in ("dequantize", "gather"):
        with product_modes.products(outside):  # type: ignore[arg-type]
            runs.append(train(built("nvfp4"), ["reference"] * 3, inside="forward"))
    assert_alike(*runs)
    with product_modes.products("reference"):
        runs.append(train(built("nvfp4"), ["gather"] * 3, inside="forward"))
    assert_alike(runs[-1], train(built("nvfp4"), ["dequantize"] * 3))


@pytest.mark.parametrize("warm", [False, True])
@on("two")
def test_another_mode_between_forward_and_backward_is_refused(warm: bool) -> None:
    """A pass in between, as of a teacher, that would gather otherwise: refused, as the loss still has to go back; not
    where it gathers alike, nor without a graph, nor after backward, though the loss is still there."""
    model = built("nvfp4")
    with layoutc.products("low_precision"):
        if warm:
            loss_of(model, 0).backward()
        loss = loss_of(model, 1)
    with torch.no_grad(), product_modes.products("reference"):
        loss_of(model, 2)
    with pytest.raises(LayoutError, match=r'changed to layoutc.products\("dequantize"\), layoutc.d.*"\) between a'):
        loss_of(model, 2)
    with layoutc.products("low_precision"):
        loss.backward()
    loss_of(model, 2)
    assert set(left_by(model).values()) == {True, False}
    with layoutc.products("low_precision"):  # nothing holds that pass's graph
        loss_of(model, 3).backward()
    assert set(left_by(model).values()) == {False}


@on("two")
def test_a_graph_on_one_rank_is_refused_on_all() -> None:
    """One rank alone has kept the loss of a pass without backward: all refuse, and none waits for it."""
    model = built("nvfp4")
    kept = [loss for loss in [loss_of(model, 0)] if dist.get_rank() == 0]
    with layoutc.products("low_precision"), pytest.raises(LayoutError, match="between a forward pass and its backward"):
        loss_of(model, 1)
    kept.clear()
    with layoutc.products("low_precision"):
        loss_of(model, 1).backward()
    assert not any(left_by(model).values())


@on("two")
def test_gradients_that_add_up_are_not_lost() -> None:
    """FSDP2 keeps gradients that are reduced later with the gathered parameters, in the dtype of the policy."""
    model = built("nvfp4", policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.set_requires_gradient_sync(False)
    loss_of(model, 0).backward()
    model.set_requires_gradient_sync(True)
    with (
        torch.no_grad(),
        layoutc.products("low_precision"),
        pytest.raises(LayoutError, match="gradients are being accumulated"),
    ):
        loss_of(model, 1)
    with pytest.raises(LayoutError, match="gradients are being accumulated"):
        product_modes.set_products_(model, "dequantize")
    loss_of(model, 1).backward()
    with torch.no_grad(), layoutc.products("low_precision"):
        loss_of(model, 2)


@pytest.mark.parametrize("how", ["by hand", "after backward"])
@on("two")
def test_values_that_are_still_gathered_are_no_codes(how: str) -> None:
    """Values that are still gathered are not multiplied as codes, without a word."""
    model = built("fp8_current")
    for number in range(2):
        if how == "after backward":
            model.set_reshard_after_backward(False)
        loss_of(model, number).backward()
    if how == "by hand":
        model[0].unshard()
    with (
        product_modes.products("reference"),
        pytest.raises(LayoutError, match=r"still gathered, as bf16 weights, .*reference"),
    ):
        loss_of(model, 2)
    for block in model[:3]:
        block.reshard()
    model.reshard()
    with product_modes.products("reference"):
        loss = loss_of(model, 2)
    assert not any(left_by(model).values())
    with product_modes.products("reference"):
        assert torch.equal(loss, loss_of(built("fp8_current"), 2))


@on("two")
def test_a_mode_around_forward_alone() -> None:
    """A mode around forward alone: backward gathers what forward did, in few steps, and the next forward decides."""
    model = built("nvfp4")
    for number in range(4):
        with product_modes.products("reference"):
            loss = loss_of(model, number)
        loss.backward()
    shards = {id(param) for param in model.parameters()}
    held = [(param, group) for param, group in registry.parameters() if id(param.sharded_param) in shards]
    plans = [{which for which, plan in group._plans.items() if plan is not None} for _, group in held]
    assert all(one in ({"forward", "backward"}, {"both"}) for one in plans), plans
    del loss
    loss_of(model, 4).backward()
    assert set(left_by(model).values()) == {True, False}


@on("two")
def test_groups_gather_in_few_steps() -> None:
    """Also after the mode of all weights has changed, and has changed back."""
    model = built("nvfp4")
    for number, mode in enumerate((None, None, "low_precision", "low_precision", None, None)):
        with product_modes.products(mode) if mode else nullcontext():  # type: ignore[arg-type]
            loss_of(model, number).backward()
        if number % 2 == 1:
            model.reshard()
            shards = {id(param) for param in model.parameters()}
            held = [(param, group) for param, group in registry.parameters() if id(param.sharded_param) in shards]
            groups = [group for _, group in held if type(group) is SteadyGroup]
            assert {id(group) for group in groups} == {id(group) for _, group in held}
            assert all(any(group._plans.values()) for group in groups)
