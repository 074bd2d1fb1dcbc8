"""Kinds of planes besides a plain dict: those that each pass replaces, and those that are cut at each use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layoutc.ints.rects import Rect
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Plane


@dataclass(frozen=True)
class Home:
    """The origin of a gathered weight. Calling it returns this rank's shard, or None if that is gone."""

    shard: Callable[[], Any]
    gather: Callable[[Any, str, torch.device], dict[str, Tensor]]  # shard, orientation, device -> the weight's planes

    def __call__(self) -> Any:
        """This rank's shard."""
        return self.shard()

    def fetch(self, orientation: str, device: torch.device) -> dict[str, Tensor]:
        """Gathers the planes of an orientation that this pass does not hold. Collective over the shards."""
        return self.gather(self.shard(), orientation, device)


class GatheredPlanes(dict[str, Tensor]):
    """The planes of a weight in this pass, if each pass gathers different ones: one dict that its aliases share.

    FSDP2 gathers backward's planes into the memory of forward's, so a plane that a compiled graph saves in forward
    holds other bytes in backward. In graphs a weight is represented by its `handle`: one meaningless byte, whose
    storage says which weight it belongs to, whatever Python objects autograd wraps around it.
    """

    def __init__(self, planes: Mapping[str, Tensor], home: Home, matrix: tuple[int, int]) -> None:
        """`matrix` is (m, k) of the whole weight."""
        super().__init__(planes)
        self.home, self.matrix = home, matrix
        self.handle = next(iter(planes.values())).new_zeros(1, dtype=torch.uint8)
        storage: Any = self.handle.untyped_storage()
        storage.layoutc_owner = weakref.ref(self)


def owner(handle: Tensor) -> GatheredPlanes | None:
    """The current planes of a handle's weight; None if the weight is gone or the handle is fake."""
    if type(handle) is not Tensor or handle.is_meta:
        return None
    claim: Callable[[], GatheredPlanes | None] | None = getattr(handle.untyped_storage(), "layoutc_owner", None)
    return claim() if claim is not None else None


class MadePlanes(MutableMapping[str, Tensor]):
    """Planes that are made at each use, so none can be replaced."""

    names: Collection[str]
    refusal = "planes that are made at each use can't be replaced"

    def refused(self) -> LayoutError:
        """The error of a write."""
        return LayoutError(self.refusal)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __setitem__(self, name: str, plane: Tensor) -> None:
        raise self.refused()

    def __delitem__(self, name: str) -> None:
        raise self.refused()


class TracedPlanes(MadePlanes):
    """GatheredPlanes in a graph: each plane is a copy that the graph makes when it runs."""

    refusal = "a gathered weight has no planes to replace in a compiled graph"

    def __init__(self, handle: Tensor, names: Sequence[str], ask: Callable[[str], Tensor]) -> None:
        """ask: records in the graph that a plane is copied, and returns that copy."""
        self.handle, self.names, self.ask = handle, names, ask

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        return self.ask(name)


class CutPlanes(MadePlanes):
    """The planes of a piece of GatheredPlanes, cut from the weight's planes at each use.

    Backward gathers other planes into the memory of forward's, so a piece that autograd has saved must read the
    weight's current planes. If both passes gather the same planes, a piece has views of them, like any other.
    """

    refusal = "a piece of a gathered weight has no planes of its own to replace"

    def __init__(
        self,
        base: MutableMapping[str, Tensor],
        matrix: tuple[int, int],
        window: Rect,
        cut: Callable[..., dict[str, Tensor]],
    ) -> None:
        """window: of the (m, k) `matrix` whose planes `base` holds. Pieces of pieces too."""
        inner = base if isinstance(base, CutPlanes) else None
        self.base: MutableMapping[str, Tensor] = base if inner is None else inner.base
        self.matrix: tuple[int, int] = matrix if inner is None else inner.matrix
        self.window: Rect = window if inner is None else window.moved(inner.window.r0, inner.window.c0)
        self.names, self.cut = self.base, cut
        self.handle: Tensor | None = getattr(self.base, "handle", None)

    def _now(self) -> dict[str, Tensor]:
        return self.cut(self.base, *self.window)

    def __getitem__(self, name: str) -> Tensor:
        return self._now()[name]

    def items(self) -> ItemsView[str, Tensor]:
        """All planes, cut once."""
        return self._now().items()

    def values(self) -> ValuesView[Tensor]:
        """All planes, cut once."""
        return self._now().values()


class ScatteredPlanes(MadePlanes):
    """The planes of rows first..last of each `total` rows, `lead` times (some rows of each expert): copied at each use.

    No strides describe such rows as one matrix. So writes go to each run of adjacent rows separately.
    """

    refusal = "rows that are not adjacent have no planes to replace"

    def __init__(
        self,
        base: Mapping[str, Tensor],
        stored: Mapping[str, Plane],
        rows: tuple[int, int, int, int],
        runs: Callable[[], Sequence[Any]],
        columns: Callable[[int, int], Any],
    ) -> None:
        """rows: (lead, total, first, last), in whole blocks. runs: makes the pieces of adjacent rows, as views.
        columns: makes the tensor of some columns of all of these rows."""
        self.base, self.stored, self.rows, self.runs, self.columns = base, stored, rows, runs, columns
        self.names = base

    def __getitem__(self, name: str) -> Tensor:
        plane, block = self.base[name], self.stored[name].rows_per_value
        if block is None:
            return plane
        lead, total, first, last = self.rows
        cut = plane.reshape(lead, total // block, -1)[:, first // block : last // block]
        return cut.reshape(lead * (last - first) // block, -1)


def with_copies(planes: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """The planes, with copies of the named ones: a new weight shares no memory with its sources."""
    return {name: plane.clone() if name in names else plane for name, plane in planes.items()}


def own(plane: Tensor) -> Tensor:
    """The plane, or a copy of it if its storage holds more than its own bytes."""
    whole = plane.is_meta or plane.untyped_storage().nbytes() == plane.numel() * plane.element_size()
    return plane if whole else plane.clone()
