"""Replaced parameters: ones that were put into an optimizer's groups in the place of others.

accelerate does so when it shards a model after the optimizer was made. The new parameter takes over the old one's
master, cut as it is itself, since a master is finer than what the parameter dequantizes to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

if TYPE_CHECKING:
    from layoutc.runtime.train.master_weights import MasterWeights


@torch.no_grad()
def follow(optimizer: MasterWeights) -> None:
    """Makes `optimizer` train the parameters that its groups hold now.

    Raises LayoutError for a parameter of another shape, and if the optimizer has stepped already, since its state
    belongs to the old shards.
    """
    masters = optimizer._masters
    owners = {id(master): param for param, master in masters.items()}
    for outer, inner in zip(optimizer.param_groups, optimizer.inner.param_groups, strict=True):
        for position, (param, master) in enumerate(zip(outer["params"], inner["params"], strict=True)):
            if param in masters:
                continue
            old = owners[id(master)]
            if tuple(param.shape) != tuple(old.shape) or optimizer.inner.state.get(master):
                raise LayoutError(
                    f"a parameter of shape {tuple(param.shape)} was put into the groups of MasterWeights in place of "
                    f"one of shape {tuple(old.shape)}"
                    + (", after a step" if optimizer.inner.state.get(master) else "")
                    + "; create a new optimizer with the parameters that it is to train"
                )
            was_coarse = old in optimizer._coarse
            for record in (masters, optimizer._written, optimizer._recipes, optimizer._coarse, optimizer.state):
                record.pop(old, None)
            optimizer._adopt([param])
            made = inner["params"][position] = masters[param]
            if made is not param and master is not old and _hand_over(param, made, old, master) and not was_coarse:
                optimizer._coarse.pop(param, None)


def _hand_over(param: Tensor, made: Tensor, old: Tensor, master: Tensor) -> bool:
    """Copies a master's values to the one that replaces it, if both parameters have the same values; else false.

    They differ on a rank whose model had other weights, and has been sent those of the first rank since.
    """
    values = [
        _cut(one.dequantize(torch.float32) if isinstance(one, QuantizedTensor) else one, param) for one in (old, master)
    ]
    local = _local(param)
    now = local.dequantize(torch.float32) if isinstance(local, QuantizedTensor) else local
    if not torch.equal(now.to(torch.float32), values[0].to(torch.float32)):
        return False
    _local(made).copy_(values[1])
    return True


def _cut(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor if it is cut as `like` is, without communication."""
    if not isinstance(like, DTensor) or isinstance(whole, DTensor):
        return _local(whole)
    cut: Any = distribute_tensor(whole.detach(), like.device_mesh, like.placements, src_data_rank=None)
    return _local(cut).to(_local(like).device)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
