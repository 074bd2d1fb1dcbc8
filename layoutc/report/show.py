"""The text of `layoutc show` and `list`: descriptions as tables, bytes as a small picture. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import prod

from layoutc.layout.chain import Index
from layoutc.layout.layout import Buffer, Layout, is_swizzled
from layoutc.plan.plan import Plan
from layoutc.report.describe import CutBlocks, Description, describe, usual_shape
from layoutc.report.maps import find_buffer, swizzled_map, values_in
from layoutc.report.tables import Table

LINES = 16  # the most lines of a buffer's picture
TILE_LINES = 32  # the most lines of a swizzled tile's picture
BYTES_A_LINE = (16, 8, 4, 2, 1)


def tables(facts: Description) -> list[Table]:
    """The whole description, with the most important facts first."""
    head = [_head(facts), _stored(facts), _read(facts), _uncrossed(facts), _sharded(facts)]
    return [*head, _gathered(facts), *_derived(facts), _views(facts)]


def _head(facts: Description) -> Table:
    rows = [("weight", f"{facts.m} x {facts.k} (rows x columns)"), ("layout id", facts.layout_id)]
    multiples = " and ".join(
        f"{what} in multiples of {multiple}"
        for what, multiple in zip(("rows", "columns"), facts.accepts, strict=True)
        if multiple > 1
    )
    rows.append(("takes", multiples or "any number of rows and columns"))
    reason = f"none, so the reference serves every device: {facts.no_kernels}"
    lacking = dict(facts.lacking)
    has = ", ".join(what for what in ("quantize", "dequantize", "lay out") if what not in lacking)
    rows.append(("kernels", reason if facts.no_kernels else has))
    for what, why in () if facts.no_kernels else lacking.items():
        rows.append(("no kernel", f"to {what}, so the reference does on every device: {why}"))
    rows += [("for", facts.not_weights.removeprefix("for "))] if facts.not_weights else []
    rows += [(f"{name} values", done) for name, done in facts.values]
    return Table(f"{facts.name}: {facts.summary}", (), tuple(rows))


def _stored(facts: Description) -> Table:
    rows = tuple(
        (
            plane.name,
            plane.dtype,
            shape_text(plane.shape),
            f"{plane.nbytes:,}",
            _per_element(plane.nbytes / (facts.m * facts.k)),
            _covers(plane.covers),
            "yes" if plane.sharded else "no, alike on all ranks",
        )
        for plane in facts.planes
    )
    heads = ("plane", "dtype", "shape", "bytes", "B/element", "a value covers", "sharded")
    return Table("Stored: each value once, rows first, no padding", heads, rows, frozenset({3, 4}))


def _read(facts: Description) -> Table:
    rows = tuple(
        (
            buffer.name,
            buffer.dtype,
            shape_text(buffer.shape),
            f"{buffer.nbytes:,}",
            f"{buffer.padding_bytes:,}",
            "tiles" if buffer.swizzle else "none" if buffer.carries_m is None else f"dim {buffer.carries_m}",
            buffer.plane if buffer.made_by else f"{buffer.plane}, as stored",
        )
        for buffer in facts.buffers
    )
    heads = ("buffer", "dtype", "shape", "bytes", "padding", "rows in", "from")
    title = "Read by a GEMM" + (f"; its scales swizzled {facts.swizzle}" if facts.swizzle else "")
    return Table(title, heads, rows, frozenset({3, 4}))


def _uncrossed(facts: Description) -> Table:
    at = facts.alignment
    rows = (("rows", f"{_multiples(at.rows)}: {at.reason}"), ("columns", _multiples(at.columns)))
    return Table("Cuts that cross no block and no byte, so cost nothing", (), rows)


def _sharded(facts: Description) -> Table:
    at = facts.alignment
    without = at.world - at.ranks_with_rows
    empty = f", {_count(without, 'rank')} without rows" if without else ""
    last = facts.m - (at.ranks_with_rows - 1) * at.rows_per_rank
    short = f", the last {last}" if last != at.rows_per_rank else ""
    rows = [("rows", f"{at.rows_per_rank} a rank{short}{empty}")]
    rows += [("cuts", "none inside a block")] if at.cut_blocks is None else _cut_blocks(facts, at.cut_blocks)
    if not at.shards_have_buffers:
        rows.append(("buffers", "none of a shard by itself; the gathered weight has them"))
    if at.free_rows:
        worlds = f"{_either(at.free_worlds)} rank{'' if at.free_worlds == (1,) else 's'}"
        rows.append(
            ("costs nothing", f"{_either(at.free_rows)} rows over {at.world} ranks, or {facts.m} rows over {worlds}")
        )
    return Table(f"Sharded over {_count(at.world, 'rank')}", (), tuple(rows))


def _cut_blocks(facts: Description, at: CutBlocks) -> list[tuple[str, str]]:
    """The cost of cuts inside blocks, per pass and per optimizer step."""
    cuts = facts.alignment.ranks_with_rows - 1
    passes: dict[int, list[str]] = {}
    for one in facts.passes:
        passes.setdefault(one.doubled, []).append(one.name)
    every = len(passes) == 1
    more = ", ".join(
        f"{nbytes:,} bytes a rank more in {'each pass' if every else ' and '.join(names)}"
        for nbytes, names in passes.items()
        if nbytes
    )
    exchange = f"{at.exchange_bytes_per_rank:,} bytes a rank in an all-gather that all weights share"
    what = {"extremes": "the least and greatest value", "values": "all values"}[at.exchanged]
    return [
        ("cuts", f"{at.cuts} of {cuts} inside a block of {at.rows} rows; {_count(at.ranks, 'rank')} with part of one"),
        ("scales", f"each rank sends those of all blocks that it has rows of: {more}"),
        ("optimizer step", f"{exchange}: {what} of each column of a rank's first and last block"),
    ]


def _either(numbers: tuple[int, ...]) -> str:
    return " or ".join(map(str, numbers))


def _multiples(number: int) -> str:
    return f"at multiples of {number}" if number > 1 else "anywhere"


def _gathered(facts: Description) -> Table:
    rows = tuple(
        (
            one.name,
            " + ".join(one.planes),
            f"{one.bytes_per_rank:,}",
            _per_element(float(one.bytes_per_element)),
            f"{float(one.ratio_to_bf16):.2%}",
            ", ".join(one.serves),
        )
        for one in facts.passes
    )
    heads = ("pass", "planes", "bytes a rank", "B/element", "of bf16", "serves")
    filled = [f"{one.filling:,} in {one.name}" for one in facts.passes if one.filling]
    title = "Gathered" + (f"; of a rank's bytes, filling up to the larger pass: {', '.join(filled)}" if filled else "")
    return Table(title, heads, rows, frozenset({2, 3, 4}))


def _derived(facts: Description) -> Iterator[Table]:
    passes: dict[str, list[str]] = {}
    for one in facts.passes:
        for text in one.derived:
            passes.setdefault(text, []).append(one.name)
    rows = tuple((*text.split(": ", 1), ", ".join(names)) for text, names in passes.items())
    if rows:
        yield Table("Made locally after a gather", ("buffer", "how", "in passes"), rows)
    origins = tuple((one.orientation, one.source, one.reason) for one in facts.derivations)
    yield Table("Where each orientation's values come from", ("orientation", "source", "because"), origins)


def _views(facts: Description) -> Table:
    rows = tuple((view.operators, view.condition) for view in facts.views)
    return Table("Exact on stored bytes", ("operators", "when"), rows)


def shape_text(shape: tuple[int, ...]) -> str:
    """`4096x2048`; a single dim has a comma, as in Python."""
    return "x".join(map(str, shape)) if len(shape) > 1 else f"({shape[0]},)"


def _covers(covers: tuple[int | None, int | None]) -> str:
    if covers == (None, None):
        return "the whole weight"
    return "x".join("all" if size is None else str(size) for size in covers)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _per_element(value: float) -> str:
    return f"{value:.4f}"


# ----------------------------------------------------------------------------------------------- recipes side by side
@dataclass(frozen=True)
class Overview:
    """A summary of a recipe.

    stored, gathered: bits per element of a large weight, on a rank and in forward's gather. use: "train"; "train,
    freeze" if backward has no separate codes and dequantizes forward's; "operand" for activations and gradients;
    "state" for optimizers; "wire" for gradients that ranks send. files: bindings, as RECIPE/NAME. products: the lowest
    compute capability that multiplies in low precision, by product; none: weights are dequantized.
    """

    name: str
    summary: str
    stored: float
    gathered: float
    use: str
    files: tuple[str, ...]
    products: Mapping[str, str]


def overview(plan: Plan) -> Overview:
    """Summarizes a recipe. Pure."""
    layout = plan.layout
    m, k = usual_shape(plan, 1)
    facts = describe(plan, m, k, 1)
    stored = 8 * sum(plane.nbytes for plane in facts.planes) / (m * k)
    gathered = 8 * float(facts.passes[0].large_weight)
    of_weights = "train" if len(layout.orientations) > 1 else "train, freeze"
    use = layout.use if layout.use != "weight" else "operand" if plan.not_weights else of_weights
    bindings = [one.binding.name for one in layout.files] + [one.name for one in layout.containers]
    names = tuple(f"{layout.name}/{name}" for name in bindings)
    found = plan.products.products if plan.products else ()
    products: dict[str, str] = {one.name: f"{one.cards.least[0]}.{one.cards.least[1]}" for one in found if one.cards}
    return Overview(layout.name, layout.summary, round(stored, 2), round(gathered, 2), use, names, products)


def overview_table(rows: list[Overview]) -> Table:
    """The recipes as a table."""
    heads = ("recipe", "stored", "gathered", "for", "low-precision products", "files", "summary")
    title = "Bits of an element on a rank and in a gather, and what each recipe is for"
    return Table(title, heads, tuple(map(_cells, rows)), numbers=frozenset({1, 2}))


def _cells(row: Overview) -> tuple[str, ...]:
    cards = sorted(set(row.products.values()))
    which = "all" if len(row.products) == 3 else ", ".join(row.products)
    products = f"{which}: from {', '.join(cards)}" if cards else ""
    files = ", ".join(name.partition("/")[2] for name in row.files)
    return row.name, f"{row.stored:.2f}", f"{row.gathered:.2f}", row.use, products, files, row.summary


# ------------------------------------------------------------------------------------------------------------ pictures
def pictures(layout: Layout, name: str, m: int, k: int, width: int) -> list[str]:
    """Pictures of a buffer's first rows, and of one tile as a GEMM reads it, at most `width` wide if possible."""
    buffer = find_buffer(layout, name)
    drawn = [_rows(buffer, m, k, width)]
    if is_swizzled(layout, buffer):
        drawn.append(_tile(layout, buffer, m, k, width))
    return drawn


