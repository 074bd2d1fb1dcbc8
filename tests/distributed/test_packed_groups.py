"""Groups whose weights travel in one pack: gathered in few steps, they are what FSDP2's own steps make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import product_modes
import pytest
import torch
import torch.distributed as dist
from harness import Ranks, on
from test_gather_groups import kernels_on_cpu
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import layoutc
from layoutc.runtime.cast.into_row import IntoRow
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.fsdp2.steady_group import SteadyGroup
from layoutc.runtime.sharding.registry import parameters

ON_GATHER = "gather"
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Mixer(nn.Module):
    """Plain parameters before, between and after quantized weights; the shards of one are padded."""

    def __init__(self, width: int, scale: tuple[int, int] = (15, 4)) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=True)
        self.scale = nn.Parameter(torch.randn(scale))
        self.down = nn.Linear(2 * width, width, bias=False)
        self.after = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> the same."""
        hidden = torch.tanh(self.up(self.before(x))) * self.scale.sum()
        return self.after(x + self.down(hidden))


class Narrow(nn.Module):
    """A weight of few rows."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.keys = nn.Linear(width, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> the same."""
        return x + torch.tanh(self.keys(self.before(x))).sum(1, keepdim=True)


class Pair(Narrow):
    """Two such weights, each with a bias."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.keys, self.values = (nn.Linear(width, rows) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> the same."""
        normed = self.before(x)
        return x + torch.tanh(self.keys(normed) + self.values(normed)).sum(1, keepdim=True)


def mixer(
    recipe: str,
    cast: bool = False,
    mixed: bool = True,
    seed: int = 0,
    width: int = 256,
    layers: int = 2,
    mode: str = ON_GATHER,
    kind: Callable[[int], nn.Module] = Mixer,
    **options: Any,
) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(*[kind(width) for _ in range(layers)])
    (layoutc.cast_on_gather_ if cast else layoutc.quantize_)(model, recipe)
    product_modes.set_products_(model, mode)
    for layer in model:
        fully_shard(layer, mp_policy=MIXED if mixed else MixedPrecisionPolicy(), **options)
    fully_shard(model)
    return model


@contextmanager
def counted(allowed: Callable[[], bool] = lambda: True) -> Iterator[list[str]]:
    """The gathers that are taken in few steps, where that is allowed."""
    taken: list[str] = []
    begun, rest = SteadyGroup._begun, SteadyGroup._is_at_rest

    def counting(self: Any, *args: Any) -> Any:
        taken.append("begun")
        return begun(self, *args)

    with (
        mock.patch.object(SteadyGroup, "_begun", counting),
        mock.patch.object(SteadyGroup, "_is_at_rest", lambda self: allowed() and rest(self)),
    ):
        yield taken


def trained(model: Any, steps: int = 2, after: Callable[[int], None] = lambda _: None) -> list[Tensor]:
    """Losses and gradients of steps that write weights, and what the last gather leaves."""
    seen: list[Tensor] = []
    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        loss = model(torch.randn(4, model[0].before.normalized_shape[0])).float().square().mean()
        loss.backward()
        seen.append(loss.detach())
        for param in model.parameters():
            assert param.grad is not None
            seen.append(param.grad.to_local().clone())
            with torch.no_grad():
                param.to_local().mul_(0.99)
            param.grad = None
        after(step)
    for layer in model:
        layer.unshard()
        seen += [param.detach().clone() for param in layer.parameters()]
        layer.reshard()
    return seen


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def is_the_same(recipe: str, cast: bool, mixed: bool, kernels: bool, width: int = 256) -> None:
    """As FSDP2's own steps; and where the last rank takes these, and others those."""
    layers = 1 if kernels else 2
    make = partial(mixer, recipe, cast, mixed, width=width, layers=layers)
    # Forward and backward, less the first; and at the end.
    are_the_same(lambda: trained(make()), layers * (2 * 2 - 1) + layers, kernels)


