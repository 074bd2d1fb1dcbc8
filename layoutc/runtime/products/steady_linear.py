"""The fast path of low-precision linear layers: straight-line code for calls with sizes that were seen before.

The sizes determine how each product is computed, which launches quantize its operands, and which results scaled_mm
reads. This is found once. Later calls check that nothing has changed and pass addresses, since small steps are
host-bound. Where a product has no kernel, an operand needs more than one launch, or anything is unusual, `linear`
handles the call and produces the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from layoutc.runtime.kernels import plans
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.operands import launched, scaled_mm
from layoutc.runtime.operands.kept import of_input
from layoutc.runtime.operands.launched import LayingOut, Place
from layoutc.runtime.product_mode import Mode
from layoutc.runtime.products import linear
from layoutc.runtime.products.choice import Keeps
from layoutc.runtime.torch_private import dispatch_modes
from layoutc.runtime.weight.tensor import QuantizedTensor


class Forward(NamedTuple):
    """The forward pass for activations (..., k) of one size and weights (m, k)."""

    quantizing: LaunchPlan
    left: Place
    saved: tuple[int, ...]  # indices of the results that backward multiplies by gradients
    weight: LayingOut | None  # None: the product reads planes directly
    out: Tensor  # a template, without memory

    @classmethod
    def of(cls, weight: QuantizedTensor, x: Tensor, mode: Mode, keeps: Keeps) -> Self | None:
        """None where calls are not straight-line code."""
        ways, recipes, _ = linear.plan_of(weight, x, mode)
        layout, keeps_codes = recipes.activation.LAYOUT, keeps == "quantized" and ways.grad_weight != "dequantize"
        if ways.forward != "kernel" or (keeps_codes and ways.grad_weight != "kernel"):
            return None
        kept = linear.names_of(layout, "columnwise", "kernel") if keeps_codes else ()
        names = (*linear.names_of(layout, "rowwise", "kernel"), *kept)
        orientations = ("rowwise", "columnwise")[: 2 if kept else 1]
        flat = x.flatten(0, -2)
        quantizing = launched.quantizing(recipes.activation, flat, names, orientations)
        left = Place.of(layout, "rowwise", names, flat.shape[0], True)
        if quantizing is None or left is None or not scaled_mm.supports_output_dtype(left.kinds, x.dtype):
            return None
        saved = tuple(range(len(names) - len(kept), len(names)))
        is_stored = launched.is_stored(weight.LAYOUT, "rowwise")
        laid = None if is_stored else LayingOut.of(weight, "rowwise", weight.store.matrix[0])
        out = launched.template((*x.shape[:-1], weight.store.matrix[0]), x)
        return None if laid is None and not is_stored else cls(quantizing, left, saved, laid, out)

    def __call__(self, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> list[Tensor] | None:
        """Returns the output (..., m), and what backward needs unless that is x; None if anything has changed."""
        right = launched.right(weight, "rowwise", self.weight)
        if right is None:
            return None
        shared = of_input(x)
        if (results := shared.get(self.quantizing)) is None:
            results = shared[self.quantizing] = launched.quantize(self.quantizing, x)
        out = torch.empty_like(self.out)  # no view: FSDP2 warns of modules that return one
        scaled_mm.multiply_into(out.view(-1, out.shape[-1]), self.left.side(results), right, fast=True)
        out = out if bias is None else out + bias.to(x.dtype)
        return [out, *[results[at] for at in self.saved]]


class Backward(NamedTuple):
    """The backward pass for gradients (..., m) of one size and weights (m, k)."""

    quantizing: LaunchPlan
    rowwise: Place | None  # gradients, for grad_input; None: not needed
    weight: LayingOut | None  # None: see Forward
    columnwise: Place | None  # gradients, for grad_weight; None: not needed, or not in low precision
    saved: Place | None
    multiplies_values: bool  # whether grad_weight is computed in high precision
    of_input: Tensor  # a template, without memory

    @classmethod
    def of(cls, weight: QuantizedTensor, grad: Tensor, mode: Mode, needs_input: bool, trains: bool) -> Self | None:
        """None where calls are not straight-line code."""
        ways, recipes, _ = linear.plan_of(weight, grad, mode)
        gradient, activation, (m, k) = recipes.gradient.LAYOUT, recipes.activation.LAYOUT, weight.store.matrix
        multiplies_values = trains and ways.grad_weight == "dequantize"
        trains = trains and not multiplies_values
        asked = {"rowwise": (needs_input, ways.grad_input), "columnwise": (trains, ways.grad_weight)}
        orientations = tuple([name for name, (wanted, _) in asked.items() if wanted])
        if not orientations or any(wanted and way != "kernel" for wanted, way in asked.values()):
            return None
        names = [name for one in orientations for name in linear.names_of(gradient, one, "kernel")]
        flat = grad.flatten(0, -2)
        quantizing = launched.quantizing(recipes.gradient, flat, names, orientations)
        if quantizing is None:
            return None
        rowwise = columnwise = saved = laid = None
        if needs_input:
            rowwise = Place.of(gradient, "rowwise", names, flat.shape[0], True)
            is_stored = launched.is_stored(weight.LAYOUT, "columnwise")
            laid = None if is_stored else LayingOut.of(weight, "columnwise", k)
            if (
                rowwise is None
                or (laid is None and not is_stored)
                or not scaled_mm.supports_output_dtype(rowwise.kinds, grad.dtype)
            ):
                return None
        if trains:
            columnwise = Place.of(gradient, "columnwise", names, m, True)
            saved = Place.of(activation, "columnwise", linear.names_of(activation, "columnwise", "kernel"), k, False)
            if columnwise is None or saved is None:
                return None
        of_input = launched.template((*grad.shape[:-1], k), grad)
        return cls(quantizing, rowwise, laid, columnwise, saved, multiplies_values, of_input)

    def __call__(self, grad: Tensor, weight: QuantizedTensor, saved: Sequence[Tensor]) -> list[Tensor] | None:
        """Returns the needed gradients, of the input (..., k) and of the weight (m, k); None if anything has changed.

        saved: what forward returned for backward, or x.
        """
        if self.multiplies_values and torch.is_autocast_enabled(grad.device.type):
            return None  # autocast would round the operands
        right = None
        if self.rowwise is not None:
            right = launched.right(weight, "columnwise", self.weight)
            if right is None:
                return None
        results = launched.quantize(self.quantizing, grad)
        made: list[Tensor] = []
        if self.rowwise is not None and right is not None:
            of_input = torch.empty_like(self.of_input)
            scaled_mm.multiply_into(of_input.view(-1, of_input.shape[-1]), self.rowwise.side(results), right)
            made.append(of_input)
        if self.columnwise is not None and self.saved is not None:
            made.append(scaled_mm.multiply(self.columnwise.side(results), self.saved.side(saved), grad.dtype))
        elif self.multiplies_values:
            made.append(linear.grad_weight_by_values(grad, saved[0]))
        return made


def forward(x: Tensor, weight: QuantizedTensor, bias: Tensor | None, mode: Mode, keeps: Keeps) -> list[Tensor] | None:
    """`linear.forward` on the fast path; None: call that instead."""
    if _is_unusual(x, weight) or keeps == "input":
        return None
    found: Forward | None = _found(Forward, weight, x, mode, keeps)
    return None if found is None else found(x, weight, bias)


def backward(
    grad: Tensor, weight: QuantizedTensor, saved: Sequence[Tensor], mode: Mode, needs_input: bool, keeps: Keeps
) -> list[Tensor] | None:
    """`linear.backward` on the fast path; None: call that instead."""
    if _is_unusual(grad, weight) or keeps == "input":
        return None
    found: Backward | None = _found(Backward, weight, grad, mode, needs_input, keeps == "quantized")
    return None if found is None else found(grad, weight, saved)


def _found(kind: Any, weight: QuantizedTensor, x: Tensor, *how: Any) -> Any:
    """The cached Forward or Backward for a call; None, not cached, while the weight's planes can't be read."""
    key = kind, type(weight), weight.store.matrix, x.shape, x.dtype, x.device, *how
    if (found := plans.cache.get(key, plans.UNKNOWN)) is plans.UNKNOWN:
        if not launched.is_held(weight):
            return None
        found = plans.cache[key] = kind.of(weight, x, *how)
    return found


def _is_unusual(x: Tensor, weight: Any) -> bool:
    """Whether a call is traced, or x not plain and contiguous, or the weight plain, transposed or cut in blocks."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or dispatch_modes() > 0:
        return True
    if not x.is_contiguous() or x.dim() < 2:
        return True
    return not isinstance(weight, QuantizedTensor) or bool(weight.store.halo.rows) or weight.transposed
