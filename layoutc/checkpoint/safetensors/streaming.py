"""A model's tensors as another program's files hold them, one weight at a time: for engines that take them live."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layoutc.checkpoint.common.verdicts import Problem, agree, noted
from layoutc.checkpoint.common.whole_weights import gathered_whole
from layoutc.checkpoint.safetensors.export import Item, bindings_of, class_of, items_of, state_of, whole_planes
from layoutc.checkpoint.safetensors.planning import Rename


def stream_export(
    model_or_state_dict: nn.Module | Mapping[str, Any],
    *,
    files: str,
    rename: Rename | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything that `export_safetensors` with `files` writes, on every rank, with one gather a
    weight: to refit an engine that serves what is trained.

    The tensors are on the device of the gathers, and new memory each, but for plain weights that are not sharded. Only
    one weight is held at a time, if the caller keeps none. files, rename: as for `export_safetensors`; weights that are
    cast on gather are quantized as the forward pass quantizes them.

    Collective if torch.distributed is initialized: all ranks of `process_group` (default: all) call it and read to the
    end. What does not fit is found, and raised on all ranks, when the first tensor is asked for.
    """
    problems: list[Problem] = []
    items = list[Item]()
    with noted(problems):
        state = state_of(model_or_state_dict)
        items = items_of(state, None, rename, bindings_of(state, files, None), problems)
    described = repr([(item.name, item.tensors) for item in items])
    facts = hashlib.sha256(described.encode()).hexdigest()
    agree(problems, process_group, facts, "export different names, shapes or dtypes")
    for item in items:
        yield from _tensors(item)


def _tensors(item: Item) -> Iterator[tuple[str, Tensor]]:
    """A weight's tensors. What a caller does between two of them runs in its own grad mode."""
    with torch.no_grad():
        whole = gathered_whole(item.value).detach()
        planes = whole_planes(class_of(item.value), whole) if item.held else {}
    if not item.held:
        yield item.name, whole
    del whole
    for one in item.held:
        yield one.name, one.made(planes)
