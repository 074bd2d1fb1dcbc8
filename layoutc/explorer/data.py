"""What the page knows about a recipe, as frozen values: formulas of its maps, and figures for each slider stop.

This module computes nothing: places are formulas of layout, figures are those of report.describe and ints.cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, lcm

from layoutc.explorer.decides import Line, generated_lines, spec_lines
from layoutc.ints.cuts import Cuts
from layoutc.layout.chain import Join, Pad, Permute, Reorder, Split
from layoutc.layout.formula import Formula, RepeatUpTo, of_plane
from layoutc.layout.layout import Layout, Plane, is_swizzled, swizzled_formula
from layoutc.layout.records import Record, count_of
from layoutc.plan.plan import Plan
from layoutc.report.describe import alignment, describe, passes, problems
from layoutc.spec.formats import Format

# Slider stops, if all recipes of a page accept them. The first shape and world cut an nvfp4 block at row 24.
ROWS = (16, 24, 32, 48, 64, 96, 100, 128, 144, 256, 512, 4096)
COLUMNS = (32, 48, 64, 100, 128, 256, 4096)
WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
FIRST_ROWS, FIRST_COLUMNS, FIRST_WORLD = 96, 64, 4
FEWEST = 4  # the fewest stops of a slider, even for recipes that accept none of the sizes above
MOST = 2**31  # rows times columns; browsers count this exactly, with room to spare

StepData = tuple[str | int | tuple[str | int | None, ...], ...]


@dataclass(frozen=True)
class FormulaData:
    """A formula as tuples: sizes are (axis, per), steps are (name, arguments...)."""

    start: tuple[tuple[str | None, int], ...]
    steps: tuple[StepData, ...]
    bits: int
    low_first: bool


@dataclass(frozen=True)
class PlaneData:
    """A stored plane, and where it holds an element's value."""

    name: str
    kind: str
    dtype: str
    format: str
    covers: tuple[int | None, int | None]
    sharded: bool
    formula: FormulaData


@dataclass(frozen=True)
class BufferData:
    """A buffer that a GEMM reads, as laid out, and if swizzled, also as read."""

    name: str
    kind: str
    orientation: str
    plane: str
    dtype: str
    format: str
    made_by: tuple[str, ...]
    formula: FormulaData
    swizzled: FormulaData | None


@dataclass(frozen=True)
class FieldData:
    """Bits of some values of a plane in a record: of `count` entries from `start`, `bits` bits of each from `low`.

    The first is at bit `at` of the record, each next one `step` bits further, from the first byte's lowest bit.
    """

    plane: str
    kind: str
    start: int
    count: int
    low: int
    bits: int
    at: int
    step: int


@dataclass(frozen=True)
class RecordData:
    """A buffer of records of `size` elements along an axis. entries: how many values a record has per plane."""

    name: str
    orientation: str
    axis: str
    size: int
    nbytes: int
    made_by: tuple[str, ...]
    entries: tuple[tuple[str, int], ...]
    fields: tuple[FieldData, ...]


@dataclass(frozen=True)
class CodesData:
    """The values of an element format's codes, in order; None: infinite, NaN, or no value."""

    name: str
    bits: int
    is_codebook: bool
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class PassData:
    """Planes that a pass gathers, and their bytes per element of a large weight."""

    name: str
    planes: tuple[str, ...]
    bytes_per_element: float


@dataclass(frozen=True)
class CutData:
    """Where `world` ranks cut m rows. ranks: first row, last row (exclusive), rows of halo before and after.

    inside: how many cuts fall inside a block; parts: how many ranks hold part of a split block; free_rows, free_worlds:
    the nearest sizes without one.
    """

    ranks: tuple[tuple[int, int, int, int], ...]
    inside: int
    parts: int
    free_rows: tuple[int, ...]
    free_worlds: tuple[int, ...]
    shards_have_buffers: bool


