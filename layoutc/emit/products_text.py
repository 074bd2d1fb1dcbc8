"""The part of layout.py about low-precision products: how scaled_mm reads the recipe, and where each has a kernel."""

from __future__ import annotations

from collections.abc import Mapping

from layoutc.plan.plan import Plan, layout_id
from layoutc.plan.products import Cards, Grouped, Operand, ProductName, operand


def products_lines(plan: Plan) -> list[str]:
    """Arguments of the recipe's Layout, one per line."""
    operands = (f'"{name}": {_operand(operand(plan.layout, name))}' for name in plan.layout.orientations)
    lines = [f"operands={{{', '.join(operands)}}},"]
    if plan.products is None:
        return lines
    found = plan.products.products
    differ = any(one.grouped != one.by_columns for one in found)
    others = (("activation", plan.products.activation), ("gradient", plan.products.gradient))
    return [
        *lines,
        "products=Products(",
        *(f'    {role}=("{layout.name}", "{layout_id(layout)}"),' for role, layout in others),
        *(f"    {product.name}={_kernel(product.cards or product.reason or None)}," for product in found),
        *_grouped_lines("grouped", {one.name: one.grouped for one in found if one.grouped}),
        *(_grouped_lines("by_columns", {one.name: one.by_columns for one in found if one.grouped}) if differ else ()),
        "),",
    ]


def _grouped_lines(name: str, kernels: Mapping[ProductName, Grouped | str]) -> list[str]:
    return [f"    {name}={{", *(f'        "{product}": {_kernel(one)},' for product, one in kernels.items()), "    },"]


def _operand(found: Operand | str) -> str:
    if isinstance(found, str):
        return f'"{found}"'
    arguments = [f'"{found.scaling.name}"', f"torch.{found.element}", f"torch.{found.scaling.scale}"]
    arguments += ["transposes=True"] if found.transposes else []
    arguments += [] if found.tensor_scale is None else [f"tensor_scale={found.tensor_scale!r}"]
    return f"Operand({', '.join(arguments)})"


def _kernel(found: Cards | Grouped | str | None) -> str:
    """A kernel's cards, and its kind for groups of tokens; or why there is none, if the spec wants one."""
    match found:
        case Grouped(kind, cards):
            return f'Grouped("{kind}", {_kernel(cards)})'
        case Cards(least, below, cpu):
            return f"Cards({least}{f', below={below}' if below else ''}{', cpu=True' if cpu else ''})"
        case None:
            return "None"
    return f'"{found}"'
