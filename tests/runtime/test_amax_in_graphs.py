"""The amax of an operand in a compiled graph: that of the bytes that are quantized, whoever computes it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import product_modes
import pytest
import torch
import torch.nn.functional as F
from quantized_cases import same_bits
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from weight_recipes import ALL_PAIRS

import layoutc
from layoutc.runtime import numerics
from layoutc.runtime.operands import amax_in_graphs
from layoutc.runtime.product_mode import Saves
from layoutc.runtime.torch_private import scaled_mm_on_cpus
from layoutc.runtime.weight.recipe_methods import RecipeMethods

TOKENS, K, M = 48, 64, 96


@pytest.fixture(autouse=True)
def _compiled_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    off = torch._functorch.config.patch(enable_autograd_cache=False)
    with off, torch._inductor.config.patch(fx_graph_cache=False):
        yield


class GatedLayer(nn.Module):
    """A norm, two layers that read it, and one that reads their product."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K, dtype=dtype)
        self.gate, self.up = (nn.Linear(K, M, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(M, K, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, K) -> the same."""
        h = self.norm(x) * 1.7
        return x + self.down(F.silu(self.gate(h)) * self.up(h) * 1e3)


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Each operand that is quantized, with the amax that it is quantized by."""
    seen: list[tuple[Tensor, Tensor]] = []
    original: Any = RecipeMethods.quantize_matrix.__func__  # type: ignore[attr-defined]

    def watched(cls: Any, x: Tensor, amax: Tensor, *args: Any, **options: Any) -> Any:
        seen.append((x.clone(), amax.clone()))
        return original(cls, x, amax, *args, **options)

    monkeypatch.setattr(RecipeMethods, "quantize_matrix", classmethod(watched))
    return seen


@pytest.mark.thorough
@pytest.mark.skipif(not scaled_mm_on_cpus, reason="needs a torch whose scaled_mm multiplies on CPUs, such as 2.13")
@pytest.mark.parametrize("saves", ["quantized", "input"] if ALL_PAIRS else ["input"])
def test_inductor_finds_the_amax_of_what_is_quantized(
    quantized: list[tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch, saves: Saves
) -> None:
    """Also of values that are within fp32, in which Inductor computes, and beyond fp16, to which it rounds them.

    Backward quantizes inputs that were saved, or computed again, by the amax that forward found.
    """
    torch.manual_seed(0)
    model = GatedLayer(torch.float16)
    layoutc.quantize_(model, "fp8_current")
    measure = numerics.matrix_amax
    monkeypatch.setattr(numerics, "matrix_amax", None)  # nothing else reads an operand for it
    compiled = torch.compile(model, fullgraph=True)
    amaxes: list[float] = []
    for value in (1.0, float("nan"), 0.0, 6e4):
        x = (torch.randn(TOKENS, K) * value).half().requires_grad_()
        del quantized[:]
        with product_modes.products("reference", saves=saves):
            compiled(x).square().sum().backward()
        # h and what `down` reads, in forward and perhaps in backward; the gradients of three outputs.
        assert len(quantized) == (2 if saves == "quantized" else 4) + 3
        for values, amax in quantized:
            assert same_bits(amax, measure(values, None))
        amaxes += [amax.item() for _, amax in quantized]
    assert {float("inf"), 0.0} < set(amaxes)
    assert any(amax != amax for amax in amaxes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_inductor_the_operator_finds_it(dtype: torch.dtype) -> None:
    x = torch.randn(7, 9).to(dtype)
    recipe = importlib.import_module("layoutc.recipes.fp8_current").FP8CurrentTensor
    found = torch.ops.layoutc.amax(x, recipe.KEY)
    assert found.dtype == dtype
    assert same_bits(found.float(), numerics.matrix_amax(x, None))
    assert amax_in_graphs.amax_of(recipe, x) is None  # eager calls find it where they quantize


@pytest.mark.parametrize("name", ["fp8_current", "nvfp4"])
def test_kernels_read_an_amax_of_another_dtype(name: str) -> None:
    """In a launch that writes buffers, and in two where sizes do not allow that."""
    pytest.importorskip("triton", reason="needs triton, which kernels are written in")
    kernels = importlib.import_module(f"layoutc.recipes.{name}.kernels").KERNELS
    orientations = importlib.import_module(f"layoutc.recipes.{name}").LAYOUT.orientations
    for shape in ((32, 64), (48, 16)):
        x = torch.randn(shape).bfloat16()
        amax = x.abs().amax().reshape(1)
        made = kernels.quantize_buffers(x, amax, orientations)
        expected = kernels.quantize_buffers(x, amax.float(), orientations)
        assert made.keys() == expected.keys()
        assert all(same_bits(made[one], expected[one]) for one in made)


@pytest.mark.parametrize(
    ("shape", "value"),
    [
        ((1, 64), -float("nan")),
        ((32, 64), 1.0),
        ((32, 64), float("nan")),
        ((48, 16), 0.0),
        ((48, 16), -float("nan")),
        ((300, 132), float("inf")),
    ],
)
def test_kernels_take_the_largest_amax_of_rows(shape: tuple[int, int], value: float) -> None:
    """Of any number of rows, in a launch that writes buffers, and in two where sizes do not allow that."""
    pytest.importorskip("triton", reason="needs triton, which kernels are written in")
    kernels = importlib.import_module("layoutc.recipes.fp8_current.kernels").KERNELS
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(shape).to(dtype)
        x[shape[0] // 2, 5] = value
        rows = x.abs().amax(1)
        made = kernels.quantize_buffers(x, rows, ("rowwise", "columnwise"))
        expected = kernels.quantize_buffers(x, numerics.matrix_amax(x, None), ("rowwise", "columnwise"))
        assert made.keys() == expected.keys()
        assert all(same_bits(made[one], expected[one]) for one in made)


def test_operands_of_many_rows_have_one_amax() -> None:
    """Each program of a kernel would read the amaxes of all rows; and a recipe that stores the amax needs it whole."""
    found = {}
    for name, rows in (("fp8_current", 1024), ("fp8_current", 1040), ("nvfp4", 64)):
        recipe = importlib.import_module(f"layoutc.recipes.{name}").Tensor
        with FakeTensorMode():
            amax = amax_in_graphs.amax_of(recipe, torch.empty(rows, 64, dtype=torch.bfloat16))
        found[name, rows] = None if amax is None else tuple(amax.shape)
    assert found == {("fp8_current", 1024): (1024,), ("fp8_current", 1040): (1,), ("nvfp4", 64): (1,)}
