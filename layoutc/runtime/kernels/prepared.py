"""Launches that were made before for the same sizes: what is left is to allocate results and to pass addresses.

Products in low precision quantize the same sizes, and lay out the same weights, in each step. Working out tiles, grid,
shapes and Triton's key takes the host more time than the launch itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.buffers import Entry
from layoutc.runtime.kernels.direct import Bound


class Result(NamedTuple):
    """A buffer that a launch gives: a new tensor, by its position, or one of the tensors that the caller named."""

    name: str
    position: int | None
    given: str
    is_flat: bool


@dataclass(frozen=True, eq=False)
class PreparedLaunch:
    """A launch for tensors of known sizes, with the tensors that it writes and the buffers that these are."""

    bound: Bound
    new: tuple[Tensor, ...]  # templates of what it writes
    results: tuple[Result, ...]

    @classmethod
    def of(
        cls,
        bound: Bound,
        planes: Mapping[str, Tensor],
        made: Mapping[str, Tensor],
        entries: Sequence[Entry],
        swizzled: bool,
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> PreparedLaunch:
        """planes, made: examples of what the launch writes, in its order: at least one. entries: the buffers. dtypes:
        those that some of them are given in, where they are other ones of the same size."""
        new = [*planes.values(), *made.values()]
        from_plane = {name: index for index, name in enumerate(planes)}
        from_made = {name: index for index, name in enumerate(made, len(planes))}
        results = [
            Result(
                one.name,
                from_made[one.name] if one.plane is None else from_plane.get(one.plane),
                one.plane or "",
                one.is_flat or (one.is_swizzled and swizzled),
            )
            for one in entries
        ]
        templates = []
        for at, tensor in enumerate(new):
            given = {dtypes.get(one.name, tensor.dtype) for one in results if one.position == at}
            dtype = given.pop() if len(given) == 1 else tensor.dtype
            templates.append(launch.template(tensor.shape, dtype, tensor.device))
        return cls(bound, tuple(templates), tuple(results))

    def __call__(self, inputs: Sequence[Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers. inputs: what the kernel reads, in order. given: what serves as a buffer as it is."""
        made = [torch.empty_like(one) for one in self.new]
        self.bound(*inputs, *made)
        buffers = {}
        for name, position, plane, is_flat in self.results:
            buffer = given[plane] if position is None else made[position]
            buffers[name] = buffer.flatten() if is_flat else buffer
        return buffers


class Again:
    """A launch that gives what an operator returns, for arguments like those of the call that it was made in: of the
    same sizes, strides and dtypes, on the same device."""

    __slots__ = ("_bound", "_new", "_results")

    def __init__(self, bound: Bound, new: tuple[Tensor, ...], results: tuple[int, ...]) -> None:
        """new: templates of what it writes. results: the positions of those that are returned, in order."""
        self._bound, self._new, self._results = bound, new, results

    @classmethod
    def of(
        cls, prepared: PreparedLaunch, names: Sequence[str], dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
    ) -> Again | None:
        """For an operator that returns the buffers `names`; None if one of them is not new. dtypes: those that some
        of them are given in, as for PreparedLaunch."""
        made = {one.name: one for one in prepared.results}
        results, new = [made[name] for name in names], list(prepared.new)
        positions = tuple([one.position for one in results if one.position is not None])
        if len(positions) < len(results):
            return None
        for one, at in zip(results, positions, strict=True):
            shape = (new[at].numel(),) if one.is_flat else new[at].shape
            new[at] = launch.template(shape, dtypes.get(one.name, new[at].dtype), new[at].device)
        return cls(prepared.bound, tuple(new), positions)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The results."""
        made = [torch.empty_like(one) for one in self._new]
        self._bound(*inputs, *made)
        return [made[at] for at in self._results]
