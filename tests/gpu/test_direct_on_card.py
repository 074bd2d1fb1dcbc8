"""Direct launches on a card: the bytes of Triton's own launcher, whatever sizes, strides and addresses follow."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import layoutc.recipes

triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")

from layoutc.runtime.kernels import amaxes, recipe_kernels  # noqa: E402
from layoutc.runtime.kernels import direct as triton_direct  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = sorted(path.parent.name for path in Path(layoutc.recipes.__file__).parent.glob("*/kernels.py"))


def inputs(layout: Any) -> list[torch.Tensor]:
    """Sizes, strides and addresses of many classes, each twice, in turns."""
    um, uk = layout.multiple_m, layout.multiple_k
    made = []
    for m, k in [(um, uk), (3 * um, 5 * uk), (256, 1024), (512, 1024), (1024, 544 // uk * uk)] * 2:
        for dtype in (torch.bfloat16, torch.float32):
            space = torch.randn(m * k + 8, device="cuda", dtype=dtype)
            made += [space[skip : skip + m * k].view(m, k) for skip in (0, 1, 8)]
            made.append(torch.randn(k, m, device="cuda", dtype=dtype).t())
    return made


def work(kernels: recipe_kernels.Kernels, layout: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Everything that a recipe launches, from one weight."""
    (m, k), every = x.shape, layout.orientations
    amax = None
    if layout.shares_amax:
        amax = amaxes.matrix_amax(x, layout.amax_columns)
    seed = {"seed": torch.ones(1, dtype=torch.int64, device="cuda")} if layout.stochastic else {}
    cls = importlib.import_module(f"layoutc.recipes.{layout.name}").Tensor
    planes = cls.quantize_matrix(x, amax, every, **seed)  # by the reference where no kernel quantizes
    held = planes if amax is None else {**planes, "amax": amax}
    values = [kernels.dequantize(held, m, k, orientation, torch.bfloat16) for orientation in every]
    if layout.history:
        return [*planes.values(), *values]
    laid_out = kernels.lay_out(held, m, k, every)
    if kernels.quantize_tile is None:
        return [*planes.values(), *values, *laid_out.values()]
    return [*planes.values(), *values, *laid_out.values(), *kernels.quantize_buffers(x, amax, every, **seed).values()]


def bits(made: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.contiguous().view(torch.uint8) for each in made]


def differing(made: list[torch.Tensor], others: list[torch.Tensor]) -> list[str]:
    """Of each tensor that differs: its number, how many bytes differ, and the first and last of them."""
    places = [(nth, (a != b).nonzero().tolist()) for nth, (a, b) in enumerate(zip(made, others, strict=True))]
    return [f"tensor {nth}: {len(at)} bytes, {at[0]} to {at[-1]}" for nth, at in places if at]


@pytest.mark.parametrize("name", NAMES)
def test_direct_and_ordinary_launches_give_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module(f"layoutc.recipes.{name}.kernels").KERNELS
    layout = importlib.import_module(f"layoutc.recipes.{name}").LAYOUT
    given = inputs(layout)
    direct = [bits(work(kernels, layout, x)) for x in given]
    monkeypatch.setattr(triton_direct, "state_of", lambda _: None)  # Triton's own launcher for all that follows
    for nth, (x, made) in enumerate(zip(given, direct, strict=True)):
        ordinary = bits(work(kernels, layout, x))
        if not all(map(torch.equal, made, ordinary)):
            again = bits(work(kernels, layout, x))
            pytest.fail(
                f"input {nth}, {x.dtype}, {x.shape}, {x.stride()}, {x.storage_offset()}: "
                f"{differing(made, ordinary)}; ordinary launches: {differing(ordinary, again)}"
            )


def test_launches_are_direct_here() -> None:
    """Triton's launcher is asked once."""
    kernels = importlib.import_module("layoutc.recipes.mxfp8.kernels").KERNELS
    assert triton_direct.supported()
    x = torch.randn(96, 224, device="cuda", dtype=torch.bfloat16)
    expected = kernels.quantize(x, None, ("rowwise",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(recipe_kernels.quantize_kernel), "run", lambda *_, **__: pytest.fail("an ordinary launch"))
        made = kernels.quantize(x, None, ("rowwise",))
    assert all(map(torch.equal, made.values(), expected.values()))


def test_on_another_stream_and_in_a_graph() -> None:
    """The stream is the current one at each launch."""
    kernels = importlib.import_module("layoutc.recipes.mxfp8.kernels").KERNELS
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    out = kernels.quantize(x, None, ("rowwise", "columnwise"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.quantize(x, None, ("rowwise", "columnwise"), out)
    x.copy_(torch.randn_like(x))
    expected = kernels.quantize(x.clone(), None, ("rowwise", "columnwise"))
    graph.replay()
    assert all(map(torch.equal, out.values(), expected.values()))
