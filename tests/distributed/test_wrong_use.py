"""Wrong use under FSDP2, plain DTensors and tensor parallelism: one clear error on every rank, and no rank hangs.

Each case returns what was said. It is the same on all ranks, and the process group works afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of, on
from models import Model, adam, assert_gathers_as, build, local, my_share, recipe_module, shard, train_step
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layoutc
from layoutc.runtime.weight.tensor import QuantizedTensor

WIDTH = 64
Case = Callable[[], Any]


def loss_of(model: nn.Module, x: Tensor | None = None) -> Tensor:
    """Of a forward over ones."""
    out: Tensor = model(torch.ones(4, WIDTH) if x is None else x)
    return out.square().mean()


def by_columns(param: nn.Parameter) -> Shard | None:
    """For fully_shard: matrices by their last dim."""
    return Shard(1) if param.dim() >= 2 else None


def experts() -> nn.Module:
    """96 rows each of 4 experts."""
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(recipe_module("mxfp8").quantize(torch.ones(4, 96, 64))))
    return module


# ------------------------------------------------------------------------------------------------- shapes, cuts, meshes
def a_shape_that_the_recipe_does_not_take() -> None:
    layoutc.quantize_(nn.Sequential(nn.Linear(48, 64)), "mxfp8")


def a_shape_in_quantized_init() -> None:
    with layoutc.quantized_init("mxfp8"):
        nn.Sequential(nn.Linear(48, 64))


def tensor_parallel_columns_inside_a_block() -> None:
    model = nn.Sequential(nn.Linear(96, 64))
    parallelize_module(model, mesh_of(2), {"0": RowwiseParallel()})
    layoutc.quantize_(model, "mxfp8")


def tensor_parallel_columns_of_whole_rows() -> None:
    model = nn.Sequential(nn.Linear(96, 64))
    parallelize_module(model, mesh_of(2), {"0": RowwiseParallel()})
    layoutc.quantize_(model, "fp8_rowwise")


def tensor_parallel_rows_inside_a_block() -> None:
    model = nn.Sequential(nn.Linear(256, 384))
    parallelize_module(model, mesh_of(2), {"0": ColwiseParallel()})
    layoutc.quantize_(model, "fp8_block")


def tensor_parallel_parts_of_cast_weights_inside_a_block() -> None:
    model = nn.Sequential(nn.Linear(256, 384))
    layoutc.cast_on_gather_(model, "fp8_block")
    parallelize_module(model, mesh_of(2), {"0": ColwiseParallel()})


def columns_of_cast_weights_inside_a_block() -> None:
    model = nn.Sequential(nn.Linear(192, 128))
    layoutc.cast_on_gather_(model, "fp8_block")
    parallelize_module(model, mesh_of(2), {"0": RowwiseParallel()})


def parts_of_cast_weights_under_fsdp_inside_a_block() -> None:
    model = nn.Sequential(nn.Linear(256, 384, bias=False))
    layoutc.cast_on_gather_(model, "fp8_block")
    mesh = mesh_of(1, 2, names=("fsdp", "tp"))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.data, mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["fsdp"])
    model.unshard()


def fsdp_columns_inside_a_block() -> None:
    shard(build("mxfp8", 96), shard_placement_fn=by_columns)


def fsdp_rows_of_experts_inside_a_block() -> None:
    fully_shard(experts(), shard_placement_fn=by_columns)


def dtensor_rows_of_experts_inside_a_block() -> None:
    distribute_tensor(experts().w, mesh_of(2), [Shard(1)])


def scales_of_whole_rows_by_columns() -> None:
    loss_of(shard(build("fp8_rowwise", WIDTH), shard_placement_fn=by_columns))


def amaxes_of_rows_by_columns() -> None:
    model = Model(WIDTH)
    layoutc.cast_on_gather_(model, "fp8_rowwise")
    loss_of(shard(model, shard_placement_fn=by_columns))


def a_dtensor_of_pieces_that_were_quantized_apart() -> None:
    piece = recipe_module("fp8_block").quantize(torch.ones(96, 128))
    DTensor.from_local(piece, mesh_of(2), [Shard(0)], run_check=False).full_tensor().dequantize()


def a_smaller_mesh_after_forward() -> None:
    loss_of(shard(build("mxfp8", WIDTH), reshard_after_forward=2))


# --------------------------------------------------------------------------------------------------- the order of calls
def quantize_after_fully_shard() -> None:
    layoutc.quantize_(shard(Model(WIDTH)), "nvfp4")


def cast_after_fully_shard() -> None:
    layoutc.cast_on_gather_(shard(Model(WIDTH)), "nvfp4")


def cast_after_tensor_parallelism() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    parallelize_module(model, mesh_of(2), {"0": ColwiseParallel()})
    layoutc.cast_on_gather_(model, "mxfp8")


def adamw_of_cast_weights_from_before_fully_shard() -> None:
    model = Model(WIDTH)
    layoutc.cast_on_gather_(model, "mxfp8")
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(shard(model)).backward()
    optimizer.step()


def adamw_of_gathered_weights() -> None:
    model = Model(WIDTH)
    layoutc.cast_on_gather_(model, "mxfp8")
    loss_of(shard(model))  # the root stays gathered
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model).backward()
    optimizer.step()


def masters_of_a_model_that_is_not_trained() -> None:
    model = build("mxfp8", WIDTH)
    optimizer = adam(model)
    train_step(shard(copy.deepcopy(model)), optimizer, 0, WIDTH)


def tied_to_a_weight_that_is_not_chosen() -> None:
    model = Model(WIDTH)
    model.head.weight = model.layers[0].weight
    layoutc.quantize_(model, "mxfp8", filter_fn=lambda _, name: name == "head")


# ------------------------------------------------------------------------------------------------ what ranks do at once
def ranks_write_different_weights() -> None:
    model = shard(build("nvfp4", WIDTH))
    param = (model.head if dist.get_rank() else model.layers[0]).weight
    with torch.no_grad():
        local(param).copy_(torch.ones(param.to_local().shape))


def all_ranks_hold_one_orientation() -> None:
    model = build("mxfp8", WIDTH)
    values = model.head.weight.dequantize()
    model.head.weight = nn.Parameter(recipe_module("mxfp8").quantize(values, orientations=("rowwise",)))
    loss_of(shard(model)).backward()


# ---------------------------------------------------------------------------------------- weights written and converted
def adamw_on_quantized_weights() -> None:
    model = shard(build("mxfp8", WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model).backward()
    with layoutc.strict():
        optimizer.step()


def a_sharded_model_made_plain() -> None:
    model = shard(build("mxfp8", WIDTH))
    optimizer = adam(model)
    model._apply(lambda tensor: (tensor * 1).half())
    loss_of(model, torch.ones(4, WIDTH).half()).backward()
    optimizer.step()


def a_sharded_weight_made_half_under_strict() -> None:
    with layoutc.strict():
        shard(build("mxfp8", WIDTH)).layers[0].weight.half()


def autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), layoutc.strict():
        loss_of(shard(build("mxfp8", WIDTH)))


def a_gathered_weight_multiplied_in_place() -> None:
    model = shard(build("mxfp8", WIDTH))
    model.layers[0].unshard()
    model.layers[0].weight.data.mul_(2)


def a_gathered_weight_overwritten() -> None:
    model = shard(build("nvfp4", WIDTH))
    model.layers[0].unshard()
    model.layers[0].weight.data.copy_(torch.ones(WIDTH, WIDTH))


def freed() -> QuantizedTensor:
    """A weight after reshard."""
    model = shard(build("mxfp8", WIDTH))
    model.layers[0].unshard()
    weight: QuantizedTensor = model.layers[0].weight.data
    model.layers[0].reshard()
    return weight


def a_freed_weight_in_a_product() -> None:
    torch.mm(torch.ones(4, WIDTH), freed().t())


def a_freed_weight_dequantized() -> None:
    freed().dequantize()


def a_freed_weight_laid_out() -> None:
    freed().buffers()


def a_freed_weight_cloned() -> None:
    freed().clone()


def freed_weights_laid_out_together() -> None:
    layoutc.buffers_of([freed()])


# -------------------------------------------------------------------------------------------------- recipes in one call
def a_state_dict_of_another_shape() -> None:
    shard(build("mxfp8", WIDTH)).load_state_dict(shard(build("mxfp8", 2 * WIDTH)).state_dict())


def a_state_dict_of_another_recipe() -> None:
    with layoutc.strict():
        shard(build("nvfp4", WIDTH)).load_state_dict(shard(build("mxfp8", WIDTH)).state_dict())


def of_two_recipes() -> tuple[QuantizedTensor, QuantizedTensor]:
    """The same values."""
    values = torch.ones(WIDTH, WIDTH)
    return recipe_module("mxfp8").quantize(values), recipe_module("nvfp4").quantize(values)


def two_recipes_joined() -> None:
    with layoutc.strict():
        torch.cat(of_two_recipes())


def two_recipes_added() -> None:
    with layoutc.strict():
        torch.add(*of_two_recipes())


def one_recipe_copied_into_another() -> None:
    first, second = of_two_recipes()
    with layoutc.strict():
        first.copy_(second)


def planes_of_another_recipe() -> None:
    first, second = of_two_recipes()
    first.data = second


REFUSED: list[tuple[Case, list[str]]] = [
    (a_shape_that_the_recipe_does_not_take, ["0.weight: mxfp8 takes rows", "(64, 48)", "the next that fits"]),
    (a_shape_in_quantized_init, ["0.weight: mxfp8 takes rows", "(64, 48)", "the next that fits is (64, 64)"]),
    (tensor_parallel_columns_inside_a_block, ["0.weight: ", "48 columns a rank", "a multiple of 32 columns"]),
    (tensor_parallel_columns_of_whole_rows, ["0.weight: shape", "one scale covers a whole row"]),
    (tensor_parallel_rows_inside_a_block, ["0.weight: ", "192 rows a rank", "a multiple of 128 rows"]),
    (
        tensor_parallel_parts_of_cast_weights_inside_a_block,
        ["0.weight: shape (384, 256)", "by tensor parallelism on dim 0 every 192 rows", "a multiple of 128"],
    ),
    (
        columns_of_cast_weights_inside_a_block,
        ["0.weight: shape (128, 192)", "by tensor parallelism on dim 1 every 96 columns", "a multiple of 128"],
    ),
    (
        parts_of_cast_weights_under_fsdp_inside_a_block,
        ["0.weight: shape (384, 256)", "by tensor parallelism on dim 0 every 192 rows", "a multiple of 128"],
    ),
    (
        fsdp_columns_inside_a_block,
        ["columns 0 to 48 of layers.0.weight", "exact at multiples of 32 columns; shard dim 0"],
    ),
    (
        fsdp_rows_of_experts_inside_a_block,
        ["48 of each 96 rows; both numbers, and where the cuts fall, must be multiples of 32"],
    ),
    (
        dtensor_rows_of_experts_inside_a_block,
        ["48 of each 96 rows; both numbers, and where the cuts fall, must be multiples of 32"],
    ),
    (amaxes_of_rows_by_columns, ["head.weight: shape (64, 64) in fp8_rowwise can't be sharded", "shard dim 0"]),
    (scales_of_whole_rows_by_columns, ["weight: fp8_rowwise can't be sharded on dim 1", "shard dim 0"]),
    (
        a_dtensor_of_pieces_that_were_quantized_apart,
        ["tensors of 96 rows that were quantized separately can't be joined", "a multiple of 128 rows", "such as 128"],
    ),
    (quantize_after_fully_shard, ["layers.0.weight is already sharded: call quantize_ before fully_shard"]),
    (cast_after_fully_shard, ["layers.0.weight is already sharded: call cast_on_gather_ before fully_shard"]),
    (cast_after_tensor_parallelism, ["0.weight is already sharded: call cast_on_gather_ before parallelize_module"]),
    (
        adamw_of_cast_weights_from_before_fully_shard,
        ["AdamW has layers.0.weight of shape (64, 64) from before", "create AdamW after fully_shard"],
    ),
    (adamw_of_gathered_weights, ["AdamW has head.weight of shape (64, 64) as FSDP2 gathered it", "call reshard()"]),
    (
        masters_of_a_model_that_is_not_trained,
        ["MasterWeights has layers.0.weight", "create MasterWeights after fully_shard"],
    ),
    (tied_to_a_weight_that_is_not_chosen, ["head.weight is tied to layers.0.weight", "and name != 'head'"]),
    (ranks_write_different_weights, ["(layers.0.weight of shape (64, 64), head.weight of shape", "in the same order"]),
    (
        all_ranks_hold_one_orientation,
        ["head.weight of shape (64, 64) in mxfp8 lacks columnwise_data", "quantize it with all"],
    ),
    (adamw_on_quantized_weights, ["would dequantize layers.0.weight of shape (32, 64) in mxfp8"]),
    (
        a_sharded_model_made_plain,
        ["layers.0.weight of shape (64, 64) was in mxfp8 when its master was made, and is plain torch.float16 now"],
    ),
    (a_sharded_weight_made_half_under_strict, ["to torch.float16", "would dequantize", "weight of shape (32, 64)"]),
    (autocast, ["aten._to_copy.default to torch.bfloat16", "would dequantize layers.0.weight of shape (64, 64)"]),
    (
        a_gathered_weight_multiplied_in_place,
        ["weight of shape (64, 64) in mxfp8 is gathered", "sharded parameter"],
    ),
    (a_gathered_weight_overwritten, ["layers.0.weight of shape (64, 64) in nvfp4 is gathered", "sharded parameter"]),
    (a_freed_weight_in_a_product, ["layers.0.weight of shape (64, 64) in mxfp8 was gathered", "has resharded it"]),
    (a_freed_weight_dequantized, ["layers.0.weight of shape (64, 64) in mxfp8 was gathered", "has resharded it"]),
    (a_freed_weight_laid_out, ["layers.0.weight of shape (64, 64) in mxfp8 was gathered", "has resharded it"]),
    (a_freed_weight_cloned, ["layers.0.weight of shape (64, 64) in mxfp8 was gathered", "has resharded it"]),
    (freed_weights_laid_out_together, ["layers.0.weight of shape (64, 64) in mxfp8 was gathered", "has resharded it"]),
    (a_state_dict_of_another_shape, ["size mismatch for layers.0.weight"]),
    (a_state_dict_of_another_recipe, ["from mxfp8 to nvfp4", "layers.0.weight of shape (32, 64)"]),
    (two_recipes_joined, ["aten.cat.default is not exact on stored bytes and would dequantize"]),
    (two_recipes_added, ["aten.add.Tensor is not exact on stored bytes and would dequantize"]),
    (one_recipe_copied_into_another, ["aten.copy_.default from nvfp4 to mxfp8"]),
    (planes_of_another_recipe, ["in mxfp8 can't take the planes of a tensor in nvfp4"]),
]


def attempt(case: Case) -> str:
    """What is raised; afterwards the group works, and a model trains."""
    said = "nothing was raised"
    try:
        case()
    except (RuntimeError, ValueError, TypeError) as error:
        said = str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return said


@pytest.mark.parametrize(("case", "words"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_wrong_use_is_refused_on_every_rank(two: Ranks, case: Case, words: list[str]) -> None:
    message = two.told(attempt, case)
    for word in words:
        assert word in message, message


def test_a_smaller_mesh_after_forward_is_refused_on_every_rank(four: Ranks) -> None:
    message = four.told(attempt, a_smaller_mesh_after_forward)
    assert "layers.0.weight: FSDP2 can't reshard a mxfp8 weight to a smaller mesh" in message


# --------------------------------------------------------------------------- odd, and no error: the same as one process
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "value"),
    [("fp8_delayed", float("inf")), ("nvfp4", float("nan")), ("fp8_block", float("nan")), ("mxfp8", float("inf"))],
)
@on("two")
def test_values_that_are_not_finite_give_the_bytes_of_one_process(recipe: str, value: float) -> None:
    """The bytes are those of the whole weight quantized, on all ranks alike, and a forward runs."""
    width = 512
    torch.manual_seed(0)
    reference = Model(width)
    with torch.no_grad():
        reference.layers[0].weight[3, 5] = value
    plain = {name: param.detach().clone() for name, param in reference.named_parameters()}
    layoutc.quantize_(reference, recipe)
    for prepare in (layoutc.quantize_, layoutc.cast_on_gather_):
        model = Model(width)
        model.load_state_dict(plain)
        prepare(model, recipe)
        shard(model)
        assert_gathers_as(model, reference)
        assert torch.equal(model(torch.ones(2, width)).isnan(), reference(torch.ones(2, width)).isnan())
        assert layoutc.check_ranks(model) == 5


def counts_adamw_without_masters() -> None:
    """Each write of a quantized weight is counted, and all ranks hold the same."""
    model = shard(build("nvfp4", WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = layoutc.implicit_dequantizes()
    train_step(model, optimizer, 0, WIDTH, my_share())
    assert (layoutc.implicit_dequantizes() - before)["aten.addcdiv_.default"] == 3
    assert layoutc.check_ranks(model) == 5


def keeps_what_is_quantized() -> None:
    """A second recipe is refused, on all ranks, and changes nothing."""
    model = build("mxfp8", WIDTH)
    for convert in (layoutc.quantize_, layoutc.cast_on_gather_):
        with pytest.raises(ValueError, match="are quantized already"):
            convert(model, "nvfp4")
    shard(model)
    with pytest.raises(ValueError, match="are quantized already"):
        layoutc.quantize_(model, "nvfp4")
    assert local(model.head.weight).LAYOUT.name == "mxfp8"


def trains_after_requires_grad_is_flipped() -> None:
    """Weights that begin to train get a master then."""
    model, reference = build("mxfp8", WIDTH), build("mxfp8", WIDTH)
    for one in (model, reference):
        one.requires_grad_(False)
    shard(model)
    optimizers = [adam(one) for one in (model, reference)]
    for one in (model, reference):
        one.requires_grad_(True)
    for step in range(3):
        assert train_step(model, optimizers[0], step, WIDTH, my_share()) == train_step(
            reference, optimizers[1], step, WIDTH
        )
    assert_gathers_as(model, reference)


def compares_recipes_by_values() -> None:
    """Equal values in two recipes are equal."""
    first, second = of_two_recipes()
    assert torch.equal(first, second)
    assert not torch.equal(first, recipe_module("nvfp4").quantize(torch.full((WIDTH, WIDTH), 2.0)))


def prints_without_reading() -> None:
    """Sharded, gathered and freed, quantized and cast."""
    model, cast = shard(build("mxfp8", WIDTH)), Model(WIDTH)
    layoutc.cast_on_gather_(cast, "nvfp4")
    shard(cast)
    before = layoutc.implicit_dequantizes()
    with layoutc.strict():
        assert isinstance(model.head.weight, DTensor)
        assert "local_tensor=MXFP8Tensor(shape=(32, 64)" in repr(model.head.weight)
        assert "local_tensor=NVFP4CastTensor(shape=(32, 64)" in repr(cast.head.weight)
        for one in (model, cast):
            one.layers[0].unshard()
            weight = one.layers[0].weight
            held = repr(weight)
            one.layers[0].reshard()
            assert "Tensor(shape=(64, 64), dtype=torch.float32, device=cpu, holds=rowwise" in held
            assert repr(weight) == held
    assert layoutc.implicit_dequantizes() == before


@pytest.mark.parametrize(
    "check",
    [
        counts_adamw_without_masters,
        keeps_what_is_quantized,
        trains_after_requires_grad_is_flipped,
        compares_recipes_by_values,
        prints_without_reading,
    ],
)
def test_odd_use_is_as_on_one_process(two: Ranks, check: Case) -> None:
    two.run(check)
