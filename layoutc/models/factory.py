"""Reads a model from a function that builds it: calls the function on the meta device, and inspects the modules."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

from layoutc.models.weights import Kind, Model, ModelError, Weight, in_layers, kind_by_name


def read(name: str) -> Model:
    """The model that `module:factory` returns; the module may be in the working directory.

    Imports torch and runs the function, so use it only for trusted code. Raises ModelError if the function does not
    exist, raises, or does not return a torch.nn.Module.
    """
    import torch
    from torch import nn

    module_name, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ModelError(f"{name}: {module_name} can't be imported: {error}") from error
    factory: Any = getattr(module, function, None)
    if not callable(factory):
        raise ModelError(f"{name}: {module_name} has no function {function!r} to call without arguments")
    try:
        with torch.device("meta"):
            model = factory()
    except Exception as error:
        raise ModelError(f"{name} raised {type(error).__name__} on the meta device: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned a {type(model).__name__}, and should return a torch.nn.Module")
    first: dict[int, Weight] = {}
    for path, owner in model.named_modules():
        for key, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{path}.{key}" if path else key
            same = first.get(id(param))
            if same is not None:
                share = max(same.share, float(isinstance(owner, nn.Linear)))
                first[id(param)] = replace(same, share=share, tied=(*same.tied, full))
                continue
            shape = tuple(param.shape)
            kind = _kind(owner, key, full, shape)
            first[id(param)] = Weight(
                full, shape, kind, float(kind in ("linear", "router")), trains=param.requires_grad
            )
    notes = ("all tokens are taken to pass all linear layers",)
    return in_layers(type(model).__name__, name, first.values(), notes)


def _kind(owner: Any, key: str, full: str, shape: tuple[int, ...]) -> Kind:
    from torch import nn

    if isinstance(owner, nn.Linear):
        return "linear" if key == "weight" else "bias"
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    guessed = kind_by_name(full, shape)
    return "other" if guessed == "linear" else guessed
