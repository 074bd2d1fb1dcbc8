"""Which products of a linear layer scaled_mm can do, as a spec says them, and the reason where it can't."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from numpy_models import recipe_layout, variant

from layoutc.emit.products_text import products_lines
from layoutc.layout.layout import Layout
from layoutc.plan import products as of_plan
from layoutc.plan.plan import Plan, derive, layout_id
from layoutc.plan.products import OPERANDS, SCALINGS, Cards, Grouped, Operand, Product, operand, products_of
from layoutc.report.products import product_tables


def products(weight: Layout, **others: Layout) -> dict[str, Cards | str]:
    """Of each product, where it has a kernel, or why it has none."""
    assert weight.others is not None
    named = {name: recipe_layout(name) for name in (weight.others.activation, weight.others.gradient)} | others
    found = products_of(weight, named)
    assert found is not None
    return {one.name: one.cards or one.reason for one in found.products}


def edited(name: str, *path: str | int, value: Any) -> Layout:
    """A recipe with one value of its YAML replaced."""

    def edit(data: dict[str, Any]) -> None:
        inner: Any = data
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value

    return variant(name, edit)


HOPPER, BLACKWELL, ALL = Cards((9, 0), (10, 0)), Cards((10, 0), (11, 0)), Cards((8, 9), cpu=True)


@pytest.mark.parametrize(
    ("name", "cards"),
    [
        ("fp8_block", (HOPPER,) * 3),
        ("fp8_block_1d", (HOPPER,) * 3),
        ("fp8_current", (ALL,) * 3),
        ("fp8_delayed", (ALL,) * 3),
        ("fp8_e5m2_current", (ALL,) * 3),
        ("fp8_rowwise", (ALL, ALL, "")),
        ("mxfp8", (BLACKWELL,) * 3),
        ("mxfp8_2d", (BLACKWELL,) * 3),
        ("nvfp4", (BLACKWELL,) * 3),
        ("nvfp4_1d", (BLACKWELL,) * 3),
        ("nvfp4_4over6", (BLACKWELL,) * 3),
    ],
)
def test_shipped_recipes(name: str, cards: tuple[Cards | str, ...]) -> None:
    assert tuple(products(recipe_layout(name)).values()) == cards


def test_transforms_that_do_not_cancel_have_no_kernel() -> None:
    """The gradient of the weight alone contracts transformed values; the reason names both operands."""
    weight = edited("nvfp4", "gemm", "gradient", value="nvfp4_1d")
    found = products(weight)
    assert (found["forward"], found["grad_input"]) == (BLACKWELL, BLACKWELL)
    assert found["grad_weight"] == (
        "its operands have different transforms, which do not cancel (nvfp4_1d columnwise: none; "
        "nvfp4_activation columnwise: Hadamard 16 along m, signs 0xd7e8)"
    )
    other = edited("nvfp4_gradient", "orientations", "columnwise", "transform", "signs", value=1)
    assert "signs 0x1; nvfp4_activation" in str(products(recipe_layout("nvfp4"), nvfp4_gradient=other)["grad_weight"])


def test_the_scale_of_transformed_values_is_that_of_the_amax_and_what_they_grow_by() -> None:
    plain, transformed = (operand(recipe_layout(name), "columnwise") for name in ("nvfp4_1d", "nvfp4_gradient"))
    assert isinstance(plain, Operand)
    assert isinstance(transformed, Operand)
    assert plain.tensor_scale is not None
    assert transformed.tensor_scale == 4 * plain.tensor_scale


GRADIENT = "it contracts groups of tokens, and no kernel is called for that"


@pytest.mark.parametrize(
    ("name", "forward", "grad_input", "grad_weight"),
    [
        ("fp8_block", *("scaled_grouped_mm does not take BlockWise1x128 by BlockWise128x128",) * 2, GRADIENT),
        ("fp8_current", "RowWise 9.0 10.0", "scaled_grouped_mm does not take float8_e5m2", GRADIENT),
        ("fp8_rowwise", "RowWise 9.0 10.0", "RowWise 9.0 10.0", ""),
        ("fp8_rowwise_all", *("RowWise 9.0 10.0",) * 3),
        ("mxfp8", "BlockWise1x32 10.0 11.0", "BlockWise1x32 10.0 11.0", GRADIENT),
        ("mxfp8_2d", "BlockWise1x32 10.0 11.0", "BlockWise1x32 10.0 11.0", GRADIENT),
        ("nvfp4", "BlockWise1x16 10.0 11.0", "BlockWise1x16 10.0 11.0", GRADIENT),
    ],
)
def test_weights_of_experts(name: str, forward: str, grad_input: str, grad_weight: str) -> None:
    """Kernels as kind and cards, or the reason why there is none."""
    layout = recipe_layout(name)
    assert layout.others is not None
    found = products_of(layout, {one: recipe_layout(one) for one in (layout.others.activation, layout.others.gradient)})
    assert found is not None
    said = [one.grouped if isinstance(one.grouped, str) else _words(one.grouped) for one in found.products]
    assert said == [forward, grad_input, grad_weight]


def _words(kernel: Grouped) -> str:
    below = kernel.cards.below
    assert below is not None
    return " ".join([kernel.kind, *(f"{major}.{minor}" for major, minor in (kernel.cards.least, below))])


def test_experts_whose_operands_differ_have_no_kernel() -> None:
    """Those that no linear layer multiplies are not multiplied in groups either, for the same reason."""
    blocks = edited("mxfp8", "gemm", "activation", value="nvfp4_1d")
    found = products_of(blocks, {"nvfp4_1d": recipe_layout("nvfp4_1d")})
    assert found is not None
    assert found.products[0].reason == "scaled_mm does not take BlockWise1x16 by BlockWise1x32"
    assert found.products[0].grouped == ""
    integers = edited("fp8_block", "gemm", "activation", value="int8_block")
    found = products_of(integers, {"int8_block": recipe_layout("int8_block")})
    assert found is not None
    assert found.products[0].reason
    assert found.products[0].grouped == ""


def test_experts_with_another_number_of_scales_have_no_kernel() -> None:
    """That of blocks of 16 wants a scale of the tensor, and the others none."""
    for name, scale, words in (("nvfp4_1d", None, "without"), ("mxfp8", 1.0, "with"), ("fp8_rowwise", 1.0, "with")):
        one = operand(recipe_layout(name), "rowwise")
        assert isinstance(one, Operand)
        assert isinstance(of_plan._grouped("forward", one, one), Grouped)
        found = of_plan._grouped("forward", replace(one, tensor_scale=scale), one)
        assert found == f"scaled_grouped_mm does not take {one.scaling.name} {words} a scale of the tensor"


def test_a_plan_has_products_where_the_spec_states_them() -> None:
    block, activations = recipe_layout("fp8_block"), recipe_layout("fp8_block_1d")
    assert derive(block).products is None  # nobody has looked for the recipe of activations
    assert derive(block, {"fp8_block_1d": activations}).products is not None
    assert derive(recipe_layout("int8_block"), {}).products is None


def test_gradients_follow_activations_where_the_spec_does_not_say() -> None:
    assert recipe_layout("mxfp8").others == recipe_layout("mxfp8_2d").others
    stated = recipe_layout("fp8_current").others
    assert stated is not None
    assert (stated.activation, stated.gradient, stated.dequantized) == ("fp8_current", "fp8_e5m2_current", ())


def test_products_do_not_change_the_layout_id() -> None:
    """They are arithmetic on what is stored, not what is stored."""
    without = edited("fp8_block", "gemm", value={"activation": "mxfp8"})
    assert layout_id(without) == layout_id(recipe_layout("fp8_block")) == "09c0d85eeed1"


@pytest.mark.parametrize(
    ("weight", "activation", "reason"),
    [
        ("fp8_current", "fp8_rowwise", "scaled_mm does not take RowWise by TensorWise"),
        ("fp8_block", "fp8_block", "BlockWise128x128 for one operand, with BlockWise1x128 for the other"),
        ("mxfp8", "nvfp4_1d", "scaled_mm does not take BlockWise1x16 by BlockWise1x32"),
        ("fp8_e5m2_current", "fp8_e5m2_current", "does not take float8_e5m2 for both operands"),
        ("fp8_block", "int8_block", "int8_block rowwise: scaled_mm has no dtype for codes of this format"),
        ("fp8_block", "int4_group32", "int4_group32 rowwise: scaled_mm knows no zero points"),
    ],
)
def test_pairs_that_scaled_mm_does_not_take(weight: str, activation: str, reason: str) -> None:
    named = edited(weight, "gemm", "activation", value=activation)
    found = products(named)["forward"]
    assert isinstance(found, str)
    assert reason in found


def narrower(data: dict[str, Any]) -> None:
    for orientation, block, scale in (
        ("rowwise", {"m": 1, "k": 64}, "k/64 m"),
        ("columnwise", {"m": 64, "k": 1}, "m/64 k"),
    ):
        data["orientations"][orientation] |= {"block": block, "scale": {"layout": scale}}


def row_major(data: dict[str, Any]) -> None:
    data["orientations"]["rowwise"]["scale"]["layout"] = "m k/128"
    data["orientations"]["rowwise"]["scale"]["pad"] = [4, 1]


def unpadded(data: dict[str, Any]) -> None:
    for orientation in ("rowwise", "columnwise"):
        data["orientations"][orientation]["scale"]["pad"] = [1, 1]


def half_tiles(data: dict[str, Any]) -> None:
    data["gemm"]["scale"] = {"swizzle": "(rt a b) (ct c) -> rt ct b a c", "a": 2, "b": 64, "c": 4}


def taller_tiles(data: dict[str, Any]) -> None:
    data["gemm"]["scale"] = {"swizzle": "(rt a b) (ct c) -> rt ct b a c", "a": 3, "b": 32, "c": 4}
    for orientation, pad in (("rowwise", [384, 4]), ("columnwise", [4, 384])):
        data["orientations"][orientation]["scale"]["pad"] = pad


def same_tiles_in_other_words(data: dict[str, Any]) -> None:
    data["gemm"]["scale"] = {
        "swizzle": "(tile quarter row) (four one) -> tile four row quarter one",
        "quarter": 4,
        "row": 32,
        "one": 4,
    }


def without_tiles(data: dict[str, Any]) -> None:
    del data["gemm"]["scale"]


def padded_codes(data: dict[str, Any]) -> None:
    data["orientations"]["rowwise"]["data"]["pad"] = [16, 16]


@pytest.mark.parametrize(
    ("name", "edit", "reason"),
    [
        ("fp8_block_1d", narrower, "no kind of scales with a float32 scale for 1 by 64 float8_e4m3fn codes"),
        ("fp8_block_1d", row_major, "BlockWise1x128 scales lie as (k m), and these as (m k)"),
        ("fp8_block", unpadded, "BlockWise128x128 scales have multiples of 4 along k, these of 1"),
        ("mxfp8", half_tiles, "BlockWise1x32 scales are read in tiles of 32 x 4 x 4, and gemm.scale does not say so"),
        ("mxfp8", taller_tiles, "BlockWise1x32 scales are read in tiles of 32 x 4 x 4, and gemm.scale does not say so"),
        (
            "mxfp8",
            without_tiles,
            "BlockWise1x32 scales are read in tiles of 32 x 4 x 4, and gemm.scale does not say so",
        ),
        ("fp8_current", padded_codes, "its codes are padded"),
    ],
)
def test_buffers_that_scaled_mm_does_not_read(name: str, edit: Callable[[dict[str, Any]], None], reason: str) -> None:
    found = operand(variant(name, edit), "rowwise")
    assert isinstance(found, str)
    assert reason in found


def test_a_swizzle_counts_by_what_it_does() -> None:
    """Its names and groups are the spec's own affair."""
    assert operand(variant("mxfp8", same_tiles_in_other_words), "rowwise") == operand(recipe_layout("mxfp8"), "rowwise")


