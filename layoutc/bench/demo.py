"""`layoutc demo`: trains a byte-level transformer on the standard library's sources under FSDP2, in bf16 and quantized.

One process for each rank, started by torchrun's machinery: gloo on CPUs, NCCL if there are GPUs. It checks what it
prints: gathered weights against quantizing the whole weight, and the resumed run against the uninterrupted one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import layoutc
from layoutc.runtime.quantize import amax, weights
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight.tensor import QuantizedTensor

DEFAULT_RECIPES = ("mxfp8", "nvfp4")
DEFAULT_STEPS = 40
RESUMED_STEPS = 3


@dataclass(frozen=True)
class Config:
    """The configuration of every rank."""

    recipes: tuple[str, ...]
    steps: int
    dim: int = 256
    layers: int = 4
    heads: int = 4
    context: int = 128
    batch: int = 8
    lr: float = 2e-3


@dataclass
class Result:
    """The measurements of one run, on rank 0."""

    name: str
    loss: float
    gathered: int  # bytes that one rank receives in a step
    resident: int  # bytes of a rank's parameters
    step_ms: float
    verified: int = 0  # weights whose gathered bytes equal those of quantizing the whole weight
    resumed: bool = False
    losses: list[float] = field(default_factory=list)


def products_in(x: Tensor) -> torch.dtype:
    """fp32 on CPUs that have no instructions for bf16, on which torch's products of bf16 take many times as long."""
    return x.dtype if x.is_cuda or torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


class Linear(nn.Linear):
    """Of activations in bf16, without a bias."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        dtype = products_in(input)
        weight = self.weight if isinstance(self.weight, QuantizedTensor) else self.weight.to(dtype)
        return F.linear(input.to(dtype), weight).to(input.dtype)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.proj = Linear(dim, 3 * dim, bias=False), Linear(dim, dim, bias=False)
        self.up, self.down = Linear(dim, 4 * dim, bias=False), Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, dim) -> the same."""
        batch, context, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).to(products_in(x))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).to(x.dtype)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, context, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config.dim, config.heads) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = Linear(config.dim, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, context) int64 -> (batch, context, 256)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class CountGathered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that all-gathers deliver, from the collectives themselves."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.nbytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def corpus() -> Tensor:
    """The standard library's top-level sources, in order of their names: 1-D uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def batches(
    text: Tensor, config: Config, rank: int, device: torch.device, start: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets) that depend only on step and rank, so that a resumed run sees the same as the first."""
    step = start
    while True:
        generator = torch.Generator().manual_seed(step * 1009 + rank)
        at = torch.randint(len(text) - config.context - 1, (config.batch, 1), generator=generator)
        rows = text[at + torch.arange(config.context + 1)].long().to(device)
        yield rows[:, :-1], rows[:, 1:]
        step += 1


