"""The fast path of a group's gradient reduction: FSDP2's own reduction, with less host work.

FSDP2 loops over a group's parameters four times after each backward, and dispatches to the tensor's class whenever it
reads the gradient of a quantized weight. Here whatever does not change between steps is found once. The same bytes are
sent, in the same collective, on the same streams, so ranks may mix both ways. FSDP2 handles everything that is not
plain: gradients that are accumulated, missing or hooked, replicas, offloading, tensor parallelism, and divisors.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup, ReduceScatterState

from layoutc.ints.gathers import reduces_in_few_steps
from layoutc.ints.sizes import cdiv
from layoutc.runtime import callers, streams
from layoutc.runtime.torch_private import changed, without_torch_function

_OF_GROUP = (
    *("_reduce_scatter_process_group", "_reduce_scatter_comm", "_reduce_dtype", "_orig_dtype", "_post_reduce_event"),
    *("reduce_grads", "reshard_after_backward", "gradient_divide_factor", "force_sum_reduction_for_comms", "mesh_info"),
    *("_all_reduce_hook", "_all_reduce_hook_stream", "_partial_reduce_output", "_wait_for_post_backward", "modules"),
)
_OF_PARAM = (
    *("sharded_param", "sharded_size", "contiguous_sharded_stride", "to_sharded_dtensor", "fsdp_placement"),
    *("offload_to_cpu", "is_dtensor", "unsharded_accumulated_grad"),
)
_OF_FACTORS = (
    *("reduce_scatter_group", "all_reduce_group", "reduce_dtype", "device_type", "factor"),
    "force_sum_reduction_for_comms",
)


class Reduction(NamedTuple):
    """What all reductions of a group share. starts: each gradient's offset in the elements that the rank keeps."""

    params: tuple[Any, ...]
    starts: tuple[int, ...]
    numel: int  # elements that a rank keeps, padding included
    dtype: torch.dtype
    op: Any

    def is_of(self, group: FSDPParamGroup, grads: Sequence[Tensor]) -> bool:
        """Whether these gradients are reduced in this dtype."""
        return self.dtype is (group._reduce_dtype or grads[0].dtype)


def reduced_now() -> list[int] | None:
    """The FSDPParams whose gradients are being reduced, by id; they may change where sizes do not. None if none is."""
    if frame := callers.find("torch.distributed.fsdp._fully_shard._fsdp_collectives", "foreach_reduce"):
        return list(map(id, frame.f_locals["fsdp_params"]))
    frame = callers.find(__name__, "reduce")
    return None if frame is None else list(map(id, frame.f_locals["reduction"].params))


def unknown(group: FSDPParamGroup) -> str:
    """The names used here that this torch lacks or has changed; "" if none. In torch 2.11, FSDP2 keeps one reduction in
    flight; later releases keep a configurable number. Call it only after the group was gathered for backward.
    """
    one, several = "reduce_scatter_state", ("reduce_scatter_states", "reduce_scatter_max_input_buffers")
    names = (one,) if hasattr(group.comm_ctx, one) else (*several, "_last_post_reduce_events")
    factors = list(signature(_get_gradient_divide_factors).parameters)
    return changed(
        {
            "ReduceScatterState": ReduceScatterState._fields == ("reduce_scatter_input", "event"),
            "_get_gradient_divide_factors": factors == list(_OF_FACTORS),
            **{name: hasattr(group.comm_ctx, name) for name in ("reduce_scatter_stream", *names)},
            **{name: hasattr(group, name) for name in _OF_GROUP},
            **{name: all(hasattr(param, name) for param in group.fsdp_params) for name in _OF_PARAM},
        }
    )


def gradients_of(group: FSDPParamGroup) -> list[Tensor] | None:
    """The gradients that backward left in a group's gathered weights; None if FSDP2 would do more than reduce them."""
    if group._training_state is not TrainingState.PRE_BACKWARD or not group.reduce_grads:
        return None
    if group.gradient_divide_factor is not None or group.force_sum_reduction_for_comms:
        return None
    if group._all_reduce_hook is not None or group._all_reduce_hook_stream is not None:
        return None
    if group._partial_reduce_output is not None or not hasattr(group._reduce_scatter_comm, "joined"):
        return None
    grads: list[Tensor] = []
    with without_torch_function():
        for param in group.fsdp_params:
            shard, whole = param.sharded_param, getattr(param, "_unsharded_param", None)
            grad = None if whole is None else whole.grad
            if type(grad) is not Tensor or param.unsharded_accumulated_grad is not None:
                return None
            if shard.grad is not None or getattr(shard, "_post_accumulate_grad_hooks", None):
                return None
            grads.append(grad)
    return grads if all(grad.dtype is grads[0].dtype for grad in grads) else None


