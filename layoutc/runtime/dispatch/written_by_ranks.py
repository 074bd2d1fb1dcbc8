"""Collectives that write into quantized tensors, called by code other than DTensor; their schemas don't say so.

All-reduce is in-place arithmetic, such as model averaging: it adds values, and all ranks quantize the same result. The
others receive what one rank sends. Quantizing these values again would not give the sender's bytes, so they are refused
after the rank has taken part; ranks with plain tensors continue. The fallback sends values from quantized tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime import callers, strict
from layoutc.runtime.dispatch.fallback import fallback, given
from layoutc.runtime.dispatch.handlers import Args, Kwargs, copy_
from layoutc.runtime.errors import LayoutError, UnsupportedOperator
from layoutc.runtime.torch_private import c10d_functional, tree_leaves
from layoutc.runtime.weight.tensor import QuantizedTensor

aten = torch.ops.aten
c10d = torch.ops.c10d
_FSDP1 = "torch.distributed.fsdp._flat_param"


def all_reduce_(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """allreduce_, allreduce_coalesced_: of values, in the tensors' dtype; the results are quantized."""
    tensors, *rest = args
    values = [one.dequantize().contiguous() if isinstance(one, QuantizedTensor) else one for one in tensors]
    for one in tensors:
        if isinstance(one, QuantizedTensor):
            strict.count_dequantize(str(func), one.label())
    found = func(values, *rest, **kwargs)
    work = found[1] if isinstance(found, tuple) else found
    if may_wait(func, args, kwargs, values[0]):
        work.wait()
    for one, new in zip(tensors, values, strict=True):
        if one is not new:
            copy_(aten.copy_.default, (one, new), {})
    return (tensors, work) if isinstance(found, tuple) else work


def receive(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Collectives whose first argument is written. Raises UnsupportedOperator if it holds a quantized tensor."""
    found = fallback(func, args, kwargs)
    for one in tree_leaves(args[0]):
        if isinstance(one, QuantizedTensor):
            work = found[-1] if isinstance(found, tuple) else found
            if hasattr(work, "wait") and may_wait(func, args, kwargs, one):
                work.wait()
            raise UnsupportedOperator(
                f"{func}: {one.label()} can't receive values: receive them into torch.empty_like(w.dequantize()) and "
                "copy that into it, which quantizes; or send each of w.planes(), which keeps the bytes"
            )
    return found


def may_wait(func: Any, args: Args, kwargs: Kwargs, tensor: Tensor) -> bool:
    """Whether `work.wait()` may be called.

    On a card, a synchronous collective runs on the caller's stream, and its work is a Python object around a null
    pointer: waiting for that crashes the process.
    """
    asked = next((value for argument, value in given(func, args, kwargs) if argument.name == "async_op"), None)
    return tensor.device.type == "cpu" or asked is None or bool(asked)


def refuse_flat_parameters(pieces: Any) -> None:
    """Raises LayoutError if FSDP1 joins weights into one flat parameter, which would train without a recipe."""
    if callers.is_called_from(_FSDP1):
        label = next(one.label() for one in pieces if hasattr(one, "LAYOUT"))
        raise LayoutError(
            f"FullyShardedDataParallel (FSDP1) joins weights into flat parameters of plain values, and would train "
            f"{label} without its recipe: shard with torch.distributed.fsdp.fully_shard (FSDP2; in accelerate, "
            "fsdp_version: 2)"
        )


_RECEIVE = (
    *("recv_", "recv_any_source_", "reduce_", "gather_", "alltoall_", "alltoall_base_", "allgather_"),
    *("_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_"),
    *("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
)
#: Of c10d, all whose first argument is written but broadcast_ and scatter_; and functional ones in place.
WRITES: dict[Any, Callable[..., Any]] = {
    c10d.allreduce_.default: all_reduce_,
    c10d.allreduce_coalesced_.default: all_reduce_,
    **{getattr(c10d, name).default: receive for name in _RECEIVE if hasattr(c10d, name)},
    **{
        getattr(c10d_functional, name).default: receive
        for name in ("all_reduce_", "all_reduce_coalesced_", "broadcast_")
        if hasattr(c10d_functional, name)
    },
}
