"""The text of `layoutc show --checkpoint`: a folder's facts as tables. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layoutc.report.tables import Table

if TYPE_CHECKING:
    from layoutc.checkpoint.common.entries import EntryFacts
    from layoutc.checkpoint.inspection import CheckpointFacts, TotalFacts


def tables(facts: CheckpointFacts) -> list[Table]:
    """The folder, its stored entries, layouts that no installed recipe has, and totals."""
    return [_head(facts), _entries(facts), *_strange(facts), _totals(facts)]


def _head(facts: CheckpointFacts) -> Table:
    rows = (
        ("form", facts.form),
        ("headers", "of every piece" if facts.thorough else "of one piece of each tensor"),
        ("on disk", f"{facts.bytes_on_disk:,} bytes in {facts.files} file{'s' if facts.files > 1 else ''}"),
        ("as bf16", f"{facts.bf16_bytes:,} bytes{_share(facts)}"),
    )
    return Table(facts.folder, (), rows)


def _share(facts: CheckpointFacts) -> str:
    what = "file" if facts.form == "gguf" else "folder"
    return f"; the {what} has {facts.bytes_on_disk / facts.bf16_bytes:.2%} of that" if facts.bf16_bytes else ""


def _entries(facts: CheckpointFacts) -> Table:
    rows = tuple(
        (
            entry.name,
            "x".join(map(str, entry.shape)) or "scalar" if entry.shape is not None else "",
            entry.kind,
            ", ".join(layout.layout_id for layout in entry.layouts),
            ", ".join(str(layout.language) for layout in entry.layouts),
            ", ".join("yes" if layout.installed else "no" for layout in entry.layouts),
            str(entry.pieces),
            f"{entry.stored_bytes:,}",
            _per_element(entry.bytes_per_element),
            ", ".join(entry.orientations),
        )
        for entry in facts.entries
    )
    heads = ("entry", "shape", "stored as", "layout id", "language", "installed", "pieces", "bytes", "B/element")
    return Table("Entries, as stored", (*heads, "orientations"), rows, frozenset({6, 7, 8}))


def _strange(facts: CheckpointFacts) -> list[Table]:
    """Layouts that no installed recipe has, and entries whose pieces are stored in different ways."""
    unknown = {one.layout_id: one for entry in facts.entries for one in entry.layouts if not one.installed}
    tables = []
    if unknown:
        rows = tuple((one.recipe, one.layout_id, one.difference or "") for one in unknown.values())
        tables.append(Table("Layouts that no installed recipe has", ("recipe", "layout id", "because"), rows))
    mixed = [entry for entry in facts.entries if len(entry.layouts) + (entry.plain > 0) > 1]
    if mixed:
        ways = tuple((entry.name, _ways(entry)) for entry in mixed)
        tables.append(Table("Tensors whose pieces are stored in several ways", ("entry", "pieces"), ways))
    return tables


def _ways(entry: EntryFacts) -> str:
    ways = [f"{one.pieces} in {one.recipe} {one.layout_id}" for one in entry.layouts]
    return ", ".join([*ways, *([f"{entry.plain} plain"] if entry.plain else [])])


def _totals(facts: CheckpointFacts) -> Table:
    rows = [_total(one) for one in facts.totals]
    stored = sum(one.stored_bytes for one in facts.totals)
    elements = sum(one.elements for one in facts.totals)
    numbers = (f"{number:,}" for number in (len(facts.entries), elements, stored))
    everything = ("all", *numbers, _per_element(stored / elements if elements else None), f"{facts.bf16_bytes:,}")
    heads = ("stored as", "entries", "elements", "bytes", "B/element", "as bf16")
    return Table("Totals", heads, (*rows, everything), frozenset({1, 2, 3, 4, 5}))


def _total(one: TotalFacts) -> tuple[str, ...]:
    numbers = (f"{one.entries:,}", f"{one.elements:,}", f"{one.stored_bytes:,}")
    return (one.kind, *numbers, _per_element(one.bytes_per_element), f"{one.bf16_bytes:,}")


def _per_element(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