def build(config: Config, recipe: str | None, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, bf16 or with quantized linear weights, sharded by plain FSDP2, and its optimizer."""
    torch.manual_seed(0)
    model = Transformer(config).to(device=device, dtype=torch.bfloat16)
    if recipe is not None:
        layoutc.quantize_(model, recipe)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=config.lr)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Takes one step; returns the loss, averaged over ranks."""
    logits = model(batch[0])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def verify_gather(model: nn.Module, optimizer: layoutc.MasterWeights) -> int:
    """Gathers every quantized weight through FSDP2, and compares its planes, or the values that gathers leave, byte for
    byte with those of the whole master; returns their number. Raises AssertionError with the name of one that differs.
    """
    masters = {name: optimizer.state[param]["master"] for name, param in model.named_parameters()}
    held_here = [(name, local_tensor(param)) for name, param in model.named_parameters()]
    shards = {name: shard for name, shard in held_here if isinstance(shard, QuantizedTensor)}
    deciding = {name: amax.amax_of_scales(shard) for name, shard in shards.items()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    for name, param in model.named_parameters():
        if name not in shards:
            continue
        cls, whole = type(shards[name]), masters[name].full_tensor()
        expected = weights.planes_of(cls, whole, deciding[name])
        shared = {plane: shards[name].planes()[plane] for plane in cls.LAYOUT.shared}
        held = param.data.planes() if isinstance(param.data, cls) else {"values": param.data}
        if "values" in held:
            expected = {"values": cls(shared | expected, whole.shape, param.dtype).dequantize()}
        for plane, gathered in held.items():
            if plane != "amax" and not torch.equal(gathered, expected[plane]):
                raise AssertionError(f"{name}: gathered {plane} differ from quantizing the whole weight")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return len(shards)


def resident_bytes(model: nn.Module) -> int:
    """Bytes of this rank's parameters as they are stored."""
    total = 0
    for param in model.parameters():
        local = local_tensor(param)
        plain = local.planes().values() if isinstance(local, QuantizedTensor) else (local,)
        total += sum(plane.numel() * plane.element_size() for plane in plain)
    return total


def train(config: Config, recipe: str | None, text: Tensor, device: torch.device, progress: Any) -> Result:
    """One run: train, verify, save, go on, load into a new model, and go on again from there."""
    model, optimizer = build(config, recipe, device)
    data = batches(text, config, dist.get_rank(), device)
    losses: list[Tensor] = []
    times = []
    with CountGathered() as count:
        for _ in range(config.steps):
            started = time.perf_counter()
            losses.append(train_step(model, optimizer, next(data)))
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
            progress(1)
    tail = losses[-max(1, config.steps // 10) :]
    result = Result(
        recipe or "bf16",
        loss=torch.stack(tail).mean().item(),
        gathered=count.nbytes // config.steps,
        resident=resident_bytes(model),
        step_ms=median(times) * 1e3,
        losses=[loss.item() for loss in losses],
    )
    if recipe is not None:
        assert isinstance(optimizer, layoutc.MasterWeights)
        result.verified = verify_gather(model, optimizer)
    result.resumed = resumes(config, recipe, model, optimizer, text, device)
    return result


def resumes(config: Config, recipe: str | None, model: Any, optimizer: Any, text: Tensor, device: torch.device) -> bool:
    """Saves, trains on, loads the checkpoint into a new model and trains that; true if all losses are equal."""
    folder: list[Any] = [tempfile.mkdtemp(prefix="layoutc-demo-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)

    def go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        data = batches(text, config, dist.get_rank(), device, start=config.steps)
        return [train_step(model, optimizer, next(data)).item() for _ in range(RESUMED_STEPS)]

    model_state, state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": state}, checkpoint_id=folder[0])
    went_on = go_on(model, optimizer)
    model, optimizer = build(config, recipe, device)
    model_state, state = get_state_dict(model, optimizer)
    load({"model": model_state, "optimizer": state}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=state)
    same = go_on(model, optimizer) == went_on
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return same


def worker(config: Config) -> list[Result]:
    """The program of a rank; torchrun's machinery sets the environment."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("nccl" if cuda else "gloo")
    text = corpus()
    names: Sequence[str | None] = (None, *config.recipes)
    results = []
    with _progress() as bar:
        task = bar.add_task("", total=len(names) * config.steps)
        for recipe in names:
            bar.update(task, description=recipe or "bf16")
            results.append(train(config, recipe, text, device, partial(bar.advance, task)))
    dist.barrier()
    dist.destroy_process_group()
    return results


def _progress() -> Any:
    """A progress bar on rank 0's standard error; nothing on other ranks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=dist.get_rank() != 0)


def run(
    recipes: Sequence[str] = (), steps: int = DEFAULT_STEPS, processes: int = 2, as_json: bool = False
) -> dict[str, Any]:
    """Starts the ranks, prints the table, and returns the results; each run's `resumed` says if its checks passed.

    With as_json they go to stdout as one object, and the table to stderr. Raises ValueError for an unknown recipe.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from layoutc.runtime.train.convert import recipe_class

    chosen = tuple(recipes) or DEFAULT_RECIPES
    for recipe in chosen:
        recipe_class(recipe)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"layoutc-demo-{os.getpid()}",
        max_restarts=0,
        start_method="spawn",
    )
    config = Config(chosen, steps, batch=2)  # a CPU spends its time on tokens
    started = time.perf_counter()
    results: list[Result] = elastic_launch(launch, worker)(config)[0]
    seconds = time.perf_counter() - started
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report(results, config, processes, seconds, as_json)
    found: dict[str, Any] = {"kind": "demo", "torch": torch.__version__, "device": device, "processes": processes}
    found |= {"seconds": round(seconds, 1), "rows": [asdict(result) for result in results]}
    if as_json:
        print(json.dumps(found))
    return found


def report(results: list[Result], config: Config, processes: int, seconds: float, as_json: bool) -> None:
    """Prints the table and the checks; to stderr with as_json."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{config.steps} steps on {processes} ranks, {'CUDA' if torch.cuda.is_available() else 'CPU'}")
    for title in ("weights", "loss at the end", "gathered in a step", "parameters of a rank", "step"):
        table.add_column(title, justify="left" if title == "weights" else "right")
    plain = results[0]
    for result in results:
        table.add_row(
            result.name,
            f"{result.loss:.4f}",
            f"{result.gathered / 2**20:.2f} MiB ({result.gathered / plain.gathered:.2f}x)",
            f"{result.resident / 2**20:.2f} MiB ({result.resident / plain.resident:.2f}x)",
            f"{result.step_ms:.1f} ms",
        )
    console = Console(stderr=as_json)
    console.print(table)
    for result in results:
        if result.name != "bf16":
            verified = f"{result.verified} gathered weights equal quantizing the whole weight, byte for byte"
            console.print(f"{result.name}: {verified}", soft_wrap=True)
        same = "equal the uninterrupted run, bit for bit" if result.resumed else "DIFFER from the uninterrupted run"
        saved = f"saved with torch.distributed.checkpoint and resumed; the next {RESUMED_STEPS} losses {same}"
        console.print(f"{result.name}: {saved}", soft_wrap=True)
    console.print(f"{seconds:.0f} s in all")


if __name__ == "__main__":
    sys.exit(0 if all(row["resumed"] for row in run()["rows"]) else 1)
