"""Maps a plane's values to a file's tensor and back: a permutation, read box by box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.runtime import numerics as num
from layoutc.runtime.bindings.facts import MATRICES, REST, BoundPlane
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts
from layoutc.runtime.torch_private import storage_key

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
Range = tuple[int, int]
AT_A_TIME = 1 << 22  # bytes of packed codes to rearrange at a time


class Place(NamedTuple):
    """Maps one plane of a matrix, or of a stack of matrices, to a file's tensor.

    rows, columns: sizes of the dims that the plane's rows and columns are split into. shape: the file's tensor.
    per: values per entry of its last dim.
    """

    bound: BoundPlane
    plane: Facts
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    shape: tuple[int, ...]
    per: int

    @property
    def packs(self) -> bool:
        """True if the file packs codes differently from the plane."""
        return self.bound.bits < 8


def place(bound: BoundPlane, plane: Facts, matrices: int | None) -> Place:
    """The place of a plane with `plane`'s shape and dtype.

    matrices: their number in a weight with leading dims, else None. Raises LayoutError if the values don't split so."""
    width = _width(bound.dtype)
    if bound.of_matrices and matrices is not None:  # `scalar` applies to a single matrix
        return Place(bound, plane, (1,), (1,), (matrices,), 1)
    if bound.scalar or bound.of_matrices or len(plane.shape) == 1:
        return Place(bound, plane, (1,), (1,), () if bound.scalar else (1,), 1)
    rows, columns = plane.shape
    if bound.bits < 8 and not bound.spread:
        columns = columns * 8 // bound.bits
    stacks = 1 if matrices is None or rows == 1 else matrices
    row_sizes, column_sizes = _split(bound.rows, rows, stacks), _split(bound.columns, columns, stacks)
    sizes = (*row_sizes, *column_sizes)
    bare = MATRICES in bound.rows and matrices is None  # a 2-D weight has no dim for matrices
    stated = (*bound.rows, *bound.columns)
    named = bound.counted or _dims(bound)
    dims = [prod(sizes[i] for i in dim) for dim in named if not (bare and stated[dim[0]] == MATRICES)]
    size = bound.bits if bound.bits < 8 else 8 * plane.dtype.itemsize
    per = 8 * width // size
    last = sizes[bound.order[-1]]
    if per == 0 or dims[-1] % per or (bound.bits < 8 and last * bound.bits % 8):
        raise LayoutError(f"{dims[-1]} values of {size} bits do not fill entries of {bound.dtype}")
    return Place(bound, plane, row_sizes, column_sizes, (*dims[:-1], dims[-1] // per), per)


def _dims(bound: BoundPlane) -> list[tuple[int, ...]]:
    """For each dim of a file's tensor, the value dims that it joins, outermost first."""
    names = iter(bound.order)
    return [tuple(islice(names, count)) for count in bound.joined or [1] * len(bound.order)]


def _width(dtype: str) -> int:
    """The bytes per entry of a safetensors dtype."""
    return WIDTHS.get(dtype) or int(dtype[1:]) // 8


def _split(stated: Sequence[int], whole: int, matrices: int) -> tuple[int, ...]:
    known = prod(matrices if size == MATRICES else size for size in stated if size != REST)
    if whole % known:
        raise LayoutError(f"{whole} does not split into pieces of {known}")
    return tuple(whole // known if size == REST else matrices if size == MATRICES else size for size in stated)


def weight_shape(bound: BoundPlane, stored: Sequence[int], per_entry: float) -> tuple[int, ...] | None:
    """The shape of the weight whose codes fill a file's tensor of shape `stored`; None if there is none.

    per_entry: codes per entry of the plane.
    """
    dims, sizes = _dims(bound), (*bound.rows, *bound.columns)
    stacked = len(stored) == len(dims)
    kept = [dim for dim in dims if stacked or sizes[dim[0]] != MATRICES]
    if not stored or len(stored) != len(kept):
        return None
    found: dict[int, int] = {}
    values = [*stored[:-1], stored[-1] * 8 * _width(bound.dtype) // bound.bits]
    for dim, value in zip(kept, values, strict=True):
        known = prod(sizes[i] for i in dim if sizes[i] > 0)
        free = [i for i in dim if sizes[i] <= 0]
        if len(free) > 1 or value % known or (not free and value != known and dim != kept[-1]):
            return None
        found |= {i: sizes[i] for i in dim if sizes[i] > 0} | dict.fromkeys(free, value // known)
    rows = [found[i] for i in range(len(bound.rows)) if i in found and sizes[i] != MATRICES]
    columns = [found[i] for i in range(len(bound.rows), len(sizes))]
    lead = (found[sizes.index(MATRICES)],) if stacked and MATRICES in bound.rows else ()
    return (*lead, prod(rows), round(prod(columns) * (1 if bound.bits < 8 else per_entry)))


# ----------------------------------------------------------------------------------------------------------------- read
def read(at: Place, rows: Range, columns: Range, fetch: Callable[[tuple[slice, ...]], Tensor]) -> Tensor:
    """The plane's entries at rows x columns, in its dtype. fetch: returns a box of the file's tensor.

    Repacking codes needs several times their bytes, so they are read a few rows at a time.
    """
    each = _rows_at_a_time(at, columns)
    if rows[1] - rows[0] <= each:
        return _read(at, rows, columns, fetch)
    out = torch.empty((rows[1] - rows[0], columns[1] - columns[0]), dtype=at.plane.dtype, device="cpu")
    for first in range(rows[0] // each * each, rows[1], each):
        part = max(first, rows[0]), min(first + each, rows[1])
        out[part[0] - rows[0] : part[1] - rows[0]] = _read(at, part, columns, fetch)
    return out


def _rows_at_a_time(at: Place, columns: Range) -> int:
    """The number of rows that has about AT_A_TIME bytes and is aligned to the inner dims of the rows."""
    if not at.packs or not at.rows:
        return max(1, at.plane.shape[0])
    wanted, rows = max(1, AT_A_TIME // max(1, columns[1] - columns[0])), 1
    for size in reversed(at.rows):
        if rows * size > wanted and rows > 1:
            return rows * max(1, wanted // rows)
        rows *= size
    return rows


def _read(at: Place, rows: Range, columns: Range, fetch: Callable[[tuple[slice, ...]], Tensor]) -> Tensor:
    plane, bound = at.plane, at.bound
    if bound.of_matrices:
        values = _undone(bound, _as(fetch(()).reshape(-1), plane.dtype))
        return values.repeat_interleave(plane.shape[0] // max(1, len(values)))[rows[0] : rows[1], None]
    if len(plane.shape) == 1 or bound.scalar:
        return _undone(bound, _as(fetch(()).reshape(1), plane.dtype)).reshape(plane.shape)
    if rows[0] >= rows[1] or columns[0] >= columns[1]:
        return torch.empty(
            (max(0, rows[1] - rows[0]), max(0, columns[1] - columns[0])), dtype=plane.dtype, device="cpu"
        )
    codes = prod(at.columns) // plane.shape[1] if plane.shape[1] else 1
    wanted = (columns[0] * codes, columns[1] * codes)
    split, sizes = len(at.rows), (*at.rows, *at.columns)
    boxes = _whole_entries(at, [*_box(at.rows, rows), *_box(at.columns, wanted)])
    index = []
    dims, stated = _dims(bound), (*bound.rows, *bound.columns)
    for dim in dims:
        if stated[dim[0]] != MATRICES or len(at.shape) == len(dims):  # a 2-D weight has no dim for matrices
            first = _flat([sizes[i] for i in dim], [boxes[i] for i in dim])
            index.append(slice(first, first + prod(boxes[i][1] - boxes[i][0] for i in dim)))
    index[-1] = slice(index[-1].start // at.per, index[-1].stop // at.per)
    found = _as(fetch(tuple(index)), torch.uint8 if at.packs else plane.dtype)
    last, inner = bound.order[-1], len(sizes) - 1  # the dims that codes are packed along: in the file, in the plane
    pairs = bound.bits == 4 and not bound.spread and last != inner
    pairs = pairs and not any(end % 2 for end in (*boxes[inner], *boxes[last]))
    widths = [b - a for a, b in boxes]
    if pairs:
        widths[last] //= 2
        values = found.reshape([widths[i] for i in bound.order])
        values = _in_other_pairs(values, bound.order.index(inner), bound.low_first, bound.plane_low_first)
        widths[last], widths[inner], codes = widths[last] * 2, widths[inner] // 2, 1
    else:
        values = num.unpack(found, bound.bits, low_first=bound.low_first) if at.packs else found
        values = values.reshape([widths[i] for i in bound.order])
    values = _permuted(values, [bound.order.index(i) for i in range(len(bound.order))])
    values = values.reshape((prod(widths[:split]), prod(widths[split:])))
    first_row, first_column = _flat(at.rows, boxes[:split]), _flat(at.columns, boxes[split:])
    if pairs:
        wanted, first_column = columns, first_column // 2
    values = values[rows[0] - first_row : rows[1] - first_row, wanted[0] - first_column : wanted[1] - first_column]
    if at.packs and not pairs and not bound.spread:
        values = num.pack(values.contiguous(), bound.bits, low_first=bound.plane_low_first)
    return _undone(bound, values)


def _whole_entries(at: Place, boxes: Sequence[Range]) -> list[Range]:
    """The smallest enclosing boxes that are a contiguous range of each of the tensor's dims, cover whole entries of its
    last dim, and are contiguous in the plane's rows and columns."""
    sizes, split = (*at.rows, *at.columns), len(at.rows)
    dims, found = _dims(at.bound), list(boxes)
    while True:
        before = list(found)
        for dim in (range(split), range(split, len(sizes)), *dims):
            several = False
            for i in dim:  # inside a dim with several values, read all
                found[i] = (0, sizes[i]) if several else found[i]
                several = several or found[i][1] - found[i][0] > 1
        inner = 1
        for i in reversed(dims[-1]):
            step = at.per // gcd(at.per, inner)
            first, end = found[i][0] // step * step, -(-found[i][1] // step) * step
            if end <= sizes[i]:
                found[i] = first, end
                break
            found[i], inner = (0, sizes[i]), inner * sizes[i]
        if found == before:
            return found


def _in_other_pairs(packed: Tensor, dim: int, low_first: bool, then_low_first: bool) -> Tensor:
    """Repacks 4-bit codes from pairs along the last dim to pairs along `dim`, whose size is even.

    Two adjacent bytes along `dim` hold two by two codes. They become two along the last dim, without unpacking.
    """
    index: list[slice] = [slice(None)] * packed.dim()
    halves = []
    for parity in (0, 1):
        index[dim] = slice(parity, None, 2)
        halves.append(packed[tuple(index)])
    if not low_first:
        halves = [(half << 4) | (half >> 4) for half in halves]
    a, b = halves if then_low_first else halves[::-1]
    return torch.stack(((a & 15) | (b << 4), (a >> 4) | (b & 0xF0)), dim=-1).flatten(-2)


def _permuted(values: Tensor, order: Sequence[int]) -> Tensor:
    """Permutes dims; the result is contiguous. Copies matrix by matrix if the permutation is a transpose of matrices:
    torch does that several times as fast as a permutation of more dims."""
    runs: list[list[int]] = []
    for dim in (one for one in order if values.shape[one] != 1):
        if runs and runs[-1][-1] == max((d for d in range(dim) if values.shape[d] != 1), default=-1):
            runs[-1].append(dim)
        else:
            runs.append([dim])
    ranks = [sorted(runs).index(run) for run in runs]
    if ranks not in ([1, 0], [0, 2, 1]) or not values.is_contiguous() or not values.numel():
        return values.permute(tuple(order)).contiguous()
    rows, columns = (prod(values.shape[d] for d in run) for run in runs[-2:])
    out = values.new_empty([values.shape[d] for d in order])
    for into, matrix in zip(out.view(-1, rows, columns), values.view(-1, columns, rows), strict=True):
        into.copy_(matrix.t())
    return out


def _box(sizes: Sequence[int], wanted: Range) -> list[Range]:
    """For each mixed-radix digit, the range that covers the digits of the numbers `wanted`."""
    ranges, single, (first, last) = list[Range](), True, (wanted[0], wanted[1] - 1)
    for d, size in enumerate(sizes):
        inner = prod(sizes[d + 1 :])
        a, b = (first // inner % size, last // inner % size) if single else (0, size - 1)
        ranges.append((a, b + 1))
        single = single and a == b
    return ranges


def _flat(sizes: Sequence[int], box: Sequence[Range]) -> int:
    """The flat index of a box's first value."""
    number = 0
    for size, (first, _) in zip(sizes, box, strict=True):
        number = number * size + first
    return number


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Views the same bytes as another dtype. A word holds several entries along the last dim."""
    if values.dtype == dtype:
        return values
    wide = values.shape[-1] * values.dtype.itemsize // dtype.itemsize
    # Flatten first: dims of size 1 may have any stride, and then torch can't view them as another dtype.
    return values.contiguous().reshape(-1).view(dtype).reshape((*values.shape[:-1], wide))


def _undone(bound: BoundPlane, values: Tensor) -> Tensor:
    """Inverts `formed`: the values that the file stores as `values`. Raises LayoutError if no fp32 value fits."""
    if bound.over is None and bound.by is None:
        return values
    near = torch.full_like(values, bound.over) / values if bound.over is not None else values * (bound.by or 1.0)
    for ulps in (0, 1, -1, 2, -2):
        candidate = (near.view(torch.int32) + ulps).view(torch.float32)
        if torch.equal(formed(bound, candidate), values):
            return candidate
    form = f"{bound.over:g} / x" if bound.over is not None else f"x / {bound.by:g}"
    raise LayoutError(f"no fp32 value x gives {values.flatten()[0].item()!r} as {form}, so the recipe can't hold it")


def formed(bound: BoundPlane, values: Tensor) -> Tensor:
    """Converts values to the file's form: over / x or x / by."""
    if bound.over is not None:  # torch computes number / tensor as reciprocal times number, which rounds twice
        return torch.full_like(values, bound.over) / values
    return values / bound.by if bound.by is not None else values


# ---------------------------------------------------------------------------------------------------------------- write
def write(at: Place, plane: Tensor, dtype: torch.dtype) -> Tensor:
    """The file's tensor, in `dtype`, for a whole plane. The inverse of `read`; never shares the plane's memory."""
    bound = at.bound
    values = formed(bound, plane)
    if bound.of_matrices:
        each = values.reshape(prod(at.shape), -1)
        if not torch.equal(each[:, :1].expand_as(each).view(torch.int32), each.view(torch.int32)):
            raise LayoutError(
                "rows of a matrix were quantized under separate amaxes, but files have one for all: write the whole "
                "weight at once"
            )
        return each[:, 0].clone(memory_format=torch.contiguous_format).reshape(at.shape)
    if len(at.plane.shape) == 1 or bound.scalar:
        return values.reshape(at.shape).clone()
    if at.packs:
        return _packed_anew(at, values).reshape(-1).view(dtype).reshape(at.shape)
    moved = _permuted(values.reshape((*at.rows, *at.columns)), bound.order)
    made = moved.reshape(-1).view(dtype).reshape(at.shape)
    return made.clone() if storage_key(made) == storage_key(plane) else made


def _packed_anew(at: Place, plane: Tensor) -> Tensor:
    """Repacks codes into the file's bytes, a few rows at a time."""
    bound, inner = at.bound, prod(at.rows[1:])
    sizes = (*at.rows, *at.columns)
    out = plane.new_empty([sizes[i] for i in bound.order[:-1]] + [sizes[bound.order[-1]] * bound.bits // 8])
    outermost, whole = bound.order.index(0), sizes[0]
    each = max(1, AT_A_TIME // max(1, inner * plane.shape[1]))
    if outermost == len(bound.order) - 1:  # the packed dim can't be cut at any row
        each = whole
    last, inner_column = bound.order[-1], len(sizes) - 1
    pairs = bound.bits == 4 and not bound.spread and last != inner_column
    pairs = pairs and not (sizes[last] % 2 or sizes[inner_column] % 2)
    for first in range(0, whole, each):
        count = min(each, whole - first)
        rows = plane[first * inner : (first + count) * inner].contiguous()
        if pairs:
            dims = [count, *sizes[1:-1], sizes[-1] // 2]
            packed = _in_other_pairs(rows.reshape(dims), last, bound.plane_low_first, bound.low_first)
            packed = _permuted(packed, bound.order)
        else:
            codes = rows if bound.spread else num.unpack(rows, bound.bits, low_first=bound.plane_low_first)
            codes = _permuted(codes.reshape((count, *sizes[1:])), bound.order)
            packed = num.pack(codes, bound.bits, low_first=bound.low_first)
        out.narrow(outermost, first if each < whole else 0, packed.shape[outermost]).copy_(packed)
    return out
