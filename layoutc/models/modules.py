"""Reads a model from its modules, on the meta device, or from a function that builds it.

Of transformers' models also what forward saves.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layoutc.models.weights import Kind, Layer, Model, ModelError, Weight, in_layers, kind_by_name, layer_of

if TYPE_CHECKING:
    from layoutc.models.forwards import Counted

ALL_TOKENS = "all tokens are taken to pass all linear layers"
NOT_PASSED = "texts do not pass {}: each token is taken to, and activations there are inputs and outputs of products"
NOT_COUNTED = "activations are inputs and outputs of products, a fifth to a half too low; time leaves out attention"
OWN_CODE = (
    "no flash attention in {}: activations are those of transformers' own code; kernels of fla or mamba_ssm save less"
)
UNKNOWN = "how many experts a token is sent to is not known: their products are in no time, and in no activation"
WINDOWS = "attention is estimated over the whole sequence; some layers have a window"
# Names in transformers' configs of the number of experts that a token is sent to.
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk", "moe_top_k")


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


def of_module(module: Any, name: str, source: str) -> Model:
    """The model of a torch.nn.Module."""
    blocks = dict.fromkeys(_blocks(module))
    weights = list(_weights(module))
    notes = [ALL_TOKENS]
    if any(weight.kind == "experts" and not weight.share for weight in weights):
        notes.append(UNKNOWN)

    def place(full: str) -> tuple[str, str]:
        block = next((block for block in _prefixes(full) if block in blocks), None)
        return (block, full[len(block) + 1 :]) if block else ("", full)

    model = in_layers(name, source, weights, notes, place if blocks else layer_of)
    if not blocks:
        return model
    from layoutc.models.forwards import counted

    return _with_activations(model, counted(module, blocks))


def _prefixes(full: str) -> Iterator[str]:
    """`a.b.c` -> `a`, `a.b`."""
    parts = full.split(".")
    return (".".join(parts[:at]) for at in range(1, len(parts)))


def _blocks(module: Any) -> Sequence[str]:
    """Names of the modules that trainers shard one by one: those that transformers does not split."""
    if not _is_of_transformers(module):
        return ()
    kinds = set(module._no_split_modules or ())
    found = (path for path, one in module.named_modules() if type(one).__name__ in kinds)
    return [path for path in found if path.rpartition(".")[2].isdigit()]


def _is_of_transformers(module: Any) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _weights(module: Any) -> Iterator[Weight]:
    """Each parameter once, with its other names as ties."""
    from torch import nn

    chosen = _chosen(module)
    first: dict[int, Weight] = {}
    for path, owner in module.named_modules():
        for key, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{path}.{key}" if path else key
            same = first.get(id(param))
            if same is not None:
                share = max(same.share, float(isinstance(owner, nn.Linear)))
                first[id(param)] = replace(same, share=share, tied=(*same.tied, full))
                continue
            shape = tuple(param.shape)
            kind = _kind(owner, key, full, shape)
            # Or if it looks like the weight of a linear layer, of whatever class.
            multiplies = kind == "other" and len(shape) == 2 and kind_by_name(full, shape) == "linear"
            share = float(kind in ("linear", "router") or multiplies)
            if kind == "experts":
                share = min(1.0, chosen / shape[0])
            first[id(param)] = Weight(full, shape, kind, share, trains=param.requires_grad)
    return iter(first.values())


def _chosen(module: Any) -> int:
    """How many experts a token is sent to; 0 if unknown."""
    if not _is_of_transformers(module):
        return 0
    config = module.config.get_text_config()
    found = (getattr(config, name, None) for name in CHOSEN)
    return next((most for one in found if (most := max(one) if isinstance(one, list | tuple) and one else one)), 0)


def _kind(owner: Any, key: str, full: str, shape: tuple[int, ...]) -> Kind:
    from torch import nn

    if isinstance(owner, nn.Linear):
        return "linear" if key == "weight" else "bias"
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    guessed = kind_by_name(full, shape)
    if len(shape) == 3 and guessed == "other" and "Expert" in type(owner).__name__:
        return "experts"
    return "other" if guessed == "linear" else guessed


def _with_activations(model: Model, found: Mapping[str, Counted]) -> Model:
    """The model with what forward saves, where it was counted, and a note on where it was not."""
    layers = tuple(_counted(layer, found[layer.name]) if layer.name in found else layer for layer in model.layers)
    notes = [*model.notes] if found else [*model.notes, NOT_COUNTED]
    passed_by = [layer.name for layer in layers if layer.saved is None]
    if found and passed_by:
        notes.append(NOT_PASSED.format(_some(passed_by)))
    if loops := [layer.name for layer in layers if layer.saved is not None and not layer.attention]:
        notes.append(OWN_CODE.format(_some(loops)))
    if any(one.windowed for one in found.values()):
        notes.append(WINDOWS)
    root = replace(model.root, saved=found[""].saved) if "" in found else model.root
    return replace(model, layers=layers, root=root, notes=tuple(notes))


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} layers, such as {names[0]}"


def _counted(layer: Layer, found: Counted) -> Layer:
    """width: columns of the first product, and of what an activation function gives of all that a token passes."""
    products = [w for w in layer.weights if w.share > 0 and len(w.shape) > 1]
    experts = [w for w in products if w.kind == "experts"]
    widest = [float(w.shape[-1]) for w in products if w.kind != "experts"]
    widest += [min(w.shape[-1] * w.share * w.shape[0] for w in experts)] if experts else []
    width = (products[0].shape[-1] if products else 0) + int(max(widest, default=0))
    return replace(layer, attention=found.attention, width=width, saved=found.saved)
