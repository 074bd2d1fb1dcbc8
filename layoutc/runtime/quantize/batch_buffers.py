"""Buffers of many weights: what a GEMM reads of a block's weights, after a gather, laid out in one launch a recipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layoutc.runtime.errors import MissingOrientation
from layoutc.runtime.quantize.weights import chosen_orientations
from layoutc.runtime.weight import gathered_in_graphs, operators
from layoutc.runtime.weight.tensor import QuantizedTensor


def buffers_of(
    tensors: Sequence[QuantizedTensor], *, orientations: Sequence[str] | None = None, swizzled: bool = False
) -> list[dict[str, Tensor]]:
    """`buffers()` of each of many quantized tensors, of any recipes, in their order: as after a gather, of a block.

    On a card, those of a recipe are laid out in one launch, and what is new of one shape and name shares an allocation.
    orientations: those to lay out, by default all that a tensor holds; each tensor must hold them. swizzled: as for
    buffers(). Raises, before any work, TypeError for what is no quantized tensor, ValueError for orientations that a
    recipe has not and where it states no swizzle, MissingOrientation for those that a tensor does not hold.
    """
    kinds: dict[tuple[type[QuantizedTensor], torch.device, bool, tuple[str, ...]], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, QuantizedTensor):
            raise TypeError(f"buffers_of takes quantized tensors, not {type(tensor).__name__}")
        tensor.LAYOUT.check_swizzled(swizzled)
        gathered_in_graphs.check_not_resharded(tensor)
        empty = 0 in tensor._matrix
        kinds[type(tensor), tensor.device, empty, _asked(tensor, orientations)].append(index)
    found: list[dict[str, Tensor]] = [{} for _ in tensors]
    for (cls, _, _, asked), members in kinds.items():
        weights = [tensors[index]._planes for index in members]
        shapes = [tensors[index]._matrix for index in members]
        for index, laid_out in zip(members, _lay_out(cls, weights, shapes, asked, swizzled), strict=True):
            found[index] = laid_out
    return found


def _asked(tensor: QuantizedTensor, orientations: Sequence[str] | None) -> tuple[str, ...]:
    """The orientations to lay a tensor out in, which it holds."""
    held = tensor.orientations
    asked = held if orientations is None else chosen_orientations(tensor.LAYOUT, orientations)
    if not asked or any(name not in held for name in asked):
        raise MissingOrientation(
            f"{tensor._label()} holds {', '.join(held) or 'no orientation'}, not {', '.join(asked) or 'any to lay out'}"
        )
    return asked


def _lay_out(
    cls: type[QuantizedTensor],
    weights: Sequence[Mapping[str, Tensor]],
    shapes: Sequence[tuple[int, int]],
    orientations: tuple[str, ...],
    swizzled: bool,
) -> list[dict[str, Tensor]]:
    """The buffers of many weights of a recipe: together where a kernel can, else one by one."""
    first = next(iter(weights[0].values()))
    if len(weights) > 1 and not operators.traced(first):
        together = cls._lay_out_batch(weights, shapes, orientations, swizzled)
        if together is not None:
            return together
    return [
        operators.lay_out(cls, one, *shape, orientations, swizzled) for one, shape in zip(weights, shapes, strict=True)
    ]
