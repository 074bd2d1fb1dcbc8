"""Gradients that are reduced in few steps are those of FSDP2's own, to the bit; what is not plain is left to FSDP2."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of, on
from test_packed_groups import MIXED, Mixer, mixer, same
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import layoutc
from layoutc.runtime.fsdp2 import steady_group
from layoutc.runtime.sharding import registry
from layoutc.runtime.torch_private import planned_groups, reductions

LAYERS = 2


@contextmanager
def counted(allowed: Callable[[], bool] = lambda: True) -> Iterator[list[str]]:
    """The reductions that are taken in few steps, where that is allowed."""
    taken: list[str] = []
    reduce, found = reductions.reduce, reductions.gradients_of

    def counting(*args: Any) -> None:
        taken.append("reduced")
        reduce(*args)

    with (
        mock.patch.object(reductions, "reduce", counting),
        mock.patch.object(reductions, "gradients_of", lambda group: found(group) if allowed() else None),
    ):
        yield taken


def backward(model: Any, step: int = 0) -> None:
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    model(torch.randn(4, 256, generator=generator)).float().square().mean().backward()


def grads_of(model: Any) -> list[Tensor]:
    return [param.grad.to_local().clone() for param in model.parameters() if param.grad is not None]


def stepped(model: Any, steps: int = 2) -> list[Tensor]:
    """Gradients of steps, in which weights are written, and the gradients' placements."""
    seen: list[Tensor] = []
    for step in range(steps):
        backward(model, step)
        seen += grads_of(model)
        for param in model.parameters():
            assert param.grad is not None
            assert param.grad.placements == param.placements
            assert param.grad.shape == param.shape
            with torch.no_grad():
                param.to_local().mul_(0.99)
            param.grad = None
    for layer in model:
        group = layer._get_fsdp_state()._fsdp_param_group
        assert group.is_sharded
        assert all(one._unsharded_param.grad is None for one in group.fsdp_params)
    return seen


def is_the_same(
    recipe: str, cast: bool, mixed: bool, mode: str, exchanges: bool | str, options: dict[str, Any]
) -> None:
    """As FSDP2's own; and where some ranks reduce in few steps, and others as FSDP2 does. exchanges: as codes of that
    recipe."""

    def make() -> Any:
        model = mixer(recipe, cast, mixed, layers=LAYERS, mode=mode, **options)
        if exchanges:
            layoutc.exchange_gradients(model, None if exchanges is True else exchanges)
        return model

    with counted(lambda: False) as taken:
        expected = stepped(make())
    assert not taken
    with counted() as taken:
        assert same(stepped(make()), expected)
    assert len(taken) == 2 * LAYERS
    with counted(lambda: dist.get_rank() == 0) as taken:
        assert same(stepped(make()), expected)
    assert bool(taken) is (dist.get_rank() == 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recipe", "cast", "mixed", "mode", "exchanges", "options"),
    [
        ("nvfp4", False, True, "dequantize", False, {}),
        ("nvfp4", False, True, "gather", False, {}),
        ("nvfp4", False, False, "dequantize", False, {}),
        ("fp8_current", False, True, "reference", False, {"reshard_after_forward": False}),
        ("nvfp4", False, True, "dequantize", "grad_int4", {}),
        ("fp8_block", True, True, "gather", True, {}),
    ],
)
def test_the_gradients_of_fsdp2s_own_steps(
    two: Ranks, recipe: str, cast: bool, mixed: bool, mode: str, exchanges: bool | str, options: dict[str, Any]
) -> None:
    two.run(is_the_same, recipe, cast, mixed, mode, exchanges, options)


def test_four_ranks(four: Ranks) -> None:
    four.run(is_the_same, "mxfp8", False, True, "dequantize", True, {})


def accumulates(model: Any) -> list[Tensor]:
    """Without a reduction, then with one; and on top of gradients that are there."""
    model.set_requires_gradient_sync(False)
    backward(model)
    model.set_requires_gradient_sync(True)
    backward(model, 1)
    seen = grads_of(model)
    backward(model, 2)
    return seen + grads_of(model)


def divides(model: Any) -> list[Tensor]:
    for layer in model:
        layer.set_force_sum_reduction_for_comms(True)
        layer.set_gradient_divide_factor(3.0)
    backward(model)
    return grads_of(model)


def has_hooks(model: Any) -> list[Tensor]:
    """As an optimizer in backward: the hook finds the gradient, and takes it."""
    seen: list[Tensor] = []

    def hook(param: Any) -> None:
        seen.append(param.grad.to_local().clone())
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    backward(model)
    assert not grads_of(model)
    return seen


def is_frozen(model: Any) -> list[Tensor]:
    for layer in model:
        layer.up.weight.requires_grad_(False)
    backward(model)
    return grads_of(model)


def is_left_out(model: Any) -> list[Tensor]:
    """A parameter that the loss does not reach."""
    with mock.patch.object(Mixer, "forward", lambda self, x: x + self.down(torch.tanh(self.up(self.before(x))))):
        backward(model)
    return grads_of(model)


