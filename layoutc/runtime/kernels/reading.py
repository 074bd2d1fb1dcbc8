"""Dequantizing the planes of one weight again and again: what one launch can know of the next is kept."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.direct import Bound
from layoutc.runtime.kernels.recipe_kernels import Kernels


class Reading:
    """A launch for planes of a layout and a shape. They may be other tensors each time, as gathers bring them."""

    __slots__ = ("_bound", "_device", "_dtype", "_names", "shape")

    def __init__(self, bound: Bound, planes: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> None:
        """planes: what the launch reads, in its order. shape: (m, k) of the matrix that they hold."""
        self._bound, self._names, self.shape, self._dtype = bound, tuple(planes), shape, dtype
        self._device = next(iter(planes.values())).device

    @classmethod
    def of(
        cls,
        kernels: Kernels,
        planes: Mapping[str, Tensor],
        shape: tuple[int, int],
        orientation: str,
        dtype: torch.dtype,
    ) -> Reading | None:
        """What does `kernels.dequantize` again; None where that copies planes first, or launches nothing."""
        read = kernels.read_of(planes)
        if 0 in shape or any(one is not read[name] for name, one in launch.readable(read).items()):
            return None
        out = torch.empty(shape, dtype=dtype, device=next(iter(read.values())).device)
        return cls(kernels.dequantizing(out, read, orientation), read, shape, dtype)

    def __call__(self, planes: Mapping[str, Tensor]) -> Tensor | None:
        """The (m, k) values; None if anything is not as it was: then the ordinary way finds out what it is.

        That is: planes that are missing, freed, strided, misaligned or on another device, or another current device.
        """
        index, found = self._device.index, []
        for name in self._names:
            plane = planes.get(name)
            if plane is None or not plane.is_contiguous() or plane.device.index != index:
                return None
            address = plane.data_ptr()
            if address == 0 or address & 3:
                return None
            found.append(plane)
        if index is not None and torch.cuda.current_device() != index:
            return None
        out = torch.empty(self.shape, dtype=self._dtype, device=self._device)
        self._bound(out, *found)
        return out
