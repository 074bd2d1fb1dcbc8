"""Everything that determines the codes and scales of a quantization: formats, rule, block, rounding, transform."""

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
    """A normalized Hadamard matrix that multiplies values, in groups of `size` along an axis.

    signs: if bit i is set, entry i of a group is negated first.
    """

    axis: Axis
    size: int
    signs: int

    @property
    def scale(self) -> float:
        """The factor of sums: 1 / sqrt(size) in fp32."""
        return f32(self.size**-0.5)

    @property
    def headroom(self) -> float:
        """A power of two that bounds the growth of values: at least sqrt(size)."""
        return float(1 << (self.size.bit_length() // 2))

    @property
    def matrix(self) -> tuple[int, int]:
        """The facts that both operands of a product must share for the transform to cancel."""
        return self.size, self.signs

    def __str__(self) -> str:
        return f"Hadamard {self.size} along {self.axis}, signs 0x{self.signs:x}"


@dataclass(frozen=True)
class Level:
    """How blocks' scales, or zero points, are stored under scales of super-blocks.

    quantization: quantizes these values as its elements; its block counts blocks. covers: the elements of a
    super-block. centered: the mean of a super-block's values is subtracted first, and stored in f32.
    """

    quantization: Quantization
    covers: Block
    centered: bool


@dataclass(frozen=True)
class Quantization:
    """Determines codes and scales. Orientations with equal quantizations have the same codes and scales."""

    element: Format
    scale: Format
    zero: Format | None
    rounding: str
    rule: str
    parameters: tuple[tuple[str, float | int | bool | str], ...]
    block: Block
    low_first: bool
    stochastic: bool = False  # elements are rounded stochastically
    root: bool = False  # square roots of values are quantized
    transform: Transform | None = None  # of values, before they are quantized
    scales: Level | None = None  # the super-block level of scales; None: there is none
    zeros: Level | None = None  # the same for zero points

    @property
    def element_rounding(self) -> str:
        """How elements are rounded: "nearest" (ties to even) or "stochastic"."""
        return "stochastic" if self.stochastic else "nearest"

    @property
    def conditions(self) -> Parameters:
        """The conditions by which steps of the rule are left out: its parameters, and a fact about scale formats."""
        return {**dict(self.parameters), INVERSE_OVERFLOWS: self._smallest_scale < 1 / F32_MAX}

    @property
    def _smallest_scale(self) -> float:
        """The smallest positive scale of elements; 0 if scales can be 0."""
        if self.scales is None:
            return self.scale.smallest
        above = self.scales.quantization.scale
        is_zero = self.scales.centered or above.is_f32 or above.has_zero
        return 0.0 if is_zero else self.scale.smallest * above.smallest

    @property
    def divides(self) -> bool:
        """True if values are divided by their block's divisor instead of multiplied."""
        return self.definition.element_step(self.conditions).name == "divisor"

    @property
    def levels(self) -> dict[str, Level]:
        """The super-block levels of scales and of zero points, if there are any."""
        found = {"scale": self.scales, "zero": self.zeros}
        return {kind: level for kind, level in found.items() if level is not None}

    @property
    def own_levels(self) -> dict[str, Level]:
        """`levels`, without the level of zero points if it equals that of scales."""
        return {kind: one for kind, one in self.levels.items() if kind == "scale" or self.zeros_as == "zero"}

    @property
    def zeros_as(self) -> str:
        """Which functions store zero points: those of scales if both have the same level, else their own."""
        return "scale" if self.zeros is not None and self.zeros == self.scales else "zero"

    @property
    def definition(self) -> Rule:
        """The scale rule's program."""
        return RULES[self.rule]