def offloads(model: Any) -> list[Tensor]:
    backward(model)
    return grads_of(model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("use", [accumulates, divides, has_hooks, is_frozen, is_left_out, offloads])
@on("two")
def test_what_is_left_to_fsdp2(use: Callable[[Any], list[Tensor]]) -> None:
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if use is offloads else {}
    make = partial(mixer, "nvfp4", mode="dequantize", layers=LAYERS, **options)
    with counted(lambda: False):
        expected = use(make())
    with counted() as taken:
        assert same(use(make()), expected)
    assert expected
    assert not taken


@on("four")
def test_replicas_are_left_to_fsdp2() -> None:
    """Of two replicas of two shards, gradients are reduced over all four ranks, by FSDP2."""
    found = []
    for allowed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Mixer(256))
        layoutc.quantize_(model, "nvfp4")
        fully_shard(model[0], mesh=mesh_of(2, 2, names=("replicate", "shard")), mp_policy=MIXED)
        with counted(lambda: allowed) as taken:  # noqa: B023
            backward(model)
        found.append(grads_of(model))
        assert not taken
    assert same(*found)


@on("two")
def test_nothing_is_kept() -> None:
    """Gradients of the first group are freed while the next one is reduced, and at the end nothing is in flight."""
    model = mixer("nvfp4", mode="dequantize", layers=LAYERS)
    backward(model)
    for param in model.parameters():
        param.grad = None
    kept: list[list[weakref.ref[Tensor]]] = []
    found = reductions.gradients_of

    def noting(group: Any) -> Any:
        assert not any(grad() is not None for before in kept for grad in before)
        grads = found(group)
        kept.append([weakref.ref(grad) for grad in grads or ()])
        return grads

    with mock.patch.object(reductions, "gradients_of", noting):
        backward(model)
    assert [len(grads) for grads in kept] == [7] * LAYERS
    assert not any(grad() is not None for grads in kept for grad in grads)
    context = model[0]._get_fsdp_state()._fsdp_param_group.comm_ctx
    assert not getattr(context, "reduce_scatter_states", ())
    assert getattr(context, "reduce_scatter_state", None) is None


def is_another_torch(name: str) -> None:
    """One without a name that is used here: FSDP2 reduces, which is said once."""
    with counted(lambda: False):
        expected = stepped(mixer("nvfp4", mode="dequantize", layers=LAYERS))
    names = (*reductions._OF_GROUP, name)
    with (
        mock.patch.object(reductions, "_OF_GROUP", names),
        counted() as taken,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        assert same(stepped(mixer("nvfp4", mode="dequantize", layers=LAYERS)), expected)
    assert not taken
    assert [str(one.message) for one in said if name in str(one.message)] == [
        f"torch {torch.__version__} has changed {name} of FSDP2, so reductions take FSDP2's own steps: the same bytes, "
        "in more time of the host; `layoutc doctor` says which releases layoutc knows"
    ]


def gathers_in_another_torch(name: str) -> None:
    """One without a name that gathers use: FSDP2 gathers, in groups of values and of codes, which is said once."""
    names = (*planned_groups._OF_GROUP, name)
    with (
        mock.patch.object(planned_groups, "_OF_GROUP", names),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        models = [mixer("nvfp4", mode=mode, layers=LAYERS) for mode in ("dequantize", "reference")]
        for model in models:
            backward(model)
    mine = {id(parameter) for model in models for parameter in model.parameters()}
    groups = [group for param, group in registry.parameters() if id(param.sharded_param) in mine]
    assert groups
    assert steady_group.SteadyGroup not in map(type, groups)
    assert [f"{name} of FSDP2, so gathers and reductions" in str(one.message) for one in said].count(True) == 1


def test_another_torch(two: Ranks) -> None:
    two.run(is_another_torch, "_no_such_name")
    two.run(gathers_in_another_torch, "_no_name_either")


@on("two")
def test_profiles_show_reductions_as_fsdp2_does() -> None:
    model = mixer("nvfp4", mode="dequantize", layers=LAYERS)
    backward(model)
    for param in model.parameters():
        param.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, counted() as taken:
        backward(model)
    names = [event.name.split(" ")[0] for event in profile.events()]
    assert len(taken) == LAYERS
    assert names.count("FSDP::post_backward_reduce") == LAYERS


@on("two")
def test_sums_that_an_exchange_leaves_to_fsdp2() -> None:
    """Of bf16 weights that were frozen in the first forward: FSDP2 adds up their gradients in bf16."""
    found = []
    for allowed in (False, True):
        model = mixer("nvfp4", mode="dequantize", layers=LAYERS, kind=lambda width: Mixer(width).bfloat16())
        model.requires_grad_(False)
        layoutc.exchange_gradients(model)
        model(torch.ones(4, 256))
        model.requires_grad_(True)
        with counted(lambda allowed=allowed: allowed) as taken:
            found.append(stepped(model))
        assert bool(taken) is allowed
    assert same(*found)


@on("two")
def test_gradients_of_another_dtype() -> None:
    """What is kept of a reduction is not taken for gradients that are reduced in another dtype."""
    found = []
    for changed in (False, True):
        model = mixer("nvfp4", mixed=False, mode="dequantize", layers=LAYERS)
        with counted() as taken:
            seen = stepped(model)
            for layer in model:
                group = layer._get_fsdp_state()._fsdp_param_group
                assert group._reduce_dtype is None
                assert group._reduction.dtype is torch.float32
                if changed:
                    group._reduction = group._reduction._replace(dtype=torch.bfloat16)
            seen += stepped(model)
        assert len(taken) == 4 * LAYERS
        found.append(seen)
    assert same(*found)
