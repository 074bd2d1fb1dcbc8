"""Weights that are cast on gather in one FSDP group: one launch for all of them, and never bytes of other values."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import product_modes
import pytest
import torch
import torch.distributed as dist
from harness import Ranks, on
from interpreter import quicken
from models import (
    assert_same_tensors,
    counted,
    make_uneven,
    my_share,
    raw,
    recipe_module,
    shard,
)
from test_cast_on_gather import OPTIMIZERS, OneProcess, assert_same_values, build_cast, step_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import layoutc
from layoutc.runtime.cast import gather_group, precompute, shared_amax
from layoutc.runtime.cast.tensor import CastOnGather
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.fsdp2.steady_group import SteadyGroup
from layoutc.runtime.kernels import launch
from layoutc.runtime.sharding import registry

SOME = ("fp8_block", "mxfp8", "nvfp4", "fp8_current", "fp8_delayed", "int8_rowwise", "fp8_block_1d")
BATCHED = ("mxfp8", "nvfp4", "fp8_current", "fp8_delayed")


@contextmanager
def kernels_on_cpu() -> Iterator[list[Any]]:
    """Kernels take the place of the reference, in Triton's interpreter; yields those that quantize, as launched."""
    triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    quicken()
    from layoutc.runtime.kernels import direct, recipe_kernels

    launched: list[Any] = []
    original = direct.run

    def run(kernel: Any, *args: Any) -> Any:
        if kernel is recipe_kernels.quantize_kernel:
            launched.append(kernel)
        return original(kernel, *args)

    usable = lambda x, dtype=None: type(x) is Tensor and x.numel() > 0  # noqa: E731
    with (
        mock.patch.object(launch, "usable", usable),
        mock.patch.object(direct, "run", run),
    ):
        yield launched


def in_one_group(recipe: str, dtype: torch.dtype = torch.float32, count: int = 4, **options: Any) -> Any:
    """Layers, the same on every rank, whose blocks have scales of their own; cast on gather, sharded together."""
    torch.manual_seed(0)
    rows = dist.get_world_size() * max(recipe_module(recipe).LAYOUT.block_rows, 8)
    shapes = (rows, 32), (rows, 64), (rows, 32), (rows, 32)
    model = nn.Sequential(*[nn.Linear(k, m, bias=False, dtype=dtype) for m, k in shapes[:count]])
    make_uneven(model)
    layoutc.cast_on_gather_(model, recipe)
    product_modes.set_products_(model, "dequantize")  # gathers leave codes, which are looked at
    return fully_shard(model, **options)


def local(layer: Any) -> CastOnGather:
    """The shard of a layer's weight."""
    held = layer.weight._local_tensor
    assert isinstance(held, CastOnGather)
    return held


def whole_values(model: Any) -> list[Tensor]:
    """Of all weights, gathered as plain values."""
    return [torch.cat(list(parts)) for parts in zip(*_everywhere(model), strict=True)]


def _everywhere(model: Any) -> list[list[Tensor]]:
    mine = [local(layer).plain.detach().clone() for layer in model]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return everywhere


def assert_gathers(model: Any, recipe: str, values: list[Tensor] | None = None) -> None:
    """What is gathered equals quantizing the whole weights, byte for byte. values: default: those of now."""
    values = whole_values(model) if values is None else values
    model.unshard()
    for layer, value in zip(model, values, strict=True):
        expected = recipe_module(recipe).quantize(value)
        assert_same_tensors(without_amax(layer.weight), expected.planes())
    model.reshard()


def without_amax(weight: Any) -> dict[str, Tensor]:
    """The planes of a gathered weight that depend on nothing but its values: not an amax, which may be a history."""
    held = {name: plane for name, plane in weight.planes().items() if name != "amax"}
    assert held
    return held


#: FSDP2's own steps in every gather, which call hooks.
by_hooks = mock.patch.object(SteadyGroup, "_is_at_rest", mock.Mock(return_value=False))


def members_of(model: Any) -> list[Any]:
    """Those of the group that the first layer's weight is in."""
    sharding = registry.find(local(model[0]))
    assert sharding is not None
    return list(gather_group.members_of(sharding))


