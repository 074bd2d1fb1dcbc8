"""Weights at every cut that fully_shard can make: gathered, in full state dicts, distributed, exported; byte for byte.

The oracle is the whole weight, quantized in one process.
"""

from __future__ import annotations

from inspect import getsource
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of, on
from models import RECIPES, assert_same_tensors, raw, recipe_module
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from weight_recipes import ALL_PAIRS, CUT_APART

import layoutc
from layoutc.checkpoint import export_safetensors
from layoutc.checkpoint.common.whole_weights import gathered_whole
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

Shape = tuple[int, ...]
FULL = StateDictOptions(full_state_dict=True)
ODD = ("fp8_rowwise", "mxfp6_e2m3", "fp8_block_1d")  # scales of whole rows, elements across bytes, blocks of a row


def values(shape: Shape, seed: int) -> Tensor:
    """The same on every rank; blocks have scales of their own."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    rows = torch.arange(x.numel() // shape[-1]).view(*shape[:-1], 1)
    return (x * torch.exp2(rows % 7 - 3.0) * torch.linspace(0.1, 8, shape[-1])).to(torch.bfloat16)


def shapes(recipe: str, world: int) -> list[Shape]:
    """All rows on the first rank, some ranks without any, cuts inside blocks, the last block whole and partial."""
    layout = recipe_module(recipe).LAYOUT
    least, block, k = layout.multiple_m, layout.block_rows, lcm(2 * layout.column_multiple, layout.multiple_k)
    rows = {least, (world - 1) * least, block + least, world * block, world * block + least, 3 * world * block // 2}
    rows |= {world * block - 1} if least == 1 else set()
    return [
        *((up, k) for up in sorted(n - n % least for n in rows)),
        (1, least, k),
        (3, 2 * lcm(block, least), k),
        (5, least, k),
    ]


def past_a_block(recipe: str, blocks: int = 1) -> int:
    """Rows that end soon after so many blocks, as many as the recipe takes."""
    layout = recipe_module(recipe).LAYOUT
    rows = blocks * layout.block_rows + layout.multiple_m
    return rows + -rows % layout.multiple_m


class Weights(nn.Module):
    """One module with a weight of each shape."""

    def __init__(self, recipe: str, given: list[Shape], seed: int) -> None:
        super().__init__()
        for number, shape in enumerate(given):
            module = nn.Module()
            module.weight = nn.Parameter(values(shape, seed + number))
            self.add_module(str(number), module)
        layoutc.quantize_(self, recipe, filter_fn=lambda module, _: hasattr(module, "weight"))


def whole(recipe: str, given: list[Shape], seed: int) -> list[QuantizedTensor]:
    """The oracle."""
    return [recipe_module(recipe).quantize(values(shape, seed + number)) for number, shape in enumerate(given)]


def assert_same(found: Any, expected: QuantizedTensor) -> None:
    """The class, what it says of itself, and all bytes, stored and laid out."""
    assert type(found) is type(expected), type(found)
    assert (found.shape, found.store.matrix, found.store.halo.rows) == (expected.shape, expected.store.matrix, 0)
    assert_same_tensors(expected.planes(), found.planes())
    assert_same_tensors(expected.buffers(), found.buffers())


def assert_same_shard(found: Any, expected: Any) -> None:
    """What two shards have for their own rows."""
    assert (found.shape, found.store.halo[:2]) == (expected.shape, expected.store.halo[:2])
    for name in expected.store.planes:
        if found.numel() or name in expected.LAYOUT.shared:
            assert torch.equal(raw(found.entries(name)), raw(expected.entries(name))), name


def params(model: nn.Module) -> list[DTensor]:
    found = list(model.parameters())
    assert all(isinstance(param, DTensor) for param in found)
    return found  # type: ignore[return-value]


def are_whole(recipe: str, world: int, given: list[Shape], placement: Any, mesh: DeviceMesh) -> None:
    """Everything that torch gathers or distributes; with no implicit dequantize."""
    expected = whole(recipe, given, 0)
    model = Weights(recipe, given, 0)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: placement)
    with layoutc.strict():
        for param, one in zip(params(model), expected, strict=True):
            assert_same(param.full_tensor().detach(), one)
            assert_same(param.detach().redistribute(placements=[Replicate()] * mesh.ndim).to_local(), one)
        full = get_model_state_dict(model, options=FULL)
        for found, one in zip(full.values(), expected, strict=True):
            assert_same(found, one)
        if mesh.size() == dist.get_world_size():
            on_host = StateDictOptions(full_state_dict=True, cpu_offload=True)
            told = get_model_state_dict(model, options=on_host)
            for found, one in zip(told.values(), expected, strict=False):
                assert_same(found, one)
            assert len(told) == (len(expected) if dist.get_rank() == 0 else 0)
        other = Weights(recipe, given, 50)
        fully_shard(other, mesh=mesh, shard_placement_fn=lambda _: placement)
        set_model_state_dict(other, dict(full), options=FULL)
        for number, (param, source, one) in enumerate(zip(params(other), params(model), expected, strict=True)):
            assert_same_shard(param._local_tensor, source._local_tensor)
            # From the first rank's weight, or from each rank's own: every other shape, and the others in another world.
            for rank in (0, None) if ALL_PAIRS or len(given) == 1 else ((0, None)[(number + world) % 2],):
                given_here = one if dist.get_rank() == 0 or rank is None else one.clone().zero_()
                made = distribute_tensor(given_here, mesh, param.placements, src_data_rank=rank)
                assert_same_shard(made._local_tensor, source._local_tensor)
                assert_same(made.full_tensor(), one)


def among(world: int) -> DeviceMesh | None:
    """A mesh of the first ranks; None on the others."""
    mesh = mesh_of(world)
    return mesh if dist.get_rank() < world else None


def at_all_cuts(recipe: str, worlds: tuple[int, ...]) -> None:
    """The first two to four ranks."""
    for world in worlds:
        if (mesh := among(world)) is not None:
            are_whole(recipe, world, shapes(recipe, world), Shard(0), mesh)
        dist.barrier()


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", CUT_APART)
def test_weights_are_gathered_and_distributed_at_every_cut(four: Ranks, recipe: str) -> None:
    """Of two, three and four ranks two for recipes that differ in their cuts, one for those that have the cuts of one
    of these; all with LAYOUTC_ALL_PAIRS=1."""
    worlds, number = (2, 3, 4, 2), CUT_APART.index(recipe)
    first, count = number % 3, 2 if recipe in (*RECIPES, *ODD) else 1
    four.run(at_all_cuts, recipe, (2, 3, 4) if ALL_PAIRS else worlds[first : first + count])


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", CUT_APART)
@on("four")
def test_weights_cut_on_other_dims_and_copied_are_whole(recipe: str) -> None:
    """Columns, of rows that do not end with a block either, and rows of each expert; two replicas, of recipes that
    differ in their cuts."""
    layout, world = recipe_module(recipe).LAYOUT, 4
    mesh, rows = mesh_of(world), past_a_block(recipe)
    if not layout.shared_along_rows - layout.shared and layout.amax_columns is None:
        are_whole(recipe, world, [(rows, world * layout.column_multiple)], Shard(1), mesh)
        experts = (3, world * lcm(layout.block_rows, layout.multiple_m), layout.column_multiple)
        are_whole(recipe, world, [experts], Shard(1), mesh)
    if recipe in (*RECIPES, *ODD):
        copies = mesh_of(2, 2, names=("replicate", "shard"))
        given = [(layout.multiple_m, layout.column_multiple), (rows, layout.column_multiple)]
        are_whole(recipe, 2, given, Shard(0), copies)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", CUT_APART)
@on("four")
def test_weights_whose_rows_all_lie_on_the_first_rank_are_exported(recipe: str, tmp_path: Path) -> None:
    """A head of one row and one expert, whose rows all lie on the first rank, and one that cuts go through."""
    where = str(tmp_path)
    layout = recipe_module(recipe).LAYOUT
    k = layout.column_multiple
    given = [(layout.multiple_m, k), (1, 3 * layout.multiple_m, k), (past_a_block(recipe, 2), k)]
    model = Weights(recipe, given, 0)
    fully_shard(model, mesh=mesh_of(4))
    export_safetensors(model, Path(where) / "out")
    found = load_file(Path(where) / "out" / "model.safetensors")
    for number, one in enumerate(whole(recipe, given, 0)):
        assert_same_tensors({f"{number}.weight.{plane}": held for plane, held in one.planes().items()}, found)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block"])
@on("four")
def test_cuts_in_two_dims_are_joined(recipe: str) -> None:
    """FSDP2's cuts inside of the blocks of tensor-parallel shards, of rows and of columns."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    layout = recipe_module(recipe).LAYOUT
    for style, shape in (
        (ColwiseParallel, (6 * layout.block_rows, 128)),
        (RowwiseParallel, (3 * layout.block_rows, 256)),
    ):
        x = values(shape, 1)
        model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16))
        model[0].weight = nn.Parameter(x)
        parallelize_module(model, mesh["tp"], {"0": style()})
        layoutc.quantize_(model, recipe)
        fully_shard(model, mesh=mesh["dp"])
        assert_same(params(model)[0].full_tensor().data, recipe_module(recipe).quantize(x))
        assert_same(gathered_whole(params(model)[0].detach()), recipe_module(recipe).quantize(x))


