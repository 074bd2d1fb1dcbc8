"""Buffers of many weights at once: for example of all weights of a layer after a gather, in one launch per recipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layoutc.runtime.errors import MissingOrientation
from layoutc.runtime.quantize.weights import chosen_orientations
from layoutc.runtime.torch_private import traced
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.tensor import QuantizedTensor


def buffers_of(
    tensors: Sequence[QuantizedTensor], *, orientations: Sequence[str] | None = None, swizzled: bool = False
) -> list[dict[str, Tensor]]:
    """Returns `buffers()` of each quantized tensor, in order. The tensors may be of different recipes.

    On a card, one launch lays out all tensors of a recipe, and new buffers of the same name and shape share an
    allocation.
    orientations: those to lay out, of every tensor; default: all that it holds. swizzled: as for `buffers`.

    Raises before any work: TypeError for anything but a quantized tensor; ValueError for an orientation that a recipe
    does not have, or for `swizzled` without a swizzle in the spec; MissingOrientation for an orientation that a tensor
    does not hold; LayoutError for a gathered weight that FSDP2 has resharded.

    Example:

        >>> weight = layoutc.recipes.nvfp4.quantize(torch.ones(128, 256))
        >>> layoutc.buffers_of([weight])[0]["rowwise_data"].shape
        torch.Size([128, 128])
    """
    kinds: dict[tuple[type[QuantizedTensor], torch.device, bool, tuple[str, ...]], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, QuantizedTensor):
            raise TypeError(f"buffers_of takes quantized tensors, not {type(tensor).__name__}")
        tensor.LAYOUT.check_swizzled(swizzled)
        tensor.check_not_freed()
        empty = 0 in tensor.store.matrix
        kinds[type(tensor), tensor.device, empty, _orientations_of(tensor, orientations)].append(index)
    result: list[dict[str, Tensor]] = [{} for _ in tensors]
    for (cls, _, _, chosen), members in kinds.items():
        weights = [tensors[index].store.planes for index in members]
        shapes = [tensors[index].store.matrix for index in members]
        for index, buffers in zip(members, _lay_out(cls, weights, shapes, chosen, swizzled), strict=True):
            result[index] = buffers
    return result


def _orientations_of(tensor: QuantizedTensor, orientations: Sequence[str] | None) -> tuple[str, ...]:
    """The orientations to lay a tensor out in. Raises MissingOrientation if it does not hold them."""
    present = tensor.orientations
    chosen = present if orientations is None else chosen_orientations(tensor.LAYOUT, orientations)
    if not chosen or any(name not in present for name in chosen):
        raise MissingOrientation(
            f"{tensor.label()} holds {', '.join(present) or 'no orientation'}, "
            f"not {', '.join(chosen) or 'any to lay out'}"
        )
    return chosen


def _lay_out(
    cls: type[QuantizedTensor],
    weights: Sequence[Mapping[str, Tensor]],
    shapes: Sequence[tuple[int, int]],
    orientations: tuple[str, ...],
    swizzled: bool,
) -> list[dict[str, Tensor]]:
    """The buffers of several weights of a recipe: together if there is a kernel for that, else one by one."""
    first = next(iter(weights[0].values()))
    if len(weights) > 1 and not traced(first):
        buffers = cls.lay_out_batch(weights, shapes, orientations, swizzled)
        if buffers is not None:
            return buffers
    return [
        operators.lay_out(cls, one, *shape, orientations, swizzled) for one, shape in zip(weights, shapes, strict=True)
    ]