def _rows(buffer: Buffer, m: int, k: int, width: int) -> str:
    """One line per row of the buffer's first rows; a cell is a byte, or a value of one or more bytes."""
    chain, unit = buffer.chain(m, k), max(1, buffer.bits // 8)
    *lead, values = chain.shapes[-1]
    rows, last = prod(lead), values * buffer.bits // 8 // unit
    shown = min(rows, LINES)
    grid: list[list[str]] = []
    size = 0
    for column in range(last):  # column by column, until the line is full
        cells = ["|".join(map(_cell, values_in(buffer, chain, (row * last + column) * unit))) for row in range(shown)]
        wider = max(size, *map(len, cells))
        if column and len(str(shown - 1)) + (wider + 1) * (column + 1) > width:
            break
        size = wider
        grid.append(cells)
    unit_name = "byte" if buffer.bits < 8 else "value"
    title = f"{buffer.name} of {m} x {k}: {_first(shown, rows, 'row')}, {_first(len(grid), last, unit_name)}"
    return _drawn(buffer, title, {row: [cells[row] for cells in grid] for row in range(shown)}, size)


def _tile(layout: Layout, buffer: Buffer, m: int, k: int, width: int) -> str:
    """The first tile of a swizzled buffer; a line is a run of adjacent values in memory."""
    assert layout.swizzle is not None
    tile = layout.swizzle.tile(0) * layout.swizzle.tile(1)
    cells = [_cell(value) for value in islice(swizzled_map(layout, buffer, m, k), min(tile, 16 * TILE_LINES))]
    size, offsets = max(map(len, cells)), len(str(len(cells)))
    a_line = next((n for n in BYTES_A_LINE if offsets + n * (size + 1) <= width), 1)
    cells = cells[: a_line * TILE_LINES]
    title = f"{buffer.name} as a GEMM wants it: {_first(len(cells), tile, 'value')} of a tile, {a_line} a line"
    lines = {start: cells[start : start + a_line] for start in range(0, len(cells), a_line)}
    return _drawn(buffer, title, lines, size, offsets)


def _drawn(buffer: Buffer, title: str, lines: Mapping[int, list[str]], size: int, offsets: int = 0) -> str:
    """Numbered lines of cells. offsets: the width of the numbers, if not that of the largest."""
    offsets = offsets or len(str(max(lines)))
    rows = (" ".join((str(at).rjust(offsets), *(cell.ljust(size) for cell in cells))) for at, cells in lines.items())
    legend = f"A cell names the row,column of {_subject(buffer)} stored there; a dot is padding."
    return "\n".join([f"{title}.", legend, *map(str.rstrip, rows)]) + "\n"


def _subject(buffer: Buffer) -> str:
    covers = (buffer.plane.per_m, buffer.plane.per_k)
    if covers == (1, 1):
        return "the weight's element"
    return f"the {_covers(covers)} block" if covers != (None, None) else "the one value"


def _cell(value: Index | None) -> str:
    return "." if value is None else f"{value[0]},{value[1]}"


def _first(shown: int, count: int, noun: str) -> str:
    """`all 4 rows`, `first 16 of 4096 rows`."""
    if shown == count:
        return f"all {_count(count, noun)}" if count > 1 else f"its one {noun}"
    return f"first {shown} of {_count(count, noun)}"
