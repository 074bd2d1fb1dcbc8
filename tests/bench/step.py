"""Whole training steps under FSDP2: bf16, torchao's float8 and layoutc, with products in low precision and without.

    torchrun --nproc-per-node 2 tests/bench/step.py [--batch 1 4] [--variants bf16 ...] [--eager] [--graph] [--profile]

With --phases the first rank says where the host's time goes in a step, by timers: medians over turns. With --alone N
one process takes the steps of a rank of N, without torchrun: collectives send nothing, and weights that were gathered
hold whatever there was, so that times are of the host and of the card's own work, and losses mean nothing.

Llama-shaped blocks (attention with grouped keys and values, RMS norms, SwiGLU), each sharded as one group and, unless
--eager, compiled; AdamW, fused. Printed: the median step and its spread on the slowest rank, the speed against bf16,
the peak of memory, the loss after the steps, the last fifth of steps over the first, and bytes that are allocated after
the last step and were not after the first; with --profile, where the card's time goes in one step, and with --trace a
trace of it for each variant.
`layoutc:RECIPE` are quantized weights under MasterWeights, `cast:RECIPE` weights that are cast on gather; `+low`
multiplies in low precision, `+by_layers` and `+on_gather` say who dequantizes (default: gathers, where that costs
nothing). `+adam8` and `+adam8bf16` keep moments in 8 bits with masters in fp32 or bf16, and `+adam32` steps fp32 state
by the same launch (MasterWeights with state= and masters=). `+exchange`, of any variant, sends gradients in bf16
(layoutc.exchange_gradients), `+grad_fp8` and `+grad_int4` as codes of these recipes. Printed for each: bytes that a
rank hands to collectives for gradients in a step, counted, and what layoutc.explain_gradients says of them.
`torchao` is what torchao's users would write, tensorwise scaling with its FP8 all-gather; `torchao-rowwise` has
that of its recipe. Both need a card. With --graph a step is captured in a CUDA graph and replayed, so that no host
time is left in it; its peak of memory is that of the capture. With --turns N all variants are held at once and take N
turns of --steps each, since hosts are now fast and now slow; peaks of memory are then of all.
Each step begins when all ranks and cards are at rest. With --together N it is N steps in a row that do, as in trainers
that read losses every N steps: the host then works ahead while the card ends the step before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import card_time
import phases
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import layoutc

VARIANTS = (
    *("bf16", "torchao", "torchao-rowwise", "layoutc:fp8_current", "layoutc:fp8_current+low", "cast:fp8_current+low"),
    *("layoutc:fp8_rowwise+low", "layoutc:fp8_block", "layoutc:fp8_block+low", "cast:fp8_block+low"),
)
# Moments and masters of weights under MasterWeights.
STATES = {
    "adam32": {"state": "fp32"},
    "adam8": {"state": "8bit"},
    "adam8bf16": {"state": "8bit", "masters": "bf16"},
}
# Where a kernel belongs, by what its name contains; the first that fits.
KINDS = (
    ("gather", ("nccl", "all_gather", "split_with_sizes", "chunk_cat", "rank_sum")),
    ("quantize", ("quantize_kernel", "lay_out_kernel", "amax", "scaled_mm_out", "to_copy_amax")),
    ("products", ("gemm", "nvjet", "cutlass", "xmma", "cublas", "_scaled_mm")),
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("optimizer", ("multi_tensor", "adam", "foreach", "update_kernel", "scalars_kernel")),
    ("copies", ("memcpy", "memset", "copy")),
)


@dataclass(frozen=True)
class Sizes:
    """Of the model."""

    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        head = sizes.dim // sizes.heads
        self.heads, self.kv_heads, self.head = sizes.heads, sizes.kv_heads, head
        self.before, self.between = nn.RMSNorm(sizes.dim), nn.RMSNorm(sizes.dim)
        self.q = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.k = nn.Linear(sizes.dim, sizes.kv_heads * head, bias=False)
        self.v = nn.Linear(sizes.dim, sizes.kv_heads * head, bias=False)
        self.o = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.gate = nn.Linear(sizes.dim, sizes.ffn, bias=False)
        self.up = nn.Linear(sizes.dim, sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, dim) -> the same."""
        h = self.before(x)
        q = self.q(h).unflatten(-1, (self.heads, self.head)).transpose(1, 2)
        k = self.k(h).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2)
        v = self.v(h).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@dataclass(frozen=True)