def are_the_same(steps: Callable[[], list[Tensor]], gathers: int, kernels: bool) -> None:
    """kernels: by these, which take seconds, in the run alone that has both: a rank's row is read by the others'
    steps. What they are compared with is the reference's.
    """
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with counted(lambda: False) as taken:
        expected = steps()
    assert not taken
    if not kernels:
        with counted() as taken:
            assert same(steps(), expected)
        assert len(taken) == gathers
    with kernels_on_cpu() if kernels else nullcontext(), counted(lambda: is_last) as taken:
        assert same(steps(), expected)
    assert len(taken) == gathers * is_last


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "cast", "mixed"), [("nvfp4", False, True), ("fp8_block", True, False), ("fp8_current", False, False)]
)
def test_the_values_of_fsdp2s_own_steps(two: Ranks, recipe: str, cast: bool, mixed: bool) -> None:
    two.run(is_the_same, recipe, cast, mixed, False)


@pytest.mark.thorough
def test_by_kernels(two: Ranks) -> None:
    two.run(is_the_same, "nvfp4", True, True, True, 64)


@contextmanager
def quantizing(allowed: Callable[[], bool] = lambda: True) -> Iterator[list[bool]]:
    """The gathers that quantized weights where they are sent from, where that is allowed."""
    taken: list[bool] = []
    call, holds = IntoRow.by_kernels, IntoRow.holds

    def noting(self: IntoRow, sent: Tensor) -> None:
        taken.append(True)
        call(self, sent)

    with (
        mock.patch.object(IntoRow, "by_kernels", noting),
        mock.patch.object(IntoRow, "holds", lambda self: allowed() and holds(self)),
    ):
        yield taken


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "mixed", "precomputed", "width"),
    [
        ("nvfp4", True, True, 64),
        ("fp8_delayed", False, False, 64),
        ("nvfp4", False, False, 64),
        ("fp8_block", True, False, 256),
        ("fp8_channel_bf16", True, False, 256),  # each orientation takes a launch of its own
    ],
)
@on("two")
def test_cast_weights_are_quantized_where_they_are_sent_from(
    recipe: str, mixed: bool, precomputed: bool, width: int
) -> None:
    """As weights whose hooks quantize, by the reference; where the first rank asks hooks."""

    def steps() -> list[Tensor]:
        model = mixer(recipe, True, mixed, width=width, layers=1)
        return trained(model, 2, lambda _: layoutc.precompute_amaxes(model) if precomputed else None)

    with quantizing() as taken:
        expected = steps()
    assert not any(taken)
    with kernels_on_cpu(), quantizing(lambda: dist.get_rank() == 1) as taken:
        assert same(steps(), expected)
    assert taken == [True] * 4 * dist.get_rank()  # all but the first gather


@pytest.mark.thorough
@on("two")
def test_cast_weights_that_move() -> None:
    """Other values in a shard, in other memory; and a write into gathered values, which is refused."""

    def moved(model: Any, step: int) -> None:
        for param in model.parameters():
            local = param.to_local()
            with torch.no_grad():
                if step == 0:
                    local.data = local.data.clone().mul_(2)
                else:
                    local.add_(1)

    found: list[list[Tensor]] = []
    for kernels in (False, True):
        with kernels_on_cpu() if kernels else nullcontext(), quantizing() as taken:
            model = mixer("fp8_current", True, width=128, layers=1)
            found.append(trained(model, 3, partial(moved, model)))
            assert any(taken) is kernels
            (layer,) = model
            layer.unshard()
            with torch.no_grad():
                layer.up.weight.mul_(2)
            layer.reshard()
            with pytest.raises(LayoutError, match="was written while it was gathered"):
                layer.unshard()
    assert same(*found)


def codes_are_the_same(
    recipe: str,
    cast: bool,
    kernels: bool,
    width: int,
    options: dict[str, Any],
    kind: Callable[[int], nn.Module] = Mixer,
) -> None:
    """As FSDP2's own steps, of weights whose gathers leave codes; and where some ranks take these, and others those."""
    layers = 1 if kernels else 2
    make = partial(mixer, recipe, cast, width=width, layers=layers, mode="dequantize", kind=kind, **options)
    passes = 1 if options.get("reshard_after_forward", True) is False else 2
    # All but the first gather.
    are_the_same(lambda: codes_trained(make(), 2), layers * (2 * passes - 1) + layers, kernels)


