"""Sums gradients sent as codes, over the ranks of a shard group or over replicas of a shard (HSDP).

FSDP2 all-reduces a rank's sums over replicas. Here each replica sends codes of them, and all replicas add the same
codes in fp32 and in rank order, so all have the same bytes. If that sends fewer bytes, each replica sums a part and
sends the result to the others. It replaces the process group that FSDP2 passes to its all-reduce.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from layoutc.ints.gathers import codes_travel_whole
from layoutc.ints.sizes import cdiv, up
from layoutc.runtime.kernels.launch import FLOATS
from layoutc.runtime.kernels.rank_chunks import Chunks
from layoutc.runtime.kernels.rank_sums import Codes, scaling
from layoutc.runtime.torch_private import all_gather_single
from layoutc.runtime.torch_private.reductions import reduced_now


class By(NamedTuple):
    """The number that divides or multiplies a sum over ranks. divisor: that number if it is an integer divisor."""

    number: float
    divides: bool
    divisor: int | None


def scaling_of(op: Any, ranks: int) -> By | None:
    """The scaling of a torch reduction; None if it is not a sum, or its factor is a tensor."""
    kind = getattr(op, "op", op)
    if kind in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        divisor = 1 if kind == dist.ReduceOp.SUM else ranks
        return By(*scaling(divisor), divisor)
    factor = op.__getstate__()[1] if kind == dist.ReduceOp.PREMUL_SUM else None
    return By(factor, False, None) if isinstance(factor, float) else None


class Sender:
    """Quantizes what a rank sends for a group. Its random bits and error feedback carry over between reductions."""

    def __init__(self, codes: Codes, seed: int, error_feedback: bool) -> None:
        """seed: for the random bits of this rank and group."""
        self.codes, self.feeds_back, self.left = codes, error_feedback, ""
        self.rest: Tensor | None = None  # the accumulated quantization error, with error feedback
        self._rest_of: list[int] | None = None  # the parameters that it is of, by id
        self._seed = seed
        self._seed_there: Tensor | None = None  # on the group's device

    def quantized(self, values: Tensor | Chunks) -> Tensor:
        """(rows, n) contiguous, or chunks that the codes can read -> codes of each row, (rows, nbytes) uint8."""
        like, shape = (values, values.shape) if isinstance(values, Tensor) else (values.grads[0], values[1:])
        if self._seed_there is None:
            self._seed_there = torch.full((1,), self._seed, dtype=torch.int64, device=like.device)
        if self.feeds_back and (self.rest is None or (self.rest.shape, self._rest_of) != (shape, reduced_now())):
            self.rest = torch.zeros(shape, dtype=torch.float32, device=like.device)
            self._rest_of = reduced_now()
        return self.codes.quantize(values, self._seed_there, self.rest)

    def add(self, rows: Tensor, out: Tensor, by: By) -> None:
        """Sums the codes of each rank into `out`, and advances the random bits."""
        self.codes.add(rows, out, by.number, by.divides, self._seed_there)

    def leaves(self, name: str, instead: str, reason: str) -> None:
        """Warns once why FSDP2 reduces a group's gradients instead, and keeps the reason for `explain_gradients`."""
        if not self.left:
            of = f"of {name}" if name else "of the root"
            warnings.warn(
                f"exchange_gradients: gradients {of} are reduced by FSDP2's own {instead}, not sent as "
                f"{self.codes.layout.name}: {reason}",
                stacklevel=2,
            )
        self.left = reason


class Replicas:
    """Replaces the process group of replicas that FSDP2 calls for an all-reduce."""

    def __init__(self, group: Any, sender: Sender, name: str) -> None:
        """group: the process group itself. name: the module's, for a warning."""
        self.group, self.sender, self._name = group, sender, name

    def size(self) -> int:
        """The number of replicas."""
        return int(self.group.size())

    def rank(self) -> int:
        """This rank's replica."""
        return int(self.group.rank())

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Sums or averages one tensor, (n,), in place, on the current stream. Other operations, and dtypes that kernels
        don't read, go through FSDP2's all-reduce."""
        (values,) = tensors
        by = scaling_of(opts.reduceOp, self.size())
        if by is None or values.dtype not in FLOATS or opts.asyncOp:
            kind = "an operation other than a sum" if by is None else f"gradients in {values.dtype}"
            self.sender.leaves(self._name, "all-reduce", "an asynchronous call" if opts.asyncOp else kind)
            return self.group.allreduce(tensors, opts)
        self.add_up(values, by)
        return None

    def part(self, n: int, itemsize: int) -> int:
        """How many of n sums each replica computes for all; 0 if every replica computes all."""
        row, part = self.sender.codes.row, up(cdiv(n, self.size()), self.sender.codes.layout.multiple_k)
        return 0 if codes_travel_whole(row(n).nbytes, row(part).nbytes, part * itemsize) else part

    def sends(self, n: int, itemsize: int) -> int:
        """Bytes that a rank sends to each other rank to sum n values."""
        part = self.part(n, itemsize)
        return self.sender.codes.row(part or n).nbytes + part * itemsize

    def keeps(self, n: int, itemsize: int) -> int:
        """Bytes of error feedback on each rank."""
        return 4 * (self.size() * self.part(n, itemsize) or n) if self.sender.feeds_back else 0

    def add_up(self, values: Tensor, by: By) -> None:
        """Replaces values, (n,) contiguous, by their sums over replicas."""
        n, ranks = values.numel(), self.size()
        part = self.part(n, values.element_size())
        if not part:
            sent = self.sender.quantized(values.view(1, n))
            received = torch.empty(ranks, sent.shape[1], dtype=sent.dtype, device=sent.device)
            all_gather_single(received.view(-1), sent.view(-1), group=self.group)
            self.sender.add(received, values, by)
            return
        sent = self.sender.quantized(F.pad(values, (0, ranks * part - n)).view(ranks, part))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        del sent  # frees memory for `sums`
        sums = values.new_empty(ranks, part)
        own = sums[self.rank()]
        self.sender.add(received, own, by)
        all_gather_single(sums.view(-1), own, group=self.group)
        values.copy_(sums.view(-1)[:n])
