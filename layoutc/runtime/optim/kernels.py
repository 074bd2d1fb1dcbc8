"""Optimizer kernels: one computes each parameter's step scalars, the other updates a group of weights.

A table (triton/batch.py) has an entry for each shard: rows, columns, slot, and the addresses of the master, three
planes of each moment, six planes of the weight (or its rounded values), and the master's byte plane. Gradients move
between steps, so their addresses are in a separate tensor, indexed by slot.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.optim.stored_masters import joined, split_master, write_master
from layoutc.runtime.triton.batch import address, member_of, plane_in
from layoutc.runtime.triton.blocks import to_float
from layoutc.runtime.triton.codes import bits_of, inverse_inside, maximum, minimum, root_inside
from layoutc.runtime.triton.tiles import DequantizeOptions, QuantizeOptions, load, store, to_dtype

SCALARS = 8  # per slot
MASTER, FIRST, SECOND, PLANES, REST = (tl.constexpr(at) for at in (3, 4, 7, 10, 16))  # fields of a table
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def fma(a, b, c):
    """a * b + c, rounded once. The interpreter's tl.fma rounds twice."""
    if INTERPRETED:
        product = a.to(tl.float64) * b.to(tl.float64)  # exact
        other = c.to(tl.float64)
        total = product + other
        back = total - product
        lost = (product - (total - back)) + (other - back)
        bits = total.to(tl.int64, bitcast=True)
        odd = bits + tl.where((lost > 0) == (total > 0), 1, -1)  # rounded to odd, so that fp32 rounds as if only once
        bits = tl.where((lost != 0) & (lost == lost) & ((bits & 1) == 0), odd, bits)
        return bits.to(tl.float64, bitcast=True).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def divide_by_scalar(x, value, over_value):
    """x / value, rounded to nearest, if x is not subnormal: corrects x * over_value by its residual (Markstein)."""
    value = tl.broadcast_to(value, x.shape)
    about = x * over_value
    mended = fma(fma(-about, value, x), tl.broadcast_to(over_value, x.shape), about)
    return tl.where(about == float("inf"), about, mended)


@triton.jit
def power(base, exponent):
    """base^exponent by squaring, for an fp64 base and an integer exponent."""
    result = base * 0 + 1.0
    square = base
    for _ in range(0, 30):
        result = tl.where((exponent & 1) == 1, result * square, result)
        square = square * square
        exponent = exponent >> 1
    return result


