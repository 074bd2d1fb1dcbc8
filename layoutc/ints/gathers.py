"""What ranks send in a gather, and whether it yields values or codes: rules that the runtime follows, and that budgets
and estimates use. Pure integers, equal on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from layoutc.ints.cuts import Cuts

ALIGNED = 16  # bytes that kernels move at a time
READABLE = 4  # the least alignment, in bytes, of planes that kernels read and write
WORD = 8  # bytes that are copied as one number
VALUE = 2  # bytes of a value; fp32 values need four times the memory of codes, and autocast converts them again


def slots(forward: Sequence[int], backward: Sequence[int]) -> tuple[int, ...]:
    """The bytes of each tensor that a rank sends, from the bytes of the planes of both passes.

    FSDP2 allocates the gather's outputs once, so both passes send the same bytes: in each slot, those of the larger.
    """
    return tuple(map(max, zip_longest(forward, backward, fillvalue=0)))


def fits_pack(planes: Iterable[tuple[int, int]], cuts: Cuts) -> bool:
    """Whether a weight can be dequantized directly from the gathered bytes: each rank sends whole blocks of rows, and
    multiples of 16 bytes. planes: for each, the rows that share an entry, and the bytes that a rank sends."""
    return all(cuts.aligned(rows) and nbytes % ALIGNED == 0 for rows, nbytes in planes)


def in_few_steps(starts: Iterable[int], nbytes: int) -> bool:
    """Whether kernels can access the planes in what a rank sends: nbytes, with planes that begin at `starts`."""
    return nbytes % WORD == 0 and not any(at % READABLE for at in starts)


def values_cost_nothing(fits: bool, value: int, passes_differ: bool, stays: bool) -> bool:
    """Whether gathers of a weight may yield values by default.

    fits: fits_pack holds, and the fast path applies. value: bytes per value. passes_differ: the passes gather
    different codes. stays: the weight stays gathered until backward is done, for which values would need more memory.
    """
    return fits and value == VALUE and not passes_differ and not stays


def leaves_values(chosen: Sequence[bool | None], free: Iterable[bool]) -> list[bool]:
    """Whether gathers yield values instead of codes, for each weight of a group.

    chosen: each weight's override; None: the default. free: whether values cost nothing, for each weight. By default, a
    group yields values if it has at least two weights, all are free, and none has chosen codes.
    """
    by_default = len(chosen) > 1 and False not in chosen and all(free)
    return [by_default if own is None else own for own in chosen]


def reduces_in_few_steps(replicas: int, params: Iterable[tuple[int, int]]) -> bool:
    """Whether a group's gradients, if none is missing, can be reduced on the fast path: without replicas, and for
    parameters that only shards cut, on dim 0. params: (the dim that shards cut, the parts that tensor parallelism cuts
    it into)."""
    return replicas == 1 and all(dim == 0 and parts == 1 for dim, parts in params)


def codes_travel_whole(whole: int, part: int, sums: int) -> bool:
    """Whether replicas exchange codes of all gradients, if that is no more bytes than a part's codes and its sums."""
    return whole <= part + sums
