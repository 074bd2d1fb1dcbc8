"""What `shard` hands to FSDP2, with Lightning or a stand-in for its one class."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from layoutc.runtime.weight.tensor import QuantizedTensor

NAME = "layoutc.integrations.lightning"


def test_blocks_are_sharded_each_and_then_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized before; with the caller's options; a model without blocks as a whole."""
    if find_spec("lightning") is None:
        stand_in: Any = ModuleType("lightning.pytorch")
        stand_in.Callback = object
        monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
        monkeypatch.setitem(sys.modules, "lightning.pytorch", stand_in)
        monkeypatch.setitem(sys.modules, NAME, stand_in)  # so that what is imported here goes again
        del sys.modules[NAME]
    ours = importlib.import_module(NAME)
    sharded: list[Any] = []

    def fully_shard(module: nn.Module, **options: Any) -> None:
        assert all(isinstance(one.weight, QuantizedTensor) for one in module.modules() if isinstance(one, nn.Linear))
        sharded.append((module, options))

    monkeypatch.setattr(ours, "fully_shard", fully_shard)
    for blocks in (nn.Linear, ()):
        sharded.clear()
        model, mesh = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), {"data_parallel": "ranks"}
        given = {"recipe": "fp8_current", "share_amax": [["0", "2"]], "reshard_after_forward": False}
        assert ours.shard(model, mesh, blocks=blocks, **given) is model
        assert model[0].weight.fused == model[2].weight.fused is not None
        expected = [model[0], model[2], model] if blocks else [model]
        assert [module for module, _ in sharded] == expected
        assert all(options == {"mesh": "ranks", "reshard_after_forward": False} for _, options in sharded)