def test_what_each_operand_is() -> None:
    found = operand(recipe_layout("nvfp4"), "columnwise")
    assert isinstance(found, Operand)
    assert (found.scaling.name, found.element, found.transposes) == ("BlockWise1x16", "float4_e2m1fn_x2", False)
    assert found.tensor_scale == pytest.approx(1 / (6 * 448), rel=2**-24)
    transposed = operand(recipe_layout("mxfp8"), "columnwise")
    assert isinstance(transposed, Operand)
    assert transposed.transposes  # its columnwise codes lie as (m, k), and the product contracts m


def test_kinds_of_scales_are_named_as_torch_names_them() -> None:
    from torch.nn.functional import ScalingType

    assert {scaling.name for scaling in SCALINGS} == set(ScalingType.__members__)


def test_each_product_contracts_the_same_axis_of_both_operands() -> None:
    """Of (tokens, k) activations, (tokens, m) gradients and an (m, k) weight."""
    axes = {"weight": ("m", "k"), "activation": ("tokens", "k"), "gradient": ("tokens", "m")}
    contracted = {
        name: {axes[role][1 if orientation == "rowwise" else 0] for role, orientation in sides}
        for name, sides in OPERANDS.items()
    }
    assert contracted == {"forward": {"k"}, "grad_input": {"m"}, "grad_weight": {"tokens"}}


