"""Started by torchrun, one process a GPU: recipes under FSDP2 over NCCL against the same model in one process, eager
blocks against eager ones, compiled blocks against compiled ones.

    torchrun --nproc-per-node 4 tests/gpu/train_nccl.py [all] [RECIPE...] [MODE...]

All ranks see the same batch, and rank 0 brings the whole gradient, so that its mean is exact in any order: losses must
equal those of one process, to the bit. To find what streams do not wait for, gather outputs are poisoned before each
gather, and the hooks are delayed on the card now and then. `all`: every recipe, in the modes that have most to get
wrong. In the modes "captured", all steps but the first are replays of one CUDA graph.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import layoutc
from layoutc.runtime.fsdp2 import all_gather
from layoutc.runtime.fsdp2.gather_plan import GatherPlan
from layoutc.runtime.torch_private import fsdp2

RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
MODES = (
    "resharded",
    "kept",
    "recompute",
    "keep_backward",
    "policy",
    "offload",
    "cut_blocks",
    "short",
    "cast",
    "cast cut_blocks",
    "columns",
    "hybrid",
    "trivial",
    "one",
    "captured",
    "cast captured",
)
COMPILED_RECIPES = ("fp8_current", "mxfp8")  # both passes gather the same codes; each has codes of its own
COMPILED = ("compiled", "compiled kept", "compiled recompute", "compiled recompute inside", "compiled captured")
STEPS = 20
WARM = 3  # steps before one is captured
Curve = list[float]


class Block(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, inner, bias=False), nn.Linear(inner, dim)
        self.recomputes = False

    def body(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x))


def uneven(model: nn.Module) -> None:
    """Blocks whose scales differ along rows and along columns, so that no orientation passes for another."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            rows, columns = module.weight.shape
            with torch.no_grad():
                module.weight *= torch.logspace(-2, 1, rows, 2.0).unsqueeze(1) * torch.logspace(1, -1, columns, 2.0)


def options_of(mode: str) -> dict[str, Any]:
    """Arguments of fully_shard."""
    world = dist.get_world_size()
    if mode == "offload":
        return {"offload_policy": CPUOffloadPolicy()}
    if mode == "policy":
        return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)}
    if mode == "columns":
        return {"shard_placement_fn": lambda param: Shard(1) if param.dim() == 2 else None}
    if mode in ("hybrid", "trivial"):
        shape = (2, world // 2) if mode == "hybrid" else (world, 1)
        return {"mesh": init_device_mesh("cuda", shape, mesh_dim_names=("copies", "slices"))}
    if mode == "one":
        return {"mesh": init_device_mesh("cuda", (world, 1), mesh_dim_names=("copies", "alone"))["alone"]}
    return {"reshard_after_forward": "kept" not in mode}


def sizes_of(recipe: str, mode: str) -> tuple[int, int]:
    """Width and inner width: whole blocks for each rank, or cuts inside blocks and short shards."""
    layout = import_module(f"layoutc.recipes.{recipe}").LAYOUT
    if mode == "short":
        return 512, 1184  # of 592 rows, the first touch 5 blocks of 128 rows, and the others 6
    return (
        (3 * layout.block_rows or 96, 1024 + 128)
        if mode.endswith("cut_blocks") and layout.block_rows > 1
        else (512, 2048)
    )


def losses(recipe: str, mode: str, device: torch.device, sizes: tuple[int, int]) -> Curve:
    """The loss curve of one run: alone, or sharded in a mode of FSDP2."""
    torch.manual_seed(0)
    dim, inner = sizes
    model = nn.Sequential(*(Block(dim, inner) for _ in range(4)), nn.Linear(dim, dim))
    uneven(model)
    model = model.to(device)
    cast = "cast" in mode
    (layoutc.cast_on_gather_ if cast else layoutc.quantize_)(model, recipe)
    torch._dynamo.reset()
    for block in model[:-1] if "compiled" in mode else ():
        block.recomputes = "inside" in mode
        block.compile(fullgraph=True)
    if mode.endswith("recompute"):
        model = nn.Sequential(*(checkpoint_wrapper(block) for block in model))
    if not mode.startswith("alone"):
        options = options_of(mode)
        for block in model:
            fully_shard(block, **options)
        fully_shard(model, **options)
    if mode == "keep_backward":
        for block in model:
            block.set_reshard_after_backward(False)
    # By default AdamW steps DTensors in lists and other subclasses one by one, which a card rounds otherwise.
    captures = "captured" in mode
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True, capturable=captures)
        if cast
        else layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3, capturable=captures)
    )
    share = 1.0 if mode.startswith("alone") or mode == "one" else float(dist.get_world_size()) * (dist.get_rank() == 0)
    curve = []
    x, loss = torch.empty(64, dim, device=device), torch.zeros((), device=device)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())

    def step() -> None:
        found = (model(x) - x.roll(1, 1)).pow(2).mean()
        (found * share).backward()
        optimizer.step()
        optimizer.zero_grad()
        if cast and captures:
            layoutc.precompute_amaxes(model)
        if mode == "keep_backward":
            for block in model:
                block.reshard()
        loss.copy_(found.detach())

    with layoutc.strict(), torch.cuda.stream(stream):
        for number in range(STEPS):
            x.copy_(torch.randn(64, dim, generator=torch.Generator().manual_seed(number)))
            if not captures or mode.startswith("alone") or number < WARM:
                step()
            elif number == WARM:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    step()
            if captures and not mode.startswith("alone") and number >= WARM:
                graph.replay()
            curve.append(loss.item())
    torch.cuda.current_stream().wait_stream(stream)
    if not mode.startswith("alone"):
        assert layoutc.check_ranks(model) == len(list(model.parameters()))
    return curve


