"""Weights cast on gather: any optimizer trains them under fully_shard as one process does, to the bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Ranks, mesh_of, on
from models import (
    Model,
    assert_equal_on_all_ranks,
    assert_same_tensors,
    batch,
    build,
    counted,
    gathers,
    make_uneven,
    my_share,
    raw,
    recipe_module,
    shard,
    width_for,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

import layoutc
from layoutc.ints.sizes import cdiv
from layoutc.runtime.errors import LayoutError

STEPS, FEW = 6, 3  # of one recipe whose history of amaxes goes on; of all others
TWO = 2  # with other options: the first sets up, the second is like all that follow, and its values are compared, too
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=True),
    "single": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=False, fused=False),
    "fused": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def build_plain(width: int, inner: int | None = None) -> Model:
    """The same model in fp32 on every rank."""
    torch.manual_seed(0)
    model = Model(width, inner)
    make_uneven(model)
    return model


def build_cast(recipe: str, width: int, inner: int | None = None) -> Model:
    """The same model on every rank, to be gathered in a recipe."""
    model = build_plain(width, inner)
    assert layoutc.cast_on_gather_(model, recipe) == ["layers.0.weight", "layers.1.weight", "head.weight"]
    return model


class OneProcess:
    """The reference, which knows nothing of gathers: each step runs on quantized copies of a plain model's weights."""

    def __init__(self, recipe: str, optimizer: str, width: int, inner: int | None, dtype: torch.dtype) -> None:
        self.quantize = recipe_module(recipe).quantize
        self.model = build_plain(width, inner).to(torch.promote_types(dtype, torch.float32))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.dtype = dtype
        self.weights: dict[str, Any] = {}

    def step(self, step: int, width: int) -> float:
        """One step; the loss before it."""
        used: dict[str, Tensor] = {}
        for name, param in self.model.named_parameters():
            if param.dim() == 2:
                # Into the tensor of the step before, whose history of amaxes goes on where the recipe has one.
                held = self.weights[name] = self.quantize(param.detach().float(), out=self.weights.get(name))
                used[name] = nn.Parameter(held.with_planes(held.store.planes, dtype=self.dtype))
            else:
                used[name] = nn.Parameter(param.detach().to(self.dtype))
        x, y = batch(step, width)
        loss = (functional_call(self.model, used, x.to(self.dtype)) - y).square().mean()
        loss.backward()
        for name, param in self.model.named_parameters():
            grad = used[name].grad
            assert grad is not None
            param.grad = grad.to(param.dtype)
        self.optimizer.step()
        return loss.item()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, width: int, share: float) -> float:
    """One step; the loss before it."""
    x, y = batch(step, width)
    loss = (model(x.to(next(model.parameters()).dtype)) - y).square().mean()
    (loss * share).backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def assert_same_values(model: nn.Module, plain: nn.Module) -> None:
    """Parameters are those of a plain model, byte for byte."""
    for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        full = param.full_tensor() if isinstance(param, DTensor) else param.detach()
        assert torch.equal(raw(full), raw(whole)), name


def planned_bytes(recipe: str, model: Model, world: int, keeps: bool) -> int:
    """Bytes from one rank in a step: quantized weights and plain biases."""
    layout, total = recipe_module(recipe).LAYOUT, 0
    for module, stays in ((model.layers[0], keeps), (model.layers[1], keeps), (model.head, True)):
        for param in module.parameters():
            if param.dim() == 2:
                passes = ("both",) if stays else ("forward", "backward")
                total += sum(layout.gather(*param.shape, world, which).bytes_per_rank for which in passes)
            else:
                total += cdiv(param.numel(), world) * param.element_size() * (1 if stays else 2)
    return total


