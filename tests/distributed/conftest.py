"""Groups of processes that all tests of a session share."""

from __future__ import annotations

from harness import group

two, four = group(2), group(4)