@contextmanager
def hostile() -> Iterator[None]:
    """Poisons gather outputs before each gather; delays the hooks, and what gathers in few steps do in their place, on
    the card, now the one, now the other."""
    allocate, send, receive = FSDPParam.alloc_all_gather_outputs, all_gather.send, all_gather.receive
    chance = random.Random(7)

    def poisoned(self: FSDPParam) -> None:
        allocate(self)
        for tensor in self.all_gather_outputs:
            with torch.autograd._unsafe_preserve_version_counter(tensor):  # as FSDP2 itself fills them
                tensor.view(torch.uint8).fill_(0xA5)

    def poisoned_in_few_steps(values: Tensor) -> None:
        of_gathers(values)
        with torch.autograd._unsafe_preserve_version_counter(values):
            values.view(torch.uint8).fill_(0xA5)

    def slept(call: Callable[..., Any]) -> Callable[..., Any]:
        def sleeping(self: Any, *arguments: Any) -> Any:
            torch.cuda._sleep(chance.choice([0, 0, 300_000]))
            return call(self, *arguments)

        return sleeping

    of_gathers, fill, arrive = fsdp2.allocate, GatherPlan.fill, GatherPlan.arrive
    fsdp2.allocate = poisoned_in_few_steps
    GatherPlan.fill, GatherPlan.arrive = slept(fill), slept(arrive)  # type: ignore[method-assign]
    FSDPParam.alloc_all_gather_outputs = poisoned  # type: ignore[method-assign]
    all_gather.send, all_gather.receive = slept(send), slept(receive)  # which hooks call
    try:
        yield
    finally:
        fsdp2.allocate = of_gathers
        GatherPlan.fill, GatherPlan.arrive = fill, arrive  # type: ignore[method-assign]
        FSDPParam.alloc_all_gather_outputs = allocate  # type: ignore[method-assign]
        all_gather.send, all_gather.receive = send, receive


def runs(recipes: Sequence[str], modes: Sequence[str], world: int) -> list[tuple[str, str]]:
    """(recipe, mode) of what runs on so many ranks; where modes is MODES itself, compiled modes as well."""
    return [
        (recipe, mode)
        for recipe in recipes
        for mode in (*modes, *(COMPILED if recipe in COMPILED_RECIPES and modes is MODES else ()))
        if (mode != "hybrid" or world >= 4) and (mode != "cast captured" or not has_history(recipe))
    ]


def has_history(recipe: str) -> bool:
    """Such a recipe is cast on gather in no CUDA graph."""
    return bool(import_module(f"layoutc.recipes.{recipe}").LAYOUT.history)


def main() -> None:
    """Prints a line for each recipe and mode; fails on the first difference."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl", device_id=device)
    every = (*MODES, *COMPILED)
    recipes = [word for word in sys.argv[1:] if word not in ("all", *every)] or RECIPES
    modes = tuple(word for word in sys.argv[1:] if word in every) or MODES
    if "all" in sys.argv:
        shipped = import_module("layoutc.recipes").RECIPES
        recipes = [name for name in shipped if not import_module(f"layoutc.recipes.{name}").LAYOUT.not_weights]
        modes = ("resharded", "cut_blocks", "recompute")
    alone: dict[tuple[str, str, tuple[int, int]], Curve] = {}
    for recipe, mode in runs(recipes, modes, dist.get_world_size()):
        sizes = sizes_of(recipe, mode)
        # Inductor rounds otherwise where it fuses, and fuses otherwise where backward recomputes.
        inside, compiled = " inside" if "inside" in mode else "", " compiled" if "compiled" in mode else ""
        captured = " captured" if "captured" in mode else ""  # the optimizer then steps on the card alone
        kind = f"alone{' cast' if 'cast' in mode else ''}{compiled}{inside}{captured}"
        if (recipe, kind, sizes) not in alone:
            alone[recipe, kind, sizes] = losses(recipe, kind, device, sizes)
        expected = alone[recipe, kind, sizes]
        with hostile():
            sharded = losses(recipe, mode, device, sizes)
        # Offloaded masters are stepped on the CPU, whose AdamW may round in another order.
        close = mode == "offload" and max(abs(a - b) / b for a, b in zip(sharded, expected, strict=True)) < 1e-2
        assert sharded == expected or close, (recipe, mode, expected, sharded)
        assert sharded[-1] < sharded[0]
        if dist.get_rank() == 0:
            verdict = "equal to the bit" if sharded == expected else "close (masters stepped on the CPU)"
            print(f"{recipe}, {mode}: {STEPS} losses {verdict}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
