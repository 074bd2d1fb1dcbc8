"""Host time of weights inside FSDP2: what a gather and an optimizer's step take before the card is asked for anything.

    torchrun --nproc-per-node 2 tests/bench/host.py [--weights 64] [--size 256] [--json FILE]
    python tests/bench/host.py          one rank, on a card or on the CPU

Square weights of one group, in bf16: gathered as they are, quantized (layoutc:RECIPE), cast on gather (cast:RECIPE),
dequantized by gathers or by layers (+on_gather, +by_layers; default: as layoutc has it), and as torchao's float8
gathers them, where torchao is installed. First, what is gathered is compared with the whole weights, quantized, byte
for byte, before and after a step. Then all is timed by the host's clock; no stream is waited for in between. In us a
parameter: `unshard()` and `reshard()` together; and by themselves, in runs of their own, what FSDP2 calls the hooks in
(FSDPParam.all_gather_inputs and init_unsharded_param), which plain weights take too; `linear` is a linear layer's
forward on 16 rows that need a gradient, by a weight that is gathered. In ms: a step of fused AdamW, or of
MasterWeights with it. Its ratio is to plain fused AdamW on as many fp32 weights, which is what MasterWeights steps.
`amaxes` is layoutc.precompute_amaxes, or torchao's. A figure is the mean of the medians of two runs, and how far these
are apart. On a CPU there are no kernels: references are timed with the rest.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

import layoutc

RECIPES = ("fp8_block", "mxfp8", "nvfp4", "fp8_current")
FORMS = (
    *("fp32", "bf16", *(f"{use}:{recipe}" for use in ("layoutc", "cast") for recipe in RECIPES)),
    *(*(f"layoutc:{recipe}+by_layers" for recipe in RECIPES), "torchao:float8"),
)
COLUMNS = ("gather", "pre", "post", "linear", "amaxes", "step")
Figures = dict[str, float]


def parts_of(form: str) -> tuple[str, str, str]:
    """What holds the weights, the recipe, and who dequantizes them: `on_gather`, `by_layers`, or "", the default."""
    use, _, words = form.partition(":")
    recipe, _, by = words.partition("+")
    return use, recipe, by


def build(form: str, count: int, size: int, device: torch.device) -> nn.Module:
    """The same weights on every rank, sharded as one group. Raises ImportError for what is not installed."""
    use, recipe, by = parts_of(form)
    torch.manual_seed(0)
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    with device:
        model = nn.Sequential(*[nn.Linear(size, size, bias=False, dtype=dtype) for _ in range(count)])
    if use == "layoutc":
        layoutc.quantize_(model, recipe)
    elif use == "cast":
        layoutc.cast_on_gather_(model, recipe)
    if by:
        layoutc.set_products_(model, "dequantize", dequantize={"on_gather": "gather", "by_layers": "layer"}[by])
    if use == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    fully_shard(model)
    return model


def optimizer_for(form: str, model: nn.Module) -> Any:
    """Fused AdamW, on masters where weights are quantized; all parameters have gradients."""
    for param in model.parameters():
        held: Any = param
        shape = held._local_tensor.shape
        grad = torch.full(tuple(shape), 1e-3, dtype=param.dtype, device=held._local_tensor.device)
        param.grad = DTensor.from_local(grad, held.device_mesh, held.placements, run_check=False)
    if form.startswith("layoutc"):
        return layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-4, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def amaxes_for(form: str, model: nn.Module) -> Callable[[], None] | None:
    """What finds all amaxes at once, after a step; None where gathers need none."""
    use, recipe, _ = parts_of(form)
    if use == "torchao":
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        return lambda: precompute_float8_dynamic_scale_for_fsdp(model)
    if use == "cast" and importlib.import_module(f"layoutc.recipes.{recipe}").LAYOUT.shares_amax:
        return lambda: layoutc.precompute_amaxes(model)
    return None


# --------------------------------------------------------------------------------------------------------------- checks
def whole(local: Tensor) -> Tensor:
    """All ranks' rows."""
    rows = local.detach().contiguous()
    gathered = rows.new_empty(rows.shape[0] * dist.get_world_size(), *rows.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the old name warns
    gather(gathered.view(-1).view(torch.uint8), rows.view(-1).view(torch.uint8))
    return gathered


def check(form: str, model: Any, values: list[Tensor]) -> None:
    """What is gathered equals the whole weights, quantized, byte for byte, or their values. values: what they are
    quantized from."""
    use, recipe, _ = parts_of(form)
    if use == "torchao":
        return
    model.unshard()
    for layer, value in zip(model, values, strict=True):
        if not recipe:
            held, expected = {"": layer.weight}, {"": value}
        else:
            whole_weight = importlib.import_module(f"layoutc.recipes.{recipe}").quantize(value)
            is_value = not hasattr(layer.weight, "planes")
            held = {"": layer.weight} if is_value else layer.weight.planes()
            expected = {"": whole_weight.dequantize(layer.weight.dtype)} if is_value else whole_weight.planes()
        for name, plane in held.items():
            one, other = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (plane, expected[name]))
            assert torch.equal(one, other), (form, name)
    model.reshard()


