"""Whether a kernel is faster than dequantizing, for products of experts: as it was measured on cards.

measured.json has an object for each card, as `layoutc bench --experts --json` prints it: microseconds of a product with
what it takes to quantize tokens, and of the same product of dequantized weights, both in a CUDA graph.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from importlib.resources import files
from math import log
from typing import Any, NamedTuple

import torch

_SLOWER = "the kernel is slower"


class Timed(NamedTuple):
    """A product of one recipe on a card: (n, k) of each expert, tokens of all of them, microseconds either way."""

    card: str
    capability: tuple[int, int]
    recipe: str
    product: str
    experts: int
    n: int
    k: int
    tokens: int
    kernel: float
    dequantized: float

    def far_from(self, n: int, k: int, each: float) -> float:
        """How far its sizes are from others: the sum of the logarithms of their ratios. each: tokens of an expert."""
        return sum(abs(log(a / b)) for a, b in ((self.n, n), (self.k, k), (self.tokens / self.experts, each)))


@cache
def table() -> tuple[Timed, ...]:
    """All that was measured."""
    cards: Any = json.loads(files("layoutc.runtime.products").joinpath("measured.json").read_text(encoding="utf-8"))
    return tuple(Timed(card["card"], tuple(card["capability"]), **row) for card in cards for row in card["rows"])


@lru_cache
def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def is_choice(reason: str) -> bool:
    """Whether a reason is that of `slower`: there is a kernel, which is not wanted."""
    return reason.startswith(_SLOWER)


def slower(recipe: str, product: str, n: int, k: int, each: float, device: torch.device) -> str:
    """Why a kernel is not taken: it was slower at the sizes nearest to these, on this card or one of its compute
    capability. "" if it was faster, or nothing was measured. each: tokens of an expert, on average."""
    if device.type != "cuda":
        return ""
    near = [row for row in table() if (row.recipe, row.product) == (recipe, product)]
    near = [row for row in near if row.capability == capability_of(device)]
    near = [row for row in near if row.card == torch.cuda.get_device_name(device)] or near
    row = min(near, key=lambda one: one.far_from(n, k, each), default=None)
    if row is None or row.kernel <= row.dequantized:
        return ""
    sizes = f"{row.experts} experts of {row.n}x{row.k} and {row.tokens} tokens"
    took = f"it took {row.kernel:.0f} us and dequantizing {row.dequantized:.0f}"
    return f"{_SLOWER}: for {sizes} {took}, on {row.card} (layoutc bench --experts)"
