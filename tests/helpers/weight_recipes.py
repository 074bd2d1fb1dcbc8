"""The shipped recipes that weights can have; the others are for activations and gradients, or for state."""

from __future__ import annotations

import importlib
import os
from typing import Any

from numpy_models import RECIPES

import layoutc.recipes

ALL_PAIRS = bool(os.environ.get("LAYOUTC_ALL_PAIRS"))  # of recipes and cases: an hour in place of minutes


def _layout(name: str) -> Any:
    return importlib.import_module(f"layoutc.recipes.{name}.layout").LAYOUT


def _cuts(name: str) -> tuple[object, ...]:
    """What shards, gathers and checkpoints know of a recipe: planes, whether rows share their values, what travels; and
    whether codes lie across bytes. How many rows share one is a number, which tests of few recipes draw at random."""
    layout = _layout(name)
    planes = tuple(
        (plane, min(stored.rows_per_value or 0, 2), (stored.columns_per_value or 1) % 1 > 0)
        for plane, stored in sorted(layout.stored.items())
    )
    return planes, str(layout.sources), str(layout.travels), layout.history, layout.level is not None


WEIGHTS = tuple(name for name in layoutc.recipes.RECIPES if not _layout(name).not_weights)
# One of those that ranks cut, send and store alike, the best known; all with LAYOUTC_ALL_PAIRS=1.
_BY_FAME = (*(name for name in WEIGHTS if name not in RECIPES), *reversed(RECIPES))
CUT_APART = WEIGHTS if ALL_PAIRS else tuple({_cuts(name): name for name in _BY_FAME}.values())[::-1]
# Every way in which operators are called: an amax that is shared, by columns too, a history, no scale of its own, zero
# points, codes for each orientation, one format for each, elements across bytes, one source, scales that are swizzled.
KINDS = ("fp8_block", "fp8_current", "fp8_delayed", "fp8_rowwise", "hybrid_fp8", "int4_group32", "mxfp6_e2m3", "mxfp8")
KINDS += ("nvfp4", "nvfp4_1d")
# Of low precision: one scale, two formats, scales of rows with and without a product for gradients of weights, blocks,
# transformed operands, and what transposes into itself.
PRODUCTS = ("fp8_block", "fp8_current", "fp8_e5m2_current", "fp8_rowwise", "fp8_rowwise_all", "mxfp8", "nvfp4")
PRODUCTS += ("nvfp4_1d",)
