"""The Triton functions that generated kernels call, imported there as `lt`."""

# ruff: noqa: F401

from __future__ import annotations

from layoutc.runtime.triton.blocks import (
    block_amax,
    block_highest,
    block_lowest,
    block_mean,
    block_sum,
    blocks_inside,
    from_blocks,
    scale_blocks,
    shared_amax,
    spread,
    to_blocks,
    to_float,
)
from layoutc.runtime.triton.codebooks import from_codebook, looked_up, to_codebook
from layoutc.runtime.triton.codes import (
    F32_MAX,
    bits_of_half,
    cast_from_codes,
    cast_to_codes,
    divide,
    divide_by,
    floor_power_of_two,
    floor_power_of_two_over,
    from_codes,
    from_exponents,
    from_integer_codes,
    isinf,
    isnan,
    like,
    maximum,
    minimum,
    over_exponents,
    over_power_of_two,
    rdiv,
    root,
    to_codes,
    to_exponents,
    to_integer_codes,
    to_small_codes,
)
from layoutc.runtime.triton.conversions import (
    convert_to_e2m1,
    convert_to_e2m3,
    convert_to_e3m2,
    convert_up_to_e8m0,
    from_bf16,
    from_e2m1,
    from_e4m3,
    from_e5m2,
    from_e8m0,
    from_f16,
    from_int4_offset,
    from_int8,
    from_uint4,
    from_uint6,
    over_e8m0,
    to_bf16,
    to_e2m1,
    to_e4m3,
    to_e5m2,
    to_e8m0,
    to_f16,
    to_int4_offset,
    to_int8,
    to_uint4,
    to_uint6,
    up_to_e8m0,
)
from layoutc.runtime.triton.hadamard import hadamard, unhadamard
from layoutc.runtime.triton.nibbles import load_nibbles, store_fp4, store_nibbles
from layoutc.runtime.triton.stochastic import random_bits, to_codes_by_chance, to_integer_codes_by_chance
from layoutc.runtime.triton.swizzles import move_swizzled, scales_of_128x4
from layoutc.runtime.triton.tiles import load_blocks, load_codes, store_blocks
from layoutc.runtime.triton.transposes import move_scales, repack_codes, store_codes, store_scales_expanded
from layoutc.runtime.triton.units import largest_of_units, smallest_of_units, to_units, whole_blocks
