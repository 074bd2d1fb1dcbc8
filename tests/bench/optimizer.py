"""The optimizer's step on one card: torch's fused AdamW and today's requantization beside layoutc.AdamW, by turns.

    python tests/bench/optimizer.py [--recipes fp8_block,mxfp8] [--rounds 15] [--json FILE]

Five weights of 4096 x 14336. Times are of the card, by events around a step that the host has queued before it begins;
they are scaled to 2^28 parameters. First, some steps of small weights are compared with the reference byte for byte.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    import layoutc.recipes
except ImportError:  # a checkout that nothing is installed in
    link = Path(__file__).parents[2] / "layoutc" / "recipes"
    link.symlink_to(link.parent.parent / "generated")
    sys.path.insert(0, str(Path(__file__).parents[2]))
import layoutc

SHAPE, COUNT, UNIT = (4096, 14336), 5, 2**28
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    **{state: {"state": state} for state in ("8bit", "fp8", "4bit")},
    **{
        f"{form} masters, {state}": {"state": state, "masters": form}
        for form in ("bf16", "f24")
        for state in ("8bit", "fp8")
    },
}


def model(
    recipe: str | None, shapes: list[tuple[int, int]], device: str, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Weights of random values, the same on any device; quantized if there is a recipe."""
    generator, layers = torch.Generator().manual_seed(0), nn.Module()
    for index, (m, k) in enumerate(shapes):
        layer = nn.Linear(k, m, bias=False, device="meta", dtype=dtype)
        small = m * k < 1 << 22
        values = torch.randn(m, k, generator=generator) if small else torch.randn(m, k, device=device)
        layer.weight = nn.Parameter((values * 0.02).to(device, dtype))
        layers.add_module(str(index), layer)
    if recipe:
        layoutc.quantize_(layers, recipe)
    return layers


def give_gradients(layers: nn.Module, step: int, device: str, dtype: torch.dtype = torch.float32) -> None:
    """The same on any device."""
    generator = torch.Generator().manual_seed(step)
    for weight in layers.parameters():
        weight.grad = (torch.randn(weight.shape, generator=generator) * 0.01).to(device, dtype)