def test_the_runtime_has_the_same_operands() -> None:
    """It imports nothing of the compiler, and so has the table again."""
    from layoutc.runtime.products import choice

    assert choice.OPERANDS == OPERANDS


def with_products(change: Callable[[Product], Product]) -> Plan:
    """The plan of mxfp8, whose linear layers have a kernel for each product, with others."""
    layout = recipe_layout("mxfp8")
    plan = derive(layout, {"mxfp8": layout})
    assert plan.products is not None
    assert all(one.cards and one.grouped for one in plan.products.products)
    return replace(plan, products=replace(plan.products, products=tuple(map(change, plan.products.products))))


def test_kernels_of_experts_by_columns_are_told_where_one_differs() -> None:
    same = with_products(lambda one: replace(one, by_columns=one.grouped))
    differ = with_products(lambda one: replace(one, by_columns="no" if one.name == "forward" else one.grouped))
    assert not any("by_columns" in line for line in products_lines(same))
    assert sum("by_columns" in line for line in products_lines(differ)) == 1


def test_why_experts_have_no_kernel_is_what_a_linear_layer_is_told() -> None:
    plan = with_products(lambda one: Product(one.name, None, "not today" if one.name == "forward" else ""))
    told = dict(product_tables(plan)[1].rows)
    assert told["forward"] == "dequantized: not today"
    assert told["grad_input"] == "dequantized: gemm.dequantize says so"
