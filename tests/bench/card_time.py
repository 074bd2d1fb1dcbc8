"""Where a card's time goes in one step: kernels by class, by the operator that launched them and by its shapes.

A kernel of Inductor's has the names of its operators in its own. What eager operators launch is told by the operator,
by the function of autograd that called it and by the shapes of what it read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

# Of a kernel: the first class one of whose words is in its name, the operator that launched it or the function of
# autograd around that.
CLASSES = (
    ("all-gather", ("allgather", "all_gather")),
    ("reduce-scatter", ("reducescatter", "reduce_scatter", "rank_sum")),
    ("other collectives", ("nccl",)),
    ("gather's copies", ("split_with_sizes", "chunk_cat", "copies_kernel")),
    ("optimizer", ("multi_tensor", "adam", "foreach", "update_kernel")),
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("quantize, dequantize", ("quantize_kernel", "lay_out", "amax", "scalars_kernel", "layoutc::")),
    ("grouped products, low precision", ("scaled_grouped_mm",)),
    ("grouped products", ("grouped_mm", "groupedmm", "groupproblem")),
    ("products", ("gemm", "nvjet", "cutlass", "xmma", "cublas", "aten::mm", "aten::addmm")),
    ("loss", ("log_softmax", "nll_loss", "cross_entropy")),
    ("router", ("topk", "sort", "softmax", "histc", "cumsum", "scatter_gather", "radix", "bitonic")),
    ("permutation of tokens", ("index", "gather", "embedding")),
    ("SwiGLU", ("silu", "sigmoid")),
    ("norms", ("rsqrt", "rms_norm", "mean", "pow")),
    ("copies", ("memcpy", "memset", "copy", "fill")),
)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of time the spans cover together."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def recorded(step: Callable[[], Any], trace: Path | None = None) -> tuple[list[Any], list[Any]]:
    """The events of one step: those of the card, and those of the host with the kernels that each launched."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA, kinds.CPU], record_shapes=True) as profile:
        step()
        torch.cuda.synchronize()
    if trace is not None:
        profile.export_chrome_trace(str(trace))
    events = list(profile.events())
    cards = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    return cards, [e for e in events if e.device_type == torch.autograd.DeviceType.CPU and e.kernels]


def told(name: str, words: str = "") -> str:
    """The class of a kernel, whose operator and functions of autograd are in words."""
    for both in (name.lower(), f"{name} {words}".lower()):  # a kernel's own name says more than what called it
        for kind, parts in CLASSES:
            if any(part in both for part in parts):
                return kind
    return "other"


def table(cards: list[Any], hosts: list[Any], most: int = 80) -> dict[str, Any]:
    """Milliseconds of one step: of classes, idle, and the kernels that take most."""
    rows: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    left: dict[str, list[float]] = defaultdict(list)
    for event in cards:
        left[event.name].append(event.time_range.elapsed_us())
    for event in hosts:
        words, parent = [event.name], event.cpu_parent
        while parent is not None and len(words) < 8:
            words.append(parent.name)
            parent = parent.cpu_parent
        shapes = " ".join(str(list(shape)).replace(" ", "") for shape in event.input_shapes if shape)
        function = next((word.rpartition(": ")[2] for word in words if "evaluate_function" in word), "")
        for kernel in event.kernels:
            if left[kernel.name]:
                left[kernel.name].pop()
            key = (
                told(kernel.name, " ".join(words)),
                kernel.name[:120],
                f"{event.name} {function}"[:120],
                shapes[:120],
            )
            rows[key].append(kernel.duration)
    for name, times in left.items():
        if times:
            rows[told(name), name[:120], "", ""] += times
    classes: dict[str, float] = defaultdict(float)
    for (kind, *_), times in rows.items():
        classes[kind] += sum(times) / 1e3
    spans = [(e.time_range.start, e.time_range.end) for e in cards]
    busy, length = covered(spans), max(end for _, end in spans) - min(start for start, _ in spans)
    own = covered((e.time_range.start, e.time_range.end) for e in cards if "nccl" not in e.name.lower())
    costly = sorted(rows.items(), key=lambda row: -sum(row[1]))[:most]
    return {
        "classes": {kind: round(ms, 2) for kind, ms in sorted(classes.items(), key=lambda one: -one[1])},
        "length": round(length / 1e3, 2),
        "idle": round((length - busy) / 1e3, 2),
        "collectives alone": round((busy - own) / 1e3, 2),
        "kernels": [[*key, len(times), round(sum(times) / 1e3, 3)] for key, times in costly],
    }


def allocated(step: Callable[[], Any], most: int = 25) -> list[list[Any]]:
    """What one step has allocated where that is most, beside what lived before: [bytes of one, how many, by whom], by
    the bytes of all that are alike. What backward allocates on its own thread has no lines of Python."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    step()
    torch.cuda.synchronize()
    device = torch.cuda.current_device()
    events = torch.cuda.memory._snapshot()["device_traces"][device]
    torch.cuda.memory._record_memory_history(enabled=None)
    live: dict[int, dict[str, Any]] = {}
    now = highest = at = 0
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            live[event["addr"]] = event
            now += event["size"]
        elif event["action"] == "free_requested" and live.pop(event["addr"], None) is not None:
            now -= event["size"]
        if now > highest:
            highest, at = now, index
    live = {}
    for event in events[: at + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)
    alike: dict[tuple[int, str], int] = defaultdict(int)
    for event in live.values():
        frames = [f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in event.get("frames", [])]
        alike[event["size"], " < ".join(frames[:4])] += 1
    found = sorted(alike.items(), key=lambda one: -one[0][0] * one[1])[:most]
    return [[highest, len(live), "all"], *([size, count, by] for (size, by), count in found)]
