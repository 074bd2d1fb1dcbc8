"""Grouped kernels on a card: the bytes of one launch each; streams, graphs, and tables that come and go."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weight_recipes import WEIGHTS

import layoutc
import layoutc.recipes
from layoutc.runtime.kernels import amaxes, batches, launch
from layoutc.runtime.kernels.recipe_kernels import Kernels
from layoutc.runtime.quantize.weights import requantize_batch_

pytest.importorskip("triton", reason="needs triton, which kernels are written in")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = sorted(path.parent.name for path in Path(layoutc.recipes.__file__).parent.glob("*/kernels.py"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(512, 4096), (128, 1024), (160, 288), (384, 2080), (32, 32), (1056, 160)]
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3.4e38)


def recipe(name: str) -> Any:
    return importlib.import_module(f"layoutc.recipes.{name}")


def kernels(name: str) -> Kernels:
    return importlib.import_module(f"layoutc.recipes.{name}.kernels").KERNELS


def matrices(name: str, dtype: torch.dtype, count: int, special: bool = True) -> list[Tensor]:
    """Of every shape that the recipe takes, some with special values, one that begins between multiples of 16 bytes."""
    layout, found = recipe(name).LAYOUT, []
    generator = torch.Generator("cuda").manual_seed(count)
    for index in range(count):
        m, k = SHAPES[index % len(SHAPES)]
        if layout.multiple_m == 1 == layout.multiple_k and index % 4 == 3:
            m, k = m + 1, k + 3
        if m % layout.multiple_m or k % layout.multiple_k:
            continue
        space = torch.randn(m * k + 1, device="cuda", generator=generator)
        if special and index % 2:
            for value in SPECIAL:
                space[torch.randint(0, m * k, (1,), device="cuda", generator=generator)] = value
        space = space.to(dtype)
        found.append((space[1:] if index % 7 == 5 else space[:-1]).view(m, k))
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bytes, all NaN as one."""
    if a.is_floating_point():
        a, b = (t.masked_fill(t.isnan(), float("nan")).contiguous().view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def poisoned(name: str, x: Tensor, orientations: tuple[str, ...]) -> dict[str, Tensor]:
    facts = launch.plane_facts(recipe(name).LAYOUT, x.shape[0], x.shape[1], orientations)
    return {plane: torch.full(shape, 0x5A, dtype=dtype, device="cuda") for plane, (shape, dtype) in facts.items()}


def check(name: str, xs: list[Tensor], orientations: tuple[str, ...]) -> None:
    """Against a launch each."""
    layout = recipe(name).LAYOUT
    given = [amaxes.matrix_amax(x, layout.amax_columns) for x in xs] if layout.shares_amax else None
    outs = [poisoned(name, x, orientations) for x in xs]
    kernels(name).quantize_batch(xs, given, orientations, outs)
    for index, (x, out) in enumerate(zip(xs, outs, strict=True)):
        alone = kernels(name).quantize(x, given[index] if given else None, orientations)
        for plane, stored in alone.items():
            assert same(stored, out[plane]), (index, tuple(x.shape), plane)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_group_gives_the_bytes_of_one_launch_each(name: str, dtype: torch.dtype) -> None:
    if not kernels(name).batched or kernels(name).quantize_tile is None:
        pytest.skip("a pass over rows comes first, or each matrix has a seed of its own, or the reference quantizes")
    layout = recipe(name).LAYOUT
    for orientations in {layout.orientations, *((one,) for one in layout.orientations)}:
        check(name, matrices(name, dtype, 14), orientations)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_is_laid_out_as_each_by_itself(name: str) -> None:
    """Both orders of scales, ragged shapes, and what a captured graph has done, on the values of its replay."""
    tensors = [recipe(name).quantize(x) for x in matrices(name, torch.bfloat16, 20, special=False)]
    for swizzled in (False, True) if recipe(name).LAYOUT.swizzled else (False,):
        expect_same_buffers(tensors, layoutc.buffers_of(tensors, swizzled=swizzled), swizzled)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layoutc.buffers_of(tensors)
    for tensor in tensors:
        for plane in tensor.planes().values():
            plane.copy_(plane.flip(0))
    graph.replay()
    expect_same_buffers(tensors, found, False)


def expect_same_buffers(tensors: list[Any], found: list[dict[str, Tensor]], swizzled: bool) -> None:
    for tensor, one in zip(tensors, found, strict=True):
        expected = tensor.buffers(swizzled=swizzled)
        assert list(expected) == list(one)
        for buffer, entries in expected.items():
            assert same(entries, one[buffer]), (tensor.LAYOUT.name, tuple(tensor.shape), buffer)


def test_weights_of_every_recipe_are_laid_out_together() -> None:
    tensors = [recipe(name).quantize(torch.randn(256, 512, device="cuda")) for name in NAMES for _ in range(3)]
    expect_same_buffers(tensors, layoutc.buffers_of(tensors), False)


@pytest.mark.parametrize("count", [1, 40, 300])
def test_tables_of_every_size(count: int) -> None:
    xs = [torch.randn(32, 64 + 32 * (index % 5), device="cuda") for index in range(count)]
    check("mxfp8", xs, ("rowwise",))
    check("nvfp4", xs, ("rowwise", "columnwise"))


def test_what_lies_elsewhere_is_refused_before_a_launch() -> None:
    """Addresses of the host would be read by the card."""
    xs = [torch.randn(32, 64, device="cuda") for _ in range(2)]
    outs = [poisoned("nvfp4", x, ("rowwise",)) for x in xs]
    quantize_batch = kernels("nvfp4").quantize_batch
    with pytest.raises(ValueError, match="amaxes of a batch must be float32"):
        quantize_batch(xs, [torch.ones(1, device="cuda"), torch.ones(1)], ("rowwise",), outs)
    with pytest.raises(ValueError, match="rowwise_scale is on cpu"):
        quantize_batch(xs, None, ("rowwise",), [outs[0], {**outs[1], "rowwise_scale": outs[1]["rowwise_scale"].cpu()}])
    with pytest.raises(ValueError, match="be on one device"):
        quantize_batch([xs[0], xs[1].cpu()], None, ("rowwise",), outs)


@pytest.mark.parametrize("block_k", [None, 1, 16])
def test_amaxes_of_a_group(block_k: int | None) -> None:
    xs = [x for dtype in DTYPES for x in matrices("fp8_current", dtype, 30)]
    xs += [torch.randn(300, 200, device="cuda").t(), torch.randn(0, 64, device="cuda")]
    expected = torch.cat([amaxes.matrix_amax(x, block_k).flatten() for x in xs])
    assert torch.equal(expected.view(torch.int32), amaxes.batch_amax(xs, block_k).view(torch.int32))


def batch_of(names: list[str], count: int) -> tuple[list[Any], list[Any]]:
    targets = [recipe(name).quantize(x) for name in names for x in matrices(name, torch.float32, count, special=False)]
    return targets, [copy.deepcopy(target) for target in targets]


def one_by_one(target: Any, values: Tensor) -> None:
    layout = target.LAYOUT
    amax = type(target).shared_amax(values) if layout.shares_amax else None
    recipe(layout.name).quantize(values, amax=amax, out=target)


def expect_same(targets: list[Any], others: list[Any]) -> None:
    for target, other in zip(targets, others, strict=True):
        for plane, stored in other.planes().items():
            assert same(stored, target.planes()[plane]), (target.LAYOUT.name, tuple(target.shape), plane)


@pytest.mark.parametrize("names", [list(WEIGHTS), ["fp8_delayed", "nvfp4", "mxfp8"]], ids=["every recipe", "three"])
def test_steps_of_an_optimizer(names: list[str]) -> None:
    """Three, so that histories fill. Masters stay where they are, and the second step takes the tables of the first."""
    targets, others = batch_of(names, 12)
    values = [torch.empty(target.shape, device="cuda") for target in targets]
    batches._tables.cache_clear()
    misses = []
    for step in range(3):
        for index, each in enumerate(values):
            each.normal_().mul_(2.0 ** (step + index % 5))
        requantize_batch_(list(zip(targets, values, strict=True)), [])
        misses.append(batches._tables.cache_info().misses)
        for other, each in zip(others, values, strict=True):
            one_by_one(other, each)
        expect_same(targets, others)
    assert misses[0] > 0
    assert misses[1] == misses[0] == misses[2] or misses[0] > batches.CACHED


def test_tables_follow_streams_and_survive_eviction() -> None:
    """A table is used on the stream that its copy is on; more groups than are kept, launched without waiting."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for index in range(batches.CACHED // 2 + 16):
        xs = [torch.full((32, 64), float(index * 10 + one + 1), device="cuda") for one in range(3)]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000)
                results.append((index, xs, amaxes.batch_amax(xs)))
    torch.cuda.synchronize()
    for index, _, found in results:
        assert found.tolist() == [index * 10.0 + one + 1 for one in range(3)]


def test_a_captured_graph_has_tables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay gives the bytes of the values at that time. Kernels are loaded before, as a graph wants."""
    targets, others = batch_of(["nvfp4", "mxfp8", "fp8_current"], 6)
    values = [torch.randn(target.shape, device="cuda") for target in targets]
    batch = list(zip(targets, values, strict=True))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        requantize_batch_(batch, [])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    kept = batches._tables.cache_info().misses
    with torch.cuda.graph(graph):
        requantize_batch_(batch, [])
    assert batches._tables.cache_info().misses == kept
    for each in values:
        each.normal_().mul_(3)
    graph.replay()
    for other, each in zip(others, values, strict=True):
        one_by_one(other, each)
    expect_same(targets, others)