def trains(
    recipe: str,
    optimizer: str = "fused",
    keeps: bool = False,
    meshed: str | None = None,
    sizes: tuple[int, int] | None = None,
    precomputed: bool = False,
    feature: str | None = None,
    steps: int = TWO,
) -> None:
    """Loss curve, values, gathered bytes, classes, collectives: all as in one process."""
    ranks, dequantized = dist.get_world_size(), layoutc.implicit_dequantizes()
    options: dict[str, Any] = {"reshard_after_forward": not keeps}
    if meshed is not None:
        shape = {"hybrid": (2, ranks // 2), "one": (ranks, 1), "trivial": (ranks, 1)}[meshed]
        mesh = mesh_of(*shape, names=("copies", "slices"))
        options["mesh"] = mesh["slices"] if meshed == "one" else mesh
        ranks = shape[1]
    if feature == "columns":
        options["shard_placement_fn"] = lambda param: Shard(1) if param.dim() == 2 else None
    dtype = {"policy": torch.bfloat16, "double": torch.float64}.get(feature or "", torch.float32)
    if feature == "policy":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    width, inner = sizes or (width_for(recipe, ranks),) * 2
    reference = OneProcess(recipe, optimizer, width, inner, dtype)
    model = build_cast(recipe, width, inner)
    if feature == "checkpoint":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model.layers = nn.ModuleList([checkpoint_wrapper(layer) for layer in model.layers])
    shard(model, **options)
    if feature == "double":
        model.double()
    trained = OPTIMIZERS[optimizer](model.parameters())
    plan = planned_bytes(recipe, reference.model, ranks, keeps) if sizes is None and feature is None else None
    share = 1.0 if meshed == "one" else my_share()
    for step in range(steps):
        expected = reference.step(step, width)
        with gathers() as sent, counted("all_reduce", lambda tensor, *_, **__: tensor.dtype) as reduced:
            if precomputed:
                layoutc.precompute_amaxes(model)
            loss = step_of(model, trained, step, width, share)
        assert loss == expected, f"step {step}: {loss} is not {expected}"
        each = 1 if precomputed else 3 if keeps else 5
        if feature is None:
            shares = recipe_module(recipe).LAYOUT.shares_amax and ranks > 1
            assert reduced.count(torch.int32) == (each if shares else 0)
        if plan is not None:
            assert sum(sent) == (plan if ranks > 1 else 0)
    assert_same_values(model, reference.model)
    if feature is None:
        assert_gathers(recipe, model, reference)
    casts = recipe_module(recipe).CastTensor
    assert {type(p._local_tensor) for p in model.parameters() if p.dim() == 2} == {casts}  # type: ignore[attr-defined]
    assert layoutc.implicit_dequantizes() == dequantized
    state = get_optimizer_state_dict(model, trained)["state"]
    held = {type(v.to_local() if isinstance(v, DTensor) else v) for one in state.values() for v in one.values()}
    assert held <= {Tensor}


def assert_gathers(recipe: str, model: Model, reference: OneProcess) -> None:
    """Gathered weights are the whole quantized weights, byte for byte."""
    modules = [module for module in (*model.layers, model) if isinstance(module, FSDPModule)]
    wholes = {name: param.detach() for name, param in reference.model.named_parameters() if param.dim() == 2}
    for module in modules:
        module.unshard()
    for name, param in model.named_parameters():
        if name in wholes:
            whole = recipe_module(recipe).quantize(wholes[name], out=reference.weights[name])
            assert type(param) is type(whole)
            assert_same_tensors(param.buffers(), whole.buffers())
    for module in modules:
        module.reshard()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("recipe", "keeps", "precomputed"),
    [
        ("fp8_delayed", False, False),
        ("fp8_delayed", True, True),
        ("fp8_current", False, True),
        ("nvfp4", True, False),
        ("nvfp4", False, False),
        ("fp8_block", True, False),
        ("mxfp8", False, False),
        ("int8_rowwise", True, False),
        ("mxfp6_e2m3", False, False),
    ],
)
def test_two_ranks_train_as_one_process(two: Ranks, recipe: str, keeps: bool, precomputed: bool) -> None:
    """Values and losses; bytes gathered as planned; amaxes reduced at gathers, or once before them."""
    steps = STEPS if recipe == "fp8_delayed" and not keeps else FEW
    two.run(trains, recipe, "adamw" if keeps else "fused", keeps, None, None, precomputed, None, steps)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "optimizer"), [("mxfp8", "foreach"), ("fp8_delayed", "single"), ("mxfp8", "sgd")])
