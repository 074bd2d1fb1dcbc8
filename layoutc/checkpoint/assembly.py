"""Assembles tensors from a checkpoint's pieces on the host, and writes the results into the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from layoutc.checkpoint.common import narrowing
from layoutc.runtime.errors import DamagedError, LayoutError
from layoutc.runtime.optim.foreign_states import as_recipe
from layoutc.runtime.quantize import weights
from layoutc.runtime.quantize.block_edges import check_whole_blocks
from layoutc.runtime.sharding import shards
from layoutc.runtime.storage.pending_writes import check_whole
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight import stored_form
from layoutc.runtime.weight.padding import NOT_PADDED
from layoutc.runtime.weight.tensor import QuantizedTensor


@dataclass
class Destination:
    """This rank's shard of a tensor, and the new value that is assembled for it from the checkpoint's pieces."""

    name: str
    live: Tensor  # this rank's shard
    convert: bool  # whether other precisions and recipes are accepted
    value: Tensor | None = None
    missing: int = 0  # elements that no piece has supplied yet

    def __post_init__(self) -> None:
        self.live = as_recipe(self.live)  # of torchao's, which keeps its bytes
        self.missing = self.live.numel()

    @property
    def requantizes(self) -> bool:
        """True if plain values go into a quantized weight: then ranks must share amaxes."""
        return isinstance(self.live, QuantizedTensor) and not isinstance(self.value, QuantizedTensor)

    def take(self, source: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Adds a piece: source has the shape `lengths` and belongs at `offsets` of the shard.

        Raises LayoutError if the precision or layout differs from the shard's and `convert` is off, if the weight can't
        be quantized in place, if pieces were not quantized together, or if finite values overflow the shard's dtype.
        """
        self._check_kind(source)
        if not self._is_same(source):
            narrowing.check_holds(self.name, source, self.live.dtype)
        if isinstance(self.live, QuantizedTensor) and not isinstance(source, QuantizedTensor):
            source = source if source.dtype in weights.FLOATS else source.to(torch.float32)
        self.missing -= prod(lengths)
        same = self._is_same(source)
        if tuple(lengths) == tuple(self.live.shape) and (same or not isinstance(source, QuantizedTensor)):
            self.value = source
            return
        if self.value is None:
            self.value = self._empty(source, same)
        if isinstance(self.value, QuantizedTensor) and not same:
            raise DamagedError(f"{self.name}: its pieces have different layouts; save it again")
        into = self.value
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            into = into.narrow(dim, offset, length)
        into.copy_(source)

    def check_complete(self) -> None:
        """Raises DamagedError if the checkpoint lacks part of the tensor."""
        if self.missing:
            raise DamagedError(f"{self.name}: the checkpoint lacks {self.missing} of {self.live.numel()} elements")
        if isinstance(self.value, QuantizedTensor):
            check_whole(self.value.store, self.value.label())

    def commit(self) -> None:
        """Writes the new value into the model. All checks have passed by now."""
        if self.value is not None:
            self.live.copy_(self.value)

    def _is_same(self, source: Tensor) -> bool:
        return (
            isinstance(source, QuantizedTensor)
            and isinstance(self.live, QuantizedTensor)
            and source.LAYOUT.layout_id == self.live.LAYOUT.layout_id
        )

    def _empty(self, source: Tensor, same: bool) -> Tensor:
        """Host memory for the new value: the shard's class if the layouts match, else a plain tensor."""
        live = self.live
        if same and isinstance(live, QuantizedTensor):
            planes = {n: torch.zeros(p.shape, dtype=p.dtype, device="cpu") for n, p in live.store.planes.items()}
            value = live.with_planes(planes)
            value.padding = NOT_PADDED
            return value
        if isinstance(source, QuantizedTensor):
            dtype = torch.float32 if isinstance(live, QuantizedTensor) else live.dtype
        else:
            dtype = source.dtype
        return torch.empty(live.shape, dtype=dtype, device="cpu")

    def _check_kind(self, source: Tensor) -> None:
        live, theirs, ours = self.live, _layout(source), _layout(self.live)
        if theirs is None and ours is None:
            if not _casts(source.dtype, live.dtype):
                raise LayoutError(f"{self.name}: {_kind(source)} in the checkpoint can't become {_kind(live)}")
            return
        if isinstance(source, QuantizedTensor) and isinstance(live, QuantizedTensor):
            if theirs == ours:
                lacking = [name for name in live.store.planes if name not in source.store.planes]
                if lacking:
                    raise LayoutError(
                        f"{self.name}: the checkpoint lacks its {', '.join(lacking)}, which the model holds"
                    )
                return
            what = stored_form.difference(stored_form.describe(source.LAYOUT), stored_form.describe(live.LAYOUT))
            if not self.convert:
                raise LayoutError(
                    f"{self.name} has layout {theirs} in the checkpoint and {ours} in the model: {what}; convert=True "
                    "dequantizes it and quantizes it again"
                )
            _check_takes_values(live)
            return
        plain = live if isinstance(source, QuantizedTensor) else source
        if not plain.is_floating_point() or not _casts(plain.dtype, torch.float32):
            raise LayoutError(f"{self.name}: {_kind(source)} in the checkpoint can't become {_kind(live)}")
        if not self.convert:
            how = "dequantizes it" if isinstance(source, QuantizedTensor) else "quantizes it"
            raise LayoutError(
                f"{self.name} is {_kind(source)} in the checkpoint and {_kind(live)} in the model; convert=True {how}"
            )
        if isinstance(live, QuantizedTensor):
            _check_takes_values(live)


def requantize(live: QuantizedTensor, destinations: Sequence[Destination]) -> None:
    """Quantizes a shard's new values. Collective over the weight's shards; a rank without rows has no values."""
    values = [one.value for one in destinations if one.value is not None and one.value.shape == live.shape]
    plain = values[0] if values else torch.zeros(live.shape, device="cpu")
    live.copy_(plain.dequantize(torch.float32) if isinstance(plain, QuantizedTensor) else plain)


def local_of(value: object) -> Tensor | None:
    """This rank's part of a state dict entry; None for plain values."""
    if isinstance(value, DTensor):
        return local_tensor(value)
    return value if isinstance(value, Tensor) else None


def _check_takes_values(live: QuantizedTensor) -> None:
    """Raises LayoutError if the weight can't be quantized. `copy_` would raise too, but after other writes."""
    live.check_writable()
    if live.transposed:
        raise LayoutError(f"{live.label()} is transposed: load into the weight itself")
    check_whole_blocks(live, shards.row_sharding(live))
    weights.check_out(live.LAYOUT, live, live, None, alone=not shards.amax_groups(live)[0])


@cache
def _casts(source: torch.dtype, to: torch.dtype) -> bool:
    """True if torch converts one dtype to the other without losing fractions or imaginary parts."""
    has_fractions = to.is_floating_point or to.is_complex
    lossy = (source.is_complex and not to.is_complex) or (source.is_floating_point and not has_fractions)
    try:
        return source == to or (not lossy and torch.empty(1, dtype=source, device="cpu").to(to).dtype == to)
    except (RuntimeError, TypeError):  # torch can't convert 4-bit codes
        return False


def _layout(tensor: Tensor) -> str | None:
    return tensor.LAYOUT.layout_id if isinstance(tensor, QuantizedTensor) else None


def _kind(tensor: Tensor) -> str:
    if isinstance(tensor, QuantizedTensor):
        return f"{tensor.LAYOUT.name} (layout {tensor.LAYOUT.layout_id})"
    return str(tensor.dtype).removeprefix("torch.")
