"""Tests that run other packages. They share the groups of processes, and the model, of tests/distributed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import harness
from harness import Ranks

# Imported once for all ranks, where they are installed.
harness.PRELOADED += ("torchtitan.trainer", "torchtitan.models.llama3", "torchtitan.models.qwen3")


@pytest.fixture(scope="session")
def one() -> Iterator[Ranks]:
    """One process with a group of its own."""
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two processes."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def three() -> Iterator[Ranks]:
    """Three processes."""
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """Four processes."""
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
