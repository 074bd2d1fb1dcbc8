"""Descriptions against the generated facts, index maps against the chains' other direction, advice by brute force."""

from __future__ import annotations

import importlib
import json
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from weight_recipes import CUT_APART, KINDS

from layoutc.build.pipeline import plan_for
from layoutc.ints.cuts import Cuts
from layoutc.ints.nearest import nearest_multiple, nearest_rows, nearest_worlds
from layoutc.ints.sizes import up
from layoutc.plan.plan import Plan
from layoutc.report.describe import Description, as_data, describe, problems, usual_shape
from layoutc.report.maps import index_map
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.quantize import block_edges
from layoutc.spec.checks.read import read_spec

SPECS = sorted((ROOT / "specs").glob("*.yaml"))
NAMES = [path.stem for path in SPECS]
SHAPES = [(128, 128, 1), (256, 64, 2), (512, 384, 4), (384, 160, 3)]

SIX_BITS = """layoutc: 1
name: six_bits
summary: four codes in three bytes, and blocks that differ between the passes
shape: {m: 4, k: 4}
element: {format: e3m2, pack: high-first}
scale: {format: e8m0, rule: power-of-two, round: up}
orientations:
  rowwise: {block: {m: 1, k: 8}, data: {layout: m k, pad: [1, 16]}, scale: {layout: m k/8}}
  columnwise: {block: {m: 2, k: 3}, data: {layout: k m}, scale: {layout: k/3 m, pad: [4, 3]}}
"""

PAIRS = """layoutc: 1
name: pairs
summary: a scale for each row, and two rows in a byte columnwise
shape: {m: 2, k: 2}
element: {format: e2m1, pack: low-first}
scale: {format: e8m0, rule: power-of-two, round: up}
orientations:
  rowwise: {block: {m: 1, k: all}, data: {layout: m k}, scale: {layout: m}}
  columnwise: {block: {m: 1, k: all}, data: {layout: k m}, scale: {layout: m}}
"""


def plan_of(text: str, name: str) -> Plan:
    spec, found = read_spec(text, f"{name}.yaml")
    assert spec is not None, found
    return plan_for(spec)


@cache
def recipe(name: str) -> Plan:
    return plan_of(next(path for path in SPECS if path.stem == name).read_text(encoding="utf-8"), name)


def six_bits() -> Plan:
    return plan_of(SIX_BITS, "six_bits")


def described(name: str, m: int, k: int, world: int) -> Description:
    """The description, and what each pass gathers checked against the generated code."""
    layout = importlib.import_module(f"layoutc.recipes.{name}").LAYOUT
    facts = describe(recipe(name), m, k, world)
    for one in facts.passes:
        gather = layout.gather(m, k, world, one.name)
        assert (one.planes, one.serves) == (tuple(gather.planes), gather.serves)
        assert one.bytes_per_rank == gather.bytes_per_rank
        assert one.bytes_per_element == Fraction(gather.nbytes, m * k)
        assert one.ratio_to_bf16 == one.bytes_per_element / 2
        assert one.filling == gather.filling
    return facts


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("name", "m", "k", "world"), [(name, *SHAPES[at % len(SHAPES)]) for at, name in enumerate(NAMES)]
)
def test_facts_are_those_of_the_generated_code(name: str, m: int, k: int, world: int) -> None:
    layout = importlib.import_module(f"layoutc.recipes.{name}").LAYOUT
    k = up(k, layout.multiple_k)
    facts = described(name, m, k, world)
    for stated, ours in ((layout.planes(m, k), facts.planes), (layout.buffers(m, k), facts.buffers)):
        assert {one.name: (one.shape, f"torch.{one.dtype}", one.nbytes) for one in ours} == {
            key: (value.shape, str(value.dtype), value.nbytes) for key, value in stated.items()
        }
    assert facts.alignment.rows == layout.shard_rows
    assert facts.layout_id == layout.layout_id


