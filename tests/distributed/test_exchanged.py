"""Formats that people exchange, sharded: at every cut of three ranks, trained, saved and loaded.

What shards are compared with is one process, byte for byte.
"""

from __future__ import annotations

from math import lcm
from pathlib import Path

import pytest
import unshipped
from harness import on
from models import recipe_module
from resharding import awkward
from test_cast_on_gather import trains as trains_cast
from test_checkpoints import resumes
from test_cut_weights import at_all_cuts
from test_training import trains_as_one_process
from weight_recipes import ALL_PAIRS

import layoutc
import layoutc.recipes

NAMES = unshipped.exchanged()
# One for each kind of plane, since ranks know no orders of codes: zero points in f16 and in bf16, scales of whole rows,
# a codebook; zero points below a byte are those of shipped recipes. All with LAYOUTC_ALL_PAIRS=1.
KINDS = ("fp8_divided_rows", "hqq", "posit8", "q4_1", "tinygemm")


def known(*names: str) -> None:
    """Makes these recipes, and lets this process find them by name."""
    for name in set(names) - set(layoutc.recipes.RECIPES):
        unshipped.add_if_known(name)
        recipe_module(name)
        layoutc.recipes.RECIPES = (*layoutc.recipes.RECIPES, name)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", NAMES if ALL_PAIRS else KINDS)
@on("four")
def test_weights_are_gathered_at_every_cut(recipe: str) -> None:
    """Stored as codes: gathered, in state dicts, distributed."""
    known(recipe)
    at_all_cuts(recipe, (3,))


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", KINDS)
@on("two")
def test_training_on_two_ranks_equals_one_process(recipe: str) -> None:
    """Both ways, with cuts inside blocks and a short last shard."""
    known(recipe)
    layout = recipe_module(recipe).LAYOUT
    unit = layout.block_rows if layout.block_rows > 1 else 32
    unit += -unit % lcm(layout.column_multiple, layout.multiple_k)  # rows of one layer are columns of the next
    trains_as_one_process(recipe, False, True, (3 * unit, unit), None)
    trains_cast(recipe, "adamw", False, None, (3 * unit, unit))


@pytest.mark.thorough
@pytest.mark.parametrize("recipes", [KINDS], ids="-".join)
@on("four")
def test_any_ranks_load_what_any_ranks_saved(recipes: tuple[str, ...], tmp_path: Path) -> None:
    """Saved by any ranks, loaded by any."""
    folder = str(tmp_path)
    known(*recipes)
    resumes(recipes, awkward, folder, 1)
