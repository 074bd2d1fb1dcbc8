"""Process groups for saves that go on while the ranks do other things.

Collectives of one group have to come in the same order on all ranks. A save in a thread that shared a group with
training would break that at random, and hang.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

_apart: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_last: WeakKeyDictionary[dist.ProcessGroup, Future[Any]] = WeakKeyDictionary()


def apart(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A gloo group of the same ranks that nothing else uses, made on the first call; None without a default group.

    group: None stands for all ranks. Collective over it. Where the last save that was given this group still runs,
    waits for it; what it raised is for whoever holds its future.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    parent = group or dist.group.WORLD
    assert parent is not None  # there is a default group
    if parent not in _apart:
        ranks = dist.get_process_group_ranks(parent)
        _apart[parent] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    own = _apart[parent]
    if (last := _last.get(own)) is not None:
        last.exception()
    return own


def goes_on(group: dist.ProcessGroup | None, save: Future[Any]) -> None:
    """Remembers the save that uses a group from `apart`."""
    if group is not None:
        _last[group] = save