@triton.jit
def scalars_kernel(
    steps,  # (slots,) fp32: how many steps each parameter has taken
    groups,  # (slots,) int32: each parameter's group
    settings,  # (groups, 8) fp64: the rule's options (optim/rules.py)
    skipped,  # fp32: 1 if a gradient is not finite, so that no parameter steps
    scale,  # fp32: what gradients are divided by
    scalars,  # (slots, 8) fp32
    amaxes,  # (slots,) int64: addresses of the amaxes that update_kernel raises, which begin at 0; 0: it raises none
    count,
    TILE: tl.constexpr,
    RULE: tl.constexpr,  # "adam", "sgd" or "lion"
    DECOUPLED: tl.constexpr,  # decay shrinks values; else it is added to gradients
):
    """Counts a step for each parameter, and computes the scalars of its update."""
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = slot < count
    step = tl.load(steps + slot, mask=inside, other=1.0)
    taken = 1.0
    if skipped is not None:
        taken = tl.where(tl.load(skipped) == 0.0, 1.0, 0.0)
    step = step + taken
    tl.store(steps + slot, step, mask=inside)
    own = settings + tl.load(groups + slot, mask=inside, other=0) * 8
    lr = tl.load(own, mask=inside, other=0.0)
    first = tl.load(own + 1, mask=inside, other=0.0)  # beta1, or the momentum
    second = tl.load(own + 2, mask=inside, other=0.0)  # beta2, or the dampening
    third = tl.load(own + 3, mask=inside, other=0.0)  # eps, or whether momentum is Nesterov
    decay = tl.load(own + 4, mask=inside, other=0.0)
    is_maximized = tl.load(own + 5, mask=inside, other=0.0) != 0.0
    if amaxes is not None:
        amax = tl.load(amaxes + slot, mask=inside, other=0)
        tl.store(amax.to(tl.pointer_type(tl.int32)), tl.zeros((TILE,), tl.int32), mask=amax != 0)
    number = step.to(tl.int32)
    rest = 1.0 - first
    last = 1.0 - second
    rate = lr
    correction = lr
    if RULE == "adam":
        rate = lr / (1.0 - power(first, number))
        correction = tl.sqrt(1.0 - power(second, number))
    elif RULE == "sgd":
        correction = tl.where(number == 1, 1.0, 0.0).to(tl.float64)
    out = scalars + slot * 8
    factor = tl.where(is_maximized, -1.0, 1.0)
    if scale is not None:
        factor = factor / tl.load(scale).to(tl.float64)
    tl.store(out, (1.0 - lr * decay if DECOUPLED else decay).to(tl.float32), mask=inside)
    tl.store(out + 1, (first if RULE == "sgd" else rest).to(tl.float32), mask=inside)
    tl.store(out + 2, second.to(tl.float32), mask=inside)
    tl.store(out + 3, last.to(tl.float32), mask=inside)
    tl.store(out + 4, (-rate).to(tl.float32), mask=inside)
    tl.store(out + 5, (first if RULE == "lion" else correction).to(tl.float32), mask=inside)
    tl.store(out + 6, third.to(tl.float32), mask=inside)
    tl.store(out + 7, (taken * factor).to(tl.float32), mask=inside)  # 0: nothing is written


@triton.jit
def moment_of(moment, g, by, RULE: tl.constexpr, QUICK: tl.constexpr):
    """(first moment to store, direction of the update)."""
    one, second, last, fifth, sixth = by[1], by[2], by[3], by[5], by[6]
    if RULE == "adam" and QUICK:
        moment = fma(tl.broadcast_to(one, g.shape), g - moment, moment)
        return moment, moment
    elif RULE == "adam":  # like torch.lerp: from the nearer end
        is_near = one < 0.5
        share = tl.broadcast_to(tl.where(is_near, one, one - 1.0), g.shape)
        moment = fma(share, g - moment, tl.where(is_near, moment, g))
        return moment, moment
    elif RULE == "sgd":
        is_first, is_nesterov = fifth != 0.0, sixth != 0.0
        moment = tl.where(is_first, g, fma(g, tl.broadcast_to(last, g.shape), moment * one))
        return moment, tl.where(is_nesterov, fma(moment, tl.broadcast_to(one, g.shape), g), moment)
    else:
        mixed = fma(g, tl.broadcast_to(one, g.shape), moment * fifth)
        kept = fma(g, tl.broadcast_to(last, g.shape), moment * second)
        return kept, (mixed > 0).to(tl.float32) - (mixed < 0).to(tl.float32)


@triton.jit
def moved(p, along, square, by, over, HAS_SECOND: tl.constexpr, QUICK: tl.constexpr):
    """Values after the step. over: 1 / by[5], the bias correction of the square root."""
    rate = by[4]
    if not HAS_SECOND:
        return fma(along, tl.broadcast_to(rate, p.shape), p)
    else:
        correction, eps = by[5], by[6]
        if QUICK:
            deviation = root_inside(minimum(maximum(square, 2.0**-100), 2.0**100))
            return fma(along * rate, inverse_inside(deviation * over + eps), p)
        return p + tl.div_rn(along * rate, divide_by_scalar(tl.sqrt_rn(square), correction, over) + eps)


