"""Explains a model's products: which kernel computes each, or why none does."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from layoutc.runtime import product_mode
from layoutc.runtime.errors import check_model
from layoutc.runtime.facts import Operand
from layoutc.runtime.product_mode import Mode, Settings, checked
from layoutc.runtime.products.choice import NAMES, OPERANDS, ProductName, Recipe, Sizes, Way, choose, kernel, recipes_of
from layoutc.runtime.products.parallel import multiplied, multiplies_parts
from layoutc.runtime.products.per_weight_mode import own_mode_holder
from layoutc.runtime.sharding import gathered
from layoutc.runtime.stored_by_columns import is_stored_by_columns
from layoutc.runtime.weight.tensor import recipe_of

_OF_DTENSORS = (
    "the weight is a DTensor, whose gradient autograd computes of plain activations and gradients, without the weight; "
    'layoutc.set_products_(model, "low_precision"), called after parallelize_module, lets linear layers have it'
)
_TOKENS = 16384  # a multiple of everything that recipes and kernels require


class ExplainedProduct(NamedTuple):
    """One product of one weight.

    kernel: the kinds of scales that scaled_mm reads, or scaled_grouped_mm for weights of experts; "" without a kernel.
    own_mode: the per-weight override of `layoutc.set_products_`; None: the weight follows the mode for all weights.
    """

    name: str
    shape: tuple[int, ...]
    recipe: str
    product: ProductName
    way: Way
    kernel: str
    reason: str
    own_mode: Settings | None = None

    def __str__(self) -> str:
        """One line of text."""
        function = "scaled_mm" if len(self.shape) == 2 else "scaled_grouped_mm"
        how = f"{function}, {self.kernel}" if self.kernel else self.way
        because = f": {self.reason}" if self.reason else ""
        own = "" if self.own_mode is None else f" (its own choice: {self.own_mode})"
        return f"{self.name} {'x'.join(map(str, self.shape))} {self.recipe} {self.product}: {how}{because}{own}"


def explain_products(
    model: nn.Module, *, tokens: int = _TOKENS, device: torch.device | str | None = None, mode: Mode | None = None
) -> list[ExplainedProduct]:
    """Lists how each product of a model's quantized weights is computed, before or after fully_shard; runs nothing.

    tokens: rows of activations with leading dims flattened, per linear layer or for all experts together. device:
    defaults to each weight's. mode: for weights without an override by `layoutc.set_products_`; defaults to the current
    mode, or to "low_precision" if that is "dequantize". Tensor-parallel weights are multiplied as parts.

    Raises ValueError for an unknown mode.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "fp8_block")
        ['0.weight']
        >>> print(layoutc.explain_products(model, device="cpu")[0])
        0.weight 128x128 fp8_block forward: dequantize: CPUs have no kernel for it
    """
    check_model(model, "explain_products")
    found: list[ExplainedProduct] = []
    set_for_all = product_mode.current().products
    usual: Mode = "low_precision" if set_for_all in (None, "dequantize") else set_for_all
    wanted = mode if mode == "reference" else checked(mode).products or usual
    uses = [(module, *pair) for module in model.modules() for pair in module.named_parameters(recurse=False)]
    by_parts = {id(param) for module, _, param in uses if multiplies_parts(module)}
    by_columns = {id(param) for module, key, param in uses if is_stored_by_columns(module, key)}
    gathered_as_values = gathered.weights_of_values()
    for name, held in model.named_parameters():
        param = gathered_as_values.get(id(held), held)
        if (cls := recipe_of(param)) is not None:
            where = torch.device(device) if device is not None else param.device
            forms = id(held) in by_columns, id(held) in by_parts
            found += _explained(name, param, cls, tokens, where, wanted, *forms)
    return found


def _explained(
    name: str,
    param: Any,
    cls: Recipe,
    tokens: int,
    device: torch.device,
    wanted: Mode,
    by_columns: bool,
    by_parts: bool,
) -> list[ExplainedProduct]:
    shape, (part, is_part) = tuple(param.shape), multiplied(param)
    own: Settings | None = own_mode_holder(param).own_products
    wanted = wanted if own is None or own.products is None else own.products
    on_gather = wanted == "dequantize" and own is not None and own.dequantize == "gather"
    rows = []
    way: Way
    for product in NAMES:
        if on_gather:
            way, reason = "dequantize", "gathers leave values"
        elif len(part) in (2, 3):
            n, k = reversed(part[-2:]) if by_columns else part[-2:]
            sizes = Sizes(part[0] if len(part) == 3 else 0, n, k, tokens, by_columns)
            way, reason = choose(cls, product, sizes, device, wanted)
        else:
            way, reason = "dequantize", f"weights of {len(part)} dims have no products in low precision"
        if is_part and not by_parts and len(part) == 2 and product == "grad_weight" and way != "dequantize":
            way, reason = "dequantize", _OF_DTENSORS
        by = _kernel(cls, product, len(shape) > 2, by_columns) if way == "kernel" else ""
        rows.append(ExplainedProduct(name, shape, cls.LAYOUT.name, product, way, by, reason, own))
    return rows


def _kernel(cls: Recipe, product: ProductName, of_experts: bool, by_columns: bool) -> str:
    """The kinds of scales of both operands."""
    if of_experts:
        found = kernel(cls, product, by_columns)
        return "" if isinstance(found, str) else f"{found.kind} by {found.kind}"
    recipes = recipes_of(cls)
    operands = (getattr(recipes, role).LAYOUT.operands[orientation] for role, orientation in OPERANDS[product])
    return " by ".join(operand.scaling for operand in operands if isinstance(operand, Operand))
