"""Where the host's time goes in a step: timers around its phases, FSDP2's hooks and compiled graphs.

A sampling profiler slows the main thread two to three times as much as autograd's, where backward runs. Timers around
few calls do not.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from layoutc.runtime.fsdp2.steady_group import SteadyGroup
from layoutc.runtime.torch_private import in_backward

HOOKS = ("pre_forward", "post_forward", "pre_backward", "post_backward")  # of FSDP2's groups

_spent: dict[str, float] = defaultdict(float)  # ms, and how many calls, since they were taken
_calls: dict[str, int] = defaultdict(int)
_open: set[str] = set()  # a group's hook may call FSDP2's own
_measures = False


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Adds what passes inside to a phase, where `measure` was called; inside of itself it adds nothing."""
    if name in _open:
        yield
        return
    _open.add(name)
    began = time.perf_counter()
    try:
        yield
    finally:
        _open.discard(name)
    if _measures:
        _spent[name] += (time.perf_counter() - began) * 1e3
        _calls[name] += 1


def measure() -> None:
    """Has FSDP2's hooks, and graphs that Inductor compiled, add what they take."""
    global _measures
    _measures = True
    from torch._inductor.output_code import CompiledFxGraph
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    for name in HOOKS:
        for group in (SteadyGroup, FSDPParamGroup):
            if name in vars(group):
                setattr(group, name, _timed(f"FSDP2 {name}", getattr(group, name)))
    graph = CompiledFxGraph.__call__

    def call(self: Any, inputs: Any) -> Any:
        with phase("graphs of backward" if in_backward() else "graphs of forward"):
            return graph(self, inputs)

    CompiledFxGraph.__call__ = call  # type: ignore[method-assign]


def _timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with phase(name):
            return function(*args, **kwargs)

    return run


def taken(steps: int) -> dict[str, tuple[float, float]]:
    """Of each phase ms and calls of a step, since this was asked last."""
    found = {name: (ms / steps, _calls[name] / steps) for name, ms in _spent.items()}
    _spent.clear()
    _calls.clear()
    return found


def table(rows: dict[str, list[dict[str, tuple[float, float]]]]) -> str:
    """Medians over turns: a column for each variant, a row for each phase; calls in brackets."""
    names = sorted({name for turns in rows.values() for turn in turns for name in turn})
    lines = ["host, ms of a step (calls)".ljust(28) + "".join(f"{variant[-26:]:>28}" for variant in rows)]
    for name in names:
        cells = []
        for turns in rows.values():
            values = [turn.get(name, (0.0, 0.0)) for turn in turns]
            cells.append(f"{statistics.median(ms for ms, _ in values):.2f} ({values[-1][1]:.0f})".rjust(28))
        lines.append(name.ljust(28) + "".join(cells))
    return "\n".join(lines)
