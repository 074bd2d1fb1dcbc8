"""The functions of a recipe's package, `quantize` and `quantize_buffers`, made for its class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from layoutc.runtime.facts import Layout
from layoutc.runtime.quantize import weights
from layoutc.runtime.random_bits import Seed
from layoutc.runtime.weight.tensor import QuantizedTensor

T = TypeVar("T", bound=QuantizedTensor)


class Quantize(Protocol[T]):
    """The type of a recipe's `quantize`."""

    def __call__(
        self,
        x: Tensor,
        *,
        orientations: Sequence[str] | None = None,
        amax: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
        out: T | None = None,
        seed: Seed | None = None,
    ) -> T:
        """See `functions`."""


class QuantizeBuffers(Protocol):
    """The type of a recipe's `quantize_buffers`."""

    def __call__(
        self,
        x: Tensor,
        *,
        orientations: Sequence[str] | None = None,
        amax: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
        swizzled: bool = False,
        seed: Seed | None = None,
    ) -> dict[str, Tensor]:
        """See `functions`."""


def functions(cls: type[T]) -> tuple[Quantize[T], QuantizeBuffers]:
    """A recipe's `quantize` and `quantize_buffers`. Their docstrings say what the recipe accepts."""

    def quantize(
        x: Tensor,
        *,
        orientations: Sequence[str] | None = None,
        amax: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
        out: T | None = None,
        seed: Seed | None = None,
    ) -> T:
        quantized = weights.quantize(cls, x, orientations=orientations, amax=amax, group=group, out=out, seed=seed)
        assert isinstance(quantized, cls)
        return quantized

    def quantize_buffers(
        x: Tensor,
        *,
        orientations: Sequence[str] | None = None,
        amax: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
        swizzled: bool = False,
        seed: Seed | None = None,
    ) -> dict[str, Tensor]:
        return weights.quantize_buffers(
            cls, x, orientations=orientations, amax=amax, group=group, swizzled=swizzled, seed=seed
        )

    quantize.__doc__ = f"""Quantizes (..., k) values in fp32, bf16 or fp16 to {cls.__name__}, of x's shape and dtype.

    orientations: those to store. Default: {", ".join(cls.LAYOUT.orientations)}.
    {_amax_text(cls.LAYOUT)}
    out: a tensor of the recipe and of x's shape to overwrite and return, instead of a new one.
    {_seed_text(cls.LAYOUT)}

    Raises ValueError for shapes {_refused_text(cls.LAYOUT)}, TypeError for other dtypes.
    """
    quantize_buffers.__doc__ = """The buffers of `quantize(x, ...).buffers(swizzled=...)`, without the tensor.

    For activations and gradients. Takes one launch if the recipe's kernels can quantize straight into buffers. Raises
    as `quantize`, and ValueError for `swizzled` if the spec states no swizzle.
    """
    for function in (quantize, quantize_buffers):
        function.__module__, function.__qualname__ = cls.__module__, function.__name__
    return quantize, quantize_buffers


def _amax_text(layout: Layout) -> str:
    if not layout.shares_amax:
        return "amax: must be None, and group has no effect, since no scale depends on other shards."
    shape = "(1,)" if layout.amax_columns is None else f"(1, blocks of {layout.amax_columns} columns)"
    shape += ", or (matrices,), one for each matrix of a stack," if layout.amax_of_matrices else ""
    text = f"amax: {shape} fp32. Default: that of x, or the maximum over the ranks of `group`. Collective with a group."
    return f"{text} The scale follows from the history of `out`." if layout.history else text


def _seed_text(layout: Layout) -> str:
    if not layout.stochastic:
        return "seed: must be None, since elements are rounded to nearest."
    return "seed: an int, or an int64 tensor of one element, that random bits follow from. Default: drawn by torch."


def _refused_text(layout: Layout) -> str:
    if layout.multiple_m == layout.multiple_k == 1:
        return "of fewer than 2 dims"
    return f"whose m is not a multiple of {layout.multiple_m}, or k of {layout.multiple_k}"
