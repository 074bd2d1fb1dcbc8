"""Process groups of saves that run in the background.

The collectives of one group must be called in the same order on all ranks. A save in a thread that shared its group
with training would break that order at random, and hang.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

_apart: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_last: WeakKeyDictionary[dist.ProcessGroup, Future[Any]] = WeakKeyDictionary()


def apart(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group of a save: `group`, else a gloo group of all ranks that nothing else uses, made on the first call.

    None without a default group. Collective. Waits for the last save in that group; its errors are left to its future.
    A group of fewer ranks can't be made here: torch.distributed.new_group must be called on every rank, or, with
    use_local_synchronization, equally often on each rank that calls it (torch 2.11, 2.13).
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = dist.group.WORLD
    assert world is not None  # there is a default group
    if group is None and world not in _apart:
        _apart[world] = dist.new_group(backend="gloo")
    group = group or _apart[world]
    if (last := _last.get(group)) is not None:
        wait([last])
    return group


def goes_on(group: dist.ProcessGroup | None, save: Future[Any]) -> None:
    """Remembers that a save uses a group from `apart`, for the next save to wait for."""
    if group is not None:
        _last[group] = save
