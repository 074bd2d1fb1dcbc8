"""How fast a host is, from a step in bf16 that was measured on it.

Hosts of one kind of card differed by more than two times, where cards of a kind do not. What a host takes of all else
follows from what it takes of bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

from layoutc.estimate.machine import Machine

LEAST, MOST = 0.1, 3.0  # of hosts that are found; those that were measured took 0.54 to 1.23
DECIDES = 1.05  # a step of less than this times what the card and the link take says nothing of the host


def factor_of(seconds: float, machine: Machine, step: Callable[[Machine], float]) -> float:
    """How many times as long as the host of `machine` another one takes, on which a step in bf16 takes `seconds`.

    step: the seconds of that step, estimated for a machine; no less with a slower host. Raises ValueError where the
    card or the link decides the step, and where no host from 0.1 to 3 times as slow gives it.
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
