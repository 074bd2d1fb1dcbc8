"""What a plan derives: alignment by brute force, gathered bytes, derivations, and what the layout id depends on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_models import RECIPES, layout_of, recipe, recipe_layout, variant

from layoutc.layout.layout import Layout, Plane
from layoutc.plan.plan import Plan, derive, layout_id

Edit = Callable[[dict[str, Any]], None]


def synthetic(row_block: tuple[int, int], column_block: tuple[int, int], element: str = "e4m3") -> Layout:
    """A layout with blocks of its own in each orientation, 0 meaning all of an axis; accepts every multiple of 24."""

    def orientation(data: str, block: tuple[int, int]) -> str:
        m, k = block
        axes = " ".join(f"{axis}/{size}" for axis, size in (("m", m), ("k", k)) if size) or "scalar"
        return f"{{block: {{m: {m or 'all'}, k: {k or 'all'}}}, data: {{layout: {data}}}, scale: {{layout: {axes}}}}}"

    return layout_of(
        f"""layoutc: 1
name: made_up
summary: blocks of its own
shape: {{m: 24, k: 24}}
element: {{format: {element}}}
scale: {{format: e8m0, rule: power-of-two, round: up}}
orientations:
  rowwise: {orientation("m k", row_block)}
  columnwise: {orientation("m k", column_block)}
""",
        "made_up",
    )


# ------------------------------------------------------------------------------------------------------------ alignment
def crossed(layout: Layout, cut: int, axis: str) -> bool:
    """Whether a cut before row or column `cut` of a large weight splits a stored value or a byte. By enumeration."""

    def splits(plane: Plane) -> bool:
        per = plane.per_m if axis == "m" else plane.per_k
        if per is None:
            return False  # held whole by every shard
        size = 2 * cut + 2 * per + 16
        if axis == "m":
            return any(i // per == (i + 1) // per for i in range(size - 1) if i + 1 == cut)
        owner = [(j // per) * plane.bits // 8 if plane.bits < 8 else j // per for j in range(size)]
        last = [((j // per) * plane.bits + plane.bits - 1) // 8 if plane.bits < 8 else j // per for j in range(size)]
        return last[cut - 1] >= owner[cut]

    return any(splits(plane) for source in layout.sources for plane in (source.data, source.scale))


def check_alignment_of(layout: Layout) -> None:
    """Multiples cross nothing, everything else crosses something."""
    plan = derive(layout)
    for axis, multiple in (("m", plan.shard_rows), ("k", plan.column_multiple)):
        for cut in range(1, 3 * multiple + 1):
            assert crossed(layout, cut, axis) == (cut % multiple != 0), (axis, cut, multiple)


@pytest.mark.parametrize("name", RECIPES)
def test_cuts_at_the_derived_multiples_and_only_there_cross_nothing(name: str) -> None:
    check_alignment_of(recipe_layout(name))


@pytest.mark.parametrize(
    ("name", "rows", "columns"), [("fp8_block", 128, 128), ("fp8_current", 1, 1), ("mxfp8", 32, 32), ("nvfp4", 16, 16)]
)
def test_alignment_of_the_recipes(name: str, rows: int, columns: int) -> None:
    plan = derive(recipe_layout(name))
    assert (plan.shard_rows, plan.column_multiple) == (rows, columns)


SIZES = st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12])
BLOCKS = st.tuples(st.tuples(SIZES, SIZES), st.tuples(SIZES, SIZES)).filter(
    lambda pair: pair[0][0] or pair[1][0] or pair[0] == pair[1]  # shards share one amax, so of one shape
)


@given(BLOCKS, st.sampled_from(["e4m3", "e2m1", "e3m2"]))
@settings(max_examples=20, deadline=None)
def test_alignment_of_one_source_alone_or_of_two_is_exact(
    blocks: tuple[tuple[int, int], tuple[int, int]], element: str
) -> None:
    """Two sources with unlike blocks need the least common multiple; a cut that suits one may cross the other."""
    layout = synthetic(*blocks, element)
    plan = derive(layout)
    multiples = {"m": plan.shard_rows, "k": plan.column_multiple}
    for axis, multiple in multiples.items():
        for cut in range(1, 2 * multiple + 1):
            assert cut % multiple != 0 or not crossed(layout, cut, axis)
            periodic = all(not crossed(layout, cut * i, axis) for i in (1, 2, 3))
            assert periodic == (cut % multiple == 0), "the multiple is the smallest that works for all its multiples"


@pytest.mark.parametrize("element", ["e2m1", "e3m2"])
def test_packed_codes_cut_columns_where_bytes_end(element: str) -> None:
    layout = synthetic((0, 0), (0, 0), element)
    assert derive(layout).column_multiple == {"e2m1": 2, "e3m2": 4}[element]
    assert derive(layout).shard_rows == 1


def test_a_shard_has_whole_bytes_in_every_buffer_too() -> None:
    """Columnwise data that packs two rows into a byte can't be laid out for a shard of odd rows."""
    layout = layout_of(
        """layoutc: 1
name: made_up
summary: one row a scale, and columnwise data packed along m
shape: {m: 2, k: 16}
element: {format: e2m1}
scale: {format: e4m3, rule: two-level}
tensor: {amax: f32}
orientations:
  rowwise: {block: {m: 1, k: 16}, data: {layout: m k}, scale: {layout: m k/16}}
  columnwise: {block: {m: 1, k: 16}, data: {layout: k m}, scale: {layout: k/16 m}}
""",
        "made_up",
    )
    assert derive(layout).shard_rows % 2 == 0


