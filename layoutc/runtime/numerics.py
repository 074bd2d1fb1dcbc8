"""Building blocks of generated references: codes, packing, blocks. Plain torch, any device, no approximations.

Each function is the definition of its operation; kernels are compared with it byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import islice
from math import gcd, prod

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv

Bundles = Sequence[Sequence[tuple[int, int, int, int, int]]]
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
F32_MAX = torch.finfo(torch.float32).max


def to_codes(x: Tensor, thresholds: Sequence[float], sign_bit: int | None, nan_code: int) -> Tensor:
    """fp32 values -> uint8 codes, one per byte: the number of thresholds that are <= |x|; NaN gives `nan_code`.

    sign_bit: the sign's position in the code; None for formats without one. Saturates.
    """
    code = torch.bucketize(x.abs().contiguous(), x.new_tensor(thresholds), right=True, out_int32=True).to(torch.uint8)
    return _signed(code, x, sign_bit, nan_code)


def _signed(code: Tensor, x: Tensor, sign_bit: int | None, nan_code: int) -> Tensor:
    """Adds the signs of x, and NaN, to codes of magnitudes. If the sign bit alone means NaN, zero has no sign."""
    if sign_bit is not None:
        code |= torch.signbit(x).to(torch.uint8) << sign_bit
        if nan_code == 1 << sign_bit:
            code.masked_fill_(code == nan_code, 0)
    return code.masked_fill_(x.isnan(), nan_code)


def cast_to_codes(x: Tensor, dtype: torch.dtype, largest: float, nan_code: int) -> Tensor:
    """`to_codes` for formats that torch has: saturates at `largest`, rounds to nearest even, NaN gives `nan_code`."""
    return x.clamp(-largest, largest).to(dtype).view(torch.uint8).masked_fill_(x.isnan(), nan_code)


def to_codebook(x: Tensor, thresholds: Sequence[float], codes: Sequence[int], nan_code: int) -> Tensor:
    """fp32 values -> the codes of the nearest codebook values; NaN gives `nan_code`. codes: by ascending value.

    thresholds: entry i is the least number that is nearer to value i + 1 than to value i.
    """
    at = torch.bucketize(x.contiguous(), x.new_tensor(thresholds), right=True)
    table = torch.tensor(codes, dtype=torch.uint8, device=x.device)
    return table[at].masked_fill_(x.isnan(), nan_code)


def codebook_steps(values: Sequence[float]) -> tuple[float, ...]:
    """The fp32 thresholds from which a codebook's next value is nearest, ascending; ties go to the lower value.

    A midpoint, rounded to fp32, is a tie.
    """
    numbers = torch.tensor(sorted(value for value in values if value == value), dtype=torch.float64, device="cpu")
    middles = ((numbers[:-1] + numbers[1:]) / 2).float()
    return tuple(torch.nextafter(middles, torch.full_like(middles, torch.inf)).tolist())


def to_half(x: Tensor, dtype: torch.dtype, largest: float, nan_code: int) -> Tensor:
    """fp32 -> fp16 or bf16, to nearest even: saturates at `largest`, and NaN gets the bits `nan_code`."""
    bits = x.clamp(-largest, largest).to(dtype).view(torch.int16)
    return bits.masked_fill_(x.isnan(), nan_code).view(dtype)


def to_integer_codes(
    x: Tensor, bits: int, lowest: int, fraction: int, nan_code: int, offset: int | None = None
) -> Tensor:
    """fp32 values -> two's complement codes in steps of 2**-fraction, one per byte; NaN gives `nan_code`.

    Rounds to nearest even, and saturates at `lowest` and at the largest code. offset: codes are steps plus offset.
    """
    steps = (x * float(1 << fraction)).round().clamp(lowest, _highest(bits, offset)).nan_to_num(0.0)
    codes = (steps.to(torch.int32) + (offset or 0)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).masked_fill_(x.isnan(), nan_code)


def _highest(bits: int, offset: int | None) -> int:
    """The largest number of steps that integer codes can represent."""
    return (1 << (bits - 1)) - 1 if offset is None else (1 << bits) - 1 - offset


def to_codes_by_chance(
    x: Tensor, bits: Tensor, magnitudes: Sequence[float], sign_bit: int | None, nan_code: int
) -> Tensor:
    """`to_codes` with stochastic rounding: away from zero as often as |x| is near that neighbor. See `_away`.

    magnitudes: the format's, ascending from 0; code c is magnitudes[c].
    """
    size, table = x.abs().contiguous(), x.new_tensor(magnitudes)
    low = torch.bucketize(size, table[1:], right=True)
    step = table[(low + 1).clamp(max=len(magnitudes) - 1)] - table[low]
    share = torch.where(step > 0, (size - table[low]) / step, 0.0).nan_to_num(0.0)
    code = (low + _away(share, bits)).to(torch.uint8)
    return _signed(code, x, sign_bit, nan_code)


def to_integer_codes_by_chance(
    x: Tensor, bits: Tensor, width: int, lowest: int, fraction: int, nan_code: int, offset: int | None = None
) -> Tensor:
    """`to_integer_codes` of `width` bits with stochastic rounding. See `_away`."""
    steps = (x * float(1 << fraction)).clamp(lowest, _highest(width, offset)).nan_to_num(0.0)
    size = steps.abs()
    low = size.floor()
    whole = low.to(torch.int64) + _away(size - low, bits)
    codes = (torch.where(torch.signbit(steps), -whole, whole) + (offset or 0)) & ((1 << width) - 1)
    return codes.to(torch.uint8).masked_fill_(x.isnan(), nan_code)


def _away(share: Tensor, bits: Tensor) -> Tensor:
    """1 where a magnitude is rounded away from zero, else 0: where bits + floor(share * 2^32) >= 2^32.

    share: its distance from the neighbor towards zero, in steps, from 0 up to, not including, 1.
    """
    return ((share * 2.0**32).to(torch.int64) + bits) >> 32


def from_integer_codes(codes: Tensor, bits: int, fraction: int, offset: int | None = None) -> Tensor:
    """Two's complement codes, or steps plus an offset -> fp32 values, exact."""
    if offset is not None:
        return (codes.int() - offset).float() / (1 << fraction)
    half = 1 << (bits - 1)
    return ((codes.int() ^ half) - half).float() / (1 << fraction)


