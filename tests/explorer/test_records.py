"""Records and the values of codes: as exported, against bytes that are written and definitions; and on the page.

Where ggml has a value of Q8_0 and Q4_K is written down here by hand, from its definition of these blocks.
"""

from __future__ import annotations

import importlib
import math
import random
import re
from pathlib import Path
from typing import Any

import browser as browsers
import numpy as np
import pytest
import torch
import unshipped
from browser import Browser
from explored import ALL, OF_KINDS, address, page_of, plan_of, recipe_of
from places import EXCHANGED, SPECS

from layoutc.conformance.model.codes import codes_of
from layoutc.explorer import data

in_browser = pytest.mark.skipif(bool(browsers.missing()), reason=browsers.missing() or "there is a browser")
WITH_RECORDS = [path for path in ALL if re.search(r"\brecord", path.read_text(encoding="utf-8"))]
# Element formats that no recipe of those kinds has.
MORE = {"adam_m4", "adam_m8", "adam_v4", "adam_v8", "e3m4_block", "fp4_bitsandbytes", "fp8_e5m2_current", "mxint8"}
MORE |= {"int2_affine64", "int3_affine64"}
OF_EACH_FORMAT = [path for path in ALL if path in OF_KINDS or path.stem in MORE]


def exported(path: Path) -> data.Recipe:
    return recipe_of(path, data.stops_of([plan_of(path)], None, None))


def values_of(plane: torch.Tensor, bits: int, low_first: bool) -> np.ndarray:
    """The unsigned numbers of a plane's bits, one for each value."""
    raw = plane.contiguous().view(torch.uint8).numpy()
    if bits >= 8:
        return raw.view({8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])
    spread = np.unpackbits(raw, axis=1, bitorder="little" if low_first else "big").reshape(raw.shape[0], -1, bits)
    weights = 1 << np.arange(bits) if low_first else 1 << np.arange(bits)[::-1]
    return (spread * weights).sum(-1)


@pytest.mark.parametrize("path", WITH_RECORDS, ids=lambda path: path.stem)
def test_fields_are_where_bytes_are_written(path: Path) -> None:
    """Every value of every record is read back from the bits that are exported, and no bit is left over."""
    if path.parent == EXCHANGED:
        unshipped.add(path.stem, path.read_text(encoding="utf-8"))
    layout, recipe = plan_of(path).layout, importlib.import_module(f"layoutc.recipes.{path.stem}")
    m, k = layout.multiple_m * 2, layout.multiple_k * 2
    weight = recipe.quantize(torch.randn(m, k, generator=torch.Generator().manual_seed(0)))
    buffers, planes = weight.buffers(), weight.planes()
    records = exported(path).records
    assert [record.name for record in records] == [record.name for record in layout.records]
    for record in records:
        lines = buffers[record.name].numpy()
        count = lines.shape[1] // record.nbytes
        bits = np.unpackbits(lines.reshape(lines.shape[0], count, record.nbytes), axis=2, bitorder="little")
        used = np.zeros(record.nbytes * 8, dtype=int)
        for name, entries in record.entries:
            found = np.zeros((lines.shape[0], count, entries), dtype=np.int64)
            for field in (one for one in record.fields if one.plane == name):
                for i in range(field.count):
                    at = field.at + i * field.step
                    used[at : at + field.bits] += 1
                    part = (bits[:, :, at : at + field.bits] << np.arange(field.bits)).sum(-1)
                    found[:, :, field.start + i] += part.astype(np.int64) << field.low
            plane = next(one for one in layout.planes if one.name == name)
            held = values_of(planes[name], plane.bits, layout.sources[0].quantization.low_first)
            held = held if record.axis == "k" else held.T
            assert np.array_equal(found.reshape(lines.shape[0], -1), held), name
        assert used.tolist() == [1] * record.nbytes * 8


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", OF_EACH_FORMAT, ids=lambda path: path.stem)
def test_values_of_codes_are_those_of_the_definition(path: Path) -> None:
    layout = plan_of(path).layout
    formats = {source.quantization.element.name: source.quantization.element for source in layout.sources}
    recipe = exported(path)
    assert [one.name for one in recipe.codes] == list(formats)
    for one in recipe.codes:
        expected = np.array([float(value) for value in codes_of(formats[one.name]).values[: len(one.values)]])
        found = np.array([math.nan if value is None else value for value in one.values])
        assert np.array_equal(found, np.where(np.isfinite(expected), expected, math.nan), equal_nan=True)