@given(st.sampled_from(NAMES), st.integers(1, 40), st.integers(1, 5), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_any_cut_costs_what_the_runtime_says(name: str, rows: int, columns: int, world: int) -> None:
    """Bytes of each pass, bytes of a step's exchange, and which ranks have a part of a block."""
    layout = importlib.import_module(f"layoutc.recipes.{name}").LAYOUT
    m, k = rows * max(layout.multiple_m, 8), columns * max(layout.multiple_k, 8)
    at = described(name, m, k, world).alignment
    cuts = Cuts(m, -(-m // world), world)
    bounds = [cuts.bounds(rank) for rank in range(world)]
    assert (at.rows_per_rank, at.ranks_with_rows) == (cuts.per_rank, sum(last > first for first, last in bounds))
    row_shardings = [block_edges.RowSharding(None, rank, cuts) for rank in {0, world - 1}]  # type: ignore[arg-type]
    assert (at.cut_blocks is not None) == row_shardings[0].splits_blocks(layout)
    if at.cut_blocks is None:
        return
    inside = {last for _, last in bounds if last < m and last % layout.block_rows}
    parts = [rank for rank in range(world) if cuts.halo(rank, layout.block_rows).rows]
    assert (at.cut_blocks.rows, at.cut_blocks.cuts) == (layout.block_rows, len(inside))
    assert at.cut_blocks.ranks == len(parts)
    assert at.cut_blocks.exchanged == ("extremes" if layout.extremes else "values")
    for row_sharding in row_shardings:
        first, last = bounds[row_sharding.rank]
        told = block_edges._edges(layout, torch.zeros(last - first, k), row_sharding)
        assert at.cut_blocks.exchange_bytes_per_rank == told.nbytes


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CUT_APART)
def test_shards_have_buffers_by_themselves_where_that_is_said(name: str) -> None:
    def has_buffers(shard: Any) -> bool:
        try:
            return bool(shard.buffers())
        except LayoutError:
            return False

    k = up(32, recipe(name).layout.multiple_k)
    for m, world in product((96, 128, 160, 384), (1, 2, 3, 5)):
        weight = importlib.import_module(f"layoutc.recipes.{name}").quantize(torch.ones(m, k))
        at = describe(recipe(name), m, k, world).alignment
        assert at.shards_have_buffers == all(map(has_buffers, torch.chunk(weight, world))), (m, world)
        assert at.shards_have_buffers or (at.free_rows and at.free_worlds)


def test_rows_that_share_bytes_cost_a_shard_its_buffers_and_nothing_else() -> None:
    plan = plan_of(PAIRS, "pairs")
    at = describe(plan, 6, 2, 2).alignment
    assert (at.rows, at.rows_per_rank, at.cut_blocks) == (2, 3, None)
    assert (at.shards_have_buffers, at.free_rows, at.free_worlds) == (False, (4, 8), (1, 3))
    assert {one.doubled for one in describe(plan, 6, 2, 2).passes} == {0}


def test_doubled_bytes_are_those_beyond_the_share_of_a_rank() -> None:
    """18 rows a rank are 1.125 rows of blocks; the ranks send 2, of 4 bytes each. Over 9 ranks each has its own."""
    assert {one.doubled for one in describe(recipe("nvfp4"), 144, 64, 8).passes} == {4}  # 3.5
    assert {one.doubled for one in describe(recipe("nvfp4"), 144, 64, 9).passes} == {0}
    assert [one.doubled for one in describe(recipe("mxfp8"), 96, 64, 2).passes] == [0, 32, 32]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*KINDS, "gptq", "q4_k", "q6_k", "six_bits"])
