"""torch.compile of blocks under fully_shard: one graph each, compiled once, and the bits of eager calls."""

from __future__ import annotations

import operator
import shutil
from functools import partial
from typing import Any
from unittest import mock

import product_modes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on
from models import adam, make_uneven, my_share, width_for
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import layoutc
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.torch_private import scaled_mm_on_cpus
from layoutc.runtime.weight import gathered_in_graphs

OWN_CODES = ("mxfp8", "fp8_rowwise", "nvfp4_1d")  # for each orientation; the two last in slots, and under one amax
STEPS = 3
COLD = 300.0  # seconds, where nothing that compilers keep is there yet
ON_ONE_RANK = ("inductor", "aot_eager")  # graphs compute with gathered weights, and so the same on each rank


class Block(nn.Module):
    """A residual layer with a bias; `inside` checkpoints it where a graph sees it."""

    def __init__(self, width: int, inside: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.inside = inside

    def body(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> (n, width)."""
        return x + (checkpoint(self.body, x, use_reentrant=False) if self.inside else self.body(x))


class Pieces(nn.Module):
    """A fused weight, of which products and an ordinary operator read pieces, and pieces of pieces."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fused = nn.Linear(width, 3 * width, bias=False)
        self.mask = nn.Parameter(torch.linspace(0.5, 1.5, width * width).view(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> (n, width)."""
        q, k, v = self.fused.weight.chunk(3)
        narrow = torch.cat([F.linear(x, half) for half in k.chunk(2)], dim=1)
        return F.linear(x, q) + narrow + x @ (v * self.mask).t() + self.fused.weight.dequantize()[: x.shape[0]]


def batch(step: int, width: int) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(step))


def train(
    recipe: str,
    make: Any,
    mode: str = "",
    backend: Any = None,
    *,
    sharded: bool = True,
    compile_first: bool = True,
    cast: bool = False,
) -> tuple[list[float], list[int]]:
    """The losses of two micro-batches a step, and the graphs compiled by the end of each step."""
    width = 2 * width_for(recipe, 2)
    torch.manual_seed(0)
    blocks = nn.Sequential(make(width), make(width))
    make_uneven(blocks)
    (layoutc.cast_on_gather_ if cast else layoutc.quantize_)(blocks, recipe)
    compiled = [] if backend is None else [blocks] if mode == "whole" else list(blocks)
    options = {"backend": backend, "fullgraph": mode != "whole"}
    for module in compiled if compile_first else ():
        module.compile(**options)
    for module in (*blocks, blocks) if sharded else ():
        fully_shard(module, reshard_after_forward=mode != "kept")
    for module in compiled if not compile_first else ():
        module.compile(**options)
    model = partial(checkpoint, blocks, use_reentrant=False) if mode == "outside" else blocks
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-2, fused=True) if cast else adam(blocks)
    curve, counts = [], []
    for step in range(STEPS):
        for part in range(2):
            for block in blocks if sharded and mode == "accumulating" else ():
                block.set_reshard_after_backward(part == 1)
            loss = model(batch(2 * step + part, width)).square().mean()
            (loss * (my_share() if sharded else 1.0)).backward()
            curve.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        counts.append(getattr(backend, "frame_count", 0))
    return curve, counts


INSIDE = partial(Block, inside=True)


# fp8_delayed, whose state moves on, in every mode, and recipes with codes of their own for each orientation in others.
# INSIDE: backward holds other codes in the memory where forward's stood, and the graph reads forward's again. A whole
# model is taken apart at FSDP2's hooks. What is gathered of casts is the quantized weight, whatever the parameter is.
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "make", "modes", "compile_first", "cast"),
    [
        ("fp8_delayed", Block, ("accumulating",), True, False),
        ("fp8_delayed", Block, ("kept", "outside"), True, False),
        ("nvfp4_1d", Block, ("resharded",), True, False),
        ("mxfp8", INSIDE, ("kept",), True, False),
        ("fp8_rowwise", INSIDE, ("accumulating",), True, False),
        ("nvfp4_1d", Pieces, ("accumulating",), True, False),
        ("fp8_current", Block, ("whole",), False, False),
        ("mxfp8", Block, ("resharded",), False, False),
        ("fp8_current", Block, ("resharded",), True, True),
        ("fp8_block", Block, ("whole",), False, True),
    ],
)
@on("two", seconds=COLD)
def test_compiled_blocks_train_as_one_process(
    recipe: str, make: Any, modes: tuple[str, ...], compile_first: bool, cast: bool
) -> None:
    """A graph for each block, without a break; nothing is compiled again after the first step."""
    expected, _ = train(recipe, make, sharded=False, cast=cast)
    for mode in modes:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        found, counts = train(recipe, make, mode, counter, compile_first=compile_first, cast=cast)
        assert found == expected, (mode, found, expected)
        assert 0 < counts[0] == counts[-1], (mode, counts)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
@on("two", seconds=COLD)
def test_inductor(recipe: str) -> None:
    """Its partitioner decides what backward recomputes; products and sums of so few terms are those of eager calls."""
    expected, _ = train(recipe, Block, sharded=False)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(ON_ONE_RANK[dist.get_rank()])
    found, counts = train(recipe, Block, "resharded", counter)
    assert found == expected
    assert 0 < counts[0] == counts[-1]


class Handed(nn.Module):
    """Pieces that cross the edge of a graph: out of one, without a gradient, and into another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fused = nn.Linear(width, 2 * width, bias=False)
        self.cut: Any = lambda weight: weight.detach().chunk(2)[1]
        self.apply_: Any = F.linear

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> (n, width)."""
        weight = self.fused.weight
        return F.linear(x, self.cut(weight)) + self.apply_(x, weight[: weight.shape[1]])


@pytest.mark.thorough
@pytest.mark.parametrize(("recipe", "modes"), [("mxfp8", ("resharded",)), ("nvfp4_1d", ("accumulating",))])
@on("two", seconds=COLD)
def test_pieces_that_leave_a_graph_are_the_weights_own(recipe: str, modes: tuple[str, ...]) -> None:
    """What a graph returns is read in backward by eager code, when the weight holds other codes."""

    def make(compiled: bool, width: int) -> Handed:
        made = Handed(width)
        if compiled:
            made.cut, made.apply_ = (torch.compile(f, backend="aot_eager") for f in (made.cut, made.apply_))
        return made

    expected, _ = train(recipe, partial(make, False), sharded=False)
    for mode in modes:
        torch._dynamo.reset()
        assert train(recipe, partial(make, True), mode)[0] == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", OWN_CODES)
@on("two")
def test_what_a_graph_reads_of_a_gathered_weight(recipe: str) -> None:
    """Planes of both orientations, in a copy; no writes, and nothing of a weight that is freed."""
    width = 2 * width_for(recipe, 2)
    torch.manual_seed(0)
    layer = nn.Linear(width, width, bias=False)
    make_uneven(layer)
    layoutc.quantize_(layer, recipe)
    expected = {name: plane.clone() for name, plane in layer.weight.planes().items()}
    values = layer.weight.dequantize()
    fully_shard(layer)
    layer.unshard()
    weight = layer.weight.data
    run = partial(torch.compile, backend="aot_eager", fullgraph=True)

    clone = run(lambda w: w.clone())(weight)
    assert clone.store.home is None
    assert all(torch.equal(clone.planes()[name], plane) for name, plane in expected.items())
    with pytest.raises(Exception, match="is gathered for each pass, so a compiled graph can't write into it"):
        run(lambda w: w.copy_(torch.zeros(width, width)))(weight)
    read = run(lambda w: w.dequantize())
    assert torch.equal(read(weight), values)
    layer.reshard()
    with pytest.raises(LayoutError, match=f"of weight in {recipe}, which FSDP2 has resharded"):
        read(weight)


class Twice(nn.Module):
    """Layers of which one is read twice, with arithmetic in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 256) -> (n, 256)."""
        return x + self.up(torch.tanh(self.down(torch.tanh(self.up(x)))))


def stepped(model: Any, x: Tensor) -> Tensor:
    """Forward and backward; the output."""
    out = model(x)
    out.float().square().mean().backward()
    return out.detach()  # type: ignore[no-any-return]


def laid_out(lines: list[str]) -> list[str]:
    """The variables with what the operator has returned, and with its parts."""
    made = [line.split(" = ")[0] for line in lines if "lay_out_gathered(" in line]
    return made + [line.split(" = ")[0] for line in lines if any(f"= {name}[" in line for name in made)]


@pytest.mark.thorough
@pytest.mark.skipif(not scaled_mm_on_cpus, reason="needs a torch whose scaled_mm multiplies on CPUs, such as 2.13")
@on("two", seconds=COLD)
def test_products_read_gathered_codes_where_they_lie() -> None:
    """Inductor's graphs: nothing else that they compute is written into the codes, and they compute what graphs do that
    copy them. The other rank's would be the same, so it compiles none."""
    from torch._inductor.utils import run_and_get_code

    found: dict[bool, list[list[Tensor]]] = {False: [], True: []}
    for copies, seen in found.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(Twice())
        layoutc.quantize_(model, "fp8_rowwise")
        product_modes.set_products_(model, "reference")
        model[0].compile(fullgraph=True, backend=ON_ONE_RANK[dist.get_rank()])
        fully_shard(model[0])
        fully_shard(model)
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
        calls: list[str] = []
        for _ in range(2):
            own = gathered_in_graphs._is_only_multiplied
            with (
                torch._functorch.config.patch(enable_autograd_cache=False),
                torch._inductor.config.patch(fx_graph_cache=False),
                mock.patch.object(gathered_in_graphs, "_is_only_multiplied", (lambda _: False) if copies else own),
            ):
                out, code = run_and_get_code(stepped, model, x)
            for one in code:
                lines = [line.strip() for line in one.splitlines()]
                reused = [line for line in lines if line.endswith("# reuse")]
                assert copies or not [name for name in laid_out(lines) for line in reused if f" {name};" in line]
                calls += [line for line in lines if "lay_out_gathered(" in line]
            seen.append([out, *(param.grad.to_local().clone() for param in model.parameters())])
            for param in model.parameters():
                param.grad = None
        if dist.get_rank():
            continue
        assert {"'rowwise'", "'columnwise'"} <= {word.strip(" )") for call in calls for word in call.split(",")}
        assert [call.endswith(", False, False)") for call in calls] == [not copies] * len(calls)
    for some, others in zip(*found.values(), strict=True):
        assert all(map(torch.equal, some, others))


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("otherwise", [False, True])
def test_codes_that_others_read_are_copied(otherwise: bool, groups: bool) -> None:
    """In terms of graphs: parts of what an operator returns, and their views, which products alone read, or not."""
    aten, graph = torch.ops.aten, torch.fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.layoutc.lay_out_gathered.default, (x,))
    codes, scale = (graph.call_function(operator.getitem, (made, at)) for at in range(2))
    flipped = graph.call_function(aten.t.default, (graph.call_function(aten.view.dtype, (codes, torch.float8_e4m3fn)),))
    if groups:
        scale = graph.call_function(aten.slice.Tensor, (scale, 0, 0, 128))
        product = graph.call_function(aten._scaled_grouped_mm.default, (x, flipped, x, scale, x))
    else:
        product = graph.call_function(aten._scaled_mm_v2.default, (x, flipped, [x], [0], [0], [scale], [0], [0]))
    results = [product, graph.call_function(aten.sum.default, (codes,))] if otherwise else [product]
    graph.output(tuple(results))
    assert all(map(gathered_in_graphs._is_only_multiplied, made.users)) is not otherwise
    unread = graph.call_function(operator.getitem, (made, 2))
    assert not gathered_in_graphs._is_only_multiplied(unread)
