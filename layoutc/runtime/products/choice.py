"""How each product of a weight is computed, and why: by a kernel of the card, by the reference, or dequantized.

One rule covers linear layers and experts. It checks the mode and the spec, whether operands can be quantized, which
kernel the recipe states, whether the card has that kernel and it supports the sizes, and its measured times.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import torch

from layoutc.runtime import product_mode
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Cards, Grouped, Operand
from layoutc.runtime.operands import columns_of_groups
from layoutc.runtime.operands.groups import shares_all_rows
from layoutc.runtime.product_mode import Mode, Saves
from layoutc.runtime.products import measured
from layoutc.runtime.torch_private import scaled_grouped_mm_v2_is_traced, scaled_mm_on_cpus
from layoutc.runtime.weight.tensor import QuantizedTensor

Way = Literal["kernel", "reference", "dequantize"]
ProductName = Literal["forward", "grad_input", "grad_weight"]
Keeps = Literal["nothing"] | Saves  # what is saved of an activation for backward; nothing if the weight is frozen
Recipe = type[QuantizedTensor]
# For each product, the recipe and orientation of the left and the right operand.
OPERANDS: dict[ProductName, tuple[tuple[str, str], tuple[str, str]]] = {
    "forward": (("activation", "rowwise"), ("weight", "rowwise")),
    "grad_input": (("gradient", "rowwise"), ("weight", "columnwise")),
    "grad_weight": (("gradient", "columnwise"), ("activation", "columnwise")),
}
NAMES: tuple[ProductName, ...] = tuple(OPERANDS)
_SHIPPED = "layoutc.recipes"
_ALIGNED = 16  # alignment: elements of a dim of codes, for cuBLAS; bytes of a dim of experts
TILE = (128, 4)  # rows and columns of a tile of block scales
_MOST_EXPERTS = 1023  # one thread per expert prepares its product


class Sizes(NamedTuple):
    """The sizes of a product: output features n, input features k, and the number of tokens.

    experts: the number of experts, each of which multiplies its own tokens; 0: a linear layer. by_columns: the expert
    weight is (experts, k, n), read as `x @ w`; otherwise it is (experts, n, k), read transposed as in linear layers.
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


class Ways(NamedTuple):
    """How each product of one call is computed."""

    forward: Way
    grad_input: Way
    grad_weight: Way


class Chosen(NamedTuple):
    """How one product is computed, and why it does not use a kernel; reason is "" if it does."""

    way: Way
    reason: str


class Recipes(NamedTuple):
    """The recipes of a weight's products."""

    weight: Recipe
    activation: Recipe
    gradient: Recipe


class Plan(NamedTuple):
    """What all calls share that have the same recipe, weight size and number of tokens."""

    ways: Ways
    recipes: Recipes
    missing: Mapping[ProductName, str]  # low-precision product -> why it has no kernel

    def note(self, *names: ProductName) -> None:
        """Counts the given products that have no kernel."""
        for name in names if self.missing else ():
            if name in self.missing:
                _without_kernel[f"{self.recipes.weight.LAYOUT.name} {name}: {self.missing[name]}"] += 1


_without_kernel: Counter[str] = Counter()


def products_without_kernel() -> Counter[str]:
    """Counts low-precision products that found no kernel in this process, by recipe, product and reason.

    Returns a copy. Compiled graphs count when they are traced. Products that a spec has dequantized do not count.

    Raises nothing.

    Example:

        >>> sum(layoutc.products_without_kernel().values()) >= 0
        True
    """
    return Counter(_without_kernel)


def keeps(weight: Recipe, trains: bool, in_graph: bool) -> Keeps:
    """What low-precision products save of an activation for backward. trains: the weight's gradient is needed.

    With stochastic rounding of activations, backward would draw different bits, so the quantized activation is saved.
    """
    if not trains:
        return "nothing"
    return "quantized" if recipes_of(weight).activation.LAYOUT.stochastic else product_mode.saves(in_graph)


@cache
def recipes_of(weight: Recipe) -> Recipes:
    """The recipes that a weight's spec names. Raises LayoutError if one was not built, or has changed since."""
    products = weight.LAYOUT.products
    assert products is not None
    return Recipes(weight, _load(weight, *products.activation), _load(weight, *products.gradient))


