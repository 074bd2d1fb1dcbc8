"""Plain parameters that travel next to one another: into what a rank sends, and out of what all have sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime.captures import capturing, stream_of
from layoutc.runtime.kernels.copies import Copies, copies_in, copies_out
from layoutc.runtime.sharding import gathered
from layoutc.runtime.torch_private import foreach_copy_, keeping_version

_MOST = 16  # places that parameters have lain in, whose launches are kept
Kept = dict[tuple[int, ...], Copies]  # by addresses, and the stream on which a table was copied to the card


@dataclass
class PlainRun:
    """Parameters that have one dtype when they are gathered."""

    params: list[Any]  # FSDPParams
    start: int  # in a rank's row, in bytes
    dtype: torch.dtype
    numels: list[int]  # of a rank
    _in: Kept = field(default_factory=dict)
    _out: Kept = field(default_factory=dict)

    @classmethod
    def of(cls, param: Any, start: int, dtype: torch.dtype, numel: int) -> PlainRun:
        """That of one FSDPParam."""
        return cls([param], start, dtype, [numel])

    def with_next(self, param: Any, numel: int) -> PlainRun:
        """With the one that follows."""
        return PlainRun([*self.params, param], self.start, self.dtype, [*self.numels, numel])

    @property
    def stop(self) -> int:
        """Where they end, in bytes."""
        return self.start + sum(self.numels) * self.dtype.itemsize

    def starts(self) -> list[int]:
        """Where each begins, in elements."""
        return [*accumulate(self.numels[:-1], initial=self.start // self.dtype.itemsize)]

    def fill(self, sent: Tensor) -> None:
        """Copies this rank's parts into its row, (nbytes,) uint8."""
        sources = [gathered.plain_shard_of(param) for param in self.params]
        copies = _kept(self._in, sources, sent.device, lambda: copies_in(sources, self.starts(), self.dtype, sent))
        if copies is not None:
            copies(sent)
            return
        values = sent[self.start : self.stop].view(self.dtype)
        foreach_copy_(list(torch.split_with_sizes(values, self.numels)), sources)

    def arrive(self, received: Tensor) -> None:
        """Allocates and writes the whole parameters, from the rows of all ranks, (ranks * nbytes,) uint8."""
        outputs = [gathered.plain_output_of(param) for param in self.params]
        for output in outputs:
            gathered.allocate(output)
        ranks = outputs[0].numel() // self.numels[0]
        copies = _kept(self._out, outputs, received.device, lambda: copies_out(outputs, self.starts(), ranks, received))
        if copies is not None:
            copies(received)
            return
        values = received.view(ranks, -1)[:, self.start : self.stop].view(self.dtype)
        with keeping_version(*outputs):
            torch.split_with_sizes_copy(values, self.numels, 1, out=[output.view(ranks, -1) for output in outputs])


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