def test_the_reason_names_the_source_and_its_rows() -> None:
    assert derive(recipe_layout("mxfp8")).shard_reason == "one columnwise scale covers 32 rows"
    assert derive(recipe_layout("nvfp4")).shard_reason == "one rowwise scale covers 16 rows"


# --------------------------------------------------------------------------------------------------------------- gather
GATHERED = {
    "nvfp4": Fraction(129, 256),
    "mxfp8": Fraction(33, 32),
    "fp8_block": 1 + Fraction(4, 128 * 128),
    "fp8_current": Fraction(1),
    "fp8_delayed": Fraction(1),
}


@pytest.mark.parametrize("name", RECIPES)
def test_bytes_gathered_for_each_element(name: str) -> None:
    plan = derive(recipe_layout(name))
    assert plan.forward.bytes_per_element == plan.backward.bytes_per_element == GATHERED[name]
    assert plan.both.bytes_per_element == GATHERED[name] * (2 if name == "mxfp8" else 1)
    assert recipe(name).LAYOUT.bytes_per_element == float(GATHERED[name])


@pytest.mark.parametrize("name", RECIPES)
def test_each_pass_is_served_and_gathers_no_plane_that_it_does_not_need(name: str) -> None:
    layout = recipe_layout(name)
    plan = derive(layout)
    for gather, wanted in (
        (plan.forward, {"rowwise"}),
        (plan.backward, {"columnwise"}),
        (plan.both, set(layout.orientations)),
    ):
        assert wanted <= set(gather.serves)
        needed = {
            p.name for o in wanted for p in (layout.source(o).data, layout.source(o).scale) if p.per_m is not None
        }
        assert {plane.name for plane in gather.planes} == needed
        assert len(gather.planes) == len(needed)
    assert plan.passes_differ == (name == "mxfp8")
    assert not plan.slots_differ


@pytest.mark.parametrize("name", RECIPES)
def test_planes_are_either_cut_or_shared(name: str) -> None:
    plan = derive(recipe_layout(name))
    shared = {plane.name for plane in plan.shared}
    assert {plane.name for plane in plan.sharded}.isdisjoint(shared)
    assert {plane.name for plane in (*plan.sharded, *plan.shared)} == {plane.name for plane in plan.layout.planes}
    expected = {"nvfp4": {"amax"}, "fp8_current": {"rowwise_scale"}, "fp8_delayed": {"rowwise_scale", "amax"}}
    assert shared == expected.get(name, set())
    assert plan.shares_amax == bool(shared)


