"""Descriptions against the generated facts, index maps against the chains' other direction, advice by brute force."""

from __future__ import annotations

import importlib
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutc.compiler import plan_for
from layoutc.cuts import aligned, nearest_multiple, nearest_rows, nearest_worlds
from layoutc.describe import as_data, describe, problems, usual_shape
from layoutc.maps import index_map
from layoutc.plan import Plan
from layoutc.schema import read_spec

SPECS = sorted((Path(__file__).parent.parent / "specs").glob("*.yaml"))
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


def plan_of(text: str, name: str) -> Plan:
    spec, found = read_spec(text, f"{name}.yaml")
    assert spec is not None, found
    return plan_for(spec)


def recipe(name: str) -> Plan:
    return plan_of(next(path for path in SPECS if path.stem == name).read_text(encoding="utf-8"), name)


def six_bits() -> Plan:
    return plan_of(SIX_BITS, "six_bits")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("m", "k", "world"), SHAPES)
def test_facts_are_those_of_the_generated_code(name: str, m: int, k: int, world: int) -> None:
    layout = importlib.import_module(f"layoutc.recipes.{name}").LAYOUT
    facts = describe(recipe(name), m, k, world)
    for stated, ours in ((layout.planes(m, k), facts.planes), (layout.buffers(m, k), facts.buffers)):
        assert {one.name: (one.shape, f"torch.{one.dtype}", one.nbytes) for one in ours} == {
            key: (value.shape, str(value.dtype), value.nbytes) for key, value in stated.items()
        }
    assert facts.alignment.rows == layout.shard_rows
    assert facts.layout_id == layout.layout_id
    for one in facts.passes:
        gather = layout.gather(m, k, world, one.name)
        assert (one.planes, one.serves) == (tuple(gather.planes), gather.serves)
        assert one.bytes_per_rank == gather.bytes_per_rank
        assert one.bytes_per_element == Fraction(gather.nbytes, m * k)
        assert one.ratio_to_bf16 == one.bytes_per_element / 2
        assert one.filling == gather.filling


@pytest.mark.parametrize("plan", [*map(recipe, NAMES), six_bits()], ids=lambda plan: plan.layout.name)
@pytest.mark.parametrize(("m", "k"), [(32, 64), (96, 32), (160, 160)])
def test_index_maps_are_the_chains_the_other_way_round(plan: Plan, m: int, k: int) -> None:
    """Every value stands in just the bytes that the chain puts its bits in; the rest is the padding that is stated."""
    facts = {one.name: one for one in describe(plan, m, k, 1).buffers}
    for buffer in plan.layout.buffers:
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
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [1, 2, 3, 7, 8, 1000])
def test_the_usual_shape_works_everywhere(name: str, world: int) -> None:
    plan = recipe(name)
    assert problems(plan, *usual_shape(plan, world), world, "x.yaml") == []


def test_shapes_that_are_not_taken_name_the_nearest_that_are() -> None:
    found = problems(recipe("nvfp4"), 100, 7, 2, "specs/nvfp4.yaml")
    assert [(item.code, item.help) for item in found] == [("LC401", "m can be 96 or 112"), ("LC401", "k can be 16")]


def test_weights_that_do_not_shard_name_the_nearest_that_do() -> None:
    plan = recipe("fp8_block")
    (found,) = problems(plan, 384, 512, 2, "specs/fp8_block.yaml")
    assert found.code == "LC402"
    assert found.help == "over 2 ranks, m can be 256 or 512; with m = 384, the world size can be 1 or 3"
    for m, world in ((256, 2), (512, 2), (384, 1), (384, 3)):
        assert problems(plan, m, 512, world, "x.yaml") == []


SIZES = st.integers(1, 300)


@given(rows=SIZES, world=st.integers(1, 20), multiple=st.integers(1, 12), accepted=st.integers(1, 6))
def test_advice_is_the_nearest_there_is(rows: int, world: int, multiple: int, accepted: int) -> None:
    def works(m: int) -> bool:
        return m % multiple == 0 and m % accepted == 0 and aligned(m, world, multiple)

    below = [m for m in range(1, rows) if works(m)][-1:]
    above = next(m for m in range(rows + 1, rows + 20 * 72 + 1) if works(m))
    assert list(nearest_rows(rows, world, multiple, accepted)) == [*below, above]
    worlds = [w for w in range(1, 4 * world + 1) if aligned(rows, w, multiple)]
    expected = [w for w in worlds if w < world][-1:] + [w for w in worlds if w > world][:1]
    assert list(nearest_worlds(rows, world, multiple)) == expected
    near = nearest_multiple(rows, multiple)
    assert all(m % multiple == 0 and m > 0 and abs(m - rows) <= max(multiple, rows) for m in near)


@given(rows=SIZES, world=st.integers(1, 20), multiple=st.integers(1, 12))
def test_aligned_is_what_the_runtime_says(rows: int, world: int, multiple: int) -> None:
    runtime = importlib.import_module("layoutc.runtime.sharding")
    assert aligned(rows, world, multiple) == runtime.aligned(rows, -(-rows // world), multiple)
    per_rank = -(-rows // world)
    cuts = range(per_rank, rows, per_rank)
    assert aligned(rows, world, multiple) == all(cut % multiple == 0 for cut in cuts)
