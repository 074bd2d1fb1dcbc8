"""Runs: what a group sends as it lies, of one dtype. Copied into what a rank sends, and out of what all have sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from layoutc.runtime.kernels.copies import MOVING, WORD, copies_in, copies_out
from layoutc.runtime.kernels.plans import Plans, place_of
from layoutc.runtime.sharding import gathered
from layoutc.runtime.torch_private import foreach_copy_, keeping_version


class Piece(Protocol):
    """A tensor that each rank has a part of."""

    @property
    def source(self) -> Tensor:
        """What this rank sends, of one dim; before it is cast, for a plain parameter."""

    @property
    def output(self) -> Tensor:
        """The parts of all ranks, of one dim: FSDP2 frees and allocates its storage."""


class PlainParameter(NamedTuple):
    """A parameter that FSDP2 gathers as it is."""

    param: Any  # FSDPParam

    @property
    def source(self) -> Tensor:
        """(numel,), padded to what all ranks send."""
        return gathered.plain_shard_of(self.param)

    @property
    def output(self) -> Tensor:
        """(ranks * numel,)."""
        return gathered.outputs_of(self.param)[0]


class PlainInWords:
    """A parameter that FSDP2 gathers as it is, as words: it is copied by the launch that copies planes."""

    def __init__(self, param: Any, dtype: torch.dtype, sends: bool) -> None:
        """param: an FSDPParam. dtype: that is gathered. sends: whether it is sent as words too, and does not only
        arrive so."""
        self.param, self.dtype, self.sends = param, dtype, sends
        self._of: Tensor | None = None  # FSDP2's output, and a view of it
        self._words: Tensor | None = None

    @property
    def source(self) -> Tensor:
        """(bytes that a rank sends / 8,): of the shard as it is now, in whatever dtype and memory. Of one that is not
        sent as words the output, which says in what kind of elements it arrives."""
        if not self.sends:
            return self.output
        shard = gathered.plain_shard_of(self.param)
        shard = shard if shard.dtype is self.dtype else shard.to(self.dtype)
        return (shard if _lies_in_words(shard) else shard.clone()).view(WORD)

    @property
    def output(self) -> Tensor:
        """(bytes of all ranks / 8,)."""
        output = gathered.outputs_of(self.param)[0]
        if output is not self._of or self._words is None:
            with torch.inference_mode(False):  # whose views have no versions
                self._of, self._words = output, output.view(WORD)
        return self._words


class PlaneInPlace(NamedTuple):
    """A plane of a shard, or of the whole weight, as words or bytes."""

    source: Tensor
    output: Tensor


Part = tuple[Piece, torch.dtype, int, int]  # of a row: the dtype that is gathered, start in bytes, elements


class Place(NamedTuple):
    """A piece, and where it lies in the row of each rank, in elements."""

    piece: Piece
    start: int
    numel: int


@dataclass
class Run:
    """Pieces that have one dtype when they are gathered, and one before."""

    dtype: torch.dtype
    places: list[Place] = field(default_factory=list)
    _in: Plans = field(default_factory=Plans)
    _out: Plans = field(default_factory=Plans)

    def fill(self, sent: Tensor) -> None:
        """Copies this rank's parts into its row, (nbytes,) uint8."""
        sources = [place.piece.source for place in self.places]
        lie = place_of(sources, sent.device)
        copies = self._in.at(lie, lambda: copies_in(sources, self._starts, self.dtype, sent))
        if copies is not None:
            copies(sent)
            return
        row = sent.view(self.dtype)
        foreach_copy_([row.narrow(0, place.start, place.numel) for place in self.places], sources)

    def arrive(self, received: Tensor) -> None:
        """Writes the outputs, from the rows of all ranks, (ranks * nbytes,) uint8; those of plain parameters are
        allocated."""
        outputs = [place.piece.output for place in self.places]
        for at in self._plain:
            gathered.allocate(outputs[at])
        ranks = outputs[0].numel() // self.places[0].numel
        moving, staying = self._apart
        lie = place_of([outputs[at] for at in staying], received.device)
        copies = self._out.at(lie, lambda: copies_out(outputs, self._starts, ranks, received, moving))
        if copies is not None:
            copies(received, *[outputs[at] for at in moving])
            return
        rows = received.view(ranks, -1).view(self.dtype)
        with keeping_version(*outputs):
            for output, place in zip(outputs, self.places, strict=True):
                output.view(ranks, -1).copy_(rows.narrow(1, place.start, place.numel))

    @cached_property
    def _starts(self) -> list[int]:
        return [place.start for place in self.places]

    @cached_property
    def _plain(self) -> list[int]:
        """The positions of plain parameters."""
        return [at for at, place in enumerate(self.places) if not isinstance(place.piece, PlaneInPlace)]

    @cached_property
    def _apart(self) -> tuple[list[int], list[int]]:
        """The positions of outputs that lie elsewhere in most gathers, and those of the others. Small ones do, as plain
        parameters are: of large ones, FSDP2 mostly gets the same memory again. A launch takes those that move to begin
        at multiples of 16 bytes, which memory of their own does."""
        moving = [at for at in self._plain if not self.places[at].piece.output.storage_offset()][:MOVING]
        return moving, [at for at in range(len(self.places)) if at not in moving]


def runs_of(pieces: Iterable[Part]) -> list[Run]:
    """The runs of pieces, which lie at multiples of their elements' sizes."""
    runs: dict[tuple[torch.dtype, torch.dtype], Run] = {}
    for piece, dtype, start, numel in pieces:
        run = runs.setdefault((piece.source.dtype, dtype), Run(dtype))
        run.places.append(Place(piece, start // dtype.itemsize, numel))
    return list(runs.values())


def plain(param: Any, dtype: torch.dtype, start: int, numel: int) -> tuple[Part, Part]:
    """A plain parameter as it is sent, and as it arrives: in words where these fit, so that it takes no launch of its
    own; only the latter if it is cast before, or its shard does not lie in words.

    start: in the row of a rank, in bytes. numel: of a rank's part.
    """
    size, nbytes = WORD.itemsize, numel * dtype.itemsize
    as_it_is = PlainParameter(param), dtype, start, numel
    if start % size or nbytes % size or gathered.outputs_of(param)[0].storage_offset():
        return as_it_is, as_it_is
    shard = gathered.plain_shard_of(param)
    sends = shard.dtype == dtype and _lies_in_words(shard)
    in_words = PlainInWords(param, dtype, sends), WORD, start, nbytes // size
    return in_words if sends else as_it_is, in_words


def _lies_in_words(tensor: Tensor) -> bool:
    """Of tensors of as many bytes as some words have."""
    size = WORD.itemsize
    return tensor.data_ptr() % size == 0 and tensor.storage_offset() * tensor.itemsize % size == 0


def in_place(tensor: Tensor, start: int, ranks: int = 1) -> Part:
    """A tensor of bytes that is copied from, or to, where it lies: as words where these fit.

    tensor: this rank's part, or those of all ranks. start: of a rank's part in a row, in bytes.
    """
    flat, size = tensor.view(-1), WORD.itemsize
    fits = flat.numel() % (ranks * size) == 0 and _lies_in_words(flat) and start % size == 0
    flat = flat.view(WORD) if fits else flat
    return PlaneInPlace(flat, flat), flat.dtype, start, flat.numel() // ranks
