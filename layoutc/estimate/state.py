"""Bytes of optimizer states and of gradients on the wire: each format is an entry in a table here.

Plans and estimates derive what is resident on a rank, what the step moves, and what the link carries.
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
    """How a tensor is stored: `bits` per element, and `scale` bytes per `block` of consecutive elements; 0: none.

    filled: elements are padded to a multiple of it. unit: the bytes of codes, and those of scales, are padded to it.
    """

    bits: int
    block: int = 0
    scale: int = 0
    filled: int = 1
    unit: int = 1

    def nbytes(self, elements: int, columns: int = 0) -> int:
        """Bytes of `elements`. columns: elements per row, if blocks do not cross rows; 0: blocks ignore rows."""
        elements = up(elements, self.filled)
        blocks = elements // columns * cdiv(columns, self.block) if columns and self.block else 0
        blocks = blocks or (cdiv(elements, self.block) if self.block else 0)
        return up(cdiv(elements * self.bits, 8), self.unit) + up(blocks * self.scale, self.unit)


FP32, BF16 = Stored(32), Stored(16)
PART = 16  # planes on the wire are padded to multiples of this many bytes


@dataclass(frozen=True)
class State:
    """What an optimizer holds. masters: of weights that are not stored in fp32. moments: one entry each. counter: extra
    bytes per parameter. small: weights with at most this many elements have state in fp32, as do 1-D weights, whose
    `columns` are 0. writes_codes: the launch that steps masters also quantizes weights whose scales depend only on
    blocks."""

    masters: Stored = FP32
    moments: tuple[Stored, ...] = (FP32, FP32)
    counter: int = 4
    small: int = 0
    writes_codes: bool = False

    def master(self, whole: int, columns: int) -> Stored:
        """How a weight's master is stored. whole: elements of the whole weight."""
        return self.masters if columns and whole > self.small else FP32

    def moment_bytes(self, elements: int, whole: int, columns: int) -> int:
        """Bytes of a shard's moments, without the counter."""
        moments = self.moments if columns and whole > self.small else tuple(FP32 for _ in self.moments)
        return sum(one.nbytes(elements, columns) for one in moments)

    def moved(self, elements: int, whole: int, columns: int) -> int:
        """Bytes of memory that a step moves: it reads fp32 gradients, and reads and writes masters and moments."""
        held = self.master(whole, columns).nbytes(elements) + self.moment_bytes(elements, whole, columns)
        return FP32.nbytes(elements) + 2 * held


ADAMW = State()
LEAST = 4096  # the fewest elements of a weight whose state AdamW quantizes
# AdamW's states by layoutc.AdamW's names for them, with the recipes' blocks.
STATES: Mapping[str, State] = {"fp32": ADAMW} | {
    name: State(moments=(Stored(bits, block, 4),) * 2, small=LEAST - 1, writes_codes=True)
    for name, bits, block in (("8bit", 8, 256), ("fp8", 8, 128), ("4bit", 4, 128))
}
MASTERS: Mapping[str, Stored] = {"fp32": FP32, "bf16": BF16, "f24": Stored(24)}


@dataclass(frozen=True)
class Wire:
    """How gradients are exchanged. sent: what a rank sends to each owner of a part, which sums in fp32. kept: what a
    rank keeps of whole gradients across steps (error feedback). codes: gradients of any dtype are quantized.
    """

    sent: Stored
    kept: Stored | None = None
    codes: bool = False

    def among(self, elements: int, replicas: int, summed: int) -> tuple[int, int]:
        """Bytes of (codes, sums) that a rank sends to each other replica; sums have `summed` bytes per element. Either
        codes of its whole shard and no sums, or codes and sums of one part, if that is less."""
        part = up(cdiv(elements, replicas), self.sent.filled)
        whole, codes, sums = self.sent.nbytes(elements), self.sent.nbytes(part), part * summed
        return (whole, 0) if codes_travel_whole(whole, codes, sums) else (codes, sums)


WIRES: Mapping[str, Wire] = {"bf16": Wire(BF16)}
EXCHANGED = WIRES["bf16"]  # what exchange_gradients sends by default


def wire_of(plan: Plan, error_feedback: bool = False) -> Wire:
    """The wire of a recipe for gradients: its codes, then the blocks' scales and zero points.

    Raises ValueError for a recipe without `use: wire`.
    """
    if plan.layout.use != "wire":
        raise ValueError(f"{plan.layout.name} is not a recipe for gradients on the wire: its spec lacks `use: wire`")
    (source,) = plan.layout.sources
    filled, block = plan.layout.multiple_k, source.quantization.block.k
    assert block is not None
    beside = [plane for plane in (source.scale, source.zero) if plane is not None]
    scale = sum(plane.nbytes(1, block) for plane in beside)
    return Wire(Stored(source.data.bits, block, scale, filled, PART), FP32 if error_feedback else None, codes=True)
