"""What ranks send in a gather, and what it leaves: rules that the runtime follows, and by which budgets and estimates
count. Pure integers, equal on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from layoutc.ints.cuts import Cuts

ALIGNED = 16  # bytes that kernels move at a time
READABLE = 4  # at multiples of which they read and write planes at all
WORD = 8  # bytes that are copied as one number
VALUE = 2  # bytes of a value: those of fp32 take four times the memory of codes, and autocast converts them again


def slots(forward: Sequence[int], backward: Sequence[int]) -> tuple[int, ...]:
    """The bytes of each tensor that a rank sends in either pass, from those of the passes' planes.

    FSDP2 allocates what is gathered into once, so both passes send as many bytes: in each slot those of the larger one.
    """
    return tuple(map(max, zip_longest(forward, backward, fillvalue=0)))


def fits_pack(planes: Iterable[tuple[int, int]], cuts: Cuts) -> bool:
    """Whether a weight can be dequantized from where ranks' rows of bytes have arrived. planes: the rows that share an
    entry of each, and the bytes that a rank sends: whole blocks of rows, and multiples of 16 bytes."""
    return all(cuts.aligned(rows) and nbytes % ALIGNED == 0 for rows, nbytes in planes)


def in_few_steps(starts: Iterable[int], nbytes: int) -> bool:
    """Whether kernels reach what a rank sends: nbytes, in which planes that they read or write begin at `starts`."""
    return nbytes % WORD == 0 and not any(at % READABLE for at in starts)


def values_cost_nothing(fits: bool, value: int, passes_differ: bool, stays: bool) -> bool:
    """Whether gathers of a weight may leave values where nobody asked for codes.

    fits: as of fits_pack, which few steps gather. value: bytes of one. passes_differ: both passes would need the same
    codes. stays: it is gathered until backward is done; values would take more memory for that long.
    """
    return fits and value == VALUE and not passes_differ and not stays


def leaves_values(chosen: Sequence[bool | None], free: Iterable[bool]) -> list[bool]:
    """For each weight of a group: whether its gathers leave values, and not codes.

    chosen: by the weight itself; None: as all weights do. free: for each, whether that is values, which cost nothing.
    All of a group leave values by default, or none; where there are two, and none that has chosen codes.
    """
    by_default = len(chosen) > 1 and False not in chosen and all(free)
    return [by_default if own is None else own for own in chosen]


def reduces_in_few_steps(replicas: int, params: Iterable[tuple[int, int]]) -> bool:
    """Whether gradients of a group can be reduced in few steps, where all of them are there: over shards alone, of
    parameters that are cut on dim 0 and in no other way. params: (the dim that shards cut, the parts that tensor
    parallelism makes of it)."""
    return replicas == 1 and all(dim == 0 and parts == 1 for dim, parts in params)


def codes_travel_whole(whole: int, part: int, sums: int) -> bool:
    """Whether replicas send each other codes of all gradients, and not a part's codes and then that part's sums: where
    it is no more bytes."""
    return whole <= part + sums