@dataclass(frozen=True)
class Stop:
    """Figures of one shape, in bytes: each plane, each buffer, and the buffers' padding.

    worlds: for each number of ranks, three figures per pass (bytes that a rank sends, how many of them are filling, and
    how many several ranks send), and last the bytes that a rank exchanges in an optimizer step.
    """

    planes: tuple[int, ...]
    buffers: tuple[int, ...]
    padding: tuple[int, ...]
    worlds: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Recipe:
    """Everything about a recipe. `cuts` is indexed by rows and world, `stops` by rows and columns."""

    name: str
    summary: str
    layout_id: str
    blocks: tuple[tuple[str, int | None, int | None], ...]
    block_rows: int
    free_cuts: tuple[int, str]
    exchanged: str
    swizzle: str | None
    planes: tuple[PlaneData, ...]
    buffers: tuple[BufferData, ...]
    records: tuple[RecordData, ...]
    codes: tuple[CodesData, ...]
    passes: tuple[PassData, ...]
    origins: tuple[tuple[str, str], ...]
    cuts: tuple[tuple[CutData, ...], ...]
    stops: tuple[tuple[Stop, ...], ...]
    spec: tuple[Line, ...]
    generated: tuple[tuple[str, tuple[Line, ...]], ...]


@dataclass(frozen=True)
class Stops:
    """The sliders' stops and initial positions."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    worlds: tuple[int, ...]
    first: tuple[int, int, int]


@dataclass(frozen=True)
class Page:
    """All that a page shows."""

    version: int
    stops: Stops
    recipes: tuple[Recipe, ...]


def stops_of(plans: Sequence[Plan], shape: tuple[int, int] | None, world: int | None) -> Stops:
    """Sizes that all recipes accept, and the initial shape and world.

    Raises ValueError for a shape that a recipe doesn't accept, with the nearest sizes, and for more than 2^31 elements.
    """
    if shape is not None:
        for plan in plans:
            if found := problems(plan, *shape, path=plan.layout.name):
                raise ValueError("; ".join(f"{item.message}: {item.help}" for item in found))
        if shape[0] * shape[1] > MOST:
            raise ValueError(f"a page shows weights of at most {MOST:,} elements; give a smaller --shape")
    rows = _taken(ROWS, lcm(*(plan.layout.multiple_m for plan in plans)), shape and shape[0])
    columns = _taken(COLUMNS, lcm(*(plan.layout.multiple_k for plan in plans)), shape and shape[1])
    worlds = tuple(sorted({*WORLDS, *((world,) if world else ())}))
    first_m, first_k = shape or (_nearest(rows, FIRST_ROWS), _nearest(columns, FIRST_COLUMNS))
    return Stops(rows, columns, worlds, (first_m, first_k, world or FIRST_WORLD))


def _taken(sizes: tuple[int, ...], multiple: int, own: int | None) -> tuple[int, ...]:
    taken = {size for size in sizes if size % multiple == 0}
    if len(taken) < FEWEST:
        taken |= {multiple * count for count in range(1, FEWEST + 1)}
    return tuple(sorted(taken | ({own} if own else set())))


def _nearest(sizes: tuple[int, ...], wanted: int) -> int:
    return min(sizes, key=lambda size: (abs(size - wanted), size))


def export(plan: Plan, text: str, path: str, generated: Mapping[str, str], stops: Stops) -> Recipe:
    """Exports what the page shows of a recipe. text, path: its spec; generated: file names and their text."""
    layout = plan.layout
    whole = describe(plan, *stops.first)
    blocks = {name: layout.source(name).quantization.block for name in layout.orientations}
    return Recipe(
        name=layout.name,
        summary=layout.summary,
        layout_id=plan.layout_id,
        blocks=tuple((name, block.m, block.k) for name, block in blocks.items()),
        block_rows=plan.block_rows,
        free_cuts=(plan.shard_rows, plan.shard_reason),
        exchanged="extremes" if plan.extremes else "values",
        swizzle=whole.swizzle,
        planes=tuple(_plane(layout, plane) for plane in layout.planes),
        buffers=tuple(_buffers(layout)),
        records=tuple(map(_record, layout.records)),
        codes=tuple(_codes(fmt) for fmt in dict.fromkeys(source.quantization.element for source in layout.sources)),
        passes=tuple(
            PassData(one.name, tuple(plane.name for plane in one.planes), float(one.bytes_per_element))
            for one in (plan.forward, plan.backward, plan.both)
        ),
        origins=tuple((origin.orientation, origin.reason) for origin in whole.derivations),
        cuts=tuple(tuple(_cuts(plan, m, stops.columns[0], world) for world in stops.worlds) for m in stops.rows),
        stops=tuple(tuple(_stop(plan, m, k, stops.worlds) for k in stops.columns) for m in stops.rows),
        spec=spec_lines(layout, text, path),
        generated=tuple((name, generated_lines(layout, content)) for name, content in generated.items()),
    )


def formula_data(formula: Formula) -> FormulaData:
    """A formula as the page reads it."""
    steps: list[StepData] = []
    for step in formula.steps:
        match step:
            case Permute(order):
                steps.append(("permute", order))
            case RepeatUpTo(dim, times, limit):
                steps.append(("repeat", dim, times, (limit.axis, limit.per)))
            case Pad(multiples):
                steps.append(("pad", multiples))
            case Split(dim, sizes, rest):
                steps.append(("split", dim, sizes, rest) if rest else ("split", dim, sizes))
            case Reorder(dim, order):
                steps.append(("reorder", dim, order))
            case Join(counts):
                steps.append(("join", counts))
    start = tuple((size.axis, size.per) for size in formula.start)
    return FormulaData(start, tuple(steps), formula.bits, formula.low_first)


def plane_formula(layout: Layout, plane: Plane) -> Formula:
    """Where a plane holds an element's value."""
    low_first = next((s.quantization.low_first for s in layout.sources if plane in s.planes), True)
    return of_plane(plane.per_m, plane.per_k, plane.bits, low_first)


