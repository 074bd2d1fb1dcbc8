"""Which parts of a layout each line of a spec decides, and which lines of generated code follow from them.

A part is a plane, a buffer, a block, the swizzle, accepted shapes, cuts, products or other checkpoint formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from layoutc.layout.layout import Buffer, Layout, Source
from layoutc.layout.records import Record
from layoutc.spec import source as yaml_source

SHAPE, CUTS, SWIZZLE, PRODUCTS, FILES = "shape", "cuts", "swizzle", "products", "files"
_SUPER = ("super", "offset", "super_zero")
_SCALES = ("scale", "zero", *_SUPER)
# Names in generated code, in addition to those of planes and buffers.
_WORDS = {
    "multiple_m": SHAPE,
    "multiple_k": SHAPE,
    "shard_rows": CUTS,
    "shard_reason": CUTS,
    "swizzled": SWIZZLE,
    "swizzle": SWIZZLE,
    "products": PRODUCTS,
    "operands": PRODUCTS,
}
_FIELD = re.compile(r"#\s*((?:orientations|element|scale|tensor|shape|gemm)(?:\.\w+)+)")


@dataclass(frozen=True)
class Line:
    """A line of text, and the parts that it decides or follows from."""

    text: str
    parts: tuple[str, ...]


def spec_lines(layout: Layout, text: str, path: str) -> tuple[Line, ...]:
    """The lines of a sound spec."""
    source, _ = yaml_source.read(text, path)
    lines = text.rstrip().split("\n")
    parts: list[dict[str, None]] = [{} for _ in lines]
    # List items have no key.
    for key, span in {**source.values, **source.keys}.items() if source else ():
        assert source is not None
        last = source.values[key].end_line if key in source.values else span.line
        for number in range(span.line, min(last, len(lines)) + 1):
            parts[number - 1] |= dict.fromkeys(decided(layout, key, source.data))
    return tuple(Line(line, tuple(found)) for line, found in zip(lines, parts, strict=True))


def decided(layout: Layout, path: tuple[str | int, ...], data: dict[str, object]) -> tuple[str, ...]:
    """The parts that the value at a path of a spec decides."""
    match path:
        case ("shape", *_):
            return (SHAPE,)
        case ("element", *_):
            return tuple(_planes(_without_own(layout, data, "element"), ("data",)))
        case ("scale", *_):
            return tuple(_planes(_without_own(layout, data, "scale"), _SCALES))
        case ("tensor", *_):
            return tuple(_planes(layout.sources, ("level",))) or ("plane:amax",)
        case ("formats", str(name), *_):
            return tuple(_of_format(layout, name))
        case ("gemm", "scale", *_):
            return (SWIZZLE,)
        case ("gemm", str(), *_):
            return (PRODUCTS,)
        case ("files", *_):
            return (FILES,)
        case ("orientations", str(name), *rest) if name in layout.orientations:
            return tuple(_of_orientation(layout, name, rest))
    return ()


def _of_orientation(layout: Layout, name: str, rest: list[str | int]) -> Iterator[str]:
    source = layout.source(name)
    match rest:
        case []:
            yield f"block:{name}"
            buffers: list[Buffer | Record] = [*layout.buffers, *layout.records]
            yield from (f"buffer:{buffer.name}" for buffer in buffers if buffer.orientation == name)
        case ["block", *_]:
            yield from (f"block:{name}", *_planes((source,), _SCALES), CUTS)
        case ["data", *_]:
            yield f"buffer:{name}_data"
        case [("super" | "scale") as part, *_]:
            kinds = _SUPER if part == "super" else ("scale", "zero")
            laid_out = (one for one in layout.buffers if one.orientation == name and one.kind in kinds)
            yield from (f"buffer:{buffer.name}" for buffer in laid_out)
        case ["record", *_]:
            yield f"buffer:{name}_record"
        case ["quantize", "element", *_]:
            yield from _planes((source,), ("data",))
        case ["quantize", "scale", *_]:
            yield from _planes((source,), _SCALES)
        case _:
            yield from _planes((source,), ("data", *_SCALES))


def _planes(sources: Iterable[Source], kinds: tuple[str, ...]) -> Iterator[str]:
    for source in sources:
        yield from (f"plane:{plane.name}" for plane in source.planes if plane.kind in kinds)


def _without_own(layout: Layout, data: dict[str, object], key: str) -> list[Source]:
    """The sources whose orientation has no `element` or `scale` under `quantize`, so that the recipe's applies."""
    stated = data.get("orientations")
    found = []
    for source in layout.sources:
        orientation = stated.get(source.name) if isinstance(stated, dict) else None
        own = orientation.get("quantize") if isinstance(orientation, dict) else None
        if not (isinstance(own, dict) and key in own):
            found.append(source)
    return found


def _of_format(layout: Layout, name: str) -> Iterator[str]:
    for source in layout.sources:
        for plane in source.planes:
            if (fmt := source.format_of(plane)) is not None and fmt.name == name:
                yield f"plane:{plane.name}"


def generated_lines(layout: Layout, text: str) -> tuple[Line, ...]:
    """A generated file's lines, with the parts that they name, or that a spec's field in a comment above them decides.

    Such a comment covers the lines up to the next one, a blank line, or the end of the indented block.
    """
    names: dict[str, list[str]] = {word: [part] for word, part in _WORDS.items()}
    for plane in layout.planes:
        names.setdefault(plane.name, []).append(f"plane:{plane.name}")
    buffers: list[Buffer | Record] = [*layout.buffers, *layout.records]
    for buffer in buffers:
        names.setdefault(buffer.name, []).append(f"buffer:{buffer.name}")
    field: tuple[str, ...] = ()
    indent = 0
    found = []
    for line in text.rstrip("\n").split("\n"):
        depth = len(line) - len(line.lstrip())
        if match := _FIELD.search(line):
            field, indent = decided(layout, tuple(match[1].split(".")), {}), depth
        elif not line.strip() or depth < indent:
            field = ()
        parts = dict.fromkeys(field)
        for word in re.findall(r"[a-z]\w*", line):
            parts |= dict.fromkeys(names.get(word, ()))
        found.append(Line(line, tuple(parts)))
    return tuple(found)
