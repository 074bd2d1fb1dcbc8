"""What a recipe's package offers as functions: `quantize` and `quantize_buffers`, for its class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from layoutc.runtime.facts import Layout
from layoutc.runtime.quantize import weights
from layoutc.runtime.weight.tensor import QuantizedTensor

T = TypeVar("T", bound=QuantizedTensor)


class Quantize(Protocol[T]):
    """A recipe's `quantize`."""

    def __call__(
        self,
        x: Tensor,
        *,
        orientations: Sequence[str] | None = None,
        amax: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
        out: T | None = None,
    ) -> T:
        """See `functions`."""


class QuantizeBuffers(Protocol):
    """A recipe's `quantize_buffers`."""

    def __call__(
        self,
        x: Tensor,
        *,
        orientations: Sequence[str] | None = None,
        amax: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
        swizzled: bool = False,
    ) -> dict[str, Tensor]:
        """See `functions`."""


def functions(cls: type[T]) -> tuple[Quantize[T], QuantizeBuffers]:
    """A recipe's `quantize` and `quantize_buffers`, whose docstrings say what it accepts."""

    def quantize(
        x: Tensor,
        *,
        orientations: Sequence[str] | None = None,
        amax: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
        out: T | None = None,
    ) -> T:
        made = weights.quantize(cls, x, orientations=orientations, amax=amax, group=group, out=out)
        assert isinstance(made, cls)
        return made

    def quantize_buffers(
        x: Tensor,
        *,
        orientations: Sequence[str] | None = None,
        amax: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
        swizzled: bool = False,
    ) -> dict[str, Tensor]:
        return weights.quantize_buffers(cls, x, orientations=orientations, amax=amax, group=group, swizzled=swizzled)

    quantize.__doc__ = f"""(..., k) in fp32, bf16 or fp16 -> the same shape as {cls.__name__}, of x's dtype by default.

    orientations: those to hold, by default all: {", ".join(cls.LAYOUT.orientations)}.
    {_amax_text(cls.LAYOUT)}
    out: overwritten in place and returned.

    Raises ValueError for shapes {_refused_text(cls.LAYOUT)}, TypeError for other dtypes.
    """
    quantize_buffers.__doc__ = """What `quantize(x, ...).buffers(swizzled=...)` gives, without a tensor between.

    For activations and gradients; in one launch, where the recipe's kernels can. Raises as quantize, and ValueError
    for `swizzled` where the spec states no swizzle.
    """
    for function in (quantize, quantize_buffers):
        function.__module__, function.__qualname__ = cls.__module__, function.__name__
    return quantize, quantize_buffers


def _amax_text(layout: Layout) -> str:
    if not layout.shares_amax:
        return "amax must be None, and group changes nothing: no scale depends on other shards."
    shape = "(1,)" if layout.amax_columns is None else f"(1, blocks of {layout.amax_columns} columns)"
    text = f"amax: {shape} fp32, where it is known; else that of x, the largest over `group` where one is given."
    return f"{text} The scale follows the history of `out`." if layout.history else text


def _refused_text(layout: Layout) -> str:
    if layout.multiple_m == layout.multiple_k == 1:
        return "of fewer than 2 dims"
    return f"whose m and k are not multiples of {layout.multiple_m} and {layout.multiple_k}"
