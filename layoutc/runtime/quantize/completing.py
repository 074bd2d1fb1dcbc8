"""Quantizes the planes that a checkpoint lacks from those that it has."""

from __future__ import annotations

from collections.abc import Collection

import torch

from layoutc.runtime.quantize import weights
from layoutc.runtime.quantize.amax import Groups, agree_on_amax
from layoutc.runtime.quantize.block_edges import with_halos
from layoutc.runtime.sharding.shards import RowSharding
from layoutc.runtime.weight.tensor import QuantizedTensor, written


def lacking(target: QuantizedTensor, planes: Collection[str]) -> tuple[str, ...]:
    """The target's orientations that these planes don't give."""
    sources = target.LAYOUT.sources
    return tuple(name for name in target.orientations if not set(sources[name]) <= set(planes))


@torch.no_grad()
def complete_(
    target: QuantizedTensor,
    planes: Collection[str],
    *,
    groups: Groups | None = None,
    tag: str | None = None,
    row_sharding: RowSharding | None = None,
) -> None:
    """Quantizes each orientation that `planes` don't give, from the dequantized fp32 values of one that they do.

    `planes`, which were just written, are not changed; nor is an amax among them, which the others then share.
    groups, tag, row_sharding: as for `weights.quantize`; the call is collective if that would be.
    """
    rest = lacking(target, planes)
    if not rest:
        return
    layout, cls = target.LAYOUT, type(target)
    given = next(name for name in target.orientations if name not in rest)

    def part(orientations: tuple[str, ...], dtype: torch.dtype) -> QuantizedTensor:
        planes = {name: target.store.planes[name] for one in orientations for name in layout.sources[one]}
        matrix, halo = target.store.matrix, target.store.halo
        return cls(planes, target.shape, dtype, matrix=matrix, orientations=orientations, halo=halo)

    held = part((given,), torch.float32)
    matrix = weights.as_matrix(held.dequantize(torch.float32), (target.store.rows, target.store.matrix[1]))
    amax = target.store.planes["amax"] if "amax" in planes else None
    current = agree_on_amax(cls, matrix, amax, groups, tag)
    others = part(rest, target.dtype)
    weights.overwrite_(cls, [others], with_halos([layout], [matrix], [row_sharding]), [current])
    written([target])