def _format(layout: Layout, plane: Plane) -> str:
    for source in layout.sources:
        if plane in source.planes and (fmt := source.format_of(plane)) is not None:
            return fmt.name
    return plane.dtype


def _plane(layout: Layout, plane: Plane) -> PlaneData:
    sharded, covers = plane.per_m is not None, (plane.per_m, plane.per_k)
    formula = formula_data(plane_formula(layout, plane))
    return PlaneData(plane.name, plane.kind, plane.dtype, _format(layout, plane), covers, sharded, formula)


def _buffers(layout: Layout) -> Sequence[BufferData]:
    return [
        BufferData(
            name=buffer.name,
            kind=buffer.kind,
            orientation=buffer.orientation,
            plane=buffer.plane.name,
            dtype=buffer.dtype,
            format=_format(layout, buffer.plane),
            made_by=buffer.made_by,
            formula=formula_data(buffer.formula),
            swizzled=formula_data(swizzled_formula(layout, buffer)) if is_swizzled(layout, buffer) else None,
        )
        for buffer in layout.buffers
    ]


def _record(record: Record) -> RecordData:
    fields = []
    for run in record.runs:
        one = run.slice
        entries = (one.start, one.stop - one.start, one.low, one.bits)
        fields.append(FieldData(one.plane.name, one.plane.kind, *entries, run.at, run.step))
    counts = tuple((plane.name, count_of(plane, record.axis, record.size)) for plane in record.planes)
    facts = (record.name, record.orientation, record.axis, record.size, record.nbytes, record.made_by)
    return RecordData(*facts, counts, tuple(fields))


def _codes(fmt: Format) -> CodesData:
    count = len(fmt.values) or 1 << fmt.bits
    values = [fmt.value(code) for code in range(count)]
    return CodesData(fmt.name, fmt.bits, bool(fmt.values), tuple(one if isfinite(one) else None for one in values))


def _cuts(plan: Plan, m: int, k: int, world: int) -> CutData:
    cuts, at = Cuts.of(m, world), alignment(plan, m, k, world)
    halos = [cuts.halo(rank, plan.block_rows) for rank in range(world)]
    return CutData(
        ranks=tuple((*cuts.bounds(rank), halo.before, halo.after) for rank, halo in enumerate(halos)),
        inside=at.cut_blocks.cuts if at.cut_blocks else 0,
        parts=at.cut_blocks.ranks if at.cut_blocks else 0,
        free_rows=at.free_rows,
        free_worlds=at.free_worlds,
        shards_have_buffers=at.shards_have_buffers,
    )


def _stop(plan: Plan, m: int, k: int, worlds: Sequence[int]) -> Stop:
    figures = []
    for world in worlds:
        gathers = passes(plan, m, k, world)
        cut = alignment(plan, m, k, world).cut_blocks
        of_passes = [figure for one in gathers for figure in (one.bytes_per_rank, one.filling, one.doubled)]
        figures.append((*of_passes, cut.exchange_bytes_per_rank if cut else 0))
    facts = describe(plan, m, k, worlds[0])
    laid_out = [buffer for buffer in facts.buffers if buffer.orientation and buffer.kind != "record"]
    return Stop(
        planes=tuple(plane.nbytes for plane in facts.planes),
        buffers=tuple(buffer.nbytes for buffer in laid_out),
        padding=tuple(buffer.padding_bytes for buffer in laid_out),
        worlds=tuple(figures),
    )
