"""On a card: references give the CPU's bytes, planes follow streams and pinning, FSDP2 over NCCL trains to the bit."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
SHAPES = ((32, 32), (96, 256), (160, 96), (384, 160), (2048, 4096))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def recipe(name: str) -> Any:
    return importlib.import_module(f"layoutc.recipes.{name}")


def awkward(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights over 80 binades with zero blocks, zeros of both signs, and the largest and smallest magnitudes."""
    generator = torch.Generator().manual_seed(m * k)
    x = torch.randn(m, k, generator=generator) * torch.exp2(torch.randint(-40, 40, (m, 1), generator=generator).float())
    x[: m // 4, : k // 4] = 0
    x[0, :4] = torch.tensor([-0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny, -torch.finfo(dtype).tiny])
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RECIPES)
def test_references_give_the_same_bytes_as_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    one = recipe(name)
    for m, k in SHAPES:
        x = awkward(m, k, dtype)
        cpu, cuda = one.quantize(x), one.quantize(x.cuda())
        for plane, value in cpu.planes().items():
            assert torch.equal(value.view(torch.uint8), cuda.planes()[plane].cpu().view(torch.uint8)), (plane, m, k)
        for buffer, value in cpu.buffers().items():
            assert torch.equal(value.view(torch.uint8), cuda.buffers()[buffer].cpu().view(torch.uint8)), (buffer, m, k)
        expected, values = cpu.dequantize(torch.float32), cuda.dequantize(torch.float32).cpu()
        # Some factors overflow here, and inf * 0 has another NaN on each machine: any NaN is a NaN.
        assert torch.equal(expected.isnan(), values.isnan()), (m, k)
        assert torch.equal(expected.nan_to_num(0).view(torch.int32), values.nan_to_num(0).view(torch.int32)), (m, k)


@pytest.mark.parametrize("special", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", RECIPES)
def test_specials_give_the_same_bytes_as_on_the_cpu(name: str, special: float) -> None:
    x = torch.randn(64, 64)
    x[3, 5] = special
    cpu, cuda = recipe(name).quantize(x), recipe(name).quantize(x.cuda())
    for plane, value in cpu.planes().items():
        found = cuda.planes()[plane].cpu()
        if value.dtype == torch.float32:
            assert torch.equal(value.nan_to_num(1.5), found.nan_to_num(1.5)), plane  # any NaN is a NaN
        else:
            assert torch.equal(value, found), plane


@pytest.mark.parametrize("name", RECIPES)
def test_every_bf16_value_is_encoded_as_on_the_cpu(name: str) -> None:
    reference = importlib.import_module(f"layoutc.recipes.{name}.reference")
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    assert torch.equal(reference.encode(x), reference.encode(x.cuda()).cpu())


@pytest.mark.parametrize("name", RECIPES)
def test_moves_pins_and_follows_streams(name: str) -> None:
    weight = recipe(name).quantize(torch.randn(64, 64))
    pinned = weight.pin_memory()
    assert pinned.is_pinned()
    assert all(plane.is_pinned() for plane in pinned.planes().values())
    moved = pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert type(moved) is type(weight)
    assert torch.equal(moved.cpu(), weight)
    stream = torch.cuda.Stream()
    before = {name: plane.clone() for name, plane in moved.planes().items()}
    moved.record_stream(stream)
    for name, plane in moved.planes().items():
        assert torch.equal(plane.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_fsdp2_over_nccl_trains_as_one_process_does() -> None:
    script = Path(__file__).with_name("train_nccl.py")
    ranks = min(4, torch.cuda.device_count())
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    program = runpy.run_path(str(script))
    expected = program["runs"](program["RECIPES"], program["MODES"], ranks)
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if " losses " in line)
    assert list(lines) == [f"{name}, {mode}" for name, mode in expected], done.stdout
    inexact = {run for run, verdict in lines.items() if not verdict.endswith("equal to the bit")}
    assert inexact <= {f"{name}, offload" for name in RECIPES}, done.stdout  # masters are stepped on the CPU
