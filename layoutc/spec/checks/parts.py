"""The parts of a spec that checks iterate over: orientations, buffers, their dims, and the sizes that fill them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from layoutc.spec.checks.formats import element_bits, sound_format
from layoutc.spec.notation import Axis, NotationError, Swizzle, Term, parse_buffer_swizzle, parse_layout
from layoutc.spec.rules import RULES, Rule
from layoutc.spec.schema import Block, Buffer, Element, Orientation, Scale, Spec
from layoutc.spec.source import Path

AXES: tuple[Axis, ...] = ("m", "k")


@dataclass(frozen=True)
class Side:
    """A stated orientation with its element and scale, or the recipe's if it has none, and their paths."""

    name: str
    orientation: Orientation
    element: Element
    scale: Scale
    element_at: Path
    scale_at: Path

    @property
    def where(self) -> Path:
        """The orientation's path in the spec."""
        return ("orientations", self.name)

    @property
    def rule(self) -> Rule | None:
        """The scale's rule; None if unknown, which another check reports."""
        return RULES.get(self.scale.rule)

    @property
    def along(self) -> Axis:
        """The axis that the orientation's products contract."""
        return "k" if self.name == "rowwise" else "m"


def sides(spec: Spec) -> Iterator[Side]:
    """The orientations that a spec states, rowwise first."""
    for name in ("rowwise", "columnwise"):
        orientation: Orientation | None = getattr(spec.orientations, name)
        if orientation is not None:
            at: Path = ("orientations", name, "quantize")
            own = orientation.quantize
            element_at: Path = (*at, "element") if own.element else ("element",)
            scale_at: Path = (*at, "scale") if own.scale else ("scale",)
            parts = own.element or spec.element, own.scale or spec.scale
            yield Side(name, orientation, *parts, element_at, scale_at)


@dataclass(frozen=True)
class Laid:
    """A side's buffer of data, scale, zero or super. Its parts are None if another check rejects them."""

    spec: Spec
    side: Side
    kind: str
    buffer: Buffer

    @property
    def where(self) -> Path:
        """The buffer's path in the spec."""
        return (*self.side.where, self.kind)

    @property
    def terms(self) -> tuple[Term, ...] | None:
        """The terms of the buffer's layout."""
        return terms_of(self.buffer)

    @property
    def bits(self) -> int | None:
        """Bits per value."""
        scale = self.side.scale
        if self.kind == "data":
            return element_bits(self.spec, self.side.element.format)
        shared = scale.super.format if scale.super else None
        name = {"zero": scale.zero, "scale": scale.format, "super": shared}[self.kind]
        fmt = sound_format(self.spec, name) if name else None
        return None if fmt is None else fmt.bits

    @property
    def swizzle(self) -> Swizzle | None:
        """The buffer's swizzle, if it states one."""
        try:
            named = self.terms if self.buffer.swizzle else None
            return parse_buffer_swizzle(self.buffer.swizzle or "", self.buffer.sizes, len(named)) if named else None
        except NotationError:
            return None

    @property
    def multiples(self) -> tuple[int, ...] | None:
        """The multiple that each dim's size must be of, if the buffer is swizzled, in words or packs narrow values.

        None for other buffers. Raises ValueError if no sizes fill bytes or words.
        """
        bits, named, swizzle, buffer = self.bits, self.terms, self.swizzle, self.buffer
        if bits is None or not named or (buffer.swizzle and swizzle is None):
            return None
        packed = bits < 8 and (self.kind == "zero" or (self.kind == "scale" and self.side.scale.super is not None))
        if not (buffer.swizzle or buffer.words or packed) or (buffer.words and bits > 8):
            return None
        run = run_of(bits, buffer.words)
        return swizzle.multiples(run) if swizzle else (*[1] * (len(named) - 1), run)


def buffers(spec: Spec) -> Iterator[Laid]:
    """The buffers that a spec states."""
    for side in sides(spec):
        for kind in ("data", "scale", "zero", "super"):
            buffer: Buffer | None = getattr(side.orientation, kind)
            if buffer is not None:
                yield Laid(spec, side, kind, buffer)


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


def run_of(bits: int, words: int | None) -> int:
    """How many codes fill whole bytes, or whole words if given."""
    unit = words or 8
    return lcm(bits, unit) // bits if bits < unit else 1


def sure_multiple(spec: Spec, term: Term, pad: int) -> int:
    """The multiple that a buffer dim's size always is of, for every weight that the recipe accepts."""
    shape: int = getattr(spec.shape, term.axis)
    entries = shape // term.divisor if shape % term.divisor == 0 else 1
    return entries if entries % pad == 0 else pad


def stated_shape(spec: Spec) -> str:
    """The `shape` to type so that unpadded planes and buffers fill whole bytes, words and tiles."""
    multiples = spec.shape.model_dump(exclude_defaults=True)

    def raise_to(axis: str, size: int) -> None:
        multiples[axis] = lcm(getattr(spec.shape, axis), multiples.get(axis, 1), size)

    for laid in buffers(spec):
        bits, named, buffer = laid.bits, laid.terms, laid.buffer
        if bits is None or not named:
            continue
        if bits < 8 and laid.kind == "data":
            raise_to("k", run_of(bits, None))
            if not buffer.swizzle and not buffer.words:
                raise_to(named[-1].axis, run_of(bits, None))
        try:
            needed = laid.multiples
        except ValueError:
            continue
        pads = buffer.pad if len(buffer.pad) == len(named) else (1,) * len(named)
        for term, multiple, pad in zip(named, needed or (), pads, strict=bool(needed)):
            if multiple > 1 and pad == 1:
                raise_to(term.axis, term.divisor * multiple)
    inside = ", ".join(f"{axis}: {multiples[axis]}" for axis in AXES if axis in multiples)
    return f"`shape: {{{inside}}}`"
