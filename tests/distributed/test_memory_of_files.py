"""What a rank holds while a folder of another program is loaded and written: its shard, and some weights at a time."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc.checkpoint import export_safetensors, load_safetensors

STATUS = Path("/proc/self/status")
pytestmark = pytest.mark.skipif(not STATUS.is_file(), reason="needs Linux: memory is read from /proc")
ROWS, COLUMNS, LAYERS = 2048, 4096, 32
FILES = {"fp8_block": "deepseek", "int4_packed128": "compressed_tensors", "mxfp4": "gpt_oss"}
COMPLETED = ("mxfp4",)  # quantizes its columnwise codes from fp32 values of the shard, of one weight at a time
MIB = 2**20
TRIM, MMAP = -1, -3  # of mallopt: from how many bytes on memory is given back, and asked for in a piece of its own


def anonymous() -> int:
    """Bytes of memory that this process holds and that no file is behind."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@contextmanager
def most(found: list[int]) -> Iterator[None]:
    """Appends the most memory that the process held inside, beyond what it held before."""
    before, done, peak = anonymous(), threading.Event(), 0

    def look() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found.append(max(peak, anonymous() - before))


@contextmanager
def given_back_at_once() -> Iterator[None]:
    """Makes the C library give back what is freed, so that a process holds what it uses."""
    library = ctypes.CDLL(None)
    library.mallopt(TRIM, 1 << 17), library.mallopt(MMAP, 1 << 17)
    try:
        yield
    finally:
        library.mallopt(TRIM, 1 << 26), library.mallopt(MMAP, 1 << 25)


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
            export_safetensors(model, out, files=FILES[recipe], max_shard_bytes=2**40)
        dist.barrier()
    weight = 2 * shards // LAYERS  # of both ranks
    return found, shards, weight


@pytest.mark.parametrize("recipe", FILES)
def test_ranks_hold_their_shard_and_some_weights(recipe: str, two: Ranks, tmp_path: Path) -> None:
    """A folder of a few hundred MB, and one file: neither is held whole anywhere."""
    whole = model_of(recipe, "cpu")
    for param in whole.parameters():
        for name, plane in param.planes().items():
            plane.view(torch.uint8).random_(0, 112 if "scale" in name else 120)
    export_safetensors(whole, tmp_path / "in", files=FILES[recipe], max_shard_bytes=2**40)
    del whole
    results = two.run(loads_and_writes, recipe, str(tmp_path / "in"), str(tmp_path / "out"))
    for (load, export), shards, weight in results:
        slices = weight if recipe not in COMPLETED else 4 * ROWS * COLUMNS // 2 * 4
        assert shards <= load + MIB
        assert load <= shards + slices + 2 * MIB, f"loading took {(load - shards) / MIB:.0f} MiB beyond the shard"
        assert export <= 4 * weight + 2 * MIB, (
            f"writing took {export / MIB:.0f} MiB, and a weight has {weight / MIB:.0f}"
        )
    first, second = (tmp_path / name / "model.safetensors" for name in ("in", "out"))
    with open(first, "rb") as one, open(second, "rb") as other:
        while piece := one.read(1 << 24):
            assert piece == other.read(1 << 24)
        assert not other.read(1)
