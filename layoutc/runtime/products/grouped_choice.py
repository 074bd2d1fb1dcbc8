"""How each product of a weight of experts is computed, and why: as `choice` says it of a linear layer."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from layoutc.runtime.facts import Cards, Operand
from layoutc.runtime.product_mode import Mode
from layoutc.runtime.products.choice import OPERANDS, Chosen, ProductName, Recipe, Recipes, not_here, recipes_of
from layoutc.runtime.products.groups import shares_all_rows
from layoutc.runtime.torch_private import scaled_grouped_mm_v2_is_traced

# What scaled_grouped_mm reads each kind of scales as, and where.
GROUPED: dict[str, tuple[str, Cards]] = {
    "TensorWise": ("RowWise", Cards((9, 0), (10, 0))),
    "RowWise": ("RowWise", Cards((9, 0), (10, 0))),
    "BlockWise1x32": ("BlockWise1x32", Cards((10, 0), (11, 0))),
    "BlockWise1x16": ("BlockWise1x16", Cards((10, 0), (11, 0))),
}
UNDER_TENSOR_SCALE = ("BlockWise1x16",)  # and no other kind is
GROUPED_CODES = (torch.float8_e4m3fn, torch.float4_e2m1fn_x2)
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


class Kernel(NamedTuple):
    """A kernel of scaled_grouped_mm: the kind of scales that it reads of both operands, and where it runs."""

    kind: str
    cards: Cards


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
    if not reason:
        return Chosen("kernel", "")
    return Chosen("reference" if mode == "low" else "dequantize", reason)


def operands_of(name: ProductName, by_columns: bool) -> tuple[tuple[str, str], tuple[str, str]]:
    """As OPERANDS has them, of weights that are read as they are stored or transposed."""
    left, right = OPERANDS[name]
    return left, (right[0], orientation_of(name, by_columns)) if right[0] == "weight" else right


def kernel(cls: Recipe, name: ProductName, by_columns: bool = False) -> Kernel | str:
    """What multiplies groups of tokens by a weight of experts, each group by its own expert; or why nothing does.

    by_columns: as of Sizes.
    """
    stated: Cards | str | None = getattr(cls.LAYOUT.products, name)
    if isinstance(stated, str):  # what scaled_mm can't multiply
        return stated
    recipes = recipes_of(cls)
    if name == "grad_weight":
        return "it contracts groups of tokens, and no kernel is called for that"
    operands: list[Operand] = []
    for role, orientation in operands_of(name, by_columns):
        found = getattr(recipes, role).LAYOUT.operands[orientation]
        if not isinstance(found, Operand):
            return str(found)
        operands.append(found)
    a, b = operands
    kinds = [GROUPED.get(one.scaling) for one in operands]
    if kinds[0] is None or kinds[1] is None or kinds[0] != kinds[1]:
        return f"scaled_grouped_mm does not take {a.scaling} by {b.scaling}"
    for one in operands:
        if one.codes not in GROUPED_CODES:
            return f"scaled_grouped_mm does not take {str(one.codes).removeprefix('torch.')}"
        if (one.tensor_scale is not None) != (one.scaling in UNDER_TENSOR_SCALE):
            how = "without" if one.tensor_scale is None else "with"
            return f"scaled_grouped_mm does not take {one.scaling} {how} a scale of the tensor"
    return Kernel(*kinds[0])


def _unquantizable(recipes: Recipes, name: ProductName, sizes: Sizes) -> str:
    """Why an operand can't be quantized in groups of tokens."""
    if sizes.tokens == 0:
        return "there are no tokens"
    for role, orientation in operands_of(name, sizes.by_columns):
        layout = getattr(recipes, role).LAYOUT
        if orientation not in layout.orientations:
            return f"{layout.name} has no {orientation} orientation"
        if role != "weight" and shares_all_rows(layout, orientation):
            return f"{layout.name} has {orientation} scales of all tokens, which are those of several groups"
    return ""


def _misfit(recipes: Recipes, name: ProductName, found: Kernel, sizes: Sizes) -> str:
    """Why scaled_grouped_mm does not take these sizes, or this torch does not."""
    if sizes.experts > _MOST_EXPERTS:
        return f"scaled_grouped_mm takes up to {_MOST_EXPERTS} experts, not {sizes.experts}"
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
