"""accelerate in a process that has a group already, and on a CPU."""

from __future__ import annotations

import os
from typing import Any


def forget() -> None:
    """What accelerate remembers of earlier tests; and what it asks of an environment, though the group is there."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if "WORLD_SIZE" in os.environ:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}


def use_fsdp2(engine: Any, *classes: str) -> None:
    """accelerate takes the plugin on cards alone; nothing that it does with it needs one."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=list(classes),
        reshard_after_forward=True,
    )
    if engine.mixed_precision != "no":
        plugin.set_mixed_precision(engine.mixed_precision)
    engine.state.distributed_type, engine.state.fsdp_plugin = DistributedType.FSDP, plugin
