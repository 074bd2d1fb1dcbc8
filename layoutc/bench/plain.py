"""What a recipe's users would write in plain torch: its arithmetic, in no order that would keep bytes the same.

It is made of facts that the recipe's package states: the blocks, the values of the element's and the scale's codes, and
what its scale rule makes of a few amaxes. Nothing is handled that a weight doesn't hold, except blocks of zeros.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.facts import Layout

FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
PARTS = ("data", "scale", "zero")
Planes = dict[str, Tensor]


class NoPlain(ValueError):
    """A recipe has no plain version; says why."""


# -------------------------------------------------------------------------------------------------------------- facts
@dataclass(frozen=True)
class Element:
    """A number format, told by the values of its codes."""

    bits: int
    largest: float
    dtype: torch.dtype | None = None  # torch's own
    step: float | None = None  # of integers
    lowest: float = 0.0  # of integers
    mantissa: int = 0  # of floats that torch doesn't have
    smallest_normal: float = 0.0

    def codes(self, x: Tensor, saturates: bool) -> Tensor:
        """fp32 -> codes, one in a byte. saturates: values may be larger than the largest element."""
        if self.dtype is not None:
            return (x.clamp(-self.largest, self.largest) if saturates else x).to(self.dtype)
        if self.step is not None:
            steps = (x * (1 / self.step)).round().clamp(self.lowest / self.step, self.largest / self.step)
            return (steps.to(torch.int32) & ((1 << self.bits) - 1)).to(torch.uint8)
        drop = 23 - self.mantissa
        size = x.abs().clamp(max=self.largest)
        word = size.view(torch.int32)
        bias = (125 + math.frexp(self.smallest_normal)[1]) << 23
        normal = (word - bias + ((word >> drop) & 1) + (1 << (drop - 1)) - 1) >> drop
        below = (size * (2.0**self.mantissa / self.smallest_normal)).round().to(torch.int32)
        code = torch.where(size < self.smallest_normal, below, normal)
        return (code | (x < 0).to(torch.int32) << (self.bits - 1)).to(torch.uint8)


def element_of(decode: Callable[[Tensor], Tensor], bits: int, largest: float | None, lowest: float | None) -> Element:
    """The format that a decoder reads. largest, lowest: where elements saturate, if they do before the last code.

    Raises NoPlain for formats that are neither floats nor integers.
    """
    values = decode(torch.arange(1 << bits, dtype=torch.uint8))
    for dtype in FLOATS if bits == 8 else ():
        if torch.equal(values.nan_to_num(), torch.arange(256, dtype=torch.uint8).view(dtype).float().nan_to_num()):
            return Element(bits, largest or torch.finfo(dtype).max, dtype)
    if float(values[0]) != 0:
        raise NoPlain("code 0 of its elements is not the value 0")
    positive = values[: 1 << (bits - 1)]
    first = float(positive[1])
    steps = positive / first
    even = int((steps == torch.arange(len(steps))).sum())  # codes up to the second power of two are evenly spaced
    top = largest or float(positive.nan_to_num(0.0, 0.0, 0.0).max())
    if even == len(steps):
        return Element(bits, top, step=first, lowest=-top if lowest is None else lowest)
    mantissa = (even - 1).bit_length() - 2
    if mantissa < 0 or even != (2 << mantissa) + 1:
        raise NoPlain("its elements are neither floats nor integers")
    return Element(bits, top, mantissa=mantissa, smallest_normal=first * 2**mantissa)


@dataclass(frozen=True)
class Source:
    """One quantization: a block of rows and columns (None: all of them), its element, and how its scales are found."""

    block: tuple[int | None, int | None]
    element: Element
    rule: str  # amax, power-of-two, exponent-up, exponent-down, two-level, min-max
    scale_max: float = 0.0  # of two-level
    amax_along: int | None = None  # the axis whose blocks' amaxes are given, as a block has rows of all shards

    def transposed(self) -> Source:
        """The same of a transposed matrix."""
        along = None if self.amax_along is None else 1 - self.amax_along
        return replace(self, block=self.block[::-1], amax_along=along)


def source_of(layout: Layout, reference: ModuleType, name: str) -> Source:
    """The facts of an orientation that is quantized. Raises NoPlain."""
    if layout.not_weights:
        raise NoPlain(layout.not_weights)
    if not layout.extremes:
        raise NoPlain("it tries several scales for each block")

    def of(what: str) -> Any:
        return getattr(reference, f"{what}_{name}", None) or getattr(reference, what, None)

    def constant(what: str) -> float | None:
        found = getattr(reference, f"{name.upper()}_{what}", None)
        return getattr(reference, what, None) if found is None else found

    rows, columns = re.fullmatch(r"(\d+|all)x(\d+|all)", layout.blocks[name]).groups()  # type: ignore[union-attr]
    block = (None if rows == "all" else int(rows)), (None if columns == "all" else int(columns))
    bits = round(8 / (layout.stored[f"{name}_data"].columns_per_value or 1))
    element = element_of(of("decode"), bits, constant("ELEMENT_MAX"), constant("ELEMENT_MIN"))
    scales = of("scales")
    parameters = tuple(inspect.signature(scales).parameters)
    stored = layout.dtypes[f"{name}_scale"]
    if parameters == ("lowest", "highest") and stored == torch.float32:
        return Source(block, element, "min-max")
    if parameters == ("amax", "tensor_amax"):
        if float(of("decode_scale")(scales(torch.zeros(1), torch.ones(1))[0])) != 0:
            raise NoPlain("blocks of zeros have a special scale")
        decoded = of("decode_scale")(torch.arange(256, dtype=torch.uint8))
        if torch.equal(decoded.nan_to_num(), torch.arange(256, dtype=torch.uint8).view(FLOATS[0]).float().nan_to_num()):
            return Source(block, element, "two-level", torch.finfo(FLOATS[0]).max)
    if parameters in (("amax",), ("amax", "input_max")) and stored == torch.float32:
        # What replaces a factor that overflows, the second of these, matters for no weight.
        probed = scales(torch.tensor([element.largest * 0.7]), *[1.0] * (len(parameters) - 1))[0]
        rule = "power-of-two" if float(probed.frexp().mantissa) == 0.5 else "amax"
        return Source(block, element, rule, amax_along=1 if block[0] is None else None)
    if parameters == ("amax",) and of("decode_scale") is not None:
        # Between the largest element and the next power of two: one rule takes the next exponent, the other doesn't.
        above = (element.largest + 2 * _power(element.largest)) / 2
        factor = float(of("decode_scale")(scales(torch.tensor([above]))[0]))
        if factor in (1.0, 2.0):
            return Source(block, element, "exponent-up" if factor == 2.0 else "exponent-down")
    raise NoPlain("no plain version of its scale rule is known")


def _power(x: float) -> float:
    return float(2.0 ** (math.frexp(x)[1] - 1))


# ----------------------------------------------------------------------------------------------------------- arithmetic
def quantize(x: Tensor, source: Source, amax: Tensor | None = None) -> tuple[Tensor, ...]:
    """(m, k) -> codes, packed, and scales, and zero points for the rule that has them. amax: of what shards share."""
    m, k = x.shape
    rows, columns = source.block[0] or m, source.block[1] or k
    blocks, element = x.view(m // rows, rows, k // columns, columns), source.element
    if source.rule == "min-max":
        return _by_range(blocks, element, x.shape)
    if source.amax_along is not None and amax is not None:
        largest = amax.view(1, 1, -1, 1) if source.amax_along == 1 else amax.view(-1, 1, 1, 1)
    else:
        largest = blocks.abs().amax((1, 3), keepdim=True).float()
    factor, scale, saturates = _factors(largest, source, amax)
    codes = element.codes(blocks.float() * factor, saturates).view(m, k)
    return pack(codes, element.bits), scale.squeeze(3).squeeze(1)


def _factors(amax: Tensor, source: Source, tensor_amax: Tensor | None) -> tuple[Tensor, Tensor, bool]:
    """What elements are multiplied by, the scale as stored, and whether an element can then be too large."""
    largest = source.element.largest
    if source.rule == "two-level":
        assert tensor_amax is not None
        whole = source.scale_max * largest / tensor_amax
        scale = (amax * (whole / largest)).to(FLOATS[0])
        return whole / scale.float().clamp(min=2.0**-9), scale, True
    if source.rule == "exponent-up":
        word = (amax * (1 / largest)).view(torch.int32)
        exponent = (word >> 23) + ((word & 0x7FFFFF) != 0)
        return ((254 - exponent) << 23).view(torch.float32), exponent.to(torch.uint8), False
    if source.rule == "exponent-down":
        exponent = ((amax * (1 / _power(largest))).view(torch.int32) >> 23).clamp(min=0)
        return ((254 - exponent) << 23).view(torch.float32), exponent.to(torch.uint8), True
    factor = torch.where(amax == 0, 1.0, torch.full_like(amax, largest) / amax)
    if source.rule == "power-of-two":
        factor = (factor.view(torch.int32) & 0x7F800000).view(torch.float32)
    return factor, factor.reciprocal(), False


def _by_range(blocks: Tensor, element: Element, shape: torch.Size) -> tuple[Tensor, ...]:
    """The block's range over the range of the elements, with a zero point."""
    assert element.step is not None
    lowest = blocks.amin((1, 3), keepdim=True).float().clamp(max=0)
    highest = blocks.amax((1, 3), keepdim=True).float().clamp(min=0)
    scale = (highest - lowest) * (1 / (element.largest - element.lowest))
    factor = torch.where(scale == 0, 1.0, scale.reciprocal())
    zero = (element.lowest - lowest * factor).round()
    codes = element.codes(blocks.float() * factor + zero, True).view(shape)
    return pack(codes, element.bits), scale.squeeze(3).squeeze(1), zero.to(torch.int8).squeeze(3).squeeze(1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of 4 or 6 bits, the first in the lowest bits; codes of 8 bits as they are."""
    if bits == 8:
        return codes
    if bits == 4:
        return codes[:, ::2] | codes[:, 1::2] << 4
    a, b, c, d = codes.view(len(codes), -1, 4).unbind(2)
    return torch.stack((a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2), 2).flatten(1)


# -------------------------------------------------------------------------------------------------------------- recipes
@dataclass(frozen=True)
class Plain:
    """A recipe's plain version."""

    sources: dict[str, Source]

    def __call__(self, x: Tensor, amax: Tensor | None, names: tuple[str, ...]) -> Planes:
        """(m, k) -> planes of orientations that are quantized, as the recipe stores them."""
        planes: Planes = {}
        for name in names:
            found = quantize(x, self.sources[name], amax)
            planes |= {f"{name}_{which}": made for which, made in zip(PARTS, found, strict=False)}
        return planes

    def turning(self) -> Callable[[Tensor, Tensor | None], Planes]:
        """What quantizes x and a transposed copy of it, whose codes and scales are named `turned_...`."""
        turned = self.sources.get("columnwise", self.sources["rowwise"]).transposed()

        def both(x: Tensor, amax: Tensor | None) -> Planes:
            found = quantize(x.t().contiguous(), turned, amax)
            planes = {f"turned_{which}": made for which, made in zip(PARTS, found, strict=False)}
            return self(x, amax, ("rowwise",)) | planes

        return both


def plain(layout: Layout, reference: ModuleType, shape: tuple[int, int]) -> Plain:
    """A recipe's plain version, for weights of a shape. Raises NoPlain, which says why there is none."""
    names = [name for name in layout.orientations if f"{name}_data" in layout.sources[name]]
    sources = {name: source_of(layout, reference, name) for name in names}
    for source in sources.values():
        for size, block in zip(shape, source.block, strict=True):
            if block is not None and cdiv(size, block) * block != size:
                raise NoPlain(f"its blocks, {block} long, do not divide {size}")
        if source.element.bits not in (4, 6, 8):
            raise NoPlain(f"it packs codes of {source.element.bits} bits")
    return Plain(sources)
