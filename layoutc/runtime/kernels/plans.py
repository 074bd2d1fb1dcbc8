"""The cache of launch plans: what each is kept under, and for how long.

A key has all that a plan depends on but values. Most plans follow from the recipe, shapes, strides, dtypes and the
device, and serve all tensors that are alike in these: they are in `cache`, of which a process has one. Others have
tables of addresses, and are kept under `place_of` by who owns what lies there, for as long as that lives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from layoutc.runtime.captures import capturing
from layoutc.runtime.streams import stream_of

Plan = TypeVar("Plan")
Place = tuple[int, ...]
PLACES = 16  # in which an owner's tensors have lain
UNKNOWN: Any = object()


class Plans(dict[Hashable, Any]):
    """Plans by their keys, None for what has none: `most` of them. The older half goes when there would be more."""

    def __init__(self, most: int = PLACES) -> None:
        super().__init__()
        self.most = most

    def of(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """The plan of a key, made if it was never asked for."""
        found: Plan = self.get(key, UNKNOWN)
        if found is UNKNOWN:
            self[key] = found = make()
        return found

    def at(self, place: Place | None, make: Callable[[], Plan]) -> Plan | None:
        """The plan of a place; None where that is None."""
        return None if place is None else self.of(place, make)

    def __setitem__(self, key: Hashable, plan: Any) -> None:
        if len(self) >= self.most:
            for old in list(self)[: (self.most + 1) // 2]:
                self.pop(old, None)
        super().__setitem__(key, plan)


cache = Plans(2048)  # tokens may differ from step to step


def place_of(tensors: Sequence[Tensor], device: torch.device) -> Place | None:
    """The key of a plan with tables of these tensors: their addresses, and the current stream, on which tables were
    copied to the card. None while a CUDA graph is captured, which could outlive a table."""
    return None if capturing(device) else (*map(Tensor.data_ptr, tensors), stream_of(device))
