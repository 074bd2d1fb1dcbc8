"""transformers: a Trainer callback with which `save_pretrained` writes plain values, and names in a release's files.

model = AutoModelForCausalLM.from_pretrained(name)
layoutc.quantize_(model, "nvfp4", param_filter=["model.layers.*.weight"])
trainer = Trainer(
    model=model,
    optimizer_cls_and_kwargs=(masters(torch.optim.AdamW), {"lr": 1e-5}),
    callbacks=[LayoutcCallback(model)],
)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import layoutc
from layoutc.integrations.packages import needs
from layoutc.integrations.plain_values import plain
from layoutc.integrations.transformers_names import names_in_files as names_in_files
from layoutc.runtime.weight.tensor import QuantizedTensor

with needs("transformers"):
    from transformers import PreTrainedModel, TrainerCallback


def masters(optimizer_class: type[torch.optim.Optimizer]) -> type[layoutc.MasterWeights]:
    """An optimizer that steps fp32 masters, as a class: `optimizer_cls_and_kwargs` calls functions differently."""

    class Masters(layoutc.MasterWeights):
        def __init__(self, params: Iterable[Any], **options: Any) -> None:
            super().__init__(optimizer_class, params, **options)

    return Masters


class LayoutcCallback(TrainerCallback):
    """Compares ranks before the first step, and computes amaxes of weights that are cast on gather after each step.

    Also makes the model's `save_pretrained`, and thus Trainer's `save_model`, write dequantized weights under their
    usual names, which `from_pretrained` loads. For quantized files, use `layoutc.checkpoint.export_safetensors`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        if not isinstance(model.save_pretrained, partial):
            model.save_pretrained = partial(_save_plain, model)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Compares ranks, since ranks with different weights would diverge. A resumed run requantizes its masters:
        Trainer's checkpoints of an unsharded model hold plain values, which quantize to other codes."""
        ours = getattr(optimizer, "optimizer", optimizer)
        if state.global_step and isinstance(ours, layoutc.MasterWeights):
            with torch.no_grad():
                for param, master in ours.masters().items():
                    if isinstance(param.data, QuantizedTensor):
                        param.copy_(master)
        layoutc.check_ranks(self._model)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Computes all amaxes in one all-reduce; otherwise each gather needs one."""
        layoutc.precompute_amaxes(self._model)


def _save_plain(model: PreTrainedModel, folder: Any, *, state_dict: Any = None, **options: Any) -> None:
    """Like PreTrainedModel.save_pretrained; the first rank writes. Trainer passes state_dict on the writing rank."""
    if state_dict is None and dist.is_initialized():
        options.setdefault("is_main_process", dist.get_rank() == 0)
    whole = plain(model.state_dict() if state_dict is None else state_dict)
    type(model).save_pretrained(model, folder, state_dict=whole, **options)
