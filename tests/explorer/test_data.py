"""What is exported, against the functions that it comes from; and the page's text."""

from __future__ import annotations

import html.parser
import json
import re
from math import lcm
from pathlib import Path

import pytest
from explored import OF_KINDS, page_of, plan_of, recipe_of
from places import SPECS

from layoutc.explorer import data, page
from layoutc.explorer.decides import decided, generated_lines, spec_lines
from layoutc.ints.cuts import Cuts
from layoutc.plan.wire import bytes_per_rank
from layoutc.report.describe import describe

SIX = [SPECS / f"{name}.yaml" for name in ("nvfp4", "mxfp8", "fp8_block", "int4_group32", "mxfp6_e2m3", "hybrid_fp8")]


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", OF_KINDS, ids=lambda path: path.stem)
def test_figures_are_those_of_the_plan(path: Path) -> None:
    plan = plan_of(path)
    stops = data.stops_of([plan], None, None)
    recipe = recipe_of(path, stops)
    assert len(stops.rows) >= data.FEWEST
    assert stops.first[0] in stops.rows
    assert stops.first[1] in stops.columns
    for i, m in enumerate(stops.rows):
        for w, world in enumerate(stops.worlds):
            at, cuts = recipe.cuts[i][w], Cuts.of(m, world)
            assert [rank[:2] for rank in at.ranks] == [cuts.bounds(rank) for rank in range(world)]
            assert [rank[2:] for rank in at.ranks] == [cuts.halo(rank, plan.block_rows)[:2] for rank in range(world)]
            assert at.inside == cuts.inside(plan.block_rows)
            assert at.parts == cuts.ranks_inside(plan.block_rows)
    for i, m in list(enumerate(stops.rows))[::3]:
        for j, k in list(enumerate(stops.columns))[::2]:
            stop = recipe.stops[i][j]
            assert list(stop.buffers) == [buffer.chain(m, k).nbytes for buffer in plan.layout.buffers]
            for w, world in list(enumerate(stops.worlds))[::2]:
                figures = stop.worlds[w]
                assert figures[0:9:3] == tuple(
                    bytes_per_rank(plan, gather, m, k, world) for gather in (plan.forward, plan.backward, plan.both)
                )
                facts = describe(plan, m, k, world)
                assert figures[2:9:3] == tuple(one.doubled for one in facts.passes)
                assert bool(figures[9]) == (facts.alignment.cut_blocks is not None)


def test_lines_of_a_spec_light_up_what_they_decide() -> None:
    path = SPECS / "nvfp4.yaml"
    lines = {
        line.text.strip(): set(line.parts) for line in recipe_of(path, data.stops_of([plan_of(path)], None, None)).spec
    }
    assert lines["shape: {m: 16, k: 16}"] == {"shape"}
    assert lines["element: {format: e2m1, pack: low-first}"] == {"plane:rowwise_data"}
    assert lines["scale: {format: e4m3, rule: two-level}"] == {"plane:rowwise_scale"}
    assert lines["tensor: {amax: f32}"] == {"plane:amax"}
    assert lines["scale: {swizzle: (rt a b) (ct c) -> rt ct b a c, a: 4, b: 32, c: 4}"] == {"swizzle"}
    assert lines["scale: {layout: k m/16, pad: [128, 4]}"] == {"buffer:columnwise_scale"}
    assert lines["layoutc: 1"] == lines["orientations:"] == set()


def test_an_orientation_of_its_own_quantization_is_not_decided_by_the_specs() -> None:
    path = SPECS / "hybrid_fp8.yaml"
    text = path.read_text(encoding="utf-8")
    lines = [(line.text.strip(), set(line.parts)) for line in spec_lines(plan_of(path).layout, text, str(path))]
    assert ("element: {format: e4m3}", {"plane:rowwise_data"}) in lines
    assert ("element: {format: e5m2}", {"plane:columnwise_data"}) in lines
    assert ("scale: {format: f32, rule: amax-over-max}", {"plane:columnwise_scale"}) in lines


