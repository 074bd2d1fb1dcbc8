"""Near ties: weights whose blocks almost tie between two scales, so that the order of summing errors decides.

A bisection on the independent model finds them, between a weight whose blocks keep the first candidate and one whose
blocks keep another, element by element and then bit by bit. With another order of sums, one of the two ends would
choose another candidate.
"""

from __future__ import annotations

import numpy as np

from layoutc.conformance.model.codes import F32, Array
from layoutc.conformance.model.rules import spread
from layoutc.conformance.model.weights import Model
from layoutc.layout.layout import Source


def near_ties(model: Model, source: Source, m: int, k: int, rng: np.random.Generator) -> list[Array]:
    """Two (m, k) weights, adjacent in fp32, in which most blocks keep different candidates."""
    block = source.quantization.block
    bm, bk = block.m or m, block.k or k

    def first(x: Array) -> Array:
        """Which elements are in blocks that keep the first candidate."""
        kept = model.kept(source, x)
        return spread((kept == 0).astype(F32), bm, bk, m, k) > 0

    def drawn() -> Array:
        x = (rng.uniform(-1, 1, (m, k)) * rng.uniform(0.1, 2)).astype(F32)
        x[::bm, ::bk] = 2  # the amax of every block and of the weight, which fixes the scales
        return x

    low, high = drawn(), drawn()
    for _ in range(40):
        other, keeps = drawn(), first(low)
        low = np.where(keeps, low, other)
        high = np.where(first(high), other, high)
    # Takes elements from `high` in random order, until the block's choice changes.
    rank = np.tile(rng.permutation(bm * bk).reshape(bm, bk), (-(-m // bm), -(-k // bk)))[:m, :k]
    few, many = np.zeros((m, k), int), np.full((m, k), bm * bk)
    while np.any(many - few > 1):
        middle = (few + many) // 2
        keeps = first(np.where(rank < middle, high, low))
        few, many = np.where(keeps, middle, few), np.where(keeps, many, middle)
    below, above = (np.where(rank < count, high, low) for count in (few, many))
    for _ in range(40):  # bisect the element that changed it, down to adjacent fp32 numbers
        middle = ((below.astype(np.float64) + above) / 2).astype(F32)
        keeps = first(middle)
        below, above = np.where(keeps, middle, below), np.where(keeps, above, middle)
    return [below, above]