@pytest.mark.parametrize(("m", "k"), [(160, 32), (32, 160), (160, 160)])
def test_index_maps_are_the_chains_the_other_way_round(name: str, m: int, k: int) -> None:
    """Every value stands in just the bytes that the chain puts its bits in; the rest is the padding that is stated.

    Both axes are longer than most blocks, and no multiple of the largest: of codes, one at a time."""
    plan = six_bits() if name == "six_bits" else recipe(name)
    m, k = up(m, plan.layout.multiple_m), up(k, plan.layout.multiple_k)
    facts = {one.name: one for one in describe(plan, m, k, 1).buffers}
    for buffer in plan.layout.buffers:
        if buffer.kind == "data" and min(m, k) > 32:
            continue
        found: Any = index_map(plan, buffer.name, m, k)
        assert json.loads(json.dumps(found)) == found
        assert len(found["bytes"]) == facts[buffer.name].nbytes
        chain = buffer.chain(m, k)
        expected: dict[int, list[list[int]]] = {}
        for value in np.ndindex(*chain.start):
            plane = value if len(value) == 2 else (value[0], 0) if buffer.m_dim is not None else (0, value[0])
            for byte, bit in chain.positions(value):
                for each in range(byte, (byte * 8 + bit + chain.bits - 1) // 8 + 1):
                    expected.setdefault(each, []).append(list(plane))
        for byte, values in enumerate(found["bytes"]):
            held = [value for value in values if value is not None]
            assert sorted(held) == sorted(expected.get(byte, []))
        empty = sum(1 for values in found["bytes"] if all(value is None for value in values))
        assert empty == facts[buffer.name].padding_bytes


def test_codes_that_run_on_stand_in_both_bytes() -> None:
    found: Any = index_map(six_bits(), "rowwise_data", 4, 4)
    assert found["order"] == "high-first"
    assert found["bytes"][:4] == [[[0, 0], [0, 1]], [[0, 1], [0, 2]], [[0, 2], [0, 3]], [None, None]]


@pytest.mark.parametrize("buffer", ["rowwise_scale", "columnwise_scale"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_swizzled_maps(name: str, buffer: str) -> None:
    """The order that cuBLAS documents for 128x4 tiles, made with numpy of the unswizzled map."""
    found: Any = index_map(recipe(name), buffer, 256, 384)
    rows, columns = found["shape"]
    values = np.array([tuple(value[0] or (-1, -1)) for value in found["bytes"]]).reshape(rows, columns, 2)
    if (rows, columns) == (8, 384):
        values = values.transpose(1, 0, 2)  # columnwise, stored m first; the pattern is over (free, contraction)
        rows, columns = columns, rows
    tiles = values.reshape(rows // 128, 4, 32, columns // 4, 4, 2).transpose(0, 3, 2, 1, 4, 5)
    assert [tuple(value or (-1, -1)) for value in found["swizzled"]] == [
        tuple(v) for v in tiles.reshape(-1, 2).tolist()
    ]


def test_what_has_no_swizzle_has_no_swizzled_map() -> None:
    assert index_map(recipe("fp8_block"), "rowwise_scale", 128, 128)["swizzled"] is None
    assert index_map(recipe("mxfp8"), "rowwise_data", 32, 32)["swizzled"] is None
    with pytest.raises(KeyError):
        index_map(recipe("mxfp8"), "rowwise_zeros", 32, 32)


def test_slots_of_passes_that_differ_are_filled_up() -> None:
    """Rowwise scales of 1x8 blocks are a byte for 8 elements, columnwise ones of 2x3 blocks a byte for 6."""
    forward, backward, both = describe(six_bits(), 24, 24, 2).passes
    data = 12 * 24 * 6 // 8
    assert (forward.bytes_per_rank, forward.filling) == (data + 6 * 8, 6 * 8 - 12 * 3)
    assert (backward.bytes_per_rank, backward.filling) == (data + 6 * 8, 0)
    assert (both.bytes_per_rank, both.filling) == (2 * data + 12 * 3 + 6 * 8, 0)


def test_data_is_json() -> None:
    data: Any = as_data(describe(recipe("nvfp4"), 128, 128, 2))
    assert json.loads(json.dumps(data)) == data
    assert data["passes"][0]["bytes_per_element"] == 0.50390625


# ------------------------------------------------------------------------------------------------------ what would work
@pytest.mark.sample(6)
@pytest.mark.parametrize("name", NAMES)
def test_cuts_of_the_usual_shape_cost_nothing_anywhere(name: str) -> None:
    for world in (1, 2, 3, 7, 8, 1000):
        m, k = usual_shape(recipe(name), world)
        assert problems(recipe(name), m, k, "x.yaml") == []
        at = describe(recipe(name), m, k, world).alignment
        assert (at.cut_blocks, at.shards_have_buffers, at.free_rows, at.free_worlds) == (None, True, (), ()), world


def test_shapes_that_are_not_taken_name_the_nearest_that_are() -> None:
    found = problems(recipe("nvfp4"), 100, 7, "specs/nvfp4.yaml")
    assert [(item.code, item.help) for item in found] == [("LC401", "m can be 96 or 112"), ("LC401", "k can be 16")]


def test_weights_whose_blocks_are_cut_name_the_nearest_that_are_not() -> None:
    at = describe(recipe("fp8_block"), 384, 512, 2).alignment
    assert (at.free_rows, at.free_worlds) == ((256, 512), (1, 3))
    for m, world in ((256, 2), (512, 2), (384, 1), (384, 3)):
        assert describe(recipe("fp8_block"), m, 512, world).alignment.cut_blocks is None


SIZES = st.integers(1, 300)


@given(rows=SIZES, world=st.integers(1, 20), multiple=st.integers(1, 12), accepted=st.integers(1, 6))
def test_advice_is_the_nearest_there_is(rows: int, world: int, multiple: int, accepted: int) -> None:
    def works(m: int) -> bool:
        return m % multiple == 0 and m % accepted == 0 and Cuts.of(m, world).aligned(multiple)

    below = [m for m in range(1, rows) if works(m)][-1:]
    above = next(m for m in range(rows + 1, rows + 20 * 72 + 1) if works(m))
    assert list(nearest_rows(rows, world, multiple, accepted)) == [*below, above]
    worlds = [w for w in range(1, 4 * world + 1) if Cuts.of(rows, w).aligned(multiple)]
    expected = [w for w in worlds if w < world][-1:] + [w for w in worlds if w > world][:1]
    assert list(nearest_worlds(rows, world, multiple)) == expected
    near = nearest_multiple(rows, multiple)
    assert all(m % multiple == 0 and m > 0 and abs(m - rows) <= max(multiple, rows) for m in near)


def test_large_numbers_of_ranks_take_no_time() -> None:
    """Nothing counts ranks or rows one by one."""
    at = describe(recipe("fp8_block"), 9_999_999_999, 128, 1_000_000_000).alignment
    assert at.cut_blocks is not None
    assert (at.cut_blocks.ranks, at.free_worlds) == (1_000_000_000, (78_740_157,))
