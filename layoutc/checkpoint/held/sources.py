"""A weight's plane in files, as a load reads it: from one tensor, or from the parts that files store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from layoutc.checkpoint.held import places
from layoutc.checkpoint.held.codes import Encoded, Meaning
from layoutc.checkpoint.held.stored import Read, Stored
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts


class PlaneSource(Protocol):
    """A weight's plane, in files of any format."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The plane's shape."""

    def read(self, index: tuple[slice, ...], fetch: Read) -> Tensor:
        """The plane's entries at `index`, in its dtype. fetch: reads slices of tensors. Raises LayoutError."""


class BoundSource(NamedTuple):
    """A weight's plane in files: whole, or in parts that hold equal, consecutive shares of its rows.

    shared: the plane's only row covers all rows of the weight, so every part holds it. meanings: how to decode each
    part, if files store codes of the values. for_each: returns recipes for the same files that have a value per part.
    """

    name: str
    facts: Facts
    parts: tuple[tuple[Stored, places.Place], ...]
    shared: bool
    meanings: tuple[Meaning, ...] = ()
    for_each: Callable[[], Sequence[str]] = tuple

    @property
    def shape(self) -> tuple[int, ...]:
        """The plane's shape."""
        return self.facts.shape

    def read(self, index: tuple[slice, ...], fetch: Read) -> Tensor:
        """The plane's entries at `index`, in its dtype. Raises LayoutError if parts differ in a shared value."""
        spans = [range(size)[part] for part, size in zip(index, self.shape, strict=False)]
        rows, columns = (spans[0], spans[-1]) if len(self.shape) == 2 else (range(1), range(1))
        if self.shared:
            if not self.is_one(fetch):
                what = "its parts in the files have values of their own, but the weight has one for all"
                instead = "convert=True quantizes their values anew, or keeps them plain"
                if recipes := " or ".join(self.for_each()):
                    instead += f"; a stack in {recipes}, which quantize_as_stored chooses, has one for each matrix"
                raise LayoutError(f"{self.name}: {what}: {instead}")
            return self._part(0, rows, columns, fetch)
        each = self.shape[0] // len(self.parts)
        pieces = []
        for i in range(rows.start // max(each, 1), len(self.parts)):
            a, b = max(rows.start, i * each), min(rows.stop, (i + 1) * each)
            if a >= b:
                break
            pieces.append(self._part(i, range(a - i * each, b - i * each), columns, fetch))
        if not pieces:
            return torch.empty((0, len(columns)), dtype=self.facts.dtype, device="cpu")
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def is_one(self, fetch: Read) -> bool:
        """For a shared plane: True if all parts have the same values."""
        found = [self._part(i, range(self.shape[0]), range(self.shape[-1]), fetch) for i in range(len(self.parts))]
        return all(torch.equal(one, found[0]) for one in found)

    def codes(self, number: int, fetch: Read) -> tuple[Encoded, Tensor]:
        """For a plane with meanings: a part's codes, and their decoded values."""
        meaning, (_, place) = self.meanings[number], self.parts[number]
        rows, columns = (range(size) for size in place.plane.shape)
        codes, values = self._in_file(number, rows, columns, fetch), self._part(number, rows, columns, fetch)
        scale, codebook = fetch(meaning.scale, ()), fetch(meaning.codebook, ())
        return Encoded(codes, scale, codebook, meaning.added(fetch), 0.0, kept=True), values

    def _part(self, number: int, rows: range, columns: range, fetch: Read) -> Tensor:
        found, width = self._in_file(number, rows, columns, fetch), self.parts[number][1].plane.shape[-1]
        return (
            self.meanings[number].of(found, rows, columns, width, fetch)
            if self.meanings
            else found.to(self.facts.dtype)
        )

    def _in_file(self, number: int, rows: range, columns: range, fetch: Read) -> Tensor:
        """A part's entries as stored: codes, if files store codes of the values."""
        stored, place = self.parts[number]

        def box(index: tuple[slice, ...]) -> Tensor:
            if place.bound.counted:  # the values in order, whatever dims count them
                return fetch(stored, ()).reshape(-1)[index]
            return fetch(stored, index if len(index) == len(stored.shape) else ())

        try:
            return places.read(place, (rows.start, rows.stop), (columns.start, columns.stop), box)
        except LayoutError as error:
            raise LayoutError(f"{stored.name}, {self.name}: {error}") from error
