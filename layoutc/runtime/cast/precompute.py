"""precompute_amaxes: computes the amaxes of all cast-on-gather weights at once, so that no gather waits for one."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from layoutc.runtime.cast.shared_amax import measured
from layoutc.runtime.cast.tensor import CastOnGather, find_cast
from layoutc.runtime.errors import check_model
from layoutc.runtime.fsdp2 import hooks
from layoutc.runtime.sharding import gathered, shards
from layoutc.runtime.sharding.meeting import meet
from layoutc.runtime.streams import capturing

_met: WeakSet[dist.ProcessGroup] = WeakSet()  # whose ranks have met at a first call: each call would cost time


@torch.no_grad()
def precompute_amaxes(model: nn.Module) -> None:
    """Computes the amaxes of all weights of `model` that are cast on gather, in one all-reduce a process group.

    Optional. Call it on all ranks after optimizer.step(); gathers then skip their all-reduce until a weight is written
    again. Without it, each gather reduces the amax of each weight whose shards share one; the bytes are the same.
    Weights without a shared amax, or with one for each matrix, are skipped. If you write some shards of a weight below
    its DTensor and not others, call it again on all ranks.

    It does nothing in a step that a CUDA graph captures, where gathers reduce their own. A replay writes weights
    without notice, so call it after the replay and before the next gathers, or not at all. torchao's counterpart is
    precompute_float8_dynamic_scale_for_fsdp.

    At the first call, ranks that others don't join say so. Raises only what the collectives of process groups raise.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.cast_on_gather_(model, "fp8_current")
        ['0.weight']
        >>> layoutc.precompute_amaxes(fully_shard(model))
    """
    check_model(model, "precompute_amaxes")
    gathered_as_values = gathered.weights_of_values() if hooks.holds_values() else {}  # no, after most steps
    tensors = [find_cast(gathered_as_values.get(id(param), param)) for param in model.parameters()]
    sharing = [one for one in tensors if one is not None and one.LAYOUT.shares_amax and not one.is_meta]
    sharing = [one for one in sharing if not (one.LAYOUT.amax_of_matrices or capturing(one._plain.device))]
    for group in shards.process_groups(sharing[0]) if sharing else ():
        if group not in _met:
            meet(group)
            _met.add(group)
    precompute(sharing)


def precompute(sharing: Sequence[CastOnGather]) -> None:
    """The same for weights of recipes that share an amax. Collective."""
    for tensor, amax, new in measured([(tensor, tensor.as_matrix()) for tensor in sharing]):
        tensor._agreed.advance(tensor, amax, new)
        tensor._agreed.ahead, tensor._agreed.owner = tensor._agreed.of, id(tensor.store)
