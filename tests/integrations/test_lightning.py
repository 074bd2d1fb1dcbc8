"""Lightning's trainer with ModelParallelStrategy: both uses train as one process does, to the bit, and resume."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from models import Model, batch, make_uneven, my_share

import layoutc

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="needs lightning: pip install 'layoutc[integrations]'"
)
WIDTH, STEPS = 64, 6


def optimizer_of(model: torch.nn.Module, use: str) -> torch.optim.Optimizer:
    """AdamW, with decay."""
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    if use == "quantized":
        return layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), **options)
    return torch.optim.AdamW(model.parameters(), **options)


def plain_model() -> Model:
    """The same in every run."""
    torch.manual_seed(0)
    model = Model(WIDTH)
    make_uneven(model)
    return model


class Steps(torch.utils.data.Dataset[int]):
    """The numbers of the steps."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> int:
        return index


def alone(recipe: str, use: str) -> list[float]:
    """The loss curve of one process."""
    model = plain_model()
    (layoutc.quantize_ if use == "quantized" else layoutc.cast_on_gather_)(model, recipe)
    optimizer, curve = optimizer_of(model, use), []
    for step in range(STEPS):
        x, y = batch(step, WIDTH)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(float(loss.detach()))
    return curve


def module(recipe: str, use: str) -> Any:
    """A LightningModule that notes its losses."""
    from lightning.pytorch import LightningModule

    from layoutc.integrations.lightning import shard

    class Mine(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if self.model is None:
                blocks = torch.nn.Linear
                self.model = shard(plain_model(), self.device_mesh, recipe=recipe, use=use, blocks=blocks)  # type: ignore[arg-type]

        def training_step(self, *_: Any) -> Any:
            x, y = batch(self.global_step, WIDTH)  # a loader begins anew where a run resumes
            loss = (self.model(x) - y).square().mean()
            self.losses.append(float(loss.detach()))
            return loss * my_share()

        def configure_optimizers(self) -> Any:
            return optimizer_of(self, use)

    return Mine()


def trains(recipe: str, use: str, folder: str, to: int, resume: str | None) -> list[float]:
    """The losses of the steps up to `to`; with a checkpoint and an export after the last."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    from layoutc.integrations.lightning import LayoutcCallback

    class Here(LightningEnvironment):
        creates_processes_externally = True

        def world_size(self) -> int:
            return dist.get_world_size()

        def global_rank(self) -> int:
            return dist.get_rank()

        def local_rank(self) -> int:
            return dist.get_rank()

    warnings.filterwarnings("ignore", module="lightning")
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "0"
    mine = module(recipe, use)
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1),
        plugins=[Here()],
        callbacks=[LayoutcCallback(export=f"{folder}/out-{to}")],
        max_steps=to,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    steps = torch.utils.data.DataLoader(Steps(), batch_size=1)
    trainer.fit(mine, steps, ckpt_path=resume)
    trainer.save_checkpoint(f"{folder}/step-{to}")
    return list(mine.losses)


@pytest.mark.parametrize(("recipe", "use"), [("nvfp4", "quantized"), ("mxfp8", "cast_on_gather")])
def test_lightning_trains_as_one_process_and_resumes(two: Ranks, tmp_path: Path, recipe: str, use: str) -> None:
    """On two ranks, and again from the middle."""
    expected = alone(recipe, use)
    assert len(set(expected)) == STEPS
    for found in two.run(trains, recipe, use, str(tmp_path), STEPS // 2, None):
        assert found == expected[: STEPS // 2]
    for found in two.run(trains, recipe, use, str(tmp_path), STEPS, f"{tmp_path}/step-{STEPS // 2}"):
        assert found == expected[STEPS // 2 :]
    model = Model(WIDTH)
    if use == "quantized":
        layoutc.quantize_(model, recipe)
    from layoutc.checkpoint import load_safetensors

    load_safetensors(model, tmp_path / f"out-{STEPS}", rename=lambda name: f"model.{name}")
