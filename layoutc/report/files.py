"""The text of `layoutc show --files`: the tensors that hold a recipe's planes in other checkpoint formats."""

from __future__ import annotations

import json

from layoutc.layout.bindings import Files
from layoutc.layout.layout import Layout
from layoutc.report.tables import Table
from layoutc.runtime.bindings.facts import Binding, RecordBinding
from layoutc.spec.notation import AS_STORED


def file_tables(layout: Layout) -> list[Table]:
    """For each binding, a table of its tensors and its other facts; one sentence for a recipe without bindings."""
    if not layout.files and not layout.containers:
        return [Table(f"{layout.name}: its spec states no other checkpoint formats", (), ())]
    return [
        *(table for files in layout.files for table in _tables(layout, files)),
        *(_container(layout, binding) for binding in layout.containers),
    ]


def _container(layout: Layout, binding: RecordBinding) -> Table:
    """The tensor type of a container that holds a weight as its records."""
    record = next(one for one in layout.records if one.name == binding.buffer)
    rows = (
        ("a weight is", f"one tensor of type {binding.type} ({binding.number}) in a {binding.container} file"),
        ("its bytes", f"{binding.buffer}, row by row: {binding.nbytes} bytes for {binding.elements} elements"),
        ("a record has", ", ".join(plane.name for plane in record.planes)),
        ("its name", f"that of the parameter, by the architecture that the {binding.container} file states"),
    )
    return Table(f"{layout.name}/{binding.name}: {binding.summary}", (), rows)


def _tables(layout: Layout, files: Files) -> list[Table]:
    binding = files.binding
    rows = [_row(layout, files, plane) for plane in binding.planes]
    for plane, codes in [(name, one.codes) for name, one in binding.planes.items() if one.codes is not None]:
        meaning = f"value of each, {files.codebooks[plane]}" if codes.values else "value of each"
        rows.append((f"codes of {plane}", codes.codebook, "F32", "256", meaning))
        rows.append(("", codes.scale, "F32", f"one for {codes.block} codes", f"then + {codes.offset} of the JSON"))
    if binding.shape:
        rows.append(("the weight's sizes", binding.shape[0], binding.shape[1], "2", ""))
    if binding.groups:
        name, dtype, columns = binding.groups
        rows.append(("the block of each column", name, dtype, f"k: column // {columns}", ""))
    if binding.zeros:
        rows.append(("zero points", *binding.zeros, "m x 1", "0 for each row"))
    if binding.codebook:
        name, dtype, values = binding.codebook
        rows.append(("the value of each code", name, dtype, f"{len(values)}", ""))
    if binding.text:
        name, text, free = binding.text
        rows.append(("JSON", name, "U8", json.dumps(text), f"any {', '.join(free)}" if free else ""))
    rest = [
        ("config.json has", _dotted(binding)),
        ("modules left plain under", binding.plain),
        ("exports", "don't write them" if binding.read_only else ""),
        ("left alone", ", ".join(binding.ignored)),
        ("one scale for", "; ".join(" + ".join(group) for group in binding.fused)),
        *((f"{whole} is", ", ".join(parts)) for whole, parts in binding.parts),
    ]
    first = next(name for name, source in layout.source_of if source == layout.sources[0].name)
    if others := [name for name, source in layout.source_of if source != layout.sources[0].name]:
        rest.append(("not in such files", f"{', '.join(others)}: quantized from what {first} stands for"))
    title, heads = f"{layout.name}/{binding.name}: {binding.summary}", ("plane", "tensor", "dtype", "order", "")
    return [Table(title, heads, tuple(rows)), Table("", (), tuple(row for row in rest if row[1]))]


def _row(layout: Layout, files: Files, name: str) -> tuple[str, ...]:
    plane, order = files.binding.planes[name], files.layouts[name]
    if order is None:
        said = "a single value"
    elif order == AS_STORED:
        said = "as the plane"
    else:
        sizes = ", ".join(f"{dim}={size}" for dim, size in order.sizes)
        in_bytes = plane.bits == 8 and next(one.bits for one in layout.planes if one.name == name) < 8
        said = f"{order.pattern}{f', {sizes}' if sizes else ''}{' bytes' if in_bytes else ''}"  # of packed codes
    form = f"{plane.over:g} / x" if plane.over else f"x / {plane.by:g}" if plane.by else ""
    if not plane.low_first:
        form = "high bits first"
    if plane.codes is not None:
        form = "codes, which round values" if plane.codes.values else "codes, read only"
    return name, plane.name, plane.dtype, said, form


def _dotted(binding: Binding) -> str:
    return ", ".join(f"{path}: {json.dumps(_at(binding.config, path.split('.')))}" for path in binding.recognized)


def _at(config: object, path: list[str]) -> object:
    """The value at the first match of a path; `*` matches any key."""
    if not path:
        return config
    assert isinstance(config, dict)
    keys = [key for key in config if path[0] in ("*", key)]
    return _at(config[keys[0]], path[1:])
