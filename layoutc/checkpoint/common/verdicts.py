"""Verdicts: ranks exchange their errors, so that all raise the same exception or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from layoutc.runtime.errors import DamagedError, LayoutError, by_value, few, printable
from layoutc.runtime.sharding.meeting import meet

T = TypeVar("T")
SHOWN = 8  # problems that a message lists
LONGEST = 4000  # maximum characters of a problem, since text from files can be arbitrarily long
KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (LayoutError, DamagedError, FileNotFoundError, FileExistsError, OSError, ImportError, TypeError)
} | {"ValueError": ValueError}


class Problem(NamedTuple):
    """The name of the exception to raise, and its message."""

    kind: str
    text: str


@contextmanager
def noted(problems: list[Problem]) -> Iterator[None]:
    """Appends exceptions raised inside to `problems` instead of raising: other ranks wait for this rank's verdict."""
    try:
        yield
    except Exception as error:
        name = type(error).__name__
        kind = name if name in KINDS else "OSError" if isinstance(error, OSError) else "LayoutError"
        text = printable(str(error) if name in KINDS else f"{name}: {error}")
        problems.append(Problem(kind, text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."))


def rank_of(group: dist.ProcessGroup | None) -> int:
    """This process's rank in a group (default: all ranks); 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def size_of(group: dist.ProcessGroup | None) -> int:
    """The number of ranks in a group (default: all ranks); 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def everywhere(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks of a group, in rank order. Collective: one all_gather_object, for which ranks meet."""
    if size_of(group) == 1:
        return [value]
    meet(group)
    values: list[Any] = [None] * size_of(group)
    dist.all_gather_object(values, value, group=group)
    return values


def together(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Returns this rank's result of `work` if it succeeds on every rank; else raises on all. Collective."""
    problems: list[Problem] = []
    result: T | None = None
    with noted(problems):
        result = work()
    agree(problems, group)
    return result


def from_first(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Returns the first rank's result of `work` on every rank; raises on all if it fails there. Collective."""
    problems: list[Problem] = []
    results: list[Any] = [None]
    if rank_of(group) == 0:
        with noted(problems):
            results = [work()]
    agree(problems, group)
    if size_of(group) > 1:
        dist.broadcast_object_list(results, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return results[0]  # type: ignore[no-any-return]


def agree(problems: Sequence[Problem], group: dist.ProcessGroup | None, facts: str = "", what: str = "") -> None:
    """Raises on all ranks of a group if any rank has problems, or if `facts` differ between ranks.

    what: completes the message "rank 1 and rank 0 ..." if facts differ. The first problem sets the exception type.
    Collective: one all_gather_object.
    """
    reports = everywhere((list(problems), facts), group)
    ranks = by_value((rank, Problem(*one)) for rank, (of_rank, _) in enumerate(reports) for one in of_rank)
    if ranks:
        lines = [
            one.text if len(on) == len(reports) else f"rank {', '.join(map(str, on))}: {one.text}"
            for one, on in ranks.items()
        ]
        raise KINDS[next(iter(ranks)).kind](few(lines, SHOWN, "\n  "))
    if differing := [rank for rank, (_, theirs) in enumerate(reports) if theirs != reports[0][1]]:
        raise LayoutError(f"rank {', '.join(map(str, differing))} and rank 0 {what}")
