"""share_amax=: weights that engines join are quantized under one amax, at conversion, at steps and at gathers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import Ranks, on
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import layoutc
from layoutc.checkpoint import load_safetensors, stream_export
from layoutc.checkpoint.common.whole_weights import gathered_whole
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.installed import find
from layoutc.runtime.weight.tensor import QuantizedTensor

GROUPS = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]


class Layer(nn.Module):
    """Weights of which q, k and v, gate and up are joined by engines."""

    def __init__(self) -> None:
        super().__init__()
        for at, name in enumerate(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj")):
            setattr(self, name, nn.Linear(32, 48, bias=False))
            with torch.no_grad():
                self.get_submodule(name).weight.mul_(1 + at)

    def forward(self, x: Tensor) -> Tensor:
        return sum((module(x).tanh()[..., :32] for module in self.children()), torch.zeros(()))


def model_of(recipe: str, use: Callable[..., Any] | None = None, each: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    if use is not None:
        use(model, recipe, share_amax=GROUPS)
    for layer in model if dist.is_initialized() else ():
        for module in layer.children() if each else ():
            fully_shard(module)
        fully_shard(layer)
    return fully_shard(model) if dist.is_initialized() else model


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def largest(values: dict[str, Tensor]) -> dict[str, float]:
    """By numpy: the amax of what each weight is joined with."""
    found = {}
    for name in values:
        layer, own, _ = name.split(".")
        group = next((group for group in GROUPS if own in group), [own])
        found[name] = float(max(np.abs(values[f"{layer}.{one}.weight"].float().numpy()).max() for one in group))
    return found


def expected(recipe: str, values: dict[str, Tensor]) -> dict[str, bytes]:
    """All bytes of each weight, quantized by itself under that amax."""
    quantize, amaxes, found = find(recipe).quantize, largest(values), {}
    for name, value in values.items():
        planes = quantize(value, amax=torch.tensor([amaxes[name]])).planes()
        found[name] = b"".join(plane.view(torch.uint8).numpy().tobytes() for plane in planes.values())
    return found


def bytes_of(model: nn.Module) -> dict[str, bytes]:
    found = {}
    for name, param in model.named_parameters():
        held = gathered_whole(param.detach())
        assert isinstance(held, QuantizedTensor)
        found[name] = b"".join(held.entries(plane).view(torch.uint8).numpy().tobytes() for plane in held.planes())
    return found


def steps(recipe: str) -> bool:
    """At conversion, after two steps, and after one in which a weight of a group has no gradient."""
    plain = {name: param.detach() for name, param in model_of_one(recipe).named_parameters()}
    model = model_of(recipe, layoutc.quantize_)
    right = bytes_of(model) == expected(recipe, plain)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.05)
    for step in range(3):
        model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step))).sum().backward()
        if step == 2:
            next(model.parameters()).grad = None
        optimizer.step()
        optimizer.zero_grad()
        masters = {name: whole(optimizer.masters()[param]) for name, param in model.named_parameters()}
        right = right and bytes_of(model) == expected(recipe, masters)
    return right


def model_of_one(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_modelopt", "fp8_current"])
def test_quantized_weights_of_a_group_have_one_amax_after_every_step(two: Ranks, recipe: str) -> None:
    assert steps(recipe)
    assert two.run(steps, recipe) == [True, True]


@pytest.mark.parametrize(("recipe", "each"), [("nvfp4", False), ("fp8_current", True)])
@on("two")
def test_weights_that_are_cast_on_gather_have_one_amax(recipe: str, each: bool) -> None:
    """each: FSDP2 gathers them apart, and amaxes are found ahead. What a forward pass multiplies with is each weight
    under the amax of its group, before and after a step."""
    model, seen = model_of(recipe, layoutc.cast_on_gather_, each), dict[str, Tensor]()
    for name, module in model.named_modules():
        if name.endswith("_proj"):

            def look(module: nn.Module, _args: Any, key: str = f"{name}.weight") -> None:
                held = module.weight
                seen[key] = (
                    held.dequantize(torch.float32) if isinstance(held, QuantizedTensor) else held.detach().clone()
                )

            module.register_forward_pre_hook(look)
    optimizer, right = torch.optim.SGD(model.parameters(), lr=0.05), True
    for _ in range(2):
        if each:
            layoutc.precompute_amaxes(model)
        values = {name: whole(param.detach()) for name, param in model.named_parameters()}
        values = {name: getattr(value, "plain", value).clone() for name, value in values.items()}
        model(torch.ones(4, 32)).sum().backward()
        for name, amax in largest(values).items():
            quantized = find(recipe).quantize(values[name], amax=torch.tensor([amax]))
            right = right and torch.equal(quantized.dequantize(torch.float32), seen[name])
        optimizer.step()
        optimizer.zero_grad()
    assert right


def refused() -> str:
    try:
        model_of("nvfp4", layoutc.cast_on_gather_, each=True)(torch.ones(4, 32))
    except LayoutError as error:
        return str(error)
    return ""


def test_weights_that_are_gathered_apart_say_what_to_do(two: Ranks) -> None:
    for message in two.run(refused):
        assert "(0.[q_proj, k_proj, v_proj].weight), but FSDP2 gathers them apart" in message


def files(folder: str, use: str) -> bool:
    """Plain values load under one amax; exports write one scale."""
    model = model_of("nvfp4_modelopt", getattr(layoutc, use))
    load_safetensors(model, folder)
    tensors = {name: tensor.clone() for name, tensor in stream_export(model, files="modelopt")}
    scales = {name.removesuffix("_scale_2"): tensor.item() for name, tensor in tensors.items() if "scale_2" in name}
    values = {name: param.detach() * 2 for name, param in model_of_one("").named_parameters()}
    return scales == {name: np.float32(amax) / np.float32(2688) for name, amax in largest(values).items()}


@pytest.mark.parametrize("use", ["quantize_", "cast_on_gather_"])
@pytest.mark.filterwarnings("error:.*engines join")
def test_plain_files_are_loaded_under_one_amax(two: Ranks, use: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    values = {name: param.detach() * 2 for name, param in model_of_one("").named_parameters()}
    save_file(values, tmp_path / "model.safetensors")
    assert files(str(tmp_path), use)
    assert two.run(files, str(tmp_path), use) == [True, True]


def test_weights_without_values_stand_aside() -> None:
    """A layer on the meta device, which a load fills later, before one that has its values."""
    model = model_of_one("nvfp4")
    plain = {f"1.{name}": param.detach() for name, param in model[1].named_parameters()}
    model[0].to("meta")
    layoutc.quantize_(model, "nvfp4", share_amax=GROUPS)
    found = {f"1.{name}": one for name, one in bytes_of(model[1]).items()}
    assert found == expected("nvfp4", plain)


def test_groups_that_can_not_be_are_refused_before_anything_changes() -> None:
    for recipe, fused, message in (
        ("int8_rowwise", True, "int8_rowwise has no scale that follows the amax of a whole weight"),
        ("nvfp4", True, "nvfp4 states no files with groups"),
        ("nvfp4", [["a", "b"]], r"none are beside each other as in \[a, b\]"),
    ):
        model = model_of_one(recipe)
        with pytest.raises(ValueError, match=message):
            layoutc.quantize_(model, recipe, share_amax=fused)
        assert not any(isinstance(param.data, QuantizedTensor) for param in model.parameters())
