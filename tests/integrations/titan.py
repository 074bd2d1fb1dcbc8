"""torchtitan in a process that has a gloo group already, on a CPU: a text and a tokenizer of its own.

torchtitan chooses its device by itself, and has no option for a CPU: `on_cpu` sets the two names that it keeps of a
device, leaves out its monitor of a card's memory, lets it use the group that is there, and asks FSDP2 for sums that
gloo has. Its trainer, optimizers, loader and checkpoints are as they are. On CPUs, attention that is compiled for
documents has no backward: titan_models.attention is an override that takes torch's own.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

ATTENTION = "titan_models.attention"
STEPS = 8
# Two steps of a debug model on a CPU.
SHORT = [
    *("--training.seq-len", "32", "--training.local-batch-size", "1", "--training.steps", "2"),
    *("--training.disable-cuda-graphs", "--training.mixed-precision-param", "float32", "--override.imports", ATTENTION),
    *("--optimizer.implementation", "for-loop"),
]


@cache
def on_cpu() -> None:
    """Once in a process."""
    import torchtitan.components.metrics as metrics
    import torchtitan.distributed.fsdp as fsdp
    import torchtitan.distributed.utils as utils
    import torchtitan.trainer  # noqa: F401
    from torch.distributed.fsdp import FSDPModule

    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            module.device_type, module.device_module = "cpu", torch.cpu  # type: ignore[attr-defined]
    memory = metrics.DeviceMemStats(*[0] * 6)
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(
        device_name="CPU", get_peak_stats=lambda: memory, reset_peak_stats=lambda: None
    )
    undivided = fsdp.disable_fsdp_gradient_division

    def summed(model: torch.nn.Module) -> None:
        undivided(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = summed
    utils.init_distributed = lambda *_, **__: dist.get_world_size()
    utils.set_pg_timeouts = lambda *_, **__: None
    os.environ.setdefault("LOCAL_RANK", "0")


def write_assets(folder: Path) -> None:
    """A tokenizer of bytes, and four documents that are equal, so that any number of ranks reads the same."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (folder / "text").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    text = Path(json.__file__).read_text(encoding="utf-8")[:9000]
    lines = [json.dumps({"text": text})] * 4
    (folder / "text" / "text.jsonl").write_text("\n".join(lines) + "\n")


def arguments(model: str, assets: Path, folder: Path, *more: str, backend: str = "partial_dtensor") -> list[str]:
    """A command line of torchtitan, which could be a shell's."""
    return [
        *(
            "--module",
            "layoutc.integrations.torchtitan",
            "--config",
            f"titan_models.{model}",
            "--hf-assets-path",
            str(assets),
            "--dump-folder",
            str(folder),
        ),
        *("--dataloader.dataset-path", str(assets / "text"), "--training.disable-cuda-graphs"),
        *("--training.seq-len", "32", "--training.local-batch-size", "2", "--training.steps", str(STEPS)),
        *("--training.max-norm", "1e9", "--training.mixed-precision-param", "float32"),
        *("--checkpoint.enable", "--checkpoint.interval", str(STEPS // 2)),
        *("--optimizer.implementation", "for-loop", "--parallelism.spmd-backend", backend),
        *("--override.imports", ATTENTION),
        *more,
    ]


def losses(command: list[str], given: Path | None = None) -> list[float]:
    """What torchtitan's command does with these arguments, and the losses that it reports.

    given: a file with whole values of all parameters, to start from where there is no checkpoint.
    """
    on_cpu()
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torchtitan.config import ConfigManager

    trainer: Any = ConfigManager().parse_args(command).build()
    values = torch.load(given) if given else {}
    for name, param in trainer.model_parts[0].named_parameters() if given else ():
        value = values[name]
        if isinstance(param, DTensor):
            value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
        with torch.no_grad():
            param.copy_(value)
    found: list[float] = []
    log = trainer.metrics_processor.log

    def noted(step: int, loss: float, *rest: Any, **options: Any) -> None:
        found.append(loss)
        log(step, loss, *rest, **options)

    trainer.metrics_processor.log = noted
    try:
        if trainer.config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
    finally:
        trainer.close()
    return found


def save_values(command: list[str], recipe: str, file: Path) -> None:
    """The whole values that the model of this command multiplies with, from its seed checkpoint; in one process."""
    on_cpu()
    from torch.distributed.tensor import DTensor
    from torchtitan.config import ConfigManager

    module = import_module(f"layoutc.recipes.{recipe}")
    trainer: Any = ConfigManager().parse_args(command).build()
    try:
        trainer.checkpointer.load(step=0)
        found = {}
        for name, param in trainer.model_parts[0].named_parameters():
            held = param._local_tensor if isinstance(param, DTensor) else param
            value = param.full_tensor() if isinstance(param, DTensor) else param.detach()
            if isinstance(held, module.CastTensor):
                value = module.quantize(value)
            found[name] = value.dequantize() if hasattr(value, "LAYOUT") else value
        torch.save(found, file)
    finally:
        trainer.close()


def exported(command: list[str]) -> dict[str, torch.Tensor]:
    """What torchtitan's export to Hugging Face's names has of the model that this command builds; whole values."""
    on_cpu()
    from torch.distributed.tensor import DTensor
    from torchtitan.config import ConfigManager

    trainer: Any = ConfigManager().parse_args(command).build()
    try:
        made = trainer.checkpointer.sd_adapter.to_hf(trainer.model_parts[0].state_dict())
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in made.items()}
    finally:
        trainer.close()