def values_of(form: str, model: Any, optimizer: Any) -> list[Tensor]:
    """What the shards of all weights are quantized from, as wholes."""
    if form.startswith("layoutc"):
        return [whole(master._local_tensor) for master in optimizer.masters().values()]
    held = [param._local_tensor for param in model.parameters()]
    return [whole(one.plain if form.startswith("cast") else one) for one in held]


# --------------------------------------------------------------------------------------------------------------- clocks
class Clock:
    """Medians of the host's time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.warm, self.runs = (5, 30) if device.type == "cuda" else (2, 5)

    def median(self, call: Callable[[], object]) -> float:
        """Seconds a call. The card is idle before each, and nobody waits for it after."""
        took = []
        for run in range(self.warm + self.runs):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            call()
            spent = time.perf_counter() - start
            if run >= self.warm:
                took.append(spent)
        return statistics.median(took)


@contextmanager
def hooks_timed() -> Iterator[Figures]:
    """Sums of the time that FSDP2 spends in hooks, and around them, until it calls the next one."""
    spent = {"pre": 0.0, "post": 0.0}
    inputs, init = FSDPParam.all_gather_inputs, FSDPParam.init_unsharded_param

    def timed(name: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def measured(self: Any) -> Any:
            start = time.perf_counter()
            result = call(self)
            spent[name] += time.perf_counter() - start
            return result

        return measured

    FSDPParam.all_gather_inputs = property(timed("pre", inputs.fget))  # type: ignore[assignment, arg-type]
    FSDPParam.init_unsharded_param = timed("post", init)  # type: ignore[assignment, method-assign]
    try:
        yield spent
    finally:
        FSDPParam.all_gather_inputs, FSDPParam.init_unsharded_param = inputs, init  # type: ignore[method-assign]


def measure(form: str, count: int, size: int, device: torch.device) -> Figures:
    """Checks one form, then times it: us a parameter, ms a step."""
    model: Any = build(form, count, size, device)
    plain = [param.detach() for param in build("bf16", count, size, device).parameters()]
    starts: list[Tensor] = [whole(one._local_tensor) for one in plain]  # type: ignore[attr-defined]
    if form == "fp32":
        starts = values_of(form, model, None)
    check(form, model, starts)
    optimizer = optimizer_for(form, model)
    amaxes = amaxes_for(form, model)
    for _ in range(2):
        optimizer.step()
        if amaxes is not None:
            amaxes()
        check(form, model, values_of(form, model, optimizer))
    clock, figures = Clock(device), {}

    def gather() -> None:
        model.unshard()
        model.reshard()

    gc.collect()
    gc.disable()
    try:
        figures["gather"] = clock.median(gather) / count * 1e6
        with hooks_timed() as spent:
            each: dict[str, list[float]] = {name: [] for name in spent}

            def noted() -> None:
                spent.update(dict.fromkeys(spent, 0.0))
                gather()
                for name, sum_of in spent.items():
                    each[name].append(sum_of)

            clock.median(noted)
        figures |= {name: statistics.median(sums[clock.warm :]) / count * 1e6 for name, sums in each.items()}
        model.unshard()
        x = torch.ones(16, size, dtype=next(model.parameters()).dtype, device=device, requires_grad=True)
        figures["linear"] = clock.median(lambda: [layer(x) for layer in model]) / count * 1e6
        model.reshard()
        figures["step"] = clock.median(optimizer.step) * 1e3
        if amaxes is not None:
            figures["amaxes"] = clock.median(amaxes) * 1e3
    finally:
        gc.enable()
    names = sorted(figures)  # the slowest rank counts
    slowest = torch.tensor([figures[name] for name in names], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(names, slowest.tolist(), strict=True))


# ---------------------------------------------------------------------------------------------------------------- table
def table(runs: dict[str, list[Figures]]) -> Iterator[str]:
    """A line for each form: mean and spread of the runs."""
    heads = (
        f"{'gather us':>20}{'of bf16':>9}{'pre us':>20}{'post us':>16}{'linear us':>16}{'amaxes ms':>14}"
        f"{'step ms':>16}{'of fp32':>9}"
    )
    yield " " * 16 + heads
    means = {form: {name: statistics.mean([run[name] for run in of]) for name in of[0]} for form, of in runs.items()}
    for form, of in runs.items():
        cells = {}
        for name in COLUMNS:
            found = [run[name] for run in of if name in run]
            cells[name] = f"{statistics.mean(found):.2f} ({max(found) - min(found):.2f})" if found else "-"
        gathers = f"{means[form]['gather'] / means['bf16']['gather']:.2f}" if "bf16" in means else "-"
        steps = f"{means[form]['step'] / means['fp32']['step']:.2f}" if "fp32" in means else "-"
        yield (
            f"{form:<16}{cells['gather']:>20}{gathers:>9}{cells['pre']:>20}{cells['post']:>16}{cells['linear']:>16}"
            f"{cells['amaxes']:>14}{cells['step']:>16}{steps:>9}"
        )


def start() -> torch.device:
    """Joins the group of all ranks, or makes one of this process alone."""
    cuda, alone = torch.cuda.is_available(), "RANK" not in os.environ
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    options: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
    if cuda:
        torch.cuda.set_device(device)
        options["device_id"] = device
    dist.init_process_group("nccl" if cuda else "gloo", **options)
    return device


def main() -> None:
    """Checks and times all forms twice; rank 0 prints a table last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=int, default=64)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--forms", nargs="+", default=FORMS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = start()
    first, runs = dist.get_rank() == 0, {}
    for number in range(2):
        for form in args.forms:
            try:
                figures = measure(form, args.weights, args.size, device)
            except ImportError as error:
                if first and number == 0:
                    print(f"{form} is left out: {error}", flush=True)
                continue
            runs.setdefault(form, []).append(figures)
            gc.collect()
            if first:
                found = ", ".join(f"{name} {figure:.2f}" for name, figure in figures.items())
                print(f"run {number + 1}, {form}: {found}", flush=True)
    if first:
        card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        ranks = f"{dist.get_world_size()} ranks, torch {torch.__version__}"
        print(f"\n{card}, {ranks}, {args.weights} weights of {args.size}²")
        print("\n".join(table(runs)), flush=True)
        if args.json is not None:
            ran = {"kind": "host", "device": card, "torch": torch.__version__, "world": dist.get_world_size()}
            found = {**ran, "runs": runs}
            args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
