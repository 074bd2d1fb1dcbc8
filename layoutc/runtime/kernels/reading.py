"""Dequantizing the same planes again and again, as each pass does: what one launch can know of the next is kept."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.direct import Bound
from layoutc.runtime.kernels.recipe_kernels import Kernels


class Reading:
    """A launch for planes that stay the same tensors, while FSDP2 frees their memory and allocates it anew."""

    __slots__ = ("_bound", "_device", "_dtype", "_planes", "_shape")

    def __init__(self, bound: Bound, planes: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> None:
        """planes: what the launch reads, in its order, as kernels read them. They are not kept alive."""
        self._bound, self._shape, self._dtype = bound, shape, dtype
        self._planes = tuple((name, weakref.ref(plane)) for name, plane in planes.items())
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

        That is: other planes, freed or misaligned memory, or another current device.
        """
        found = []
        for name, before in self._planes:
            plane = planes.get(name)
            if plane is None or plane is not before():
                return None
            address = plane.data_ptr()
            if address == 0 or address & 3:
                return None
            found.append(plane)
        if torch.cuda.current_device() != self._device.index:
            return None
        out = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._bound(out, *found)
        return out