class Run:
    """What one variant took: milliseconds and bytes of the slowest rank."""

    variant: str
    batch: int
    median_ms: float
    spread_ms: float
    peak_bytes: int
    loss: float
    parts_ms: dict[str, float]
    fastest_ms: float
    later: float  # the median of the last fifth of steps, over that of the first
    grown_bytes: int  # memory that is allocated after the last step, less that after the first


def build(
    variant: str, sizes: Sizes, device: torch.device, eager: bool, graph: bool
) -> tuple[nn.Module, Any, Callable[[], None]]:
    """The sharded model, its optimizer, and what is called after each step."""
    kind, _, recipe = variant.split("+")[0].partition(":")
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*[Block(sizes) for _ in range(sizes.layers)])
    after: Callable[[], None] = lambda: None  # noqa: E731
    if kind.startswith("torchao"):
        after = _torchao(model, kind)
    elif kind == "layoutc":
        layoutc.quantize_(model, recipe)
    elif kind == "cast":
        layoutc.cast_on_gather_(model, recipe)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        if not eager:
            block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if "on_gather" in variant.split("+"):
        layoutc.set_products_(model, "dequantize", dequantize="gather")
    if "by_layers" in variant.split("+"):
        layoutc.set_products_(model, "dequantize", dequantize="layer")
    for way in variant.split("+"):
        if way == "exchange" or way.startswith("grad_"):
            layoutc.exchange_gradients(model, None if way == "exchange" else way)
    adamw: dict[str, Any] = {"lr": 1e-4, "fused": True, "capturable": graph}
    if kind == "layoutc":
        for way in STATES.keys() & set(variant.split("+")):
            adamw |= STATES[way]
        optimizer: Any = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), **adamw)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **adamw)
    if kind == "cast":
        after = lambda: layoutc.precompute_amaxes(model)  # noqa: E731
    return model, optimizer, after


def _torchao(model: nn.Module, kind: str) -> Callable[[], None]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    if kind == "torchao-rowwise":
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))
        return lambda: None
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    return lambda: precompute_float8_dynamic_scale_for_fsdp(model)


@dataclass
class Trial:
    """A variant that is ready to be measured."""

    variant: str
    batch: int
    step: Callable[[], Tensor]
    mode: Callable[[], AbstractContextManager[None]]
    stream: torch.cuda.Stream | None
    times: list[float] = field(default_factory=list)  # ms of each step
    held: list[int] = field(default_factory=list)  # bytes that are allocated after each

    def take(self, steps: int, device: torch.device, together: int = 1) -> None:
        """So many steps, or runs of steps that are taken together, each timed from when all ranks are at rest."""
        with self.mode(), torch.cuda.stream(self.stream) if self.stream else nullcontext():
            for _ in range(steps):
                dist.barrier()
                _wait(device)
                began = time.perf_counter()
                for _ in range(together):
                    self.step()
                with phases.phase("waits for the card"):
                    _wait(device)
                self.times.append((time.perf_counter() - began) * 1e3 / together)
                self.held.append(torch.cuda.memory_allocated() if device.type == "cuda" else 0)