def codes_trained(model: Any, steps: int) -> list[Tensor]:
    """As `trained`; codes and scales in place of values."""
    seen: list[Tensor] = []
    for one in trained(model, steps):
        planes = one.planes().values() if hasattr(one, "planes") else [one]
        seen += [plane.reshape(-1).view(torch.uint8) for plane in planes]
    return seen


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("nvfp4", {}),
        ("mxfp8", {"reshard_after_forward": False}),
        ("fp8_rowwise", {}),  # backward has fewer planes
        ("fp8_block_1d", {}),  # other planes, of the same sizes
        ("hybrid_fp8", {}),  # backward's scales are fewer, and filled up
        ("fp8_channel_bf16", {}),  # forward's are
    ],
)
def test_codes_of_fsdp2s_own_steps(two: Ranks, recipe: str, options: dict[str, Any]) -> None:
    two.run(codes_are_the_same, recipe, False, False, 256, options)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "cast", "width", "options"),
    [
        ("mxfp8", False, 64, {}),
        ("nvfp4", True, 64, {}),
        ("fp8_current", True, 64, {"reshard_after_forward": False}),
        ("fp8_block_1d", True, 256, {}),
    ],
)
def test_codes_by_kernels(two: Ranks, recipe: str, cast: bool, width: int, options: dict[str, Any]) -> None:
    two.run(codes_are_the_same, recipe, cast, True, width, options)


@pytest.mark.thorough
@pytest.mark.parametrize(("recipe", "cast"), [("hybrid_fp8", False), ("fp8_channel_bf16", True)])
def test_planes_that_are_smaller_in_one_pass(two: Ranks, recipe: str, cast: bool) -> None:
    two.run(codes_are_the_same, recipe, cast, True, 256, {}, partial(Narrow, 256))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "rows", "kernels", "options"),
    [
        ("fp8_block", 128, False, {}),  # each rank has half of a block
        ("fp8_block", 128, False, {"reshard_after_forward": False}),
        ("fp8_block", 192, True, {}),  # one rank has rows of one block, the other of two
        ("hybrid_fp8", 128, False, {}),  # in backward, where they fill a part of what forward sends
        ("hybrid_fp8", 192, False, {}),
    ],
)
def test_scales_of_blocks_that_cuts_split(
    two: Ranks, recipe: str, rows: int, kernels: bool, options: dict[str, Any]
) -> None:
    """They arrive from both ranks, and are picked."""
    two.run(codes_are_the_same, recipe, False, kernels, 512, options, partial(Narrow, rows))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "rows", "kernels", "options"),
    [
        ("fp8_current", 65, False, {}),
        ("e3m4_block", 129, False, {}),
        ("nvfp4", 48, True, {"reshard_after_forward": False}),  # cuts split blocks of 16 rows
    ],
)
def test_shards_that_are_short(two: Ranks, recipe: str, rows: int, kernels: bool, options: dict[str, Any]) -> None:
    """What is missing of them is not written."""
    two.run(codes_are_the_same, recipe, False, kernels, 512, options, partial(Narrow, rows))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "rows"), [("fp8_current", 2), ("fp8_block", 130)])
