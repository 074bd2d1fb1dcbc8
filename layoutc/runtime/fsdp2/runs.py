"""Runs: what a group sends as it lies, of one dtype. Copied into what a rank sends, and out of what all have sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from layoutc.runtime.captures import capturing
from layoutc.runtime.kernels.copies import WORD, Copies, copies_in, copies_out
from layoutc.runtime.sharding import gathered
from layoutc.runtime.streams import stream_of
from layoutc.runtime.torch_private import foreach_copy_, keeping_version

_MOST = 16  # places that tensors have lain in, whose launches are kept
Kept = dict[tuple[int, ...], Copies]  # by addresses, and the stream on which a table was copied to the card


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
    """What has arrived of such a parameter, as words: it arrives by the launch that copies planes."""

    def __init__(self, param: Any) -> None:
        self.param = param  # FSDPParam
        self._of: Tensor | None = None  # FSDP2's output, and a view of it
        self._words: Tensor | None = None

    @property
    def source(self) -> Tensor:
        """Of the dtype that arrives."""
        return self.output

    @property
    def output(self) -> Tensor:
        """(bytes of all ranks / 8,)."""
        output = gathered.outputs_of(self.param)[0]
        if output is not self._of or self._words is None:
            with torch.inference_mode(False):  # whose views have no versions
                self._of, self._words = output, output.view(WORD)
        return self._words


class PlaneInPlace(NamedTuple):
    """A plane of a shard, as words."""

    source: Tensor
    output: Tensor


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
    _in: Kept = field(default_factory=dict)
    _out: Kept = field(default_factory=dict)

    def fill(self, sent: Tensor) -> None:
        """Copies this rank's parts into its row, (nbytes,) uint8."""
        sources, starts = [place.piece.source for place in self.places], [place.start for place in self.places]
        copies = _kept(self._in, sources, sent.device, lambda: copies_in(sources, starts, self.dtype, sent))
        if copies is not None:
            copies(sent)
            return
        row = sent.view(self.dtype)
        foreach_copy_([row.narrow(0, place.start, place.numel) for place in self.places], sources)

    def arrive(self, received: Tensor) -> None:
        """Allocates and writes the outputs, from the rows of all ranks, (ranks * nbytes,) uint8."""
        outputs, starts = [place.piece.output for place in self.places], [place.start for place in self.places]
        for output in outputs:
            gathered.allocate(output)
        ranks = outputs[0].numel() // self.places[0].numel
        copies = _kept(self._out, outputs, received.device, lambda: copies_out(outputs, starts, ranks, received))
        if copies is not None:
            copies(received)
            return
        rows = received.view(ranks, -1).view(self.dtype)
        with keeping_version(*outputs):
            for output, place in zip(outputs, self.places, strict=True):
                output.view(ranks, -1).copy_(rows.narrow(1, place.start, place.numel))


def runs_of(pieces: Iterable[tuple[Piece, torch.dtype, int, int]]) -> list[Run] | None:
    """The runs of (piece, dtype that is gathered, start in bytes, elements); None if a piece does not lie at a multiple
    of its elements' size."""
    runs: dict[tuple[torch.dtype, torch.dtype], Run] = {}
    for piece, dtype, start, numel in pieces:
        if start % dtype.itemsize:
            return None
        run = runs.setdefault((piece.source.dtype, dtype), Run(dtype))
        run.places.append(Place(piece, start // dtype.itemsize, numel))
    return list(runs.values())


def arrival_of(param: Any, dtype: torch.dtype, start: int, numel: int) -> tuple[Piece, torch.dtype, int, int]:
    """A plain parameter that arrives, for `runs_of`: as words where these fit, so that it takes no launch of its own.

    start: in the row of a rank, in bytes. numel: of a rank's part.
    """
    size, output, nbytes = WORD.itemsize, gathered.outputs_of(param)[0], numel * dtype.itemsize
    if start % size or nbytes % size or output.storage_offset() * output.itemsize % size:
        return PlainParameter(param), dtype, start, numel
    return PlainInWords(param), WORD, start, nbytes // size


def in_words(source: Tensor, output: Tensor) -> PlaneInPlace | None:
    """A plane that is sent from where it lies, and where it arrives, both as bytes; None if words do not fit."""
    size, flat = WORD.itemsize, source.reshape(-1).view(torch.uint8)
    for one in (flat, output):
        if one.numel() % size or one.storage_offset() % size:
            return None
    if source.data_ptr() % size or source.untyped_storage()._cdata != flat.untyped_storage()._cdata:
        return None
    return PlaneInPlace(flat.view(WORD), output.view(WORD))


def _kept(kept: Kept, tensors: list[Tensor], device: torch.device, make: Callable[[], Copies | None]) -> Copies | None:
    """The launches for tensors that lie where these do; None where there are none."""
    if capturing(device):
        return None
    key = (*map(Tensor.data_ptr, tensors), stream_of(device))
    if (found := kept.get(key)) is None and (made := make()) is not None:
        if len(kept) >= _MOST:
            kept.clear()
        found = kept[key] = made
    return found
