"""One thread of a rank that waits for messages, for all of its gloo groups.

Each group has one of its own, which wakes up a hundred times a second. Some dozens of groups, as many as there are
meshes, on each of a dozen ranks take a tenth of two cores while nothing happens.
"""

from __future__ import annotations

from typing import Any


def share() -> None:
    """All groups that are made from now on share what they send and receive through."""
    from torch.distributed import distributed_c10d

    plain = distributed_c10d.ProcessGroupGloo
    if not hasattr(plain, "create_default_device") or not hasattr(plain._Options(), "_devices"):
        return  # in another torch, each group goes on with its own
    device = plain.create_default_device()

    class AnyGloo(type(plain)):  # type: ignore[misc]
        """Groups that were made before are gloo groups, too."""

        def __instancecheck__(cls, group: Any) -> bool:
            return isinstance(group, plain)

    class SharedGloo(plain, metaclass=AnyGloo):  # type: ignore[misc, valid-type]
        """A gloo group as torch makes it, but for the device."""

        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **more: Any) -> None:
            options = plain._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            for name, value in more.items():  # torch 2.14 also says whether a group may be set up again
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedGloo
