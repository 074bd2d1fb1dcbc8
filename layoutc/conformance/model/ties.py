"""Near ties: weights whose blocks can hardly choose between two scales, which shows the order of the sums that decide.

They are found by bisection on the independent model, from a weight whose blocks keep the first candidate to one whose
blocks keep another, element by element and then bit by bit. With another order of sums, one of the two ends would
decide differently.
"""

from __future__ import annotations

import numpy as np

from layoutc.conformance.model.codes import F32, Array
from layoutc.conformance.model.rules import spread
from layoutc.conformance.model.weights import Model
from layoutc.layout.layout import Source


def near_ties(model: Model, source: Source, m: int, k: int, rng: np.random.Generator) -> list[Array]:
    """Two (m, k) weights that are neighbours in fp32, and in which most blocks keep different candidates."""
    block = source.quantization.block
    bm, bk = block.m or m, block.k or k

    def first(x: Array) -> Array:
        """Which elements lie in blocks that keep the first candidate."""
        kept = model.kept(source, x)
        return spread((kept == 0).astype(F32), bm, bk, m, k) > 0

    def drawn() -> Array:
        x = (rng.uniform(-1, 1, (m, k)) * rng.uniform(0.1, 2)).astype(F32)
        x[::bm, ::bk] = 2  # every block's amax, and the weight's: the scales stay as they are
        return x

    low, high = drawn(), drawn()
    for _ in range(40):
        other, keeps = drawn(), first(low)
        low = np.where(keeps, low, other)
        high = np.where(first(high), other, high)
    # Elements are taken from `high` in a random order: as many as it takes to change the block's choice.
    rank = np.tile(rng.permutation(bm * bk).reshape(bm, bk), (-(-m // bm), -(-k // bk)))[:m, :k]
    few, many = np.zeros((m, k), int), np.full((m, k), bm * bk)
    while np.any(many - few > 1):
        middle = (few + many) // 2
        keeps = first(np.where(rank < middle, high, low))
        few, many = np.where(keeps, middle, few), np.where(keeps, many, middle)
    below, above = (np.where(rank < count, high, low) for count in (few, many))
    for _ in range(40):  # halve the distance of that element, down to neighbouring numbers
        middle = ((below.astype(np.float64) + above) / 2).astype(F32)
        keeps = first(middle)
        below, above = np.where(keeps, middle, below), np.where(keeps, above, middle)
    return [below, above]