# ------------------------------------------------------------------------------------------------------ on the page
def q8_0(k: int, row: int, column: int) -> list[str]:
    """block_q8_0: a half, then 32 bytes."""
    first = (row * (k // 32) + column // 32) * 34
    return [f"byte {first + 2 + column % 32:,}", f"bytes {first:,} to {first + 1:,}"]


def q4_k(k: int, row: int, column: int) -> list[str]:
    """block_q4_K: two halves, 12 bytes of scales and minima (get_scale_min_k4), 128 bytes of codes."""
    first, at = (row * (k // 256) + column // 256) * 144, column % 256
    low = at % 64 < 32
    data = f"byte {first + 16 + at // 64 * 32 + at % 32:,}, bits {'0 to 3' if low else '4 to 7'}"
    j, scales = at // 32, first + 4
    if j < 4:
        scale, minimum = (f"byte {scales + j + more:,}, bits 0 to 5" for more in (0, 4))
    else:
        scale, minimum = (
            f"its bits 0 to 3: byte {scales + j + 4:,}, bits {nibble}; "
            f"its bits 4 to 5: byte {scales + high:,}, bits 6 to 7"
            for nibble, high in (("0 to 3", j - 4), ("4 to 7", j))
        )
    return [data, scale, f"bytes {first:,} to {first + 1:,}", minimum, f"bytes {first + 2:,} to {first + 3:,}"]


def q6_k(k: int, row: int, column: int) -> list[str]:
    """block_q6_K: 128 bytes of low bits, 64 of high ones, 16 scales, a half (dequantize_row_q6_K)."""
    first, at = (row * (k // 256) + column // 256) * 210, column % 256
    half, within = divmod(at, 128)
    low = first + half * 64 + within % 64
    high, place = first + 128 + half * 32 + within % 32, within // 32 * 2
    nibble = "0 to 3" if within < 64 else "4 to 7"
    data = f"its bits 0 to 3: byte {low:,}, bits {nibble}; its bits 4 to 5: byte {high:,}, bits {place} to {place + 1}"
    return [data, f"byte {first + 192 + at // 16:,}", f"bytes {first + 208:,} to {first + 209:,}"]


ROWS = """
const rows = [...document.querySelectorAll(`#recipe-${arguments[0]} section table tbody tr`)];
const head = rows.findIndex((row) => row.classList.contains("record"));
const own = rows.slice(head).filter((row) => row.querySelector("th").textContent.startsWith("rowwise_record"));
return own.map((row) => row.querySelector(".place").textContent);
"""


@in_browser
@pytest.mark.parametrize("name", ["q8_0", "q4_k", "q6_k"])
def test_the_page_says_where_ggml_has_an_element(window: Browser, pages: Path, name: str) -> None:
    window.view(1280, 900)
    window.open(address(pages, name))
    window.messages()
    stops = page_of(SPECS / f"{name}.yaml")[0].stops
    chance, places = random.Random(name), {"q8_0": q8_0, "q4_k": q4_k, "q6_k": q6_k}[name]
    size = {"q8_0": (34, 32), "q4_k": (144, 256), "q6_k": (210, 256)}[name]
    for _ in range(30):
        m, k = chance.choice(stops.rows), chance.choice(stops.columns)
        row, column = chance.randrange(m), chance.randrange(k)
        window.js(
            "change({m: arguments[0], k: arguments[1], row: arguments[2], column: arguments[3]})", m, k, row, column
        )
        first = (row * (k // size[1]) + column // size[1]) * size[0]
        whole = f"record at bytes {first:,} to {first + size[0] - 1:,}"
        assert window.js(ROWS, name) == [whole, *places(k, row, column)], (m, k, row, column)
    marked = "return document.querySelectorAll('.field').length && document.querySelectorAll('.memory .mine').length"
    assert window.js(marked) >= 3
    chosen = window.js(
        "const cell = document.querySelector('.field.data[data-entry=\"7\"]');"
        "cell.dispatchEvent(new MouseEvent('click')); return [state.row, state.column]"
    )
    assert chosen == [row, column // size[1] * size[1] + 7]
    assert window.messages() == []


@in_browser
def test_a_slider_goes_through_the_values_of_a_codebook(window: Browser, pages: Path) -> None:
    """Those that bitsandbytes and the paper (arXiv 2305.14314, appendix E) give, and their codes."""
    window.view(390, 844)
    window.open(address(pages, "nf4"))
    said: dict[str, Any] = window.js(
        "const input = document.querySelector('.codes input'); const found = {};"
        "for (const code of [0, 7, 8, 15]) { input.value = code; input.dispatchEvent(new Event('input'));"
        "found[code] = document.querySelector('.codes output').textContent; } return found"
    )
    assert said["0"] == "0000 is -1"
    assert said["7"] == "0111 is 0"
    assert said["8"].startswith("1000 is 0.0795802")
    assert said["15"] == "1111 is 1"
    assert "a codebook" in window.js("return document.querySelector('.codes .note').textContent")
    assert window.messages() == []
