"""Derives the speed of a host from a measured bf16 step.

Hosts with equal cards differed by more than 2x. All host times scale with the host's time for bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

from layoutc.estimate.machine import Machine

LEAST, MOST = 0.1, 3.0  # the range of factors to search; measured hosts had 0.54 to 1.23
DECIDES = 1.05  # a step shorter than this times the card's and the link's time is not host-bound


def factor_of(seconds: float, machine: Machine, step: Callable[[Machine], float]) -> float:
    """The host time relative to `machine`'s host, on a host where a bf16 step takes `seconds`.

    step: estimates that step's seconds for a machine; never decreases with a slower host. Raises ValueError if the step
    is not host-bound, or if no factor from 0.1 to 3 yields it.
    """
    others, slowest = step(machine.with_host(LEAST)), step(machine.with_host(MOST))
    if seconds < DECIDES * others:
        raise ValueError(
            f"the card and the link take {others * 1e3:.1f} ms of a step in bf16, so {seconds * 1e3:g} ms says "
            "nothing of the host: give a step of fewer tokens, or none"
        )
    if seconds > slowest:
        raise ValueError(
            f"{seconds * 1e3:g} ms is longer than the {slowest * 1e3:.1f} ms of a host that is {MOST:g} times as slow"
            " as those that were measured: is it of this model, of these ranks and this link, and compiled or eager?"
        )
    low, high = LEAST, MOST
    for _ in range(40):
        middle = sqrt(low * high)
        low, high = (middle, high) if step(machine.with_host(middle)) < seconds else (low, middle)
    return high
