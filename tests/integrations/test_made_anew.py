"""accelerate makes parameters anew by their class, to load or to offload them: refused in words, where it can't be."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import layoutc
from layoutc.integrations.packages import needs

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'layoutc[integrations]'")


def quantized(model: nn.Module) -> nn.Module:
    """The model itself."""
    layoutc.quantize_(model, "mxfp8")
    return model


def plain(seed: int = 0) -> nn.Sequential:
    """One layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64))


def within() -> None:
    """A model that is quantized as it is built."""
    with accelerate.init_empty_weights():
        quantized(plain())


def emptied() -> nn.Module:
    """A model without values yet."""
    with torch.device("meta"):
        return quantized(plain())


@pytest.fixture
def file(tmp_path: Path) -> str:
    """The values of a plain model."""
    torch.save(plain().state_dict(), tmp_path / "pytorch_model.bin")
    return str(tmp_path / "pytorch_model.bin")


REFUSED: dict[str, Callable[[str], Any]] = {
    "init_empty_weights": lambda _: within(),
    "cpu_offload": lambda _: accelerate.cpu_offload(quantized(plain()), execution_device="cpu")(torch.ones(1, 64)),
    "load": lambda file: accelerate.load_checkpoint_and_dispatch(emptied(), file, device_map={"": "cpu"}),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_it_can_not_make_anew_says_what_to_write(file: str, how: str) -> None:
    with pytest.raises(TypeError, match=r"Call quantize_ once the weights are loaded.*CPUOffloadPolicy"):
        REFUSED[how](file)


@pytest.mark.parametrize("how", ["accelerate", "assigned"])
def test_what_the_error_says_works(file: str, how: str) -> None:
    """Bytes are those of the values."""
    if how == "accelerate":
        with accelerate.init_empty_weights():
            model: Any = plain(1)
        model = quantized(accelerate.load_checkpoint_and_dispatch(model, file, device_map={"": "cpu"}))
    else:
        model = emptied()
        model.load_state_dict(torch.load(file), assign=True)
    expected = importlib.import_module("layoutc.recipes.mxfp8").quantize(plain()[0].weight.detach())
    assert torch.equal(model[0].weight.data, expected)
    assert not model[0].weight.is_meta


def test_cast_weights_are_offloaded_as_they_are() -> None:
    model, offloaded = plain(), plain()
    for one in (model, offloaded):
        layoutc.cast_on_gather_(one, "mxfp8")
    x = torch.randn(2, 64)
    assert torch.equal(accelerate.cpu_offload(offloaded, execution_device="cpu")(x), model(x))


def test_cast_weights_without_values_yet(file: str) -> None:
    """Their names and choices of products stay; values that are assigned are cast as those of a model with values."""
    with accelerate.init_empty_weights():
        model: Any = plain(1)
        layoutc.cast_on_gather_(model, "mxfp8")
    assert model[0].weight.is_meta
    assert model[0].weight.weight_name == "0.weight"
    model.load_state_dict(torch.load(file), assign=True)
    expected = plain()
    layoutc.cast_on_gather_(expected, "mxfp8")
    x = torch.randn(2, 64)
    assert type(model[0].weight) is type(expected[0].weight)
    assert torch.equal(model(x), expected(x))


def test_a_package_that_is_missing_is_named_with_the_command() -> None:
    """Not one that a package itself lacks."""
    told = (
        r"layoutc\.integrations\.absent needs absent, .*: pip install 'layoutc\[integrations\]', or pip install absent"
    )
    with pytest.raises(ModuleNotFoundError, match=told) as caught, needs("absent"):
        importlib.import_module("absent")
    assert caught.value.name == "absent"
    with pytest.raises(ModuleNotFoundError, match="No module named 'absent'"), needs("torch"):
        importlib.import_module("absent")
