"""Device meshes: which ranks hold which part of a DTensor, and which of them share an amax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from layoutc.ints.cuts import Cuts
from layoutc.ints.nearest import nearest_rows, nearest_worlds
from layoutc.ints.sizes import cdiv, up
from layoutc.runtime.errors import LayoutError, ShardAlignmentError
from layoutc.runtime.facts import Layout
from layoutc.runtime.torch_private import process_group, spec_of


def with_local(tensor: Any, local: Tensor) -> Tensor:
    """A DTensor like `tensor` with `local` as its shard; `local` itself if `tensor` is not a DTensor."""
    if not isinstance(tensor, DTensor):
        return local
    spec = spec_of(tensor)
    if spec.tensor_meta is not None and spec.tensor_meta.dtype != local.dtype:  # as moments of bf16 masters
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    # Not DTensor.from_local, which would move an offloaded shard to the mesh's device.
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def cuts(tensor: Tensor) -> list[tuple[int, int]]:
    """(mesh dim, tensor dim) of every cut of a DTensor, FSDP2's cuts of tensor-parallel shards included."""
    if not isinstance(tensor, DTensor):
        return []
    # FSDP2's strided placements are not instances of Shard, but every placement that cuts has a dim.
    placements: tuple[Any, ...] = tensor.placements
    return [(mesh_dim, p.dim) for mesh_dim, p in enumerate(placements) if hasattr(p, "dim")]


def slices_of(tensor: Tensor) -> tuple[slice, ...]:
    """This rank's part of a DTensor as an index into the whole; all of any other tensor."""
    first, last = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        # A strided placement cuts what later mesh dims have already cut.
        strided: Any = [cut for cut in cuts(tensor) if hasattr(placements[cut[0]], "split_factor")]
        plain = [cut for cut in cuts(tensor) if cut not in strided]
        for mesh_dim, negative in (*plain, *reversed(strided)):
            dim, world, rank = negative % tensor.dim(), mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
            start, stop = first[dim], last[dim]
            each = cdiv(stop - start, world)
            first[dim], last[dim] = min(start + rank * each, stop), min(start + (rank + 1) * each, stop)
    return tuple(slice(a, b) for a, b in zip(first, last, strict=True))


def place_of(tensor: Tensor) -> tuple[int, int]:
    """The first row and column of this rank's shard, in the matrix of the whole weight."""
    slices = slices_of(tensor)
    if len(slices) < 2:
        return 0, slices[0].start if slices else 0
    return slices[0].start * prod(tensor.shape[1:-1]), slices[-1].start


def amax_groups(layout: Layout, tensor: Tensor, name: str) -> list[dist.ProcessGroup]:
    """The process groups whose shards share amaxes, one for each mesh dim that cuts; [] for a plain tensor.

    Shards of columns share no amax if the recipe has one for each column, nor do whole matrices if it has one for each.
    Raises LayoutError for shards of columns if a scale covers a whole row, since no rank sees all of it.
    """
    groups = []
    for mesh_dim, dim in cuts(tensor):
        assert isinstance(tensor, DTensor)
        if tensor.device_mesh.size(mesh_dim) == 1:
            continue
        if shares_amax(layout, tensor.shape, dim, name):
            groups.append(tensor.device_mesh.get_group(mesh_dim))
    return groups


def shares_amax(layout: Layout, shape: Sequence[int], dim: int, name: str) -> bool:
    """Whether parts of a weight of `shape`, cut on a dim, share amaxes. Raises LayoutError as amax_groups does."""
    of_columns = dim == len(shape) - 1 and dim > 0
    if of_columns and layout.shared_along_rows - layout.shared:
        raise LayoutError(_of_whole_rows(layout, name, shape))
    whole = layout.amax_of_matrices and dim < len(shape) - 2
    return layout.shares_amax and not whole and not (of_columns and layout.amax_columns is not None)


def resolve(names: Iterable[str]) -> list[dist.ProcessGroup]:
    """The process groups of these names. Raises RuntimeError for an unknown name."""
    return [process_group(name) for name in names]


