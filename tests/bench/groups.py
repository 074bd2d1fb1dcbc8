"""One launch for many weights against a launch each, on this card: checked byte for byte, then timed.

    python tests/bench/groups.py

Two figures for each: `us`, the median of triton.testing.do_bench, host included, and `card us`, with all of it queued
before the card begins. L2 is flushed before every run, and outputs are allocated beforehand.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median as middle
from typing import Any

import torch
import triton
from torch import Tensor

from layoutc.runtime.kernels import amaxes
from layoutc.runtime.quantize import weights
from layoutc.runtime.quantize.weights import requantize_batch_

CASES = [
    ("mxfp8", ("rowwise",)),
    ("mxfp8", ("rowwise", "columnwise")),
    ("nvfp4", ("rowwise",)),
    ("fp8_current", ("rowwise",)),
    ("fp8_block", ("rowwise",)),
]
NAMES = ("mxfp8", "nvfp4", "fp8_current", "fp8_block")
COUNT, SHAPE = 64, (512, 4096)
MIX = [(4096, 4096), (4096, 14336), (1024, 4096)]
Work = Callable[[], object]
Figures = dict[str, Any]


def recipe(name: str) -> Any:
    """The package of a recipe."""
    return importlib.import_module(f"layoutc.recipes.{name}")


def kernels(name: str) -> Any:
    """The kernels of a recipe."""
    return importlib.import_module(f"layoutc.recipes.{name}.kernels").KERNELS


# --------------------------------------------------------------------------------------------------------------- clocks
def with_host(work: Work) -> float:
    """Median in us, of the host or the card, whichever is slower."""
    return float(triton.testing.do_bench(work, warmup=25, rep=100, return_mode="median")) * 1e3


def on_card(work: Work, wait: int) -> float:
    """Median in us of the card alone, which sleeps for `wait` us until everything is queued."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    took = []
    for _ in range(15):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2000 * wait)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        took.append(start.elapsed_time(end) * 1e3)
    return middle(took)


def timed(what: str, nbytes: int, before: Work, after: Work, rows: list[Figures]) -> None:
    """Notes one comparison, and prints it."""
    old, new = with_host(before), with_host(after)
    card_old, card_new = on_card(before, max(1000, int(3 * old))), on_card(after, 2000)
    found = {"what": what, "before_us": old, "us": new, "before_card_us": card_old, "card_us": card_new}
    found |= {"times": old / new, "tb_s": nbytes / card_new / 1e6}
    rows.append(found)
    print(line(found), flush=True)


def line(row: Figures) -> str:
    """One row of the table."""
    return (
        f"{row['what']:46} {row['before_us']:9.1f} -> {row['us']:8.1f} us ({row['times']:5.1f} x)   card "
        f"{row['before_card_us']:8.1f} -> {row['card_us']:7.1f} us   {row['tb_s']:5.2f} TB/s"
    )


