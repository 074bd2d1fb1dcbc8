"""Chains of invertible steps from values to bytes: permute, repeat, pad, split, reorder, join; then pack and flatten.

Every step answers two questions: where does this value go, and which value is stored here? Steps know no recipes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import ge

from layoutc.ints.sizes import up

Index = tuple[int, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Permute:
    """Reorders dims: dim d of the result is dim order[d] of the input."""

    order: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        """The shape after the step."""
        return tuple(shape[d] for d in self.order)

    def images(self, index: Index, shape: Shape) -> Sequence[Index]:
        """Where the value at `index` of an array of `shape` goes."""
        return (tuple([index[d] for d in self.order]),)

    def origin(self, index: Index, shape: Shape) -> Index | None:
        """The index in an array of `shape` of the value at `index` of the result; None for padding."""
        back = [0] * len(index)
        for result, source in enumerate(self.order):
            back[source] = index[result]
        return tuple(back)


@dataclass(frozen=True)
class Repeat:
    """Stores each value of a dim `times` times in a row, up to `limit` values in all."""

    dim: int
    times: int
    limit: int

    def shape(self, shape: Shape) -> Shape:
        """The shape after the step."""
        return (*shape[: self.dim], min(shape[self.dim] * self.times, self.limit), *shape[self.dim + 1 :])

    def images(self, index: Index, shape: Shape) -> Sequence[Index]:
        """Where the value at `index` of an array of `shape` goes."""
        first = index[self.dim] * self.times
        before, after = index[: self.dim], index[self.dim + 1 :]
        return [(*before, i, *after) for i in range(first, min(first + self.times, self.limit))]

    def origin(self, index: Index, shape: Shape) -> Index | None:
        """The index in an array of `shape` of the value at `index` of the result; None for padding."""
        return (*index[: self.dim], index[self.dim] // self.times, *index[self.dim + 1 :])


@dataclass(frozen=True)
class Pad:
    """Appends zero bytes to each dim, up to a multiple."""

    multiples: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        """The shape after the step."""
        return tuple(up(size, multiple) for size, multiple in zip(shape, self.multiples, strict=True))

    def images(self, index: Index, shape: Shape) -> Sequence[Index]:
        """Where the value at `index` of an array of `shape` goes."""
        return (index,)

    def origin(self, index: Index, shape: Shape) -> Index | None:
        """The index in an array of `shape` of the value at `index` of the result; None for padding."""
        return None if any(map(ge, index, shape)) else index


@dataclass(frozen=True)
class Split:
    """Splits a dim into parts, row-major: those of `sizes`, and part number `rest`, which is the quotient."""

    dim: int
    sizes: tuple[int, ...]
    rest: int = 0

    def parts(self, size: int) -> tuple[int, ...]:
        """The sizes of all parts of a dim of `size`. Raises ValueError if it is not divisible."""
        inner = prod(self.sizes)
        if size % inner:
            raise ValueError(f"a dim of {size} does not split into pieces of {inner}")
        return (*self.sizes[: self.rest], size // inner, *self.sizes[self.rest :])

    def shape(self, shape: Shape) -> Shape:
        """The shape after the step."""
        return (*shape[: self.dim], *self.parts(shape[self.dim]), *shape[self.dim + 1 :])

    def images(self, index: Index, shape: Shape) -> Sequence[Index]:
        """Where the value at `index` of an array of `shape` goes."""
        rest, digits = index[self.dim], []
        for size in reversed(self.parts(shape[self.dim])):
            rest, digit = divmod(rest, size)
            digits.append(digit)
        return ((*index[: self.dim], *reversed(digits), *index[self.dim + 1 :]),)

    def origin(self, index: Index, shape: Shape) -> Index | None:
        """The index in an array of `shape` of the value at `index` of the result; None for padding."""
        parts, value = self.parts(shape[self.dim]), 0
        for offset, size in enumerate(parts):
            value = value * size + index[self.dim + offset]
        return (*index[: self.dim], value, *index[self.dim + len(parts) :])


@dataclass(frozen=True)
class Reorder:
    """Reorders the entries of a dim: entry i of the result is entry order[i] of the input."""

    dim: int
    order: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        """The shape after the step."""
        return shape

    def images(self, index: Index, shape: Shape) -> Sequence[Index]:
        """Where the value at `index` of an array of `shape` goes."""
        return ((*index[: self.dim], self.order.index(index[self.dim]), *index[self.dim + 1 :]),)

    def origin(self, index: Index, shape: Shape) -> Index | None:
        """The index in an array of `shape` of the value at `index` of the result; None for padding."""
        return (*index[: self.dim], self.order[index[self.dim]], *index[self.dim + 1 :])


@dataclass(frozen=True)
class Join:
    """Joins runs of adjacent dims into one dim each, row-major. counts: the lengths of the runs."""

    counts: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        """The shape after the step."""
        sizes = iter(shape)
        return tuple(prod(itertools.islice(sizes, count)) for count in self.counts)

    def images(self, index: Index, shape: Shape) -> Sequence[Index]:
        """Where the value at `index` of an array of `shape` goes."""
        pairs, joined = iter(zip(index, shape, strict=True)), []
        for count in self.counts:
            value = 0
            for i, size in itertools.islice(pairs, count):
                value = value * size + i
            joined.append(value)
        return (tuple(joined),)

    def origin(self, index: Index, shape: Shape) -> Index | None:
        """The index in an array of `shape` of the value at `index` of the result; None for padding."""
        parts: list[int] = []
        end = len(shape)
        for value, count in zip(reversed(index), reversed(self.counts), strict=True):
            for size in reversed(shape[end - count : end]):
                value, part = divmod(value, size)
                parts.append(part)
            end -= count
        return tuple(reversed(parts))


Step = Permute | Repeat | Pad | Split | Reorder | Join


@dataclass(frozen=True)
class Chain:
    """Steps on an array of `start` shape. The result is packed along the last dim, `bits` a value, and flattened.

    A position is (byte, bit): the byte offset, and the offset of the value's first bit in that byte, counted from its
    low end if `low_first`, else from its high end. 6-bit codes may continue in the next byte.
    """

    start: Shape
    steps: tuple[Step, ...]
    bits: int
    low_first: bool = True

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape before each step, and after the last one."""
        return tuple(itertools.accumulate(self.steps, lambda shape, step: step.shape(shape), initial=self.start))

    @cached_property
    def _forward(self) -> list[tuple[Step, Shape]]:
        """Each step, and the shape before it."""
        return list(zip(self.steps, self.shapes, strict=False))

    @cached_property
    def _backward(self) -> list[tuple[Step, Shape]]:
        return self._forward[::-1]

    @property
    def nbytes(self) -> int:
        """The size in bytes. Each row along the last dim is whole bytes."""
        *lead, last = self.shapes[-1]
        return prod(lead) * (last * self.bits // 8)

    def positions(self, index: Index) -> tuple[tuple[int, int], ...]:
        """Every (byte, bit) where the value at `index` of the start array is stored."""
        found: Sequence[Index] = (index,)
        for step, shape in self._forward:
            if len(found) == 1:
                found = step.images(found[0], shape)
            else:
                found = [image for i in found for image in step.images(i, shape)]
        return tuple([self._pack(i) for i in found])

    def value_at(self, byte: int, bit: int) -> Index | None:
        """The index in the start array of the value that begins at (byte, bit); None for padding.

        The inverse of `positions`. Raises ValueError if no value can begin there.
        """
        *lead, last = self.shapes[-1]
        row, column_bytes = divmod(byte, last * self.bits // 8)
        column, rest = divmod(column_bytes * 8 + bit, self.bits)
        if rest:
            raise ValueError(f"no value begins at byte {byte}, bit {bit}")
        parts = []
        for size in reversed(lead):
            row, part = divmod(row, size)
            parts.append(part)
        index: Index = (*reversed(parts), column)
        for step, shape in self._backward:
            origin = step.origin(index, shape)
            if origin is None:
                return None
            index = origin
        return index

    def _pack(self, index: Index) -> tuple[int, int]:
        *lead, last = self.shapes[-1]
        row = 0
        for i, size in zip(index, lead, strict=False):
            row = row * size + i
        return divmod((row * last + index[-1]) * self.bits, 8)
