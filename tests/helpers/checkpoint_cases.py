"""Checkpoints that tests of reading and listing share, made in one process without a process group."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from weight_recipes import WEIGHTS

import layoutc
from layoutc.ints.sizes import up
from layoutc.runtime.train.convert import recipe_class


class Evil:
    """Unpickled by plain pickle, it leaves a marker."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


def save(state: dict[str, Any], folder: Path) -> Path:
    """As a single process saves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def columns(name: str) -> int:
    """Of a recipe's weight: 128, or the fewest that it takes."""
    return up(128, recipe_class(name).LAYOUT.multiple_k)


def trained() -> tuple[nn.Module, dict[str, Any]]:
    """A model with a weight in each recipe, after a step of AdamW on masters, and all its state."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(columns(name), 128, bias=name == WEIGHTS[0]) for name in WEIGHTS}
    model = nn.Sequential()
    for name, layer in layers.items():
        layoutc.quantize_(layer, name)
        model.add_module(name, layer)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.randn(param.shape)
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    extra = {"codes": torch.zeros(3, dtype=torch.float8_e4m3fn), "steps": [1, torch.arange(4)], "none": None}
    return model, {"model": model_state, "optim": optimizer_state, "extra": extra}
