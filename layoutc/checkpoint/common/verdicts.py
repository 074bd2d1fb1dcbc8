"""What is wrong, told by each rank to all others, so that all raise the same or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from layoutc.runtime.errors import DamagedError, LayoutError

T = TypeVar("T")
SHOWN = 8  # problems that a message spells out
LONGEST = 4000  # characters of a problem: what a file says may be of any length
KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (LayoutError, DamagedError, FileNotFoundError, FileExistsError, OSError, ImportError, TypeError)
} | {"ValueError": ValueError}


class Problem(NamedTuple):
    """The name of what to raise, and the words."""

    kind: str
    text: str


@contextmanager
def noted(problems: list[Problem]) -> Iterator[None]:
    """Adds what is raised inside to `problems` instead of raising it: other ranks wait for this one's verdict."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        known = kind if kind in KINDS else "OSError" if isinstance(error, OSError) else "LayoutError"
        text = str(error) if kind in KINDS else f"{kind}: {error}"
        problems.append(Problem(known, text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."))


def rank_of(group: dist.ProcessGroup | None) -> int:
    """This process's rank in a group, by default that of all; 0 where there is none."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def size_of(group: dist.ProcessGroup | None) -> int:
    """Processes of a group, by default that of all; 1 where there is none."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def everywhere(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What each rank of a group brings, in their order. Collective: one all_gather_object."""
    if size_of(group) == 1:
        return [value]
    found: list[Any] = [None] * size_of(group)
    dist.all_gather_object(found, value, group=group)
    return found


def together(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What `work` gives, where it succeeds on every rank; raises on all of them otherwise. Collective."""
    problems: list[Problem] = []
    result: T | None = None
    with noted(problems):
        result = work()
    agree(problems, group)
    return result


def from_first(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What `work` gives on the first rank, on every rank; raises on all of them where it fails there. Collective."""
    problems: list[Problem] = []
    found: list[Any] = [None]
    if rank_of(group) == 0:
        with noted(problems):
            found = [work()]
    agree(problems, group)
    if size_of(group) > 1:
        dist.broadcast_object_list(found, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return found[0]  # type: ignore[no-any-return]


def agree(problems: Sequence[Problem], group: dist.ProcessGroup | None, facts: str = "", what: str = "") -> None:
    """Raises on all ranks of a group alike where one has problems, or where their `facts` (of `what`) differ.

    Collective: one all_gather_object. What is raised is of the kind of the first problem.
    """
    told = everywhere((list(problems), facts), group)
    ranks: dict[Problem, list[int]] = {}
    for rank, (of_rank, _) in enumerate(told):
        for problem in of_rank:
            ranks.setdefault(Problem(*problem), []).append(rank)
    if ranks:
        lines = [_told(problem.text, on, len(told)) for problem, on in ranks.items()]
        more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        raise KINDS[next(iter(ranks)).kind]("\n  ".join([*lines[:SHOWN], *more]))
    if differing := [rank for rank, (_, theirs) in enumerate(told) if theirs != told[0][1]]:
        raise LayoutError(f"rank {', '.join(map(str, differing))} and rank 0 {what}")


def _told(text: str, on: Sequence[int], world: int) -> str:
    return text if len(on) == world else f"rank {', '.join(map(str, on))}: {text}"
