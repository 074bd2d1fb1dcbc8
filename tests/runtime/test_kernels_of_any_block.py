"""Kernels of recipes that nobody ships, under Triton's interpreter: blocks of any size, ranges of rows, long sums.

Those of tests/unshipped, and random ones. test_kernels.py compares those of the shipped recipes.
"""

from __future__ import annotations

import itertools
import os
from math import lcm
from typing import Any

import numpy as np
import pytest
import torch
import unshipped
import yaml
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from numpy_models import layout_of, recipe, reference
from test_kernels import bits, compare, kernels, weight

from layoutc.plan.kernels import gap
from layoutc.runtime import numerics
from layoutc.runtime.kernels import amaxes, plans
from layoutc.spec.checks.read import read_spec

triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")
import triton.language as tl  # noqa: E402

from layoutc.plan.units import lanes, unit  # noqa: E402
from layoutc.runtime import triton as lt  # noqa: E402
from layoutc.runtime.triton.reductions import measured_rows  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
NAMES = unshipped.names()
EXAMPLES = 100 if os.environ.get("LAYOUTC_ALL_KERNELS") else 8
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # explaining a failure would take minutes

# (elements, scale); a two-level scale needs the amax of all values.
ARITHMETICS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("e4m3", "e5m2"), {"format": "f32", "rule": "amax-over-max"}),
    (("e2m1", "e3m2", "e2m3", "e4m3"), {"format": "e8m0", "rule": "power-of-two", "round": "up"}),
    (("e2m1", "e4m3"), {"format": "e4m3", "rule": "two-level"}),
    (("e2m1", "e2m3"), {"format": "e4m3", "rule": "four-over-six"}),
    (("e2m1",), {"format": "e4m3", "rule": "four-over-six", "squared": True}),
    (("int4", "int8"), {"format": "f32", "rule": "min-max", "zero": "int8"}),
    (("e2m1", "int4", "e4m3"), {"format": "f32", "rule": "scale-first"}),
    (("e2m1", "e4m3"), {"format": "e4m3", "rule": "scale-first", "of-zeros": 0.125}),
    (("int4", "e4m3"), {"format": "bf16", "rule": "scale-first"}),
    (("e2m1", "int8"), {"format": "f16", "rule": "scale-first", "multiply": True}),
    (("int4", "int8", "u4"), {"format": "f16", "rule": "min-max", "zero": "int8"}),
    (("u4", "int8"), {"format": "f32", "rule": "min-max", "zero": "u8"}),
    (("e4m3fnuz", "e2m1_one_zero", "i4_offset", "i8_offset"), {"format": "bf16", "rule": "scale-first"}),
    (("normal4", "i2_of_3"), {"format": "f32", "rule": "scale-first", "multiply": True}),
    (("normal4", "i2_of_3", "c3"), {"format": "f16", "rule": "scale-first"}),
    (("e5m2fnuz", "e4m3fnuz"), {"format": "e8m0", "rule": "power-of-two", "round": "up"}),
    (("int4", "e2m3"), {"format": "f32", "rule": "scale-first", "multiply": True, "epsilon": 1.0e-4}),
]
OWN: dict[str, dict[str, Any]] = {
    "u4": {"integer": 4, "offset": 0},
    "u8": {"integer": 8, "offset": 0},
    "i4_offset": {"integer": 4, "offset": 8},
    "normal4": {"values": [-1, -0.7, -0.53, -0.4, -0.3, -0.2, -0.1, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1]},
    "i2_of_3": {"values": [0, 1, -1]},
    "c3": {"values": [0, 1, -1, "nan", 5, 0.25, -2.5], "ties": "even"},
    "i8_offset": {"integer": 8, "offset": 131},
    "e2m1_one_zero": {"sign": 1, "exponent": 2, "mantissa": 1, "bias": 1, "nan": [8]},
}
BYTES = ("e4m3", "e5m2", "int8", "e4m3fnuz", "e5m2fnuz", "u8", "i8_offset")
SIZES = [1, 3, 5, 8, 12, 16, 20, 24, 33, 48, 64, 96, 100, "all"]
SWIZZLE = {"swizzle": "(rt a b) (ct c) -> rt ct b a c", "a": 4, "b": 32, "c": 4}
SHAPES = [(8, 8), (24, 200), (104, 56), (200, 24), (48, 96)]


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A sound spec that has kernels, with blocks of which some are no powers of two, or whole rows."""
    elements, scale = draw(st.sampled_from(ARITHMETICS))
    element = draw(st.sampled_from(elements))
    swizzled = draw(st.booleans())

    def orientation(block: dict[str, Any], contracted: str) -> dict[str, Any]:
        axes = draw(st.permutations(["m", "k"]))
        data: dict[str, Any] = {"layout": " ".join(axes)}
        if draw(st.booleans()):
            data["pad"] = [draw(st.sampled_from([8, 40])), draw(st.sampled_from([8, 16]))]
        cut = [axis for axis in axes if block[axis] != "all"]
        terms = []
        for axis in cut:
            divisor = draw(st.sampled_from([d for d in range(1, block[axis] + 1) if block[axis] % d == 0]))
            terms.append(axis if divisor == 1 else f"{axis}/{divisor}")
        stored: dict[str, Any] = {"layout": " ".join(terms) or "scalar"}
        if swizzled and len(cut) == 2:
            stored["pad"] = [4 if axis == contracted else 128 for axis in cut]
        elif terms and draw(st.booleans()):
            stored["pad"] = [draw(st.sampled_from([1, 4, 7])) for _ in terms]
        made = {"block": dict(block), "data": data, "scale": stored}
        sizes = [size for size in (2, 4, 8) if len(cut) == 2 and block[contracted] % size == 0]
        if sizes and scale["rule"] != "four-over-six" and draw(st.booleans()):
            size = draw(st.sampled_from(sizes))
            made["transform"] = {"hadamard": size, "signs": draw(st.integers(0, 2**size - 1))}
        return made

    block = {axis: draw(st.sampled_from(SIZES)) for axis in "mk"}
    others = [block, {"m": block["k"], "k": block["m"]}, {axis: draw(st.sampled_from(SIZES)) for axis in "mk"}]
    other = draw(st.sampled_from(others))
    text: dict[str, Any] = {
        "layoutc": 1,
        "name": "made_up",
        "summary": "made up by a test",
        "shape": {"m": 8, "k": 8},
        "element": {"format": element},
        "scale": scale,
        "orientations": {"rowwise": orientation(block, "k"), "columnwise": orientation(other, "m")},
    }
    if own := {name: OWN[name] for name in (element, scale.get("zero")) if name in OWN}:
        text["formats"] = own
    if element not in BYTES:
        text["element"]["pack"] = draw(st.sampled_from(["low-first", "high-first"]))
    if scale["rule"] != "four-over-six" and draw(st.integers(0, 3)) == 0:
        text["element"]["round"] = "stochastic"
    if scale["rule"] in ("two-level", "four-over-six"):
        text["tensor"] = {"amax": "f32"}
    if swizzled:
        text["gemm"] = {"scale": SWIZZLE}
    dumped = yaml.safe_dump(text, sort_keys=False, width=200)
    name = unshipped.name_of(dumped)
    dumped = dumped.replace("name: made_up", f"name: {name}")
    spec, _ = read_spec(dumped, f"{name}.yaml")
    assume(spec is not None and gap(layout_of(dumped, name)) is None)
    return dumped


@pytest.mark.thorough
@pytest.mark.slow
@given(texts(), st.sampled_from(SHAPES), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**16))
@settings(max_examples=EXAMPLES, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
def test_random_blocks(text: str, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    """All orientations at once and each by itself, into planes and buffers and back."""
    name = yaml.safe_load(text)["name"]
    unshipped.add(name, text)
    orientations = recipe(name).LAYOUT.orientations
    x = weight(*shape, seed).to(dtype)
    for asked in dict.fromkeys((orientations, *((one,) for one in orientations))):
        compare(name, x, asked)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_quantize_and_dequantize_equal_the_reference(name: str) -> None:
    """At shapes of less than a block, of several tiles, and of whole tiles, which need no masks but those of idle
    lanes."""
    unshipped.add_all()
    layout, made = recipe(name).LAYOUT, kernels(name)
    widest = max(tile[1] for tile in made.quantize_sizes.values())
    shapes = [(8, 8), (104, 200), (24, widest + 16)]
    covers = [tile.cover for tile in made.quantize_sizes.values() if tile.cover[0]]
    covers = {(lcm(m, layout.multiple_m), lcm(k, layout.multiple_k)) for m, k in covers}
    shapes += [(m, k) for m, k in sorted(covers) if m * k < 10_000]
    for seed, (m, k) in enumerate(dict.fromkeys(shapes)):
        compare(name, weight(m, k, seed).to(torch.bfloat16), layout.orientations)
    for orientation in layout.orientations:
        compare(name, weight(104, 200, 7), (orientation,))


@pytest.mark.parametrize("name", NAMES)
def test_planes_to_write_into_and_strides(name: str) -> None:
    """Nothing is written beside a plane: what surrounds it stays."""
    unshipped.add_all()
    layout, (m, k) = recipe(name).LAYOUT, (72, 120)
    x = weight(k, m, 3).t()
    amax = recipe(name).Tensor.shared_amax(x) if layout.shares_amax else None
    expected = reference(name).quantize_reference(x, amax=amax)
    spaces = {plane: torch.full((stored.numel() + 64,), 0x5A, dtype=stored.dtype) for plane, stored in expected.items()}
    out = {plane: spaces[plane][32:-32].view(stored.shape) for plane, stored in expected.items()}
    kernels(name).quantize(x, amax, layout.orientations, out)
    for plane, stored in expected.items():
        assert torch.equal(bits(stored), bits(out[plane])), plane
        assert (torch.cat([spaces[plane][:32], spaces[plane][-32:]]) == 0x5A).all(), plane


@pytest.mark.parametrize("name", NAMES)
def test_batches(name: str) -> None:
    """Matrices of several shapes in a launch or two."""
    unshipped.add_all()
    assert kernels(name).batched
    layout = recipe(name).LAYOUT
    xs = [weight(m, k, seed).to(torch.bfloat16) for seed, (m, k) in enumerate([(24, 240), (8, 8), (104, 56), (48, 96)])]
    shared = [recipe(name).Tensor.shared_amax(x) for x in xs] if layout.shares_amax else None
    packed = None if shared is None else torch.cat([amax.reshape(-1) for amax in shared])
    amaxes_ = None if packed is None else list(packed.split([amax.numel() for amax in shared or ()]))
    expected = [
        reference(name).quantize_reference(x, amax=amax)
        for x, amax in zip(xs, shared or itertools.repeat(None), strict=False)
    ]
    outs = [{plane: torch.empty_like(stored) for plane, stored in one.items()} for one in expected]
    kernels(name).quantize_batch(xs, amaxes_, layout.orientations, outs)
    for one, out in zip(expected, outs, strict=True):
        for plane, stored in one.items():
            assert torch.equal(bits(stored), bits(out[plane])), plane


TURNED = """layoutc: 1
name: fp8_turned
summary: a GEMM that reads scales by columns, also those that are planes
shape: {m: 4, k: 32}
element: {format: e4m3}
scale: {format: e8m0, rule: power-of-two, round: up}
orientations:
  rowwise:
    block: {m: 1, k: 32}
    data: {layout: m k}
    scale: {layout: m k/32}
  columnwise:
    block: {m: 1, k: 32}
    data: {layout: k m}
    scale: {layout: m k/32}
