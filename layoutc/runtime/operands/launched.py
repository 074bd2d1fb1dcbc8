"""Operands by launches that were made before, for tensors of the same sizes, as scaled_mm reads them.

What follows from the sizes is found once: the launch, and which of its results, or of a weight's planes, are codes and
scales. What is not so simple is None, and left to the ordinary way, which gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.facts import Layout, Operand
from layoutc.runtime.kernels import amaxes, launch, plans
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.operands import scaled_mm
from layoutc.runtime.operands.scaled_mm import Side
from layoutc.runtime.operands.weight_operand import kept_side
from layoutc.runtime.weight.tensor import QuantizedTensor


class Place(NamedTuple):
    """Where an operand of a product lies among the results of a launch."""

    codes: int
    scale: int
    dtypes: tuple[torch.dtype, torch.dtype]
    scaling: str
    free: int  # size of the dim that is not contracted
    is_left: bool
    kinds: list[int]
    orders: list[int]

    @classmethod
    def of(cls, layout: Layout, orientation: str, names: Sequence[str], free: int, is_left: bool) -> Place | None:
        """names: of the results. None if they are not all that scaled_mm reads, as it reads it."""
        operand = layout.operands[orientation]
        if not isinstance(operand, Operand) or operand.transposes or operand.tensor_scale is not None:
            return None
        codes, scale = (names.index(f"{orientation}_{what}") for what in ("data", "scale"))
        return cls(
            codes, scale, (operand.codes, operand.scale), operand.scaling, free, is_left, *scaled_mm.facts(operand)
        )

    def side(self, results: Sequence[Tensor]) -> Side:
        """The operand: codes of (free, contracted), and its scale, as scaled_mm takes them."""
        codes, scale = results[self.codes], results[self.scale]
        of_codes, of_scale = self.dtypes
        codes = codes if codes.dtype == of_codes else codes.view(of_codes)
        scale = scale if scale.dtype == of_scale else scale.view(of_scale)
        return Side(codes, [scaled_mm.as_read(self.scaling, scale, self.free, self.is_left)], self.kinds, self.orders)


def quantizing(
    recipe: type[QuantizedTensor], flat: Tensor, names: Sequence[str], orientations: tuple[str, ...]
) -> LaunchPlan | None:
    """What quantizes activations, or gradients, of one size: contiguous, in any shape with as many columns.

    names: of the buffers that it gives. None if they take more than one launch, or one that draws bits. One that takes
    an amax finds that of the whole matrix first, in what is 0 before.
    """
    key = recipe, flat.shape, flat.dtype, flat.device, tuple(names)  # weights of several sizes share an operand
    return plans.cache.of(key, lambda: _quantizing(recipe, flat, names, orientations))


def _quantizing(
    recipe: type[QuantizedTensor], flat: Tensor, names: Sequence[str], orientations: tuple[str, ...]
) -> LaunchPlan | None:
    kernels, layout, flat = recipe.quantizing_kernels(flat), recipe.LAYOUT, launch.in_rows(flat)
    takes_amax = layout.takes_amax(orientations)
    if kernels is None or layout.stochastic or (takes_amax and layout.amax_columns is not None):
        return None
    swizzled = bool(layout.swizzled)
    amax = recipe.shared_amax(flat) if takes_amax else None
    recipe.quantize_buffers(flat, amax, orientations, swizzled, None, True)
    plan = kernels.again(launch.quantized_like(flat, amax, orientations, swizzled, True), names, True)
    return plan if plan is None or amax is None else plan.after(amaxes.measuring(flat, None))


def quantize(plan: LaunchPlan, x: Tensor) -> list[Tensor]:
    """The buffers of x, (..., columns), in the order of `names`."""
    x = x if x.data_ptr() % 16 == 0 else x.clone()  # as `launch.in_rows` has it
    return plan(x) if plan.takes == 1 else plan(x, amaxes.passing_zero(x.device))


class LayingOut(NamedTuple):
    """A launch that lays out what a product reads of a weight, beside planes that serve as they are."""

    plan: LaunchPlan
    given: tuple[str, ...]  # planes that serve
    place: Place  # among the results of the launch and these

    @classmethod
    def of(cls, weight: QuantizedTensor, orientation: str, free: int) -> LayingOut | None:
        """None if the weight does not hold the orientation, or is no matter of one launch."""
        layout, planes, chosen = weight.LAYOUT, weight.store.planes, (orientation,)
        if orientation not in weight.orientations or layout.swizzled:
            return None
        names = [f"{orientation}_{what}" for what in ("data", "scale")]
        made = [name for name in names if name not in layout.as_stored]
        given = [name for name in names if name in layout.as_stored]
        place = Place.of(layout, orientation, (*made, *given), free, False)
        kernels = type(weight).usable_kernels(next(iter(planes.values())))
        if kernels is None or place is None:
            return None
        type(weight).lay_out(planes, *weight.store.matrix, chosen, False)
        moved = [name for name in kernels.moved if name in planes]
        device = next(iter(planes.values())).device
        plan = kernels.again(launch.laid_out_like(*weight.store.matrix, device, chosen, False, len(moved)), made, True)
        served = tuple([layout.as_stored[name] for name in given])
        return None if plan is None else cls(plan, served, place)

    def side(self, weight: QuantizedTensor) -> Side | None:
        """The weight as an operand; None if its planes are not there, or not as kernels read them."""
        planes, results = weight.store.planes, []
        if weight.store.writes.waiting or (read := self.plan.read_of(planes)) is None:
            return None
        for name in self.given:
            if (plane := planes.get(name)) is None or not _is_there(plane):
                return None
            is_piece = plane.data_ptr() & 15  # of a larger tensor: as in `scaled_mm.side`
            results.append(plane.clone() if is_piece else plane)
        return self.place.side(self.plan(*read) + results)


def template(shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor without memory of a shape, else like another one: results are made like it in less time."""
    return launch.template(shape, like.dtype, like.device)


def right(weight: QuantizedTensor, orientation: str, laid: LayingOut | None) -> Side | None:
    """The weight as the right operand: laid out, or views of planes, which the product before has left."""
    return kept_side(weight, orientation) if laid is None else laid.side(weight)


def is_held(weight: QuantizedTensor) -> bool:
    """Whether all planes can be read: what is found of weights whose planes can't is not to be kept."""
    return not weight.store.writes.waiting and all(map(_is_there, weight.store.planes.values()))


def is_stored(layout: Layout, orientation: str) -> bool:
    """Whether all that a product reads of a weight are planes as they are."""
    return all(f"{orientation}_{what}" in layout.as_stored for what in ("data", "scale"))


def _is_there(plane: Tensor) -> bool:
    """Whether a plane is contiguous, at a multiple of 4 bytes, and not freed."""
    return bool(plane.untyped_storage().nbytes()) and launch.is_readable(plane)
