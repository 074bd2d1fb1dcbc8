"""DTensors of quantized weights: redistributed as bytes, under tensor parallelism with FSDP2, and as SimpleFSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Ranks, mesh_of, on
from models import (
    RECIPES,
    SHARED,
    adam,
    assert_equal_on_all_ranks,
    assert_same_tensors,
    build,
    recipe_module,
    shared_bytes,
    train_step,
    width_for,
)
from torch import Tensor, nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import layoutc
from layoutc.runtime.errors import LayoutError, UnsupportedOperator
from layoutc.runtime.weight.tensor import QuantizedTensor

ODD = ("fp8_rowwise", "mxfp6_e2m3")  # scales of whole rows and whole columns; elements across bytes


def side(recipe: str) -> int:
    """Of a matrix whose rows, and whose columns, four ranks cut between blocks."""
    layout = recipe_module(recipe).LAYOUT
    return 4 * max(32, layout.block_rows, layout.column_multiple)


def weight(recipe: str, *shape: int, seed: int = 0) -> QuantizedTensor:
    """The same on every rank."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    found: QuantizedTensor = recipe_module(recipe).quantize(values * torch.linspace(0.1, 8, shape[-1]))
    return found


def assert_same(a: Any, b: QuantizedTensor) -> None:
    """Class, shape and every stored byte."""
    assert type(a) is type(b), type(a)
    assert (a.shape, a.store.matrix, a.dtype) == (b.shape, b.store.matrix, b.dtype)
    assert_same_tensors(b.planes(), a.planes())


# --------------------------------------------------------------------------------------------------------- redistribute
def redistributes(recipe: str) -> None:
    """From every placement to every other, and whole again; with rank 0 as the source of values, and without."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh, size = mesh_of(world), side(recipe)
    whole = weight(recipe, size, size)
    placements = (Shard(0), Shard(1), Replicate())
    with layoutc.strict():
        for first in placements:
            for source in (0, None):
                given = whole if rank == 0 or source is None else weight(recipe, size, size, seed=rank)
                made = distribute_tensor(given, mesh, [first], src_data_rank=source)
                assert type(made.to_local()) is type(whole)
                assert_same(made.full_tensor(), whole)
            for then in placements:
                moved = made.redistribute(placements=[then])
                assert_same(moved.redistribute(placements=[first])._local_tensor.clone(), made._local_tensor.clone())
                assert_same(moved.full_tensor(), whole)
                assert torch.equal(moved, moved.clone())
                assert_same(moved.detach().to("cpu").clone().full_tensor(), whole)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", [*RECIPES, *ODD])
def test_redistributing_moves_bytes(two: Ranks, four: Ranks, recipe: str) -> None:
    two.run(redistributes, recipe)
    four.run(redistributes, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@on("two")
def test_a_gather_is_one_call_and_waits_when_it_is_used(recipe: str) -> None:
    """Nothing waits between the all-gather and the use: what comes back is still in flight; one call for all planes."""
    mesh, size = mesh_of(dist.get_world_size()), side(recipe)
    whole = weight(recipe, size, size)
    made = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    with layoutc.strict(), Calls() as calls:
        moved = made.redistribute(placements=[Replicate()], async_op=True).to_local()
        assert isinstance(moved, AsyncCollectiveTensor)
        assert "wait_tensor" not in calls.names
        assert calls.names.count("all_gather_into_tensor_coalesced") == 1
        x = torch.randn(4, size)
        assert torch.equal(F.linear(x, moved), F.linear(x, whole.dequantize()))
        assert_same(moved.wait(), whole)


class Calls(TorchDispatchMode):
    """Names of the functional collectives that ran, and the bytes that this rank gave to all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")
        if name[0] == "_c10d_functional":
            self.names.append(name[1])
            if name[1] == "all_gather_into_tensor_coalesced":
                self.nbytes += sum(plane.nbytes for plane in args[0])
            if isinstance(args[0], QuantizedTensor):
                with self:  # what the class makes of it is counted as well
                    return type(args[0]).__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", [*RECIPES, *ODD])
