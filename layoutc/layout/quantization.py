"""All that decides the codes and scales of one quantization: formats, rule, block, rounding, transform."""

from __future__ import annotations

from dataclasses import dataclass

from layoutc.spec.formats import F32_MAX, Format, f32
from layoutc.spec.notation import Axis
from layoutc.spec.rules import INVERSE_OVERFLOWS, RULES, Parameters, Rule


@dataclass(frozen=True)
class Block:
    """How many rows and columns share a scale; None means all of them."""

    m: int | None
    k: int | None


@dataclass(frozen=True)
class Transform:
    """A normalized Hadamard matrix that values are multiplied by, in groups of `size` along an axis.

    signs: bit i is set where entry i of a group changes its sign before.
    """

    axis: Axis
    size: int
    signs: int

    @property
    def scale(self) -> float:
        """What sums are multiplied by: 1 / sqrt(size) in fp32."""
        return f32(self.size**-0.5)

    @property
    def headroom(self) -> float:
        """A power of two that no value grows by more than: at least sqrt(size)."""
        return float(1 << (self.size.bit_length() // 2))

    @property
    def matrix(self) -> tuple[int, int]:
        """What two operands of a product must have in common for it to cancel."""
        return self.size, self.signs

    def __str__(self) -> str:
        return f"Hadamard {self.size} along {self.axis}, signs 0x{self.signs:x}"


@dataclass(frozen=True)
class Level:
    """How values of blocks, scales or zero points, are stored under scales of their own.

    quantization: of those values, whose elements they are; its block counts blocks. covers: the elements of a
    super-block. centered: the mean of a super-block's values is subtracted from them before, and stored in f32.
    """

    quantization: Quantization
    covers: Block
    centered: bool


@dataclass(frozen=True)
class Quantization:
    """All that decides codes and scales. Orientations with equal quantizations have the same codes and scales."""

    element: Format
    scale: Format
    zero: Format | None
    rounding: str
    rule: str
    parameters: tuple[tuple[str, float | int | bool | str], ...]
    block: Block
    low_first: bool
    stochastic: bool = False  # elements are rounded by random bits
    root: bool = False  # square roots of values are quantized
    transform: Transform | None = None  # of the values that are quantized
    scales: Level | None = None  # how scales are stored under scales of their own; None: as they are
    zeros: Level | None = None  # the same of zero points

    @property
    def element_rounding(self) -> str:
        """How elements are rounded: "nearest", ties to even, or "stochastic"."""
        return "stochastic" if self.stochastic else "nearest"

    @property
    def conditions(self) -> Parameters:
        """What steps of the rule are left out by: its parameters, and what follows from the formats of scales."""
        return {**dict(self.parameters), INVERSE_OVERFLOWS: self._smallest_scale < 1 / F32_MAX}

    @property
    def _smallest_scale(self) -> float:
        """The smallest number above 0 that elements may be scaled by; 0 where scales may become 0."""
        if self.scales is None:
            return self.scale.smallest
        above = self.scales.quantization.scale
        is_zero = self.scales.centered or above.is_f32 or above.has_zero
        return 0.0 if is_zero else self.scale.smallest * above.smallest

    @property
    def divides(self) -> bool:
        """True if elements are values that are divided by their block's divisor, not multiplied."""
        return self.definition.element_step(self.conditions).name == "divisor"

    @property
    def levels(self) -> dict[str, Level]:
        """The levels of scales, and of zero points, where there are any."""
        found = {"scale": self.scales, "zero": self.zeros}
        return {kind: level for kind, level in found.items() if level is not None}

    @property
    def own_levels(self) -> dict[str, Level]:
        """The same without that of zero points, where it is that of scales."""
        return {kind: one for kind, one in self.levels.items() if kind == "scale" or self.zeros_as == "zero"}

    @property
    def zeros_as(self) -> str:
        """What zero points are stored as: scales, where both lie under scales of their own alike."""
        return "scale" if self.zeros is not None and self.zeros == self.scales else "zero"

    @property
    def definition(self) -> Rule:
        """The scale rule's program."""
        return RULES[self.rule]