# ---------------------------------------------------------------------------------------------------------- launches
@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", BATCHED)
@pytest.mark.parametrize(("precomputed", "keeps"), [(False, True), (True, False)])
@on("two")
def test_a_group_is_quantized_in_one_launch(recipe: str, precomputed: bool, keeps: bool) -> None:
    """And its amaxes are reduced in one collective, or were before. An optimizer writes between two gathers."""
    model = in_one_group(recipe, torch.bfloat16, 3, reshard_after_forward=not keeps)
    shares = recipe_module(recipe).LAYOUT.shares_amax
    with kernels_on_cpu() as launched:
        for gather in range(2):
            values = whole_values(model)
            if precomputed:
                layoutc.precompute_amaxes(model)
            launched.clear()
            with counted("all_reduce", lambda tensor, *_, **__: tensor.dtype) as reduced:
                model.unshard()
            assert len(launched) == 1, gather
            assert reduced.count(torch.int32) == (shares and not precomputed)
            for layer, value in zip(model, values, strict=True):
                starts = [plane.data_ptr() % 16 for plane in without_amax(layer.weight).values()]
                assert not any(starts)  # as cuBLAS wants its operands
                with mock.patch.object(launch, "usable", return_value=False):
                    whole = recipe_module(recipe).quantize(value)
                if recipe != "fp8_delayed":  # a history has the amaxes of earlier gathers
                    assert_same_tensors(without_amax(layer.weight), whole.planes())
            model.reshard()
            with torch.no_grad():
                for layer in model:
                    layer.weight.mul_(1.5)


def trains_in_one_group(
    recipe: str,
    keeps: bool,
    sizes: tuple[int, int],
    precomputed: bool,
    accumulates: int,
    with_kernels: bool,
) -> None:
    """Loss curve and values are those of one process, which knows nothing of gathers."""
    reference = OneProcess(recipe, "adamw", *sizes, torch.float32)
    model = shard(build_cast(recipe, *sizes), nested=False, reshard_after_forward=not keeps)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step in range(3):
        expected = reference.step(step, sizes[0])
        if precomputed:
            layoutc.precompute_amaxes(model)
        with kernels_on_cpu() if with_kernels else nullcontext():
            for _ in range(accumulates - 1):  # the gradients of these count nothing
                (model(torch.ones(1, sizes[0])).sum() * 0).backward()
            assert step_of(model, optimizer, step, sizes[0], my_share()) == expected, step
    assert_same_values(model, reference.model)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "keeps", "units", "precomputed", "accumulates", "with_kernels"),
    [
        ("fp8_delayed", False, (2, 2), False, 1, False),
        ("fp8_delayed", True, (3, 1), True, 1, False),
        ("fp8_current", True, (2, 2), True, 2, True),
        ("fp8_current", False, (3, 1), False, 3, False),
        ("mxfp8", True, (3, 1), False, 1, False),
        ("nvfp4", False, (2, 2), True, 1, True),
        ("fp8_block_1d", False, (2, 2), False, 3, False),
    ],
)
def test_a_group_trains_as_one_process(
    two: Ranks,
    recipe: str,
    keeps: bool,
    units: tuple[int, int],
    precomputed: bool,
    accumulates: int,
    with_kernels: bool,
) -> None:
    """Whole and short shards, cuts inside of blocks, several gathers of the same values."""
    unit = max(recipe_module(recipe).LAYOUT.block_rows, 5 if units == (3, 1) else 16)
    sizes = (units[0] * unit, units[1] * unit)
    two.run(trains_in_one_group, recipe, keeps, sizes, precomputed, accumulates, with_kernels)


# ----------------------------------------------------------------------------------------------- values that change
def write_in_place(tensor: CastOnGather) -> None:
    with torch.no_grad():
        tensor.mul_(3)


def write_a_view(tensor: CastOnGather) -> None:
    with torch.no_grad():
        tensor[1:3].add_(5)


def write_plain(tensor: CastOnGather) -> None:
    tensor.plain.mul_(-2)