def test_shards_of_four_ranks(four: Ranks, recipe: str, rows: int) -> None:
    """The last ones are short, or have no rows."""
    four.run(codes_are_the_same, recipe, False, False, 512, {}, partial(Narrow, rows))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("recipe", "cast", "mixed", "rows", "width"),
    [
        ("fp8_rowwise", False, False, 65, 16),  # 33 and 32 scales of four bytes
        ("hybrid_fp8", True, True, 256, 128),  # a scale of four bytes on each rank
        ("fp8_channel_bf16", False, True, 260, 16),  # a slot of 260 bytes, of which 64 are the plane's
        ("mxfp8", True, False, 96, 64),  # 48 rows of blocks of 32, which forward's planes do not show
    ],
)
@on("two")
def test_parts_of_odd_sizes(recipe: str, cast: bool, mixed: bool, rows: int, width: int) -> None:
    """Parts of ranks that are no multiples of 8 bytes, where those of all ranks together are one."""

    def steps() -> list[Tensor]:
        kind = partial(Pair, rows)
        return codes_trained(mixer(recipe, cast, mixed, width=width, layers=1, mode="dequantize", kind=kind), 2)

    with counted(lambda: False):
        expected = steps()
    with kernels_on_cpu(), counted(lambda: dist.get_rank() == 0):
        assert same(steps(), expected)


@on("two")
def test_gathers_ahead_of_time() -> None:
    """Asynchronous gathers, ones that are waited for in backward's order, and explicit prefetching."""
    model = mixer("fp8_current")
    expected = trained(mixer("fp8_current"), 3)
    first, second = model
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])

    def ahead(_: int) -> None:
        handles = [layer.unshard(async_op=True) for layer in model]
        for handle in handles:
            handle.wait()
        for layer in model:
            layer.reshard()

    with counted() as taken:
        assert same(trained(model, 3, ahead), expected)
    assert len(taken) > 10


