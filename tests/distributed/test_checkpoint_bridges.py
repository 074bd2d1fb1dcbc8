"""One precision's checkpoint into another's model: equal to quantizing, or dequantizing, the whole weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ranks
from models import (
    RECIPES,
    Model,
    assert_equal_on_all_ranks,
    assert_gathers_as,
    build,
    make_uneven,
    recipe_module,
    shard,
    shared_bytes,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

import layoutc
from layoutc import checkpoint
from layoutc.runtime.errors import LayoutError


def plain_model(width: int, inner: int, dtype: torch.dtype, seed: int = 3) -> Model:
    torch.manual_seed(seed)
    model = Model(width, inner)
    make_uneven(model)
    return model.to(dtype)


def sizes_of(recipe: str) -> tuple[int, int]:
    """Rows of one and a half blocks a rank where blocks have several rows, so that cuts go through them."""
    rows = recipe_module(recipe).LAYOUT.block_rows
    return (3 * rows, 3 * rows) if rows > 1 else (96, 97 if recipe != "mxfp8" else 96)


def saves(folder: str, recipe: str, dtype: torch.dtype | None) -> None:
    """A plain model's checkpoint, or a quantized one's."""
    width, inner = sizes_of(recipe)[0], sizes_of(recipe)[0]
    model = shard(build(recipe, width, inner, seed=3)) if dtype is None else shard(plain_model(width, inner, dtype))
    checkpoint.save({"model": get_model_state_dict(model)}, folder)


def takes_plain(folder: str, recipe: str, dtype: torch.dtype) -> None:
    """A checkpoint of plain weights into a quantized model, before anything has been gathered."""
    width = sizes_of(recipe)[0]
    model, reference = shard(build(recipe, width, seed=9)), plain_model(width, width, dtype)
    state = {"model": get_model_state_dict(model)}
    with pytest.raises(LayoutError, match="convert=True quantizes it"):
        checkpoint.load(state, folder)
    checkpoint.load(state, folder, convert=True)
    layoutc.quantize_(reference, recipe)
    assert_equal_on_all_ranks(shared_bytes(model))
    for name, whole in reference.state_dict().items():
        if whole.dim() == 1:
            full = model.state_dict()[name].full_tensor()
            assert torch.equal(full, whole.to(full.dtype)), name
    assert_gathers_as(model, _with_biases(reference, model))


def _with_biases(reference: Model, model: nn.Module) -> Model:
    """The reference with the model's biases, which have the model's dtype."""
    for name, param in model.named_parameters():
        if param.dim() == 1:
            assert isinstance(param, DTensor)
            owner, _, leaf = name.rpartition(".")
            setattr(reference.get_submodule(owner), leaf, nn.Parameter(param.full_tensor()))
    return reference


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_plain_checkpoints_become_quantized_weights(
    two: Ranks, four: Ranks, tmp_path: Any, recipe: str, dtype: torch.dtype
) -> None:
    """The amax is shared over ranks on the very first load; saved on two ranks, loaded on four."""
    folder = str(tmp_path / "plain")
    two.run(saves, folder, recipe, dtype)
    (four if dtype == torch.bfloat16 else two).run(takes_plain, folder, recipe, dtype)


def gives_plain(folder: str, recipe: str, dtype: torch.dtype) -> None:
    """A quantized checkpoint into a plain model."""
    width = sizes_of(recipe)[0]
    model, reference = shard(plain_model(width, width, dtype, seed=9)), build(recipe, width, seed=3)
    state = {"model": get_model_state_dict(model)}
    with pytest.raises(LayoutError, match="convert=True dequantizes it"):
        checkpoint.load(state, folder)
    checkpoint.load(state, folder, convert=True)
    for (name, param), (_, whole) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert isinstance(param, DTensor)
        values = whole.dequantize(dtype) if whole.dim() == 2 else whole.to(dtype)
        assert torch.equal(param.full_tensor(), values), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_checkpoints_become_plain_weights(two: Ranks, four: Ranks, tmp_path: Any, recipe: str) -> None:
    folder = str(tmp_path / "quantized")
    two.run(saves, folder, recipe, None)
    four.run(gives_plain, folder, recipe, torch.bfloat16)


def becomes(folder: str, recipe: str, other: str) -> None:
    """One recipe's checkpoint into another's model."""
    width = sizes_of(recipe)[0]
    model, source = shard(build(other, width, seed=9)), build(recipe, width, seed=3)
    state = {"model": get_model_state_dict(model)}
    with pytest.raises(LayoutError, match=f"recipe {recipe} in the file, {other} here"):
        checkpoint.load(state, folder)
    checkpoint.load(state, folder, convert=True)
    reference = Model(width)
    with torch.no_grad():
        for param, whole in zip(reference.parameters(), source.parameters(), strict=True):
            param.copy_(whole.dequantize(torch.float32) if whole.dim() == 2 else whole)
    layoutc.quantize_(reference, other)
    assert_equal_on_all_ranks(shared_bytes(model))
    assert_gathers_as(model, reference)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "other"), [("mxfp8", "nvfp4"), ("fp8_block", "mxfp8"), ("fp8_block", "fp8_current")]
)
def test_one_recipe_becomes_another(two: Ranks, four: Ranks, tmp_path: Any, recipe: str, other: str) -> None:
    folder = str(tmp_path / "quantized")
    two.run(saves, folder, recipe, None)
    four.run(becomes, folder, recipe, other)
