"""silu(gate) * up as one launch, in forward and in backward, which saves only its input.

Torch's separate functions write, read and save what lies between. In traced graphs, the compiler fuses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from layoutc.ints.sizes import cdiv
from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.launch_plan import launched
from layoutc.runtime.operands.of_experts import quantizing, warps_of
from layoutc.runtime.torch_private import traced

_MOST, _WARPS = 4096, 4


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        both = both.contiguous()
        ctx.save_for_backward(both)
        out = both.new_empty((*both.shape[:-1], both.shape[-1] // 2))
        launch_gated(both, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        of_both = torch.empty_like(both)
        launch_gated_backward(grad.contiguous(), both, of_both)
        return of_both


def gated(both: Tensor) -> Tensor:
    """(..., 2 * columns), gates first -> silu(gate) * up, (..., columns), in fp32 and rounded once; in traced graphs,
    and where kernels can't run, by torch's functions."""
    if traced(both) or not launch.usable(both, both.dtype):
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up
    made: Tensor = _Gated.apply(both)  # type: ignore[no-untyped-call]
    return made


def launch_gated(both: Tensor, out: Tensor | None, kernels: Any = None, planes: Sequence[Tensor] = ()) -> None:
    """Writes the product into `out`, or into the codes and scales of a recipe whose rows are blocks."""
    from layoutc.runtime.operands.kernels import gated_kernel
    from layoutc.runtime.triton.batch import DTYPES

    *quantized, quantize = quantizing(kernels, planes, both.dtype)
    _launch(gated_kernel, both, (both, out, *quantized[:2], None, quantized[2]), (DTYPES[both.dtype], quantize))


def launch_gated_backward(
    grad: Tensor,
    both: Tensor,
    of_both: Tensor,
    out: Tensor | None = None,
    kernels: Any = None,
    planes: Sequence[Tensor] = (),
) -> None:
    """Writes the gradient of `both`, with planes also its codes and scales, and recomputes `out`, the product."""
    from layoutc.runtime.operands.kernels import gated_backward_kernel

    *quantized, quantize = quantizing(kernels, planes, both.dtype)
    args = grad, both, of_both, out, *quantized[:2], None, quantized[2]
    _launch(gated_backward_kernel, both, args, (quantize,))


def _launch(kernel: Any, both: Tensor, args: Sequence[Any], constants: Sequence[Any]) -> None:
    columns = both.shape[-1] // 2
    rows, whole = both.numel() // (2 * columns), 1 << (columns - 1).bit_length()
    tile, warps = (min(_MOST, whole), _WARPS) if constants[-1] is None else (whole, warps_of(whole))
    fixed = *constants, tile, launch.hardware(both.device)
    launched(kernel, rows * cdiv(columns, tile), (*args, rows, columns, *fixed), warps)
