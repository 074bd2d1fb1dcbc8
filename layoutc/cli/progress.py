"""Progress of what takes longer than a second: a bar on a terminal's stderr, and nothing anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
PATIENCE = 1.0  # seconds without a bar


def tracked(items: Sequence[Item], words: str, quiet: bool = False) -> Iterator[Item]:
    """The items, one by one; a bar shows how many are done, if stderr is a terminal and it has taken a second."""
    return iter(items) if quiet or not sys.stderr.isatty() else _with_bar(items, len(items), words)


def _with_bar(items: Iterable[Item], total: int, words: str) -> Iterator[Item]:
    began, bar = time.monotonic(), None
    try:
        for done, item in enumerate(items):
            if bar is None and time.monotonic() - began > PATIENCE:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

                columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
                bar = Progress(*columns, console=Console(stderr=True), transient=True)
                task = bar.add_task(words, total=total)
                bar.start()
            if bar is not None:
                bar.update(task, completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()
