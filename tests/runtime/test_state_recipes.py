"""Recipes of an optimizer's state, beside the packages that define their bytes: bitsandbytes and torchao."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import layoutc

ROWS, COLUMNS = 24, 1024
RECIPES = ("adam_m8", "adam_v8", "adam_m4", "adam_v4", "moment_fp8", "moment_fp8_sqrt")


def moments(name: str, columns: int = COLUMNS) -> Tensor:
    """Rows from 1e-4 to 100 in size, of both signs unless they are second moments; one of zeros."""
    values = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(1))
    values *= torch.logspace(-4, 2, ROWS)[:, None]
    values[5] = 0
    return values.square() if "_v" in name or "sqrt" in name else values


def package(name: str) -> Any:
    return importlib.import_module(f"layoutc.recipes.{name}")


def quantized_by_torchao(name: str, values: Tensor) -> Any:
    """torchao's own state, with the values copied into it."""
    optim = pytest.importorskip("torchao.optim", reason="needs torchao")
    made: Any
    if name == "moment_fp8":
        made = optim.subclass_fp8.OptimStateFp8.zeros(values.shape, block_size=128)
    elif name.endswith("4"):
        made = optim.subclass_4bit.OptimState4bit.zeros(values.shape, name == "adam_m4")
    else:
        made = optim.subclass_8bit.OptimState8bit.zeros(values.shape, name == "adam_m8")
    return made.copy_(values)


@pytest.mark.parametrize("name", ["adam_m8", "adam_v8"])
def test_moments_of_8_bits_are_those_of_bitsandbytes(name: str) -> None:
    """The map, scales and codes. Its kernel for CPUs rounds fp32 in 65,536 steps first, but not fp64."""
    functional: Any = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    recipe, values = package(name), moments(name)
    table = functional.create_dynamic_map(signed=name == "adam_m8")
    assert tuple(table.tolist()) == recipe.tensor.reference.ELEMENT_VALUES
    values[5] = values[4]  # of a block of zeros its codes are those of NaN
    codes, scales = torch.ops.bitsandbytes.quantize_blockwise(values.double(), table, 256)
    planes = recipe.quantize_reference(values)
    assert torch.equal(planes["rowwise_data"], codes)
    assert torch.equal(planes["rowwise_scale"].flatten(), scales)
    theirs = torch.ops.bitsandbytes.dequantize_blockwise(codes, scales, table, 256, torch.float32)
    assert torch.equal(recipe.dequantize_reference(planes, ROWS, COLUMNS), theirs)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "moment_fp8_sqrt"])
def test_moments_are_those_of_torchao(name: str) -> None:
    """Codes and scales, but of 0. Of 8 bits its codes are those of quotients, where the recipes have products."""
    recipe, values = package(name), moments(name)
    values[5] = values[4]
    theirs = quantized_by_torchao(name, values)
    planes = recipe.quantize_reference(values)
    codes, scales = planes["rowwise_data"].view(torch.uint8), planes["rowwise_scale"]
    if name.endswith("8"):
        quotients = values / scales.repeat_interleave(COLUMNS // scales.shape[1], 1)
        codes = recipe.tensor.reference.encode(quotients).view(torch.uint8)
    assert torch.equal(theirs.codes.view(torch.uint8).view(codes.shape), codes)
    assert torch.equal(theirs.scale, scales.flatten())
    read = {
        "rowwise_data": theirs.codes.view(planes["rowwise_data"].shape),
        "rowwise_scale": theirs.scale.view(len(values), -1),
    }
    assert torch.equal(recipe.dequantize_reference(read, len(values), COLUMNS), theirs.dequantize())


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_stay_zeros_and_steps_reach_them(name: str) -> None:
    """New state is zeros in its bytes; a block with one value keeps it; values below 0 of second moments are 0."""
    recipe = package(name)
    state = recipe.quantize(torch.zeros(3, 300))
    assert state.dequantize().eq(0).all()
    empty = torch.empty_like(state).zero_()
    assert torch.equal(empty, state)
    values = torch.zeros(3, 300)
    values[1, 299] = 0.25
    state.copy_(values)
    assert state.dequantize()[1, 299] == 0.25
    assert state.dequantize().count_nonzero() <= (172 if name == "adam_v4" else 1)
    if "_v" in name or "sqrt" in name:
        below = recipe.quantize(torch.cat([values, -values]))
        assert below.dequantize()[3:].abs().max() == (0.25 / 16 if name == "adam_v4" else 0)


def test_square_roots_are_exact() -> None:
    """torch's own fp32 roots on CPUs are one step off for some numbers, so that kernels would have other bytes."""
    recipe = package("moment_fp8_sqrt")
    values = torch.rand(1 << 9, 128, generator=torch.Generator().manual_seed(2))
    largest = values.numpy().max(1, keepdims=True)
    planes = recipe.quantize_reference(torch.cat([values, -values]))
    assert torch.equal(planes["rowwise_scale"][: 1 << 9], torch.from_numpy(np.sqrt(largest) / np.float32(448)))
    assert not planes["rowwise_data"][1 << 9 :].view(torch.uint8).any()


@pytest.mark.parametrize("name", RECIPES)
def test_state_is_not_for_weights(name: str) -> None:
    model = torch.nn.Linear(256, 8, bias=False)
    with pytest.raises(ValueError, match=f"{name} is for the state of optimizers, not for weights"):
        layoutc.quantize_(model, name)
    with pytest.raises(ValueError, match=f"{name} is for the state of optimizers, not for weights"):
        layoutc.cast_on_gather_(model, name)
    assert not hasattr(package(name).Tensor, "fsdp_pre_all_gather")


def test_plans_count_the_bytes_of_recipes() -> None:
    """What plan and estimate take of each form of state is what its recipes store, partial blocks included."""
    from layoutc.estimate.state import LEAST, STATES
    from layoutc.runtime.optim.states import FORMS

    assert set(FORMS) == set(STATES) - {"fp32"}
    assert inspect.signature(layoutc.AdamW).parameters["least"].default == LEAST
    for form, names in FORMS.items():
        for stored, name in zip(STATES[form].moments, names, strict=True):
            for m, k in ((1, 256), (24, 1000), (7, 2880), (3, 2)):
                planes = package(name).LAYOUT.planes(m, k).values()
                assert stored.nbytes(m * k, k) == sum(plane.nbytes for plane in planes)
