"""Sums over ranks, in fp32 and in rank order: of values, or of codes of a recipe.

As codes, a rank's chunks of a group's gradients are one row of n values in FSDP2's order, padded with zeros to a
multiple of the recipe's blocks. The row is quantized as a matrix row, and its planes travel one after the other. The
rank that keeps the sum dequantizes and adds the rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from layoutc.ints.sizes import cdiv, up
from layoutc.runtime import installed
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Layout
from layoutc.runtime.kernels import launch, plans
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.kernels.rank_chunks import GRADS, Chunks

TILE, WARPS = 4096, 8
CODES_TILE, CODES_PIECES, CODES_WARPS = 1024, 4, 1  # pieces: 32 values of 16 bits in a thread, which mixes them alone


def rank_sum(parts: Tensor, out: Tensor, divisor: int) -> None:
    """(ranks, n) contiguous, in bf16 or fp16 -> their sum over ranks, over `divisor`, into `out`, (n,) fp32.

    Ranks are added one after the other; each addition and the division are rounded as IEEE 754 requires.
    """
    if not (launch.usable(parts) and launch.usable(out)):
        by = torch.full((), divisor, dtype=torch.float32, device=out.device)  # a card multiplies by a number's inverse
        torch.div(sum_in_order(parts), by, out=out)
        return

    def plan() -> LaunchPlan:
        from layoutc.runtime.triton.reductions import rank_sum_kernel

        ranks, numel = parts.shape
        args = parts, out, numel, ranks, *scaling(divisor), TILE
        return LaunchPlan.of(rank_sum_kernel, cdiv(numel, TILE), args, WARPS)

    plans.cache.of(("rank_sum", parts.shape, parts.dtype, parts.device, divisor), plan)(parts, out)


def sum_in_order(parts: Tensor) -> Tensor:
    """(ranks, ...) -> (...) fp32."""
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        total = total + part
    return total


def scaling(divisor: int) -> tuple[float, bool]:
    """The kernel's number, and whether it divides by it: the inverse of a power of two is exact and cheaper."""
    return (float(divisor), True) if divisor & (divisor - 1) else (1 / divisor, False)


# ---------------------------------------------------------------------------------------------------------------- codes
UNIT = 16  # alignment of planes in a row, in bytes
SIDE = "rowwise"  # the orientation that travels
MOST_PLANES = 3  # codes, scales, zero points


