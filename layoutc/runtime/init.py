"""Quantized primary weights: quantize a model in place, or as it is built."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from layoutc.runtime.amax import quantize
from layoutc.runtime.tensor import QuantizedTensor

Filter = Callable[[nn.Module, str], bool]
Recipe = str | ModuleType


def quantize_(model: nn.Module, recipe: Recipe, *, filter_fn: Filter | None = None) -> list[str]:
    """Replaces `weight` of the chosen modules by quantized parameters; returns their names.

    recipe: a name in layoutc.recipes, or a generated module. filter_fn(module, fully qualified name) chooses modules;
    default: every nn.Linear. Weights keep their dtype as the one that they dequantize to, their device, and ties among
    chosen modules. Nothing is changed unless all of it can be: raises ValueError with the parameter's name where the
    recipe does not take a shape, or where a chosen weight is tied to one that is not chosen.
    """
    cls = recipe_class(recipe)
    chosen: list[tuple[nn.Module, str]] = []
    for fqn, module in model.named_modules():
        wanted = filter_fn(module, fqn) if filter_fn else isinstance(module, nn.Linear)
        weight = getattr(module, "weight", None)
        if wanted and isinstance(weight, nn.Parameter) and not isinstance(weight.data, QuantizedTensor):
            name = f"{fqn}.weight" if fqn else "weight"
            cls.LAYOUT.check_shape(tuple(weight.shape), name)
            chosen.append((module, name))
    _check_ties(model, chosen, cls)
    made: dict[Tensor, nn.Parameter] = {}
    for module, name in chosen:
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        if weight not in made:
            made[weight] = nn.Parameter(_quantized(cls, weight, name), requires_grad=weight.requires_grad)
        module.weight = made[weight]
    return [name for _, name in chosen]


@contextmanager
def quantized_init(recipe: Recipe, *, filter_fn: Filter | None = None) -> Iterator[None]:
    """Modules built inside hold quantized weights when it ends, as after `quantize_` with the same arguments.

    Weights are quantized at the end, not as they are registered, so that every initializer has run in high precision.
    On the meta device nothing is allocated. After an exception nothing is quantized.
    """
    recipe_class(recipe)
    seen: dict[nn.Module, None] = {}
    children: set[nn.Module] = set()

    def on_parameter(module: nn.Module, name: str, param: Any) -> None:
        seen[module] = None

    def on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
        seen[module] = None
        if child is not None:
            children.add(child)

    handles: list[Any] = [
        torch_module.register_module_parameter_registration_hook(on_parameter),
        torch_module.register_module_module_registration_hook(on_module),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for root in seen:
        if root not in children:
            quantize_(root, recipe, filter_fn=filter_fn)


def recipe_class(recipe: Recipe) -> type[QuantizedTensor]:
    """The tensor class of a recipe. Raises ValueError for an unknown name."""
    if isinstance(recipe, ModuleType):
        return recipe.Tensor  # type: ignore[no-any-return]
    recipes = importlib.import_module("layoutc.recipes")
    if recipe not in recipes.RECIPES:
        raise ValueError(f"no recipe {recipe!r} in layoutc.recipes; it has {', '.join(recipes.RECIPES)}")
    return getattr(recipes, recipe).Tensor  # type: ignore[no-any-return]


def _quantized(cls: type[QuantizedTensor], weight: Tensor, name: str) -> QuantizedTensor:
    if weight.is_meta:
        facts = cls.LAYOUT.planes(*cls.LAYOUT.check_shape(tuple(weight.shape), name))
        planes = {plane: torch.empty(f.shape, dtype=f.dtype, device="meta") for plane, f in facts.items()}
        tensor = cls(planes, weight.shape, weight.dtype)
    else:
        tensor = quantize(cls, weight.detach())
    tensor._name = name
    return tensor


def _check_ties(model: nn.Module, chosen: list[tuple[nn.Module, str]], cls: type[QuantizedTensor]) -> None:
    """A weight used by a module that is not chosen must stay plain, so choosing it elsewhere is an error."""
    names = dict(chosen)
    weights = {module.weight: name for module, name in chosen}
    for fqn, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False):
            if param in weights and not (module in names and key == "weight"):
                raise ValueError(
                    f"{weights[param]} is tied to {fqn}.{key}, which filter_fn does not choose: quantizing it in "
                    f"{cls.LAYOUT.name} would untie them or dequantize it at each use; leave {weights[param]} out with "
                    "filter_fn"
                )