def assign(tensor: CastOnGather) -> None:
    tensor.data = tensor.plain * 7


def assign_a_wrapped_one(tensor: CastOnGather) -> None:
    tensor.data = copy.deepcopy(tensor).mul_(7)


WRITES: dict[str, Callable[[CastOnGather], None]] = {
    one.__name__: one for one in (write_in_place, write_a_view, write_plain, assign, assign_a_wrapped_one)
}


@by_hooks
def written_between_hooks(recipe: str, write: str, at: int) -> None:
    """One weight is written, on all ranks, right after the first one's hook; in the first gather and in a later one."""
    model = in_one_group(recipe)
    for gather in range(3):
        first: Any = local(model[0])
        changed: list[Tensor] = []

        def hook(mesh: Any, then: Callable[..., Any] = first.fsdp_pre_all_gather, changed: Any = changed) -> Any:
            sent = then(mesh)
            WRITES[write](local(model[at]))
            changed.append(local(model[at]).plain.detach().clone())
            return sent

        hook.__signature__ = inspect.Signature([inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_ONLY)])  # type: ignore[attr-defined]
        values = _everywhere(model)
        first.fsdp_pre_all_gather = hook
        model.unshard()
        del first.fsdp_pre_all_gather
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, changed[0])
        for position, layer in enumerate(model):
            new = everywhere if position == at and position else [mine[position] for mine in values]
            expected = recipe_module(recipe).quantize(torch.cat(new))
            assert_same_tensors(without_amax(layer.weight), expected.planes())
        model.reshard()
        assert_gathers(model, recipe)
        if gather == 1 and recipe != "mxfp8":
            layoutc.precompute_amaxes(model)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recipe", "write"), list(zip(("mxfp8", "nvfp4", "fp8_current", "mxfp8", "nvfp4"), WRITES, strict=True))
)
def test_a_weight_that_is_written_between_hooks_sends_its_new_values(two: Ranks, recipe: str, write: str) -> None:
    """And the others send theirs."""
    two.run(written_between_hooks, recipe, write, 2)


@pytest.mark.parametrize("write", ["write_in_place", "assign"])
def test_the_first_weight_sends_what_it_held(two: Ranks, write: str) -> None:
    """It is written after it was sent."""
    two.run(written_between_hooks, "mxfp8", write, 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recipe", "write"),
    list(zip(("fp8_current", "mxfp8", "fp8_current", "mxfp8", "fp8_current"), WRITES, strict=True)),
)
@on("two")
def test_weights_that_are_written_between_gathers_send_new_values(recipe: str, write: str) -> None:
    """In place, and by new memory, which the launch that was prepared knows nothing of."""
    model = in_one_group(recipe)
    for at in (0, 3, 1, 1):
        assert_gathers(model, recipe)
        WRITES[write](local(model[at]))
        assert_gathers(model, recipe)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current"])
@on("two")
@by_hooks
def test_what_a_failed_gather_has_left_is_not_sent(recipe: str) -> None:
    """A gather ends after the first hooks; then values change, without a trace, and it begins again."""
    model = in_one_group(recipe)
    for _ in range(2):
        third: Any = local(model[2])

        def fails(mesh: Any) -> Any:
            raise ValueError("on purpose")

        third.fsdp_pre_all_gather = fails
        with pytest.raises(ValueError, match="on purpose"):
            model.unshard()
        del third.fsdp_pre_all_gather
        for layer in model:
            local(layer).plain.data.mul_(2)  # no version counter of ours sees it
        assert_gathers(model, recipe)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", SOME)
@on("two")
@by_hooks
def test_hooks_out_of_turn_send_the_same(recipe: str) -> None:
    """Hooks that are called by hand, in another order."""
    model = in_one_group(recipe)
    assert_gathers(model, recipe)
    mesh = model[0].weight.device_mesh
    shared = [local(layer) for layer in model]
    alone = [[raw(one).tolist() for one in gather_group.send_alone(one, mesh)[0]] for one in shared]
    for order in ((2, 0, 1, 3), (0, 2, 1, 3), (0, 0, 1, 1), (3, 2, 1, 0)):
        for at in order:
            sent, _ = shared[at].fsdp_pre_all_gather(mesh)
            assert [raw(one).tolist() for one in sent] == alone[at], order
    assert_gathers(model, recipe)
    sharding = registry.find(shared[0])
    assert sharding is not None
    assert not gather_group._parts[sharding.group()]


