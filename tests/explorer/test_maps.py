"""The page's own maps, in node, against the compiler's chains and against plain numpy, for every recipe there is."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from explored import OF_KINDS, as_read, laid_out, numbered, plan_of, shapes_of

from layoutc.explorer.data import formula_data, plane_formula
from layoutc.layout.formula import Formula
from layoutc.layout.layout import Layout, is_swizzled, resolve, swizzled_formula
from layoutc.report.describe import as_data
from layoutc.spec.checks.read import read_spec
from layoutc.spec.schema import Spec

HERE = Path(__file__).parent
MAPS = files("layoutc.explorer").joinpath("page", "maps.js")
Case = tuple[str, Formula, np.ndarray, tuple[int, int]]


def cases(layout: Layout) -> list[Case]:
    """All maps of a recipe: name, formula, and the numbers of values where they lie."""
    found: list[Case] = []
    for m, k in shapes_of(layout):
        for plane in layout.planes:
            found.append((plane.name, plane_formula(layout, plane), numbered(plane, m, k), (m, k)))
        for buffer in layout.buffers:
            found.append((buffer.name, buffer.formula, laid_out(buffer, m, k), (m, k)))
            if is_swizzled(layout, buffer):
                formula = swizzled_formula(layout, buffer)
                found.append((f"{buffer.name} swizzled", formula, as_read(layout, buffer, m, k), (m, k)))
    return found


@cache
def elements(m: int, k: int, count: int = 28) -> list[tuple[int, int]]:
    """Random elements, and those in the corners."""
    chance = random.Random(m * 1000 + k)
    corners = [(0, 0), (m - 1, 0), (0, k - 1), (m - 1, k - 1)]
    return corners + [(chance.randrange(m), chance.randrange(k)) for _ in range(count)]


@pytest.fixture(scope="module")
def node() -> Iterator[subprocess.Popen[str]]:
    """One process that follows all maps."""
    command = shutil.which("node")
    if command is None:
        pytest.skip("needs node: apt-get install nodejs")
    arguments = [command, str(HERE / "maps_in_node.js"), str(MAPS)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def in_node(node: subprocess.Popen[str], asked: list[Case]) -> list[dict[str, Any]]:
    """What maps.js says of each case."""
    given = [
        {"formula": as_data(formula_data(formula)), "m": m, "k": k, "elements": elements(m, k)}
        for _, formula, _, (m, k) in asked
    ]
    assert node.stdin is not None
    assert node.stdout is not None
    node.stdin.write(json.dumps(given) + "\n")
    node.stdin.flush()
    answers: list[dict[str, Any]] = json.loads(node.stdout.readline())
    return answers


def compare(node: subprocess.Popen[str], asked: list[Case]) -> None:
    """Every place of every map, both ways."""
    for (name, formula, numbers, (m, k)), answer in zip(asked, in_node(node, asked), strict=True):
        chain = formula.at(m, k)
        assert answer["bytes"] == chain.nbytes, name
        start = np.arange(1, np.prod(chain.start, dtype=int) + 1).reshape(chain.start)
        by_code = [0 if value is None else int(start[tuple(value)]) for value in answer["values"]]
        expected = numbers.ravel().tolist()
        assert by_code == expected, f"{name} of {m} x {k}: which value is where"
        codes_of: dict[int, list[int]] = {}
        for code, number in enumerate(expected):
            codes_of.setdefault(number, []).append(code)
        for at, element in enumerate(elements(m, k)):
            index = formula.index(*element)
            assert [tuple(place) for place in answer["positions"][at]] == list(chain.positions(index)), (name, element)
            assert sorted(answer["codes"][at]) == codes_of.get(int(start[index]), []), (name, element)
            assert formula.index(*answer["back"][at]) == index


@pytest.mark.sample(5)
@pytest.mark.parametrize("path", OF_KINDS, ids=lambda path: path.stem)
def test_the_pages_maps_are_the_compilers_and_numpys(path: Path, node: subprocess.Popen[str]) -> None:
    compare(node, cases(plan_of(path).layout))


def test_so_are_those_of_random_specs(node: subprocess.Popen[str]) -> None:
    """Random blocks, stored granularity, orders of axes, padding, packing and swizzles."""
    layouts = [resolve(spec) for seed in range(40) if (spec := random_spec(seed)) is not None]
    assert len(layouts) > 7
    assert sum(layout.swizzle is not None for layout in layouts) > 1
    assert {plane.bits for layout in layouts for plane in layout.planes} >= {4, 6, 8, 16, 32}
    compare(node, [case for layout in layouts for case in cases(layout)])


def random_spec(seed: int) -> Spec | None:
    """A spec at random; None for one that the checks refuse."""
    chance = random.Random(seed)
    element = chance.choice(["e4m3", "e2m1", "e3m2", "e2m3"])
    order_of_codes = chance.choice(["low-first", "high-first"])
    scale = chance.choice(["f32", "e8m0", "f16"])
    tile = {"a": chance.choice([2, 4]), "b": chance.choice([1, 3, 8]), "d": chance.choice([2, 4])}
    swizzled = scale == "e8m0" and chance.random() < 0.5
    sizes = [1, 2, 3, 4, 8, 16] if swizzled else [1, 2, 3, 4, 8, 16, "all"]

    def orientation(free: str) -> dict[str, object]:
        block: dict[str, Any] = {axis: chance.choice(sizes) for axis in "mk"}
        axes = chance.sample("mk", 2)
        data: dict[str, object] = {"layout": " ".join(axes)}
        if chance.random() < 0.5:
            data["pad"] = [chance.choice([1, 5, 32]), chance.choice([8, 16, 32])]
        if chance.random() < 0.2:
            data |= {"swizzle": "x (y z) -> (x y) z", "z": chance.sample(range(8), 8)}
        kept = [axis for axis in chance.sample("mk", 2) if block[axis] != "all"]
        divisors = {axis: [d for d in range(1, 17) if block[axis] % d == 0] for axis in kept}
        steps = {axis: chance.choice(divisors[axis]) for axis in kept}
        stored: dict[str, object] = {"layout": " ".join(f"{axis}/{steps[axis]}" for axis in kept) or "scalar"}
        if swizzled:
            stored["pad"] = [tile["a"] * tile["b"] if axis == free else tile["d"] for axis in kept]
        elif kept and chance.random() < 0.5:
            stored["pad"] = [chance.choice([1, 4, 7, 16]) for _ in kept]
        return {"block": block, "data": data, "scale": stored}

    rules = {"e8m0": "power-of-two", "f32": "amax-over-max", "f16": "scale-first"}
    text: dict[str, object] = {
        "layoutc": 1,
        "name": "at_random",
        "summary": "made by a test",
        "shape": {"m": 8, "k": 8},
        "element": {"format": element} | ({} if element == "e4m3" else {"pack": order_of_codes}),
        "scale": {"format": scale, "rule": rules[scale]} | ({"round": "up"} if scale == "e8m0" else {}),
        "orientations": {"rowwise": orientation("m"), "columnwise": orientation("k")},
    }
    if swizzled:
        order = " ".join(chance.sample(["r", "a", "b", "c", "d"], 5))
        text["gemm"] = {"scale": {"swizzle": f"(r a b) (c d) -> {order}", **tile}}
    return read_spec(json.dumps(text), "at_random.yaml")[0]


@pytest.mark.sample(6)
@pytest.mark.parametrize("path", OF_KINDS, ids=lambda path: path.stem)
def test_formulas_are_the_chains_of_every_small_shape(path: Path) -> None:
    """Enumerated: every value of every buffer, both ways, at every shape up to three multiples."""
    layout = plan_of(path).layout
    for m in range(layout.multiple_m, 3 * layout.multiple_m + 1, layout.multiple_m):
        for k in range(layout.multiple_k, 2 * layout.multiple_k + 1, layout.multiple_k):
            if k % max(plane.column_multiple for plane in layout.planes if plane.kind == "data"):
                continue
            for buffer in layout.buffers:
                chain, numbers = buffer.chain(m, k), laid_out(buffer, m, k).ravel()
                start = np.arange(1, np.prod(chain.start, dtype=int) + 1).reshape(chain.start)
                for code, expected in enumerate(numbers):
                    value = chain.value_at(*divmod(code * chain.bits, 8))
                    assert (0 if value is None else start[value]) == expected, (buffer.name, m, k, code)
