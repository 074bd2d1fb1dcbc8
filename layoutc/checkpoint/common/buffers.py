"""Non-persistent buffers, which `to_empty` leaves uninitialized: recomputed the way transformers does, or reported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from layoutc.runtime.torch_private import version_of

MARK = "_is_hf_initialized"  # transformers does not initialize tensors with this attribute


def made_anew(model: nn.Module) -> list[str]:
    """Recomputes buffers that are not in the state dict (rotary frequencies, position ids), like transformers'
    `from_pretrained` does for its models. Returns the names of the buffers that it can't recompute."""
    left = list[str]()
    for prefix, module, owner in _modules("", model, None):
        names = [name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None]
        made = _made(module, names, owner) if names and owner is not None else set()
        left += [f"{prefix}{name}".replace("_orig_mod.", "") for name in names if name not in made]
    return sorted(left)


def _modules(prefix: str, module: nn.Module, owner: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """All modules, each with its innermost enclosing transformers model, whose config defines the module's buffers."""
    owner = module if hasattr(module, "_initialize_weights") and hasattr(module, "_init_weights") else owner
    yield prefix, module, owner
    for name, child in module.named_children():
        yield from _modules(f"{prefix}{name}.", child, owner)


def _made(module: nn.Module, names: list[str], owner: Any) -> set[str]:
    """Runs the model's weight initialization on a module's buffers only; returns the buffers that it wrote."""
    before = {name: (module._buffers[name], _version(module._buffers[name])) for name in names}
    others = [
        one for one in (*module.parameters(), *module.buffers()) if all(one is not of for of, _ in before.values())
    ]
    marked = [one for one in others if not getattr(one, MARK, False)]
    for one in marked:
        setattr(one, MARK, True)
    for buffer, _ in before.values():
        vars(buffer).pop(MARK, None)
    initialization = sys.modules.get("transformers.initialization")
    guard: Any = getattr(initialization, "guard_torch_init_functions", nullcontext)
    within: AbstractContextManager[Any] = guard()
    try:
        with torch.no_grad(), within:
            owner._init_weights(module)
    finally:
        for one in marked:
            delattr(one, MARK)
    after = {name: (module._buffers[name], _version(module._buffers[name])) for name in names}
    return {name for name in names if after[name][0] is not before[name][0] or after[name][1] != before[name][1]}


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None or buffer.is_inference() else version_of(buffer)
