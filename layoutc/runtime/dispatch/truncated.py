"""Initializers of several steps. trunc_normal_ of shards: each rank draws again until its values fit, and only then
writes the weight. sparse_ and dirac_ fill a weight and then write single elements, which weights refuse.

torch redraws values out of bounds as often as a rank's shard needs, and copies the result into the shard only if there
were any. So only some ranks would write a shard whose scales all ranks must agree on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layoutc.runtime import callers
from layoutc.runtime.errors import LayoutError, UnsupportedOperator
from layoutc.runtime.sharding import shards
from layoutc.runtime.weight.tensor import QuantizedTensor

aten = torch.ops.aten


def redrawn(func: Any, target: QuantizedTensor, values: Tensor) -> Tensor:
    """The values that an operator has drawn for a tensor; in trunc_normal_, redrawn until all are within its bounds.

    On a CPU they are drawn in torch's order, as for a plain weight. Raises LayoutError on all ranks for bounds between
    which torch draws uniformly, if ranks share scales.
    """
    if func not in (aten.normal_.default, aten.uniform_.default) or not callers.initializes():
        return values
    if (frame := callers.find("torch.nn.init", "_no_grad_trunc_normal_")) is None:
        return values
    asked = frame.f_locals
    if "candidates" in asked and _agrees(target):
        raise LayoutError(
            f"{target.label()}: trunc_normal_ from {asked['a']} to {asked['b']} is mostly out of bounds, and ranks "
            "that share scales would draw a different number of times; initialize the plain weight, then quantize it"
        )
    if "lo" not in asked:
        return values
    mean, std, generator = asked["mean"], asked["std"], asked["generator"]
    if generator is None and values.device.type != "cpu":  # the next numbers belong to the next rank's shard
        seed = torch.randint(2**62, (1,), device=values.device)
        generator = torch.Generator(values.device).manual_seed(int(seed))
    while (outside := (values < asked["lo"]) | (values > asked["hi"])).any():
        values = torch.where(outside, torch.empty_like(values).normal_(mean, std, generator=generator), values)
    return values


def check_elements(label: str) -> None:
    """Raises UnsupportedOperator for an initializer whose second step weights refuse, before its first one."""
    fills = (name for name in ("sparse_", "dirac_") if callers.find("torch.nn.init", name) is not None)
    if name := next(fills, ""):  # and then writes single elements
        raise UnsupportedOperator(
            f"torch.nn.init.{name} writes single elements, and {label} is written in whole rows; write "
            f"weight.copy_(torch.nn.init.{name}(torch.empty(weight.shape), ...))"
        )


def _agrees(target: QuantizedTensor) -> bool:
    rows = shards.row_sharding(target)
    return bool(shards.amax_groups(target)[0]) or (rows is not None and rows.splits_blocks(target.LAYOUT))