def check_shards(layout: Layout, weight: DTensor, name: str) -> None:
    """Refuses a sharded weight whose shards can't be quantized to the same bytes as the whole one.

    All ranks raise, or none. Raises ShardAlignmentError if a cut splits a block, LayoutError if columns are cut and a
    scale covers a whole row, ValueError for partial sums and for cuts of dims other than the first and the last.
    """
    if any(placement.is_partial() for placement in weight.placements):
        raise ValueError(
            f"{name} holds partial sums, and its amax is unknown until they are added up: redistribute it first"
        )
    sizes = {dim: [size] for dim, size in enumerate(weight.shape)}
    last = weight.dim() - 1
    for mesh_dim, dim in cuts(weight):
        world = weight.device_mesh.size(mesh_dim)
        if 0 < dim < last:
            raise ValueError(
                f"{name}: {layout.name} can be sharded on dim 0 and on the last one, not on dim {dim} of {weight.dim()}"
            )
        for size in sizes[dim]:
            if dim == 0:
                shape = (size, *weight.shape[1:])
                check_alignment(layout, shape, cdiv(size, world), world, name)
            else:
                _check_columns(layout, weight, size, world, name)
        each = [Cuts(size, cdiv(size, world), world) for size in sizes[dim]]
        bounds = [cuts.bounds(rank) for cuts in each for rank in range(world)]
        sizes[dim] = sorted({stop - start for start, stop in bounds} - {0})


def _check_columns(layout: Layout, weight: DTensor, size: int, world: int, name: str) -> None:
    multiple, each = layout.column_multiple, cdiv(size, world)
    if world > 1 and layout.shared_along_rows - layout.shared:
        raise LayoutError(_of_whole_rows(layout, name, weight.shape))
    if each >= size or each % multiple == 0:
        return
    raise ShardAlignmentError(
        f"{name}: shape {tuple(weight.shape)} can't be sharded over {world} ranks on its last dim in {layout.name}: "
        f"{each} columns a rank, but a cut must fall at a multiple of {multiple} columns. At world size {world}, the "
        f"next size that works is {up(each, multiple) * world}."
    )


def _of_whole_rows(layout: Layout, name: str, shape: Sequence[int]) -> str:
    return (
        f"{name}: shape {tuple(shape)} in {layout.name} can't be sharded by columns: one scale covers a whole "
        "row, and a rank sees only a part of that; shard dim 0, or use a recipe with blocks of columns"
    )


def check_alignment(layout: Layout, shape: tuple[int, ...], per_rank: int, world: int, name: str) -> None:
    """Refuses to cut a weight of `shape` every `per_rank` entries of dim 0 if a cut would split a block.

    All ranks pass the same numbers, so all raise or none does. Raises ShardAlignmentError with the
    parameter's name, the numbers, and the nearest sizes that work.
    """
    inner = prod(shape[1:-1])  # matrix rows for one entry of dim 0
    rows, multiple = shape[0] * inner, layout.shard_rows
    if Cuts(rows, per_rank * inner, 1).aligned(multiple):
        return
    unit, accepted = (size // gcd(size, inner) for size in (multiple, layout.multiple_m))  # of dim 0
    sizes, worlds = nearest_rows(shape[0], world, unit, accepted), nearest_worlds(shape[0], world, unit)
    blocks = ", ".join(f"{block} {orientation}" for orientation, block in layout.blocks.items())
    raise ShardAlignmentError(
        f"{name}: shape {tuple(shape)} can't be sharded over {world} ranks in {layout.name}: {per_rank * inner} rows a "
        f"rank, but a cut must fall at a multiple of {multiple} rows ({layout.shard_reason}; blocks {blocks}). "
        f"At world size {world}, dim 0 can be {_either(sizes)}; "
        f"with dim 0 of {shape[0]}, the world size can be {_either(worlds)}."
    )


def _either(numbers: tuple[int, ...]) -> str:
    return " or ".join(str(number) for number in numbers) or "no size near it"