def heads_of(weight: Any, rows: int) -> list[Tensor]:
    """Query, key and value weights of a fused one with two query heads for each key head, in rows of their own."""
    if isinstance(weight, DTensor):
        weight = weight.redistribute(placements=[Replicate()] * weight.device_mesh.ndim)
    by_head = weight.reshape(-1, 4, rows, weight.shape[1])
    return [one.reshape(-1, weight.shape[1]).contiguous() for one in (by_head[:, :2], by_head[:, 2], by_head[:, 3])]


def fused(heads: list[Any], rows: int) -> Any:
    """The inverse."""
    k = heads[0].shape[1]
    return torch.cat([head.reshape(-1, count, rows, k) for head, count in zip(heads, (2, 1, 1), strict=True)], 1).view(
        -1, k
    )


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "nvfp4", "fp8_current"])
@on("two")
def test_heads_of_a_fused_weight_come_apart_and_go_back(recipe: str) -> None:
    """As torchtitan saves and loads it: whole on each rank, cut into heads, joined, and copied into shards."""
    rows = recipe_module(recipe).LAYOUT.block_rows
    given = [(3 * 4 * rows, 256)]
    (one,), mesh = whole(recipe, given, 0), mesh_of(dist.get_world_size())
    model, other = (Weights(recipe, given, seed) for seed in (0, 50))
    for sharded in (model, other):
        fully_shard(sharded, mesh=mesh)
    with layoutc.strict(), torch.no_grad():
        for weight in (params(model)[0].detach(), distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None)):
            heads = heads_of(weight, rows)
            for head, expected in zip(heads, heads_of(one.dequantize(), rows), strict=True):
                assert isinstance(head, DTensor)
                assert torch.equal(head.to_local().dequantize(), expected)
        joined = fused(heads, rows)
        assert_same(joined.to_local(), one)
        params(other)[0].copy_(joined)
    assert_same(params(other)[0].full_tensor().detach(), one)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4", "mxfp8", "fp8_current"])
