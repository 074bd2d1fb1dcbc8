"""The all-gather hooks, ranks simulated in one process: gathering quantized shards equals quantizing the whole."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_cases import (
    BLOCKED,
    RECIPES,
    SHARED,
    each_recipe,
    make,
    module,
    raw,
    same_bits,
    same_tensors,
    snapshot,
    weight,
)
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.errors import MissingOrientation
from layoutc.runtime.facts import PassName
from layoutc.runtime.fsdp2 import hooks
from layoutc.runtime.weight.tensor import QuantizedTensor

PASSES: tuple[PassName, ...] = ("forward", "backward", "both")
WORLDS = (1, 2, 3, 4, 8)
Inputs = list[tuple[Tensor, ...]]


class Mesh:
    """As much of a DeviceMesh as a hook reads."""

    def __init__(self, world: int) -> None:
        self.world = world

    def size(self) -> int:
        """Ranks."""
        return self.world


def rows_of(x: Tensor, world: int) -> list[Tensor]:
    """Dim 0 cut as FSDP2 cuts it: ceil(rows / world) each, short or empty at the end."""
    step = cdiv(x.shape[0], world)
    return [x[min(rank * step, x.shape[0]) : (rank + 1) * step] for rank in range(world)]


def amax_of(recipe: str, x: Tensor) -> dict[str, Tensor]:
    """The argument that shards agree on."""
    return {"amax": x.float().abs().amax().reshape(1)} if module(recipe).LAYOUT.shares_amax else {}


def shards_of(recipe: str, x: Tensor, world: int, out: list[QuantizedTensor] | None = None) -> list[QuantizedTensor]:
    """Every rank's rows, quantized by itself under the shared amax."""
    cuts, amax = rows_of(x, world), amax_of(recipe, x)
    return [module(recipe).quantize(cut, out=out[rank] if out else None, **amax) for rank, cut in enumerate(cuts)]


def send(shards: list[QuantizedTensor], which: PassName, shape: tuple[int, ...]) -> tuple[Inputs, list[Any]]:
    """What every rank's pre hook returns."""
    world = len(shards)
    padded = cdiv(shape[0], world) * (torch.Size(shape[1:-1]).numel())
    with hooks.simulate(which, shape, padded):
        sent = [shard.fsdp_pre_all_gather(Mesh(world)) for shard in shards]
    return [inputs for inputs, _ in sent], [metadata for _, metadata in sent]


def collect(inputs: Inputs) -> tuple[Tensor, ...]:
    """The collective: for each input, all ranks' bytes in rank order, in storages of their own."""
    return tuple(
        torch.cat([tensors[i].view(-1) for tensors in inputs]).view(-1, *like.shape[1:])
        for i, like in enumerate(inputs[0])
    )


def gather(shards: list[QuantizedTensor], which: PassName, shape: tuple[int, ...], rank: int = 0) -> QuantizedTensor:
    """The whole weight as a rank receives it."""
    inputs, metadata = send(shards, which, shape)
    tensor, inner = shards[rank].fsdp_post_all_gather(collect(inputs), metadata[rank], shards[rank].dtype)
    assert inner == (), "the gather's outputs are freed by FSDP2 itself"
    return tensor


def served(whole: QuantizedTensor, which: PassName) -> dict[str, Tensor]:
    """The buffers of the orientations that a pass serves, and those of none."""
    names = [o for o in whole.LAYOUT.orientations if o not in whole.LAYOUT.serves[which]]
    return {name: buffer for name, buffer in whole.buffers().items() if not name.startswith(tuple(names) or "-")}


def check(recipe: str, x: Tensor, world: int, which: PassName) -> None:
    """Gathered equals quantized whole, on the first and the last rank."""
    whole, shards = module(recipe).quantize(x, **amax_of(recipe, x)), shards_of(recipe, x, world)
    for rank in {0, world - 1}:
        tensor = gather(shards, which, tuple(x.shape), rank)
        assert type(tensor) is type(whole)
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (whole.shape, whole.stride(), whole.dtype)
        assert tensor.orientations == whole.LAYOUT.serves[which]
        assert same_tensors(tensor.buffers(), served(whole, which))
        for orientation in tensor.orientations:
            expected = whole.values_of(orientation, torch.float32)
            assert same_bits(tensor.values_of(orientation, torch.float32), expected)


