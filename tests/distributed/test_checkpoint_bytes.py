"""Files of checkpoints hold each byte once, the same bytes each time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import mesh_of, on
from models import adam, local, recipe_module
from resharding import Sizes, awkward, build, load, save, shard, step
from weight_recipes import CUT_APART

EVERY = CUT_APART


def files(folder: Path) -> dict[str, bytes]:
    """The files with tensors; .metadata names each save."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.distcp"))}


@pytest.mark.sample(3)
@pytest.mark.parametrize("recipe", EVERY)
def test_a_file_is_as_large_as_its_planes(recipe: str, tmp_path: Path) -> None:
    """Within 1% of the planes of a million elements; a fraction of bfloat16 that the layout's figure tells.

    That figure is of one pass, and of rows and columns without end. Where passes read codes of their own, a file has
    both.
    """
    one = recipe_module(recipe)
    plain = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = one.quantize(plain)
    held = sum(plane.nbytes for plane in weight.planes().values())
    for name, tensor in (("quantized", weight), ("again", weight), ("plain", plain)):
        dcp.save({"weight": tensor}, checkpoint_id=tmp_path / name, no_dist=True)
    quantized, again, dense = (files(tmp_path / name) for name in ("quantized", "again", "plain"))
    assert quantized == again
    size = sum(map(len, quantized.values()))
    assert held < size < 1.01 * held
    layout, ratio = one.LAYOUT, size / sum(map(len, dense.values()))
    per_element = sum(facts.nbytes for facts in layout.planes(1024, 1024).values()) / 1024**2
    assert abs(ratio / (per_element / 2) - 1) < 0.01, (ratio, per_element)
    if not layout.passes_differ:
        beside = [name for name, plane in layout.stored.items() if None in plane]  # of whole rows or columns, or of all
        rest = sum(layout.planes(1024, 1024)[name].nbytes for name in beside) / 1024**2
        assert per_element == pytest.approx(layout.bytes_per_element + rest, rel=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipes", [EVERY[at::4] for at in range(4)], ids="-".join)
@on("two")
def test_every_rank_writes_the_same_bytes_each_time(recipes: tuple[str, ...], tmp_path: Path) -> None:
    """Also where cuts go through blocks, and rows of the planes are other ranks'. Two saves of a trained model, and one
    of the model that has loaded it: the same bytes from every rank, and of weights the bytes of their own rows."""
    folder = str(tmp_path)
    sizes = {recipe: awkward(recipe) for recipe in recipes}
    mesh, group = mesh_of(dist.get_world_size()), dist.group.WORLD
    model = shard(build(sizes), mesh)
    optimizer = adam(model)
    step(model, optimizer, 0)
    save(model, optimizer, f"{folder}/first", group)
    save(model, optimizer, f"{folder}/again", group)
    other = shard(build(sizes, 1), mesh)
    other_optimizer = adam(other)
    load(other, other_optimizer, f"{folder}/first", group)
    save(other, other_optimizer, f"{folder}/loaded", group)
    dist.barrier()
    first = files(Path(folder) / "first")
    assert len(first) == dist.get_world_size()
    for name in ("again", "loaded"):
        assert files(Path(folder) / name) == first, name


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "nvfp4", "int4_group32"])
@on("two")
def test_shards_that_cut_blocks_write_their_own_rows(recipe: str, tmp_path: Path) -> None:
    """A shard's file has nothing of the rows of blocks that other ranks hold. Shards that cut blocks: codes of own rows
    alone, and the scales that they need."""
    folder = str(tmp_path / "checkpoint")
    rank, layout = dist.get_rank(), recipe_module(recipe).LAYOUT
    model = shard(build({recipe: Sizes(3 * layout.block_rows, 8192, 1, layout.block_rows)}), mesh_of(2))
    weight = model[recipe].first.weight
    shard_ = local(weight)
    assert shard_.store.halo.rows
    state = {"weight": weight.detach()}
    dcp.save(state, checkpoint_id=folder)
    own = sum(shard_.entries(name).nbytes for name in shard_.planes())
    size = len(files(Path(folder))[f"__{rank}_0.distcp"])
    assert own < size < 1.01 * own + 4096, (own, size)
    assert own < sum(plane.nbytes for plane in shard_.planes().values())
