"""Collective functions that some ranks call alone say so there, and don't hang; a later call on all ranks works."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch.distributed as dist
from harness import on
from torch import nn
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc import checkpoint
from layoutc.runtime.cast import precompute
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.sharding import meeting

CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "export_safetensors": lambda model, folder: checkpoint.export_safetensors(model, folder / "exported"),
    "load_safetensors": lambda model, folder: checkpoint.load_safetensors(model, folder / "exported"),
    "save": lambda model, folder: checkpoint.save({"model": model.state_dict()}, folder / "saved"),
    "load": lambda model, folder: checkpoint.load({"model": model.state_dict()}, folder / "saved"),
    "async_save": lambda model, folder: checkpoint.async_save({"model": model.state_dict()}, folder / "later").result(),
    "check_ranks": lambda model, folder: layoutc.check_ranks(model),
    "exchange_gradients": lambda model, folder: layoutc.exchange_gradients(model, "grad_fp8"),
}


@on("two")
def test_a_rank_that_precomputes_alone_is_told() -> None:
    """What is called in each step tells at the first call; one rank is late at another."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    layoutc.cast_on_gather_(model, "fp8_current")
    fully_shard(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precompute, "_met", WeakSet())
        patch.setattr(meeting, "SOON", timedelta(seconds=0.05))
        patch.setattr(meeting, "timeout_of", lambda group: timedelta(seconds=0.05))
        if dist.get_rank() == 0:
            said = "^precompute_amaxes waits for rank 1: it is collective"
            with pytest.warns(UserWarning, match=said), pytest.raises(LayoutError, match=said):
                layoutc.precompute_amaxes(model)
        dist.barrier()
        patch.undo()
        patch.setattr(precompute, "_met", WeakSet())
        layoutc.precompute_amaxes(model)
        patch.setattr(precompute, "meet", None)
        layoutc.precompute_amaxes(model)


@pytest.mark.thorough
@on("two")
def test_a_rank_that_calls_alone_is_told(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    layoutc.quantize_(model, "fp8_block")
    fully_shard(model)
    with pytest.MonkeyPatch.context() as patch:
        for name, call in CALLS.items():
            patch.setattr(meeting, "SOON", timedelta(seconds=0.05))
            patch.setattr(meeting, "timeout_of", lambda group: timedelta(seconds=0.05))
            if dist.get_rank() == 0:
                said = rf"^{name} waits for rank 1: it is collective, so all 2 ranks of its group call it"
                with pytest.warns(UserWarning, match=said), pytest.raises(LayoutError, match=said):
                    call(model, tmp_path)
            dist.barrier()
            patch.undo()
            call(model, tmp_path)