@triton.jit
def update_kernel(
    table, grads, scalars,
    numbers,  # (slots, 4) int32: a parameter's number, and its shard's first row and column; for random bits
    seed,  # () int64
    steps,
    amaxes,  # as in scalars_kernel; None: the launch raises none
    books_m, books_v,  # codebooks of the moments' recipes
    input_max,  # the largest value of a master's dtype, for scales of weights
    GRAD: tl.constexpr, MASTER_DTYPE: tl.constexpr, SPLITS: tl.constexpr,  # masters are bf16 and a byte
    DEQUANTIZE_M: tl.constexpr, QUANTIZE_M: tl.constexpr, KINDS_M: tl.constexpr,  # None: fp32; see plane_in
    DEQUANTIZE_V: tl.constexpr, QUANTIZE_V: tl.constexpr, KINDS_V: tl.constexpr,
    QUANTIZE: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, KINDS: tl.constexpr,  # of the weight
    ROUNDED: tl.constexpr,  # dtype of a plain weight; None: the weight is quantized, or is its own master
    ROWS: tl.constexpr, ALIGNED: tl.constexpr,
    SPAN_M: tl.constexpr, SPAN_K: tl.constexpr, STRIP: tl.constexpr,  # STRIP: rows that are updated at a time
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,  # the tile that is quantized: a strip, or several that are read again
    STAGES: tl.constexpr,  # strips in flight
    KEEP: tl.constexpr,  # L2 keeps masters until they are read again, and evicts everything else first
    EACH: tl.constexpr,  # adjacent codes of quantized moments per thread; 0: no moment is quantized
    EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr,
    COVER_M: tl.constexpr, COVER_K: tl.constexpr,  # 0
    RULE: tl.constexpr, DECOUPLED: tl.constexpr,  # as in scalars_kernel
    QUICK: tl.constexpr,  # arithmetic for masters or moments that are rounded (optim/rules.py)
):  # fmt: skip
    """Each program updates SPAN_M rows and SPAN_K columns of a weight's master and moments, and writes its codes.

    It loops over strips and builds its codebook tables once. Blocks with more rows than a strip are quantized after all
    their rows are written; the masters are then read again from L2. amaxes: of masters as they are after the step, also
    if it is skipped; the bits of magnitudes sort like the magnitudes, with NaN above infinity.
    """
    fields, row, column, m, k = member_of(table, SPAN_M, SPAN_K, ROWS, ALIGNED)
    slot = tl.load(fields + 2 * ROWS)
    own = scalars + slot * 8
    factor = tl.load(own + 7)
    NEAR: tl.constexpr = EACH if EACH else 4
    largest = tl.zeros((STRIP, SPAN_K // NEAR), tl.int32) if amaxes is not None else 0
    if factor == 0.0:
        if amaxes is not None:
            kept = address(fields + MASTER * ROWS, MASTER_DTYPE, ALIGNED)
            for done in range(0, SPAN_M, STRIP):
                tile = load(kept, (row + done, column, m, k), (k, 1), (STRIP, SPAN_K), EVEN)
                largest = tl.maximum(largest, _largest_near(to_float(tile), NEAR))
            _raise_amax(amaxes + slot, largest)
        return
    grad = tl.load(grads + slot).to(tl.pointer_type(GRAD))
    if ALIGNED:
        grad = tl.multiple_of(grad, 16)
    master = address(fields + MASTER * ROWS, MASTER_DTYPE, ALIGNED)
    rest = address(fields + REST * ROWS, tl.uint8, ALIGNED) if SPLITS else None
    first = (
        plane_in(fields, FIRST, 0, KINDS_M, ROWS, ALIGNED) if KINDS_M >> 0 else None,
        plane_in(fields, FIRST, 1, KINDS_M, ROWS, ALIGNED) if KINDS_M >> 3 else None,
        plane_in(fields, FIRST, 2, KINDS_M, ROWS, ALIGNED) if KINDS_M >> 6 else None,
        None, None, None, books_m,
    )  # fmt: skip
    second = (  # all None if the rule has one moment
        plane_in(fields, SECOND, 0, KINDS_V, ROWS, ALIGNED) if KINDS_V >> 0 else None,
        plane_in(fields, SECOND, 1, KINDS_V, ROWS, ALIGNED) if KINDS_V >> 3 else None,
        plane_in(fields, SECOND, 2, KINDS_V, ROWS, ALIGNED) if KINDS_V >> 6 else None,
        None, None, None, books_v,
    )  # fmt: skip
    planes = (
        plane_in(fields, PLANES, 0, KINDS, ROWS, ALIGNED) if KINDS >> 0 else None,
        plane_in(fields, PLANES, 1, KINDS, ROWS, ALIGNED) if KINDS >> 3 else None,
        plane_in(fields, PLANES, 2, KINDS, ROWS, ALIGNED) if KINDS >> 6 else None,
        plane_in(fields, PLANES, 3, KINDS, ROWS, ALIGNED) if KINDS >> 9 else None,
        plane_in(fields, PLANES, 4, KINDS, ROWS, ALIGNED) if KINDS >> 12 else None,
        plane_in(fields, PLANES, 5, KINDS, ROWS, ALIGNED) if KINDS >> 15 else None,
    )
    buffers = (None, None, None, None, None, None)
    unused = (None, None, None, None, None)
    decay, rate, correction = tl.load(own), tl.load(own + 4), tl.load(own + 5)
    by = (decay, tl.load(own + 1), tl.load(own + 2), tl.load(own + 3), rate, correction, tl.load(own + 6))
    over = tl.div_rn(1.0, correction)
    number = 0
    first_row = 0
    first_column = 0
    key = 0
    if tl.float32 != MASTER_DTYPE and not SPLITS:
        number = tl.load(numbers + slot * 4)
        first_row = tl.load(numbers + slot * 4 + 1)
        first_column = tl.load(numbers + slot * 4 + 2)
        key = (tl.load(seed) & 0xFFFFFFFF) | (tl.load(steps + slot).to(tl.int64) << 32)
    # Tuples with COVER_M and COVER_K are built inside calls, where these stay constexpr.
    FIRST_OUT: tl.constexpr = "evict_first" if KEEP else ""
    LAST_OUT: tl.constexpr = "evict_last" if KEEP else ""
    for done in tl.range(0, SPAN_M, STRIP, num_stages=STAGES):
        at_row = row + done
        place = (at_row, column, m, k)
        g = to_float(load(grad, place, (k, 1), (STRIP, SPAN_K), EVEN, EVICT=FIRST_OUT)) * factor
        p = to_float(load(master, place, (k, 1), (STRIP, SPAN_K), EVEN, EVICT=FIRST_OUT))
        if SPLITS:
            p = joined(p, load(rest, place, (k, 1), (STRIP, SPAN_K), EVEN, EVICT=FIRST_OUT))
        if DECOUPLED:
            p = p * decay
        else:
            g = tl.where(decay != 0.0, fma(p, tl.broadcast_to(decay, p.shape), g), g)
        if DEQUANTIZE_M is None:
            moment = load(first[0], place, (k, 1), (STRIP, SPAN_K), EVEN, EVICT=FIRST_OUT)
        else:
            moment = DEQUANTIZE_M(first, None, place, DequantizeOptions(True, False, STRIP, SPAN_K, EVEN, CVT_LEVEL))
        moment, along = moment_of(moment, g, by, RULE, QUICK)
        if DEQUANTIZE_M is None:
            store(first[0], moment, place, EVEN, EVICT=FIRST_OUT)
        else:
            QUANTIZE_M(
                _inside(moment, place, EVEN), None, unused, first, buffers,
                (at_row, column, m, k, COVER_M, COVER_K), QuantizeOptions(True, False, False, EVEN, CVT_LEVEL),
            )  # fmt: skip
        square = None
        if KINDS_V:
            if DEQUANTIZE_V is None:
                square = load(second[0], place, (k, 1), (STRIP, SPAN_K), EVEN, EVICT=FIRST_OUT)
            else:
                square = DEQUANTIZE_V(
                    second, None, place, DequantizeOptions(True, False, STRIP, SPAN_K, EVEN, CVT_LEVEL)
                )
            square = fma(g * by[3], g, square * by[2])
            if DEQUANTIZE_V is None:
                store(second[0], square, place, EVEN, EVICT=FIRST_OUT)
            else:
                QUANTIZE_V(
                    _inside(square, place, EVEN), None, unused, second, buffers,
                    (at_row, column, m, k, COVER_M, COVER_K), QuantizeOptions(True, False, False, EVEN, CVT_LEVEL),
                )  # fmt: skip
        p = moved(p, along, square, by, over, KINDS_V != 0, QUICK)
        if SPLITS:
            p = split_master(p, master, rest, place, EVEN, LAST_OUT, EACH)
        else:
            chance = (key, number, first_row, first_column)
            p = write_master(p, master, place, chance, STRIP, SPAN_K, EVEN, LAST_OUT, EACH)
        if amaxes is not None:
            largest = tl.maximum(largest, _largest_near(_inside(p, place, EVEN), NEAR))
        if ROUNDED is not None:
            target = address(fields + PLANES * ROWS, ROUNDED, ALIGNED)
            store(target, to_dtype(p, ROUNDED, CVT_LEVEL), place, EVEN)
        if QUANTIZE is not None and TILE_M == STRIP:
            QUANTIZE(
                _inside(p, place, EVEN), None, (None, input_max, None, None, None), planes, buffers,
                (at_row, column, m, k, COVER_M, COVER_K), QuantizeOptions(ROWWISE, COLUMNWISE, False, EVEN, CVT_LEVEL),
            )  # fmt: skip
    if amaxes is not None:
        _raise_amax(amaxes + slot, largest)
    if QUANTIZE is not None and TILE_M != STRIP:
        tl.debug_barrier()  # the reads below need other threads' writes
        for done in range(0, (SPAN_M // TILE_M) * (SPAN_K // TILE_K)):
            tile_row = row + done // (SPAN_K // TILE_K) * TILE_M
            tile_column = column + done % (SPAN_K // TILE_K) * TILE_K
            tile = load(master, (tile_row, tile_column, m, k), (k, 1), (TILE_M, TILE_K), EVEN, EVICT=FIRST_OUT)
            QUANTIZE(
                to_float(tile), None, (None, input_max, None, None, None), planes, buffers,
                (tile_row, tile_column, m, k, COVER_M, COVER_K),
                QuantizeOptions(ROWWISE, COLUMNWISE, False, EVEN, CVT_LEVEL),
            )  # fmt: skip


@triton.jit
def _largest_near(p, NEAR: tl.constexpr):
    """The bits of the largest magnitude of each NEAR adjacent values, which a thread holds."""
    return tl.max(tl.reshape(bits_of(p) & 0x7FFFFFFF, (p.shape[0], p.shape[1] // NEAR, NEAR)), 2)


@triton.jit
def _raise_amax(place, largest):
    """Raises the fp32 bits at the address in `place` to the largest of a tile."""
    amax = tl.load(place).to(tl.pointer_type(tl.int32))
    tl.atomic_max(amax, tl.max(largest), sem="relaxed")


@triton.jit
def _inside(p, place, EVEN: tl.constexpr):
    """A tile with zeros outside the matrix, as a masked load would return."""
    if EVEN:
        return p
    i = place[0] + tl.arange(0, p.shape[0])[:, None]
    j = place[1] + tl.arange(0, p.shape[1])[None, :]
    return tl.where((i < place[2]) & (j < place[3]), p, 0.0)
