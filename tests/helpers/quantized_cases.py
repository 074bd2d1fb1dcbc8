"""What tests of quantized tensors share: recipes, weights whose scales differ everywhere, comparison of bytes."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from layoutc.runtime.weight.tensor import QuantizedTensor

RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
BLOCKED = ("fp8_block", "mxfp8", "nvfp4")
SHARED = ("fp8_delayed", "fp8_current", "nvfp4")  # something of them covers all rows

torch.set_num_threads(1)  # small tensors

each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def module(recipe: str) -> ModuleType:
    """The generated module of a recipe."""
    return import_module(f"layoutc.recipes.{recipe}")


def weight(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values times a power of two for each row and each column, so that the scales of blocks differ."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    rows = torch.randint(-4, 5, (*shape[:-1], 1), generator=generator)
    columns = torch.randint(-4, 5, shape[-1:], generator=generator)
    return (x * torch.exp2(rows + columns)).to(dtype)


def make(
    recipe: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> QuantizedTensor:
    """A quantized weight, 256x256 unless a shape is given."""
    tensor: QuantizedTensor = module(recipe).quantize(weight(*(shape or (256, 256)), seed=seed, dtype=dtype), **options)
    return tensor


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a plain tensor."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes of two plain tensors: -0 is not 0, and NaN equals itself."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal names, in order, and equal tensors."""
    return list(a) == list(b) and all(same_bits(tensor, b[name]) for name, tensor in a.items())


def same(a: Any, b: Any) -> bool:
    """Equal class, shape, dtype and planes, byte for byte."""
    return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype and same_tensors(a.planes(), b.planes())


def snapshot(tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Copies of the planes."""
    return {name: plane.clone() for name, plane in tensor.planes().items()}


def aliases(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """True when every plane of both starts at the same address."""
    return all(plane.data_ptr() == b.planes()[name].data_ptr() for name, plane in a.planes().items())


def is_compact(tensor: QuantizedTensor) -> bool:
    """True when no plane's storage holds more than the plane."""
    return all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in tensor.planes().values())


def is_plain(tensor: Tensor) -> bool:
    """True for a tensor of no subclass."""
    return type(tensor) is Tensor


def facts(tensor: QuantizedTensor) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes of the planes."""
    return {name: (plane.shape, plane.dtype) for name, plane in tensor.planes().items()}