gemm:
  scale: {swizzle: r c -> c r}
"""


ROWS_AND_RUNS = """
layoutc: 1
name: fp8_rows_and_runs
summary: whole rows, and long runs of them
element: {format: e4m3}
scale: {format: f32, rule: amax-over-max}
orientations:
  rowwise:
    block: {m: 1, k: all}
    data: {layout: m k}
    scale: {layout: m}
  columnwise:
    block: {m: 1, k: 2048}
    data: {layout: k m}
    scale: {layout: m k/2048}
"""


def test_whole_rows_beside_blocks_that_are_longer_than_a_tile_of_them() -> None:
    """A tile has whole blocks of both, whether or not the matrix has as many columns."""
    unshipped.add("fp8_rows_and_runs", ROWS_AND_RUNS)
    for k in (64, 2048, 4100):
        for asked in (("rowwise", "columnwise"), ("rowwise",), ("columnwise",)):
            compare("fp8_rows_and_runs", weight(6, k, 5), asked)


def test_planes_that_a_gemm_reads_in_another_order() -> None:
    """They are no part of a prepared launch, which gives planes as they are; all that is made beside them is."""
    unshipped.add("fp8_turned", TURNED)
    layout, made = recipe("fp8_turned").LAYOUT, kernels("fp8_turned")
    for asked in (layout.orientations, *((one,) for one in layout.orientations)):
        compare("fp8_turned", weight(8, 96, 5), asked)
    assert returned_by(made) == {False: True, True: False}
    compare("mxfp8", weight(32, 96, 5), recipe("mxfp8").LAYOUT.orientations)
    assert returned_by(kernels("mxfp8")) == {False: True, True: True}


def returned_by(made: Any) -> dict[bool, bool]:
    """Whether operators can return what a recipe's launches make, swizzled and not."""
    keys = [key[1] for key in list(plans.cache) if isinstance(key, tuple) and len(key) == 2 and key[0] is made]
    return {key[-1]: made.again(key, (), False) is not None for key in keys if type(key[-1]) is bool}


