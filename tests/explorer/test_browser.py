"""The page in Chromium: pointers, keys and sliders give what the index maps say; the console, axe, pictures."""

from __future__ import annotations

import base64
import itertools
import os
import random
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import browser as browsers
import pytest
from browser import Browser
from explored import address, page_of, plan_of
from places import SPECS, TESTS

from layoutc.explorer.data import Stops, plane_formula
from layoutc.ints.cuts import Cuts
from layoutc.layout.chain import Chain
from layoutc.layout.layout import Plane, is_swizzled, swizzled_formula
from layoutc.plan.plan import Plan

GOLDEN = TESTS / "golden" / "explorer"
SIX = ["nvfp4", "mxfp8", "fp8_block", "int4_group32", "mxfp6_e2m3", "hybrid_fp8"]
MOVES = 30
NOTHING = "\N{EN DASH}"
DESKTOP, PHONE = (1280, 900), (390, 844)
pytestmark = pytest.mark.skipif(bool(browsers.missing()), reason=browsers.missing() or "there is a browser")


# ------------------------------------------------------------------------------------------------ what the maps say
def place(chain: Chain, byte: int, bit: int) -> str:
    """One place, in the page's words."""
    if chain.bits > 8:
        return f"bytes {byte:,} to {byte + chain.bits // 8 - 1:,}"
    if chain.bits == 8:
        return f"byte {byte:,}"
    if chain.bits == 4:
        return f"byte {byte:,}, {'low' if (bit == 0) == chain.low_first else 'high'} nibble"
    into = f", into byte {byte + 1:,}" if bit + chain.bits > 8 else ""
    return f"byte {byte:,}, from its bit {bit}{into}"


def places(chain: Chain, index: tuple[int, ...]) -> str:
    """All places of a value, in the page's words."""
    found = sorted(chain.positions(index))
    if len(found) == 1:
        return place(chain, *found[0])
    steps = {after[0] - before[0] for before, after in itertools.pairwise(found)}
    if len(steps) == 1:
        return f"{len(found)} copies: bytes {found[0][0]:,} to {found[-1][0]:,}, {steps.pop():,} apart"
    few = ", ".join(f"{byte:,}" for byte, _ in found[:6])
    return f"{len(found)} copies: bytes {few}{', …' if len(found) > 6 else ''}"


def expected(plan: Plan, m: int, k: int, world: int, row: int, column: int) -> dict[str, object]:
    """What the page must say of an element."""
    layout, cuts = plan.layout, Cuts.of(m, world)
    lies: list[list[str]] = []
    for plane in layout.planes:
        formula = plane_formula(layout, plane)
        index = formula.index(row, column)
        lies.append([plane.name, ", ".join(map(str, index)), places(formula.at(m, k), index), NOTHING])
    for buffer in layout.buffers:
        index = buffer.formula.index(row, column)
        swizzled = swizzled_formula(layout, buffer).at(m, k) if is_swizzled(layout, buffer) else None
        read = places(swizzled, index) if swizzled else NOTHING
        lies.append([buffer.name, ", ".join(map(str, index)), places(buffer.chain(m, k), index), read])
    own = row // cuts.per_rank
    travels = [
        [gather.name, plane.name, *sent(plan, plane, cuts, k, row, column, own, plane in gather.planes)]
        for gather in (plan.forward, plan.backward)
        for plane in layout.planes
    ]
    block = layout.source(layout.orientations[0]).quantization.block
    at = f"{row // (block.m or m)}, {column // (block.k or k)}"
    where = f"row {row:,}, column {column:,} {layout.orientations[0]} block {at} rank {own}, its row"
    return {"where": f"{where} {row % cuts.per_rank:,}", "lies": lies, "travels": travels}