def test_any_optimizer_trains_as_in_one_process(two: Ranks, recipe: str, optimizer: str) -> None:
    """In-place, list and fused operators write values."""
    two.run(trains, recipe, optimizer, False, None, None, False, None, 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "meshed"), [("fp8_delayed", "hybrid"), ("fp8_block", None), ("nvfp4", "hybrid")])
def test_four_ranks_train_as_one_process(four: Ranks, recipe: str, meshed: str | None) -> None:
    """Sharded over 4, and over 2 in 2 copies."""
    four.run(trains, recipe, "fused", False, meshed)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "meshed"), [("fp8_delayed", "one"), ("nvfp4", "trivial"), ("mxfp8", "one")])
def test_a_group_of_one_rank_trains_as_one_process(two: Ranks, recipe: str, meshed: str) -> None:
    """Nothing is gathered, and the weight is quantized all the same."""
    two.run(trains, recipe, "fused", False, meshed)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "sizes", "precomputed"),
    [("fp8_delayed", (17, 8), False), ("fp8_current", (1, 3), False), ("fp8_current", (3, 17), True)],
)
def test_uneven_rows_train_as_one_process(four: Ranks, recipe: str, sizes: tuple[int, int], precomputed: bool) -> None:
    """Short shards, and ranks without rows."""
    four.run(trains, recipe, "adamw", False, None, sizes, precomputed)  # fused: rounds short rows differently


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "feature"), [("fp8_delayed", "policy"), ("nvfp4", "checkpoint")])
def test_features_of_fsdp2_change_nothing(two: Ranks, recipe: str, feature: str) -> None:
    """Gathers for bf16 products, recomputed activations."""
    two.run(trains, recipe, "fused", False, None, None, False, feature)


