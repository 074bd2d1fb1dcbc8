"""Runs: tensors of one dtype that a group sends unchanged, copied into a rank's row and out of all ranks' rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.kernels.copies import MOVING, WORD, copies_in, copies_out
from layoutc.runtime.kernels.plans import Plans, place_of
from layoutc.runtime.torch_private import foreach_copy_, keeping_version
from layoutc.runtime.torch_private.fsdp2 import allocate, outputs_of, plain_shard_of


class PlainParameter:
    """A plain parameter; as words, the launch that copies planes also copies it."""

    def __init__(self, param: Any, dtype: torch.dtype, *, in_words: bool = False, sends: bool = True) -> None:
        """param: an FSDPParam. dtype: on the wire. sends: False for words that are only received."""
        self.param, self.dtype, self.in_words, self.sends = param, dtype, in_words, sends
        self._of: Tensor | None = None  # FSDP2's output, and a view of it
        self._words: Tensor | None = None

    @property
    def source(self) -> Tensor:
        """The current shard before it is cast, padded to (numel,); as words, (bytes that a rank sends / 8,). For words
        that are only received, the output, whose elements they have."""
        if not self.sends:
            return self.output
        shard = plain_shard_of(self.param)
        if not self.in_words:
            return shard
        shard = shard if shard.dtype is self.dtype else shard.to(self.dtype)
        return (shard if _lies_in_words(shard) else shard.clone()).view(WORD)

    @property
    def output(self) -> Tensor:
        """(ranks * numel,), or (bytes of all ranks / 8,): FSDP2 frees and allocates its storage."""
        output = outputs_of(self.param)[0]
        if not self.in_words:
            return output
        if output is not self._of or self._words is None:
            with torch.inference_mode(False):  # such views have no version counter
                self._of, self._words = output, output.view(WORD)
        return self._words


class PlaneInPlace(NamedTuple):
    """A plane of a shard, or of the whole weight, as 1-D words or bytes."""

    source: Tensor
    output: Tensor


Piece = PlainParameter | PlaneInPlace  # a tensor that each rank has a part of
Part = tuple[Piece, torch.dtype, int, int]  # of a row: the dtype that is gathered, start in bytes, elements


class Place(NamedTuple):
    """A piece, and its position in each rank's row, in elements."""

    piece: Piece
    start: int
    numel: int


class Run:
    """Pieces with one dtype on the wire, and one before."""

    def __init__(self, dtype: torch.dtype, places: list[Place]) -> None:
        self.dtype, self.places = dtype, places
        self._starts = [place.start for place in places]
        self._plain = [at for at, place in enumerate(places) if isinstance(place.piece, PlainParameter)]
        self._in, self._out = Plans(), Plans()

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
        """Writes outputs from all ranks' rows, (ranks * nbytes,) uint8. Allocates those of plain parameters."""
        outputs = [place.piece.output for place in self.places]
        for at in self._plain:
            allocate(outputs[at])
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
    def _apart(self) -> tuple[list[int], list[int]]:
        """The positions of outputs that move in most gathers, and those of the others. Small ones move, such as plain
        parameters; for large ones, FSDP2 mostly gets the same memory again. A launch assumes that moving outputs are
        aligned to 16 bytes, as separate allocations are."""
        moving = [at for at in self._plain if not self.places[at].piece.output.storage_offset()][:MOVING]
        return moving, [at for at in range(len(self.places)) if at not in moving]


def runs_of(pieces: Iterable[Part]) -> list[Run]:
    """The runs of pieces, each aligned to its element size."""
    runs: dict[tuple[torch.dtype, torch.dtype], list[Place]] = defaultdict(list)
    for piece, dtype, start, numel in pieces:
        runs[piece.source.dtype, dtype].append(Place(piece, start // dtype.itemsize, numel))
    return [Run(dtype, places) for (_, dtype), places in runs.items()]


def plain(param: Any, dtype: torch.dtype, start: int, numel: int) -> tuple[Part, Part]:
    """A plain parameter as it is sent and as it is received: in words where these fit, which saves a launch. If it is
    cast first, or its shard is not made of words, only the received form has words.

    start: in the row of a rank, in bytes. numel: of a rank's part.
    """
    size, nbytes = WORD.itemsize, numel * dtype.itemsize
    as_it_is = PlainParameter(param, dtype), dtype, start, numel
    if start % size or nbytes % size or outputs_of(param)[0].storage_offset():
        return as_it_is, as_it_is
    shard = plain_shard_of(param)
    sends = shard.dtype == dtype and _lies_in_words(shard)
    in_words = PlainParameter(param, dtype, in_words=True, sends=sends), WORD, start, nbytes // size
    return in_words if sends else as_it_is, in_words


def _lies_in_words(tensor: Tensor) -> bool:
    """Of tensors of as many bytes as some words have."""
    size = WORD.itemsize
    return tensor.data_ptr() % size == 0 and tensor.storage_offset() * tensor.itemsize % size == 0


def in_place(tensor: Tensor, start: int, ranks: int = 1) -> Part:
    """A tensor of bytes that is copied in place: as words where these fit.

    tensor: this rank's part, or those of all ranks. start: of a rank's part in a row, in bytes.
    """
    flat, size = tensor.view(-1), WORD.itemsize
    fits = flat.numel() % (ranks * size) == 0 and _lies_in_words(flat) and start % size == 0
    flat = flat.view(WORD) if fits else flat
    return PlaneInPlace(flat, flat), flat.dtype, start, flat.numel() // ranks
