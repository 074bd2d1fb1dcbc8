"""Reads a model from a function that builds it: calls the function on the meta device."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from layoutc.models.modules import of_module
from layoutc.models.weights import Model, ModelError


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
    return of_module(model, type(model).__name__, name)
