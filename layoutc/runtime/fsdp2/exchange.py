"""Gradient exchange: ranks send each other gradients, and the rank that keeps a sum adds them in fp32, in rank order.

FSDP2 copies bf16 gradients into an fp32 buffer and reduce-scatters it. Here each rank sends every other rank its part:
in backward's dtype, which halves the bytes and keeps numbers and arithmetic; or as codes of a recipe, for a quarter or
an eighth of the bytes. It is installed with FSDP2's `set_custom_reduce_scatter`.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from layoutc.ints.sizes import cdiv
from layoutc.runtime.errors import LayoutError, check_model
from layoutc.runtime.fsdp2.gradient_rows import Turns, in_rows
from layoutc.runtime.fsdp2.replicas import By, Replicas, Sender, scaling_of
from layoutc.runtime.installed import Recipe
from layoutc.runtime.kernels.launch import FLOATS
from layoutc.runtime.kernels.rank_chunks import Chunks
from layoutc.runtime.kernels.rank_sums import Codes, rank_sum
from layoutc.runtime.random_bits import seed_of
from layoutc.runtime.sharding.meeting import meet
from layoutc.runtime.torch_private import local_tensor, no_torch_function, reduce_scatter_single
from layoutc.runtime.torch_private.fsdp2 import Reduced, reduce_among, reductions

NARROW = (torch.bfloat16, torch.float16)
AMONG = 1  # follows the rank in seeds of codes among replicas


class _Kept:
    """The gradients that FSDP2 copies into a buffer, copied lazily.

    So the copy runs on the stream that sends them, overlapping backward. FSDP2 keeps the buffer, and thereby the
    gradients, until that stream is done with it.
    """

    __slots__ = ("__weakref__", "dim", "grads", "values")

    def __init__(self) -> None:
        self.grads: Sequence[Tensor] = ()
        self.dim = 0
        self.values: Tensor | None = None  # in the buffer's dtype, once another operation has read the buffer

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values if there are any, else the gradients' common dtype."""
        return torch.float32 if not self.grads else self.grads[0].dtype if self.values is None else self.values.dtype

    def copied(self, ranks: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Each rank's chunks of the gradients in a row: (ranks, n / ranks)."""
        if not self.grads:
            raise LayoutError(
                "FSDP2 did not copy the gradients into this buffer: this torch reduces them in a way that layoutc "
                "does not know"
            )
        return in_rows(self.grads, ranks, like.numel(), dtype, self.dim)


class GradientBuffer(Tensor):
    """The buffer that FSDP2 allocates and copies gradients into; it keeps them in their own dtype.

    (n,) or (ranks, n / ranks). Any other operation converts them to values in the buffer's dtype, which are then kept.
    """

    kept: _Kept
    ranks: int

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, ranks: int, kept: _Kept
    ) -> GradientBuffer:
        """kept: shared with views."""
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.ranks, made.kept = ranks, kept
        return made

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Handles FSDP2's copy by keeping the gradients, and views of the whole buffer; all else runs on values."""
        if func is torch.ops.fsdp.chunk_cat.default:
            kept: _Kept = kwargs["out"].kept
            kept.grads, kept.dim = tuple(args[0]), args[1]
            return None
        if func is torch.ops.aten.view.default:
            buffer, shape = args
            viewed = torch.empty(buffer.shape, device="meta").view(shape)
            return GradientBuffer(viewed.shape, buffer.dtype, buffer.device, buffer.ranks, buffer.kept)
        args = [one.in_values() if isinstance(one, GradientBuffer) else one for one in args]
        return func(*args, **(kwargs or {}))

    def in_values(self) -> Tensor:
        """Converts the gradients to the buffer's dtype, once, and returns the values."""
        if self.kept.values is None:
            self.kept.values = self.kept.copied(self.ranks, self.dtype, self)
        return self.kept.values.view(self.shape)