def prepared(variant: str, batch: int, options: argparse.Namespace, sizes: Sizes, device: torch.device) -> Trial:
    """Warm, and captured if that is asked for."""
    model, optimizer, after = build(variant, sizes, device, options.eager, options.graph)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(batch, options.sequence, sizes.dim, generator=generator).to(device, torch.bfloat16)

    def step() -> Tensor:
        with phases.phase("forward"):
            loss = (model(x) - x.roll(1, 1)).float().square().mean()
        with phases.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        with phases.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
            after()
        return loss.detach()

    mode: Callable[[], AbstractContextManager[None]] = nullcontext
    if "low" in variant.split("+"):
        mode = partial(layoutc.products, "low_precision", saves=options.saves)
    trial = Trial(variant, batch, step, mode, torch.cuda.Stream() if options.graph else None)
    trial.take(options.warm - 1, device)
    with counted_bytes() as sent:
        trial.take(1, device)
    said = sum(one.sends for one in layoutc.explain_gradients(model))
    world = dist.get_world_size()
    counted = sum(sent) * (world - 1) // world
    if dist.get_rank() == 0:
        print(f"{variant}: a rank sends {counted} bytes of gradients in a step, as explained: {said}", flush=True)
    trial.times, trial.held = [], []
    gc.collect()
    gc.freeze()  # what the variants before have left must not slow this one; torchtitan turns the collector off
    _wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if trial.stream:
        with trial.mode(), torch.cuda.stream(trial.stream):
            trial.step = captured(step, trial.stream)
    return trial


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """The bytes that a rank hands to each collective that sends gradients: parts of all ranks, its own among them."""
    sent: list[int] = []

    def counting(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values = kwargs.get("input", args[1] if len(args) > 1 else None)
        sent.append(values.nbytes)
        return collective(*args, **kwargs)

    names = ("all_to_all_single", "reduce_scatter_single", "reduce_scatter_tensor")
    kept = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    for name, collective in kept.items():
        setattr(dist, name, partial(counting, collective))
    try:
        yield sent
    finally:
        for name, collective in kept.items():
            setattr(dist, name, collective)


def measured(trial: Trial, options: argparse.Namespace, device: torch.device) -> Run:
    """What its steps took, on the slowest rank."""
    parts = {}
    if (options.profile or options.trace) and device.type == "cuda":
        name = f"{trial.variant}_batch_{trial.batch}".replace(":", "_")
        trace = Path(options.trace, f"{name}.json.gz") if options.trace else None
        with trial.mode(), torch.cuda.stream(trial.stream) if trial.stream else nullcontext():
            parts = _parts(trial.step, trace)
    times, held = trial.times, trial.held
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    fifth = -(-len(times) // 5)
    later = statistics.median(times[-fifth:]) / statistics.median(times[:fifth])
    figures = [statistics.median(times), max(times) - min(times), peak, -min(times), later, held[-1] - held[0]]
    slowest = torch.tensor(figures, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    median, spread, most, fastest, later, grown = slowest.tolist()
    with trial.mode(), torch.cuda.stream(trial.stream) if trial.stream else nullcontext():
        last = float(trial.step())
    return Run(trial.variant, trial.batch, median, spread, int(most), last, parts, -fastest, later, int(grown))


def taken(
    variants: list[str], batch: int, options: argparse.Namespace, sizes: Sizes, device: torch.device
) -> list[Run]:
    """What steps of variants took that are held at once, those that can be. Nothing of them is left: a CUDA graph
    would keep its process group from ending."""
    torch._dynamo.reset()
    # All blocks share the code of one forward, of which torch keeps 8 graphs: later variants would silently run eager.
    torch._dynamo.config.recompile_limit = 16 * len(variants)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    trials, runs = [], []
    spent: dict[str, list[dict[str, tuple[float, float]]]] = {variant: [] for variant in variants}
    for variant in variants:
        try:
            trials.append(prepared(variant, batch, options, sizes, device))
        except Exception as error:  # the others are still worth their time
            if dist.get_rank() == 0:
                print(f"{variant} batch {batch}: {type(error).__name__}: {error}".split("\n")[0], flush=True)
    for _ in range(options.turns):
        for trial in trials:
            if options.turns > 1:  # the first step after another's is not its own
                trial.take(1, device)
                del trial.times[-1], trial.held[-1]
            phases.taken(1)
            trial.take(options.steps, device, options.together)
            spent[trial.variant].append(phases.taken(options.steps * options.together))
    if options.phases and dist.get_rank() == 0:
        print(phases.table({trial.variant: spent[trial.variant] for trial in trials}), flush=True)
    for trial in trials:
        runs.append(measured(trial, options, device))
        if dist.get_rank() == 0:
            print(f"{trial.variant} batch {batch}: {runs[-1].median_ms:.1f} ms {runs[-1].parts_ms}", flush=True)
    return runs


def captured(step: Callable[[], Tensor], stream: torch.cuda.Stream) -> Callable[[], Tensor]:
    """The same step as a CUDA graph, of kernels on the stream that it was warmed up on."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _parts(step: Callable[[], Tensor], trace: Path | None) -> dict[str, float]:
    """Milliseconds of the card in one step, by kind of kernel, and how many of them nothing of another kind covers.

    Idle is what no kernel covers. The first rank writes the trace.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    if trace is not None and dist.get_rank() == 0:
        profile.export_chrome_trace(str(trace))
    spans = [
        (e.time_range.start, e.time_range.end, e.name.lower()) for e in profile.events() if e.device_time_total > 0
    ]
    of_kind: dict[str, list[tuple[float, float]]] = {}
    for start, end, name in spans:
        kind = next((kind for kind, words in KINDS if any(word in name for word in words)), "other")
        of_kind.setdefault(kind, []).append((start, end))
    every = [(start, end) for start, end, _ in spans]
    busy = card_time.covered(every)
    found = {}
    for kind, those in sorted(of_kind.items()):
        found[kind] = sum(end - start for start, end in those)
        found[f"{kind} alone"] = busy - card_time.covered(
            [span for other in of_kind if other != kind for span in of_kind[other]]
        )
    found["idle"] = max(end for _, end in every) - min(start for start, _ in every) - busy
    return {kind: round(microseconds / 1e3, 2) for kind, microseconds in found.items()}


def main() -> None:
    """Runs the variants, on cards if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    for name, value in (("layers", 8), ("dim", 4096), ("ffn", 14336), ("heads", 32), ("kv-heads", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("sequence", 4096), ("steps", 10), ("warm", 4), ("turns", 1), ("together", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--phases", action="store_true", help="where the host's time goes, by timers")
    parser.add_argument("--trace", help="a folder for traces of a step, for Perfetto or chrome://tracing")
    parser.add_argument("--saves", choices=("quantized", "input"), help="what products in low precision keep of inputs")
    parser.add_argument("--alone", type=int, metavar="RANKS", help="one process, with collectives that send nothing")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.phases:
        phases.measure()
    if options.trace:
        Path(options.trace).mkdir(parents=True, exist_ok=True)
    cards = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cards else torch.device("cpu")
    if cards:
        torch.cuda.set_device(device)
    if options.alone:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=options.alone, store=FakeStore())
    else:
        dist.init_process_group("nccl" if cards else "gloo")
    sizes = Sizes(options.layers, options.dim, options.ffn, options.heads, options.kv_heads)
    runs: list[Run] = []
    for batch in options.batch:
        held = [options.variants] if options.turns > 1 else [[variant] for variant in options.variants]
        for variants in held:
            runs += taken(variants, batch, options, sizes, device)
            gc.unfreeze()
            gc.collect()
            if cards:
                torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        _print(runs)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                ran: dict[str, Any] = {"kind": "step", "device": torch.cuda.get_device_name() if cards else "cpu"}
                ran |= {"torch": torch.__version__, "world": dist.get_world_size(), "alone": bool(options.alone)}
                ran |= {
                    name: getattr(options, name)
                    for name in ("eager", "graph", "saves", "together", "sequence", "turns")
                }
                ran |= {"command": shlex.join(sys.argv), "date": date.today().isoformat()}
                ran |= {name: _version(name) for name in ("triton", "torchao")}
                json.dump({**ran, "rows": [asdict(run) for run in runs]}, file)
    dist.destroy_process_group()


def _version(package: str) -> str | None:
    return version(package) if find_spec(package) else None


def _print(runs: list[Run]) -> None:
    plain = {run.batch: run.median_ms for run in runs if run.variant == "bf16"}
    titles = f"{'variant':26} {'batch':>5} {'ms':>8} {'spread':>7} {'of bf16':>7} {'GiB':>6} {'loss':>8}"
    print(f"{titles} {'later':>6} {'grown':>8}")
    for run in runs:
        speed = f"{plain[run.batch] / run.median_ms:.2f}x" if run.batch in plain else ""
        print(
            f"{run.variant:26} {run.batch:5} {run.median_ms:8.1f} {run.spread_ms:7.1f} {speed:>7} "
            f"{run.peak_bytes / 2**30:6.2f} {run.loss:8.4f} {run.later:6.2f} {run.grown_bytes:8}"
        )


if __name__ == "__main__":
    main()
