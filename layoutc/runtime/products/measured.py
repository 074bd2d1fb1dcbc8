"""Whether a kernel was measured to be faster than dequantizing, for products of experts.

measured.json has one object per card, as `layoutc bench --experts --json` prints it: microseconds of a product
including the quantization of tokens, and of the same product with dequantized weights, both in a CUDA graph. Without
`grad_weight`: its kernel also halves the memory of activations, which backward reads as codes.
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
    """A product of one recipe on a card: (n, k) of each expert, tokens of all experts, microseconds of both ways."""

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


@cache
def table() -> tuple[Timed, ...]:
    """All measurements."""
    cards: Any = json.loads(files("layoutc.runtime.products").joinpath("measured.json").read_text(encoding="utf-8"))
    return tuple(Timed(card["card"], tuple(card["capability"]), **row) for card in cards for row in card["rows"])


@lru_cache
def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def is_choice(reason: str) -> bool:
    """Whether a reason comes from `slower`: a kernel exists, but dequantizing is faster."""
    return reason.startswith(_SLOWER)


def slower(recipe: str, product: str, n: int, k: int, each: float, device: torch.device) -> str:
    """Why a kernel is not used: it was slower at the nearest measured sizes, on this card or one of the same compute
    capability. "" if it was faster, or nothing was measured. each: average tokens per expert."""
    if device.type != "cuda":
        return ""
    near = [row for row in table() if (row.recipe, row.product) == (recipe, product)]
    near = [row for row in near if row.capability == capability_of(device)]
    near = [row for row in near if row.card == torch.cuda.get_device_name(device)] or near

    def distance(one: Timed) -> float:  # the sum of the logarithms of the sizes' ratios
        return sum(abs(log(a / b)) for a, b in ((one.n, n), (one.k, k), (one.tokens / one.experts, each)))

    row = min(near, key=distance, default=None)
    if row is None or row.kernel <= row.dequantized:
        return ""
    sizes = f"{row.experts} experts of {row.n}x{row.k} and {row.tokens} tokens"
    took = f"it took {row.kernel:.0f} us and dequantizing {row.dequantized:.0f}"
    return f"{_SLOWER}: for {sizes} {took}, on {row.card} (layoutc bench --experts)"
