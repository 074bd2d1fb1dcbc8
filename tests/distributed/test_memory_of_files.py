"""What a rank holds while a folder of another program is loaded and written: its shard, and some weights at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from peaks import STATUS, given_back_at_once, most
from torch import nn
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc.checkpoint import export_safetensors, load_safetensors

pytestmark = pytest.mark.skipif(not STATUS.is_file(), reason="needs Linux: memory is read from /proc")
ROWS, COLUMNS, LAYERS = 2048, 4096, 32
FILES = {
    "fp8_block": "deepseek",
    "int4_packed128": "compressed_tensors",
    "nf4_bitsandbytes": "bitsandbytes_double",  # whose scales are compared with what the codes of the source stand for
}
MIB = 2**20
# Weights that are held while one is written: that one, and the next in gloo's buffer, as it was gathered, in its order,
# and as it will be written.
WRITING = 5


def model_of(recipe: str, device: str) -> Any:
    """Layers of one size, in the recipe."""
    model = nn.Sequential(
        *(nn.Linear(COLUMNS, ROWS, bias=False, device="meta", dtype=torch.bfloat16) for _ in range(LAYERS))
    )
    layoutc.quantize_(model, recipe, keep_values=False)
    return model if device == "meta" else model.to_empty(device=device)


def loads_and_writes(recipe: str, folder: str, out: str) -> tuple[list[int], int, int]:
    """The most that loading and writing take, what shards take, and what a weight takes."""
    model = model_of(recipe, "meta")
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    found: list[int] = []
    with given_back_at_once():
        with most(found):
            model.to_empty(device="cpu")
            load_safetensors(model, folder, files=FILES[recipe])
        shards = sum(plane.nbytes for p in model.parameters() for plane in p._local_tensor.planes().values())
        with most(found):
            export_safetensors(model, out, files=FILES[recipe], max_shard_bytes=2**40, source=folder)
        dist.barrier()
    weight = 2 * shards // LAYERS  # of both ranks
    return found, shards, weight


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*are rounded to codes:UserWarning")
@pytest.mark.parametrize("recipe", FILES)
def test_ranks_hold_their_shard_and_some_weights(recipe: str, tmp_path: Path) -> None:
    """A folder of a few hundred MB, and one file: neither is held whole anywhere. Ranks are new, so that nothing that
    earlier tests have left in them moves their memory."""
    whole = model_of(recipe, "cpu")
    for param in whole.parameters():
        for name, plane in param.planes().items():
            plane.view(torch.uint8).random_(0, 112 if "scale" in name else 120)
    export_safetensors(whole, tmp_path / "in", files=FILES[recipe], max_shard_bytes=2**40)
    del whole
    with Ranks(2) as ranks:
        results = ranks.run(loads_and_writes, recipe, str(tmp_path / "in"), str(tmp_path / "out"))
    for (load, export), shards, weight in results:
        beyond = load - shards
        assert -8 * MIB <= beyond <= weight + 2 * MIB, f"loading took {beyond / MIB:.0f} MiB beyond the shard"
        assert export <= WRITING * weight + 2 * MIB, f"writing took {export / MIB:.0f} MiB, a weight {weight / MIB:.0f}"
    first, second = (tmp_path / name / "model.safetensors" for name in ("in", "out"))
    with open(first, "rb") as one, open(second, "rb") as other:
        while piece := one.read(1 << 24):
            assert piece == other.read(1 << 24)
        assert not other.read(1)
