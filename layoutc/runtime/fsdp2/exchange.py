"""Gradients that FSDP2 reduces in fp32 travel in the dtype in which backward computed them, and are added up in fp32.

FSDP2 copies gradients in bf16 into a buffer in fp32 and reduce-scatters that. Here each rank sends every other one its
part in bf16, half of the bytes, and the rank that keeps the sum adds up in fp32, in the order of ranks: the same
numbers under the same arithmetic. It goes in by FSDP2's `set_custom_reduce_scatter`.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.fsdp2.gradient_rows import CopiesInOneLaunch, Turns, in_rows
from layoutc.runtime.kernels.rank_sums import rank_sum
from layoutc.runtime.sharding import registry
from layoutc.runtime.torch_private import without_torch_function

NARROW = (torch.bfloat16, torch.float16)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the name until 2.12


class _Kept:
    """The gradients that FSDP2 copies into a buffer. The copy is made when it is needed.

    So they are copied on the stream that sends them, beside what backward computes meanwhile. FSDP2 keeps the buffer,
    and with it gradients, until that stream is done with it.
    """

    __slots__ = ("__weakref__", "dim", "grads", "values")

    def __init__(self) -> None:
        self.grads: Sequence[Tensor] = ()
        self.dim = 0
        self.values: Tensor | None = None  # in fp32, once something else was done with the buffer

    @property
    def dtype(self) -> torch.dtype:
        """That of the gradients, which is one; fp32 once there are values in it."""
        return self.grads[0].dtype if self.grads and self.values is None else torch.float32

    def copied(self, ranks: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Each rank's chunks of the gradients in a row: (ranks, n / ranks)."""
        if not self.grads:
            raise LayoutError("gradients were not copied into this buffer: FSDP2 reduces in another way than is known")
        return in_rows(self.grads, ranks, like.numel(), dtype, self.dim)