def sent(
    plan: Plan, plane: Plane, cuts: Cuts, k: int, row: int, column: int, own: int, gathered: bool
) -> tuple[str, str]:
    """Which ranks send the element's value of a plane, and where it is in what its own rank sends."""
    if not gathered:
        return ("not sent", NOTHING) if plane.per_m is not None else ("alike on all ranks", "not gathered")
    per = plane.per_m or 1
    touching = [rank for rank in range(cuts.world) if (row // per) in range(*cuts.touched(rank, per))]
    more = ", …" if len(touching) > 8 else ""
    ranks = f"rank{'s' if len(touching) > 1 else ''} {', '.join(map(str, touching[:8]))}{more}"
    formula = plane_formula(plan.layout, plane)
    rows_before = cuts.touched(own, per)[0] * per
    chain = formula.at(cuts.rows - rows_before, k)  # of the rows from the rank's first block on
    byte, bit = chain.positions(formula.index(row - rows_before, column))[0]
    return ranks, place(chain, byte, bit) + (f" of rank {own}" if len(touching) > 1 else "")


# --------------------------------------------------------------------------------------------------- what the page says
SAYS = """
const article = document.getElementById(`recipe-${arguments[0]}`);
const cell = (one) => one.firstChild.textContent;
const [lies, travels] = [...article.querySelectorAll("section table:not(.budget) tbody")].map(
    (body) => [...body.rows].map((row) => [...row.cells].map(cell)));
return {where: article.querySelector(".where").textContent.replace(/\\s+/g, " ").trim(), lies, travels};
"""
CELL = """
const svg = document.querySelector(`#recipe-${arguments[0]} svg.weight`);
svg.scrollIntoView({block: "center", behavior: "instant"});
const box = svg.getBoundingClientRect();
const scale = box.width / svg.viewBox.baseVal.width;
const [down, across] = [arguments[1], arguments[2]].map((count) => (count + 0.5) * view.cell);
return [box.left + (LEFT + across) * scale, box.top + (TOP + down) * scale];
"""


@pytest.mark.parametrize("name", SIX)
def test_pointers_keys_and_sliders_give_what_the_maps_say(window: Browser, pages: Path, name: str) -> None:
    """The state is kept here as well: what each move must lead to follows from the page's controls alone."""
    plan = plan_of(SPECS / f"{name}.yaml")
    stops: Stops = page_of(SPECS / f"{name}.yaml")[0].stops
    window.view(*DESKTOP)
    window.open(address(pages, name))
    window.messages()
    chance = random.Random(name)
    m, k, world = stops.first
    row, column = min(20, m - 1), min(5, k - 1)
    sizes = {"rows": stops.rows, "columns": stops.columns, "ranks": stops.worlds}
    seen = set()
    for number in range(MOVES):
        kind = ("pointer", "key", "slider")[number % 3]
        if kind == "pointer":
            top, left = window.js("return [state.top, state.left]")
            down, across = chance.randrange(min(32, m - top)), chance.randrange(min(32, k - left))
            window.point(*window.js(CELL, name, down, across))
            row, column = top + down, left + across
        elif kind == "key":
            window.js("document.querySelector('.frame').focus()")
            rows, columns = chance.choice([(1, 0), (-1, 0), (0, 1), (0, -1)])
            key = {(1, 0): "ArrowDown", (-1, 0): "ArrowUp", (0, 1): "ArrowRight", (0, -1): "ArrowLeft"}[rows, columns]
            count = chance.randrange(1, 6)
            window.keys(*[key] * count)
            row = max(0, min(m - 1, row + rows * count))
            column = max(0, min(k - 1, column + columns * count))
        else:
            slider = chance.choice(["rows", "columns", "ranks"])
            window.js(f"document.getElementById('{slider}').focus()")
            key = chance.choice(["ArrowRight", "ArrowLeft"])
            window.keys(key)
            now = {"rows": m, "columns": k, "ranks": world}[slider]
            step = 1 if key == "ArrowRight" else -1
            at = max(0, min(len(sizes[slider]) - 1, sizes[slider].index(now) + step))
            m, k, world = ({"rows": m, "columns": k, "ranks": world} | {slider: sizes[slider][at]}).values()
            row, column = min(row, m - 1), min(column, k - 1)
        said = window.js(SAYS, name)
        assert said == expected(plan, m, k, world, row, column), (number, kind, m, k, world, row, column)
        seen.add((m, k, world, row, column))
    assert len(seen) > MOVES // 2, "the moves lead somewhere"
    assert window.messages() == []


def test_recipes_side_by_side_show_the_same_element(window: Browser, pages: Path) -> None:
    window.view(1600, 900)
    window.open(address(pages, *SIX[:3]))
    stops = page_of(*(SPECS / f"{name}.yaml" for name in SIX[:3]))[0].stops
    window.point(*window.js(CELL, "mxfp8", 9, 13))
    for name in SIX[:3]:
        assert window.js(SAYS, name) == expected(plan_of(SPECS / f"{name}.yaml"), *stops.first, 9, 13)


def test_a_tap_chooses_an_element_and_a_click_in_memory_its_value(window: Browser, pages: Path) -> None:
    window.view(*PHONE)
    window.open(address(pages, "nvfp4"))
    window.point(*window.js(CELL, "nvfp4", 3, 4), press=True)
    assert "row 3, column 4 " in window.js(SAYS, "nvfp4")["where"]
    window.js("document.querySelector('.memory .cell[data-code=\"1\"]').dispatchEvent(new MouseEvent('click'))")
    assert "row 0, column 16 rowwise block 0, 1" in window.js(SAYS, "nvfp4")["where"]


def test_memory_has_the_map_of_the_chosen_buffer(window: Browser, pages: Path) -> None:
    """Each cell names its value; copies of the chosen one are marked."""
    window.view(*DESKTOP)
    window.open(address(pages, "nvfp4"))
    plan = plan_of(SPECS / "nvfp4.yaml")
    m, k, _ = page_of(SPECS / "nvfp4.yaml")[0].stops.first
    read = (
        "return [...document.querySelectorAll('.memory .cell')].map((cell) => cell.querySelector('text').textContent)"
    )
    marked = "return document.querySelectorAll('.memory .mine').length"
    choose = (
        "const [name, swizzled] = arguments; const select = document.querySelector('select'); select.value = name;"
        "select.dispatchEvent(new Event('change')); const box = document.querySelector('#order-nvfp4');"
        "if (box.checked !== swizzled) box.click();"
    )
    for buffer in plan.layout.buffers:
        for swizzled in (False, True) if is_swizzled(plan.layout, buffer) else (False,):
            window.js(choose, buffer.name, swizzled)
            chain = (swizzled_formula(plan.layout, buffer) if swizzled else buffer.formula).at(m, k)
            index = buffer.formula.index(20, 5)
            first = min(byte * 8 + bit for byte, bit in chain.positions(index)) // chain.bits
            begin = first // 512 * 512
            count = chain.nbytes * 8 // chain.bits
            values = [chain.value_at(*divmod(code * chain.bits, 8)) for code in range(begin, min(count, begin + 512))]
            assert window.js(read) == ["·" if value is None else ",".join(map(str, value)) for value in values]
            assert window.js(marked) == sum(value == index for value in values)


def test_larger_pictures_show_more_elements(window: Browser, pages: Path) -> None:
    window.view(*DESKTOP)
    window.open(f"{address(pages, 'fp8_block')}#m=256&k=256&world=3&row=170&column=130&zoom=4")
    assert window.js("return [view.rows, view.columns, state.top, state.left]") == [128, 160, 43, 0]
    window.point(*window.js(CELL, "fp8_block", 100, 120))
    assert window.js(SAYS, "fp8_block") == expected(plan_of(SPECS / "fp8_block.yaml"), 256, 256, 3, 143, 120)


def test_a_line_of_the_spec_lights_up_what_it_decides_and_shows_its_code(window: Browser, pages: Path) -> None:
    window.view(*DESKTOP)
    window.open(address(pages, "nvfp4"))
    pressed = (
        "const lines = [...document.querySelectorAll('button.line')];"
        "const line = lines.find((one) => one.textContent.includes(arguments[0]));"
        "line.focus(); line.click(); line.blur();"
        "return [[...document.querySelectorAll('.lit')].map((one) => one.dataset.part || one.textContent),"
        "line.getAttribute('aria-pressed'), document.querySelector('div.code').textContent]"
    )
    lit, state, code = window.js(pressed, "swizzle:")
    assert (lit, state) == (["swizzle"], "true")
    assert 'swizzled=("rowwise_scale", "columnwise_scale")' in code
    lit, state, code = window.js(pressed, "k m/16")
    assert (set(lit), state) == ({"buffer:columnwise_scale"}, "true")
    assert "repeated 16x along k" in code
    lit, state, code = window.js(pressed, "k m/16")
    assert (lit, state) == ([], "false")
    assert "appear here" in code


def test_the_address_leads_to_the_same_picture(window: Browser, pages: Path) -> None:
    window.view(*DESKTOP)
    window.open(f"{address(pages, 'nvfp4')}#m=144&k=128&world=5&row=30&column=40&blocks=columnwise")
    assert window.js("return document.querySelector('.where').textContent").startswith("row 30, column 40 columnwise")
    assert window.js("return [...document.querySelectorAll('output')].slice(0, 3).map((one) => one.textContent)") == [
        "144",
        "128",
        "5",
    ]
    window.open(f"{address(pages, 'nvfp4')}#m=7&k=x&row=99999&nonsense=1&blocks=diagonal")
    assert "row 95, column 5 rowwise block 5, 0" in window.js(SAYS, "nvfp4")["where"]
    assert window.messages() == []


def test_all_is_reached_by_keys_and_said_aloud(window: Browser, pages: Path) -> None:
    window.view(*DESKTOP)
    window.open(address(pages, "nvfp4"))
    reached = []
    for _ in range(12):
        window.keys("Tab")
        reached.append(window.js("const on = document.activeElement; return on.id || on.className"))
    assert reached[1:7] == ["rows", "columns", "ranks", "top", "left", "zoom"]
    assert "frame" in reached
    window.js("document.querySelector('.frame').focus()")
    window.keys("Shift+ArrowDown", "End")
    assert "row 36, column 63 rowwise block 2, 3" in window.js(SAYS, "nvfp4")["where"]
    said = window.later("setTimeout(() => arguments[0](document.getElementById('live').textContent), 400)")
    assert said == "row 36, column 63; block 2, 3; rank 1; byte 1,183, high nibble of rowwise_data."


def test_a_page_of_six_recipes_is_usable_within_a_second(window: Browser, pages: Path) -> None:
    """From the beginning of the navigation until all is drawn, and each move after: the best of three."""
    window.view(*DESKTOP)
    loads, moves = [], []
    for _ in range(3):
        window.open(address(pages, *SIX))
        loads.append(window.js("return performance.getEntriesByType('navigation')[0].loadEventEnd"))
        move = "const begin = performance.now(); change({row: state.row + 1}); return performance.now() - begin"
        moves.append(window.js(move))
    assert 0 < min(loads) < 1000, loads
    assert min(moves) < 200, moves


# ---------------------------------------------------------------------------------------------------------------- axe
@cache
def axe() -> str:
    """The text of axe-core, from LAYOUTC_AXE or from npm."""
    if place := os.environ.get("LAYOUTC_AXE"):
        return Path(place).read_text(encoding="utf-8")
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("needs axe-core: npm install axe-core, and LAYOUTC_AXE=node_modules/axe-core/axe.min.js")
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, "axe-core@4"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            pytest.skip(f"npm could not install axe-core; set LAYOUTC_AXE to its axe.min.js: {done.stderr[-200:]}")
        return (Path(folder) / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), (PHONE, True)], ids=["desktop-light", "phone-dark"])