def test_zero_points_are_decided_as_scales_are() -> None:
    path = SPECS / "int4_group32.yaml"
    recipe = recipe_of(path, data.stops_of([plan_of(path)], None, None))
    lines = {line.text.split("#")[0].strip(): set(line.parts) for line in recipe.spec}
    both = {f"plane:{orientation}_{kind}" for orientation in ("rowwise", "columnwise") for kind in ("scale", "zero")}
    assert lines["scale: {format: f32, rule: min-max, zero: int8}"] == both
    assert lines["block: {m: 1, k: 32}"] == {"block:rowwise", "plane:rowwise_scale", "plane:rowwise_zero", "cuts"}
    assert lines["scale: {layout: m k/32}"] == {"buffer:rowwise_scale", "buffer:rowwise_zero"}
    assert lines["int4_full: {integer: 4}"] == {"plane:rowwise_data", "plane:columnwise_data"}


@pytest.mark.sample(6)
@pytest.mark.parametrize("path", OF_KINDS, ids=lambda path: path.stem)
def test_every_plane_and_buffer_is_decided_by_a_line_and_named_by_generated_code(path: Path) -> None:
    layout = plan_of(path).layout
    recipe = recipe_of(path, data.stops_of([plan_of(path)], None, None))
    decides = {part for line in recipe.spec for part in line.parts}
    named = {part for _, lines in recipe.generated for line in lines for part in line.parts}
    of_sources = {f"plane:{plane.name}" for source in layout.sources for plane in source.planes}
    buffers = {f"buffer:{buffer.name}" for buffer in (*layout.buffers, *layout.records)}
    assert of_sources | buffers <= decides
    assert of_sources | buffers <= named
    known = of_sources | buffers | {"plane:amax", "shape", "cuts", "swizzle", "products", "files"}
    assert decides | named <= known | {f"block:{name}" for name in layout.orientations}


def test_comments_of_generated_code_speak_for_the_lines_below() -> None:
    layout = plan_of(SPECS / "nvfp4.yaml").layout
    text = "def f():\n    # orientations.columnwise.scale: transposed\n    a = 1\n    b = 2\n\n    c = 3\n"
    parts = [line.parts for line in generated_lines(layout, text)]
    assert parts == [
        (),
        ("buffer:columnwise_scale",),
        ("buffer:columnwise_scale",),
        ("buffer:columnwise_scale",),
        (),
        (),
    ]
    assert decided(layout, ("orientations", "nonsense"), {}) == ()


