"""Bytes of what an optimizer holds of weights, and of gradients as they travel: each form is an entry of a table here.

All else of plans and estimates follows from these: what stays on a rank, what the optimizer's step moves, what the
link carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layoutc.ints.gathers import codes_travel_whole
from layoutc.ints.sizes import cdiv, up

if TYPE_CHECKING:
    from layoutc.plan.plan import Plan


@dataclass(frozen=True)
class Stored:
    """How a tensor is stored: `bits` of an element; `scale` bytes for each `block` of elements, in order; 0: none.

    filled: elements are filled up to a multiple of it. unit: codes, and scales, take a multiple of so many bytes.
    """

    bits: int
    block: int = 0
    scale: int = 0
    filled: int = 1
    unit: int = 1

    def nbytes(self, elements: int, columns: int = 0) -> int:
        """Of so many elements. columns: of a row, in which blocks begin anew; 0: blocks are of all elements."""
        elements = up(elements, self.filled)
        blocks = elements // columns * cdiv(columns, self.block) if columns and self.block else 0
        blocks = blocks or (cdiv(elements, self.block) if self.block else 0)
        return up(cdiv(elements * self.bits, 8), self.unit) + up(blocks * self.scale, self.unit)


FP32, BF16 = Stored(32), Stored(16)
PART = 16  # bytes, of which planes of codes on the wire are multiples


@dataclass(frozen=True)
class State:
    """What an optimizer holds beside weights. masters: of weights that are not stored in fp32 themselves. moments: all
    of them. counter: bytes beside, of each parameter. small: weights of at most so many elements keep fp32, as do those
    of one dim, whose `columns` are 0. writes_codes: the launch that steps masters quantizes them as well, where a
    weight's scales follow from blocks."""

    masters: Stored = FP32
    moments: tuple[Stored, ...] = (FP32, FP32)
    counter: int = 4
    small: int = 0
    writes_codes: bool = False

    def master(self, whole: int, columns: int) -> Stored:
        """How a weight's master is held. whole: elements of the whole weight."""
        return self.masters if columns and whole > self.small else FP32

    def moment_bytes(self, elements: int, whole: int, columns: int) -> int:
        """Of a shard's moments, without the counter."""
        moments = self.moments if columns and whole > self.small else tuple(FP32 for _ in self.moments)
        return sum(one.nbytes(elements, columns) for one in moments)

    def moved(self, elements: int, whole: int, columns: int) -> int:
        """Bytes of memory that a step moves: gradients in fp32 are read, masters and moments read and written."""
        held = self.master(whole, columns).nbytes(elements) + self.moment_bytes(elements, whole, columns)
        return FP32.nbytes(elements) + 2 * held


ADAMW = State()
LEAST = 4096  # elements of a weight whose state AdamW holds in a recipe
# Of AdamW, by the names that layoutc.AdamW has for them; by recipes' blocks.
STATES: Mapping[str, State] = {"fp32": ADAMW} | {
    name: State(moments=(Stored(bits, block, 4),) * 2, small=LEAST - 1, writes_codes=True)
    for name, bits, block in (("8bit", 8, 256), ("fp8", 8, 128), ("4bit", 4, 128))
}
MASTERS: Mapping[str, Stored] = {"fp32": FP32, "bf16": BF16, "f24": Stored(24)}


@dataclass(frozen=True)
class Wire:
    """How gradients are exchanged: `sent`, a rank's part of each group, to its owner, which adds up in fp32. kept: of
    whole gradients, what a rank keeps from step to step (error feedback). codes: gradients of any dtype are quantized.
    """

    sent: Stored
    kept: Stored | None = None
    codes: bool = False

    def among(self, elements: int, replicas: int, summed: int) -> tuple[int, int]:
        """Bytes that a rank sends each other replica for their sums, of `summed` bytes an element: codes of all that it
        holds, and 0; or codes of a part, and sums of a part, where that is fewer."""
        part = up(cdiv(elements, replicas), self.sent.filled)
        whole, codes, sums = self.sent.nbytes(elements), self.sent.nbytes(part), part * summed
        return (whole, 0) if codes_travel_whole(whole, codes, sums) else (codes, sums)


WIRES: Mapping[str, Wire] = {"bf16": Wire(BF16)}
EXCHANGED = WIRES["bf16"]  # what exchange_gradients sends by default


def wire_of(plan: Plan, error_feedback: bool = False) -> Wire:
    """Of a recipe of gradients on the wire: its codes, then the scales of their blocks, and zero points.

    Raises ValueError for a recipe of something else.
    """
    if plan.layout.use != "wire":
        raise ValueError(f"{plan.layout.name} is not a recipe for gradients on the wire: its spec lacks `use: wire`")
    (source,) = plan.layout.sources
    filled, block = plan.layout.multiple_k, source.quantization.block.k
    assert block is not None
    beside = [plane for plane in (source.scale, source.zero) if plane is not None]
    scale = sum(plane.nbytes(1, block) for plane in beside)
    return Wire(Stored(source.data.bits, block, scale, filled, PART), FP32 if error_feedback else None, codes=True)
