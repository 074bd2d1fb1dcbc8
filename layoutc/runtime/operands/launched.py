"""Operands for scaled_mm from launches that were prepared for tensors of the same sizes.

What depends only on sizes is found once: the launch, and which of its results, or of a weight's planes, are codes and
scales. Other cases return None: callers fall back to the general code, which produces the same bytes.
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
from layoutc.runtime.operands.kept import kept_side
from layoutc.runtime.operands.scaled_mm import Side
from layoutc.runtime.weight.tensor import QuantizedTensor


class Place(NamedTuple):
    """Which results of a launch are an operand of a product."""

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
        """names: of the results. None if scaled_mm needs more than views of them."""
        operand = layout.operands[orientation]
        if not isinstance(operand, Operand) or operand.transposes or operand.tensor_scale is not None:
            return None
        codes, scale = (names.index(f"{orientation}_{what}") for what in ("data", "scale"))
        return cls(
            codes, scale, (operand.codes, operand.scale), operand.scaling, free, is_left, *scaled_mm.facts(operand)
        )

    def side(self, results: Sequence[Tensor]) -> Side:
        """The operand: codes (free, contracted) and the scale, as scaled_mm accepts them."""
        codes, scale = results[self.codes], results[self.scale]
        of_codes, of_scale = self.dtypes
        codes = codes if codes.dtype == of_codes else codes.view(of_codes)
        scale = scale if scale.dtype == of_scale else scale.view(of_scale)
        return Side(codes, [scaled_mm.as_read(self.scaling, scale, self.free, self.is_left)], self.kinds, self.orders)


def quantizing(
    recipe: type[QuantizedTensor], flat: Tensor, names: Sequence[str], orientations: tuple[str, ...]
) -> LaunchPlan | None:
    """The plan that quantizes contiguous activations or gradients of one size, in any shape with the same columns.

    names: of the buffers that it makes. None if these need more than one launch or random bits. If the launch reads an
    amax, the plan first measures that of the whole matrix, into zeroed memory.
    """
    key = recipe, flat.shape, flat.dtype, flat.device, tuple(names)  # weights of different sizes share an operand
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
    x = x if x.data_ptr() % 16 == 0 else x.clone()  # like `launch.in_rows`
    return plan(x) if plan.takes == 1 else plan(x, amaxes.passing_zero(x.device))


class LayingOut(NamedTuple):
    """A launch that lays out the buffers that a product reads of a weight, except planes that it reads directly."""

    plan: LaunchPlan
    given: tuple[str, ...]  # planes that are read directly
    place: Place  # among the results of the launch, then these planes

    @classmethod
    def of(cls, weight: QuantizedTensor, orientation: str, free: int) -> LayingOut | None:
        """None if the weight does not hold the orientation, or needs more than one launch."""
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
        """The weight as an operand; None if its planes are freed, or kernels can't read them."""
        planes, results = weight.store.planes, []
        if weight.store.writes.waiting or (read := self.plan.read_of(planes)) is None:
            return None
        for name in self.given:
            if (plane := planes.get(name)) is None or not _is_there(plane):
                return None
            is_piece = plane.data_ptr() & 15  # of a larger tensor: see `scaled_mm.side`
            results.append(plane.clone() if is_piece else plane)
        return self.place.side(self.plan(*read) + results)


def template(shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor of a shape, without memory, else like another one: empty_like of a template takes less host time."""
    return launch.template(shape, like.dtype, like.device)


def right(weight: QuantizedTensor, orientation: str, laid: LayingOut | None) -> Side | None:
    """The weight as the right operand: laid out, or the views of planes that the previous product kept."""
    return kept_side(weight, orientation) if laid is None else laid.side(weight)


def is_held(weight: QuantizedTensor) -> bool:
    """Whether all planes can be read. If not, results for the weight must not be cached."""
    return not weight.store.writes.waiting and all(map(_is_there, weight.store.planes.values()))


def is_stored(layout: Layout, orientation: str) -> bool:
    """Whether a product reads a weight's planes directly, without laying them out."""
    return all(f"{orientation}_{what}" in layout.as_stored for what in ("data", "scale"))


def _is_there(plane: Tensor) -> bool:
    """Whether a plane is contiguous, aligned to 4 bytes, and not freed."""
    return bool(plane.untyped_storage().nbytes()) and launch.is_readable(plane)
