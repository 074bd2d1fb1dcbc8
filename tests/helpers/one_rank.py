"""FSDP2's hooks in a group of one rank, without FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layoutc.runtime.fsdp2 import hooks


class Mesh:
    """A group of one rank."""

    def size(self) -> int:
        return 1


def gather(shard: Any, which: Any, memory: list[Tensor], out: Any = None) -> Any:
    """The hooks, with outputs that are allocated once, as FSDP2 has them."""
    with hooks.simulate(which, shard.shape, shard.shape[0]):
        inputs, metadata = shard.fsdp_pre_all_gather(Mesh())
        memory[:] = memory or [torch.empty_like(given).flatten() for given in inputs]
        outputs = [held.copy_(given.flatten()).view(given.shape) for held, given in zip(memory, inputs, strict=True)]
        made = shard.fsdp_post_all_gather(tuple(outputs), metadata, shard.dtype, out=out)
    return out if made is None else made[0]
