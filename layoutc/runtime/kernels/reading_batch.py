"""Dequantizing several weights in one launch, into tensors that are there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from layoutc.runtime.kernels import batches, launch
from layoutc.runtime.kernels.direct import Bound, Constants
from layoutc.runtime.kernels.recipe_kernels import Kernels
from layoutc.runtime.triton.kernels import dequantize_kernel


def dequantize_batch(
    kernels: Kernels, weights: Sequence[Mapping[str, Tensor]], orientation: str, outs: Sequence[Tensor]
) -> None:
    """The values of weights as `Kernels.dequantize` gives them, in as few launches as possible.

    weights: the planes of each. outs: (m, k) of each, contiguous, of one dtype, on one device, at multiples of 4 bytes.
    """
    weights = [kernels.read_of(launch.readable(planes)) for planes in weights]
    names, tile = tuple(weights[0]), kernels.dequantize_sizes[orientation][:2]
    columns = {name: tuple([planes[name].data_ptr() for planes in weights]) for name in names}
    amaxes = columns.pop("amax", (0,) * len(outs))
    offsets = tuple([(address - amaxes[0]) // 4 for address in amaxes])  # in fp32 values from the first one
    addresses = [tuple(map(Tensor.data_ptr, outs)), *map(columns.get, kernels._planes)]
    shapes = [(out.shape[0], out.shape[1]) for out in outs]
    ms, ks = zip(*shapes, strict=True)
    fields = [ms, ks, offsets, *[(0,) * len(outs) if one is None else one for one in addresses]]
    wide = [False, True, False, *[True] * len(addresses)]
    tables, alone = batches.tables_of(outs[0].device, shapes, fields, wide, tile, tile)
    for table in tables:
        _launch(kernels, table, weights[0], orientation, outs[0])(table.entries, outs[0], *weights[0].values())  # type: ignore[arg-type]
    for index in alone:
        if outs[index].numel():
            planes = weights[index]
            kernels.dequantizing(outs[index], planes, orientation)(outs[index], *planes.values())


def _launch(
    kernels: Kernels, table: batches.Table, planes: Mapping[str, Tensor], orientation: str, out: Tensor
) -> Bound:
    """The launch for a table of weights like this one, kept for the next such table."""
    entries, rows, programs, aligned, even = table
    key = "batch", programs, rows, aligned, even, out.device, orientation, out.dtype, tuple(planes)
    if (bound := kernels._reading.get(key)) is None:
        tile_m, tile_k, warps = kernels.dequantize_sizes[orientation]
        serves = (orientation in kernels.serves.get(name, ()) for name in ("rowwise", "columnwise"))
        kind = rows, aligned, tile_m, tile_k, even, launch.hardware(out.device)
        constants = Constants((kernels.dequantize_tile, *serves, *kind))
        books = launch.codebooks(kernels.codebooks, out.device)
        args = (entries, out, None, None, planes.get("amax"), *map(planes.get, kernels._planes), books)
        bound = Bound(dequantize_kernel, (programs,), args, warps, None, constants, kept=books)
        kernels._reading[key] = bound
    return bound
