"""Writing tiles of masters: in fp32, in bf16 rounded stochastically, or in 24 bits, as bf16 and a byte."""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.codes import bits_of, float_of, isnan
from layoutc.runtime.triton.tiles import store, store_pieces

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def write_master(
    p, master, place, chance, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, EVICT: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """Writes a tile of masters, rounded stochastically unless they are fp32; returns the stored values in fp32."""
    if master.dtype.element_ty == tl.float32:
        _store_master(master, p, place, EVEN, EVICT, EACH)
        return p
    else:
        key, number, first_row, first_column = chance
        bits = bits_of(tl.where(isnan(p), float("nan"), p)) if INTERPRETED else bits_of(p)
        bits = tl.minimum(bits, 0x7FC00000)  # NaN, which has no sign on a card
        bits += chance_bits(key, number, place[0] + first_row, place[1] + first_column, ROWS, COLUMNS)
        bits &= -65536
        halves = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        _store_master(master, halves, place, EVEN, EVICT, EACH)
        return float_of(bits)


@triton.jit
def _store_master(pointer, tile, at, EVEN: tl.constexpr, EVICT: tl.constexpr, EACH: tl.constexpr):
    """`store`, in 16-byte pieces if each thread holds EACH adjacent values, as it does of codes.

    For one store, Triton would give each thread one piece, and recompute all its inputs in that layout.
    """
    if EACH and EVEN:
        row, column, _, columns = at
        GROUPS: tl.constexpr = tile.shape[1] // EACH
        i = tl.arange(0, tile.shape[0])[None, :, None]
        j = tl.arange(0, GROUPS)[:, None, None] * EACH
        groups = tl.permute(tl.reshape(tile, (tile.shape[0], GROUPS, EACH)), (1, 0, 2))
        store_pieces(pointer + row * columns + column + (i * columns + j), groups, EVICT)
    else:
        store(pointer, tile, at, EVEN, EVICT=EVICT)


@triton.jit
def joined(upper, rest):
    """The fp32 value of an f24 master (optim/f24.py)."""
    return float_of(bits_of(upper) + ((rest.to(tl.int32) << 24) >> 16))  # sign-extended


@triton.jit
def split_master(p, master, rest, place, EVEN: tl.constexpr, EVICT: tl.constexpr, EACH: tl.constexpr):
    """Writes a tile of f24 masters; returns their bf16 parts in fp32."""
    bits = bits_of(p)
    kept = tl.where(isnan(p), 0x7FC000, (bits + 0x7F + ((bits >> 8) & 1)) >> 8)
    upper = (kept + 0x80) >> 8
    store(rest, kept.to(tl.uint8), place, EVEN)
    _store_master(master, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), place, EVEN, EVICT, EACH)
    return float_of(upper << 16)


@triton.jit
def chance_bits(key, number, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """16 random bits per element, int32. Eight elements of a row share a Philox 4x32-10 counter.

    key: seed and step. number: the parameter's. row, column: position in the whole weight; column is a multiple of 8.
    """
    i = (row + tl.arange(0, ROWS)).to(tl.uint32)[:, None]
    group = (column // 8 + tl.arange(0, COLUMNS // 8)).to(tl.uint32)[None, :]
    i, group = tl.broadcast(i, group)
    zero = group & 0
    a, b, c, d = tl.philox(key, group, i, zero + number.to(tl.uint32), zero)
    even = tl.join(tl.join(a & 0xFFFF, c & 0xFFFF), tl.join(b & 0xFFFF, d & 0xFFFF))
    odd = tl.join(tl.join(a >> 16, c >> 16), tl.join(b >> 16, d >> 16))
    return tl.reshape(tl.join(even, odd), (ROWS, COLUMNS)).to(tl.int32)