def shapes(recipe: str, world: int) -> list[tuple[int, ...]]:
    """Shapes that shard over `world` ranks: small, odd multiples, 3-D with empty shards, ragged, uneven."""
    layout = module(recipe).LAYOUT
    rows, columns = layout.shard_rows, layout.multiple_k
    k = 3 * columns if columns > 1 else 200
    found = [
        (32, 32),
        (world * rows, columns * 2),
        (world * 3 * rows, k),
        (world, 2 * rows, k),
        (3, rows, k),
        (2, 2, 2 * rows, k),
    ]
    if recipe == "fp8_block":
        found += [(world * 128 - world + 1, 200), (world * 384, 129), (5, 128, 77)]
    if recipe not in BLOCKED:
        found += [(17, 24), (1, 8), (3, 5), (96, 7), (5, 3, 9)]
    inner = {shape: torch.Size(shape[1:-1]).numel() for shape in found}
    fits = [s for s in found if cdiv(s[0], world) * inner[s] % rows == 0 or world == 1]
    return [s for s in dict.fromkeys(fits) if torch.Size(s[:-1]).numel() % layout.multiple_m == 0]


each_world = pytest.mark.parametrize("world", WORLDS)


@pytest.mark.sample(4)
@each_recipe
@each_world
def test_gathering_shards_equals_quantizing_the_whole(recipe: str, world: int) -> None:
    """Every buffer, padding included, and every value; from short and empty shards too."""
    for shape, which in product(shapes(recipe, world), PASSES):
        check(recipe, weight(*shape, dtype=torch.bfloat16), world, which)


@pytest.mark.sample(2)
@pytest.mark.slow
@each_recipe
def test_gathering_a_large_weight_equals_quantizing_it(recipe: str) -> None:
    """Many blocks in each direction; tests/bench/gather.py takes weights of a large model."""
    check(recipe, weight(1024, 3584, dtype=torch.bfloat16), 8, "both")


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), world=st.integers(1, 9), which=st.sampled_from(PASSES), seed=st.integers(0, 99))
def test_any_shape_that_shards_gathers_exactly(
    recipe: str, data: st.DataObject, world: int, which: PassName, seed: int
) -> None:
    """Shapes and worlds at random: cuts between blocks and inside of them."""
    layout = module(recipe).LAYOUT
    lead = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=2))
    unit = data.draw(st.sampled_from([1, layout.multiple_m, layout.shard_rows]))
    shape = (*lead[:-1], lead[-1] * unit, layout.multiple_k * data.draw(st.integers(1, 5)))
    try:
        layout.check_shape(shape)
    except ValueError:
        return
    x = weight(*shape, seed=seed)
    step = cdiv(shape[0], world)
    inner = torch.Size(shape[1:-1]).numel()
    if step >= shape[0] or step * inner % layout.block_rows == 0:
        check(recipe, x, world, which)
    whole = module(recipe).quantize(x)
    pieces = list(whole.split(step))
    pieces += [whole[:0] for _ in range(world - len(pieces))]
    inputs, metadata = send(pieces, which, shape)
    assert len({tuple(tuple(t.shape) for t in tensors) for tensors in inputs}) == 1
    for rank in {0, world - 1}:
        tensor, inner_tensors = pieces[rank].fsdp_post_all_gather(collect(inputs), metadata[rank], torch.float32)
        assert same_tensors(tensor.buffers(), served(whole, which))
        storages = {inner.untyped_storage().data_ptr(): inner for inner in inner_tensors}
        assert len(storages) == len(inner_tensors)
        assert all(inner.untyped_storage().nbytes() == inner.nbytes for inner in inner_tensors)
    if len(shape) == 2 and world > 1:
        assert layout.gather(*shape, world, which).bytes_per_rank == sum(t.numel() for t in inputs[0])


@pytest.mark.sample(5)
@each_recipe
@each_world
def test_all_ranks_send_the_same_sizes_in_all_passes(recipe: str, world: int) -> None:
    """Contiguous bytes, as LAYOUT.gather announces them: FSDP2 allocates the outputs once."""
    for shape in shapes(recipe, world):
        check_sizes(recipe, world, shape)


