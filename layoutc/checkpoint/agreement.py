"""What can fail on one rank fails on all of them, with the words of those on which it did."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from layoutc.runtime.errors import DamagedError, LayoutError


def is_distributed(group: dist.ProcessGroup | None) -> bool:
    """True where other ranks take part."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def agree(error: BaseException | None, group: dist.ProcessGroup | None, told: Any = None) -> list[Any]:
    """What each rank tells, if no rank has an error. Collective.

    Raises on all ranks otherwise: DamagedError where one has met damage, else LayoutError.
    """
    if not is_distributed(group):
        if error is not None:
            raise _as_layout_error(error)
        return [told]
    mine = None if error is None else (isinstance(_as_layout_error(error), DamagedError), str(_as_layout_error(error)))
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, (mine, told), group=group)
    failed = [(rank, found[0]) for rank, found in enumerate(everywhere) if found[0] is not None]
    if failed:
        damaged = any(is_damage for _, (is_damage, _) in failed)
        texts = dict.fromkeys(text for _, (_, text) in failed)
        ranks = ", ".join(str(rank) for rank, _ in failed)
        words = "; ".join(list(texts)[:3]) + ("; ..." if len(texts) > 3 else "")
        raise (DamagedError if damaged else LayoutError)(f"rank {ranks}: {words}") from error
    return [found[1] for found in everywhere]


def _as_layout_error(error: BaseException) -> BaseException:
    if isinstance(error, LayoutError) or not isinstance(error, Exception):
        return error
    made = LayoutError(str(error) or type(error).__name__)
    made.__cause__ = error
    return made
