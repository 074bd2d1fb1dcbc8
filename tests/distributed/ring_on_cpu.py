"""torch's ring attention for context parallelism, on CPUs too.

torch says what flash, efficient and cuDNN attention are on a ring, and its loop over the ring takes any attention that
gives logsumexps; of CPUs' flash attention it says nothing, so that DTensor "does not have a sharding strategy
registered". Here it is told: the loop, what is sent and how results are merged are torch's own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SEQUENCE = 2  # (batch, heads, sequence, values of a head)


@cache
def teach() -> None:
    """Once in a process: from then on context_parallel and _ContextParallel take CPUs' tensors."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    def local(tensors: Any) -> list[Tensor]:
        for tensor in tensors:
            assert tensor.placements == (Shard(SEQUENCE),), tensor.placements
        return [tensor.to_local() for tensor in tensors]

    def spread(tensors: Any, mesh: Any) -> tuple[DTensor, ...]:
        return tuple(DTensor.from_local(one, mesh, [Shard(SEQUENCE)], run_check=False) for one in tensors)

    def forward(op: Any, args: Any, kwargs: Any) -> Any:
        query, key, value, dropout, causal = (*args, *(0.0, False)[len(args) - 3 :])
        assert kwargs.get("attn_mask") is None
        mesh = query.device_mesh
        q, k, v = local((query, key, value))
        found = _attention._templated_ring_attention(
            *(mesh.get_group(), SEQUENCE, op, q, k, v),
            is_causal=causal,
            dropout_p=dropout,
            scale=kwargs.get("scale"),
        )
        return spread(found, mesh)

    def backward(op: Any, args: Any, kwargs: Any) -> Any:
        *tensors, dropout, causal = args
        assert kwargs.get("attn_mask") is None
        mesh = tensors[1].device_mesh
        grad, q, k, v, out, logsumexp = local(tensors)
        found = _attention._templated_ring_attention_backward(
            *(mesh.get_group(), SEQUENCE, op, grad, "grad_out", q, k, v, out, logsumexp, causal),
            dropout_p=dropout,
            scale=kwargs.get("scale"),
        )
        return spread(found, mesh)

    _attention.custom_ops |= {_forward: forward, _backward: backward}
