"""Full state dicts that rank 0 broadcasts to plain buffers of other ranks, as torch and accelerate do.

These buffers come from `torch.empty`, with a weight's shape and dtype: one tensor, where a quantized weight has several
planes. They receive the weight's values. Quantizing these again would not give the weight's bytes, so ranks that copy
them into quantized shards ask one another who sent the values, and get the bytes.

Until values are copied or assigned, the other ranks run only torch's code. Where that happens, with all ranks, is read
from the call stack (`callers`): torch gives no other sign.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layoutc.runtime import callers, torch_private
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.quantize import weights
from layoutc.runtime.sharding import meshes
from layoutc.runtime.sharding.meshes import with_local
from layoutc.runtime.storage.store import Writes
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight.tensor import QuantizedTensor

Slices = tuple[slice, ...]
_sent: weakref.WeakValueDictionary[int, Writes] = weakref.WeakValueDictionary()  # of live weights, by id


# ------------------------------------------------------------------------------------------------------------- the send
def among_quantized() -> bool:
    """Whether all ranks broadcast quantized tensors, as DTensor and ZeroRedundancyOptimizer do."""
    asks = callers.of_collective()
    return asks is None or asks.startswith(("torch.distributed.tensor", "torch.distributed.optim"))


def send_values(func: Any, tensor: QuantizedTensor, rest: Sequence[Any], kwargs: Mapping[str, Any], waits: bool) -> Any:
    """c10d's broadcast_ of a quantized tensor to plain ones: its values, in its shape and dtype. Returns the work.

    Raises LayoutError on ranks that receive into a quantized tensor, after they have taken part; and on the rank that
    sends to them, unless torch or accelerate makes the call. Plain ranks can't be asked, so quantized ones write to the
    ranks' store before they take part; gloo has sent only when its next ranks receive. On a card the note may be late.
    """
    group, root = dist.ProcessGroup.unbox(rest[0]), rest[1]
    refused = f"layoutc/quantized/{group.group_name}/{torch_private.collectives_so_far(group)}"
    if group.rank() == root:
        work = func([tensor.dequantize().contiguous()], *rest, **kwargs)[1]
        by_hand = not (callers.of_collective() or "").startswith(("torch.", "accelerate."))
        if by_hand and waits:
            work.wait()
        if by_hand and torch_private.store_of_all().check([refused]):
            raise LayoutError(_refusal(tensor))
        _remember(tensor)
        return work
    torch_private.store_of_all().set(refused, "")
    work = func([torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)], *rest, **kwargs)[1]
    if waits:
        work.wait()
    raise LayoutError(_refusal(tensor))


def _refusal(tensor: QuantizedTensor) -> str:
    return (
        f"{tensor.label()}: a broadcast sends values, and needs plain tensors on all other ranks; to send the bytes, "
        "call distribute_tensor(weight, mesh, [Replicate()]) on all ranks"
    )


def _remember(tensor: QuantizedTensor) -> None:
    if tensor.store.halo.rows or tensor.transposed or isinstance(tensor, nn.Parameter):
        return
    whole = type(tensor)(
        tensor.store.planes, tensor.shape, tensor.dtype, matrix=tensor.store.matrix, orientations=tensor.store.declared
    )
    whole.weight_name = tensor.weight_name
    tensor.sent = tensor.store.writes.sent = whole
    _sent[id(tensor.store.writes)] = tensor.store.writes


# ---------------------------------------------------------------------------------------------------------- the arrival
def arrived(target: QuantizedTensor, source: Tensor) -> Tensor:
    """What is copied into a tensor: `source`, or, if rank 0 has broadcast it, the bytes that it was dequantized from.

    Collective if torch copies parts of a broadcast weight into shards: all ranks do.
    """
    frame = callers.caller()
    if frame is None or frame.f_globals.get("__name__") != "torch.distributed._state_dict_utils":
        return source
    param = frame.f_locals.get("local_state")
    if not isinstance(param, DTensor) or not isinstance(local := local_tensor(param), QuantizedTensor):
        return source
    return received(param, target, source) if local.store.planes is target.store.planes else source


def received(param: DTensor, like: QuantizedTensor, found: Tensor) -> Tensor:
    """What a shard of `param` gets: its part of the quantized weight that a rank has sent, else `found`.

    like: the shard, with its recipe and planes. found: its part as received. Collective over the ranks of `param`.
    """
    mesh = param.device_mesh
    groups = [mesh.get_group(mesh_dim) for mesh_dim in range(mesh.ndim)]
    return _exchanged(groups, mesh.device_type, meshes.slices_of(param), tuple(param.shape), like, found)


def _exchanged(
    groups: Sequence[dist.ProcessGroup],
    device: str,
    slices: Slices,
    shape: tuple[int, ...],
    like: QuantizedTensor,
    found: Tensor,
) -> Tensor:
    """As `received`, along each group in turn, until all ranks of the mesh have the planes."""
    whole = _whole(like, found, slices, shape)
    for group in groups:
        described: list[Any] = [None] * group.size()
        mine = None if whole is None else (whole.LAYOUT.layout_id, tuple(whole.store.planes))
        dist.all_gather_object(described, mine, group=group)
        sources = [rank for rank, one in enumerate(described) if one is not None]
        if not sources or group.size() == 1:
            continue
        layout_id, names = described[sources[0]]
        lacking = [name for name in like.store.planes if name not in names]
        if layout_id == like.LAYOUT.layout_id and lacking:
            raise LayoutError(f"{like.label()}: the weight that was broadcast lacks {', '.join(lacking)}")
        if layout_id != like.LAYOUT.layout_id:  # another recipe: its values, which all ranks have
            continue
        planes = {}
        for name, facts in like.LAYOUT.planes(prod(shape[:-1]), shape[-1]).items():
            if name not in like.store.planes:
                continue
            if whole is not None:
                planes[name] = whole.store.planes[name].to(device).contiguous()
            else:
                planes[name] = torch.empty(facts.shape, dtype=facts.dtype, device=device)
            source = dist.get_global_rank(group, sources[0])
            dist.broadcast(planes[name].view(-1).view(torch.uint8), source, group=group)
        whole = type(like)(planes, shape, like.dtype, orientations=like.store.declared)
    if whole is None or whole.LAYOUT.layout_id != like.LAYOUT.layout_id:
        return found.dequantize(found.dtype) if isinstance(found, QuantizedTensor) else found
    whole.weight_name = like.weight_name
    return _cut(whole, slices)


def _cut(whole: Tensor, slices: Slices) -> Tensor:
    """The slices of a weight, as a view."""
    for dim, (part, size) in enumerate(zip(slices, tuple(whole.shape), strict=True)):
        if (part.start, part.stop) != (0, size):
            whole = whole.narrow(dim, part.start, part.stop - part.start)
    return whole


def _whole(like: QuantizedTensor, found: Tensor, slices: Slices, shape: tuple[int, ...]) -> QuantizedTensor | None:
    """The broadcast weight of that shape of which `found`, quantized or values, is a part.

    It is found by values: a weight may be loaded under another name, as below a wrapper, or have none, like the result
    of a recipe's quantize(). An empty part is found by name.
    """
    if isinstance(found, QuantizedTensor):
        return found.sent  # type: ignore[no-any-return]
    for writes in list(_sent.values()):
        whole = writes.sent
        is_like = whole is not None and whole.LAYOUT.layout_id == like.LAYOUT.layout_id
        if not is_like or (tuple(whole.shape), whole.dtype) != (shape, found.dtype):
            continue
        if not found.numel() and whole.weight_name != like.weight_name:
            continue
        values = _cut(whole, slices)
        values = values.dequantize() if isinstance(values, QuantizedTensor) else values
        if values.shape == found.shape and torch.equal(values, found.to(values.device)):
            return whole  # type: ignore[no-any-return]
    return None


# -------------------------------------------------------------------------------------------------------------- modules
def take_sent(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
    """A load_state_dict hook: quantizes assigned values, and gets the bytes of broadcast ones.

    Assigned weights take over the mode of those that they replace. Collective over the ranks of sharded weights.
    """
    assigns = bool(metadata.get("assign_to_params_buffers", False))
    for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
        key, like = f"{prefix}{name}", local_tensor(weight)
        if not isinstance(like, QuantizedTensor):
            continue
        _take(state, key, weight, like, assigns)
        found = state.get(key)
        held = local_tensor(found) if assigns and isinstance(found, Tensor) else None
        if isinstance(found, Tensor) and isinstance(held, QuantizedTensor) and held.own_products != like.own_products:
            with torch.no_grad():
                chosen = held.alias()
                chosen.own_products = like.own_products
                state[key] = with_local(found, chosen)


def _take(state: dict[str, Any], key: str, weight: Tensor, like: QuantizedTensor, assigns: bool) -> None:
    found = state.get(key)
    values = local_tensor(found) if isinstance(found, Tensor) else None
    if values is None or not values.is_floating_point() or values.is_meta:
        return
    if values.shape != like.shape or isinstance(found, DTensor) != isinstance(weight, DTensor):
        return
    is_plain = type(values) in (Tensor, nn.Parameter)
    with torch.no_grad():
        if isinstance(found, DTensor):
            if assigns and (is_plain or getattr(values, "sent", None) is not None):
                state[key] = with_local(found, _as_shard(like, received(found, like, values.detach())))
            return
        if _is_broadcast():
            slices = tuple(slice(0, size) for size in values.shape)
            world: Any = dist.group.WORLD
            values = _exchanged([world], values.device.type, slices, tuple(values.shape), like, values.detach())
            state[key] = _as_shard(like, values) if assigns else values
        elif assigns and is_plain:
            state[key] = _as_shard(like, values.detach())


def _as_shard(like: QuantizedTensor, found: Tensor) -> Tensor:
    """A part with its own planes; plain values are quantized."""
    return found.clone() if isinstance(found, QuantizedTensor) else weights.replacement(like, found)


def _is_broadcast() -> bool:
    """Whether torch is loading what rank 0 broadcast to all ranks of the default group."""
    frame = callers.find("torch.distributed.checkpoint.state_dict", "_load_model_state_dict")
    info = frame.f_locals.get("info") if frame is not None else None
    return bool(getattr(info, "broadcast_from_rank0", False))


# Modules are pickled with their hooks, by name.
take_sent.__module__ = "layoutc.pickled"
