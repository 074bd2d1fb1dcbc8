"""Ranks meet before collectives that users call: where some do not come, the others say so, and do not hang.

They meet at torch's store, not in a collective. Ranks that did not call it may be in another one, which a collective
of the others would mix with.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from layoutc.runtime import callers
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.torch_private import store_of_all, timeout_of

SOON = timedelta(seconds=60)
_met: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # how many times a group's ranks have met


def meet(group: dist.ProcessGroup | None = None) -> None:
    """Waits for all ranks of a group (default: all). Warns of those that don't come; raises LayoutError when the
    group's own timeout is over."""
    group = group or dist.group.WORLD
    assert group is not None
    count, store = _met.get(group, 0), store_of_all()
    if dist.get_backend(group) == "fake":
        return
    here, before = (f"layoutc/meeting/{group.group_name}/{number}" for number in (count, count - 1))
    if not store.check([own := f"{here}/{group.rank()}"]):  # it came, and left, if it has raised before
        store.set(own, "")
        if store.add(here, 1) == group.size():
            store.set(f"{here}/all", "")
    if not _waits(store, f"{here}/all", SOON):
        warnings.warn(_lacking(store, here, group), stacklevel=3)
        if not _waits(store, f"{here}/all", timeout_of(group)):
            raise LayoutError(_lacking(store, here, group))
    _met[group] = count + 1
    for name in (f"{before}/{group.rank()}", *((before, f"{before}/all") if group.rank() == 0 else ())):
        if count:
            store.delete_key(name)


def _waits(store: Any, key: str, time: timedelta) -> bool:
    try:
        store.wait([key], time)
    except RuntimeError:  # a DistStoreError
        return False
    return True


def _lacking(store: Any, here: str, group: dist.ProcessGroup) -> str:
    absent = [str(rank) for rank in range(group.size()) if not store.check([f"{here}/{rank}"])]
    ranks = f"rank {', '.join(absent)}: it is collective, so all {group.size()} ranks of its group call it"
    return f"{callers.called()} waits for {ranks}, not one under `if rank == 0:`"
