"""The text of `layoutc show --products`: a linear layer's products, and where each has a kernel or why it has none."""

from __future__ import annotations

from layoutc.layout.layout import Layout
from layoutc.plan.plan import Plan
from layoutc.plan.products import OPERANDS, Cards, Grouped, Operand, Product, Products, Role, operand
from layoutc.report.tables import Table

_FORMULAS = {"forward": "y = x w^T", "grad_input": "dx = dy w", "grad_weight": "dw = dy^T x"}


def product_tables(plan: Plan) -> list[Table]:
    """The products of a recipe's weights. For a recipe without products, how scaled_mm would read it."""
    layout = plan.layout
    if plan.products is None:
        rows = [("products", "weights are dequantized, since the spec has no gemm.activation")]
        if len(layout.orientations) == 1 and layout.use == "weight" and not plan.not_weights:
            rows += [("backward", "dequantizes forward's codes, whether weights train or are frozen")]
        rows += [(name, _reading(operand(layout, name))) for name in layout.orientations]
        return [Table(f"{layout.name}: no products in low precision", (), tuple(rows))]
    heads = ("product", "", "left operand", "right operand", "kernel")
    lines = tuple(_line(layout, plan.products, product) for product in plan.products.products)
    names = plan.products.activation.name, plan.products.gradient.name
    title = f"{layout.name}: products with activations in {names[0]}, gradients of outputs in {names[1]}"
    kinds = tuple(_kinds(layout, plan.products))
    return [
        Table(title, heads, lines),
        Table("Of experts, as F.grouped_mm multiplies them", ("product", "kernel"), _of_experts(plan.products)),
        Table("How scaled_mm reads each operand", ("recipe", "orientation", ""), kinds),
    ]


def _roles(weight: Layout, products: Products) -> dict[Role, Layout]:
    return {"weight": weight, "activation": products.activation, "gradient": products.gradient}


def _line(weight: Layout, products: Products, product: Product) -> tuple[str, ...]:
    roles = _roles(weight, products)
    sides = [f"{role} {orientation}, {roles[role].name}" for role, orientation in OPERANDS[product.name]]
    why = "dequantized: " + (product.reason or "gemm.dequantize says so")
    return product.name, _FORMULAS[product.name], *sides, _cards(product.cards) if product.cards else why


def _of_experts(products: Products) -> tuple[tuple[str, str], ...]:
    """Each product of a 3-D weight with groups of tokens: where scaled_grouped_mm computes it, or why nowhere."""
    return tuple(
        (
            product.name,
            _cards(product.grouped.cards, f"scaled_grouped_mm, {product.grouped.kind} scales")
            if isinstance(product.grouped, Grouped)
            else "dequantized: " + (product.grouped or product.reason or "gemm.dequantize says so"),
        )
        for product in products.products
    )


def _cards(cards: Cards, function: str = "scaled_mm") -> str:
    least = f"compute capability {cards.least[0]}.{cards.least[1]}"
    until = " and later" if cards.below is None else f", below {cards.below[0]}.{cards.below[1]}"
    return f"{function}: {least}{until}{', and CPUs' if cards.cpu else ''}"


def _kinds(weight: Layout, products: Products) -> list[tuple[str, ...]]:
    """A row for each distinct recipe and orientation that a product reads."""
    roles = _roles(weight, products)
    read = dict.fromkeys((roles[role], side) for sides in OPERANDS.values() for role, side in sides)
    return [(layout.name, side, _reading(operand(layout, side)) + _transform(layout, side)) for layout, side in read]


def _transform(layout: Layout, orientation: str) -> str:
    transform = layout.transforms.get(orientation)
    return f"; of values multiplied by {transform}" if transform else ""


def _reading(found: Operand | str) -> str:
    if isinstance(found, str):
        return f"can't: {found}"
    words = [f"{found.element} with {found.scaling.name} scales of {found.scaling.scale}"]
    words += ["scales swizzled"] if found.scaling.swizzled else []
    words += ["a second scale, of the tensor"] if found.tensor_scale is not None else []
    words += ["codes transposed first, in a launch of their own"] if found.transposes else []
    return ", ".join(words)
