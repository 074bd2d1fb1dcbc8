"""share_amax= on a card: steps and gathers of weights under one amax give the bytes of each one quantized under it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layoutc
from layoutc.runtime.installed import find

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GROUPS = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    names = [name for group in GROUPS for name in group] + ["o_proj"]
    model = nn.ModuleDict({name: nn.Linear(256, 512, bias=False, device="cuda") for name in names})
    with torch.no_grad():
        for at, name in enumerate(names):
            model.get_parameter(f"{name}.weight").mul_(1 + at)
    return model


def bytes_of(planes: dict[str, Tensor]) -> bytes:
    return b"".join(plane.cpu().contiguous().view(torch.uint8).numpy().tobytes() for plane in planes.values())


def expected(recipe: str, values: dict[str, Tensor]) -> dict[str, bytes]:
    """Each weight by itself, under the largest magnitude of its group."""
    found = {}
    for name, value in values.items():
        group = next((group for group in GROUPS if name.split(".")[0] in group), [name.split(".")[0]])
        amax = torch.stack([values[f"{one}.weight"].abs().amax().float() for one in group]).amax().reshape(1)
        found[name] = bytes_of(find(recipe).quantize(value, amax=amax).planes())
    return found


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_modelopt", "fp8_current"])
def test_steps_requantize_groups_under_one_amax(recipe: str, captured: bool) -> None:
    """Eager, by the launches that are prepared; and in a CUDA graph, where a replay finds the amaxes anew."""
    model: Any = model_of()
    layoutc.quantize_(model, recipe, share_amax=GROUPS)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.05, capturable=True)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, device="cuda", dtype=param.dtype)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        for _ in range(2):
            graph.replay()
    torch.cuda.synchronize()
    masters = {name: optimizer.masters()[param] for name, param in model.named_parameters()}
    held = {name: bytes_of(param.data.planes()) for name, param in model.named_parameters()}
    assert held == expected(recipe, masters)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_current"])
def test_values_that_are_cast_have_one_amax(recipe: str) -> None:
    model: Any = model_of()
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    layoutc.cast_on_gather_(model, recipe, share_amax=GROUPS)
    layoutc.precompute_amaxes(model)
    held = {name: bytes_of(param.data.quantize().planes()) for name, param in model.named_parameters()}
    assert held == expected(recipe, values)