def bytes_of(layers: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Planes and states."""
    found: dict[str, Tensor] = {}
    for name, param in layers.named_parameters():
        held = {"": param.detach(), **optimizer.state[param]}
        for key, value in held.items():
            planes = value.planes() if hasattr(value, "planes") else {"": value}
            found |= {f"{name} {key} {plane}": one.cpu().reshape(-1).view(torch.uint8) for plane, one in planes.items()}
    return found


def check(recipe: str, form: dict[str, Any]) -> str:
    """Steps on the card, one of them replayed as a graph, against the reference on a CPU."""
    from layoutc.runtime.optim import rules

    shapes, sqrt = [(512, 1024), (256, 512), (384, 1280)], rules.sqrt
    sides = {}
    for device in ("cpu", "cuda"):
        layers = model(recipe, shapes, device)
        optimizer = layoutc.AdamW(layers.parameters(), lr=torch.tensor(0.01, device=device), weight_decay=0.1, **form)
        rules.sqrt = rules.exact_sqrt
        give_gradients(layers, 0, device)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
        for step in (1, 2):
            grads = [weight.grad for weight in layers.parameters()]
            give_gradients(layers, step, device)
            for weight, grad in zip(layers.parameters(), grads, strict=True):
                grad.copy_(weight.grad)
                weight.grad = grad
            if device == "cuda":
                graph.replay()
            else:
                optimizer.step()
        sides[device] = bytes_of(layers, optimizer)
    rules.sqrt = sqrt
    wrong = {name: int((one != sides["cuda"][name]).sum()) for name, one in sides["cpu"].items()}
    wrong = {name: count for name, count in wrong.items() if count}
    return f"differs: {wrong}" if wrong else "the reference's bytes"


# -------------------------------------------------------------------------------------------------------------- timing
def timed(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Median, least and most milliseconds on the card of each, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(rounds + 3):
        for name, work in works.items():
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(12_000_000)  # meanwhile the host queues the step
            first.record()
            work()
            last.record()
            last.synchronize()
            if round_ >= 3:
                times[name].append(first.elapsed_time(last))
    return {name: (statistics.median(one), min(one), max(one)) for name, one in times.items()}


def stepping(make: Callable[[Any], Any], recipe: str | None, dtype: torch.dtype = torch.float32) -> Any:
    """A model with gradients and its optimizer's step, and the bytes a parameter that it moves at least."""
    layers = model(recipe, [SHAPE] * COUNT, "cuda", dtype)
    for weight in layers.parameters():
        weight.grad = (torch.randn(SHAPE, device="cuda") * 0.01).to(dtype)
    optimizer = make(layers.parameters())
    optimizer.step()
    moved = 0
    for param in layers.parameters():
        planes = list(param.planes().values()) if hasattr(param, "planes") else [param]
        moved += sum(one.nbytes for one in planes) if hasattr(param, "planes") else 2 * param.nbytes
        moved += param.grad.nbytes
        for value in optimizer.state[param].values():
            held = value.planes().values() if hasattr(value, "planes") else [value]
            moved += sum(2 * one.nbytes for one in held)
    return layers, optimizer, moved / (SHAPE[0] * SHAPE[1] * COUNT)


def peers() -> dict[str, Callable[[Any], Any]]:
    """torchao's, where it is installed."""
    try:
        from torchao.optim import AdamW8bit, AdamWFp8
    except ImportError:
        return {}
    return {
        "torchao AdamW8bit": lambda params: AdamW8bit(params, lr=1e-3),
        "torchao AdamWFp8": lambda params: AdamWFp8(params, lr=1e-3),
    }


def main() -> None:
    """Prints tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipes", default="fp8_block,mxfp8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=110, help="nothing new begins after so many")
    parser.add_argument("--json")
    options = parser.parse_args()
    start, found = time.perf_counter(), []
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    numel = SHAPE[0] * SHAPE[1] * COUNT
    source = torch.randn(UNIT, device="cuda")
    target = torch.empty_like(source)
    ((copy_ms, *_),) = timed({"copy": partial(target.copy_, source)}, 10).values()
    rate = 8 * UNIT / copy_ms / 1e6
    print(f"copy {rate:.0f} GB/s")
    del source, target

    def late() -> bool:
        return time.perf_counter() - start > options.seconds

    def report(works: dict[str, tuple[Any, Any, float]]) -> None:
        steps = {name: one[1].step for name, one in works.items()}
        for name, (median, least, most) in timed(steps, options.rounds).items():
            scale, moved = UNIT / numel, works[name][2]
            share = moved * numel / (median * 1e6) / rate
            row = {"name": name, "ms": median * scale, "least": least * scale, "most": most * scale, "bytes": moved}
            found.append({**row, "share": share})
            print(
                f"{name:44} {median * scale:6.2f} ms ({least * scale:.2f} to {most * scale:.2f}), {moved:5.2f} B, "
                f"{share:.2f} of the copy, {time.perf_counter() - start:.0f} s",
                flush=True,
            )

    def fused(params: Any, **rest: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(params, lr=1e-3, fused=True, **rest)

    def ours(params: Any, **form: Any) -> Any:
        return layoutc.AdamW(params, lr=1e-3, **form)

    for recipe in options.recipes.split(","):
        for name, form in FORMS.items():
            if not late():
                print(f"{recipe}, {name}: {check(recipe, form)} ({time.perf_counter() - start:.0f} s)", flush=True)
    report({"torch AdamW(fused=True), fp32, no codes": stepping(fused, None)})
    torch.cuda.empty_cache()
    for recipe in options.recipes.split(","):
        if late():
            break
        works = {
            f"{recipe}: MasterWeights(AdamW, fused=True)": stepping(
                lambda params: layoutc.MasterWeights(torch.optim.AdamW, params, lr=1e-3, fused=True), recipe
            )
        }
        for name, form in FORMS.items():
            works[f"{recipe}: layoutc.AdamW, {name}"] = stepping(lambda params, form=form: ours(params, **form), recipe)
        form = FORMS["bf16 masters, 8bit"]
        works[f"{recipe}: the same, bf16 gradients"] = stepping(
            lambda params, form=form: ours(params, **form), recipe, torch.bfloat16
        )
        report(works)
        del works
        torch.cuda.empty_cache()
    for name, make in peers().items():
        if not late():
            report({f"{name}, bf16 weights": stepping(make, None, torch.bfloat16)})
            torch.cuda.empty_cache()
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