def check_sizes(recipe: str, world: int, shape: tuple[int, ...]) -> None:
    layout = module(recipe).LAYOUT
    m, k = torch.Size(shape[:-1]).numel(), shape[-1]
    shards = shards_of(recipe, weight(*shape), world)
    sizes: dict[PassName, set[tuple[int, ...]]] = {}
    for which in PASSES:
        inputs, _ = send(shards, which, shape)
        assert all(
            t.dtype == torch.uint8 and t.is_contiguous() and type(t) is Tensor for tensors in inputs for t in tensors
        )
        sizes[which] = {tuple(t.numel() for t in tensors) for tensors in inputs}
        assert len(sizes[which]) == 1
        assert len({tuple(tuple(t.shape) for t in tensors) for tensors in inputs}) == 1
        if world == 1:
            assert len(inputs[0]) == 1, "a group of one rank hands back the first buffer alone"
        elif len(shape) == 2:
            plan = layout.gather(m, k, world, which)
            assert [facts.nbytes for facts in plan.planes.values()] == [t.numel() for t in inputs[0]]
            assert plan.bytes_per_rank == sum(t.numel() for t in inputs[0])
    assert sizes["forward"] == sizes["backward"]


@pytest.mark.sample(6)
@each_recipe
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("which", PASSES)
def test_the_same_object_is_refreshed_for_all_its_aliases(recipe: str, world: int, which: PassName) -> None:
    """`out` keeps its identity; old views too see every buffer of the new weight, scales included."""
    shape = (world * 128, 96)
    first, second = weight(*shape), weight(*shape, seed=1) * 3.0
    shards, whole = shards_of(recipe, first, world), module(recipe).quantize(first, **amax_of(recipe, first))
    inputs, metadata = send(shards, which, shape)
    outputs = collect(inputs)
    tensor, _ = shards[0].fsdp_post_all_gather(outputs, metadata[0], torch.float32)
    parameter = torch.nn.Parameter(torch.as_strided(tensor, shape, (96, 1), 0))
    views = [parameter.detach(), parameter.t(), parameter.view(-1), parameter.data]
    for _ in range(2):
        shards_of(recipe, second, world, out=shards)
        module(recipe).quantize(second, out=whole, **amax_of(recipe, second))
        inputs, metadata = send(shards, which, shape)
        for output, fresh in zip(outputs, collect(inputs), strict=True):
            output.copy_(fresh)
        result = shards[0].fsdp_post_all_gather(outputs, metadata[0], torch.float32, out=parameter)
        assert result is None
        assert same_tensors(parameter.buffers(), served(whole, which))
        expected = whole.values_of(parameter.orientations[0], torch.float32)
        assert same_bits(parameter.dequantize(), expected)
        assert all(view.store.planes is parameter.store.planes for view in views)
        assert same_bits(views[1].dequantize(), expected.t())
        assert same_bits(views[2].dequantize(), expected.flatten())


@each_recipe
@pytest.mark.parametrize("which", PASSES)
def test_hooks_leave_the_shard_as_it_was(recipe: str, which: PassName) -> None:
    """Neither hook, with `out` or without, changes planes, metadata or attributes."""
    shards = shards_of(recipe, weight(256, 96), 2)
    before = [
        (snapshot(shard), dict(shard.__dict__), {n: p.data_ptr() for n, p in shard.planes().items()})
        for shard in shards
    ]
    tensor = gather(shards, which, (256, 96))
    inputs, metadata = send(shards, which, (256, 96))
    shards[0].fsdp_post_all_gather(collect(inputs), metadata[0], torch.float32, out=tensor)
    for shard, (planes, attributes, addresses) in zip(shards, before, strict=True):
        assert same_tensors(shard.planes(), planes)
        assert shard.__dict__ == attributes
        assert {n: p.data_ptr() for n, p in shard.planes().items()} == addresses


@each_recipe
def test_the_pre_hook_takes_the_mesh_alone(recipe: str) -> None:
    """FSDP2's form of five arguments asserts sizes on short ranks only. The post hook is as FSDP2 calls it."""
    q = make(recipe)
    assert list(inspect.signature(q.fsdp_pre_all_gather).parameters) == ["mesh"]
    parameters = inspect.signature(q.fsdp_post_all_gather).parameters
    assert list(parameters) == ["all_gather_outputs", "metadata", "param_dtype", "out"]
    assert parameters["out"].default is None