def _load(weight: Recipe, name: str, layout_id: str) -> Recipe:
    """The class of a recipe: from the package that contains the weight's, else from layoutc's own recipes."""
    package = weight.__module__.rpartition(".")[0]
    packages = [f"{package.rpartition('.')[0]}.{name}", f"{_SHIPPED}.{name}"]
    for candidate in dict.fromkeys(packages):
        try:
            found: Any = importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name is None or not candidate.startswith(error.name):
                raise
            continue
        if found.LAYOUT.layout_id != layout_id:
            raise LayoutError(
                f"{weight.LAYOUT.name} was built to be multiplied with {name} of layout {layout_id}, and {candidate} "
                f"is of layout {found.LAYOUT.layout_id}: run `layoutc build` for both specs"
            )
        cls: Recipe = found.Tensor
        return cls
    raise LayoutError(
        f"{weight.LAYOUT.name} is multiplied with {name}, and there is no {' and no '.join(packages)}: run `layoutc "
        "build` for its spec too"
    )


def orientation_of(name: ProductName, by_columns: bool) -> str:
    """The weight's orientation in forward or grad_input: the one whose axis the product contracts."""
    return "columnwise" if (name == "forward") == by_columns else "rowwise"


def operands_of(name: ProductName, by_columns: bool) -> tuple[tuple[str, str], tuple[str, str]]:
    """OPERANDS of a product, with the weight's orientation adjusted for by_columns."""
    left, right = OPERANDS[name]
    return left, (right[0], orientation_of(name, by_columns)) if right[0] == "weight" else right


def kernel(cls: Recipe, name: ProductName, by_columns: bool = False) -> Grouped | str:
    """The kernel that multiplies each group of tokens by its expert; or the reason why there is none.

    by_columns: see Sizes.
    """
    products = cls.LAYOUT.products
    assert products is not None  # the spec names recipes for activations and gradients
    stated: Cards | str | None = getattr(products, name)
    if isinstance(stated, str):  # not even scaled_mm supports them
        return stated
    return (products.by_columns if by_columns and products.by_columns else products.grouped)[name]


# ------------------------------------------------------------------------------------------------------------- choosing
@lru_cache(maxsize=4096)
def plan_of(cls: Recipe, sizes: Sizes, device: torch.device, mode: Mode, odd: str = "") -> Plan:
    """The plan for all calls with weights of a recipe and these sizes. odd: why they are always dequantized. The cache
    needs sizes that are numbers; for symbols, in traced graphs, callers use `__wrapped__`."""
    chosen = {name: Chosen("dequantize", odd) if odd else choose(cls, name, sizes, device, mode) for name in NAMES}
    ways, products = Ways(*(one.way for one in chosen.values())), cls.LAYOUT.products
    if products is None:
        return Plan(ways, Recipes(cls, cls, cls), {})
    wanted = {name: one for name, one in chosen.items() if getattr(products, name) is not None}
    lacking = {name: reason for name, (way, reason) in wanted.items() if way != "kernel"}
    missing = {name: reason for name, reason in lacking.items() if not measured.is_choice(reason)}
    return Plan(ways, recipes_of(cls), missing)


def choose(cls: Recipe, name: ProductName, sizes: Sizes, device: torch.device, mode: Mode) -> Chosen:
    """Chooses how a product of these sizes is computed on a device."""
    if mode == "dequantize":
        return Chosen("dequantize", 'products are set to "dequantize"')
    if cls.LAYOUT.products is None:
        return Chosen("dequantize", "the recipe names none for activations")
    if (stated := getattr(cls.LAYOUT.products, name)) is None:
        return Chosen("dequantize", "the spec says so")
    recipes = recipes_of(cls)
    if reason := _unquantizable(recipes, name, sizes):
        return Chosen("dequantize", reason)
    found: Cards | Grouped | str = kernel(cls, name, sizes.by_columns) if sizes.experts else stated
    if isinstance(found, str):
        reason = found
    elif isinstance(found, Grouped):
        reason = not_here(found.cards, device) or _misfit_of_groups(recipes, name, found, sizes)
        if not reason and mode == "low_precision" and type(sizes.tokens) is int:
            each = sizes.tokens / sizes.experts
            if slower := measured.slower(cls.LAYOUT.name, name, sizes.n, sizes.k, each, device):
                return Chosen("dequantize", slower)
    else:
        reason = not_here(found, device) or _misfit(recipes, name, sizes)
    if not reason:
        return Chosen("kernel", "")
    return Chosen("reference" if mode == "reference" else "dequantize", reason)