@on("four")
def test_ranks_without_rows_take_part(recipe: str) -> None:
    """Three experts on four ranks: short ranks are filled up on the way. Whatever was sent has been waited for, also
    planes that all ranks have alike, which are not kept: else torch holds them, and warns when the process ends."""
    mesh = mesh_of(dist.get_world_size())
    whole = weight(recipe, 3, 128, 256)
    before = _get_work_registry_size()
    for source in (0, None):
        with layoutc.strict():
            made = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=source)
            assert made.to_local().shape[0] == (1 if dist.get_rank() < 3 else 0)
            assert_same(made.full_tensor(), whole)
            assert _get_work_registry_size() == before


def rows_of_experts(recipe: str) -> str:
    """Tensor parallelism of experts: dim 1 is cut by chunk, between blocks; inside of them, as the refusal says."""
    world = dist.get_world_size()
    mesh, unit = mesh_of(world), recipe_module(recipe).LAYOUT.block_rows
    for dim in (1, 2):
        for source in (0, None):
            made = distribute_tensor(weight(recipe, 2, world * unit, 256), mesh, [Shard(dim)], src_data_rank=source)
            assert_same(made.full_tensor(), weight(recipe, 2, world * unit, 256))
    narrow = weight(recipe, 2, unit, 256)
    with pytest.raises(UnsupportedOperator) as caught:
        distribute_tensor(narrow, mesh, [Shard(1)], src_data_rank=None)
    assert_same(distribute_tensor(narrow, mesh, [Shard(0)], src_data_rank=None).full_tensor(), narrow)
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(2, unit, 256, generator=torch.Generator().manual_seed(1)))
    values = model.experts.detach().clone()
    said = str(caught.value).split("gathered (")[1].split(");")[0].replace(")", ', param_filter=["experts"])')
    exec(said, {"layoutc": layoutc, "model": model})
    cut: Any = distribute_tensor(model.experts, mesh, [Shard(1)], src_data_rank=None)
    assert torch.equal(cut.full_tensor(), values)
    return str(caught.value)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_rows_of_experts_are_cut_between_blocks(two: Ranks, recipe: str) -> None:
    messages = two.run(rows_of_experts, recipe)
    assert messages[0] == messages[1]
    assert "cut dim 0, which may fall anywhere" in messages[0]


@on("two")
def test_a_plain_update_is_merged_into_shards() -> None:
    """Each rank takes its part of what all have."""
    recipe = "mxfp8"
    mesh, whole = mesh_of(2), weight(recipe, side(recipe), side(recipe))
    delta = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1)) * 0.05
    cut = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    error = layoutc.merge_(cut, delta)
    alone = layoutc.merge_(whole, delta)
    assert_same(cut.full_tensor(), whole)
    assert abs(error - alone) < 1e-6


@pytest.mark.parametrize("recipe", [*RECIPES, *ODD])
@on("four")
def test_shards_of_rows_become_shards_of_columns(recipe: str) -> None:
    """The all-to-all of cards, by name: gloo's DTensor gathers instead."""
    mesh, size = mesh_of(dist.get_world_size()), side(recipe)
    whole, group = weight(recipe, size, size), mesh.get_group().group_name
    rows, columns = (distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None).to_local() for dim in (0, 1))
    alltoall = torch.ops._dtensor.shard_dim_alltoall
    with layoutc.strict():
        assert_same(alltoall(rows, 0, 1, group), columns.clone())
        assert_same(alltoall(columns, 1, 0, group), rows.clone())


def goes_round(whole: Any, mesh: Any, dim: int, source: int | None) -> Tensor:
    """Cut over a mesh, and whole again."""
    made: Any = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=source)
    whole = made.full_tensor()
    assert isinstance(whole, Tensor)
    return whole