def checkpoints(recipe: str, folder: str) -> None:
    """Saved as plain values: an ordinary model loads them, sharded or not, and what that saves loads back."""
    width = width_for(recipe, dist.get_world_size())
    model = shard(build_cast(recipe, width))
    optimizer = OPTIMIZERS["fused"](model.parameters())
    layoutc.precompute_amaxes(model)
    step_of(model, optimizer, 0, width, my_share())
    state = model.state_dict()
    assert {type(value.to_local()) for value in state.values()} == {Tensor}
    dcp.save(state, checkpoint_id=f"{folder}/cast")

    plain, sharded = build_plain(width), shard(build_plain(width))
    for one in (plain, sharded):
        loaded = one.state_dict()
        for value in loaded.values():
            value.zero_()
        dcp.load(loaded, checkpoint_id=f"{folder}/cast", no_dist=one is plain)
        one.load_state_dict(loaded)
    assert_same_values(model, plain)
    assert_same_values(sharded, plain)

    other = OPTIMIZERS["fused"](sharded.parameters())
    step_of(sharded, other, 1, width, my_share())
    dcp.save(sharded.state_dict(), checkpoint_id=f"{folder}/plain")
    expected = build_cast(recipe, width)
    expected.load_state_dict(get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True)))
    for way in ("in place", "load", "assign", "full"):
        back = shard(build_cast(recipe, width))
        layoutc.precompute_amaxes(back)
        back(torch.zeros(1, width))
        back.reshard()  # type: ignore[operator]
        if way == "full":
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            whole = expected.state_dict() if dist.get_rank() == 0 else {}
            set_model_state_dict(back, whole, options=options)
        else:
            loaded = back.state_dict()
            dcp.load(loaded, checkpoint_id=f"{folder}/plain")
            if way != "in place":
                back.load_state_dict(loaded, assign=way == "assign")
        assert_same_values(back, expected)
        if way == "in place" and recipe == "fp8_delayed":
            continue  # a history follows values that are overwritten in place, and does not know that it should not
        x, _ = batch(2, width)
        assert torch.equal(back(x), expected(x)), way


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4", "fp8_block"])
def test_checkpoints_hold_plain_values(two: Ranks, recipe: str) -> None:
    """Saved sharded, loaded into ordinary models, and back in each way that torch has; scales follow what is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        two.run(checkpoints, recipe, folder)


def loads_in_between(recipe: str, sizes: tuple[int, int], precomputed: bool) -> None:
    """FSDP2 moves short shards, and no others, when they are loaded: ranks go on agreeing."""
    reference = OneProcess(recipe, "adamw", *sizes, torch.float32)
    model = shard(build_cast(recipe, *sizes))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step in range(5):
        if step in (2, 3):
            model.load_state_dict(model.state_dict(), assign=step == 3)
            reference.weights.clear()  # a history starts anew
            if step == 3:
                optimizer = OPTIMIZERS["adamw"](model.parameters())
                reference.optimizer = OPTIMIZERS["adamw"](reference.model.parameters())
        expected = reference.step(step, sizes[0])
        if precomputed:
            layoutc.precompute_amaxes(model)
        assert step_of(model, optimizer, step, sizes[0], my_share()) == expected, step
    assert_same_values(model, reference.model)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "sizes", "precomputed"), [("fp8_delayed", (17, 8), False), ("fp8_current", (3, 17), True)]
)
def test_ranks_agree_on_uneven_rows_that_are_loaded_while_training(
    four: Ranks, recipe: str, sizes: tuple[int, int], precomputed: bool
) -> None:
    """State dicts of the model itself, copied and assigned."""
    four.run(loads_in_between, recipe, sizes, precomputed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4_4over6"])
def test_shards_that_cut_blocks_train_as_one_process(four: Ranks, recipe: str) -> None:
    """Each gather tells the ranks on both sides of a cut what decides a block's scale."""
    unit = recipe_module(recipe).LAYOUT.block_rows
    four.run(trains, recipe, "fused", False, None, (3 * unit, unit))


def test_shards_in_fp64_train_as_one_process(two: Ranks) -> None:
    """model.double() after fully_shard: what is gathered are the values rounded to fp32, quantized."""
    two.run(trains, "fp8_block", "fused", False, None, None, False, "double")


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
def test_columns_shard_where_the_layout_allows(two: Ranks, recipe: str) -> None:
    """Shard(1) of matrices."""
    two.run(trains, recipe, "fused", False, None, None, False, "columns")


def refuses(recipe: str) -> str:
    """The message for columns that can't be gathered, and whether the group still works."""
    model = build_cast(recipe, 3 * recipe_module(recipe).LAYOUT.column_multiple)
    try:
        fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
        model(torch.zeros(1, model.head.in_features))
    except LayoutError as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_what_does_not_shard_is_refused_on_every_rank(two: Ranks) -> None:
    """Cuts between columns inside a block, in the first forward."""
    message = two.told(refuses, "mxfp8")
    assert "layers.0.weight" in message
    assert "must fall at a multiple of 32" in message


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
@on("two")
def test_ranks_agree_on_an_amax_that_one_of_them_has_changed(recipe: str) -> None:
    """One rank's write moves the scale, and a history, of all. Without precomputed amaxes nothing is remembered, so
    that ranks agree whoever has written below the DTensor."""
    width = width_for(recipe, dist.get_world_size())
    model = shard(build_cast(recipe, width))
    x, _ = batch(0, width)
    model(x)
    if dist.get_rank() == 0:
        weight: Any = model.layers[0].weight
        weight._local_tensor.plain.mul_(4)
    out = model(x)
    assert_equal_on_all_ranks(out.tolist())
    layoutc.precompute_amaxes(model)
    assert torch.equal(model(x), out)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
