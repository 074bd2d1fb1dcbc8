"""torch.compile on a card: the bytes of eager calls, which are the kernels', in one graph."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import layoutc
import layoutc.recipes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = sorted(path.parent.name for path in Path(layoutc.recipes.__file__).parent.glob("*/tensor.py"))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def module(name: str) -> ModuleType:
    return importlib.import_module(f"layoutc.recipes.{name}")


def weights(name: str) -> list[torch.Tensor]:
    """Whole tiles; a ragged shape where the recipe takes one; another dtype; a transposed weight."""
    layout = module(name).LAYOUT
    um, uk = layout.multiple_m, layout.multiple_k
    shapes = [(512, 1024), (um * 3 if um > 1 else 77, uk * 5 if uk > 1 else 333)]
    made = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) * 3 for m, k in shapes]
    return [*made, torch.randn(1024, 512, device="cuda"), torch.randn(512, 1024, device="cuda").t()]


def drawing_alike(function: Any, x: torch.Tensor) -> Any:
    """What a function gives; recipes that round by random bits draw the same seeds at each call."""
    torch.manual_seed(1)
    return function(x)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def compare(made: Any, expected: Any) -> None:
    (q, *values), (eager, *given) = made, expected
    for plane, stored in eager.planes().items():
        assert same(q.planes()[plane], stored), plane
    assert all(map(same, values, given))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_inductor_gives_the_bytes_of_the_kernels(name: str, dynamic: bool) -> None:
    """Arithmetic around it is fused by Inductor; quantize and dequantize are one node each."""
    quantize = module(name).quantize

    def there_and_back(x: torch.Tensor) -> tuple[Any, ...]:
        q = quantize(x * 2)
        return q, q.dequantize(), q.dequantize(torch.float32) * 0.5

    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=dynamic)
    for x in weights(name):
        compare(drawing_alike(compiled, x), drawing_alike(there_and_back, x))


@pytest.mark.parametrize("name", NAMES)
def test_compiled_buffers(name: str) -> None:
    """Dynamo breaks the graph at a method that returns a dict; what is left gives the same buffers."""
    quantize = module(name).quantize

    def lay_out(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return quantize(x * 2).buffers()  # type: ignore[no-any-return]

    compiled = torch.compile(lay_out)
    for x in weights(name):
        made, expected = drawing_alike(compiled, x), drawing_alike(lay_out, x)
        assert list(made) == list(expected)
        assert all(same(made[buffer], expected[buffer]) for buffer in expected), x.shape


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8", "nvfp4"])
def test_operators_run_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the reference, which is refused here."""
    recipe = module(name)
    x = weights(name)[0]
    expected = recipe.quantize(x)
    values, buffers = expected.dequantize(), expected.buffers()
    for function in ("quantize_reference", "dequantize_reference", "lay_out"):
        monkeypatch.setattr(recipe.Tensor.REFERENCE, function, lambda *_, **__: pytest.fail("the reference was called"))
    q, found = torch.compile(lambda x: (q := recipe.quantize(x), q.dequantize()), fullgraph=True)(x)
    compare((q, found), (expected, values))
    key, layout = recipe.Tensor.KEY, recipe.LAYOUT
    held = list(expected.planes().values())
    made = torch.ops.layoutc.lay_out(held, *x.shape, key, list(layout.orientations), False)
    names = [buffer for buffer in buffers if buffer not in layout.as_stored]
    assert all(same(one, buffers[buffer]) for one, buffer in zip(made, names, strict=True))


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8", "nvfp4"])
def test_captured_in_a_cuda_graph(name: str) -> None:
    """mode="reduce-overhead" records the kernels, and replays them on other values."""
    quantize = module(name).quantize

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return quantize(x * 2).dequantize()  # type: ignore[no-any-return]

    compiled = torch.compile(there_and_back, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
        torch.compiler.cudagraph_mark_step_begin()
        assert same(compiled(x), there_and_back(x))


class Block(torch.nn.Module):
    """Two products with a bias and an activation; checkpointed where a graph sees it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, width), torch.nn.Linear(width, width, bias=False)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, width) -> (n, width)."""
        return x + checkpoint(self.body, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, None) for name in ("fp8_current", "fp8_rowwise", "mxfp8", "nvfp4_1d")), ("mxfp8", "reduce-overhead")],
)
def test_compiled_blocks_under_fully_shard(name: str, mode: str | None) -> None:
    """Backward recomputes from forward's codes, where it holds others in the same memory; CUDA graphs are not taken."""

    def curve(sharded: bool) -> list[float]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = torch.nn.Sequential(Block(512), Block(512)).cuda()
        with torch.no_grad():  # no orientation passes for another
            for block in model:
                block.up.weight *= torch.logspace(-2, 2, 512, 2.0, device=block.up.weight.device)
                block.down.weight *= torch.logspace(-2, 2, 512, 2.0, device=block.up.weight.device)
        layoutc.quantize_(model, name)
        for block in model:
            block.compile(fullgraph=True, mode=mode if sharded else None)
        for module in (*model, model) if sharded else ():
            fully_shard(module)
        optimizer, losses = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2), []
        for step in range(3):
            x = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).cuda()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert curve(True) == curve(False)
