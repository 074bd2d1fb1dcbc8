"""What a compiled graph keeps of quantized weights from forward to backward: the planes that they have anyway."""

from __future__ import annotations

from typing import Any

import product_modes
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
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


def graphs_of(model: nn.Module, *args: Tensor) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward graph of a step, cut as Inductor cuts them."""
    graphs: list[GraphModule] = []

    def note(graph: GraphModule, _: Any) -> GraphModule:
        graphs.append(graph)
        return graph

    def partition(joint: GraphModule, *inputs: Any, **options: Any) -> Any:
        joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, *inputs, compiler="inductor", **options)

    backend: Any = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=partition)
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(model, fullgraph=True, backend=backend)(*args).sum().backward()
    forward, backward = graphs
    return forward, backward


def calls(model: nn.Module, *args: Tensor) -> tuple[list[str], list[str]]:
    """The operators of layoutc in both graphs."""
    forward, backward = (
        [str(node.target) for node in graph.graph.nodes if "layoutc" in str(node.target)]
        for graph in graphs_of(model, *args)
    )
    return forward, backward


def saved(model: nn.Module, *args: Tensor) -> set[tuple[torch.dtype, tuple[int, ...]]]:
    """What forward makes and backward takes: dtypes and shapes of all that is larger than a scale."""
    forward, _ = graphs_of(model, *args)
    *_, last = forward.graph.nodes
    made = [node.meta["val"] for node in last.args[0][1:] if node is not None and node.op == "call_function"]
    return {(one.dtype, tuple(one.shape)) for one in made if isinstance(one, Tensor) and one.numel() > TOKENS}


@pytest.mark.sample(2)
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
    with product_modes.products("reference"):
        forward, backward = calls(model, torch.randn(TOKENS, WIDTH, requires_grad=True))
    assert forward.count("layoutc.lay_out.default") == 0
    assert backward.count("layoutc.lay_out.default") == 2


@on_cpus
def test_what_can_be_computed_again_is_not_saved() -> None:
    """What `down` reads is computed from the output of `up`, which backward needs anyway; or its codes are kept."""
    model = Layers()
    layoutc.quantize_(model, "fp8_current")
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    output, codes = (torch.float32, (TOKENS, INNER)), (torch.float8_e4m3fn, (TOKENS, INNER))
    with product_modes.products("reference"):
        assert saved(model, x) == {output}
    with product_modes.products("reference", saves="input"):
        assert saved(model, x) == {output}
    with product_modes.products("reference", saves="quantized"):
        assert saved(model, x) == {output, codes, (torch.float8_e4m3fn, (TOKENS, WIDTH))}
