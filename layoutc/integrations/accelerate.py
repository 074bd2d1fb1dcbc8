"""accelerate: prepares a model together with its masters, and exports it.

accelerator = Accelerator()
model, optimizer = prepare(accelerator, model, torch.optim.AdamW, recipe="nvfp4", lr=3e-4)
...
export(accelerator, model, "out", dtype=torch.bfloat16)
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal

import torch
from torch import nn

import layoutc
from layoutc import checkpoint
from layoutc.integrations.packages import needs

with needs("accelerate"):
    from accelerate import Accelerator


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    *others: Any,
    recipe: str,
    use: Literal["quantized", "cast_on_gather"] = "quantized",
    param_filter: Sequence[str] | None = None,
    share_amax: bool | Sequence[Sequence[str]] = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Converts the model, makes its optimizer, and lets accelerate prepare both and `others` in one call.

    param_filter, share_amax: as for `layoutc.quantize_`. options: the optimizer's. Returns the model, the optimizer and
    the others. After each step, the amaxes of weights that are cast on gather are computed.
    """
    if use == "quantized":
        layoutc.quantize_(model, recipe, param_filter=param_filter, share_amax=share_amax)
        optimizer: torch.optim.Optimizer = layoutc.MasterWeights(optimizer_class, model.parameters(), **options)
    else:
        layoutc.cast_on_gather_(model, recipe, param_filter=param_filter, share_amax=share_amax)
        optimizer = optimizer_class(model.parameters(), **options)
    prepared = accelerator.prepare(model, optimizer, *others)
    if use == "cast_on_gather":
        sharded = accelerator.unwrap_model(prepared[0])
        optimizer.register_step_post_hook(lambda *_: layoutc.precompute_amaxes(sharded))
    layoutc.check_ranks(accelerator.unwrap_model(prepared[0]))
    return tuple(prepared)


def export(
    accelerator: Accelerator, model: nn.Module, folder: str | PathLike[str], *, dtype: torch.dtype | None = None
) -> list[str]:
    """`layoutc.checkpoint.export_safetensors` for a prepared model: its planes, or plain values in `dtype`.

    Every rank calls it; the first one writes. Returns the file names.
    """
    return checkpoint.export_safetensors(accelerator.unwrap_model(model), folder, dtype=dtype)
