"""Bytes of what an optimizer holds of weights, and of gradients as they travel: each form is an entry of a table here.

All else of plans and estimates follows from these: what stays on a rank, what the optimizer's step moves, what the
link carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layoutc.ints.sizes import cdiv


@dataclass(frozen=True)
class Stored:
    """How a tensor is stored: `bits` of an element; `scale` bytes for each `block` of elements, in order; 0: none."""

    bits: int
    block: int = 0
    scale: int = 0

    def nbytes(self, elements: int) -> int:
        """Of so many elements."""
        return cdiv(elements * self.bits, 8) + (cdiv(elements, self.block) * self.scale if self.block else 0)


FP32, BF16 = Stored(32), Stored(16)


@dataclass(frozen=True)
class State:
    """What an optimizer holds beside weights. masters: of weights that are not stored in fp32 themselves. moments: all
    of them. counter: bytes beside, of each parameter. small: weights of at most so many elements keep fp32."""

    masters: Stored = FP32
    moments: tuple[Stored, ...] = (FP32, FP32)
    counter: int = 4
    small: int = 0

    def master_bytes(self, elements: int, whole: int) -> int:
        """Of a shard's master. whole: elements of the whole weight."""
        return (FP32 if whole <= self.small else self.masters).nbytes(elements)

    def moment_bytes(self, elements: int, whole: int) -> int:
        """Of a shard's moments, without the counter."""
        return sum((FP32 if whole <= self.small else one).nbytes(elements) for one in self.moments)

    def moved(self, elements: int, whole: int) -> int:
        """Bytes of memory that a step moves: gradients in fp32 are read, masters and moments read and written."""
        held = self.master_bytes(elements, whole) + self.moment_bytes(elements, whole)
        return FP32.nbytes(elements) + 2 * held


ADAMW = State()
STATES: Mapping[str, State] = {"fp32": ADAMW}


@dataclass(frozen=True)
class Wire:
    """How gradients are exchanged: `sent`, a rank's part of each weight, to its owner, which adds up in fp32. kept: of
    whole gradients, what a rank keeps from step to step (error feedback)."""

    sent: Stored
    kept: Stored | None = None


WIRES: Mapping[str, Wire] = {"bf16": Wire(BF16)}
EXCHANGED = WIRES["bf16"]  # what exchange_gradients sends by default
