"""The shipped recipes that weights can have; the others are for activations and gradients."""

from __future__ import annotations

import importlib

import layoutc.recipes

WEIGHTS = tuple(
    name
    for name in layoutc.recipes.RECIPES
    if not importlib.import_module(f"layoutc.recipes.{name}.layout").LAYOUT.not_weights
)