def _unquantizable(recipes: Recipes, name: ProductName, sizes: Sizes) -> str:
    """Why an operand can't be quantized, or not in groups of tokens; "" if it can."""
    if sizes.tokens == 0:
        return "there are no tokens"
    for role, orientation in operands_of(name, sizes.by_columns):
        recipe: Recipe = getattr(recipes, role)
        layout = recipe.LAYOUT
        if orientation not in layout.orientations:
            return f"{layout.name} has no {orientation} orientation"
        if role == "weight":
            continue
        if not sizes.experts and sizes.tokens % layout.multiple_m:
            return f"{layout.name} takes tokens in multiples of {layout.multiple_m}, not {sizes.tokens}"
        if sizes.experts and shares_all_rows(layout, orientation) and columns_of_groups.why_not(recipe):
            return f"{layout.name} has {orientation} scales of all tokens, which are those of several groups"
    return ""


def not_here(cards: Cards, device: torch.device) -> str:
    """Why a device does not have the kernel; "" if it does."""
    if device.type == "cpu":
        return "" if cards.cpu and scaled_mm_on_cpus else "CPUs have no kernel for it"
    if device.type != "cuda":
        return "" if device.type == "meta" else f"devices of type {device.type} have no kernel for it"
    capability = measured.capability_of(device)
    if capability < cards.least:
        return f"needs compute capability {_dotted(cards.least)}, and the card has {_dotted(capability)}"
    if cards.below is not None and capability >= cards.below:
        return f"needs compute capability below {_dotted(cards.below)}, and the card has {_dotted(capability)}"
    return ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _misfit(recipes: Recipes, name: ProductName, sizes: Sizes) -> str:
    """Why scaled_mm does not support these sizes; "" if it does."""
    m, k, tokens = sizes.n, sizes.k, sizes.tokens
    of_products = {"forward": (tokens, m, k), "grad_input": (tokens, k, m), "grad_weight": (m, k, tokens)}
    left, right, contracted = of_products[name]
    for (role, orientation), free in zip(OPERANDS[name], (left, right), strict=True):
        operand = getattr(recipes, role).LAYOUT.operands[orientation]
        assert isinstance(operand, Operand)
        free_multiple, multiple = _multiples(operand)
        if contracted % multiple:
            return f"{operand.scaling} takes a contracted dim in multiples of {multiple}, not {contracted}"
        if free % free_multiple:
            return f"{operand.scaling} takes a dim in multiples of {free_multiple}, not {free}"
    if right % _ALIGNED:
        return f"scaled_mm takes a dim in multiples of {_ALIGNED}, not {right}"
    return ""


def _multiples(operand: Operand) -> tuple[int, int]:
    """The required multiples of the free and the contracted dim: whole blocks of 128, and groups of 16 bytes.

    cuBLAS reads scales of 1x128 blocks in groups of 16 bytes along the free dim.
    """
    codes = 2 if operand.codes == torch.float4_e2m1fn_x2 else 1
    free = {"BlockWise128x128": 128, "BlockWise1x128": 4}.get(operand.scaling, 1)
    return free, 128 if operand.scaling.endswith("x128") else _ALIGNED * codes


def _misfit_of_groups(recipes: Recipes, name: ProductName, found: Grouped, sizes: Sizes) -> str:
    """Why scaled_grouped_mm, or this version of torch, does not support these sizes; "" if both do."""
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
    codes = 2 if operand.codes == torch.float4_e2m1fn_x2 else 1  # per byte
    if operand.tensor_scale is not None and not scaled_grouped_mm_v2_is_traced:
        return f"scaled_grouped_mm of {found.kind} and a scale of the tensor can be traced since torch 2.14"
    rows, columns = (1, 1) if found.kind == "RowWise" else TILE
    block = int(found.kind.rpartition("x")[2]) if rows > 1 else 1
    # Each expert's scales fill whole tiles, so the scales of all experts are contiguous.
    multiples = {"rowwise": (rows, _ALIGNED * codes), "columnwise": (1, columns * block)}[orientation]
    for size, multiple, what in (
        (free, max(multiples[0], _ALIGNED), "a dim"),
        (contracted, max(multiples[1], _ALIGNED * codes), "a contracted dim"),
    ):
        if size % multiple:
            return f"scaled_grouped_mm takes {what} of experts in multiples of {multiple}, not {size}"
    return ""
