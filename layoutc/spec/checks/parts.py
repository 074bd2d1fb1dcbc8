"""The parts of a spec that checks walk over: orientations, buffers, their dims, and the sizes that fill them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import lcm

from layoutc.spec.checks import formats as format_checks
from layoutc.spec.notation import Axis, NotationError, Swizzle, Term, parse_buffer_swizzle, parse_layout
from layoutc.spec.schema import Block, Buffer, Orientation, Spec, quantized_as
from layoutc.spec.source import Path

AXES: tuple[Axis, ...] = ("m", "k")


def orientations(spec: Spec) -> Iterator[tuple[str, Orientation]]:
    """The orientations that a spec states, by name, rowwise first."""
    yield "rowwise", spec.orientations.rowwise
    if spec.orientations.columnwise is not None:
        yield "columnwise", spec.orientations.columnwise


def buffers(spec: Spec) -> Iterator[tuple[Path, Buffer]]:
    """The buffers that a spec states, with their places."""
    for name, orientation in orientations(spec):
        yield ("orientations", name, "data"), orientation.data
        yield ("orientations", name, "scale"), orientation.scale
        if orientation.zero is not None:
            yield ("orientations", name, "zero"), orientation.zero
        if orientation.super is not None:
            yield ("orientations", name, "super"), orientation.super


def terms_of(buffer: Buffer) -> tuple[Term, ...] | None:
    """The layout's terms; None if it can't be read, which layouts_are_readable reports."""
    try:
        return parse_layout(buffer.layout)
    except NotationError:
        return None


def size_of(block: Block, axis: str) -> int | None:
    """The block's size along an axis; None for `all`."""
    size = block.m if axis == "m" else block.k
    return None if size == "all" else size


def axis_span(buffer: Buffer, axis: str) -> tuple[int, int]:
    """Where a layout string names an axis."""
    match = re.search(rf"(?<!\S){axis}\S*", buffer.layout)
    return match.span() if match else (0, len(buffer.layout))


def buffer_bits(spec: Spec, where: Path) -> int | None:
    """The bits of a value of the buffer at `where`; None if its format is refused."""
    element, scale = quantized_as(spec, getattr(spec.orientations, str(where[1])))
    if where[2] == "data":
        return format_checks.element_bits(spec, element.format)
    names = {"zero": scale.zero, "scale": scale.format, "super": scale.super.format if scale.super else None}
    name = names[str(where[2])]
    fmt = format_checks.sound_format(spec, name) if name else None
    return None if fmt is None else fmt.bits


def run_of(bits: int, words: int | None) -> int:
    """How many codes fill whole bytes, or whole words."""
    unit = words or 8
    return lcm(bits, unit) // bits if bits < unit else 1


def buffer_swizzle(buffer: Buffer) -> Swizzle | None:
    """A buffer's swizzle; None if there is none, or if it can't be read, which a check reports."""
    named = terms_of(buffer)
    if not buffer.swizzle or not named:
        return None
    try:
        return parse_buffer_swizzle(buffer.swizzle, buffer.sizes, len(named))
    except NotationError:
        return None


def buffer_multiples(spec: Spec, where: Path, buffer: Buffer) -> tuple[int, ...] | None:
    """For each dim of a buffer that is swizzled, in words or packs narrow values, what its size must be a multiple of.

    None for other buffers, and for those that other checks refuse. Raises ValueError if no sizes fill bytes or words.
    """
    bits, named, swizzle = buffer_bits(spec, where), terms_of(buffer), buffer_swizzle(buffer)
    if bits is None or not named or (buffer.swizzle and swizzle is None):
        return None
    _, scale = quantized_as(spec, getattr(spec.orientations, str(where[1])))
    packed = bits < 8 and (where[2] == "zero" or (where[2] == "scale" and scale.super is not None))
    if not (buffer.swizzle or buffer.words or packed) or (buffer.words and bits > 8):
        return None
    run = run_of(bits, buffer.words)
    return swizzle.multiples(run) if swizzle else (*[1] * (len(named) - 1), run)


def sure_multiple(spec: Spec, term: Term, pad: int) -> int:
    """What the size of a buffer's dim is a multiple of, for every weight that the recipe takes."""
    shape: int = getattr(spec.shape, term.axis)
    entries = shape // term.divisor if shape % term.divisor == 0 else 1
    return entries if entries % pad == 0 else pad


def stated_shape(spec: Spec) -> str:
    """The `shape` that fills every byte, word and tile of planes and buffers that no padding fills, as it is typed."""
    multiples = spec.shape.model_dump(exclude_defaults=True)

    def raise_to(axis: str, size: int) -> None:
        multiples[axis] = lcm(getattr(spec.shape, axis), multiples.get(axis, 1), size)

    for where, buffer in buffers(spec):
        bits, named = buffer_bits(spec, where), terms_of(buffer)
        if bits is None or not named:
            continue
        packed = bits < 8 and where[2] == "data"
        if packed:
            raise_to("k", run_of(bits, None))
        if packed and not buffer.swizzle and not buffer.words:
            raise_to(named[-1].axis, run_of(bits, None))
        try:
            needed = buffer_multiples(spec, where, buffer)
        except ValueError:
            continue
        pads = buffer.pad if len(buffer.pad) == len(named) else (1,) * len(named)
        for term, multiple, pad in zip(named, needed or (), pads, strict=bool(needed)):
            if multiple > 1 and pad == 1:
                raise_to(term.axis, term.divisor * multiple)
    inside = ", ".join(f"{axis}: {multiples[axis]}" for axis in AXES if axis in multiples)
    return f"`shape: {{{inside}}}`"