class Exchange:
    """A custom reduce-scatter for FSDP2: for one group of parameters, over `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._turns = ranks, Turns(ranks)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of a reduction, or its result."""
        (numel,) = size
        if self._turns.is_result(int(numel)) or not self.takes(dtype):
            return torch.empty(*size, dtype=dtype, device=device)
        return GradientBuffer((int(numel),), dtype, device, self._ranks, _Kept())

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether gradients whose sum has this dtype may be sent differently from FSDP2."""
        return dtype is torch.float32

    def joined(self, grads: Sequence[Tensor], ranks: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The buffer of a reduction, (numel,), filled with gradients."""
        if not self.takes(dtype):
            return in_rows(grads, ranks, numel, dtype).view(numel)
        made = GradientBuffer((numel,), dtype, grads[0].device, ranks, _Kept())
        made.kept.grads = tuple(grads)
        return made

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Computes the rank's part of the sum or the mean, on the current stream. Other operations, and gradients that
        `exchanged` rejects, go through FSDP2's reduce-scatter.
        """
        by = None if async_op or not isinstance(input_tensor, GradientBuffer) else scaling_of(op, self._ranks)
        if by is not None and self.exchanged(output_tensor, cast(GradientBuffer, input_tensor), group, by):
            return None
        self.leaves(input_tensor, op)
        plain = input_tensor.in_values() if isinstance(input_tensor, GradientBuffer) else input_tensor
        work: dist.Work | None = reduce_scatter_single(output_tensor, plain, group=group, op=op, async_op=async_op)
        return work

    def leaves(self, given: Tensor, op: Any) -> None:
        """Called when a reduction falls back to FSDP2's reduce-scatter."""

    def exchanged(self, out: Tensor, buffer: GradientBuffer, group: Any, by: By) -> bool:
        """Exchanges unquantized gradients and sums those received; False for fp32, or without an integer divisor."""
        kept = buffer.kept
        if kept.dtype not in NARROW or by.divisor is None:
            return False
        values = kept.copied(self._ranks, kept.dtype, buffer)
        received = torch.empty_like(values)
        dist.all_to_all_single(received, values, group=group)
        rank_sum(received, out, by.divisor)
        return True


