"""Simulates a card's streams, compute and links, in FSDP2's order: what overlaps, and when a step ends.

A task starts when its stream is free, the tasks it waits for have started or ended, and the host has issued it. FSDP2
of torch 2.11 to 2.14 (FSDPParamGroup) overlaps the gather of the next group with the compute of this one, and the
reduction of this group's gradients with the next group's backward, with one reduce-scatter in flight. Gathers and
reduce-scatters share one communicator, which runs them in the order of issue. All-reduces among replicas have a
separate stream and communicator, and only the optimizer waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Literal

from layoutc.ints.sizes import cdiv

Edge = Literal["start", "end"]
Stream = Literal["compute", "link", "replicas"]
STREAMS: tuple[Stream, ...] = ("compute", "link", "replicas")


@dataclass(frozen=True)
class Task:
    """A stream's work: its seconds alone, the tasks whose start or end it waits for, and when the host issues it.

    slowed: the share of it that slows the other stream and is slowed by it.
    """

    name: str
    stream: Stream
    seconds: float
    after: tuple[tuple[str, Edge], ...] = ()
    issued: float = 0.0
    slowed: float = 1.0


@dataclass(frozen=True)
class GroupTimes:
    """Seconds of one FSDP group's work, each part alone.

    memory_forward, memory_backward: the memory-bound part of forward and backward.
    """

    gather_forward: float
    forward: float
    gather_backward: float
    backward: float
    reduce: float
    all_reduce: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0
    memory_forward: float = 0.0
    memory_backward: float = 0.0


@dataclass(frozen=True)
class Times:
    """When a run ended, how long compute and a link overlapped, and each task's start and end."""

    total: float
    overlapped: float
    spans: Mapping[str, tuple[float, float]]


MOST = 512  # the most groups that are simulated one by one


def together_if_many(groups: Sequence[GroupTimes]) -> Sequence[GroupTimes]:
    """At most MOST groups: merges neighbors if there are more, with the same sums."""
    each = cdiv(len(groups), MOST)
    if each == 1:
        return groups
    parts = [groups[at : at + each] for at in range(0, len(groups), each)]
    names = [one.name for one in fields(GroupTimes)]
    return [GroupTimes(**{name: sum(getattr(one, name) for one in some) for name in names}) for some in parts]


def run(tasks: Sequence[Task], interference: float = 0.0, disturbed: float = 1.0) -> Times:
    """Runs the tasks of each stream in order.

    interference: while compute and a link are busy with work that slows the other, each runs at 1 / (1 + interference)
    of its speed. disturbed: the share of that slowdown that links get, from 0 to 1. Raises ValueError on a deadlock.
    """
    queues = {stream: [task for task in tasks if task.stream == stream] for stream in STREAMS}
    at = dict.fromkeys(STREAMS, 0)
    active: dict[Stream, tuple[Task, float]] = {}
    started: dict[str, float] = {}
    ended: dict[str, float] = {}
    now = overlapped = 0.0
    while any(at[stream] < len(queues[stream]) for stream in STREAMS) or active:
        waiting = []
        for _ in STREAMS:  # one's start may unblock the other
            for stream in STREAMS:
                if stream in active or at[stream] == len(queues[stream]):
                    continue
                task = queues[stream][at[stream]]
                if all(name in (started if edge == "start" else ended) for name, edge in task.after):
                    if task.issued <= now:
                        active[stream], started[task.name] = (task, task.seconds), now
                        at[stream] += 1
                    else:
                        waiting.append(task.issued)
        if not active and not waiting:
            raise ValueError(f"tasks wait for one another: {[q[at[s]].name for s, q in queues.items() if q[at[s] :]]}")
        both = "compute" in active and len(active) > 1
        slower = interference * prod(task.slowed for task, _ in active.values()) if both else 0.0
        pace = {one: 1 / (1 + slower * (1 if one == "compute" else disturbed)) for one in STREAMS}
        steps = [left / pace[stream] for stream, (_, left) in active.items()] + [issued - now for issued in waiting]
        step = min(steps)
        overlapped += step if both else 0.0
        now += step
        for stream, (task, left) in list(active.items()):
            if left / pace[stream] <= step:
                ended[task.name] = now
                del active[stream]
            else:
                active[stream] = (task, left - step * pace[stream])
    return Times(now, overlapped, {name: (started[name], ended[name]) for name in started})


def tasks_of(groups: Sequence[GroupTimes], optimizer: float = 0.0) -> list[Task]:
    """An FSDP2 step over the groups, in the host's issue order. Each group is gathered twice."""
    tasks: list[Task] = []
    host = 0.0
    last = len(groups) - 1
    for i, group in enumerate(groups):
        # The buffer of the gather before the last is free once that group's copy-out is done.
        after: tuple[tuple[str, Edge], ...] = ((f"forward {i - 2}", "start"),) if i > 1 else ()
        tasks.append(Task(f"gather {i}", "link", group.gather_forward, after, host))
        host += group.host_forward
        slowed = _slowed(group.forward, group.memory_forward)
        tasks.append(Task(f"forward {i}", "compute", group.forward, ((f"gather {i}", "end"),), host, slowed))
    for i in range(last, -1, -1):
        if i == last:
            tasks.append(Task(f"gather again {i}", "link", groups[i].gather_backward, ((f"forward {i}", "end"),), host))
        host += groups[i].host_backward
        needs: list[tuple[str, Edge]] = [(f"gather again {i}", "end")]
        if i + 2 <= last:  # the input is kept until it is done; the next is not allocated before
            needs.append((f"reduce {i + 2}", "end"))
        slowed = _slowed(groups[i].backward, groups[i].memory_backward)
        tasks.append(Task(f"backward {i}", "compute", groups[i].backward, tuple(needs), host, slowed))
        if i:
            gather = groups[i - 1].gather_backward
            tasks.append(Task(f"gather again {i - 1}", "link", gather, ((f"backward {i}", "start"),), host))
        tasks.append(Task(f"reduce {i}", "link", groups[i].reduce, ((f"backward {i}", "end"),), host))
        if groups[i].all_reduce:
            tasks.append(Task(f"all-reduce {i}", "replicas", groups[i].all_reduce, ((f"reduce {i}", "end"),), host))
    added: tuple[tuple[str, Edge], ...] = (("all-reduce 0", "end"),) if groups[0].all_reduce else ()
    tasks.append(Task("optimizer", "compute", optimizer, (("reduce 0", "end"), *added), host))
    return tasks


def in_a_row(tasks: Sequence[Task], steps: int, host: float) -> list[Task]:
    """The tasks of `steps` back-to-back steps, where nothing synchronizes with the card before the last one ends.

    host: its seconds per step; it goes on to the next step at once. Gathers of weights wait for the optimizer's step.
    """
    if steps == 1:
        return list(tasks)
    made: list[Task] = []
    for step in range(steps):
        for task in tasks:
            after = tuple((f"{name} of step {step}", edge) for name, edge in task.after)
            if step and task.name == "gather 0":
                after = (*after, (f"optimizer of step {step - 1}", "end"))
            made.append(
                replace(task, name=f"{task.name} of step {step}", after=after, issued=task.issued + step * host)
            )
    return made


def _slowed(seconds: float, memory: float) -> float:
    """`Task.slowed` of work with `memory` memory-bound seconds: only products need the SMs that collectives occupy."""
    return 1 - memory / seconds if seconds else 1.0