# --------------------------------------------------------------------------------------------------------------- checks
def same(a: Tensor, b: Tensor) -> bool:
    """Equal bytes."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def shared(cls: Any, xs: Sequence[Tensor]) -> list[Tensor] | None:
    """The amax of each, where the recipe shares one."""
    return [cls.shared_amax(x) for x in xs] if cls.LAYOUT.shares_amax else None


def quantize_batch(name: str, dtype: torch.dtype, orientations: tuple[str, ...], rows: list[Figures]) -> None:
    """Grouped quantize against a loop of launches into given planes, amaxes given."""
    xs = [torch.randn(SHAPE, device="cuda", dtype=dtype) for _ in range(COUNT)]
    amaxes = shared(recipe(name).Tensor, xs)
    expected = [
        kernels(name).quantize(x, amaxes[index] if amaxes else None, orientations) for index, x in enumerate(xs)
    ]
    outs = [{plane: torch.full_like(stored, 0x5A) for plane, stored in one.items()} for one in expected]
    packed = torch.cat([one.flatten() for one in amaxes]).split(1) if amaxes else None
    kernels(name).quantize_batch(xs, packed, orientations, outs)
    assert all(same(one[p], out[p]) for one, out in zip(expected, outs, strict=True) for p in one), name

    def loop() -> None:
        for index, x in enumerate(xs):
            kernels(name).quantize(x, amaxes[index] if amaxes else None, orientations, outs[index])

    nbytes = sum(t.numel() * t.element_size() for t in [*xs, *(p for out in outs for p in out.values())])
    what = f"quantize {name} {'+'.join(orientations)} {str(dtype)[6:]}"
    timed(what, nbytes, loop, lambda: kernels(name).quantize_batch(xs, packed, orientations, outs), rows)


def batch_amax(shapes: list[tuple[int, int]], dtype: torch.dtype, rows: list[Figures]) -> None:
    """Grouped amax against torch's grouped norm, and against a launch each."""
    xs = [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
    expected = torch.cat([amaxes.matrix_amax(x, None) for x in xs])
    assert same(expected, amaxes.batch_amax(xs))
    assert same(expected, torch.stack(torch._foreach_norm(xs, ord=torch.inf)).float())
    nbytes = sum(x.numel() * x.element_size() for x in xs)
    label = f"{len(xs)} x {shapes[0][0]}x{shapes[0][1]}" if len(set(shapes)) == 1 else f"{len(xs)} mixed"
    which = f"{label} {str(dtype)[6:]}"
    foreach = lambda: torch._foreach_norm(xs, ord=torch.inf)  # noqa: E731
    timed(f"amax {which}, from _foreach_norm", nbytes, foreach, lambda: amaxes.batch_amax(xs), rows)
    loop = lambda: [amaxes.matrix_amax(x, None) for x in xs]  # noqa: E731
    timed(f"amax {which}, from a launch each", nbytes, loop, lambda: amaxes.batch_amax(xs), rows)


def requantize(names: Sequence[str], rows: list[Figures]) -> None:
    """A step's requantization of 64 weights from fp32 masters, one process, against what it was: a weight at a time."""
    values = [torch.randn(SHAPE, device="cuda") for _ in range(COUNT)]
    targets = [recipe(names[index % len(names)]).quantize(x * 2) for index, x in enumerate(values)]
    others = [copy.deepcopy(target) for target in targets]
    batch = list(zip(targets, values, strict=True))

    def before() -> None:
        sharing = [(t, x) for t, x in zip(others, values, strict=True) if t.LAYOUT.shares_amax]
        found: dict[int, Tensor] = {}
        if sharing:
            packed = torch.cat([type(t).shared_amax(x).reshape(-1) for t, x in sharing])
            found = {id(t): piece for (t, _), piece in zip(sharing, torch.split(packed, 1), strict=True)}
        for target, x in zip(others, values, strict=True):
            weights.quantize(type(target), x, out=target, amax=found.get(id(target)))

    for _ in range(2):
        before()
        requantize_batch_(batch, [])
        for target, other in zip(targets, others, strict=True):
            assert all(same(stored, target.planes()[plane]) for plane, stored in other.planes().items()), names
    held = [plane for target in targets for plane in target.planes().values()]
    read = sum(x.numel() * 4 * (2 if target.LAYOUT.shares_amax else 1) for target, x in batch)
    nbytes = read + sum(plane.numel() * plane.element_size() for plane in held)
    timed(f"requantize {'+'.join(names)}", nbytes, before, lambda: requantize_batch_(batch, []), rows)


def main() -> None:
    """Checks and times everything; prints a table last, and writes groups.json into $OUT."""
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    rows: list[Figures] = []
    for dtype in (torch.bfloat16, torch.float32):
        for name, orientations in CASES:
            quantize_batch(name, dtype, orientations, rows)
        batch_amax([SHAPE] * COUNT, dtype, rows)
        batch_amax([MIX[index % 3] for index in range(COUNT)], dtype, rows)
        torch.cuda.empty_cache()
    for names in (*((name,) for name in NAMES), ("fp8_delayed",), (*NAMES, "fp8_delayed")):
        requantize(names, rows)
    print(f"\n{COUNT} weights of {SHAPE[0]} x {SHAPE[1]}:")
    for row in rows:
        print(line(row))
    if out := os.environ.get("OUT"):
        Path(out, "groups.json").write_text(json.dumps(rows), encoding="utf-8")
    sys.exit(0)


if __name__ == "__main__":
    main()
