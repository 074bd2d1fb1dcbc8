"""What a compiled graph keeps of quantized weights from forward to backward: the planes that they have anyway."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

import layoutc
from layoutc.runtime.torch_private import scaled_mm_on_cpus

on_cpus = pytest.mark.skipif(
    not scaled_mm_on_cpus, reason="needs a torch whose scaled_mm multiplies on CPUs, such as 2.13"
)
WIDTH, INNER, TOKENS = 128, 256, 64


class Layers(nn.Module):
    """Two layers and what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, WIDTH) -> the same."""
        made: Tensor = self.down(F.silu(self.up(x)))
        return made


def calls(model: nn.Module, *args: Tensor) -> tuple[list[str], list[str]]:
    """The operators of layoutc in the forward and in the backward graph of a step, as Inductor would get them."""
    graphs: list[list[str]] = []

    def note(graph: GraphModule, _: Any) -> GraphModule:
        graphs.append([str(node.target) for node in graph.graph.nodes if "layoutc" in str(node.target)])
        return graph

    backend: Any = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(model, fullgraph=True, backend=backend)(*args).sum().backward()
    forward, backward = graphs
    return forward, backward


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"])
def test_weights_are_dequantized_where_they_are_used(recipe: str) -> None:
    """Dequantized copies would stay from forward to backward, of all layers at once."""
    model = Layers()
    layoutc.quantize_(model, recipe)
    forward, backward = calls(model, torch.randn(TOKENS, WIDTH, requires_grad=True))
    assert forward == backward == ["layoutc.dequantize.default"] * 2


@on_cpus
def test_transposed_codes_are_made_in_backward() -> None:
    """Of one scale for each matrix: transposing takes as many bytes as the codes, so that either could be kept."""
    model = Layers()
    layoutc.quantize_(model, "fp8_current")
    with layoutc.products("low"):
        forward, backward = calls(model, torch.randn(TOKENS, WIDTH, requires_grad=True))
    assert forward.count("layoutc.lay_out.default") == 0
    assert backward.count("layoutc.lay_out.default") == 2