def from_codes(codes: Tensor, values: Sequence[float]) -> Tensor:
    """Codes -> fp32 values: values[code]."""
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.int()]


def cast_from_codes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """`from_codes` for formats that torch has."""
    return codes.view(dtype).float()


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a / b, rounded once; at least one of them is a tensor.

    Plain numbers become tensors first: torch may multiply by a plain number's rounded reciprocal.
    """
    if isinstance(b, Tensor):
        return (a if isinstance(a, Tensor) else torch.full_like(b, a)) / b
    assert isinstance(a, Tensor)
    return a / torch.full_like(a, b)


def floor_power_of_two(x: Tensor) -> Tensor:
    """Clears the mantissa: the power of two at or below a positive normal fp32 value. NaN stays NaN."""
    return torch.where(x.isnan(), x, (x.view(torch.int32) & 0x7F800000).view(torch.float32))


def _lane(bits: int) -> torch.dtype:
    """The integer that holds a group of packed codes."""
    return torch.uint8 if bits == 8 else torch.int32 if bits < 32 else torch.int64


def pack(codes: Tensor, bits: int, low_first: bool) -> Tensor:
    """Packs codes of less than 8 bits along the last dim: (..., n) uint8 -> (..., n * bits / 8) uint8.

    Code c starts at bit c * bits of its row. low_first: bits count from each byte's low end, else its high end.
    """
    group = 8 // gcd(bits, 8)
    lanes = codes.reshape(*codes.shape[:-1], codes.shape[-1] // group, group).to(_lane(group * bits))
    shifts = range(0, group * bits, bits)
    word = sum(lanes[..., c] << (s if low_first else (group - 1) * bits - s) for c, s in enumerate(shifts))
    nbytes = group * bits // 8
    order = range(nbytes) if low_first else reversed(range(nbytes))
    assert isinstance(word, Tensor)
    return torch.stack([(word >> (8 * b)) & 0xFF for b in order], dim=-1).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, bits: int, low_first: bool) -> Tensor:
    """The inverse of `pack`."""
    group = 8 // gcd(bits, 8)
    nbytes = group * bits // 8
    lanes = packed.reshape(*packed.shape[:-1], packed.shape[-1] // nbytes, nbytes).to(_lane(group * bits))
    order = range(nbytes) if low_first else reversed(range(nbytes))
    word = sum(lanes[..., i] << (8 * b) for i, b in enumerate(order))
    shifts = range(0, group * bits, bits)
    mask = (1 << bits) - 1
    assert isinstance(word, Tensor)
    codes = [(word >> (s if low_first else (group - 1) * bits - s)) & mask for s in shifts]
    return torch.stack(codes, dim=-1).to(torch.uint8).flatten(-2)


def swizzle(
    x: Tensor,
    parts: Sequence[Sequence[int]],
    order: Sequence[int],
    joined: Sequence[int],
    picks: Sequence[tuple[int, Sequence[int]]] = (),
) -> Tensor:
    """Reorders values: splits dims into parts, permutes the parts, and joins them into dims again.

    parts: the sizes of each dim's parts; 0 for the one that takes the rest. order: where in x each part of the result
    comes from. joined: how many parts make each dim of the result. picks: (part of x, its entries in order).
    """
    sizes: list[int] = []
    for extent, of in zip(x.shape, parts, strict=True):
        rest = extent // prod(size for size in of if size)
        sizes += [size or rest for size in of]
    x = x.reshape(sizes)
    for part, entries in picks:
        x = torch.stack([x.select(part, entry) for entry in entries], part)
    ordered = iter(sizes[part] for part in order)
    return x.permute(*order).reshape([prod(islice(ordered, count)) for count in joined])


def in_words(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes (..., n) as words of an integer dtype, (..., n / its size), lowest byte first."""
    if not packed.numel():  # view(dtype) rejects strides of empty tensors
        return packed.new_empty((*packed.shape[:-1], packed.shape[-1] // dtype.itemsize), dtype=dtype)
    return packed.contiguous().view(dtype)


def to_records(values: Sequence[Tensor], records: int, bundles: Bundles) -> Tensor:
    """Values of planes, each (rows, entries) -> bytes, (rows, bytes), with `records` records per row.

    bundles: slices (plane's number, first entry, end, lowest bit, bits) whose entries share words, the first lowest.
    """
    lanes = [one.contiguous().view(_INTS[one.itemsize]).view(len(one), records, -1) for one in values]
    parts: list[Tensor] = []
    for bundle in bundles:
        width, at, pieces = sum(one[4] for one in bundle), 0, list[Tensor]()
        for plane, start, stop, low, bits in bundle:
            some = (lane if (lane := lanes[plane][..., start:stop]).dtype == torch.uint8 else lane.long()) >> low
            pieces.append((some & (1 << bits) - 1).to(torch.uint8 if width <= 8 else torch.int64) << at)
            at += bits
        word = reduce(torch.bitwise_or, pieces)
        whole = [word if width == 8 else (word >> 8 * byte & 0xFF).to(torch.uint8) for byte in range(width // 8)]
        parts.append(torch.stack(whole, dim=-1).flatten(-2) if whole else pack(word, width, True))
    return torch.cat(parts, dim=-1).flatten(1)


def from_records(
    joined: Tensor, records: int, bundles: Bundles, planes: Sequence[tuple[int, torch.dtype]]
) -> list[Tensor]:
    """The inverse of to_records. planes: each plane's entries per record, and its dtype."""
    rows, at = joined.reshape(len(joined), records, -1), 0
    lanes = [rows.new_zeros(*rows.shape[:2], count, dtype=_INTS[dtype.itemsize]) for count, dtype in planes]
    for bundle in bundles:
        width, count = sum(one[4] for one in bundle), bundle[0][2] - bundle[0][1]
        part, at = rows[..., at : at + count * width // 8], at + count * width // 8
        words = unpack(part, width, True) if width < 8 else part if width == 8 else _words(part, width // 8)
        for place, (plane, start, stop, low, bits) in enumerate(bundle):
            lane, past = lanes[plane][..., start:stop], sum(one[4] for one in bundle[:place])
            lane |= (words >> past & (1 << bits) - 1).to(lane.dtype) << low
    return [one.flatten(1).view(dtype) for one, (_, dtype) in zip(lanes, planes, strict=True)]


def _words(part: Tensor, size: int) -> Tensor:
    """Words of `size` bytes, the first lowest, as int64."""
    return (part.reshape(*part.shape[:-1], -1, size).long() << torch.arange(size, device=part.device) * 8).sum(-1)


def hadamard(x: Tensor, axis: int, size: int, signs: int, scale: float) -> Tensor:
    """Multiplies each group of `size` (m, k) fp32 values along an axis by signs, a Hadamard matrix, and `scale`.

    signs: bit i is set where entry i of a group is multiplied by -1. The matrix is a butterfly: sums and differences of
    entries 1 apart, then of those 2 apart, up to size / 2, each rounded to fp32. scale: fp32(1 / sqrt(size)).
    """
    return _added(x * _signs(x, axis, size, signs), axis, size) * scale


def unhadamard(x: Tensor, axis: int, size: int, signs: int, scale: float) -> Tensor:
    """The inverse of `hadamard`: the same sums, then `scale`, then signs."""
    return _added(x, axis, size) * scale * _signs(x, axis, size, signs)


def _signs(x: Tensor, axis: int, size: int, signs: int) -> Tensor:
    """1 or -1 per entry along an axis, to multiply (m, k) values by."""
    entries = torch.tensor([-1.0 if signs >> i & 1 else 1.0 for i in range(size)], device=x.device)
    along = entries.repeat(x.shape[axis] // size)
    return along[:, None] if axis == 0 else along


def _added(x: Tensor, axis: int, size: int) -> Tensor:
    """Sums and differences of entries 1, 2, ... size / 2 apart, along an axis."""
    apart = 1
    while apart < size:
        m, k = x.shape
        pairs = x.reshape((m // (2 * apart), 2, apart, k) if axis == 0 else (m, k // (2 * apart), 2, apart))
        low, high = pairs.unbind(axis + 1)
        x = torch.stack([low + high, low - high], axis + 1).flatten(axis, axis + 2)
        apart *= 2
    return x


def to_blocks(x: Tensor, block_m: int | None, block_k: int | None) -> Tensor:
    """(m, k) -> (m blocks, block_m, k blocks, block_k), zeros after partial blocks. None: one block."""
    m, k = x.shape
    block_m, block_k = block_m or max(m, 1), block_k or k
    rows, columns = cdiv(m, block_m), cdiv(k, block_k)
    if (rows * block_m, columns * block_k) != (m, k):
        x = torch.nn.functional.pad(x, (0, columns * block_k - k, 0, rows * block_m - m))
    return x.reshape(rows, block_m, columns, block_k)


def from_blocks(blocks: Tensor, m: int, k: int) -> Tensor:
    """The inverse of `to_blocks`: cuts the padding off."""
    rows, block_m, columns, block_k = blocks.shape
    return blocks.reshape(rows * block_m, columns * block_k)[:m, :k]


def block_amax(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block, (m blocks, k blocks). NaN propagates."""
    return blocks.abs().amax(dim=(1, 3))


def block_range(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each block, each (m blocks, k blocks). NaN propagates."""
    return blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))


def block_sum(blocks: Tensor, first: str) -> Tensor:
    """The sum of each block, (m blocks, k blocks), in a fixed order: along axis `first` one by one, then by halves.

    By halves: along the other axis, entry i + half is added to entry i, where half is the largest power of two below
    the number of entries, until one entry is left.
    """
    blocks = blocks if first == "k" else blocks.transpose(1, 3).transpose(0, 2)
    total = blocks[..., 0]
    for entry in range(1, blocks.shape[3]):
        total = total + blocks[..., entry]
    while (size := total.shape[1]) > 1:
        half = 1 << (size - 1).bit_length() - 1
        low, high = total[:, :half], total[:, half:]
        total = torch.cat([low[:, : size - half] + high, low[:, size - half :]], dim=1)
    return (total[:, 0] if first == "k" else total[:, 0].t()).contiguous()


def block_mean(x: Tensor, block_m: int | None, block_k: int | None) -> Tensor:
    """The mean of each block of non-negative values, (m blocks, k blocks): block_sum by the number of values."""
    blocks = to_blocks(x, block_m, block_k)
    counts = to_blocks(torch.ones_like(x), block_m, block_k).sum(dim=(1, 3))
    return divide(block_sum(blocks, "k"), counts)


def least(candidates: Sequence[tuple[Tensor, ...]], errors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """For each entry, the values of the candidate with the smallest error; the first one of equal or NaN errors."""
    best, smallest = candidates[0], errors[0]
    for values, error in zip(candidates[1:], errors[1:], strict=True):
        better = error < smallest
        best = tuple(torch.where(better, new, old) for new, old in zip(values, best, strict=True))
        smallest = torch.where(better, error, smallest)
    return best


def column_amax(x: Tensor, block_k: int) -> Tensor:
    """The largest magnitude of each block of `block_k` columns, over all rows: fp32, (1, k blocks). NaN propagates."""
    columns = x.abs().amax(dim=0).float() if x.shape[0] else torch.zeros(x.shape[1], device=x.device)
    blocks = cdiv(x.shape[1], block_k)
    return pad_to(columns, blocks * block_k).view(blocks, block_k).amax(dim=1).view(1, blocks)


def tensor_amax(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor: fp32, (1,). NaN propagates; 0 for a tensor without elements."""
    return x.abs().amax().float().reshape(1) if x.numel() else torch.zeros(1, device=x.device)


def matrix_amax(x: Tensor, block_k: int | None) -> Tensor:
    """tensor_amax, (1,) fp32, if `block_k` is None; else column_amax, (1, k blocks) fp32."""
    return tensor_amax(x) if block_k is None else column_amax(x, block_k)


def per_element(values: Tensor, block_m: int | None, block_k: int | None, m: int, k: int) -> Tensor:
    """Values of blocks, (m blocks, k blocks), or (1,) for one block -> a tensor that broadcasts to (m, k)."""
    if values.dim() == 1:
        return values.reshape(1, 1)
    if block_m is not None and block_m > 1:
        values = values.repeat_interleave(block_m, dim=0)[:m]
    if block_k is not None and block_k > 1:
        values = values.repeat_interleave(block_k, dim=1)[:, :k]
    return values


def repeat(values: Tensor, dim: int, times: int, limit: int) -> Tensor:
    """Repeats each entry of a dim `times` times in a row; keeps the first `limit` entries."""
    return values.repeat_interleave(times, dim=dim).narrow(dim, 0, limit)


def pad_to(values: Tensor, *sizes: int) -> Tensor:
    """Pads with zeros to a shape of `sizes`; contiguous."""
    if values.shape == sizes:
        return values.contiguous()
    padded = values.new_zeros(sizes)
    padded[tuple(slice(0, size) for size in values.shape)] = values
    return padded
