"""How often two ranks that trained over gloo abort when Python ends, with layoutc and without.

    python tests/programs/gloo_at_exit.py --runs 100             # torch alone, layoutc imported, layoutc trained with
    python tests/programs/gloo_at_exit.py --runs 30 --nice 19    # the same where gloo's threads yield to all others
    python tests/programs/gloo_at_exit.py --waiting              # a thread of gloo waits for the GIL when Python ends

A run is two processes, forked from one that has imported all. They train small models, call destroy_process_group and
end. What holds the models' mesh keeps the group, and so gloo's threads. One of these that asks for the GIL once Python
ends is killed before Python 3.14, and the process says "terminate called without an active exception".
"""

from __future__ import annotations

import argparse
import atexit
import mmap
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import layoutc

USES = ("torch", "trained", "trained, nothing at exit")
HELD: list[dist.ProcessGroup | None] = []
DONE = mmap.mmap(-1, 1)  # a byte of both ranks; reading it needs no GIL to be let go


def train(use: str, recipe: str, seed: int, sharded: bool = True) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    if use != "torch":
        layoutc.quantize_(model, recipe)
    for module in (*model, model) if sharded else ():
        fully_shard(module)
    make = torch.optim.AdamW if use == "torch" else lambda params: layoutc.MasterWeights(torch.optim.AdamW, params)
    optimizer = make(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def yielding(nice: int, core: int) -> None:
    """Gloo's threads run where nobody else wants this rank's core."""
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), {core % (os.cpu_count() or 1)})
        if (task / "comm").read_text().strip() == "pt_gloo_runloop":
            os.setpriority(os.PRIO_PROCESS, int(task.name), nice)


def waits_for_the_gil(rank: int, store: dist.Store) -> None:
    """Rank 0 ends while its thread of gloo waits for the GIL, with tensors of a collective that rank 1 has done."""
    HELD.append(dist.group.WORLD)
    if rank:
        store.wait(["begun"])
        dist.all_reduce(torch.ones(1))
        DONE[0] = 1
        return
    DONE[0] = 0
    sys.setswitchinterval(100)  # so that nobody takes the GIL from what computes
    dist.all_reduce(torch.ones(1), async_op=True)
    store.set("begun", "")
    while not DONE[0]:
        pass
    until = time.thread_time() + 0.5  # in which the thread gets as far as the GIL
    while time.thread_time() < until:
        pass


def rank_of(rank: int, file: Path, use: str, args: argparse.Namespace) -> None:
    if use != "torch":
        from layoutc.runtime.torch_private import gloo_threads

        if use == "trained, nothing at exit":
            atexit.unregister(gloo_threads.let_go)
    store = dist.FileStore(str(file), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if args.waiting:
        waits_for_the_gil(rank, store)
    else:
        if args.nice:
            yielding(args.nice, rank)
        for seed in range(args.models):
            train(use, args.recipe, seed)
    dist.destroy_process_group()


def codes(file: Path, use: str, args: argparse.Namespace) -> tuple[int, ...]:
    """The exit codes of two ranks. A rank does not return: it ends as the program does."""
    children = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            rank_of(rank, file, use, args)
            sys.exit()
        children.append(child)
    return tuple(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uses", nargs="+", default=USES, choices=USES)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--recipe", default="nvfp4")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--waiting", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    for number, use in enumerate(args.uses):
        train(use, args.recipe, 0, sharded=False)  # imports what each rank would import
        started = time.time()
        ends = Counter(codes(Path(folder, f"{number} {run}"), use, args) for run in range(args.runs))
        aborted = args.runs - ends[0, 0]
        print(
            f"{use}: {aborted} of {args.runs} runs aborted, {(time.time() - started) / args.runs:.1f} s each",
            flush=True,
        )


if __name__ == "__main__":
    main()
