"""Merging: adds an adapter's update to a quantized weight, measures the rounding error, and undoes it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from layoutc.runtime.dispatch import merges
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.quantize import weights
from layoutc.runtime.sharding import gathered, meshes
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight.tensor import QuantizedTensor


@torch.no_grad()
def merge_(weight: Tensor, delta: Tensor, *, keep_base: bool = False) -> float:
    """Adds `delta` to a quantized weight and requantizes it; returns the relative error.

    The error is norm(new weight - sum) / norm(sum). weight: a parameter, whole or sharded. delta: a tensor of its
    shape, whole or sharded alike, in any floating-point dtype. The sum is in fp32, from the weight's initial values if
    it has them, else from its dequantized values. For a sharded weight the call is collective, and all ranks return the
    same number. keep_base: keep a copy of the weight's bytes, for `unmerge_`; of several merges, those from before the
    first.

    Raises TypeError for a weight that is not quantized, ValueError for another shape, LayoutError for a weight that
    FSDP2 has gathered as values. Nothing is changed then.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "mxfp8")
        ['0.weight']
        >>> layoutc.merge_(model[0].weight, torch.full((128, 128), 0.01)) < 0.03
        True
    """
    local = _local(weight, "merge_ adds to", "weight.add_(delta)")
    if delta.shape != weight.shape:
        raise ValueError(f"{local.label()}: the update has shape {tuple(delta.shape)}, not {tuple(weight.shape)}")
    groups: list[dist.ProcessGroup] = []
    if isinstance(weight, DTensor):
        if not isinstance(delta, DTensor):
            delta = distribute_tensor(delta.detach(), weight.device_mesh, weight.placements, src_data_rank=None)
        delta = delta.redistribute(weight.device_mesh, weight.placements)
        groups = [weight.device_mesh.get_group(mesh_dim) for mesh_dim, _ in meshes.cuts(weight)]
    values = local.initial_values(torch.float32)
    total = (local.dequantize(torch.float32) if values is None else values) + local_tensor(delta).to(local.device)
    base = merges.keep(local) if keep_base else None
    weights.requantize_(local, total)
    if base is not None:
        merges.hold(local, base)
    squares = torch.stack(
        [(local.dequantize(torch.float32) - total).double().square().sum(), total.double().square().sum()]
    )
    for group in groups:
        dist.all_reduce(squares, group=group)
    error, norm = squares.sqrt().tolist()
    return float(error / norm) if norm else 0.0


@torch.no_grad()
def unmerge_(weight: Tensor) -> None:
    """Undoes every `merge_` with `keep_base=True`: restores the weight's bytes, and frees their copy.

    weight: the merged parameter; if it is sharded, all ranks call it. Raises LayoutError if the weight has no kept
    bytes, or if `merge_` without `keep_base`, a load or a step has written it since. Raises TypeError as `merge_` does.
    Nothing is changed then.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "mxfp8")
        ['0.weight']
        >>> error = layoutc.merge_(model[0].weight, torch.ones(128, 128), keep_base=True)
        >>> layoutc.unmerge_(model[0].weight)
    """
    local = _local(weight, "unmerge_ takes from", "weight.sub_(delta)")
    if not merges.give_back(local):
        raise LayoutError(
            f"{local.label()} has kept nothing from before a merge: call layoutc.merge_(weight, delta, "
            "keep_base=True), and write nothing else into the weight until unmerge_"
        )


def _local(weight: Tensor, does: str, instead: str) -> QuantizedTensor:
    """This rank's part of a quantized weight. Raises TypeError, and LayoutError if it is gathered as values."""
    if (shard := gathered.weights_of_values().get(id(weight))) is not None:
        name = getattr(local_tensor(shard), "weight_name", None) or "the weight"
        raise LayoutError(f"{name} of shape {tuple(weight.shape)} is gathered now: {gathered.RESHARD}")
    local = local_tensor(weight.data)
    if not isinstance(local, QuantizedTensor):
        raise TypeError(f"{does} quantized weights; this is {type(local).__name__}: write {instead}")
    return local
