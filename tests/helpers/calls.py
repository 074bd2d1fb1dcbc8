"""How much work a function does, as calls of functions: the same on any machine, busy or not, which seconds are not."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any


def calls_of(run: Callable[[], Any]) -> tuple[Any, int]:
    """What the function returns, and how many calls it took, those into C among them."""
    profile = cProfile.Profile()
    found = profile.runcall(run)
    return found, calls_in(profile)


def calls_in(profile: cProfile.Profile | Path) -> int:
    """Of a profile, or of one that was written to a file."""
    stats = pstats.Stats(str(profile) if isinstance(profile, Path) else profile)
    return int(stats.total_calls)  # type: ignore[attr-defined]