def test_axe_finds_no_serious_fault(window: Browser, pages: Path, size: tuple[int, int], dark: bool) -> None:
    script = axe()
    window.view(*size, dark=dark)
    window.open(address(pages, "nvfp4", "q4_k"))
    window.js("document.querySelector('button.line').click()")
    window.js(script)
    found: list[dict[str, Any]] = window.later("axe.run().then((result) => arguments[0](result.violations))")
    serious = [
        (fault["id"], fault["help"], [one["html"][:160] for one in fault["nodes"]][:3])
        for fault in found
        if fault["impact"] in ("serious", "critical")
    ]
    assert serious == []


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_nothing_is_wider_than_the_window(window: Browser, pages: Path, size: tuple[int, int]) -> None:
    window.view(*size)
    for names in (SIX[:1], SIX[:2]):
        window.open(address(pages, *names))
        assert window.js("return document.documentElement.scrollWidth") <= size[0]


# ------------------------------------------------------------------------------------------------------------- pictures
COMPARE = """
const [done, sources] = [arguments[2], [arguments[0], arguments[1]]];
Promise.all(sources.map((source) => new Promise((loaded) => {
  const image = new Image();
  image.onload = () => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.width, image.height];
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    loaded(context.getImageData(0, 0, image.width, image.height));
  };
  image.src = `data:image/png;base64,${source}`;
}))).then(([a, b]) => {
  if (a.width !== b.width || a.height !== b.height) return done(1);
  let differ = 0;
  for (let i = 0; i < a.data.length; i += 4) {
    const most = Math.max(...[0, 1, 2].map((c) => Math.abs(a.data[i + c] - b.data[i + c])));
    if (most > 60) differ += 1;
  }
  done(differ / (a.data.length / 4));
});
"""
TOLERANCE = 0.06  # of the pixels: fonts differ from machine to machine, and so do the edges of letters


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_page_looks_as_it_did(
    window: Browser, pages: Path, size: tuple[int, int], dark: bool, request: pytest.FixtureRequest
) -> None:
    """`pytest --update-golden` renews the pictures, which are half as large as the window: look at them."""
    kind = f"nvfp4-{'phone' if size == PHONE else 'desktop'}-{'dark' if dark else 'light'}"
    window.view(*size, dark=dark, scale=0.5)
    window.open(address(pages, "nvfp4"))
    window.point(2, 2)
    drawn = window.picture()
    path = GOLDEN / f"{kind}.png"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn)
    before, now = (base64.b64encode(content).decode() for content in (path.read_bytes(), drawn))
    window.open("about:blank")
    share = window.later(COMPARE, before, now)
    assert share <= TOLERANCE, f"{share:.1%} of the pixels differ from {path.name}"


def test_print_has_no_controls_that_paper_lacks(window: Browser, pages: Path) -> None:
    window.view(*DESKTOP, dark=True)
    window.open(address(pages, "nvfp4"))
    window.devtools("Emulation.setEmulatedMedia", media="print")
    try:
        shown = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
        assert window.js(shown, "#rows", "display") == "none"
        assert window.js(shown, "body", "backgroundColor") == "rgb(255, 255, 255)"
        printed = base64.b64decode(window.devtools("Page.printToPDF", printBackground=True)["data"])
        assert printed.startswith(b"%PDF")
        assert len(re.findall(rb"/Type /Page\b", printed)) <= 4
    finally:
        window.devtools("Emulation.setEmulatedMedia", media="")