@each_recipe
def test_a_group_of_one_rank_sends_one_buffer_and_gets_all(recipe: str) -> None:
    """The planes that do not travel are its own: the gathered weight has all buffers of the whole one."""
    x = weight(256, 96)
    shards = shards_of(recipe, x, 1)
    inputs, metadata = send(shards, "both", (256, 96))
    assert len(inputs[0]) == 1
    tensor, inner = shards[0].fsdp_post_all_gather((inputs[0][0].clone(),), metadata[0], torch.float32)
    assert inner == ()
    assert same_tensors(tensor.buffers(), module(recipe).quantize(x).buffers())


@pytest.mark.parametrize("which", PASSES)
def test_an_orientation_that_is_not_held_is_not_gathered(which: PassName) -> None:
    """mxfp8 with one orientation serves its own pass and refuses the other."""
    q = make("mxfp8", 64, 64, orientations=("rowwise",))
    with hooks.simulate(which, (128, 64), 64):
        if which == "forward":
            assert len(q.fsdp_pre_all_gather(Mesh(2))[0]) == 2
        else:
            with pytest.raises(MissingOrientation, match=rf"columnwise_data.*{which} pass"):
                q.fsdp_pre_all_gather(Mesh(2))


@each_recipe
def test_a_freed_gather_prints_and_comes_back(recipe: str) -> None:
    """FSDP2 resizes the outputs' storages to 0 after a pass and back before the next; nothing else is held."""
    x = weight(256, 96)
    shards = shards_of(recipe, x, 2)
    inputs, metadata = send(shards, "forward", (256, 96))
    outputs = collect(inputs)
    tensor, _ = shards[0].fsdp_post_all_gather(outputs, metadata[0], torch.float32)
    expected, sizes = tensor.dequantize(), [output.untyped_storage().nbytes() for output in outputs]
    shared = {id(plane) for plane in metadata[0].shared.values()}
    owned = {output.untyped_storage().data_ptr() for output in outputs}
    for plane in tensor.planes().values():
        assert id(plane) in shared or plane.untyped_storage().data_ptr() in owned, "memory that FSDP2 would not free"
    for output in outputs:
        output.untyped_storage().resize_(0)
    assert "holds=" in repr(tensor)
    assert tensor.shape == (256, 96)
    assert tensor.orientations
    for output, fresh, size in zip(outputs, collect(inputs), sizes, strict=True):
        output.untyped_storage().resize_(size)
        output.copy_(fresh)
    shards[0].fsdp_post_all_gather(outputs, metadata[0], torch.float32, out=tensor)
    assert same_bits(tensor.dequantize(), expected)


@pytest.mark.parametrize("recipe", SHARED)
def test_what_all_shards_share_does_not_travel(recipe: str) -> None:
    """It is copied into the metadata, so a weight that stays gathered keeps the scale of its codes."""
    shards = shards_of(recipe, weight(256, 96), 2)
    inputs, metadata = send(shards, "both", (256, 96))
    names = [name for name, plane in shards[0].LAYOUT.stored.items() if plane.rows_per_value is None]
    assert list(metadata[0].shared) == names
    assert all(torch.equal(raw(metadata[0].shared[name]), raw(shards[0].planes()[name])) for name in names)
    assert all(metadata[0].shared[name].data_ptr() != shards[0].planes()[name].data_ptr() for name in names)
    assert all(torch.equal(raw(metadata[0].shared[n]), raw(metadata[1].shared[n])) for n in names)
    assert len(inputs[0]) == len(shards[0].LAYOUT.travels["both"])


@each_recipe
def test_the_gathered_weight_takes_the_dtype_of_the_policy(recipe: str) -> None:
    """It dequantizes to param_dtype, from the same bytes."""
    shards = shards_of(recipe, weight(256, 96), 2)
    inputs, metadata = send(shards, "forward", (256, 96))
    tensor, _ = shards[0].fsdp_post_all_gather(collect(inputs), metadata[0], torch.bfloat16)
    assert tensor.dtype == tensor.dequantize().dtype == torch.bfloat16