def refuses(recipe: str) -> list[str]:
    """Cuts of columns inside blocks; pieces that were quantized apart; plain values for a shard on its own."""
    world = dist.get_world_size()
    mesh, size = mesh_of(world), side(recipe)
    layout = recipe_module(recipe).LAYOUT
    messages = []
    for dim, unit in ((0, layout.shard_rows), (1, layout.column_multiple)):
        shape = [size, size]
        shape[dim] = world * unit // 2 * 3
        for source in (0, None) if unit > 1 else ():
            if dim == 0:
                assert_same(goes_round(weight(recipe, *shape), mesh, dim, source), weight(recipe, *shape))
                continue
            with pytest.raises(LayoutError) as caught:
                goes_round(weight(recipe, *shape), mesh, dim, source)
            messages.append(str(caught.value))
    if layout.block_rows > layout.multiple_m:
        apart = weight(recipe, layout.block_rows + layout.multiple_m, size)
        with pytest.raises(LayoutError) as caught:
            DTensor.from_local(apart, mesh, [Shard(0)], run_check=False).full_tensor().dequantize()
        messages.append(str(caught.value))
    if layout.shares_amax:
        made = distribute_tensor(weight(recipe, size, size), mesh, [Shard(0)], src_data_rank=None)
        plain = distribute_tensor(torch.ones(size, size), mesh, [Shard(0)], src_data_rank=None)
        with pytest.raises(LayoutError) as caught:
            made.copy_(plain)
        messages.append(str(caught.value))
        made.copy_(distribute_tensor(weight(recipe, size, size, seed=1), mesh, [Shard(0)], src_data_rank=None))
        assert_same(made.full_tensor(), weight(recipe, size, size, seed=1))
    dist.barrier()
    return messages


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_would_be_inexact_is_refused_on_all_ranks_in_the_same_words(four: Ranks, recipe: str) -> None:
    messages = four.run(refuses, recipe)
    assert all(said == messages[0] for said in messages)
    assert any("multiple of" in said or "multiples of" in said or recipe in SHARED for said in messages[0])


def typed(message: str, weight: DTensor, values: Tensor) -> None:
    """Runs what a message says to write."""
    names: dict[str, Any] = {"weight": weight, "values": values, "distribute_tensor": distribute_tensor}
    recipe = message.split("distribute_tensor(")[1].split(".")[0]
    exec(message.split("on all ranks: ")[1], names | {recipe: recipe_module(recipe)})


def takes_what_the_refusal_says(recipe: str) -> list[str]:
    """Initializers of a DTensor's shards that are no blocks, or share an amax: refused before anything is written."""
    world = dist.get_world_size()
    mesh, layout = mesh_of(world), recipe_module(recipe).LAYOUT
    whole = weight(recipe, 3 * world * layout.block_rows // 2 + layout.multiple_m, 256)
    values = torch.randn(whole.shape, generator=torch.Generator().manual_seed(5))
    messages = []
    for write in (nn.init.trunc_normal_, nn.init.ones_, lambda made: made.copy_(torch.full_like(made, 2.0))):
        made = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        with pytest.raises(LayoutError) as caught, torch.no_grad():
            write(made)
        messages.append(str(caught.value))
        assert_same(made.full_tensor(), whole)
        with layoutc.strict():
            typed(messages[-1], made, values)
        assert_same(made.full_tensor(), recipe_module(recipe).quantize(values))
    return messages


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "nvfp4"])
def test_a_refused_initializer_says_what_writes_the_weight(two: Ranks, recipe: str) -> None:
    messages = two.run(takes_what_the_refusal_says, recipe)
    assert [len(said) for said in messages] == [3, 3]