@on("four")
def test_shards_that_cut_blocks_are_initialized_as_plain_ones(recipe: str) -> None:
    """The bytes are those of the values that a plain weight gets, whose shards draw the same numbers."""
    layout, mesh = recipe_module(recipe).LAYOUT, mesh_of(dist.get_world_size())
    block = max(16, layout.block_rows)
    convert = {"quantized": layoutc.quantize_, "cast": layoutc.cast_on_gather_, "plain": lambda *_: None}
    # All draw some values again, none, a few ranks; ranks without rows never.
    for rows, options in ((3 * block, {}), (3 * block, {"std": 0.02}), (3 * block, {"a": -4.2, "b": 4.2}), (1, {})):
        found: dict[str, Any] = {}
        for use in convert:
            layer = nn.Linear(256, max(rows, layout.multiple_m), bias=False)
            convert[use](layer, recipe)
            fully_shard(layer, mesh=mesh)
            torch.manual_seed(3 + dist.get_rank())
            nn.init.trunc_normal_(layer.weight, **options)
            found[use] = params(layer)[0].full_tensor().detach()
        assert_same(found["quantized"], recipe_module(recipe).quantize(found["plain"]))
        assert torch.equal(found["cast"], found["plain"])


def is_refused_between_far_bounds(recipe: str) -> str:
    """Most draws are out of bounds."""
    if "candidates" not in getsource(nn.init._no_grad_trunc_normal_):
        return "this torch draws once; initialize the plain weight, then quantize it"
    layer = nn.Linear(256, 3 * 128, bias=False)
    layoutc.quantize_(layer, recipe)
    fully_shard(layer, mesh=mesh_of(dist.get_world_size()))
    before = params(layer)[0].full_tensor().detach()
    with pytest.raises(LayoutError) as caught:
        nn.init.trunc_normal_(layer.weight, a=1.0, b=2.0)
    assert_same(params(layer)[0].full_tensor().detach(), before)
    return str(caught.value)


@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4"])
def test_bounds_that_ranks_would_draw_between_apart_are_refused(two: Ranks, recipe: str) -> None:
    message = two.told(is_refused_between_far_bounds, recipe)
    assert "initialize the plain weight, then quantize it" in message
