"""Kernels on a card against the references: every fp32 value through every cast, ragged shapes, planes in place."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import layoutc.recipes

triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")
import triton.language as tl  # noqa: E402

from layoutc.runtime.kernels import launch  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = sorted(path.parent.name for path in Path(layoutc.recipes.__file__).parent.glob("*/kernels.py"))
# One recipe for each element format, and for each scale format and rounding.
ELEMENTS = ["mxfp8", "fp8_e5m2_current", "nvfp4", "mxfp6_e3m2", "mxfp6_e2m3", "e3m4_block", "int8_block", "mxint8"]
SCALES = ["mxfp8", "nvfp4", "mxfp4"]
CHUNK = 1 << 26
LEVEL = launch.level_of(torch.cuda.get_device_capability()) if torch.cuda.is_available() else 0


def part(name: str, module: str) -> ModuleType:
    return importlib.import_module(f"layoutc.recipes.{name}.{module}")


@triton.jit
def apply_kernel(x, one, out, FUNCTION: tl.constexpr, LEVEL: tl.constexpr, TILE: tl.constexpr):
    """FUNCTION of x * 1, one code in a byte; as in a kernel, what it is given comes out of an operation.

    LEVEL: that of conversions; None for a function that takes none.
    """
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    values = tl.load(x + i) * tl.load(one)
    codes = FUNCTION(values) if LEVEL is None else FUNCTION(values, LEVEL)
    tl.store(out + i, codes.to(tl.uint8))


def every_fp32(function: Any, reference: Any, hardware: int, signs: int) -> None:
    """All bit patterns, or all without a sign."""
    level = hardware if "CVT_LEVEL" in function.arg_names else None
    one, out = torch.ones(1, device="cuda"), torch.empty(CHUNK, dtype=torch.uint8, device="cuda")
    steps = torch.arange(CHUNK, dtype=torch.int32, device="cuda")
    for start in range(0, signs << 31, CHUNK):
        x = (steps + (start - (1 << 32) if start >= 1 << 31 else start)).view(torch.float32)
        out.fill_(0x5A)
        apply_kernel[(CHUNK // 1024,)](x, one, out, function, level, 1024, enable_fp_fusion=False)
        wrong = (out != reference(x)).nonzero()
        assert not len(wrong), (hex(start), x[wrong[:4, 0]].tolist(), out[wrong[:4, 0]].tolist())


@pytest.mark.parametrize("hardware", [100, 90, 0])
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_fp32_value_through_the_element_cast(name: str, hardware: int) -> None:
    """2^32 values; NaN of every payload and sign gives the one code."""
    if hardware > LEVEL:
        pytest.skip(f"the card has no conversions of level {hardware}")
    every_fp32(part(name, "kernels").encode, part(name, "reference").encode, hardware, 2)


@pytest.mark.parametrize("name", SCALES)
def test_every_magnitude_through_the_scale_cast(name: str) -> None:
    """2^31 values: scales are not negative."""
    every_fp32(part(name, "kernels").encode_scale, part(name, "reference").encode_scale, LEVEL, 1)


@pytest.mark.parametrize("name", NAMES)
def test_quantizing_into_a_tensor_writes_its_planes(name: str) -> None:
    """No copy is made: the planes stay where they are, and hold the bytes of the reference."""
    recipe = importlib.import_module(f"layoutc.recipes.{name}")
    first, second = (torch.randn(256, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    made = recipe.quantize(first)
    addresses = {plane: tensor.data_ptr() for plane, tensor in made.planes().items()}
    before = made.planes()["amax"].clone() if recipe.LAYOUT.history else None
    seed = torch.ones(1, dtype=torch.int64)
    recipe.quantize(second, out=made, **({"seed": seed} if recipe.LAYOUT.stochastic else {}))
    assert {plane: tensor.data_ptr() for plane, tensor in made.planes().items()} == addresses
    amax = None if not recipe.LAYOUT.shares_amax else recipe.Tensor.shared_amax(second.cpu())
    if before is not None:
        amax = before[:1].cpu()  # the scale follows the step before
    expected = recipe.quantize_reference(
        second.cpu(), amax=amax, **({"seed": seed} if recipe.LAYOUT.stochastic else {})
    )
    for plane, stored in expected.items():
        assert torch.equal(stored, made.planes()[plane].cpu()), plane


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_current"])
def test_more_than_two_to_the_31_elements(name: str) -> None:
    """The last rows of a weight of 2^31 + 2^20 elements, against the reference of those rows."""
    recipe = importlib.import_module(f"layoutc.recipes.{name}")
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    x = torch.randn(64, 1 << 15, device="cuda", dtype=torch.bfloat16).repeat((1 << 16) // 64 + 1, 1)[: (1 << 16) + 32]
    made = recipe.quantize(x)
    tail = x[-64:].contiguous()
    amax = recipe.Tensor.shared_amax(x) if recipe.LAYOUT.shares_amax else None
    expected = recipe.quantize_reference(tail, amax=amax)
    for plane, stored in expected.items():
        found = made.planes()[plane]
        assert torch.equal(stored, found[-stored.shape[0] :]), plane
    assert torch.equal(made.dequantize()[-64:], recipe.quantize(tail, amax=amax).dequantize())


@pytest.mark.parametrize("name", ["nvfp4", "fp8_block"])
def test_planes_that_begin_between_words(name: str) -> None:
    """As a cut of a packed file would: read all the same, and refused where a kernel would write words into them."""
    recipe, kernels = importlib.import_module(f"layoutc.recipes.{name}"), part(name, "kernels").KERNELS
    made = recipe.quantize(torch.randn(256, 512, device="cuda"))
    planes = made.planes()
    moved = {}
    for plane, stored in planes.items():
        is_code = stored.dtype == torch.uint8
        space = torch.empty(stored.numel() + 1, dtype=stored.dtype, device="cuda")
        moved[plane] = space[1:].view(stored.shape).copy_(stored) if is_code else stored
    for orientation in recipe.LAYOUT.orientations:
        values = kernels.dequantize(moved, 256, 512, orientation, torch.float32)
        assert torch.equal(values, kernels.dequantize(planes, 256, 512, orientation, torch.float32))
    found = kernels.lay_out(moved, 256, 512, recipe.LAYOUT.orientations)
    for buffer, entries in kernels.lay_out(planes, 256, 512, recipe.LAYOUT.orientations).items():
        assert torch.equal(entries, found[buffer]), buffer
    with pytest.raises(ValueError, match="at a multiple of 4 bytes"):
        kernels.quantize(torch.randn(256, 512, device="cuda"), None, recipe.LAYOUT.orientations, moved)
