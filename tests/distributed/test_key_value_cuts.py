"""1,024 rows of keys or values over sixteen ranks, in blocks of 128 rows: each rank has half a block.

Four ranks have a quarter or a half of a block each, in every run of the tests; sixteen ranks run with
LAYOUTC_ALL_PAIRS=1. The oracle is the whole weight, quantized in one process.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from harness import Ranks, mesh_of
from test_broadcasts import BROADCAST, assert_gathers
from test_cut_weights import Weights, are_whole, assert_same, params, recipe_module, whole
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from weight_recipes import ALL_PAIRS

ROWS = {"mxfp8": 32, "nvfp4": 32, "fp8_block": 256}  # over four ranks
SECONDS = 180.0


@pytest.fixture(scope="module")
def sixteen() -> Iterator[Ranks]:
    """Sixteen processes."""
    ranks = Ranks(16)
    yield ranks
    ranks.stop()


def are_whole_in_and_out(recipe: str, rows: int) -> None:
    """Gathered, in full state dicts, distributed; from the first rank to shards, and to two replicas of shards."""
    world, given = dist.get_world_size(), [(rows, 256)]
    assert rows // world % recipe_module(recipe).LAYOUT.block_rows
    are_whole(recipe, world, given, Shard(0), mesh_of(world))
    expected = whole(recipe, given, 0)
    for mesh in (mesh_of(world), mesh_of(2, world // 2, names=("replicate", "shard"))):
        model = Weights(recipe, given, 50)
        fully_shard(model, mesh=mesh)
        state = {"0.weight": expected[0]} if dist.get_rank() == 0 else {}
        set_model_state_dict(model, state, options=BROADCAST)
        assert_same(params(model)[0].full_tensor().data, expected[0])
        assert_gathers(model, expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "rows"), ROWS.items())
def test_parts_of_blocks_on_four_ranks_are_whole(four: Ranks, recipe: str, rows: int) -> None:
    four.run(are_whole_in_and_out, recipe, rows)


@pytest.mark.skipif(not ALL_PAIRS, reason="sixteen processes; needs LAYOUTC_ALL_PAIRS=1")
def test_half_a_block_on_each_of_sixteen_ranks_is_whole(sixteen: Ranks) -> None:
    sixteen.run(are_whole_in_and_out, "fp8_block", 1024, seconds=SECONDS)
