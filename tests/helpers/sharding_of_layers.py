"""Sharding models of other packages, which may have parameters of several dtypes in a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def shard_layers(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """fully_shard of layers and of the model; before that, of modules with parameters of another dtype than most have.

    FSDP2 wants one dtype in a group. transformers keeps some of DeepSeek's in fp32 from 5.24 on.
    """
    for one in (*layers, model):
        left = [param for param in one.parameters() if not isinstance(param, DTensor)]
        sizes = Counter[torch.dtype]()
        for param in left:
            sizes[param.dtype] += param.numel()
        others = {id(param) for param in left if param.dtype is not sizes.most_common(1)[0][0]}
        for module in list(one.modules()):
            if any(id(param) in others for param in module.parameters(recurse=False)):
                fully_shard(module)
        fully_shard(one)
