"""Streams a model's tensors in another checkpoint format, one weight at a time, to refit live engines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layoutc.checkpoint.common.exportable import state_of
from layoutc.checkpoint.common.verdicts import Problem, agree, noted, rank_of
from layoutc.checkpoint.common.whole_weights import cut, gathered_whole, join_amaxes, joint_amax, whole_planes
from layoutc.checkpoint.held.weights import Noted, made
from layoutc.checkpoint.safetensors.export import Item, bindings_of, items_of, settled
from layoutc.checkpoint.safetensors.files import Slices
from layoutc.checkpoint.safetensors.kept import origin, warn_written
from layoutc.checkpoint.safetensors.planning import Rename, warn_own_names
from layoutc.runtime.weight.tensor import recipe_of


def stream_export(
    model_or_state_dict: nn.Module | Mapping[str, Any],
    *,
    files: str,
    rename: Rename | None = None,
    source: str | PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields, on every rank, the (name, tensor) pairs that `export_safetensors` with `files` would write.

    Use it to refit an engine that serves the model during training. Each weight needs one gather. Tensors are new
    memory on the gathers' device, except plain weights that are not sharded. Only one weight is in memory at a time, if
    the caller keeps none.

    model_or_state_dict, files, rename: as for `export_safetensors`. Cast-on-gather weights are quantized as in the
    forward pass. source: the folder that the weights were loaded from. Its texts and its codes of unchanged scales are
    kept; its other tensors are not streamed.

    Collective if torch.distributed is initialized: all ranks of `process_group` (default: all) call it and iterate to
    the end. Checks run when the first tensor is requested, and raise on all ranks.

    Raises LayoutError for weights that the binding can't hold, and what `export_safetensors` raises.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "fp8_block")
        ['0.weight']
        >>> [name for name, _ in checkpoint.stream_export(model, files="deepseek")]
        ['0.weight', '0.weight_scale_inv']
    """
    problems: list[Problem] = []
    items, slices, said, wide = list[Item](), Slices(), Noted([], {}), list[str]()
    with slices, noted(problems):
        state = state_of(model_or_state_dict)
        theirs = bindings_of(state, files, None)
        items = items_of(state, None, rename, theirs, problems, origin(source, slices))
    if source is not None:
        items, wide = settled(items, process_group)
    described = repr([(item.name, item.tensors) for item in items])
    facts = hashlib.sha256(described.encode()).hexdigest()
    agree(problems, process_group, facts, "export different names, shapes or dtypes")
    with torch.no_grad():
        join_amaxes(item.value for item in items if item.held)
    with slices:
        for item in items:
            yield from _tensors(item, said)
    if rank_of(process_group) == 0:
        warn_written(files, source, said, wide)
        if rename is None:
            warn_own_names(model_or_state_dict, {item.source: item.tensors for item in items}, "the stream")


def _tensors(item: Item, said: Noted) -> Iterator[tuple[str, Tensor]]:
    """A weight's tensors. The caller's code between two of them runs in the caller's grad mode."""
    with torch.no_grad():
        whole = gathered_whole(item.value).detach()
        planes = whole_planes(recipe_of(item.value), whole, joint_amax(item.value)) if item.held else {}
    if not item.held:
        yield from cut(whole, item.tensors).items()
    del whole
    yield from made(item.held, planes, item.kept, said)
