"""The cache of launch plans: their keys and lifetimes.

A key has all that a plan depends on except values. Most plans follow from the recipe, shapes, strides, dtypes and the
device: they are in `cache`, one per process. Others have tables of addresses: the owner of these tensors keeps them
under `place_of` while it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from layoutc.runtime.streams import capturing, stream_of

Plan = TypeVar("Plan")
Place = tuple[int, ...]
PLACES = 16  # sets of addresses that an owner keeps plans for
UNKNOWN: Any = object()


class Plans(dict[Hashable, Any]):
    """At most `most` plans by key, or None for keys without a plan. When full, the older half is dropped."""

    def __init__(self, most: int = PLACES) -> None:
        super().__init__()
        self.most = most

    def of(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """The plan of a key; `make` is called once."""
        found: Plan = self.get(key, UNKNOWN)
        if found is UNKNOWN:
            self[key] = found = make()
        return found

    def at(self, place: Hashable | None, make: Callable[[], Plan]) -> Plan:
        """The plan of a place; for None, one that is not kept."""
        return make() if place is None else self.of(place, make)

    def __setitem__(self, key: Hashable, plan: Any) -> None:
        if len(self) >= self.most:
            for old in list(self)[: (self.most + 1) // 2]:
                self.pop(old, None)
        super().__setitem__(key, plan)


cache = Plans(2048)  # tokens may differ from step to step


def place_of(tensors: Sequence[Tensor], device: torch.device) -> Place | None:
    """The key of a plan with tables of these tensors: their addresses, and the current stream, on which tables are
    copied to the card. None while a CUDA graph is captured, whose replays copy them."""
    return None if capturing(device) else (*map(Tensor.data_ptr, tensors), stream_of(device))
