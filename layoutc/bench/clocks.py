"""Clocks for the benchmarks: two for a card, one for the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], object]
Make = Callable[[], Work]  # makes a piece of work with its own inputs and outputs
CALLS, ROUNDS = 500, 5


def flushed(work: Work) -> float:
    """Microseconds with L2 flushed before every run. Includes the host, and writing back what the flush left in L2."""
    from triton.testing import do_bench

    return float(do_bench(work, warmup=15, rep=60, return_mode="median")) * 1e3


def rotated(make: Make, nbytes: int) -> float:
    """Microseconds on the card: in a CUDA graph, over sets of inputs and outputs of more than three times L2 in all."""
    cache = torch.cuda.get_device_properties().L2_cache_size
    works = [make() for _ in range(max(2, -(-3 * cache // nbytes)))]
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for work in works:
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [work() for work in works]
    times: list[float] = []
    for _ in range(25):
        first, last = _event(), _event()
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 1e3 / len(works))
    del kept
    return statistics.median(times[5:])


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def copy_rates(shape: tuple[int, int]) -> tuple[float, float]:
    """Bytes per microsecond, read and written, of a bf16 copy of this shape: by `rotated` and by `flushed`."""
    nbytes = 4 * shape[0] * shape[1]

    def make() -> Work:
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        y = torch.empty_like(x)
        return lambda: y.copy_(x)

    rates = nbytes / rotated(make, nbytes), nbytes / flushed(make())
    torch.cuda.empty_cache()
    return rates


def host(call: Work) -> float:
    """Microseconds of the host for a call, the least of some rounds. A card is idle before each and not waited for."""
    for _ in range(20):
        call()
    times = []
    for _ in range(ROUNDS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(times)
