"""Pictures for papers: their cells name what the index maps name, at places in the order of memory."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from explored import OF_KINDS, plan_of
from places import ROOT, SPECS

from layoutc.explorer import data, svg
from layoutc.layout.layout import is_swizzled
from layoutc.report.maps import index_map

NAMESPACE = {"s": "http://www.w3.org/2000/svg"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", OF_KINDS, ids=lambda path: path.stem)
def test_cells_are_those_of_the_index_map(path: Path) -> None:
    plan = plan_of(path)
    m, k, world = data.stops_of([plan], None, None).first
    for buffer in plan.layout.buffers:
        drawn = ET.fromstring(svg.picture(plan, m, k, world, buffer.name))
        cells = [one for one in drawn.findall("s:text", NAMESPACE) if one.get("class") == "v"]
        found = index_map(plan, buffer.name, m, k)
        swizzled, by_byte = found["swizzled"], found["bytes"]
        assert isinstance(by_byte, list)
        if is_swizzled(plan.layout, buffer):
            assert isinstance(swizzled, list)
            values = swizzled
        elif buffer.bits >= 8:
            values = [values[0] for values in by_byte[:: buffer.bits // 8]]
        else:  # a code that continues in the next byte is in both
            codes = itertools.chain.from_iterable(by_byte[: 512 * buffer.bits // 8])
            values = [value for value, _ in itertools.groupby(codes)]
        expected = [f"{value[0]},{value[1]}" for value in values[:512] if value is not None]
        assert [cell.text for cell in cells] == expected, buffer.name
        rows = [float(cell.get("y", 0)) for cell in cells]
        assert rows == sorted(rows), "lines follow memory"
        width, height = float(drawn.get("width", 0)), float(drawn.get("height", 0))
        assert drawn.get("viewBox") == f"0 0 {width:g} {height:g}"
        lines = [one for one in drawn.iter() if one.tag.endswith("}text")]
        assert max(float(one.get("y", 0)) for one in lines) < height
        rects = [one for one in drawn.findall("s:rect", NAMESPACE) if one.get("class") != "w"]
        right = max(float(one.get("x", 0)) + float(one.get("width", 0)) for one in rects)
        assert width - 40 < right < width or len(rects) < svg.VALUES, "no cell is cut off"


def test_cuts_are_drawn_where_ranks_begin() -> None:
    plan = plan_of(SPECS / "nvfp4.yaml")
    drawn = ET.fromstring(svg.picture(plan, 96, 64, 4))
    paths = {one.get("class"): one.get("d") for one in drawn.findall("s:path", NAMESPACE)}
    assert "c" not in paths, "both cuts but one are below the picture"
    assert re.match(rf"M\d+ {svg.TOP + 24 * svg.CELL}H", paths["i"] or "")
    drawn = ET.fromstring(svg.picture(plan, 64, 64, 4))
    paths = {one.get("class"): one.get("d") for one in drawn.findall("s:path", NAMESPACE)}
    assert "i" not in paths
    assert re.match(rf"M\d+ {svg.TOP + 16 * svg.CELL}H", paths["c"] or "")


def test_a_picture_says_what_it_is_and_is_the_same_each_time() -> None:
    plan = plan_of(SPECS / "nvfp4.yaml")
    text = svg.picture(plan, 96, 64, 4)
    assert svg.picture(plan, 96, 64, 4) == text
    drawn = ET.fromstring(text)
    title, description = (drawn.find(f"s:{name}", NAMESPACE) for name in ("title", "desc"))
    assert title is not None
    assert title.text == "nvfp4: E2M1 weights in 16x16 blocks, E4M3 block scales under one FP32 amax"
    assert description is not None
    assert description.text == (
        "A weight of 96 x 64, 24 rows on each of 4 ranks; 2 cuts inside blocks of 16 rows. "
        "rowwise_scale: rowwise_scale, repeated 16x along m, zero-padded to multiples of 128 x 4, "
        "swizzled (rt a b) (ct c) -> rt ct b a c. "
        "Layout id 7356aee3b36b."
    )
    assert "<script" not in text


def test_unknown_buffers_are_refused() -> None:
    with pytest.raises(KeyError):
        svg.picture(plan_of(SPECS / "nvfp4.yaml"), 96, 64, 4, "nonsense")


@pytest.mark.checkout
def test_the_picture_of_the_pages_is_the_one_that_is_drawn(golden: Callable[[Path, str], None]) -> None:
    golden(ROOT / "docs" / "pages" / "pictures" / "nvfp4.svg", svg.picture(plan_of(SPECS / "nvfp4.yaml"), 96, 64, 4))