@on("two")
def test_a_dispatch_mode_changes_nothing(recipe: str) -> None:
    """Shards go on sharing their amaxes under modes that watch operators, though modes also serve to trace. Steps under
    a dispatch mode of the user's, against steps without."""
    curves = []
    for watched in (False, True):
        model = shard(build_cast(recipe, width := width_for(recipe, dist.get_world_size())))
        optimizer = OPTIMIZERS["fused"](model.parameters())
        with FlopCounterMode(display=False) if watched else nullcontext():
            curves.append([step_of(model, optimizer, step, width, my_share()) for step in range(4)])
    assert curves[0] == curves[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "use", "backend"),
    [
        ("nvfp4", "cast", None),
        ("mxfp8", "quantized", None),
        ("fp8_current", "cast", "aot_eager"),
        ("int8_rowwise", "cast", None),
        ("nvfp4", "quantized", "aot_eager"),
    ],
)
@on("two")
def test_autocast_trains_as_in_one_process(recipe: str, use: str, backend: str | None) -> None:
    """FSDP2 gathers what the fp32 values quantize to, so one process quantizes these too, and rounds afterwards."""
    width, curves = width_for(recipe, dist.get_world_size()), []
    for world in (1, dist.get_world_size()):
        torch._dynamo.reset()
        model = build_cast(recipe, width) if use == "cast" else build(recipe, width)
        for layer in model.layers if backend else ():
            layer.compile(backend=backend)
        sharded = shard(model) if world > 1 else model
        params = sharded.parameters()
        optimizer = (
            torch.optim.AdamW(params, lr=1e-2)
            if use == "cast"
            else layoutc.MasterWeights(torch.optim.AdamW, params, lr=1e-2)
        )
        losses = []
        for step in range(FEW):
            x, y = batch(step, width)
            with torch.autocast("cpu", torch.bfloat16):
                loss = (sharded(x) - y).square().mean()
            (loss * (my_share() if world > 1 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        curves.append(losses)
    assert curves[0] == curves[1], curves


@pytest.mark.thorough
@on("two")
def test_compiled_functions_write_shards_and_their_views() -> None:
    """A compiled optimizer's writes to parameters, to flat views of them, and to parts of shards."""
    recipe = "mxfp8"

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    def grow(target: Tensor) -> None:
        target.add_(1)

    views: list[Callable[[Any], Tensor]] = [
        lambda param: param,
        lambda param: param.view(-1),
        lambda param: param.to_local().view(-1)[::2],
        lambda param: param.to_local().t(),
    ]
    torch._dynamo.reset()
    cast, plain = shard(build_cast(recipe, 128)), shard(build_plain(128))
    for view in views:
        with torch.no_grad():
            grow(view(cast.head.weight))
            view(plain.head.weight).add_(1)
        assert torch.equal(*(raw(model.head.weight.to_local()) for model in (cast, plain)))  # type: ignore[operator]


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current"])
@on("four")
def test_short_shards_are_gathered_after_a_load(recipe: str) -> None:
    """FSDP2 pads short shards anew after a load; a rank may have no rows."""
    rows = recipe_module(recipe).LAYOUT.multiple_m
    for count in (rows, 3 * rows, 5 * rows):
        torch.manual_seed(count)
        model, loaded = nn.Linear(64, count, bias=False), nn.Linear(64, count, bias=False)
        layoutc.cast_on_gather_(model, recipe)
        fully_shard(model)
        model.load_state_dict(
            {
                name: distribute_tensor(loaded.get_parameter(name).detach(), param.device_mesh, param.placements)
                for name, param in model.named_parameters()
                if isinstance(param, DTensor)
            }
        )
        layoutc.cast_on_gather_(loaded, recipe)
        x = torch.ones(2, 64)
        assert torch.equal(model(x), loaded(x))
        model.unshard()
        assert_same_tensors(model.weight.data.planes(), loaded.weight.data.quantize().planes())
        model.reshard()
