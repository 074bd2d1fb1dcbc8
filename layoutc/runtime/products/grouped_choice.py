"""How each product of a weight of experts is computed, and why: as `choice` says it of a linear layer."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from layoutc.runtime.facts import Cards, Grouped, Operand
from layoutc.runtime.operands import columns_of_groups
from layoutc.runtime.operands.groups import shares_all_rows
from layoutc.runtime.product_mode import Mode
from layoutc.runtime.products import measured
from layoutc.runtime.products.choice import OPERANDS, Chosen, ProductName, Recipe, Recipes, not_here, recipes_of
from layoutc.runtime.torch_private import scaled_grouped_mm_v2_is_traced

TILE = (128, 4)  # of scales of blocks
_ALIGNED = 16  # bytes
_MOST_EXPERTS = 1023  # a thread for each prepares its product


class Sizes(NamedTuple):
    """Of a product: experts, and the features that each gives and takes; and the number of tokens.

    by_columns: the weight is (experts, k, n), and read as `x @ w`; else it is (experts, n, k), and read transposed.
    """

    experts: int
    n: int
    k: int
    tokens: int
    by_columns: bool = False

    @property
    def stored(self) -> tuple[int, int]:
        """The rows and columns of each expert's matrix."""
        return (self.k, self.n) if self.by_columns else (self.n, self.k)


def orientation_of(name: ProductName, by_columns: bool) -> str:
    """The orientation of the weight in forward or grad_input: that of what is contracted."""
    return "columnwise" if (name == "forward") == by_columns else "rowwise"


def choose(cls: Recipe, name: ProductName, sizes: Sizes, device: torch.device, mode: Mode) -> Chosen:
    """How a product of a weight of experts and tokens in groups is computed on a device."""
    known = all(type(size) is int for size in sizes[:4])  # in a traced graph, sizes may be symbols
    return (_choose if known else _choose.__wrapped__)(cls, name, sizes, device, mode)


@lru_cache(maxsize=4096)
def _choose(cls: Recipe, name: ProductName, sizes: Sizes, device: torch.device, mode: Mode) -> Chosen:
    if mode == "dequantize":
        return Chosen("dequantize", 'products are set to "dequantize"')
    if cls.LAYOUT.products is None:
        return Chosen("dequantize", "the recipe names none for activations")
    if getattr(cls.LAYOUT.products, name) is None:
        return Chosen("dequantize", "the spec says so")
    recipes = recipes_of(cls)
    if reason := _unquantizable(recipes, name, sizes):
        return Chosen("dequantize", reason)
    found = kernel(cls, name, sizes.by_columns)
    reason = found if isinstance(found, str) else not_here(found.cards, device) or _misfit(recipes, name, found, sizes)
    if not reason and mode == "low_precision" and type(sizes.tokens) is int:
        each = sizes.tokens / sizes.experts
        if reason := measured.slower(cls.LAYOUT.name, name, sizes.n, sizes.k, each, device):
            return Chosen("dequantize", reason)
    if not reason:
        return Chosen("kernel", "")
    return Chosen("reference" if mode == "reference" else "dequantize", reason)


def operands_of(name: ProductName, by_columns: bool) -> tuple[tuple[str, str], tuple[str, str]]:
    """As OPERANDS has them, of weights that are read as they are stored or transposed."""
    left, right = OPERANDS[name]
    return left, (right[0], orientation_of(name, by_columns)) if right[0] == "weight" else right


def kernel(cls: Recipe, name: ProductName, by_columns: bool = False) -> Grouped | str:
    """What multiplies groups of tokens by a weight of experts, each group by its own expert; or why nothing does.

    by_columns: as of Sizes.
    """
    products = cls.LAYOUT.products
    assert products is not None  # the spec names the recipes of activations and gradients
    stated: Cards | str | None = getattr(products, name)
    if isinstance(stated, str):  # not even scaled_mm multiplies them
        return stated
    return (products.by_columns if by_columns and products.by_columns else products.grouped)[name]


def _unquantizable(recipes: Recipes, name: ProductName, sizes: Sizes) -> str:
    """Why an operand can't be quantized in groups of tokens."""
    if sizes.tokens == 0:
        return "there are no tokens"
    for role, orientation in operands_of(name, sizes.by_columns):
        recipe = getattr(recipes, role)
        layout = recipe.LAYOUT
        if orientation not in layout.orientations:
            return f"{layout.name} has no {orientation} orientation"
        if role != "weight" and shares_all_rows(layout, orientation) and columns_of_groups.why_not(recipe):
            return f"{layout.name} has {orientation} scales of all tokens, which are those of several groups"
    return ""


def _misfit(recipes: Recipes, name: ProductName, found: Grouped, sizes: Sizes) -> str:
    """Why scaled_grouped_mm does not take these sizes, or this torch does not."""
    if sizes.experts > _MOST_EXPERTS:
        return f"scaled_grouped_mm takes up to {_MOST_EXPERTS} experts, not {sizes.experts}"
    if name == "grad_weight":
        size = next((size for size in (sizes.n, sizes.k) if size % _ALIGNED), None)
        return (
            "" if size is None else f"scaled_grouped_mm takes a dim of experts in multiples of {_ALIGNED}, not {size}"
        )
    free, contracted = (sizes.n, sizes.k) if name == "forward" else (sizes.k, sizes.n)
    orientation = orientation_of(name, sizes.by_columns)
    operand = recipes.weight.LAYOUT.operands[orientation]
    assert isinstance(operand, Operand)
    codes = 2 if operand.codes == torch.float4_e2m1fn_x2 else 1  # in a byte
    if operand.tensor_scale is not None and not scaled_grouped_mm_v2_is_traced:
        return f"scaled_grouped_mm of {found.kind} and a scale of the tensor can be traced since torch 2.14"
    rows, columns = (1, 1) if found.kind == "RowWise" else TILE
    block = int(found.kind.rpartition("x")[2]) if rows > 1 else 1
    # An expert's scales are whole tiles, so that those of all experts follow one another.
    multiples = {"rowwise": (rows, _ALIGNED * codes), "columnwise": (1, columns * block)}[orientation]
    for size, multiple, what in (
        (free, max(multiples[0], _ALIGNED), "a dim"),
        (contracted, max(multiples[1], _ALIGNED * codes), "a contracted dim"),
    ):
        if size % multiple:
            return f"scaled_grouped_mm takes {what} of experts in multiples of {multiple}, not {size}"
    return ""
