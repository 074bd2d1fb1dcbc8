"""Launches that compiled graphs keep, under Triton's interpreter: the reference's bytes, for later tensors."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import triton
from quantized_cases import same_bits
from torch import Tensor

from layoutc.runtime.kernels import launch, plans
from layoutc.runtime.weight.recipe_methods import RecipeMethods
from layoutc.runtime.weight.returned_buffers import needed_planes

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
SHAPE = (64, 128)


def on_cpus(x: Tensor, dtype: torch.dtype | None = None) -> bool:
    return type(x) is Tensor and x.numel() > 0


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], list[Tensor]]], list[Tensor]]:
    """Runs an operator by the launch that an earlier call has left, and by nothing else."""
    monkeypatch.setattr(plans, "cache", plans.Plans())

    def run(operator: Callable[[], list[Tensor]]) -> list[Tensor]:
        with monkeypatch.context() as patch:
            for name in ("quantize_buffers", "quantize_matrix", "lay_out"):
                patch.setattr(RecipeMethods, name, None)
            return operator()

    return run


@pytest.mark.parametrize(
    ("name", "by_rows"),
    [
        *(("fp8_current", False), ("fp8_current", True), ("fp8_e5m2_current", True)),
        *(("fp8_block", False), ("mxfp8", False)),  # scales of blocks; scales in the GEMM's order
        ("fp8_rowwise", False),  # planes alone, without the amaxes of columns that other planes need
    ],
)
def test_quantizing_again(name: str, by_rows: bool, kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cls: Any = import_module(f"layoutc.recipes.{name}").Tensor
    layout, seeded = cls.LAYOUT, torch.Generator().manual_seed(0)
    orientations = ["rowwise"] if layout.own_amax else list(layout.orientations)
    first, second = (torch.randn(SHAPE, generator=seeded).bfloat16() * scale for scale in (1, 50))

    second[-1, -1] = 999  # the amax is that of the last row

    def quantized(x: Tensor) -> list[Tensor]:
        rows = x.abs().amax(1)
        amax = None if not layout.takes_amax(orientations) else rows if by_rows else rows.amax(0, keepdim=True)
        arguments = cls.KEY, orientations, bool(layout.swizzled), True
        made: list[Tensor] = torch.ops.layoutc.run_quantize_buffers(x, amax, *arguments)
        return made

    expected = quantized(second)
    monkeypatch.setattr(launch, "usable", on_cpus)
    quantized(first)
    made = kept(lambda: quantized(second))
    assert [one.dtype for one in made] == [one.dtype for one in expected]
    assert all(map(same_bits, made, expected))


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise", "fp8_block"])
def test_laying_out_again(name: str, typed: bool, kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cls: Any = import_module(f"layoutc.recipes.{name}").Tensor
    seeded, needed = torch.Generator().manual_seed(0), needed_planes(cls.LAYOUT, ("columnwise",))
    first, second = (cls.REFERENCE.quantize_reference(torch.randn(128, 128, generator=seeded)) for _ in range(2))

    def laid_out(planes: dict[str, Tensor]) -> list[Tensor]:
        arguments = 128, 128, cls.KEY, ["columnwise"], False, typed
        made: list[Tensor] = torch.ops.layoutc.run_lay_out([planes[one] for one in needed], *arguments)
        return made

    expected = laid_out(second)
    monkeypatch.setattr(launch, "usable", on_cpus)
    laid_out(first)
    made = kept(lambda: laid_out(second))
    assert [one.dtype for one in made] == [one.dtype for one in expected]
    assert all(map(same_bits, made, expected))