class GradientBuffer(Tensor):
    """The buffer in fp32 that FSDP2 asks for and copies gradients into; it keeps them in their own dtype.

    (n,) or (ranks, n / ranks). Whatever else is done with it is done with values in fp32, which are kept from then on.
    """

    kept: _Kept
    ranks: int

    @staticmethod
    def __new__(cls, shape: Sequence[int], device: torch.device, ranks: int, kept: _Kept) -> GradientBuffer:
        """kept: what views share."""
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)
        made.ranks, made.kept = ranks, kept
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """FSDP2's view of the buffer as rows, and its copy into them. They are answered here, before autograd and the
        dispatcher, since each of these would ask Python once more."""
        with without_torch_function():
            if func is torch.ops.fsdp.chunk_cat:
                return cls._keep(*args, **kwargs)
            if func is Tensor.view and args[1:] == (args[0].ranks, -1):
                buffer = args[0]
                rows = buffer.ranks, buffer.numel() // buffer.ranks
                return GradientBuffer(rows, buffer.device, buffer.ranks, buffer.kept)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Views of the whole buffer; all else by values."""
        if func is torch.ops.aten.view.default:
            buffer, shape = args
            viewed = torch.empty(buffer.shape, device="meta").view(shape)
            return GradientBuffer(viewed.shape, buffer.device, buffer.ranks, buffer.kept)
        args = [one.in_fp32() if isinstance(one, GradientBuffer) else one for one in args]
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _keep(grads: Sequence[Tensor], dim: int, num_chunks: int, *, out: GradientBuffer) -> None:
        out.kept.grads, out.kept.dim = tuple(grads), dim

    def in_fp32(self) -> Tensor:
        """The values, in fp32 from now on."""
        if self.kept.values is None:
            self.kept.values = self.kept.copied(self.ranks, torch.float32, self)
        return self.kept.values.view(self.shape)


class Exchange:
    """What FSDP2 takes for a reduce-scatter: of one group of parameters, over `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._turns = ranks, Turns(ranks)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of a reduction, or its result."""
        (numel,) = size
        if self._turns.is_result(int(numel)) or dtype is not torch.float32:
            return torch.empty(*size, dtype=dtype, device=device)
        return GradientBuffer((int(numel),), device, self._ranks, _Kept())

    @staticmethod
    def joined(grads: Sequence[Tensor], ranks: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The buffer of a reduction, (numel,), with gradients in it."""
        if dtype is not torch.float32:
            return CopiesInOneLaunch.joined(grads, ranks, numel, dtype)
        made = GradientBuffer((numel,), grads[0].device, ranks, _Kept())
        made.kept.grads = tuple(grads)
        return made

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """The rank's part of the sum or the mean, on the current stream. Other operations, and gradients in fp32, are
        reduce-scattered as FSDP2 would.
        """
        divisor = {dist.ReduceOp.SUM: 1, dist.ReduceOp.AVG: self._ranks}.get(getattr(op, "op", op))
        is_narrow = isinstance(input_tensor, GradientBuffer) and input_tensor.kept.dtype in NARROW
        if not is_narrow or divisor is None or async_op:
            plain = input_tensor.in_fp32() if isinstance(input_tensor, GradientBuffer) else input_tensor
            work: dist.Work | None = _reduce_scatter(output_tensor, plain, group=group, op=op, async_op=async_op)
            return work
        kept = cast(GradientBuffer, input_tensor).kept
        values = kept.copied(self._ranks, kept.dtype, input_tensor)
        received = torch.empty_like(values)
        dist.all_to_all_single(received, values, group=group)
        rank_sum(received, output_tensor, divisor)
        return None


def exchange_gradients(model: nn.Module, *, across_hosts: bool = False) -> None:
    """Makes FSDP2 send gradients in bf16 or fp16 as they are and add them up in fp32, in all modules of `model`.

    Call it after `fully_shard`, on all ranks; parameters may be quantized, cast on gather or plain. It acts where the
    policy's param_dtype is bf16 or fp16 and its reduce_dtype fp32. Half of the bytes travel. Gradients of two ranks are
    those of FSDP2's own reduce-scatter to the bit; of more, sums are in the order of ranks. Gradients that were
    accumulated without synchronization, in fp32, travel in fp32.

    across_hosts: every rank sends to every other one, so that a host of n ranks sends up to n / 2 times as much to
    other hosts as a ring in fp32 would; False refuses that. Raises LayoutError there, on all ranks; for a model that
    FSDP2 does not shard; and where no gradients are narrower than their sums.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise LayoutError("exchange_gradients: FSDP2 shards no module of this model. Call fully_shard first")
    found = {module: registry.reductions(module) for module in modules}
    if several := [module for module, reductions in found.items() if len(reductions) > 1]:
        raise LayoutError(
            f"exchange_gradients: parameters of one {several[0].__class__.__name__} are sharded over several meshes, "
            "where FSDP2 takes one reduce-scatter for all. Call fully_shard on modules of their own for each mesh"
        )
    acts = {
        module: one.over
        for module, reductions in found.items()
        for one in reductions
        if one.into is torch.float32 and one.dtypes & {*NARROW}
    }
    if not acts:
        raise LayoutError(
            "exchange_gradients has nothing to do: FSDP2 sends this model's gradients in the dtype they have. Call "
            "fully_shard with mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        )
    hosts = {} if across_hosts else {group: _hosts(group) for group in dict.fromkeys(acts.values())}
    if apart := [(group.size(), count) for group, count in hosts.items() if count > 1]:
        raise LayoutError(
            f"exchange_gradients: {apart[0][0]} ranks on {apart[0][1]} hosts shard together, and each would "
            "send to all others. Shard within hosts (a mesh of two dims, replicate and shard), or pass "
            "across_hosts=True where the hosts' links have room for it"
        )
    for module, group in acts.items():
        if group.size() > 1:
            module.set_custom_reduce_scatter(cast(Any, Exchange(group.size())))


def _hosts(group: Any) -> int:
    """On how many hosts a group's ranks are: a collective of the group."""
    names: list[Any] = [None] * group.size()
    dist.all_gather_object(names, socket.gethostname(), group=group)
    return len(set(names))