def reduction_of(group: FSDPParamGroup, grads: Sequence[Tensor]) -> Reduction | None:
    """Plans a group's reduction; None if FSDP2 would do more than reduce gradients over its ranks."""
    params, ranks = tuple(group.fsdp_params), group._reduce_scatter_process_group.size()
    replicas = 1 if type(group.mesh_info) is FSDPMeshInfo else 2  # or any other mesh
    cuts = [(param.fsdp_placement.dim, 2 if param.is_dtensor else 1) for param in params]  # or more parts
    if not reduces_in_few_steps(replicas, cuts) or any(param.offload_to_cpu for param in params):
        return None
    if len(group.modules) > 1 or getattr(group, "_num_param_groups", 1) > 1 or any(not grad.numel() for grad in grads):
        return None
    dtype = group._reduce_dtype or grads[0].dtype
    before, after, op, _ = _get_gradient_divide_factors(
        group._reduce_scatter_process_group, None, dtype, group.device.type, None, False
    )
    if before is not None or after is not None:
        return None
    numels = [cdiv(grad.shape[0], ranks) * (grad.numel() // grad.shape[0]) for grad in grads]
    *starts, numel = accumulate(numels, initial=0)
    return Reduction(params, tuple(starts), numel, dtype, op)


def take(group: FSDPParamGroup) -> None:
    """Clears the gathered weights' gradients, which the caller holds, and reshards if FSDP2 would after backward."""
    group._training_state = TrainingState.POST_BACKWARD
    with without_torch_function():
        for param in group.fsdp_params:
            param._unsharded_param.grad = None
    if group.reshard_after_backward:
        group.reshard()


@torch.no_grad()
def reduce(group: FSDPParamGroup, reduction: Reduction, grads: list[Tensor]) -> None:
    """FSDP2's foreach_reduce, and what its post_backward does before and after it. Empties `grads`."""
    context, handle, over = group.comm_ctx, group.device_handle, group._reduce_scatter_process_group
    current, stream = streams.current(group.device, handle), context.reduce_scatter_stream
    comm: Any = group._reduce_scatter_comm  # has `joined`, which makes what ranks send from gradients
    _wait_for_others(context, current)
    group._wait_for_post_backward()  # type: ignore[no-untyped-call]
    sent = comm.joined(grads, over.size(), reduction.numel * over.size(), reduction.dtype)
    grads.clear()  # may free them: they were copied on this stream, or `sent` holds them
    stream.wait_stream(current)
    with streams.on(stream, handle):
        summed = torch.empty(reduction.numel, dtype=reduction.dtype, device=group.device)
        comm(output_tensor=summed, input_tensor=sent, group=over, op=reduction.op)
        sends = stream.record_event()
        kept = summed if group._orig_dtype is None else summed.to(group._orig_dtype)
        for param, start in zip(reduction.params, reduction.starts, strict=True):
            shard = torch.as_strided(kept, param.sharded_size, param.contiguous_sharded_stride, start)
            param.sharded_param.grad = param.to_sharded_dtensor(shard)
        done = sends if kept is summed else stream.record_event()
    group._post_reduce_event = done
    _note(context, ReduceScatterState(sent, sends), stream, done)


# ------------------------------------------------------------------------------------------ two generations of FSDP2
def _wait_for_others(context: Any, current: Any) -> None:
    """Waits for earlier reductions and frees what they sent, except as many as may overlap the next one."""
    if hasattr(context, "reduce_scatter_state"):
        before, context.reduce_scatter_state = context.reduce_scatter_state, None
        if before is not None and before.event is not None:
            current.wait_event(before.event)
        return
    states = context.reduce_scatter_states
    while len(states) >= context.reduce_scatter_max_input_buffers:
        oldest = states.pop(0)
        if oldest.event is not None:
            current.wait_event(oldest.event)


def _note(context: Any, state: ReduceScatterState, stream: Any, done: Any) -> None:
    """Records a reduction in flight, where FSDP2 looks for it."""
    if hasattr(context, "reduce_scatter_state"):
        context.reduce_scatter_state = state
        return
    context.reduce_scatter_states.append(state)
    context._last_post_reduce_events[stream] = done
