"""All that a recipe's generated tensor.py imports."""

from __future__ import annotations

from layoutc.runtime.cast.handlers import register_cast
from layoutc.runtime.cast.tensor import CastOnGather
from layoutc.runtime.dispatch.table import HANDLERS
from layoutc.runtime.fsdp2 import all_gather
from layoutc.runtime.products import autograd
from layoutc.runtime.quantize.entry_points import functions
from layoutc.runtime.weight.recipe_methods import plane
from layoutc.runtime.weight.tensor import QuantizedTensor, register

__all__ = ["CastOnGather", "Recipe", "all_gather", "functions", "plane", "register", "register_cast"]


class Recipe(QuantizedTensor):
    """A weight in a recipe. The generated subclass states the recipe's facts."""

    HANDLERS = HANDLERS
    __torch_function__ = classmethod(autograd.torch_function)
