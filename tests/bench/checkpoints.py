"""Times of saving and loading a model of a billion weights, in each recipe and in bf16.

    python tests/bench/checkpoints.py [RECIPE...]                             # one card
    torchrun --nproc-per-node 2 tests/bench/checkpoints.py [RECIPE...]
    LAYOUTC_LAYERS=2 LAYOUTC_WIDTH=1024 python tests/bench/checkpoints.py     # small, also on a CPU

Weights alone, on the device, under fully_shard; no optimizer state. For each: what is on disk, and the median of three
of: checkpoint.save; torch's own dcp.save; checkpoint.load; torch's own dcp.load; the time for which async_save keeps
the caller (with a stager that is used again, where torch can; its memory pinned, where there is a card), and until it
is done. Saves go to new folders, and end with fsync; loads read from the page cache. Before it is timed, a load is
compared byte for byte with what was saved.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from weight_recipes import WEIGHTS

import layoutc
import layoutc.recipes
from layoutc import checkpoint
from layoutc.runtime.weight.tensor import QuantizedTensor

LAYERS, WIDTH = int(os.environ.get("LAYOUTC_LAYERS", "15")), int(os.environ.get("LAYOUTC_WIDTH", "8192"))
REPEATS = 3
REUSES = not torch.__version__.startswith("2.11")  # there a stager serves once (pytorch#183413)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Row = dict[str, Any]


def model_of(recipe: str, seed: int) -> nn.Module:
    """LAYERS weights of WIDTH x WIDTH, bf16 or quantized from bf16, sharded over all ranks."""
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)))
    if recipe != "bf16":
        layoutc.quantize_(model, recipe)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def shards(model: nn.Module) -> list[torch.Tensor]:
    """Every plain tensor that this rank holds."""
    found: list[torch.Tensor] = []
    for param in model.parameters():
        local = param._local_tensor  # type: ignore[attr-defined]
        found += [local.entries(name) for name in local.planes()] if isinstance(local, QuantizedTensor) else [local]
    return found


def timed(work: Callable[[], Any]) -> float:
    """Seconds that the slowest rank takes."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    work()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)  # over gloo, since it lies on the host
    return float(took)


def measure(recipe: str, folder: Path) -> Row:
    """One row of the table."""
    model = model_of(recipe, 0)
    state = {"model": model.state_dict()}
    is_first = dist.get_rank() == 0
    row: Row = {"recipe": recipe}

    def clean() -> None:
        dist.barrier()
        if is_first:
            shutil.rmtree(folder / "timed", ignore_errors=True)
        dist.barrier()

    def repeat(name: str, work: Callable[[], Any]) -> None:
        times = []
        for _ in range(REPEATS):
            clean()
            times.append(timed(work))
        row[name] = statistics.median(times)

    checkpoint.save(state, folder / "kept")
    row["bytes"] = sum(path.stat().st_size for path in (folder / "kept").iterdir())
    other = model_of(recipe, 1)
    loaded = {"model": other.state_dict()}
    checkpoint.load(loaded, folder / "kept")
    for ours, theirs in zip(shards(model), shards(other), strict=True):
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)), recipe
    repeat("save", lambda: checkpoint.save(state, folder / "timed"))
    repeat("dcp.save", lambda: dcp.save(state, checkpoint_id=folder / "timed"))
    repeat("load", lambda: checkpoint.load(loaded, folder / "kept"))
    repeat("dcp.load", lambda: dcp.load(loaded, checkpoint_id=folder / "kept"))
    kinds = {"async": False} | ({"async pinned": True} if DEVICE == "cuda" else {})
    for name, is_pinned in kinds.items():
        blocking, whole, stager = [], [], DefaultStager(StagingOptions(is_pinned, False, False, False))
        for _ in range(REPEATS + REUSES):  # the first save allocates what the others use again
            clean()
            futures: list[Any] = []
            begin = partial(checkpoint.async_save, state, folder / "timed", async_stager=stager)
            blocking.append(timed(partial(lambda f, b: f.append(b()), futures, begin)))
            whole.append(blocking[-1] + timed(futures[0].result))
            if not REUSES:
                stager = DefaultStager(StagingOptions(is_pinned, False, False, False))
        row[name], row[f"{name}, done"] = (statistics.median(times[-REPEATS:]) for times in (blocking, whole))
        stager.close()
    clean()
    if is_first:
        shutil.rmtree(folder / "kept")
    dist.barrier()
    return row


def main(recipes: list[str]) -> None:
    """Measures bf16 and the recipes named, or all."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29571")
    rank = int(os.environ.setdefault("RANK", "0"))
    os.environ.setdefault("WORLD_SIZE", "1")
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    folder = Path(os.environ.get("LAYOUTC_FOLDER", tempfile.gettempdir())) / "layoutc_checkpoints"
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    rows = []
    for recipe in ["bf16", *(recipes or WEIGHTS)]:
        rows.append(measure(recipe, folder))
        if rank == 0:
            print(json.dumps(rows[-1]), flush=True)
    if rank == 0:
        name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
        count = LAYERS * WIDTH * WIDTH
        print(f"{name}, {dist.get_world_size()} ranks, torch {torch.__version__}, {count:,} weights, seconds")
        columns = [key for key in rows[0] if key not in ("recipe", "bytes")]
        print(f"{'recipe':18} {'GB':>6} {'B/weight':>9} " + " ".join(f"{c:>18}" for c in columns))
        for row in rows:
            size = f"{row['bytes'] / 1e9:6.3f} {row['bytes'] / count:9.5f}"
            print(f"{row['recipe']:18} {size} " + " ".join(f"{row[c]:18.3f}" for c in columns))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
