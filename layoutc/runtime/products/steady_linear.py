"""Linear layers in low precision that were called before with the same sizes: in straight-line code.

How the products of a weight are computed, what launches quantize its operands, and which of their results scaled_mm
reads as what follow from the sizes. They are found once. A call after that looks whether anything is unlike then, and
passes addresses: the host is what small steps wait for. Where a product is not by a kernel, an operand takes more than
one launch, or anything is out of the ordinary, calls are left to `linear`, which gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from layoutc.runtime.facts import Layout, Operand
from layoutc.runtime.kernels import amaxes, launch
from layoutc.runtime.kernels.launch import Launches
from layoutc.runtime.kernels.prepared import Again
from layoutc.runtime.product_mode import Mode
from layoutc.runtime.products import linear, scaled_mm, shared_inputs
from layoutc.runtime.products.choice import Keeps, Recipe
from layoutc.runtime.products.scaled_mm import Side
from layoutc.runtime.products.weight_operand import kept_side
from layoutc.runtime.torch_private import dispatch_modes
from layoutc.runtime.weight.tensor import QuantizedTensor

_unsafe_view: Any = torch.ops.aten._unsafe_view.default


# ------------------------------------------------------------------------------------------------------------- operands
class Lies(NamedTuple):
    """Where an operand of a product lies among the results of a launch."""

    codes: int
    scale: int
    scaling: str
    free: int  # size of the dim that is not contracted
    is_left: bool
    kinds: list[int]
    orders: list[int]

    @classmethod
    def of(cls, layout: Layout, orientation: str, names: Sequence[str], free: int, is_left: bool) -> Lies | None:
        """names: of the results. None if they are not all that scaled_mm reads, as it reads it."""
        operand = layout.operands[orientation]
        if not isinstance(operand, Operand) or operand.transposes or operand.tensor_scale is not None:
            return None
        codes, scale = (names.index(f"{orientation}_{what}") for what in ("data", "scale"))
        return cls(codes, scale, operand.scaling, free, is_left, *scaled_mm.facts(operand))

    def side(self, results: Sequence[Tensor]) -> Side:
        """The operand."""
        scale = scaled_mm.as_read(self.scaling, results[self.scale], self.free, self.is_left)
        return Side(results[self.codes], [scale], self.kinds, self.orders)


@dataclass(frozen=True, eq=False)  # by identity: a key of what was quantized
class Quantizing:
    """A launch that quantizes activations, or gradients, of one size."""

    again: Again
    device: int | None  # on which card
    amax: bool  # one of the whole matrix is found first

    @classmethod
    def of(cls, recipe: Recipe, flat: Tensor, names: Sequence[str], orientations: tuple[str, ...]) -> Self | None:
        """names: of the buffers that it gives. None if they take more than one launch, or one that draws bits."""
        kernels, layout = recipe._quantizing(flat), recipe.LAYOUT
        if kernels is None or layout.stochastic or layout.amax_columns is not None or flat.stride(1) != 1:
            return None
        swizzled = bool(layout.swizzled)
        amax = recipe._shared_amax(flat) if layout.shares_amax else None
        recipe._quantize_buffers(flat, amax, orientations, swizzled, None, True)
        again = kernels.again(launch.quantized_like(flat, amax, orientations, swizzled, True), names, True)
        return None if again is None else cls(again, flat.device.index, amax is not None)

    def __call__(self, flat: Tensor) -> list[Tensor] | None:
        """The buffers; None if another device is the current one."""
        if self.device is not None and torch.cuda.current_device() != self.device:
            return None
        return self.again(flat, amaxes.matrix_amax(flat, None, passing=True)) if self.amax else self.again(flat)


class LayingOut(NamedTuple):
    """A launch that lays out what a product reads of a weight, beside planes that serve as they are."""

    again: Again
    planes: tuple[str, ...]  # that the launch reads
    given: tuple[tuple[str, torch.dtype], ...]  # planes that serve, and as what
    lies: Lies  # among the results of the launch and these

    @classmethod
    def of(cls, weight: QuantizedTensor, orientation: str, free: int) -> LayingOut | None:
        """None if the weight does not hold the orientation, or is no matter of one launch."""
        layout, planes, chosen = weight.LAYOUT, weight._planes, (orientation,)
        if orientation not in weight.orientations or layout.swizzled or not all(map(_is_there, planes.values())):
            return None
        names = [f"{orientation}_{what}" for what in ("data", "scale")]
        made = [name for name in names if name not in layout.as_stored]
        given = [name for name in names if name in layout.as_stored]
        kernels, lies = (
            type(weight)._kernels(next(iter(planes.values()))),
            Lies.of(layout, orientation, (*made, *given), free, False),
        )
        if kernels is None or lies is None:
            return None
        type(weight)._lay_out(planes, *weight._matrix, chosen, False)
        moved = tuple([name for name in kernels.moved if name in planes])
        device = next(iter(planes.values())).device
        again = kernels.again(launch.laid_out_like(*weight._matrix, device, chosen, False, len(moved)), made, True)
        served = tuple([(layout.as_stored[name], layout.operand_dtypes[name]) for name in given])
        return None if again is None else cls(again, moved, served, lies)

    def side(self, weight: QuantizedTensor) -> Side | None:
        """The weight as an operand; None if its planes are not there, or not as kernels read them."""
        planes, read, results = weight._planes, [], []
        if weight._writes.waiting:
            return None
        for name in self.planes:
            if (plane := planes.get(name)) is None or not _is_there(plane):
                return None
            read.append(plane)
        for name, dtype in self.given:
            if (plane := planes.get(name)) is None or not _is_there(plane):
                return None
            plane = plane.clone() if plane.data_ptr() & 15 else plane  # a piece of a larger tensor, as in `side`
            results.append(plane if plane.dtype == dtype else plane.view(dtype))
        made = self.again(*read)
        return None if made is None else self.lies.side(made + results)


def _right(weight: QuantizedTensor, orientation: str, laid: LayingOut | None) -> Side | None:
    """The weight as the right operand: laid out, or views of planes, which the product before has left."""
    return kept_side(weight, orientation) if laid is None else laid.side(weight)


def _is_stored(layout: Layout, orientation: str) -> bool:
    """Whether all that a product reads of a weight are planes as they are."""
    return all(f"{orientation}_{what}" in layout.as_stored for what in ("data", "scale"))


def _is_there(plane: Tensor) -> bool:
    """Whether a plane is contiguous, at a multiple of 4 bytes, and not freed."""
    return bool(plane.untyped_storage().nbytes()) and launch.is_readable(plane)


# --------------------------------------------------------------------------------------------------------------- calls
class Forward(NamedTuple):
    """What forward does for activations of one size."""

    quantizing: Quantizing
    left: Lies
    saved: tuple[int, ...]  # of the results: what backward multiplies with gradients
    weight: LayingOut | None  # None: all that is read are planes

    @classmethod
    def of(cls, weight: QuantizedTensor, flat: Tensor, mode: Mode, keeps: Keeps) -> Self | None:
        """None where calls are not straight-line code."""
        ways, recipes, _ = linear.plan_of(weight, flat, mode)
        layout = recipes.activation.LAYOUT
        if ways.forward != "kernel" or (keeps == "quantized" and ways.grad_weight != "kernel"):
            return None
        kept = linear.names_of(layout, "columnwise", "kernel") if keeps == "quantized" else ()
        names = (*linear.names_of(layout, "rowwise", "kernel"), *kept)
        orientations = ("rowwise", "columnwise")[: 2 if kept else 1]
        quantizing = Quantizing.of(recipes.activation, flat, names, orientations)
        left = Lies.of(layout, "rowwise", names, flat.shape[0], True)
        if quantizing is None or left is None:
            return None
        saved = tuple(range(len(names) - len(kept), len(names)))
        is_stored = _is_stored(weight.LAYOUT, "rowwise")
        laid = None if is_stored else LayingOut.of(weight, "rowwise", weight._matrix[0])
        return None if laid is None and not is_stored else cls(quantizing, left, saved, laid)

    def __call__(self, x: Tensor, flat: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> list[Tensor] | None:
        right = _right(weight, "rowwise", self.weight)
        if right is None:
            return None
        shared = shared_inputs.of(x)
        if (results := shared.get(self.quantizing)) is None:
            if (results := self.quantizing(flat)) is None:
                return None
            shared[self.quantizing] = results
        out = scaled_mm.multiply(self.left.side(results), right, x.dtype, fast=True)
        out = out if bias is None else out + bias.to(x.dtype)
        return [_unsafe_view(out, [*x.shape[:-1], out.shape[1]]), *[results[at] for at in self.saved]]


class Backward(NamedTuple):
    """What backward does for gradients of one size."""

    quantizing: Quantizing
    rowwise: Lies | None  # gradients, for that of the input; None: it is not needed
    weight: LayingOut | None  # None: as of Forward
    columnwise: Lies | None  # gradients, for that of the weight; None: it is not needed
    saved: Lies | None

    @classmethod
    def of(cls, weight: QuantizedTensor, flat: Tensor, mode: Mode, needs_input: bool, trains: bool) -> Self | None:
        """None where calls are not straight-line code."""
        ways, recipes, _ = linear.plan_of(weight, flat, mode)
        gradient, activation, (m, k) = recipes.gradient.LAYOUT, recipes.activation.LAYOUT, weight._matrix
        asked = {"rowwise": (needs_input, ways.grad_input), "columnwise": (trains, ways.grad_weight)}
        orientations = tuple([name for name, (wanted, _) in asked.items() if wanted])
        if not orientations or any(wanted and way != "kernel" for wanted, way in asked.values()):
            return None
        names = [name for one in orientations for name in linear.names_of(gradient, one, "kernel")]
        quantizing = Quantizing.of(recipes.gradient, flat, names, orientations)
        if quantizing is None:
            return None
        rowwise = columnwise = saved = laid = None
        if needs_input:
            rowwise = Lies.of(gradient, "rowwise", names, flat.shape[0], True)
            is_stored = _is_stored(weight.LAYOUT, "columnwise")
            laid = None if is_stored else LayingOut.of(weight, "columnwise", k)
            if rowwise is None or (laid is None and not is_stored):
                return None
        if trains:
            columnwise = Lies.of(gradient, "columnwise", names, m, True)
            saved = Lies.of(activation, "columnwise", linear.names_of(activation, "columnwise", "kernel"), k, False)
            if columnwise is None or saved is None:
                return None
        return cls(quantizing, rowwise, laid, columnwise, saved)

    def __call__(
        self, grad: Tensor, flat: Tensor, weight: QuantizedTensor, saved: Sequence[Tensor]
    ) -> list[Tensor] | None:
        right = None
        if self.rowwise is not None:
            right = _right(weight, "columnwise", self.weight)
            if right is None:
                return None
        if (results := self.quantizing(flat)) is None:
            return None
        made: list[Tensor] = []
        if self.rowwise is not None and right is not None:
            found = scaled_mm.multiply(self.rowwise.side(results), right, grad.dtype)
            made.append(_unsafe_view(found, [*grad.shape[:-1], found.shape[1]]))
        if self.columnwise is not None and self.saved is not None:
            made.append(scaled_mm.multiply(self.columnwise.side(results), self.saved.side(saved), grad.dtype))
        return made


_forwards: Launches[Forward | None] = Launches()
_backwards: Launches[Backward | None] = Launches()
_UNKNOWN: Any = object()


def forward(x: Tensor, weight: QuantizedTensor, bias: Tensor | None, mode: Mode, keeps: Keeps) -> list[Tensor] | None:
    """As `linear.forward`; None: that must do it."""
    if _is_unusual(x, weight) or keeps == "input":
        return None
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    key = type(weight), weight._matrix, flat.shape, flat.stride(), flat.dtype, flat.device, mode, keeps
    found = _forwards.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        found = _forwards[key] = Forward.of(weight, flat, mode, keeps)
    return None if found is None else found(x, flat, weight, bias)


def backward(
    grad: Tensor, weight: QuantizedTensor, saved: Sequence[Tensor], mode: Mode, needs_input: bool, keeps: Keeps
) -> list[Tensor] | None:
    """As `linear.backward`; None: that must do it."""
    if _is_unusual(grad, weight) or keeps == "input":
        return None
    flat = grad if grad.dim() == 2 else grad.reshape(-1, grad.shape[-1])
    trains = keeps == "quantized"
    key = type(weight), weight._matrix, flat.shape, flat.stride(), flat.dtype, flat.device, mode, needs_input, trains
    found = _backwards.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        found = _backwards[key] = Backward.of(weight, flat, mode, needs_input, trains)
    return None if found is None else found(grad, flat, weight, saved)


def _is_unusual(x: Tensor, weight: Any) -> bool:
    """Whether a call is traced, not with a plain tensor, or not by a quantized weight as it lies, in whole blocks."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or dispatch_modes() > 0:
        return True
    return not isinstance(weight, QuantizedTensor) or bool(weight._halo.rows) or weight._transposed