class Row(NamedTuple):
    """The row that is sent for n values, padded to k: names, dtypes, entries and starts of its planes."""

    k: int
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    entries: tuple[int, ...]
    starts: tuple[int, ...]
    nbytes: int

    @property
    def strides(self) -> tuple[int, ...]:
        """Entries from a plane's row to the next one's."""
        return tuple(self.nbytes // dtype.itemsize for dtype in self.dtypes)

    def planes_in(self, rows: Tensor) -> dict[str, Tensor]:
        """Views of (ranks, nbytes) uint8, as (ranks, entries) of each plane's dtype."""
        found = {}
        for name, dtype, entries, start in zip(self.names, self.dtypes, self.entries, self.starts, strict=True):
            found[name] = rows[:, start : start + entries * dtype.itemsize].view(dtype)
        return found


def not_by_rows(layout: Layout) -> str:
    """Why the planes of a recipe don't follow from each row alone; "" if they do."""
    if layout.takes_amax((SIDE,)) or layout.history:
        return "its scales depend on an amax of the whole matrix, which ranks would have to agree on"
    names = layout.sources.get(SIDE, ())
    if not names or len(names) > MOST_PLANES:
        return f"it has no {SIDE} orientation of {MOST_PLANES} planes at most"
    several = any(layout.stored[name].rows_per_value != 1 for name in names)
    return "its blocks cover several rows, and each row is sent by itself" if several else ""


class Codes:
    """A recipe for gradients on the wire. Raises LayoutError for one whose planes don't follow from each row alone."""

    def __init__(self, recipe: installed.Recipe) -> None:
        self._module: ModuleType = installed.find(recipe)
        self.layout: Layout = self._module.LAYOUT
        rows = self.layout.multiple_m
        if reason := not_by_rows(self.layout) or (f"it takes rows in multiples of {rows}" if rows > 1 else ""):
            raise LayoutError(
                f"exchange_gradients: {self.layout.name} can't hold gradients on the wire: {reason}. Recipes that can "
                "have `use: wire` in their specs"
            )

    @cached_property
    def _kernels(self) -> Any:
        """The recipe's kernels; None if there are none or its blocks don't fill a tile of a row."""
        try:
            found: Any = import_module(f"{self._module.__name__}.kernels").KERNELS
        except ModuleNotFoundError:
            return None
        columns = [self.layout.stored[name].columns_per_value for name in self.layout.sources[SIDE]]
        fills = all(one is not None and (one < 2 or CODES_TILE % one == 0) for one in columns)
        return found if fills and found.quantize_tile is not None and not found.codebooks else None

    def row(self, n: int) -> Row:
        """The row for n values."""
        return _row(self.layout, n)

    # ---------------------------------------------------------------------------------------------------- what is sent
    def reads(self, chunks: Chunks) -> bool:
        """Whether `quantize` takes gradients that were not copied into rows."""
        return chunks.fit and self._kernels is not None

    def quantize(self, values: Tensor | Chunks, seed: Tensor, rest: Tensor | None = None) -> Tensor:
        """(ranks, n) contiguous, in fp32, bf16 or fp16 -> (ranks, nbytes) uint8: a row for each rank, by one launch.

        values: also chunks that it `reads`. seed: (1,) int64, of random bits. rest: (ranks, n) fp32, is added before
        quantizing, and then holds the rounding error; 0 where that is not finite.
        """
        chunks = Chunks([values], *values.shape) if isinstance(values, Tensor) else values
        row = self.row(chunks.n)
        rows = torch.empty(chunks.ranks, row.nbytes, dtype=torch.uint8, device=chunks.grads[0].device)
        if launch.usable(rows) and self.reads(chunks):
            self._quantizing(chunks, seed, rest, rows, row)
        else:
            self._quantize_by_reference(chunks.grads[0], seed, rest, rows, row)
        return rows

    def _quantize_by_reference(self, values: Tensor, seed: Tensor, rest: Tensor | None, rows: Tensor, row: Row) -> None:
        n = values.shape[1]
        whole = values if rest is None else values.to(torch.float32) + rest
        seeded = {"seed": seed} if self.layout.stochastic else {}
        made = self._module.quantize_reference(F.pad(whole, (0, row.k - n)), orientations=(SIDE,), **seeded)
        for name, plane in row.planes_in(rows).items():
            plane.copy_(made[name])
        if rest is not None:
            missed = whole - self._dequantized(rows, row)[:, :n]
            rest.copy_(torch.where(missed.isfinite(), missed, 0.0))

    def _dequantized(self, rows: Tensor, row: Row) -> Tensor:
        planes = {name: plane.contiguous() for name, plane in row.planes_in(rows).items()}
        values: Tensor = self._module.dequantize_reference(planes, rows.shape[0], row.k, SIDE)
        return values

    def _quantizing(self, chunks: Chunks, seed: Tensor, rest: Tensor | None, rows: Tensor, row: Row) -> None:
        given = *chunks.grads, rest, *_three(row.planes_in(rows).values()), seed
        x = chunks.grads[0]

        def plan() -> LaunchPlan:
            from layoutc.runtime.triton.kernels import quantize_rows_kernel

            (grads, ranks, n), kernels, none = chunks, self._kernels, [None] * (GRADS - len(chunks.grads))
            input_max = torch.finfo(x.dtype).max if kernels.takes_input_max else None
            gaps = _three([stride - entries for stride, entries in zip(row.strides, row.entries, strict=True)])
            fixed = kernels.quantize_tile, kernels.dequantize_tile, CODES_TILE, CODES_PIECES
            constants = *fixed, n == row.k and n % CODES_TILE == 0, launch.hardware(x.device)
            of_grads = *grads, *none, *accumulate(chunks.sizes), *none, *map(Tensor.numel, grads), *none
            args = *of_grads, *given[len(grads) :], input_max, None, ranks, n, row.k, *gaps, *constants
            return LaunchPlan.of(quantize_rows_kernel, ranks * cdiv(row.k, CODES_TILE), args, CODES_WARPS)

        shapes = chunks.ranks, *[grad.shape for grad in chunks.grads]
        key = self.layout, "quantize_rows", shapes, x.dtype, x.device, rest is not None
        plans.cache.of(key, plan)(*[one for one in given if one is not None])

    # ------------------------------------------------------------------------------------------------ what was received
    def add(self, rows: Tensor, out: Tensor, number: float, divides: bool, seed: Tensor | None = None) -> None:
        """(ranks, nbytes) uint8 -> the sum over ranks into `out`, (n,), by one launch: in fp32, in their order.

        number: what the sum is multiplied by, or divided by if it `divides`; `out` gets that, rounded once to its
        dtype. seed: (1,) int64, which becomes the next one.
        """
        row = self.row(out.numel())
        if launch.usable(rows) and launch.usable(out, out.dtype) and self._kernels is not None:
            self._adding(rows, out, number, divides, seed, row)
            return
        total = sum_in_order(self._dequantized(rows, row)[:, : out.numel()])
        by = torch.full((), number, dtype=torch.float32, device=out.device)  # a card multiplies by a number's inverse
        out.copy_(total / by if divides else total * by)
        if seed is not None:
            seed += 1

    def _adding(self, rows: Tensor, out: Tensor, number: float, divides: bool, seed: Tensor | None, row: Row) -> None:
        given = *_three(row.planes_in(rows).values()), out, seed

        def plan() -> LaunchPlan:
            from layoutc.runtime.triton.kernels import sum_rows_kernel

            n = out.numel()
            fixed = self._kernels.dequantize_tile, divides, CODES_TILE
            constants = *fixed, n == row.k and n % CODES_TILE == 0, launch.hardware(out.device)
            args = *given, None, rows.shape[0], n, row.k, *_three(row.strides), number, *constants
            return LaunchPlan.of(sum_rows_kernel, cdiv(row.k, CODES_TILE), args, CODES_WARPS)

        key = self.layout, "sum_rows", rows.shape, out.shape, out.dtype, out.device, number, divides, seed is None
        plans.cache.of(key, plan)(*[one for one in given if one is not None])


@lru_cache(maxsize=4096)
def _row(layout: Layout, n: int) -> Row:
    k = up(n, layout.multiple_k)
    facts = layout.written(1, k, (SIDE,))
    *starts, nbytes = accumulate([up(one.nbytes, UNIT) for one in facts.values()], initial=0)
    dtypes, entries = zip(*[(one.dtype, one.shape[-1]) for one in facts.values()], strict=True)
    return Row(k, tuple(facts), dtypes, entries, tuple(starts), nbytes)


def _three(given: Iterable[Any]) -> tuple[Any, ...]:
    """Pads to the number of planes that kernels take."""
    return (*given, None, None)[:MOST_PLANES]