# ------------------------------------------------------------------------------------------------------------- the page
class Reader(html.parser.HTMLParser):
    """Collects what a page would load, and the text of its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts: list[str] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        places = [value or "" for key, value in attrs if key in ("src", "href")]
        self.loads += [place for place in places if not place.startswith(("#", "data:,"))]
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[-1] += data


def test_a_page_of_six_recipes_is_small_and_loads_nothing() -> None:
    made, text = page_of(*SIX)
    assert len(text.encode()) < page.LARGEST == 500_000
    reader = Reader()
    reader.feed(text)
    assert reader.loads == []
    assert len(reader.scripts) == 2
    assert json.loads(reader.scripts[0])["recipes"][0]["name"] == made.recipes[0].name
    assert not re.search(r"url\((?!#)|@import|\bfetch\(|XMLHttpRequest|https?://(?!www\.w3\.org)", text)
    assert "default-src 'none'" in text
    assert page.render(made) == text, "the same page each time"


def test_a_spec_cannot_end_the_script_that_holds_it(tmp_path: Path) -> None:
    text = (SPECS / "fp8_block.yaml").read_text(encoding="utf-8")
    comment = "# </script><script>alert(1)</script> @data@ <!--"
    path = tmp_path / "fp8_block.yaml"
    path.write_text(f"{text.rstrip()}\n{comment}\n", encoding="utf-8")
    _, made = page_of(path)
    reader = Reader()
    reader.feed(made)
    assert len(reader.scripts) == 2
    assert "<" not in reader.scripts[0]
    lines = json.loads(reader.scripts[0])["recipes"][0]["spec"]
    assert "\n".join(line["text"] for line in lines).endswith(comment)


def test_shapes_that_a_recipe_does_not_take_are_refused() -> None:
    plan = plan_of(SPECS / "mxfp8.yaml")
    with pytest.raises(ValueError, match="rows in multiples of 32, not 33: m can be 32 or 64"):
        data.stops_of([plan], (33, 64), None)
    with pytest.raises(ValueError, match="at most 2,147,483,648 elements"):
        data.stops_of([plan], (2**20, 2**20), None)
    stops = data.stops_of([plan], (160, 224), 11)
    assert stops.first == (160, 224, 11)
    assert (160 in stops.rows, 224 in stops.columns, 11 in stops.worlds) == (True, True, True)


@pytest.mark.parametrize("names", [("nvfp4",), ("fp8_current", "mxfp8"), ("fp8_block",)])
def test_stops_are_sizes_that_every_recipe_takes(names: tuple[str, ...]) -> None:
    """The usual ones, ascending; at least four of each; and the sizes that were asked for."""
    plans = [plan_of(SPECS / f"{name}.yaml") for name in names]
    m, k = (lcm(*(getattr(plan.layout, f"multiple_{axis}") for plan in plans)) for axis in "mk")
    found = data.stops_of(plans, None, None)
    for stops, usual, multiple in ((found.rows, data.ROWS, m), (found.columns, data.COLUMNS, k)):
        assert list(stops) == sorted(set(stops))
        assert {size for size in usual if size % multiple == 0} <= set(stops)
        assert all(size % multiple == 0 for size in stops)
        assert len(stops) >= data.FEWEST
    assert found.worlds == data.WORLDS
    assert found.first == (96, 64, 4)
    own = data.stops_of(plans, (m * 1000, k * 1000), 24)
    assert set(own.rows) - set(found.rows) == {m * 1000}
    assert set(own.columns) - set(found.columns) == {k * 1000}
    assert (own.worlds, own.first) == ((*data.WORLDS, 24), (m * 1000, k * 1000, 24))
    assert data.stops_of(plans, None, 5).worlds == data.WORLDS


def test_stops_of_large_multiples() -> None:
    assert data._taken((16, 96, 128, 144), 16, None) == (16, 96, 128, 144)
    assert data._taken((16, 96, 128, 144), 48, None) == (48, 96, 144, 192)
    assert data._taken((16, 96), 1000, 5000) == (1000, 2000, 3000, 4000, 5000)
    assert [data._nearest((16, 32, 48), wanted) for wanted in (1, 24, 25, 40, 41, 99)] == [16, 16, 32, 32, 48, 48]
    plan = plan_of(SPECS / "mxfp8.yaml")
    assert data.stops_of([plan], (2**16, 2**15), None).first[0] == 2**16
    with pytest.raises(ValueError, match="at most 2,147,483,648 elements"):
        data.stops_of([plan], (2**16, 2**15 + 32), None)


def test_too_many_recipes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made, text = page_of(SIX[0])
    monkeypatch.setattr(page, "LARGEST", 1000)
    with pytest.raises(ValueError, match="name fewer recipes"):
        page.render(made)
    size = len(text.encode())
    monkeypatch.setattr(page, "LARGEST", size)
    assert page.render(made) == text
    monkeypatch.setattr(page, "LARGEST", size - 1)
    with pytest.raises(ValueError, match=f"more than {size - 1:,} bytes"):
        page.render(made)


@pytest.mark.parametrize("path", sorted((Path(page.__file__).parent / "page").iterdir()), ids=lambda path: path.name)
def test_files_of_the_page_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
