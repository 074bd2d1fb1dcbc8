"""Groups of processes that all tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Ranks


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two processes."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """Four processes."""
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
