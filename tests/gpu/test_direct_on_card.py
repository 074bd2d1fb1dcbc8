"""Direct launches on a card: the bytes of Triton's own launcher, whatever sizes, strides and addresses follow."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import layoutc.recipes
from layoutc.ints.sizes import up

triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")

from layoutc.runtime.kernels import amaxes, recipe_kernels  # noqa: E402
from layoutc.runtime.kernels import direct as triton_direct  # noqa: E402
from layoutc.runtime.operands import launched  # noqa: E402
from layoutc.runtime.weight import operators  # noqa: E402

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


def placed(layout: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices that begin, and whose rows begin, at addresses of every class; of whole tiles and of parts of tiles."""
    um, uk = layout.multiple_m, layout.multiple_k
    for m, k in {(up(rows, um), up(columns, uk)) for rows, columns in ((256, 512), (92, 260), (516, 1040))}:
        for dtype in (torch.bfloat16, torch.float32):
            values = torch.randn(m, k, device="cuda", dtype=dtype)
            for skip, gap in ((0, 0), (1, 0), (0, 1), (0, 8), (4, 4)):
                space = torch.empty(skip + m * (k + gap), device="cuda", dtype=dtype)
                yield (
                    f"{dtype}, rows {k + gap} apart, {skip} from 16 bytes",
                    space[skip:].view(m, k + gap)[:, :k].copy_(values),
                )
            yield f"{dtype}, columns", values.t().contiguous().t()


def moved(plane: torch.Tensor) -> torch.Tensor:
    """The same four bytes from where it begins."""
    space = torch.empty(plane.nbytes + 4, device="cuda", dtype=torch.uint8)[4:]
    return space.view(plane.dtype).view(plane.shape).copy_(plane)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_reference_wherever_a_matrix_lies(name: str) -> None:
    """Planes and buffers; threads read 2 to 16 bytes at a time, which is other code for each."""
    recipe = importlib.import_module(f"layoutc.recipes.{name}")
    reference = importlib.import_module(f"layoutc.recipes.{name}.reference")
    kernels, layout = importlib.import_module(f"layoutc.recipes.{name}.kernels").KERNELS, recipe.LAYOUT
    if layout.history or kernels.quantize_tile is None:
        pytest.skip("no kernel quantizes a matrix alone")
    every, wrong = layout.orientations, []
    seed = {"seed": torch.ones(1, dtype=torch.int64, device="cuda")} if layout.stochastic else {}
    for where, x in placed(layout):
        (m, k), amax = x.shape, amaxes.matrix_amax(x, layout.amax_columns) if layout.shares_amax else None
        planes = reference.quantize_reference(x.contiguous(), amax=amax, orientations=every, **seed)
        planes |= {} if amax is None else {"amax": amax}
        made = reference.lay_out(planes, m, k, every) if layout.laid_out(m, k, every) else {}
        buffers = {
            name: made[name] if name in made else planes[layout.as_stored[name]] for name in layout.buffers(m, k)
        }
        displaced = {name: moved(plane) for name, plane in planes.items()}
        for way, found, expected in (
            ("planes", kernels.quantize(x, amax, every, **seed), planes),
            ("buffers", kernels.quantize_buffers(x, amax, every, **seed), buffers),
            ("buffers of moved planes", kernels.lay_out(displaced, m, k, every), buffers),
        ):
            wrong += [
                f"{way}: {name} of ({m}, {k}), {where}"
                for name, one in found.items()
                if name != "amax" and not torch.equal(*bits([one.flatten(), expected[name].flatten()]))
            ]
        for orientation in every:
            values = kernels.dequantize(displaced, m, k, orientation, torch.float32)
            if not torch.equal(*bits([values, reference.dequantize_reference(planes, m, k, orientation)])):
                wrong.append(f"values of ({m}, {k}), {orientation}, {where}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_current"])
def test_what_is_kept_of_a_launch_takes_a_matrix_from_any_address(name: str) -> None:
    """Operators and products find a plan by sizes alone, after a first launch; also if that was for another address."""
    recipe = importlib.import_module(f"layoutc.recipes.{name}").Tensor
    values = torch.randn(256, 512, device="cuda")
    displaced = torch.empty(256 * 512 + 1, device="cuda")[1:].view(256, 512).copy_(values)
    for chosen in (("rowwise",), recipe.LAYOUT.orientations):
        expected = operators.quantize_buffers(recipe, values.clone(), None, chosen, False)
        run = partial(torch.ops.layoutc.quantize_buffers, amax=None, recipe=recipe.KEY, orientations=[*chosen])
        for x in (displaced, values, displaced):
            made = run(x, swizzled=False, typed=False)
            assert all(map(torch.equal, bits(made), bits([*expected.values()])))
        names = [name for name in expected if name not in recipe.LAYOUT.as_stored or len(chosen) == 1]
        for first in (displaced, values):
            if (plan := launched.quantizing(recipe, first.view(2, 128, 512).flatten(0, 1), names, chosen)) is not None:
                for x in (values, displaced):
                    assert all(map(torch.equal, bits(launched.quantize(plan, x)), bits([expected[n] for n in names])))
