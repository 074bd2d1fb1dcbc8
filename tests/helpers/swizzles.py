"""Swizzles as hypothesis draws them: any split of any dims, in any order, joined in any way."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import strategies as st


@st.composite
def swizzles(draw: st.DrawFn, dims: int, words: bool) -> dict[str, Any]:
    """What stands beside a buffer's layout of so many dims: a pattern with sizes or orders of entries, and words."""
    stated: dict[str, Any] = {}
    names = iter("abcdefgh")
    groups: list[list[str]] = []
    for _ in range(dims):
        group = [next(names) for _ in range(draw(st.integers(1, 3)))]
        rest = draw(st.sampled_from(group))
        for name in group:
            size = draw(st.sampled_from([2, 2, 4, 8]))
            if name != rest:
                stated[name] = size if draw(st.integers(0, 2)) else list(draw(st.permutations(range(size))))
        groups.append(group)
    order = draw(st.permutations([name for group in groups for name in group]))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(order) - 1)), max_size=2)))
    ends = [0, *(cut for cut in cuts if cut < len(order)), len(order)]
    joined = [order[begin:end] for begin, end in pairwise(ends)]
    pattern = f"{_written(groups)} -> {_written(joined)}"
    if words and draw(st.booleans()):
        stated["words"] = draw(st.sampled_from([16, 32, 64]))
    return {"swizzle": pattern} | stated


def _written(groups: list[list[str]]) -> str:
    return " ".join(f"({' '.join(group)})" if len(group) > 1 else group[0] for group in groups)
