"""Tests that run other packages. They share the groups of processes, and the model, of tests/distributed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import harness
from harness import group

# Imported once for all ranks, where they are installed.
harness.PRELOADED += ("torchtitan.trainer", "torchtitan.models.llama3", "torchtitan.models.qwen3")
harness.preload("transformers.models.llama.modeling_llama")


one, two, three, four = (group(world) for world in range(1, 5))