# ---------------------------------------------------------------------------------------------------------- derivations
def derivation(plan: Plan, orientation: str) -> str:
    """The source that an orientation is made of."""
    return next(item.source for item in plan.derivations if item.orientation == orientation)


@pytest.mark.parametrize("name", RECIPES)
def test_columnwise_follows_from_rowwise_in_all_recipes_but_mxfp8(name: str) -> None:
    plan = derive(recipe_layout(name))
    assert derivation(plan, "rowwise") == "rowwise"
    assert derivation(plan, "columnwise") == ("columnwise" if name == "mxfp8" else "rowwise")


def test_square_mxfp8_blocks_make_columnwise_follow_from_rowwise() -> None:
    def square(data: dict[str, Any]) -> None:
        for orientation in data["orientations"].values():
            orientation["block"] = {"m": 32, "k": 32}

    plan = derive(variant("mxfp8", square))
    assert derivation(plan, "columnwise") == "rowwise"
    assert plan.both.bytes_per_element == 1 + Fraction(1, 1024)


@given(BLOCKS)
@settings(max_examples=15, deadline=None)
def test_columnwise_is_derived_exactly_when_the_blocks_are_the_same(
    blocks: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    plan = derive(synthetic(*blocks))
    assert (derivation(plan, "columnwise") == "rowwise") == (blocks[0] == blocks[1])


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_derivation_says_how_often_a_buffer_has_what_is_stored_once(rows: int) -> None:
    """`layoutc show` prints it; once is not worth a word."""

    def scale_of_each_row(data: dict[str, Any]) -> None:
        del data["gemm"]
        data["shape"]["m"] = rows
        for orientation in data["orientations"].values():
            orientation |= {"block": {"m": rows, "k": 32}, "scale": {"layout": "m k/32"}}

    of_columns = next(d for d in derive(variant("mxfp8", scale_of_each_row)).derivations if d.orientation != d.source)
    how = f"repeated {rows}x along m" if rows > 1 else "as stored"
    assert of_columns.reason == f"same codes and scales as rowwise; data as stored; scale {how}"


# ------------------------------------------------------------------------------------------------------------ layout id
def set_(*path: str, to: Any) -> Edit:
    """An edit that sets a key."""

    def edit(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return edit


def renamed_format(data: dict[str, Any]) -> None:
    """The same bits under another name, and without torch's dtype."""
    data["formats"] = {"mine": {"sign": 1, "exponent": 4, "mantissa": 3, "bias": 7, "nan": [0x7F]}}
    data["element"]["format"] = "mine"


def other_bias(data: dict[str, Any]) -> None:
    renamed_format(data)
    data["formats"]["mine"]["bias"] = 8


def blocks_of_64(data: dict[str, Any]) -> None:
    data["orientations"]["rowwise"] |= {"block": {"m": 1, "k": 64}, "scale": {"layout": "m k/64", "pad": [128, 4]}}
    data["shape"]["k"] = 64


KEEPS: list[tuple[str, str, Edit]] = [
    ("mxfp8", "recipe renamed", set_("name", to="another")),
    ("mxfp8", "summary", set_("summary", to="something else")),
    ("mxfp8", "format renamed", renamed_format),
    ("mxfp8", "accepted rows", set_("shape", "m", to=64)),
    ("mxfp8", "accepted columns", set_("shape", "k", to=128)),
    ("mxfp8", "no swizzle", lambda d: d.pop("gemm")),
    ("mxfp8", "other swizzle", set_("gemm", "scale", "swizzle", to="(rt a b) (ct c) -> rt ct a b c")),
    ("fp8_current", "a default spelled out", set_("scale", "margin", to=0)),
    ("nvfp4", "default packing spelled out", set_("element", to={"format": "e2m1"})),
    ("fp8_block", "accepted shapes", set_("shape", to={"m": 128, "k": 128})),
]
CHANGES: list[tuple[str, str, Edit]] = [
    ("mxfp8", "block", blocks_of_64),
    ("mxfp8", "element format", set_("element", "format", to="e5m2")),
    ("mxfp8", "bias", other_bias),
    ("nvfp4", "scale format", set_("scale", "format", to="e5m2")),
    ("mxfp8", "rounding", set_("scale", "round", to="down")),
    (
        "mxfp8",
        "rule",
        set_("scale", to={"format": "e8m0", "rule": "amax-over-max", "power-of-two": True, "round": "up"}),
    ),
    ("mxfp8", "pad", set_("orientations", "rowwise", "scale", "pad", to=[128, 8])),
    ("mxfp8", "no columnwise", lambda d: d["orientations"].pop("columnwise")),
    ("mxfp8", "data layout", set_("orientations", "columnwise", "data", "layout", to="k m")),
    ("mxfp8", "stored granularity", set_("orientations", "columnwise", "scale", "layout", to="m/16 k")),
    ("nvfp4", "packing order", set_("element", "pack", to="high-first")),
    ("fp8_current", "epsilon", set_("scale", "epsilon", to=1.0e-12)),
    ("fp8_current", "margin", set_("scale", "margin", to=1)),
    ("fp8_current", "power of two", set_("scale", "power-of-two", to=True)),
    ("fp8_current", "overflow", set_("scale", "overflow", to="input-max")),
    ("fp8_current", "history", set_("scale", "history", to={"length": 4, "pick": "max"})),
    ("fp8_delayed", "history length", set_("scale", "history", "length", to=16)),
    ("fp8_delayed", "history pick", set_("scale", "history", "pick", to="most-recent")),
]


@pytest.mark.parametrize(("name", "edit"), [(n, e) for n, _, e in KEEPS], ids=[f"{n}: {why}" for n, why, _ in KEEPS])
def test_the_layout_id_keeps_when_no_stored_byte_and_no_arithmetic_changes(name: str, edit: Edit) -> None:
    assert layout_id(variant(name, edit)) == layout_id(recipe_layout(name))


@pytest.mark.parametrize(
    ("name", "edit"), [(n, e) for n, _, e in CHANGES], ids=[f"{n}: {why}" for n, why, _ in CHANGES]
)
def test_the_layout_id_changes_with_bytes_and_arithmetic(name: str, edit: Edit) -> None:
    assert layout_id(variant(name, edit)) != layout_id(recipe_layout(name))


def test_all_recipes_and_changes_have_ids_of_their_own() -> None:
    ids = [layout_id(recipe_layout(name)) for name in RECIPES] + [
        layout_id(variant(name, edit)) for name, _, edit in CHANGES
    ]
    alike = [(a, b) for a, b in itertools.combinations(range(len(ids)), 2) if ids[a] == ids[b]]
    assert not alike
    assert all(len(item) == 12 and set(item) <= set("0123456789abcdef") for item in ids)


@pytest.mark.parametrize("name", RECIPES)
def test_generated_facts_are_those_of_the_plan(name: str) -> None:
    plan, facts = derive(recipe_layout(name)), recipe(name).LAYOUT
    assert facts.layout_id == plan.layout_id
    assert (facts.shard_rows, facts.column_multiple) == (plan.shard_rows, plan.column_multiple)
    assert facts.shares_amax == plan.shares_amax
    gathers = {"forward": plan.forward, "backward": plan.backward, "both": plan.both}
    assert facts.travels == {which: tuple(p.name for p in gather.planes) for which, gather in gathers.items()}
    assert facts.serves == {which: gather.serves for which, gather in gathers.items()}