class OwnGather:
    """A user's collective: counts the bytes that it is asked for, and sends them by torch's."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.sent: list[int] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        made = torch.empty(*size, dtype=dtype, device=device)
        self.allocated.append(made.nbytes)
        return made

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.sent.append(input_tensor.nbytes)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@on("two")
def test_a_users_collective_sends_the_same_bytes() -> None:
    """Which is asked for the same bytes in both ways."""
    seen = []
    for allowed in (False, True):
        model, own = mixer("fp8_current"), OwnGather()
        for layer in model:
            layer.set_custom_all_gather(own)
        with counted(lambda allowed=allowed: allowed) as taken:
            seen.append(trained(model))
        assert bool(taken) is allowed
        assert own.allocated == [2 * nbytes for nbytes in own.sent]
        seen.append([torch.tensor(own.sent)])
    assert same(seen[0], seen[2])
    assert same(seen[1], seen[3])


def whole(model: Any) -> Iterator[Tensor]:
    for layer in model:
        layer.unshard()
        yield from layer.parameters()
        layer.reshard()


@on("two")
def test_shards_that_change() -> None:
    """Weights that are loaded, assigned or replaced between gathers, and parameters that are moved."""
    model, source = mixer("nvfp4"), mixer("nvfp4", seed=1)
    trained(model, 1)
    trained(source, 1)
    for assign in (False, True):
        model.load_state_dict(source.state_dict(), assign=assign)
        with counted() as taken:
            one = [param.detach().clone() for param in whole(model)]
        assert len(taken) == 2
        assert same(one, [param.detach().clone() for param in whole(source)])
        trained(source, 1)
    plain = model[0].before.weight
    with torch.no_grad():
        plain.to_local().copy_(torch.arange(128.0) + 128 * dist.get_rank())
    model[0].unshard()
    assert torch.equal(model[0].before.weight.detach(), torch.arange(256.0).bfloat16())
    model[0].reshard()


@on("two")
def test_what_fsdp2_gathers_itself() -> None:
    """Other modes, and parameters that are sent in a way of their own, which FSDP2 gathers."""
    model = mixer("fp8_current")
    trained(model, 1)
    product_modes.set_products_(model, "dequantize")
    with counted() as taken:
        trained(model, 1)
    assert len(taken) == 2 * len(model)  # in backward, and at the end
    product_modes.set_products_(model, ON_GATHER)
    with counted() as taken:
        trained(model, 2)
    assert taken
    columns = lambda param: Shard(1) if param.shape[-1] == 4 else None  # noqa: E731
    for scale, placement in (
        ((1, 1), None),
        ((15, 4), columns),
    ):  # rows of ranks that are no multiples of 8 bytes; cut columns
        layer = Mixer(256, scale)
        layoutc.quantize_(layer, "fp8_current")
        product_modes.set_products_(layer, ON_GATHER)
        fully_shard(layer, shard_placement_fn=placement)
        with counted() as taken:
            for _ in range(3):
                layer.unshard()  # type: ignore[operator]
                layer.reshard()  # type: ignore[operator]
        assert not taken


@on("two")
def test_evaluations_and_parameters_that_are_made_anew() -> None:
    """Without gradients, in inference mode, and in between steps; outputs that FSDP2 makes anew."""
    model = mixer("fp8_current")
    trained(model, 1)
    x = torch.randn(4, 256)
    expected = model(x).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with counted() as taken, context():
            assert torch.equal(model(x), expected)
        assert len(taken) == 2
    trained(model, 1)
    group = next(group for param, group in parameters() if getattr(param, "_module_info", None).module is model[0].up)
    plain = next(param for param in group.fsdp_params if param._module_info.module is model[0].before)
    before = plain.all_gather_outputs
    with torch.no_grad():
        model[0].before.weight.to_local().fill_(3.0)
    plain.all_gather_outputs = [torch.empty_like(before[0])]
    del plain._unsharded_param
    with counted(lambda: False):
        model[0].unshard()  # FSDP2 makes the parameter anew
        model[0].reshard()
    with torch.no_grad():
        model[0].before.weight.to_local().fill_(5.0)
    with counted() as taken:
        model[0].unshard()
    assert taken == ["begun"]
    assert torch.equal(model[0].before.weight.detach(), torch.full((256,), 5.0).bfloat16())
    model[0].reshard()


@on("two")
def test_profiles_show_gathers_as_fsdp2_does() -> None:
    model = mixer("fp8_current")
    trained(model, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, counted() as taken:
        model(torch.randn(4, 256))
    names = [event.name for event in profile.events()]
    assert len(taken) == 2
    for label in ("FSDP::all_gather", "FSDP::all_gather_copy_out"):
        assert sum(name.split(" ")[0] == label for name in names) >= 2, label


@on("two")
def test_what_a_gather_refuses() -> None:
    """A write into gathered values is refused before the next gather, which can be taken again."""
    model = mixer("fp8_current")
    trained(model, 1)
    model[0].unshard()
    with torch.no_grad():
        model[0].up.weight.zero_()
    model[0].reshard()
    with counted() as taken, pytest.raises(LayoutError, match="was written while it was gathered"):
        model[0].unshard()
    assert taken == ["begun"]
    dist.barrier()
    with counted() as taken:
        model[0].unshard()
        model[0].reshard()
    assert taken == ["begun"]


@pytest.mark.parametrize(("recipe", "inference"), [("fp8_current", True), ("nvfp4", False)])
@on("two")
def test_scales_of_weights_that_stay_gathered(recipe: str, inference: bool) -> None:
    """While weights are gathered: they keep the scales that they were gathered with, in memory that stays."""
    found: list[list[Tensor]] = []
    for allowed in (False, True):
        model = mixer(recipe, layers=1, mode="dequantize")
        (layer,) = model
        shards = [layer.up.weight, layer.down.weight]
        places, seen = [], []
        for turn in range(5):
            with counted(lambda: allowed) as taken, torch.inference_mode(inference and turn == 1):  # noqa: B023
                layer.unshard()
            gathered = [layer.up.weight, layer.down.weight]
            shared = [one.planes()[name] for one in gathered for name in one.LAYOUT.shared]
            assert len(shared) == 2
            versions = [plane._version for plane in shared if not plane.is_inference()]
            before = [weight.dequantize() for weight in gathered]
            with torch.no_grad():
                for param in shards:
                    param.to_local().mul_(3)  # quantized anew, with another scale
            assert same([weight.dequantize() for weight in gathered], before)
            assert [plane._version for plane in shared if not plane.is_inference()] == versions
            seen += before
            if taken:
                places.append([plane.data_ptr() for plane in shared])
            layer.reshard()
        assert all(place == places[0] for place in places)
        assert len(places) >= 3 * allowed
        found.append(seen)
    assert same(*found)
