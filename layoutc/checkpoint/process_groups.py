"""Process groups for saves that go on while the ranks do other things.

Collectives of one group have to come in the same order on all ranks. A save in a thread that shared a group with
training would break that at random, and hang.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

_apart: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_last: WeakKeyDictionary[dist.ProcessGroup, Future[Any]] = WeakKeyDictionary()


def apart(given: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group of a save: the given one, or a gloo group of all ranks that nothing else uses, made on the first call.

    None without a default group. Collective. Where the last save in that group still runs, waits for it; what it raised
    is for whoever holds its future. A group of fewer ranks can't be made here: torch.distributed.new_group wants a call
    on every rank, or, with use_local_synchronization, as many groups on each of those that call (torch 2.11, 2.13).
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = dist.group.WORLD
    assert world is not None  # there is a default group
    if given is None and world not in _apart:
        _apart[world] = dist.new_group(backend="gloo")
    group = given or _apart[world]
    if (last := _last.get(group)) is not None:
        wait([last])
    return group


def goes_on(group: dist.ProcessGroup | None, save: Future[Any]) -> None:
    """Remembers the save that uses a group from `apart`."""
    if group is not None:
        _last[group] = save
