"""precompute_amaxes: finds the amaxes of all weights that are cast on gather at once, so that no gather waits for
one."""

from __future__ import annotations

from collections import defaultdict
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from layoutc.runtime.cast.tensor import CastOnGather, find_cast
from layoutc.runtime.quantize.amax import reduce_max, shared_amaxes
from layoutc.runtime.sharding import shards


@torch.no_grad()
def precompute_amaxes(model: nn.Module) -> None:
    """Finds the amaxes of all weights of `model` that are cast on gather, with one all-reduce for each process group.

    Optional. Call it on all ranks after optimizer.step(); gathers then reduce nothing until a weight is written again.
    Without it, each gather of a weight whose shards share an amax reduces its own; the bytes are the same. Weights of
    recipes that share no amax are skipped. If you write some shards of a weight below its DTensor and not the others,
    call it again on all ranks.

    torchao's peer is precompute_float8_dynamic_scale_for_fsdp.
    """
    batches: dict[tuple[tuple[int, ...], str], list[CastOnGather]] = defaultdict(list)
    groups: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
    for param in model.parameters():
        tensor = find_cast(param)
        if tensor is not None and tensor.LAYOUT.shares_amax and not tensor.is_meta:
            own_groups, _ = shards.amax_groups(tensor)
            key = tuple(id(group) for group in own_groups)
            groups[key] = own_groups
            batches[key, tensor.device.type].append(tensor)
    for (key, _), tensors in batches.items():
        amaxes, shapes = shared_amaxes([(tensor.QUANTIZED, tensor.as_matrix()) for tensor in tensors])
        news = [tensor._agreed.is_new(tensor, amaxes) for tensor in tensors]
        amaxes = reduce_max(torch.cat([amaxes, *news]), groups[key])
        *pieces, all_new = torch.split(amaxes, [*map(prod, shapes), len(tensors)])
        for tensor, piece, shape, new in zip(tensors, pieces, shapes, all_new.unsqueeze(1), strict=True):
            tensor._agreed.advance(tensor, piece.view(shape), new)
            tensor._agreed.ahead, tensor._agreed.owner = tensor._agreed.of, id(tensor._planes)
