"""The arithmetic of generated classes: kernels where a card has them, else the reference, on plain planes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from layoutc.runtime import numerics
from layoutc.runtime.facts import Layout
from layoutc.runtime.kernels import amaxes, buffers, launch
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.torch_private import keeping_version
from layoutc.runtime.weight.returned_buffers import by_reference

if TYPE_CHECKING:
    from layoutc.runtime.kernels.recipe_kernels import Kernels
    from layoutc.runtime.parts import Parts

Tensors = Sequence[Tensor]
Planes = Mapping[str, Tensor]


class RecipeMethods:
    """The arithmetic of a recipe. x: (m, k), fp32, bf16 or fp16; planes and buffers go by their names.

    A generated class states its layout, its reference and kernels, and how planes are cut.
    """

    LAYOUT: ClassVar[Layout]
    REFERENCE: ClassVar[ModuleType]
    KEY: ClassVar[str]  # the recipe's key in `operators`
    KERNELS: ClassVar[str | None]  # the module, which needs Triton; None: the reference serves every device

    @classmethod
    def _cut(cls, planes: Planes, r0: int, r1: int, c0: int, c1: int) -> dict[str, Tensor]:
        """Views of planes for rows r0..r1 and columns c0..c1, all on block boundaries. Here: of blocks of one row."""
        per_k = {name: cls.LAYOUT.stored[name].columns_per_value or 1 for name in planes}
        ends = {name: ceil(round(c1 / size, 6)) for name, size in per_k.items()}  # 4 codes of 6 bits take 3 bytes
        return {name: plane[r0:r1, round(c0 / per_k[name]) : ends[name]] for name, plane in planes.items()}

    @classmethod
    def usable_kernels(cls, x: Tensor, dtype: torch.dtype | None = None) -> Kernels | None:
        """The kernels, if they can replace the reference for x and write values of `dtype`."""
        return _kernels_of(cls.KERNELS) if cls.KERNELS is not None and launch.usable(x, dtype) else None

    @classmethod
    def quantizing_kernels(cls, x: Tensor) -> Kernels | None:
        """The kernels, if they can quantize x."""
        kernels = cls.usable_kernels(x)
        return None if kernels is None or kernels.quantize_tile is None else kernels

    @classmethod
    def quantize_matrix(
        cls,
        x: Tensor,
        amax: Tensor | None,
        orientations: Sequence[str],
        out: Planes | None = None,
        seed: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The planes of (m, k) values: those of `out` if a kernel can write into them, else new ones.

        seed: (1,) int64, for a recipe that rounds by random bits.
        """
        if (kernels := cls.quantizing_kernels(x)) is not None:
            out = out if out is not None and launch.all_writable([out], x.device) else None
            return kernels.quantize(x, amax, tuple(orientations), out, seed)
        seeded = {} if seed is None else {"seed": seed}
        planes: dict[str, Tensor] = cls.REFERENCE.quantize_reference(
            x, amax=amax, orientations=tuple(orientations), **seeded
        )
        return planes

    @classmethod
    def quantize_batch(
        cls, xs: Tensors, amaxes: Tensors | None, orientations: Sequence[str], outs: Sequence[Planes]
    ) -> bool:
        """As quantize_matrix for each of xs, in few launches. Returns False, and does nothing, without such kernels."""
        kernels = cls.quantizing_kernels(xs[0])
        if kernels is None or not kernels.batched:
            return False
        kernels.quantize_batch(xs, amaxes, tuple(orientations), outs)
        return True

    @classmethod
    def batch_plan(
        cls, xs: Tensors, amaxes: Tensors | None, orientations: Sequence[str], outs: Sequence[Planes]
    ) -> LaunchPlan | None:
        """A plan that repeats quantize_batch, as `Kernels.plan_of_batch`; None also without such kernels."""
        kernels = cls.quantizing_kernels(xs[0])
        if kernels is None or not kernels.batched:
            return None
        return kernels.plan_of_batch(xs, amaxes, tuple(orientations), outs)

    @classmethod
    def quantize_buffers(
        cls,
        x: Tensor,
        amax: Tensor | None,
        orientations: tuple[str, ...],
        swizzled: bool,
        seed: Tensor | None = None,
        typed: bool = False,
    ) -> dict[str, Tensor] | None:
        """The buffers of an (m, k) matrix in one launch. Returns None, and does nothing, without such a kernel.

        typed: in the dtypes of `Layout.operand_dtypes`, as far as one launch writes them."""
        kernels = cls.quantizing_kernels(x)
        if kernels is None or (kernels.buffer_sizes is None and buffers.are_made(cls.LAYOUT, orientations)):
            return None
        return kernels.quantize_buffers(x, amax, orientations, swizzled, seed, typed)

    @classmethod
    def shared_amax(cls, x: Tensor) -> Tensor:
        """The amax that shards must agree on before they quantize, fp32: `Layout.amax_shape` says which shape.

        Only for recipes that share an amax.
        """
        measure = amaxes.matrix_amax if cls.KERNELS is not None and launch.usable(x) else numerics.matrix_amax
        return measure(x, cls.LAYOUT.amax_columns)

    @classmethod
    def matrix_values(cls, planes: Planes, m: int, k: int, orientation: str, dtype: torch.dtype) -> Tensor:
        """The (m, k) values of an orientation, from planes: computed in fp32, rounded once to `dtype`."""
        kernels = cls.usable_kernels(planes[cls.LAYOUT.sources[orientation][0]], dtype)
        if kernels is not None:
            return kernels.dequantize(planes, m, k, orientation, dtype)
        values: Tensor = cls.REFERENCE.dequantize_reference(planes, m, k, orientation)
        return values.to(dtype)

    @classmethod
    def dequantize_into(
        cls, weights: Sequence[Planes], orientation: str, outs: Tensors, parts: Sequence[Parts | None]
    ) -> LaunchPlan | None:
        """As matrix_values for each of weights, into (m, k) of one dtype on one device, whose versions stay.

        parts: of weights whose planes are split; `weights` has the planes of the first part. Returns a plan that
        repeats this while no address changes, or None.
        """
        source = cls.LAYOUT.sources[orientation][0]
        if (kernels := cls.usable_kernels(weights[0][source], outs[0].dtype)) is not None:
            plan, alone = kernels.into(weights, orientation, outs, parts)
            plan()
            for one, tensors in alone:
                one.into(*tensors)
            return None if alone else plan
        for planes, out, own in zip(weights, outs, parts, strict=True):
            with keeping_version(out):
                for at, piece in enumerate([out] if own is None else torch.split(out, own.rows)):
                    read = planes if own is None else own.of(cls.LAYOUT, planes, at, piece.shape[0])
                    piece.copy_(cls.REFERENCE.dequantize_reference(read, *piece.shape, orientation))
        return None

    @classmethod
    def values_plan(cls, planes: Planes, m: int, k: int, orientation: str, dtype: torch.dtype) -> LaunchPlan | None:
        """A plan that repeats `matrix_values` for such planes; None without a kernel."""
        sources = cls.LAYOUT.sources[orientation]
        held = bool(m and k) and all(name in planes for name in sources)  # else they are gathered once
        if not held or (kernels := cls.usable_kernels(planes[sources[0]], dtype)) is None:
            return None
        read = kernels.read_of({name: planes[name] for name in sources})
        return kernels.values_plan((m, k), dtype, read, orientation)

    @classmethod
    def lay_out(
        cls, planes: Planes, m: int, k: int, orientations: tuple[str, ...], swizzled: bool = False
    ) -> dict[str, Tensor]:
        """The buffers of orientations, from planes; a buffer that equals a plane is that plane."""
        kernels = cls.usable_kernels(next(iter(planes.values()))) if orientations else None
        if kernels is not None and kernels.by_reference is None:
            return kernels.lay_out(planes, m, k, orientations, swizzled)
        buffers = by_reference(cls.LAYOUT, cls.REFERENCE, planes, (m, k), orientations)
        for name in cls.LAYOUT.swizzled if swizzled else ():
            orientation, _, kind = name.rpartition("_")
            if orientation in orientations:
                buffers[name] = cls.REFERENCE.gemm_scale(buffers, orientation, kind)
        return buffers


@cache
def _kernels_of(module: str) -> Any:
    return importlib.import_module(module).KERNELS


def plane(name: str) -> property:
    """A stored plane as an attribute of a generated class."""
    return property(lambda self: self.plane(name), doc=f"The stored plane {name}.")