@pytest.mark.parametrize("block_k", [3, 24, 100, 130])
def test_amaxes_of_columns(block_k: int) -> None:
    """Of one matrix and of a batch, with a NaN and without."""
    xs = [weight(70, 300, 1), weight(5, 33, 2).nan_to_num(1.0, 2.0, -3.0), weight(64, 480, 3)]
    expected = [numerics.column_amax(x, block_k) for x in xs]
    assert all(
        torch.equal(bits(amaxes.matrix_amax(x, block_k)), bits(one)) for x, one in zip(xs, expected, strict=True)
    )
    assert torch.equal(bits(amaxes.batch_amax(xs, block_k)), bits(torch.cat([one.flatten() for one in expected])))


@triton.jit
def rows_kernel(
    x, first, second, m, k, stride_m, stride_k, BLOCK: tl.constexpr, RANGES: tl.constexpr,
    TILE_M: tl.constexpr, COVER_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """What is measured of each block of BLOCK whole rows: an amax, or the lowest and the highest value."""
    row = tl.program_id(0).to(tl.int64) * BLOCK
    COVER: tl.constexpr = (COVER_M, TILE_K if COVER_M else 0)
    source, at = (x, stride_m, stride_k), (row, 0, m, k)
    found = measured_rows(source, at, BLOCK, RANGES, (TILE_M, TILE_K), 1, False, COVER)
    at = tl.program_id(0) + tl.arange(0, 1)[:, None]
    if RANGES:
        tl.store(first + at, found[0])
        tl.store(second + at, found[1])
    else:
        tl.store(first + at, found)


@pytest.mark.parametrize("block_m", [1, 3, 16, 20])
def test_amaxes_and_ranges_of_rows(block_m: int) -> None:
    """A NaN makes both ends of a range NaN; 0 is in every range."""
    tile = lanes(block_m), 0 if lanes(block_m) == block_m else block_m, 128
    whole = [weight(70, 300, 1), weight(5, 33, 2).nan_to_num(1.0, 2.0, -3.0), torch.full((20, 8), 2.0)]
    for x in (*whole, weight(64, 70, 4).t(), *(one.bfloat16() for one in whole)):
        blocks = numerics.to_blocks(x.float(), block_m, None)
        first, second = torch.empty(2, len(blocks), 1)
        rows_kernel[len(blocks),](x, first, second, *x.shape, *x.stride(), block_m, False, *tile)
        assert torch.equal(bits(first), bits(numerics.block_amax(blocks)))
        rows_kernel[len(blocks),](x, first, second, *x.shape, *x.stride(), block_m, True, *tile)
        lowest, highest = numerics.block_range(blocks)
        assert torch.equal(bits(first + 0.0), bits(torch.clamp(lowest, max=0.0) + 0.0))
        assert torch.equal(bits(second + 0.0), bits(torch.clamp(highest, min=0.0) + 0.0))


@triton.jit
def sum_kernel(
    x, out, TILE_M: tl.constexpr, TILE_K: tl.constexpr, UNIT_M: tl.constexpr, UNIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, CONTRACTS_K: tl.constexpr,
):  # fmt: skip
    """The sum of each block of a tile (TILE_M, TILE_K)."""
    tile = tl.load(x + tl.arange(0, TILE_M)[:, None] * TILE_K + tl.arange(0, TILE_K)[None, :])
    blocks = lt.whole_blocks(lt.to_blocks(tile, UNIT_M, UNIT_K), BLOCK=(BLOCK_M, BLOCK_K))
    sums = lt.block_sum(blocks, CONTRACTS_K)
    places = tl.arange(0, sums.shape[0])[:, None] * sums.shape[1] + tl.arange(0, sums.shape[1])[None, :]
    tl.store(out + places, sums)


@pytest.mark.parametrize("contracts_k", [True, False])
@pytest.mark.parametrize("block", [(1, 48), (64, 1), (24, 24), (3, 100), (16, 128), (256, 5), (33, 64)])
def test_sums_of_blocks(block: tuple[int, int], contracts_k: bool) -> None:
    """In the reference's order, to the last bit; what a tile holds of further blocks is in no sum."""
    tile = lanes(block[0]) * 2, lanes(block[1]) * 2
    counts = tile[0] // block[0], tile[1] // block[1]
    x = torch.from_numpy(np.random.default_rng(0).lognormal(0, 3, tile).astype(np.float32))
    out = torch.empty(lanes(counts[0]), lanes(counts[1]))
    sum_kernel[(1,)](x, out, *tile, *map(unit, block), *block, contracts_k)
    held = x[: counts[0] * block[0], : counts[1] * block[1]].contiguous()
    expected = numerics.block_sum(numerics.to_blocks(held, *block), "k" if contracts_k else "m")
    assert torch.equal(expected, out[: counts[0], : counts[1]])
