"""Low-precision products: how torch's `scaled_mm` reads each operand, on which cards, or why it can't.

For expert weights, `scaled_grouped_mm` reads the same operands in groups.

A linear layer y = x w^T with a weight w of shape (m, k) has three products. Each contracts both operands' last dim:

    forward      y  (t, m) = x  (t, k) by w   (m, k)      rowwise activations, rowwise weight
    grad_input   dx (t, k) = dy (t, m) by w^T (k, m)      rowwise gradients, columnwise weight
    grad_weight  dw (m, k) = dy^T (m, t) by x^T (k, t)    columnwise gradients, columnwise activations

Activations and gradients have ordinary recipes, whose m is the number of tokens. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from layoutc.layout.layout import Buffer, Dim, Layout, Source, swizzle_chain
from layoutc.plan.conversions import E2M1
from layoutc.spec.formats import Format
from layoutc.spec.notation import Axis, Swizzle, parse_swizzle
from layoutc.spec.rule_constants import constant

Role = Literal["weight", "activation", "gradient"]
ProductName = Literal["forward", "grad_input", "grad_weight"]
# The (role, orientation) of both operands of a product, in `scaled_mm`'s order.
Pair = tuple[tuple[Role, str], tuple[Role, str]]
OPERANDS: Mapping[ProductName, Pair] = {
    "forward": (("activation", "rowwise"), ("weight", "rowwise")),
    "grad_input": (("gradient", "rowwise"), ("weight", "columnwise")),
    "grad_weight": (("gradient", "columnwise"), ("activation", "columnwise")),
}


@dataclass(frozen=True)
class Cards:
    """Where a kernel runs: compute capabilities in [least, below), and CPUs if `cpu`."""

    least: tuple[int, int]
    below: tuple[int, int] | None = None
    cpu: bool = False

    def both(self, other: Cards) -> Cards:
        """Where both kernels run."""
        ends = [one for one in (self.below, other.below) if one is not None]
        return Cards(max(self.least, other.least), min(ends, default=None), self.cpu and other.cpu)


@dataclass(frozen=True)
class Scaling:
    """A kind of scales that `scaled_mm` accepts: a member of torch.nn.functional.ScalingType and its requirements.

    free, contraction: the block size along each of the operand's axes; None: the whole axis. pad: the multiples that
    the scale's (free, contraction) dims are padded to. contraction_first: the contraction is the scale's outer dim.
    swizzled: in tiles of 32 x 4 x 4 (cuBLAS; torch's SWIZZLE_32_4_4).
    """

    name: str
    elements: tuple[str, ...]  # torch dtypes
    scale: str  # torch dtype
    free: int | None
    contraction: int | None
    cards: Cards
    pad: tuple[int, int] = (1, 1)
    contraction_first: bool = False
    swizzled: bool = False


_FP8, _FP4 = ("float8_e4m3fn", "float8_e5m2"), ("float4_e2m1fn_x2",)
_TILES = parse_swizzle("(rt a b) (ct c) -> rt ct b a c", {"a": 4, "b": 32, "c": 4})
_TILE = (128, 4)
# From torch 2.11 to 2.14: aten/src/ATen/native/cuda/ScaledBlas.cpp and its meta function's checks.
SCALINGS = (
    Scaling("TensorWise", _FP8, "float32", None, None, Cards((8, 9), cpu=True)),
    Scaling("RowWise", _FP8, "float32", 1, None, Cards((8, 9), cpu=True)),
    Scaling("BlockWise1x128", _FP8, "float32", 1, 128, Cards((9, 0), (10, 0)), contraction_first=True),
    Scaling("BlockWise128x128", _FP8, "float32", 128, 128, Cards((9, 0), (10, 0)), pad=(1, 4)),
    Scaling("BlockWise1x32", _FP8, "float8_e8m0fnu", 1, 32, Cards((10, 0), (11, 0)), pad=_TILE, swizzled=True),
    Scaling("BlockWise1x16", _FP4, "float8_e4m3fn", 1, 16, Cards((10, 0), (11, 0)), pad=_TILE, swizzled=True),
)
_MIXED = ({"BlockWise1x128", "BlockWise128x128"},)  # different kinds that one product accepts
# The kind that `scaled_grouped_mm` reads each kind as, and its cards. From torch 2.11 to 2.14: GroupedBlas.cpp, next to
# ScaledBlas.cpp. Its RowWise kernel exists only for Hopper; it gets a tensor's scale as the scale of each row.
GROUPED: Mapping[str, tuple[str, Cards]] = {
    "TensorWise": ("RowWise", Cards((9, 0), (10, 0))),
    "RowWise": ("RowWise", Cards((9, 0), (10, 0))),
    "BlockWise1x32": ("BlockWise1x32", Cards((10, 0), (11, 0))),
    "BlockWise1x16": ("BlockWise1x16", Cards((10, 0), (11, 0))),
}
UNDER_TENSOR_SCALE = ("BlockWise1x16",)  # only this kind has a tensor scale
GROUPED_CODES = ("float8_e4m3fn", "float4_e2m1fn_x2")


@dataclass(frozen=True)
class Operand:
    """How `scaled_mm` reads one orientation of a recipe.

    transposes: its codes are stored transposed, so a separate launch transposes them. tensor_scale: the factor that
    makes the tensor's scale from its amax; None: no tensor scale.
    """

    scaling: Scaling
    element: str  # torch dtype
    transposes: bool
    tensor_scale: float | None


@dataclass(frozen=True)
class Grouped:
    """A kernel of `scaled_grouped_mm`: the kind of both operands' scales, and where it runs."""

    kind: str
    cards: Cards


@dataclass(frozen=True)
class Product:
    """One product: where a kernel computes it; else None and the reason, which is "" if the spec wants none.

    grouped: the kernel for expert weights, or why there is none; "" if a linear layer has none either. by_columns: the
    same for expert weights stored for `x @ w`.
    """

    name: ProductName
    cards: Cards | None
    reason: str
    grouped: Grouped | str = ""
    by_columns: Grouped | str = ""


@dataclass(frozen=True)
class Products:
    """The products of a weight's recipe with its recipes for activations and gradients."""

    activation: Layout
    gradient: Layout
    products: tuple[Product, ...]


def products_of(weight: Layout, others: Mapping[str, Layout]) -> Products | None:
    """The products of a recipe; None if its spec states none. others: layouts by name of the recipes that it names."""
    if weight.others is None:
        return None
    roles = {
        "weight": weight,
        "activation": others[weight.others.activation],
        "gradient": others[weight.others.gradient],
    }
    return Products(roles["activation"], roles["gradient"], tuple(_product(name, roles) for name in OPERANDS))


def _product(name: ProductName, roles: Mapping[str, Layout]) -> Product:
    stated = roles["weight"].others
    if stated is not None and name in stated.dequantized:
        return Product(name, None, "")
    found = _operands(OPERANDS[name], roles)
    if isinstance(found, str):
        return Product(name, None, found)
    a, b = found
    if reason := _mismatch(a, b):
        return Product(name, None, reason)
    return Product(name, a.scaling.cards.both(b.scaling.cards), "", _grouped(name, a, b), _by_columns(name, roles))


def _operands(pair: Pair, roles: Mapping[str, Layout]) -> tuple[Operand, Operand] | str:
    """Both operands of a product as `scaled_mm` reads them, or why it can't read one."""
    if reason := _kept_transform(pair, roles):
        return reason
    operands: list[Operand] = []
    for role, orientation in pair:
        found = operand(roles[role], orientation)
        if isinstance(found, str):
            return f"{roles[role].name} {orientation}: {found}"
        operands.append(found)
    a, b = operands
    return a, b


def _by_columns(name: ProductName, roles: Mapping[str, Layout]) -> Grouped | str:
    """Like `_grouped`, for a product that contracts the weight's other orientation."""
    left, (role, orientation) = OPERANDS[name]
    other = "columnwise" if orientation == "rowwise" else "rowwise"
    found = _operands((left, (role, other if role == "weight" else orientation)), roles)
    return found if isinstance(found, str) else _grouped(name, *found)


def _grouped(name: ProductName, a: Operand, b: Operand) -> Grouped | str:
    """The kernel that multiplies each group of tokens by its expert's matrix, or why there is none."""
    if name == "grad_weight" and not a.scaling.name == b.scaling.name == "RowWise":
        return "it contracts groups of tokens, and no kernel is called for that"
    kinds = [GROUPED.get(one.scaling.name) for one in (a, b)]
    if kinds[0] is None or kinds[1] is None or kinds[0] != kinds[1]:
        return f"scaled_grouped_mm does not take {a.scaling.name} by {b.scaling.name}"
    for one in (a, b):
        if one.element not in GROUPED_CODES:
            return f"scaled_grouped_mm does not take {one.element}"
        if (one.tensor_scale is not None) != (one.scaling.name in UNDER_TENSOR_SCALE):
            how = "without" if one.tensor_scale is None else "with"
            return f"scaled_grouped_mm does not take {one.scaling.name} {how} a scale of the tensor"
    return Grouped(*kinds[0])


def _kept_transform(pair: Pair, roles: Mapping[str, Layout]) -> str:
    """Why the operands' transforms do not cancel; "" if they do, or there are none."""
    layouts = [(roles[role], orientation) for role, orientation in pair]
    found = [layout.transforms.get(orientation) for layout, orientation in layouts]
    if len({one.matrix if one else None for one in found}) == 1:
        return ""
    told = (
        f"{layout.name} {orientation}: {one or 'none'}"
        for (layout, orientation), one in zip(layouts, found, strict=True)
    )
    return f"its operands have different transforms, which do not cancel ({'; '.join(told)})"


def _mismatch(a: Operand, b: Operand) -> str:
    """Why `scaled_mm` can't multiply the two operands; "" if it can."""
    kinds = {a.scaling.name, b.scaling.name}
    if len(kinds) > 1 and kinds not in _MIXED:
        return f"scaled_mm does not take {a.scaling.name} by {b.scaling.name}"
    if a.scaling.name == b.scaling.name == "BlockWise128x128":
        return "scaled_mm takes BlockWise128x128 for one operand, with BlockWise1x128 for the other"
    if a.element == b.element == "float8_e5m2":
        return "scaled_mm does not take float8_e5m2 for both operands"
    return ""


def operand(layout: Layout, orientation: str) -> Operand | str:
    """How `scaled_mm` reads an orientation of a recipe, or a message that says why it can't."""
    if orientation not in layout.orientations:
        return "the recipe does not have this orientation"
    source = layout.source(orientation)
    data, scale = (_buffer(layout, orientation, kind) for kind in ("data", "scale"))
    free, contraction = _axes(orientation)
    element, scale_format = _dtype(source.quantization.element, source), _scale_dtype(source.quantization.scale)
    if source.zero is not None:
        return "scaled_mm knows no zero points"
    if source.super is not None:
        return "scaled_mm knows no scales of scales"
    if element is None or scale_format is None:
        return f"scaled_mm has no dtype for {'codes' if element is None else 'scales'} of this format"
    if reason := next((_ordered(buffer) for buffer in (data, scale) if buffer.swizzle or buffer.words), ""):
        return reason
    if any(dim.multiple > 1 for dim in data.dims):
        return "its codes are padded"
    if source.data.bits < 8 and data.axes[-1] != contraction:
        return f"its codes are packed along {data.axes[-1]}, and the product contracts {contraction}"
    per = {dim.axis: dim.per for dim in scale.dims}
    scaling = next(
        (
            one
            for one in SCALINGS
            if element in one.elements and one.scale == scale_format and _same(one, per.get(free), per.get(contraction))
        ),
        None,
    )
    if scaling is None:
        block = " by ".join(str(per.get(axis) or "all") for axis in (free, contraction))
        return f"scaled_mm has no kind of scales with a {scale_format} scale for {block} {element} codes"
    tensor_scale = _tensor_scale(source)
    if isinstance(tensor_scale, str):
        return tensor_scale
    if reason := _misplaced(layout, scale, scaling, (free, contraction)):
        return reason
    transform = source.quantization.transform
    if transform and tensor_scale is not None:
        tensor_scale *= transform.headroom
    return Operand(scaling, element, data.axes != (free, contraction), tensor_scale)


def _ordered(buffer: Buffer) -> str:
    """Why `scaled_mm` can't read a buffer that is swizzled or stored in words."""
    what = "codes" if buffer.kind == "data" else "scales"
    how = f"swizzled {buffer.swizzle.pattern}" if buffer.swizzle else f"in words of {buffer.words} bits"
    return f"its {what} are {how}"


def _buffer(layout: Layout, orientation: str, kind: str) -> Buffer:
    return next(buffer for buffer in layout.buffers if (buffer.orientation, buffer.kind) == (orientation, kind))


def _axes(orientation: str) -> tuple[Axis, Axis]:
    """(free axis, contracted axis)."""
    return ("m", "k") if orientation == "rowwise" else ("k", "m")


def _dtype(element: Format, source: Source) -> str | None:
    if element.torch is not None:
        return element.torch
    return "float4_e2m1fn_x2" if element == E2M1 and source.quantization.low_first else None


def _scale_dtype(scale: Format) -> str | None:
    if scale.is_exponent and (scale.bits, scale.bias, scale.nan) == (8, 127, (0xFF,)):
        return "float8_e8m0fnu"
    return "float32" if scale.is_f32 else scale.torch


def _same(scaling: Scaling, free: int | None, contraction: int | None) -> bool:
    return (scaling.free, scaling.contraction) == (free, contraction)


def _tensor_scale(source: Source) -> float | str | None:
    """The factor that makes the tensor's scale from its stored amax or level; None if decoding needs no tensor scale;
    a message if scaled_mm can't decode the rule."""
    quantization = source.quantization
    factors = quantization.definition.decode.split(" * ")
    if factors == ["from_scale(scale)"]:
        return None
    if factors == ["from_scale(scale)", "tensor_level"]:
        return 1.0
    if len(factors) == 3 and factors[:2] == ["from_scale(scale)", "tensor_amax"]:
        return constant(factors[2], quantization.element, quantization.scale, dict(quantization.parameters))[0]
    return f"scaled_mm can't decode {quantization.definition.decode}"


def _misplaced(layout: Layout, scale: Buffer, scaling: Scaling, axes: tuple[Axis, Axis]) -> str:
    """Why the kernel can't read the scale's buffer; "" if it can."""
    dims: dict[Axis, Dim] = {dim.axis: dim for dim in scale.dims}
    order = tuple(axis for axis in (axes[::-1] if scaling.contraction_first else axes) if axis in dims)
    pads = tuple(dims[axis].multiple if axis in dims else 1 for axis in axes)
    if scaling.swizzled:
        if layout.swizzle is None or not _same_tiles(layout.swizzle):
            return f"{scaling.name} scales are read in tiles of 32 x 4 x 4, and gemm.scale does not say so"
        return "" if pads == scaling.pad else f"{scaling.name} scales are padded to multiples of 128 and 4"
    if layout.swizzle is not None:
        return f"{scaling.name} scales are not swizzled"
    if scale.axes != order:
        wanted = " ".join(order)
        return f"{scaling.name} scales lie as ({wanted}), and these as ({' '.join(scale.axes)})"
    contraction_pad = dims[axes[1]].multiple if axes[1] in dims else 1
    if contraction_pad != scaling.pad[1]:
        return f"{scaling.name} scales have multiples of {scaling.pad[1]} along {axes[1]}, these of {contraction_pad}"
    return ""


@lru_cache
def _same_tiles(swizzle: Swizzle) -> bool:
    """True if a swizzle places every byte where SWIZZLE_32_4_4 does."""
    if swizzle == _TILES:
        return True
    shape = rows, columns = 2 * _TILE[0], 2 * _TILE[1]
    if any(size % swizzle.tile(dim) for dim, size in enumerate(shape)):
        return False
    own, tiles = (swizzle_chain(one, shape) for one in (swizzle, _TILES))
    return all(own.positions((i, j)) == tiles.positions((i, j)) for i in range(rows) for j in range(columns))
