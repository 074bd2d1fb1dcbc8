"""Functions that generated references use, made from facts: formats, and the order in which a GEMM reads scales.

A format is a pair of functions, from fp32 to codes and back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from layoutc.runtime import numerics

Codec: TypeAlias = tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]
GemmOrder: TypeAlias = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int, int], Tensor], Callable[..., Tensor]]


def cast(dtype: torch.dtype, largest: float, nan: int) -> Codec:
    """An 8-bit float that torch has. nan: the code for NaN."""
    encode = partial(numerics.cast_to_codes, dtype=dtype, largest=largest, nan_code=nan)
    return encode, partial(numerics.cast_from_codes, dtype=dtype)


def half(dtype: torch.dtype, largest: float, nan: int) -> Codec:
    """fp16 or bf16."""
    return partial(numerics.to_half, dtype=dtype, largest=largest, nan_code=nan), Tensor.float


def integer(bits: int, lowest: int, nan: int, fraction: int = 0, offset: int | None = None) -> Codec:
    """Integers in steps of 2**-fraction: codes are two's complement, or steps plus an offset."""
    encode = partial(
        numerics.to_integer_codes, bits=bits, lowest=lowest, fraction=fraction, nan_code=nan, offset=offset
    )
    return encode, partial(numerics.from_integer_codes, bits=bits, fraction=fraction, offset=offset)


def table(steps: Sequence[float], values: Sequence[float], sign_bit: int | None, nan: int) -> Codec:
    """Any float. steps: thresholds from which |x| gets the next code. values: of each code."""
    encode = partial(numerics.to_codes, thresholds=steps, sign_bit=sign_bit, nan_code=nan)
    return encode, partial(numerics.from_codes, values=values)


def codebook(steps: Sequence[float], codes: Sequence[int], values: Sequence[float], nan: int) -> Codec:
    """A codebook. steps: thresholds from which the next value is nearest. codes: by ascending value."""
    encode = partial(numerics.to_codebook, thresholds=steps, codes=codes, nan_code=nan)
    return encode, partial(numerics.from_codes, values=values)


def by_chance(
    magnitudes: Sequence[float], values: Sequence[float] | torch.dtype, sign_bit: int | None, nan: int
) -> Codec:
    """Any float, rounded stochastically; `encode` takes the random bits after the values. magnitudes: ascending from 0.
    values: of each code, or torch's dtype."""
    encode = partial(numerics.to_codes_by_chance, magnitudes=magnitudes, sign_bit=sign_bit, nan_code=nan)
    if isinstance(values, torch.dtype):
        return encode, partial(numerics.cast_from_codes, dtype=values)
    return encode, partial(numerics.from_codes, values=values)


def integer_by_chance(bits: int, lowest: int, nan: int, fraction: int = 0, offset: int | None = None) -> Codec:
    """`integer`, rounded stochastically; `encode` takes the random bits after the values."""
    encode = partial(
        numerics.to_integer_codes_by_chance, width=bits, lowest=lowest, fraction=fraction, nan_code=nan, offset=offset
    )
    return encode, partial(numerics.from_integer_codes, bits=bits, fraction=fraction, offset=offset)


# Formats that torch lacks and most recipes share. Formats without NaN encode NaN as their largest value.
_POWERS = (5.877471754111438e-39, *(2.0**e for e in range(-126, 128)), float("nan"))  # the value of each code of e8m0
_ABOVE_POWERS = (5.877473155409902e-39, *(2.0**e * (1 + 2**-23) for e in range(-126, 127)))
_BETWEEN_POWERS = (8.81620903246562e-39, *(2.0**e * (1.5 + (e % 2 == 1) * 2**-23) for e in range(-126, 127)))
_OF_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BETWEEN_E2M1 = (0.2500000298023224, 0.75, 1.2500001192092896, 1.75, 2.500000238418579, 3.5, 5.000000476837158)
E2M1 = table(_BETWEEN_E2M1, (*_OF_E2M1, *(-value for value in _OF_E2M1)), 3, nan=0x07)
E8M0 = table(_BETWEEN_POWERS, _POWERS, None, nan=0xFF)
UP_TO_E8M0 = table(_ABOVE_POWERS, _POWERS, None, nan=0xFF)


def gemm_order(parts: Sequence[Sequence[int]], order: Sequence[int], transposed: Collection[str] = ()) -> GemmOrder:
    """Three functions: put scales (free axis, contraction axis) into the order, 1-D; undo that; and order the scales of
    an orientation, given its buffers.

    parts: the sizes of each axis's parts; 0 for the one that takes the rest. order: where each part of the result comes
    from. transposed: orientations whose buffers have the contraction axis first. The free axis is m for rowwise, k for
    columnwise.
    """

    def ordered(scale: Tensor) -> Tensor:
        return numerics.swizzle(scale, parts, order, [len(order)])

    def undone(flat: Tensor, rows: int, columns: int) -> Tensor:
        whole = [(extent // prod(filter(None, of)), of) for extent, of in zip((rows, columns), parts, strict=True)]
        sizes = [size or rest for rest, of in whole for size in of]
        back = sorted(range(len(order)), key=order.__getitem__)
        return flat.reshape([sizes[part] for part in order]).permute(back).reshape(rows, columns)

    def of_buffers(buffers: Mapping[str, Tensor], orientation: str, kind: str = "scale") -> Tensor:
        scale = buffers[f"{orientation}_{kind}"]
        return ordered(scale.t() if orientation in transposed else scale)

    return ordered, undone, of_buffers
