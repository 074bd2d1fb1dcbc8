"""silu(gate) * up as one launch, forward and backward, which keeps its input alone.

Called one by one, torch's functions write and read what lies between, and keep that too. In traced graphs the compiler
makes one kernel of them, and they are left to it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from layoutc.ints.sizes import cdiv
from layoutc.runtime.kernels import launch
from layoutc.runtime.torch_private import traced

_MOST, _WARPS = 4096, 4


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        both = both.contiguous()
        ctx.save_for_backward(both)
        out = both.new_empty((*both.shape[:-1], both.shape[-1] // 2))
        _launch("gated_kernel", both, out, columns=out.shape[-1])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        of_both = torch.empty_like(both)
        _launch("gated_backward_kernel", grad.contiguous(), both, of_both, columns=grad.shape[-1])
        return of_both


def gated(both: Tensor) -> Tensor:
    """(..., 2 * columns), gates first -> silu(gates) * the others, (..., columns), in fp32 and rounded once; in traced
    graphs, and where kernels can't run, by torch's functions."""
    if traced(both) or not launch.usable(both, both.dtype):
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up
    made: Tensor = _Gated.apply(both)  # type: ignore[no-untyped-call]
    return made


def _launch(name: str, *tensors: Tensor, columns: int) -> None:
    from layoutc.runtime.kernels import direct
    from layoutc.runtime.operands import kernels

    tile = min(_MOST, 1 << (columns - 1).bit_length())
    programs = tensors[-1].numel() // tensors[-1].shape[-1] * cdiv(columns, tile)
    constants = direct.Constants((tile, launch.hardware(tensors[0].device)))
    direct.run(getattr(kernels, name), (programs,), (*tensors, columns), _WARPS, None, constants)
