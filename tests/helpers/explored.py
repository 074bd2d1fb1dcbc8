"""Recipes as the explorer sees them: plans of specs, pages, and where values lie by plain numpy."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from places import EXCHANGED, SPECS, UNSHIPPED
from weight_recipes import CUT_APART, KINDS

from layoutc.build import operands, pipeline
from layoutc.conformance.model.placing import in_order
from layoutc.explorer import data, page
from layoutc.layout.layout import Buffer, Layout, Plane, is_swizzled
from layoutc.plan.plan import Plan

ALL = [*sorted(SPECS.glob("*.yaml")), *sorted(UNSHIPPED.glob("*.yaml")), *sorted(EXCHANGED.glob("*.yaml"))]
# The shipped ones of each kind, and those that are unshipped because they are of no other.
OF_KINDS = [path for path in ALL if path.parent != SPECS or path.stem in {*KINDS, *CUT_APART}]


@cache
def plan_of(path: Path) -> Plan:
    """The plan of a sound spec."""
    content = path.read_bytes()
    spec, findings = operands.read_spec(content, str(path))
    assert spec is not None, [str(item) for item in findings]
    others, _ = operands.layouts_of(spec, content, str(path))
    return pipeline.plan_for(spec, others)


@cache
def recipe_of(path: Path, stops: data.Stops) -> data.Recipe:
    """What a page has of a spec."""
    text = path.read_text(encoding="utf-8")
    files = pipeline.written(path.read_bytes(), str(path))
    shown = {name: files[name] for name in ("layout.py", "tensor.py", "kernels.py") if name in files}
    return data.export(plan_of(path), text, str(path), shown, stops)


@cache
def page_of(*paths: Path) -> tuple[data.Page, str]:
    """A page of specs, and its text."""
    stops = data.stops_of([plan_of(path) for path in paths], None, None)
    made = data.Page(1, stops, tuple(recipe_of(path, stops) for path in paths))
    return made, page.render(made)


def address(pages: Path, *names: str) -> str:
    """Of a page of these recipes, in a folder of pages."""
    path = pages / f"{'-'.join(names)}.html"
    if not path.exists():
        path.write_text(page_of(*(SPECS / f"{name}.yaml" for name in names))[1], encoding="utf-8")
    return path.as_uri()


def shapes_of(layout: Layout) -> list[tuple[int, int]]:
    """Small weights that a recipe takes: of parts of blocks and of several, so that padding shows."""
    m, k = layout.multiple_m, layout.multiple_k
    few = 1 if m > 1 else 7
    return [(m * few, k * (1 if k > 1 else 24)), (m * (3 if m > 1 else 50), k * (2 if k > 1 else 72))]


def numbered(plane: Plane, m: int, k: int) -> np.ndarray:
    """An array of a plane's values, each with a number of its own from 1 on: 0 is padding."""
    rows = -(-m // (plane.per_m or m))
    columns = -(-k // (plane.per_k or k))
    return np.arange(1, rows * columns + 1).reshape(rows, columns)


def laid_out(buffer: Buffer, m: int, k: int) -> np.ndarray:
    """The numbers of a buffer's values, in its shape, by plain indexing."""
    values = numbered(buffer.plane, m, k)
    if not buffer.dims:
        return values.ravel()
    rows, columns = np.arange(m) // (buffer.plane.per_m or m), np.arange(k) // (buffer.plane.per_k or k)
    steps = {dim.axis: dim.per for dim in buffer.dims}
    whole = values[rows[:: steps.get("m", m)]][:, columns[:: steps.get("k", k)]]
    whole = whole.T if [dim.axis for dim in buffer.dims] == ["k", "m"] else whole
    whole = whole.ravel() if len(buffer.dims) == 1 else whole
    pads = [(0, -size % dim.multiple) for size, dim in zip(whole.shape, buffer.dims, strict=True)]
    padded = np.pad(whole, pads)
    return padded if buffer.swizzle is None else in_order(buffer.swizzle, padded)


def as_read(layout: Layout, buffer: Buffer, m: int, k: int) -> np.ndarray:
    """The numbers of a swizzled buffer's values in the order that a GEMM reads, by reshape and transpose."""
    assert layout.swizzle is not None
    assert is_swizzled(layout, buffer)
    entries = laid_out(buffer, m, k)
    free = "m" if buffer.orientation == "rowwise" else "k"
    entries = entries if buffer.dims[0].axis == free else entries.T
    sizes = dict(layout.swizzle.sizes)
    for group, extent in zip(layout.swizzle.groups, entries.shape, strict=True):
        sizes[group[0]] = extent // int(np.prod([sizes[name] for name in group[1:]], dtype=int))
    names = [name for group in layout.swizzle.groups for name in group]
    parts = entries.reshape([sizes[name] for name in names])
    return parts.transpose([names.index(name) for name in layout.swizzle.order]).ravel()
