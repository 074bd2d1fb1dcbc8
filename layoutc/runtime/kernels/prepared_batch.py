"""Launches for batches of matrices that stay where they are, with planes that stay too: their tables are made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from layoutc.runtime.facts import Layout
from layoutc.runtime.kernels import batches
from layoutc.runtime.kernels.batches import Table
from layoutc.runtime.kernels.direct import Arguments, Bound, Constants, LaunchPlan
from layoutc.runtime.triton.kernels import quantize_kernel


class Binding(NamedTuple):
    """How a recipe's kernel is launched for the matrices of a table.

    names: the planes that the kernel takes, in its order. span, step: rows and columns of a program, and of its tiles.
    arguments: of the launch for a table, with the first amax.
    """

    layout: Layout
    names: tuple[str, ...]
    orientations: tuple[str, ...]
    span: tuple[int, int]
    step: tuple[int, int]
    arguments: Callable[[Table, Tensor | None], Arguments]

    def split(
        self, xs: Sequence[Tensor], amaxes: Sequence[Tensor] | None, outs: Sequence[Mapping[str, Tensor]]
    ) -> tuple[Sequence[Table], Sequence[int]]:
        """As batches.split."""
        return batches.split(self.layout, self.names, xs, amaxes, self.orientations, outs, self.span, self.step)

    def plan(self, tables: Sequence[Table], amax: Tensor | None) -> LaunchPlan:
        """The launches for tables, to be called again and again: with an amax, if there are any."""
        kept = [table for table in tables if table.entries is not None]
        return LaunchPlan([Bound(quantize_kernel, *self.arguments(one, amax), one.entries) for one in kept])


def launches_into(
    bindings: Sequence[Binding],
    xs: Sequence[Tensor],
    amaxes: Sequence[Tensor] | None,
    outs: Sequence[Mapping[str, Tensor]],
) -> LaunchPlan | None:
    """Launches that quantize matrices into planes, both of which stay where they are; None if no table takes them all.

    bindings: all that one matrix takes. amaxes: an example: later ones lie as they do from the first one. Raises as
    batches.split.
    """
    bounds: list[Bound] = []
    for binding in bindings:
        tables, alone = binding.split(xs, amaxes, outs)
        if alone:
            return None
        bounds += binding.plan(tables, amaxes[0] if amaxes else None)
    return LaunchPlan(bounds)


def amax_launches(
    packed: Tensor, offsets: Sequence[int], xs: Sequence[Tensor], block_k: int | None
) -> LaunchPlan | None:
    """Launches that do what batches.raise_amaxes does, with any `packed` of that size; None as launches_into."""
    from layoutc.runtime.triton.batch import amax_batch_kernel

    launches, alone = batches.amax_launches(packed, offsets, xs, block_k)
    if alone:
        return None
    bounds = []
    for table, rest, warps in launches:
        args, grid = (table.entries, packed), (table.programs,)
        bounds.append(Bound(amax_batch_kernel, grid, args, warps, None, Constants(rest), table.entries))
    return LaunchPlan(bounds)
