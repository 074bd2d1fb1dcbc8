"""What the link between ranks carries: `--within` for `layoutc estimate` and `layoutc plan`.

    torchrun --nproc-per-node 2 tests/bench/links.py [--mib 4 16 64 256] [--json FILE]

All-gathers, reduce-scatters in fp32 and exchanges (all-to-all, as layoutc.exchange_gradients sends) of what FSDP2 sends
of groups of so many MiB: first what they give is compared with what they must give, then each is timed, from when all
ranks are at rest until the slowest is done; the median of the runs. Of all sizes, least squares of relative residuals
find the bandwidth and what a collective takes without bytes; and the share of the all-gathers' bandwidth that the
other two reach. Links of one host can be slowed: `NCCL_P2P_DISABLE=1`, and `NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo` with `NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4` or without.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

RUNS, WARM = 12, 3


def collectives(mib: int, device: torch.device) -> dict[str, tuple[Callable[[], object], Tensor, float]]:
    """Of each kind: what runs it, what it writes, and the value that this must have. Each rank holds `mib` MiB whole:
    it receives, reduces or sends the other ranks' parts of them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = mib * 2**20
    part, values = torch.full((whole // world // 4,), 1.0, device=device), torch.ones(whole // 4, device=device)
    gathered, reduced = torch.zeros_like(values)[: part.numel() * world], torch.zeros_like(part)
    values = values[: part.numel() * world]
    received, own = torch.zeros_like(values), values * (rank + 1)
    return {
        "all-gather": (lambda: dist.all_gather_into_tensor(gathered, part), gathered, 1.0),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(reduced, values), reduced, float(world)),
        "exchange": (lambda: dist.all_to_all_single(received, own), received, (world + 1) / 2),
    }


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds on the slowest rank."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(WARM + RUNS):
        dist.barrier()
        wait()
        began = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(times[WARM:]), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def fitted(nbytes: list[float], seconds: list[float]) -> tuple[float, float]:
    """Bandwidth, bytes a second, and seconds without bytes: of at least two sizes."""
    lines = np.array([[1.0, size] for size in nbytes]) / np.array(seconds)[:, None]
    (alone, inverse), *_ = np.linalg.lstsq(lines, np.ones(len(lines)), rcond=None)
    return float(1 / inverse), float(alone)


def main() -> None:
    """Prints the table, and what to pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", nargs="+", type=int, default=[4, 16, 64, 256])
    parser.add_argument("--json")
    options = parser.parse_args()
    cards = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cards else torch.device("cpu")
    if cards:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cards else "gloo")
    world = dist.get_world_size()
    seconds: dict[str, list[float]] = {}
    for mib in options.mib:
        for kind, (run, made, mean) in collectives(mib, device).items():
            run()
            found = float(made.double().mean())
            assert found == mean, f"{kind} of {mib} MiB gave {found}, not {mean}"
            seconds.setdefault(kind, []).append(timed(run, device))
    if dist.get_rank() == 0:
        moved = [mib * 2**20 * (world - 1) / world for mib in options.mib]
        links = {kind: fitted(moved, times) for kind, times in seconds.items()}
        print(f"{'ms':16}" + "".join(f"{f'{mib} MiB':>10}" for mib in options.mib) + "   GB/s  us without bytes")
        for kind, times in seconds.items():
            bandwidth, alone = links[kind]
            row = "".join(f"{one * 1e3:10.3f}" for one in times)
            print(f"{kind:16}{row}{bandwidth / 1e9:7.1f}  {alone * 1e6:.0f}")
        bandwidth = links["all-gather"][0]
        shares = {kind: links[kind][0] / bandwidth for kind in ("reduce-scatter", "exchange")}
        print(", ".join(f"{kind}s reach {share:.2f} of it" for kind, share in shares.items()))
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                name = torch.cuda.get_device_name() if cards else "cpu"
                json.dump({"kind": "links", "device": name, "world": world, "mib": options.mib, **seconds}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
