"""How each product of a weight is computed, and why: by a kernel of the card, from quantized values, or dequantized."""

from __future__ import annotations

import importlib
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import torch

from layoutc.runtime import product_mode
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Cards, Layout, Operand
from layoutc.runtime.product_mode import Mode, Saves
from layoutc.runtime.torch_private import scaled_mm_on_cpus
from layoutc.runtime.weight.tensor import QuantizedTensor

Way = Literal["kernel", "reference", "dequantize"]
ProductName = Literal["forward", "grad_input", "grad_weight"]
Keeps = Literal["nothing"] | Saves  # of an activation, for backward; nothing where the weight does not train
Recipe = type[QuantizedTensor]
# Of each product, the recipe of the left operand, that of the right one, and the orientation of each.
OPERANDS: dict[ProductName, tuple[tuple[str, str], tuple[str, str]]] = {
    "forward": (("activation", "rowwise"), ("weight", "rowwise")),
    "grad_input": (("gradient", "rowwise"), ("weight", "columnwise")),
    "grad_weight": (("gradient", "columnwise"), ("activation", "columnwise")),
}
NAMES: tuple[ProductName, ...] = tuple(OPERANDS)
_SHIPPED = "layoutc.recipes"
_ALIGNED = 16  # elements of a dim of codes, as cuBLAS wants them


class Chosen(NamedTuple):
    """How one product is computed, and why not by a kernel; reason is "" where it is."""

    way: Way
    reason: str


class Recipes(NamedTuple):
    """The recipes of a weight's products."""

    weight: Recipe
    activation: Recipe
    gradient: Recipe


def keeps(weight: Recipe, trains: bool, in_graph: bool) -> Keeps:
    """What the products of a weight in low precision keep of an activation. trains: the weight's gradient is wanted.

    Where activations are rounded by chance, backward would draw other bits: then what was quantized is kept.
    """
    if not trains:
        return "nothing"
    return "quantized" if recipes_of(weight).activation.LAYOUT.stochastic else product_mode.saves(in_graph)


@cache
def recipes_of(weight: Recipe) -> Recipes:
    """The recipes that a weight's spec names. Raises LayoutError if one was not built, or was changed since."""
    products = weight.LAYOUT.products
    assert products is not None
    return Recipes(weight, _load(weight, *products.activation), _load(weight, *products.gradient))


def _load(weight: Recipe, name: str, layout_id: str) -> Recipe:
    """The class of a recipe: from the package beside the weight's, else from those that layoutc ships."""
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


def choose(cls: Recipe, name: ProductName, m: int, k: int, tokens: int, device: torch.device, mode: Mode) -> Chosen:
    """How a product of an (m, k) weight and `tokens` rows of activations is computed on a device."""
    if mode == "dequantize":
        return Chosen("dequantize", 'products are set to "dequantize"')
    if cls.LAYOUT.products is None:
        return Chosen("dequantize", "the recipe names none for activations")
    stated: Cards | str | None = getattr(cls.LAYOUT.products, name)
    if stated is None:
        return Chosen("dequantize", "the spec says so")
    recipes = recipes_of(cls)
    reason = _unquantizable(recipes, name, tokens)
    if reason:
        return Chosen("dequantize", reason)
    reason = stated if isinstance(stated, str) else not_here(stated, device) or _misfit(recipes, name, m, k, tokens)
    if not reason:
        return Chosen("kernel", "")
    return Chosen("reference" if mode == "reference" else "dequantize", reason)


def _unquantizable(recipes: Recipes, name: ProductName, tokens: int) -> str:
    """Why an operand can't be quantized at all."""
    if tokens == 0:
        return "there are no tokens"
    for role, orientation in OPERANDS[name]:
        layout: Layout = getattr(recipes, role).LAYOUT
        if orientation not in layout.orientations:
            return f"{layout.name} has no {orientation} orientation"
        if role != "weight" and tokens % layout.multiple_m:
            return f"{layout.name} takes tokens in multiples of {layout.multiple_m}, not {tokens}"
    return ""


def not_here(cards: Cards, device: torch.device) -> str:
    """Why a device does not have the kernel."""
    if device.type == "cpu":
        return "" if cards.cpu and scaled_mm_on_cpus else "CPUs have no kernel for it"
    if device.type != "cuda":
        return "" if device.type == "meta" else f"devices of type {device.type} have no kernel for it"
    capability = capability_of(device)
    if capability < cards.least:
        return f"needs compute capability {_dotted(cards.least)}, and the card has {_dotted(capability)}"
    if cards.below is not None and capability >= cards.below:
        return f"needs compute capability below {_dotted(cards.below)}, and the card has {_dotted(capability)}"
    return ""


@lru_cache
def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _misfit(recipes: Recipes, name: ProductName, m: int, k: int, tokens: int) -> str:
    """Why scaled_mm does not take these sizes."""
    sizes = {"forward": (tokens, m, k), "grad_input": (tokens, k, m), "grad_weight": (m, k, tokens)}
    left, right, contracted = sizes[name]
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
    """What the free and the contracted dim must be multiples of: whole blocks of 128, and bytes in groups of 16.

    cuBLAS reads scales of 1x128 blocks in groups of 16 bytes along the free dim.
    """
    codes = 2 if operand.codes == torch.float4_e2m1fn_x2 else 1
    free = {"BlockWise128x128": 128, "BlockWise1x128": 4}.get(operand.scaling, 1)
    return free, 128 if operand.scaling.endswith("x128") else _ALIGNED * codes
