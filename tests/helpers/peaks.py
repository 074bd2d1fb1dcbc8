"""The most memory that a process holds while it does something."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATUS = Path("/proc/self/status")
TRIM, MMAP = -1, -3  # of mallopt: from how many bytes on memory is given back, and asked for in a piece of its own


def anonymous() -> int:
    """Bytes of memory that this process holds and that no file is behind."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@contextmanager
def most(found: list[int]) -> Iterator[None]:
    """Appends the most memory that the process held inside, beyond what it held before."""
    before, done, peak = anonymous(), threading.Event(), 0

    def look() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found.append(max(peak, anonymous() - before))


@contextmanager
def given_back_at_once() -> Iterator[None]:
    """Makes the C library give back what is freed, so that a process holds what it uses. What earlier tests have left
    in cycles is freed first: freed inside, it would be taken off the peak."""
    gc.collect()
    library = ctypes.CDLL(None)
    library.mallopt(TRIM, 1 << 17)
    library.mallopt(MMAP, 1 << 17)
    library.malloc_trim(0)
    try:
        yield
    finally:
        library.mallopt(TRIM, 1 << 26)
        library.mallopt(MMAP, 1 << 25)