# --------------------------------------------------------------------------------------------------- tensor parallelism
class Pair(nn.Module):
    """Two layers: the first is cut by rows, the second by columns; `parts` does the same sums on one process."""

    def __init__(self, width: int, parts: int = 1) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> (n, width)."""
        if self.parts == 1:
            out: Tensor = self.down(F.relu(self.up(x)))
            return out
        ups, downs = self.up.weight.chunk(self.parts), self.down.weight.chunk(self.parts, 1)
        outs = [F.linear(F.relu(F.linear(x, up)), down) for up, down in zip(ups, downs, strict=True)]
        return torch.stack(outs).sum(0)


PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}


def pair(recipe: str, width: int, mesh: DeviceMesh | None, order: str = "cut_first") -> Pair:
    """Quantized whole, or quantized and cut over a mesh in either order."""
    torch.manual_seed(0)
    model = Pair(width, 2 if mesh is None else 1)
    if mesh is None or order == "quantized_first":
        layoutc.quantize_(model, recipe)
    if mesh is not None:
        parallelize_module(model, mesh, {name: style() for name, style in PLAN.items()})
        if order == "cut_first":
            layoutc.quantize_(model, recipe)
    return model


def trains_in_two_dims(recipe: str, order: str, sharded: bool) -> None:
    """Tensor parallelism alone, or under fully_shard: bytes and losses are those of one process that adds alike."""
    world = dist.get_world_size()
    mesh = mesh_of(world // 2, 2, names=("dp", "tp"))
    width = side(recipe)
    before = layoutc.implicit_dequantizes()
    reference, model = pair(recipe, width, None), pair(recipe, width, mesh["tp"], order)
    assert_whole(model, reference)
    if sharded:
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        assert_whole(model, reference)
    optimizer, expected_optimizer = adam(model), adam(reference)
    dp = mesh["dp"]
    share = (float(dp.size()) if dp.get_local_rank() == 0 else 0.0) if sharded else 1.0
    with layoutc.strict():
        for step in range(2):
            expected = train_step(reference, expected_optimizer, step, width)
            loss = train_step(model, optimizer, step, width, share)
            assert loss == expected, f"step {step}: {loss} is not {expected}"
            assert_whole(model, reference)
    assert layoutc.implicit_dequantizes() == before


def assert_whole(model: nn.Module, reference: nn.Module) -> None:
    """The full tensors of a model are the weights of another, byte for byte."""
    for (name, param), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(param, DTensor), name
        if isinstance(whole, QuantizedTensor):
            assert_same(param.full_tensor().data, whole.data)
        else:
            assert torch.equal(param.full_tensor(), whole), name


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "order"), [("fp8_delayed", "cut_first"), ("mxfp8", "quantized_first"), ("nvfp4", "cut_first")]
)
def test_tensor_parallel_training_equals_one_process(two: Ranks, recipe: str, order: str) -> None:
    two.run(trains_in_two_dims, recipe, order, False)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "order"), [("fp8_current", "quantized_first"), ("fp8_block", "cut_first"), ("nvfp4", "quantized_first")]
)
def test_tensor_parallel_training_under_fsdp2_equals_one_process(four: Ranks, recipe: str, order: str) -> None:
    four.run(trains_in_two_dims, recipe, order, True)


def takes_plain_values_in_two_dims(recipe: str, sharded: bool) -> None:
    """Plain values written to shards: an amax that covers the whole weight is shared over both mesh dims."""
    mesh = mesh_of(dist.get_world_size() // 2, 2, names=("dp", "tp"))
    size = side(recipe)
    model = pair(recipe, size, mesh["tp"])
    if sharded:
        fully_shard(model, mesh=mesh["dp"])
    for param in model.parameters():
        values = torch.randn(size, size, generator=torch.Generator().manual_seed(5))
        values *= torch.linspace(0.1, 10, size) * torch.linspace(10, 0.1, size).unsqueeze(1)
        plain = distribute_tensor(values, mesh["tp"], [Replicate()], src_data_rank=None)
        assert isinstance(param, DTensor)
        with torch.no_grad():
            local = shard_of(plain.to_local(), param)
            param._local_tensor.copy_(local)
        assert_same(param.full_tensor(), recipe_module(recipe).quantize(values))


def shard_of(values: Tensor, param: DTensor) -> Tensor:
    """This rank's part: tensor parallelism's cut first, then FSDP2's."""
    mesh = param.device_mesh
    for mesh_dim in reversed(range(mesh.ndim)):
        dim: int = param.placements[mesh_dim].dim  # type: ignore[attr-defined]
        values = values.chunk(mesh.size(mesh_dim), dim)[mesh.get_local_rank(mesh_dim)]
    return values


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_an_amax_is_shared_over_both_mesh_dims(two: Ranks, four: Ranks, recipe: str) -> None:
    two.run(takes_plain_values_in_two_dims, recipe, False)
    four.run(takes_plain_values_in_two_dims, recipe, True)


