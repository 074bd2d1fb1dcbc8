"""Tests that run other packages. They share the groups of processes, and the model, of tests/distributed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from harness import Ranks


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two processes."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()
