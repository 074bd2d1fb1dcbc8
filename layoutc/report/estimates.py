"""Notes on what estimates of training steps are based on."""

from __future__ import annotations

from collections.abc import Sequence

from layoutc.estimate.machine import H200, HOST_MEMORY, SOCKETS, Machine
from layoutc.estimate.state import Wire


def measured(machine: Machine, host: float | None = None, together: int = 1) -> list[str]:
    """Notes on a machine. host: its host time relative to measured hosts, if known. together: back-to-back steps."""
    own = "as on a few hosts, which differed by up to 2 (--host)"
    if host is not None:
        own = f"{host:.2f} times as long as on those that were measured"
    card = machine.extrapolated or f"an {machine.name} is an H200 with slower memory"
    slower = f"{1 + machine.interference:.2f}"
    return [
        "measured: steps on 1, 2 and 4 H200s by NVLink, on 2 over sockets and through host memory; else extrapolated",
        *([f"card: {machine.name}: {card}"] if machine.name != H200.name else []),
        f"links and products, attention too, slow one another by {slower} where they overlap: fitted, least certain",
        f"host: {own}; of compiled models, without --eager; none with --graph",
        *([f"a step is the mean of {together} in a row; constants are of steps that begin at rest"] * (together > 1)),
    ]


# Notes on weights that are dequantized on gather.
ON_GATHER = [
    "weights are dequantized on gather: after each gather, all of a group; their products take what those of bf16 do;",
    "gathered: their values; peak: with the codes until values are made of them, and with the tensor they travel in",
]


def exchanges(apart: Sequence[int], per_host: int, wire: Wire, within: str) -> list[str]:
    """Notes on exchanged gradients. apart: worlds whose shards span hosts; within: a mesh that avoids it."""
    notes = [
        "gradients are exchanged, of plain weights too; the time of the link has their copies and sums",
        f"an exchange reaches {SOCKETS.exchanged:.2f} of the bandwidth over sockets, {HOST_MEMORY.exchanged:.2f} "
        "through host memory, as measured; else all of it",
    ]
    if apart:
        worlds = ", ".join(f"{world:,}" for world in apart)
        notes += [
            f"on {worlds} cards hosts shard together, which exchange_gradients refuses without across_hosts=True:",
            f"a host of {per_host} sends up to {per_host * wire.sent.bits / 32:g} times what a ring does in fp32, "
            "which the time has",
            f"what works there: {within}",
        ]
    return notes