# ----------------------------------------------------------------------------------------------------------- SimpleFSDP
class Gathered(nn.Module):
    """A parametrization: the whole weight for the computation, gradients reduced to shards in backward."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, param: DTensor) -> Tensor:
        """A sharded parameter -> a whole plain tensor."""
        return param.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Partial("avg"),))


def simple_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Parameters become DTensors sharded by rows, and are read through Gathered."""
    gathered = Gathered(mesh)
    for module in model.modules():
        names = list(dict(module.named_parameters(recurse=False)))
        if not names:
            continue
        for name in names:
            made = distribute_tensor(module._parameters[name], mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(made))
        read = {name: property(lambda self, name=name: gathered(self._parameters[name])) for name in names}
        module.__class__ = type(f"Simple{type(module).__name__}", (type(module),), read)


def sharded_parameters(model: nn.Module) -> list[Tensor]:
    return [p for module in model.modules() for p in module._parameters.values() if p is not None]


def trains_as_simple_fsdp(recipe: str, compiled: bool) -> None:
    """Losses and bytes of one process, and each gather sends what LAYOUT.gather says, and no more."""
    world = dist.get_world_size()
    mesh, width = mesh_of(world), width_for(recipe, world)
    reference, model = build(recipe, width), build(recipe, width)
    simple_fsdp(model, mesh)
    weights = [p for p in sharded_parameters(model) if p.dim() == 2]
    planned = sum(p._local_tensor.LAYOUT.gather(*p.shape, world, "both").bytes_per_rank for p in weights)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, sharded_parameters(model), lr=1e-2, weight_decay=0.1)
    expected_optimizer = adam(reference)
    share = float(world) if dist.get_rank() == 0 else 0.0
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    before = layoutc.implicit_dequantizes()
    with layoutc.strict():
        for step in range(3 if compiled else 2):  # compiled again in the third, if at all
            expected = train_step(reference, expected_optimizer, step, width)
            if compiled or step:
                loss = train_step(run, optimizer, step, width, share)
            else:
                with Calls() as calls:
                    loss = train_step(model, optimizer, step, width, share)
                assert calls.nbytes == planned
                assert calls.names.count("all_gather_into_tensor_coalesced") == len(weights)
            assert loss == expected, f"step {step}: {loss} is not {expected}"
    assert layoutc.implicit_dequantizes() == before
    for param, whole in zip(sharded_parameters(model), reference.parameters(), strict=True):
        assert isinstance(param, DTensor)
        if isinstance(whole, QuantizedTensor):
            assert_same(param.full_tensor().data, whole.data)
    assert_equal_on_all_ranks(shared_bytes(model))


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_simple_fsdp_trains_as_one_process(two: Ranks, four: Ranks, recipe: str) -> None:
    two.run(trains_as_simple_fsdp, recipe, False)
    four.run(trains_as_simple_fsdp, recipe, False)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@on("two")
def test_simple_fsdp_refuses_weights_that_are_cast_on_gather(recipe: str) -> None:
    """Plain values would travel, and layers would multiply them. Before anything is sent; values are gathered for those
    who ask for values."""
    mesh, width = mesh_of(dist.get_world_size()), width_for(recipe, dist.get_world_size())
    model = nn.Linear(width, width, bias=False)
    values = model.weight.detach().clone()
    layoutc.cast_on_gather_(model, recipe)
    simple_fsdp(model, mesh)
    param: Any = model._parameters["weight"]
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(LayoutError, match="for SimpleFSDP, layoutc"):
            model(torch.ones(2, width))
    with pytest.raises(LayoutError, match="full_tensor"):
        param.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)
    dist.broadcast(values, 0)
    assert torch.equal(param.full_tensor(), values)
    whole = param.detach().redistribute(placements=[Replicate()]).to_local()
    assert torch.equal(getattr(whole, "plain", whole), values)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_simple_fsdp_compiles_into_one_graph(two: Ranks, recipe: str) -> None:
    """Collectives of planes are traced as they run."""
    two.run(trains_as_simple_fsdp, recipe, True)


# ---------------------------------------------------------------------------------------------- modules and state dicts
@pytest.mark.parametrize("recipe", RECIPES)
@on("two")
def test_modules_are_distributed(recipe: str) -> None:
    """distribute_module replicates the first rank's weights."""
    world = dist.get_world_size()
    mesh, width = mesh_of(world), width_for(recipe, world)
    reference = build(recipe, width)
    with layoutc.strict():
        replicated = distribute_module(build(recipe, width, seed=dist.get_rank()), mesh)
        assert_whole(replicated, reference)
