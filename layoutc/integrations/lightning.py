"""Lightning: a callback for trainers with ModelParallelStrategy, and `shard` for modules.

class Mine(LightningModule):
    def configure_model(self):
        self.model = shard(Transformer(config), self.device_mesh, recipe="nvfp4", blocks=Block)

    def configure_optimizers(self):
        return layoutc.MasterWeights(torch.optim.AdamW, self.parameters(), lr=3e-4)
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc import checkpoint
from layoutc.integrations.packages import needs

with needs("lightning"):
    from lightning.pytorch import Callback

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model,
    mesh: DeviceMesh,
    *,
    recipe: str,
    blocks: type[nn.Module] | tuple[type[nn.Module], ...] = (),
    use: Literal["quantized", "cast_on_gather"] = "quantized",
    param_filter: Sequence[str] | None = None,
    share_amax: bool | Sequence[Sequence[str]] = False,
    **options: Any,
) -> Model:
    """Converts a model, then shards its blocks and the rest over Lightning's data-parallel mesh.

    Call it in `configure_model`, but only once: Lightning calls that hook again for evaluation. param_filter,
    share_amax: as for `layoutc.quantize_`. options: fully_shard's.
    """
    convert = layoutc.quantize_ if use == "quantized" else layoutc.cast_on_gather_
    convert(model, recipe, param_filter=param_filter, share_amax=share_amax)
    for module in model.modules():
        if blocks and isinstance(module, blocks):
            fully_shard(module, mesh=mesh["data_parallel"], **options)
    fully_shard(model, mesh=mesh["data_parallel"], **options)
    return model


class LayoutcCallback(Callback):
    """Compares ranks before the first step, computes amaxes of weights that are cast on gather, and exports at the end.

    export: a folder for `layoutc.checkpoint.export_safetensors` when fit ends. dtype: None exports planes.
    """

    def __init__(self, export: str | PathLike[str] | None = None, dtype: torch.dtype | None = None) -> None:
        self._export, self._dtype = export, dtype

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Compares ranks, since ranks with different weights would diverge."""
        layoutc.check_ranks(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Computes all amaxes in one all-reduce; otherwise each gather needs one."""
        layoutc.precompute_amaxes(pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Exports the model. Every rank calls it; the first one writes."""
        if self._export is not None:
            checkpoint.export_safetensors(pl_module, self._export, dtype=self._dtype)