class ExchangeOfCodes(Exchange):
    """An `Exchange` that quantizes gradients for the rank that keeps their sum."""

    def __init__(self, ranks: int, sender: Sender, name: str) -> None:
        """name: the module's, for a warning."""
        super().__init__(ranks)
        self.sender, self._name = sender, name

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether kernels read gradients in this dtype."""
        return dtype in FLOATS

    def exchanged(self, out: Tensor, buffer: GradientBuffer, group: Any, by: By) -> bool:
        """Exchanges codes of gradients and sums the dequantized values; False if kernels can't read the gradients."""
        kept = buffer.kept
        if kept.dtype not in FLOATS:
            return False
        values: Tensor | Chunks | None = kept.values
        if values is None:
            values = Chunks(kept.grads, self._ranks, buffer.numel() // self._ranks)
            if kept.dim or not kept.grads or not self.sender.codes.reads(values):
                values = kept.copied(self._ranks, kept.dtype, buffer)
        if isinstance(values, Tensor):
            values = values.view(self._ranks, -1)
        sent = self.sender.quantized(values)
        del values  # frees memory for `received`
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self.sender.add(received, out, by)
        return True

    def leaves(self, given: Tensor, op: Any) -> None:
        """Warns once why this group's gradients are not exchanged."""
        dtype = given.kept.dtype if isinstance(given, GradientBuffer) else given.dtype
        kind = "PREMUL_SUM by a tensor" if scaling_of(op, self._ranks) is None else "an asynchronous call"
        reason = kind if dtype in FLOATS else f"gradients in {dtype}"
        self.sender.leaves(self._name, "reduce-scatter", reason)


def exchange_gradients(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    replicas: Recipe | None = None,
    across_hosts: bool = False,
    seed: int = 0,
    error_feedback: bool = False,
) -> None:
    """Replaces FSDP2's gradient reduce-scatter: ranks send each other narrow gradients and sum them in fp32.

    Call it after `fully_shard`, on all ranks; it covers all modules of `model` that FSDP2 shards. Parameters may be
    quantized, cast on gather or plain. Sums are in rank order, so the same gradients give the same bytes on any host.

    recipe: a recipe such as "grad_fp8" or "grad_int4" quantizes gradients of any dtype for the rank that keeps their
    sum; an infinite or NaN gradient makes its block of the sum NaN. None: a group whose weights' spec has `reduce:
    RECIPE` sends codes of that recipe. Other groups send bf16 or fp16 gradients unquantized, half of the bytes, if the
    policy's param_dtype is one of these and its reduce_dtype is fp32. With two ranks the sums equal FSDP2's to the bit.
    Gradients accumulated in fp32, without synchronization, are sent in fp32.

    replicas: the recipe with which replicas of a shard (HSDP) send each other these sums, in place of FSDP2's
    all-reduce in reduce_dtype. Each replica sums the codes of all in fp32, in rank order, so all have the same bytes.
    If that sends fewer bytes, each sums a part and sends the result in reduce_dtype. None: FSDP2's all-reduce.

    seed: seeds stochastic rounding, together with the rank, the group, the number of earlier reductions and the
    gradient's position; codes among replicas use different random bits. error_feedback: adds the quantization error to
    the next gradients. It costs each rank 4 bytes per parameter of the whole model, and with `replicas` 4 more per
    parameter of the shard.
    across_hosts: allow groups that span hosts. Every rank sends to every other one. Without a recipe, a host of n ranks
    then sends other hosts up to n / 2 times as much as an fp32 ring would.

    Raises LayoutError on all ranks: for a group that spans hosts, without across_hosts; for a model that FSDP2 does not
    shard; without a recipe, if no gradients are narrower than their sums; with `replicas`, if there are none; and for a
    recipe whose scales depend on more than blocks of a row. Raises ValueError for an unknown recipe.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.exchange_gradients(fully_shard(model), "grad_fp8")
    """
    check_model(model, "exchange_gradients")
    names = {module: name for name, module in model.named_modules()}
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise LayoutError("exchange_gradients: FSDP2 shards no module of this model. Call fully_shard first")
    found = {module: reductions(module) for module in modules}
    codes = {module: _codes_of(names[module], reduced, recipe) for module, reduced in found.items()}
    between = None if replicas is None else Codes(replicas)
    if several := [module for module, reductions in found.items() if len(reductions) > 1]:
        raise LayoutError(
            f"exchange_gradients: parameters of {names[several[0]] or 'the root'} are sharded over several meshes, but "
            "FSDP2 reduces them together. Call fully_shard on separate modules, one for each mesh"
        )
    acts = {
        module: one.over
        for module, reductions in found.items()
        for one in reductions
        if codes[module] is not None or (one.into is torch.float32 and one.dtypes & {*NARROW})
    }
    held = {
        module: one
        for module, reductions in found.items()
        for one in reductions
        if one.replicas is not None and one.replicas.size() > 1
    }
    if between is not None and not held:
        raise LayoutError(
            f"exchange_gradients: replicas={between.layout.name!r}, but no shard of this model has replicas. Call "
            "fully_shard with a mesh of two dims, init_device_mesh(device, (replicas, shards)), or leave out replicas="
        )
    if not acts and between is None:
        raise LayoutError(
            "exchange_gradients has nothing to do: FSDP2 sends this model's gradients in the dtype they have. Call "
            "fully_shard with mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), "
            "or name a recipe of gradients, whose spec has `use: wire`: layoutc.exchange_gradients(model, recipe)"
        )
    hosts = {} if across_hosts else {group: _hosts(group) for group in dict.fromkeys(acts.values())}
    if apart := [(group.size(), count) for group, count in hosts.items() if count > 1]:
        raise LayoutError(
            f"exchange_gradients: {apart[0][0]} ranks on {apart[0][1]} hosts shard together, and each would "
            "send to all others. Shard within hosts (a mesh of two dims, replicate and shard), or pass "
            "across_hosts=True where the hosts' links have room for it"
        )
    for number, (module, group) in enumerate(acts.items()):
        ranks = group.size()
        if ranks > 1 and (by := codes[module]) is not None:
            sender = Sender(by, seed_of(seed, number, dist.get_rank()), error_feedback)
            module.set_custom_reduce_scatter(cast(Any, ExchangeOfCodes(ranks, sender, names[module])))
        elif ranks > 1:
            module.set_custom_reduce_scatter(cast(Any, Exchange(ranks)))
    for number, (module, one) in enumerate(held.items()):
        if between is not None:
            sender = Sender(between, seed_of(seed, number, dist.get_rank(), AMONG), error_feedback)
            reduce_among(module, Replicas(one.replicas, sender, names[module]))
        elif one.among is not one.replicas:
            reduce_among(module, one.replicas)


def _codes_of(name: str, reduced: Sequence[Reduced], recipe: Recipe | None) -> Codes | None:
    """The codes that a group's gradients are sent as, by `recipe` or by its weights' specs; None: not quantized."""
    if recipe is None:
        layouts = [getattr(local_tensor(param), "LAYOUT", None) for one in reduced for param in one.params]
        stated = {layout.reduce: layout.name for layout in layouts if layout is not None and layout.reduce}
        if len(stated) > 1:
            said = " and ".join(f"{weights} has `reduce: {wire}`" for wire, weights in sorted(stated.items()))
            raise LayoutError(
                f"exchange_gradients: parameters of {name or 'the root'} are reduced together, and {said}. Name one "
                f"recipe for all: layoutc.exchange_gradients(model, {min(stated)!r})"
            )
        recipe = next(iter(stated), None)
    return None if recipe is None else Codes(recipe)


class ExplainedReduction(NamedTuple):
    """How the gradients of a parameter group are sent and summed.

    name: its module's name; "" is the root. into: the dtype of sums. way: "reduce-scatter", FSDP2's own, with a
    `reason` if a requested exchange is impossible; "exchange", unquantized; or the recipe's name.
    sends: bytes that a rank sends per step. keeps: bytes of error feedback on each rank. replicas: how many ranks hold
    the same shard. among: how replicas sum: "all-reduce", FSDP2's own, or the recipe's name; "" for one replica.
    sends_among: bytes that a rank sends for that; for an all-reduce, those of a ring.
    """

    name: str
    ranks: int
    into: torch.dtype | None
    way: str
    sends: int
    keeps: int = 0
    reason: str = ""
    replicas: int = 1
    among: str = ""
    sends_among: int = 0

    def __str__(self) -> str:
        """One line of text."""
        because = f": {self.reason}" if self.reason else ""
        keeps = f", {self.keeps} bytes of error feedback" if self.keeps else ""
        into = "" if self.into is None else f" into {self.into}"
        among = f", {self.among} among {self.replicas} replicas, {self.sends_among} bytes" if self.among else ""
        sends = f"over {self.ranks} ranks, {self.sends} bytes{among}"
        return f"{self.name or 'root'}: {self.way}{into} {sends}{keeps}{because}"


def explain_gradients(model: nn.Module) -> list[ExplainedReduction]:
    """Lists how each parameter group's gradients are sent, as set by `exchange_gradients`; runs nothing.

    Frozen parameters and groups of one rank are left out. Raises RuntimeError for an unknown version of FSDP2.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.explain_gradients(fully_shard(model))  # one rank sends nothing
        []
    """
    check_model(model, "explain_gradients")
    found = []
    for name, module in model.named_modules():
        for one in reductions(module):
            ranks, replicas = one.over.size(), 1 if one.replicas is None else one.replicas.size()
            if ranks * replicas == 1 or not one.numel:
                continue
            way, keeps, reason, own = "reduce-scatter", 0, "", max(dtype.itemsize for dtype in one.dtypes)
            size = own if one.into is None else one.into.itemsize
            nbytes = one.numel * size
            if isinstance(one.by, ExchangeOfCodes):
                sender = one.by.sender
                reason, keeps = sender.left, 4 * ranks * one.numel if sender.feeds_back else 0
                if not reason:
                    way, nbytes = sender.codes.layout.name, sender.codes.row(one.numel).nbytes
            elif isinstance(one.by, Exchange) and one.into is None:
                reason = "FSDP2 saw no parameter that trains in the first forward, and adds up gradients as they are"
            elif isinstance(one.by, Exchange):
                way, nbytes = "exchange", one.numel * own
            among, part = "all-reduce" if replicas > 1 else "", 2 * size * cdiv(one.numel, replicas)
            if isinstance(one.among, Replicas):
                reason, keeps = reason or one.among.sender.left, keeps + one.among.keeps(one.numel, size)
                if not one.among.sender.left:
                    among, part = one.among.sender.codes.layout.name, one.among.sends(one.numel, size)
            sends, sends_among = (ranks - 1) * nbytes, (replicas - 1) * part
            line = ExplainedReduction(name, ranks, one.into, way, sends, keeps, reason, replicas, among, sends_among)
            found.append(line)
    return found


def _hosts(group: Any) -> int:
    """The number of hosts that a group's ranks run on. This is a collective of the group."""
    meet(group)
    names: list[Any] = [None] * group.size()
    dist.all_gather_object(names, socket.gethostname(), group=group)
    return len(set(names))
