"""The sources of a spec: how each orientation is quantized, and into which planes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from layoutc.layout.planes import Kind, Plane, Source
from layoutc.layout.quantization import Block, Level, Quantization, Transform
from layoutc.spec.notation import parse_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from layoutc.spec import schema
    from layoutc.spec.formats import Format


def quantization_of(
    spec: schema.Spec, orientation: schema.Orientation, name: str, all_formats: Mapping[str, Format]
) -> Quantization:
    """The quantization of an orientation. all_formats: built-in formats and the spec's own."""
    stated_element = orientation.quantize.element or spec.element
    stated = orientation.quantize.scale or spec.scale
    block = _block(orientation.block)
    element, scale = all_formats[stated_element.format], all_formats[stated.format]
    zero = all_formats[stated.zero] if stated.zero else None
    level = _level(stated.super, scale, block, all_formats) if stated.super else None
    zeros = None
    if level is not None and zero is not None and not zero.is_wide:
        zeros = replace(level, quantization=replace(level.quantization, element=zero), centered=False)
    return Quantization(
        *(element, scale, zero, stated.round, stated.rule, tuple(sorted(stated.parameters.items())), block),
        low_first=stated_element.pack == "low-first",
        stochastic=stated_element.round == "stochastic",
        root=stated_element.root,
        transform=_transform(orientation, name),
        scales=level,
        zeros=zeros,
    )


def _block(stated: schema.Block) -> Block:
    return Block(*(None if size == "all" else size for size in (stated.m, stated.k)))


def source_of_quantization(name: str, quantization: Quantization, amax_of_matrices: bool = False) -> Source:
    """A quantization and its planes. amax_of_matrices: adds a plane with each matrix's level, repeated for each row."""
    q, block = quantization, quantization.block
    others: dict[str, Plane | None] = {}
    for kind, level in q.levels.items():
        fmt, covers = level.quantization.scale, level.covers
        own: Kind = "super" if kind == "scale" else "super_zero"
        others[own] = _values_plane(f"{name}_{own}", own, covers, fmt)
        if level.centered:
            others["offset"] = Plane(f"{name}_offset", "offset", covers.m, covers.k, 32)
    others["level"] = Plane(f"{name}_level", "level", 1, None, 32) if amax_of_matrices else None
    others["zero"] = _values_plane(f"{name}_zero", "zero", block, q.zero) if q.zero else None
    data = Plane(f"{name}_data", "data", 1, 1, q.element.bits)
    return Source(name, q, data, _values_plane(f"{name}_scale", "scale", block, q.scale), **others)


def _values_plane(name: str, kind: Kind, block: Block, fmt: Format) -> Plane:
    """A plane of scales or zero points, one per block: a byte per code, or 16- or 32-bit values."""
    narrow, half = fmt.bits if fmt.bits < 8 else 0, (fmt.torch or "") if fmt.bits == 16 else ""
    return Plane(name, kind, block.m, block.k, max(8, fmt.bits), half, narrow)


def _level(stated: schema.Super, scale: Format, block: Block, all_formats: Mapping[str, Format]) -> Level:
    """The level under which blocks' scales are stored."""
    covers = _block(stated.block)
    fmt, parameters = all_formats[stated.format], tuple(sorted(stated.parameters.items()))
    sizes = (covers.m, block.m), (covers.k, block.k)  # None: all
    counts = Block(*(1 if one is None else None if whole is None else whole // one for whole, one in sizes))
    quantization = Quantization(scale, fmt, None, stated.round, stated.rule, parameters, counts, low_first=True)
    return Level(quantization, covers, stated.offset == "mean")


def stated_buffer(orientation: schema.Orientation, plane: Plane) -> schema.Buffer:
    """How a plane is laid out. Defaults: zero points like scales, and super-blocks' planes like the data."""
    from layoutc.spec.schema import Buffer as Stated

    if plane.kind in ("data", "scale"):
        stated: schema.Buffer = getattr(orientation, plane.kind)
        return stated
    if plane.kind == "zero":
        return orientation.zero or orientation.scale
    if orientation.super is not None:
        return orientation.super
    per = {"m": plane.per_m, "k": plane.per_k}
    sizes = [(term.axis, per[term.axis]) for term in parse_layout(orientation.data.layout)]
    words = [axis if size == 1 else f"{axis}/{size}" for axis, size in sizes if size]
    return Stated(layout=" ".join(words) or "scalar")


def _transform(orientation: schema.Orientation, name: str) -> Transform | None:
    """An orientation's transform, along the axis that products contract."""
    stated = orientation.transform
    return Transform("k" if name == "rowwise" else "m", stated.hadamard, stated.signs) if stated else None