# ------------------------------------------------------------------------------------------------------- membership
class Mixed(nn.Module):
    """Weights of several kinds, one of them tied, in one group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in "abcde":
            setattr(self, name, nn.Linear(32, 64))
        self.f, self.g = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        make_uneven(self)
        self.g.weight = self.f.weight

    def cast(self) -> dict[str, str]:
        """Layer -> the recipe that its weight is cast to."""
        return {"a": "mxfp8", "b": "mxfp8", "c": "nvfp4", "d": "fp8_current", "f": "mxfp8"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("with_kernels", [True, False])
@on("two")
def test_weights_of_several_recipes_in_one_group(with_kernels: bool) -> None:
    """One launch for each recipe and dtype; quantized and plain weights among them, and a tied one. Two recipes, a
    quantized weight, plain ones and biases; then one is frozen, and the first one leaves."""
    model: Any = Mixed()
    plain = {name: param.detach().clone() for name, param in model.named_parameters()}
    for layer, recipe in model.cast().items():
        tied = {"f", "g"} if layer == "f" else {layer}
        layoutc.cast_on_gather_(model, recipe, filter_fn=lambda _, name, tied=tied: name in tied)
    layoutc.quantize_(model, "mxfp8", filter_fn=lambda _, name: name == "e")
    assert model.g.weight is model.f.weight
    fully_shard(model, mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with kernels_on_cpu() if with_kernels else nullcontext([]) as launched:
        for gather in range(4):
            if with_kernels:
                launched.clear()
            model.unshard()
            if with_kernels:
                assert len(launched) == 3  # mxfp8, nvfp4, fp8_current
            assert model.g.weight is model.f.weight
            for layer, recipe in {**model.cast(), "e": "mxfp8"}.items():
                if gather == 3 and layer == "b":
                    continue
                held = without_amax(getattr(model, layer).weight)
                with mock.patch.object(launch, "usable", return_value=False):
                    whole = recipe_module(recipe).quantize(plain[f"{layer}.weight"]).planes()
                assert_same_tensors(held, whole)
            model.reshard()
            if gather == 1:
                model.a.weight.requires_grad_(False)
                model.c.weight.requires_grad_(False)
            if gather == 2:
                sharding = registry.find(model.b.weight._local_tensor)
                assert sharding is not None
                group: Any = sharding.group()
                group.fsdp_params = [one for one in group.fsdp_params if one is not sharding.param()]


@on("two")
@by_hooks
def test_a_group_goes_on_without_its_first_weight() -> None:
    """The others are still quantized together."""
    recipe = "mxfp8"
    model = in_one_group(recipe)
    assert_gathers(model, recipe)
    sharding = registry.find(local(model[0]))
    assert sharding is not None
    group: Any = sharding.group()
    group.fsdp_params = group.fsdp_params[1:]
    values = whole_values(model)[1:]
    model.unshard()
    for layer, value in zip(list(model)[1:], values, strict=True):
        assert_same_tensors(without_amax(layer.weight), recipe_module(recipe).quantize(value).planes())
    model.reshard()
    assert list(gather_group.members_of(sharding)) == [local(layer) for layer in list(model)[1:]]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@on("two")
def test_copies_of_a_member_are_not_members(recipe: str) -> None:
    """Copies, aliases and views of a shard are no members; a copied weight trains on."""
    model = in_one_group(recipe)
    assert_gathers(model, recipe)
    one = local(model[1])
    others = [copy.deepcopy(one), one.detach(), one.data, one.view(-1), torch.empty_like(one), one.clone()]
    members = members_of(model)
    assert members[1] is one
    assert not any(other is member for other in others for member in members)
    others[0].mul_(2)
    assert_gathers(model, recipe)
    with torch.no_grad():
        model[1].weight.copy_(
            DTensor.from_local(others[0].plain, model[1].weight.device_mesh, [Shard(0)], run_check=False)
        )
    assert_gathers(model, recipe)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current"])
@on("two")
def test_a_group_follows_weights_that_move(recipe: str) -> None:
    """Loads and module._apply give a group new tensors."""
    model = in_one_group(recipe)
    assert_gathers(model, recipe)
    model._apply(torch.clone)
    assert_gathers(model, recipe)
    for by_assigning in (False, True):
        state = {name: value * 2 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=by_assigning)
        assert_gathers(model, recipe)


@contextmanager
def capturing() -> Iterator[None]:
    """As while a CUDA graph is captured, on a CPU, which has none."""
    with (
        mock.patch.object(shared_amax, "capturing", return_value=True),
        mock.patch.object(precompute, "capturing", return_value=True),
    ):
        yield


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
@on("two")
def test_amaxes_of_a_step_that_is_captured(recipe: str) -> None:
    """A capture sees Python once, and its kernels run again and again: each gather reduces its own amaxes."""
    model = in_one_group(recipe, count=2)
    for _ in range(2):
        layoutc.precompute_amaxes(model)
        ahead = [local(layer)._agreed.ahead for layer in model]
        with capturing():
            layoutc.precompute_amaxes(model)  # does nothing
            with counted("all_reduce", lambda tensor, *_, **__: tensor.dtype) as reduced:
                model.unshard()
        assert reduced.count(torch.int32) == 1
        model.reshard()
        assert [local(layer)._agreed.ahead for layer in model] == ahead
        with torch.no_grad():
            for layer in model:
                layer.weight.mul_(1.5)
    assert_gathers(model, recipe)


@on("two")
def test_a_history_of_gathers_is_not_captured() -> None:
    """Replays would find the same history each time."""
    model = in_one_group("fp8_delayed", count=2)
    for warm in (False, True):
        with capturing(), pytest.raises(LayoutError, match=r"cast to fp8_delayed takes .*: use layoutc\.quantize_"):
            model.unshard()
        model.reshard()
        if not warm:
            model.unshard()
            model.reshard()


@pytest.mark.thorough
@on("two")
def test_single_values_stay_where_they_are() -> None:
    """A table is made for each place. Where they lie, as gathers of two groups take turns; and what they are after
    writes, also in inference mode."""
    recipe = "fp8_current"
    models = [in_one_group(recipe, count=2) for _ in range(2)]
    places: list[list[int]] = []
    with kernels_on_cpu():
        for turn, model in enumerate(models * 5):
            with torch.inference_mode() if 4 > turn > 1 else nullcontext():
                model.unshard()
                planes = [plane for layer in model for plane in without_amax(layer.weight).values()]
                places.append([plane.data_ptr() for plane in planes if plane.dim() == 1])
                model.reshard()
            with torch.no_grad():
                for layer in model:
                    layer.weight.mul_(1.5)
            assert_gathers(model, recipe)
    assert len({*places[2], *places[3]}) == 2 * len(places[2]) > 0
    assert places[-4:-2] == places[-2:]  # once the group gathers in few steps


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
@on("two")
def test_inference_comes_first(recipe: str) -> None:
    """In inference mode FSDP2 makes shards anew that it pads, on some ranks alone: ranks must quantize alike."""
    torch.manual_seed(0)
    rows = [recipe_module(recipe).LAYOUT.multiple_m * count for count in (2, 15, 1, 4)]
    model = nn.Sequential(*[nn.Linear(64, count, bias=False) for count in rows])
    expected = [recipe_module(recipe).quantize(layer.weight.detach()) for layer in model]
    layoutc.cast_on_gather_(model, recipe)
    fully_shard(model)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            model.unshard()  # type: ignore[operator]
            for layer, whole in zip(model, expected, strict=True):
                weight: Any = layer.weight
                assert_same_tensors(whole.planes(), weight.planes())
            model.reshard()  # type: ignore[operator]
