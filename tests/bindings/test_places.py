"""Values of planes in files' tensors, against the integers of the layout, one value at a time."""

from __future__ import annotations

import re
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layoutc.checkpoint.held import places
from layoutc.checkpoint.held import stored as held
from layoutc.checkpoint.held.sources import BoundSource
from layoutc.emit.files_text import code
from layoutc.layout.bindings import Stored, bound, dims, where
from layoutc.layout.layout import AMAX, Plane
from layoutc.runtime.bindings import facts
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts
from layoutc.spec.bindings import FileTensor
from layoutc.spec.notation import AS_STORED, MATRICES, NotationError, parse_file_layout

WIDTHS = {"U8": 1, "I32": 4, "I64": 8, "F32": 4, "BF16": 2, "F8_E4M3": 1}
TORCH = {
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


def as_generated(found: tuple[facts.BoundPlane, object]) -> facts.BoundPlane:
    """What generated code states, read as Python."""
    made: facts.BoundPlane = eval(code(found[0], ()), vars(facts).copy())
    assert made == found[0]
    return made


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plane, FileTensor, bool, int | None, int, int]:
    """A plane, the tensor that holds it, whether codes fill low bits first, the matrices, and values' rows, columns."""
    bits = draw(st.sampled_from([2, 4, 8, 16, 32]))
    dtypes = {2: ["U8", "I32"], 4: ["U8", "I32", "I64"], 8: ["U8", "F8_E4M3", "I32"], 16: ["BF16"], 32: ["F32"]}
    dtype = draw(st.sampled_from(dtypes[bits]))
    words = 8 * WIDTHS[dtype] // bits
    matrices = draw(st.sampled_from([None, 1, 3]))
    row_names = [*([MATRICES] if draw(st.booleans()) or matrices else []), *draw(st.sampled_from([["m"], ["g", "r"]]))]
    column_names = draw(st.sampled_from([["k"], ["c", "b"], ["c", "b", "a"]]))
    sizes = {name: draw(st.integers(1, 3)) for name in "rba" if name in (*row_names, *column_names)}
    free = {name: draw(st.integers(1, 3)) for name in "mgkc" if name in (*row_names, *column_names)}
    order = draw(st.permutations([*row_names, *column_names]).filter(lambda names: names[-1] != MATRICES))
    for named in (sizes, free):
        if order[-1] in named:
            named[order[-1]] *= words
    rows, columns = matrices or 1, 1
    for name, size in (sizes | free).items():
        rows, columns = (rows * size, columns) if name in row_names else (rows, columns * size)
    columns_of_bytes = max(1, 8 // bits)
    if columns % columns_of_bytes:  # a row of a plane is whole bytes
        free[column_names[0]] *= columns_of_bytes
        columns *= columns_of_bytes
    joined = draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
    right, several = order[0], False
    for before, name, join in zip(order, order[1:], joined, strict=False):
        together = join and MATRICES not in (before, name)
        right += f"{' ' if together else ') ('}{name}"
        several |= together
    right = f"({right})" if several else " ".join(order)
    pattern = f"({' '.join(row_names)}) ({' '.join(column_names)}) -> {right}"
    spread = bits in (2, 4) and draw(st.booleans())
    plane = Plane(
        "rowwise_data", "data", 1, 1, 8 if spread else bits, "bfloat16" if bits == 16 else "", bits if spread else 0
    )
    pack = draw(st.sampled_from([None, "low-first", "high-first"]))
    tensor = FileTensor(name="{name}", dtype=dtype, layout=pattern, sizes=sizes, pack=pack if bits < 8 else None)
    return plane, tensor, draw(st.booleans()), matrices, rows, columns


def written_by_integers(
    plane: Plane, tensor: FileTensor, low_first: bool, matrices: int | None, values: list[list[int]]
) -> tuple[list[int], bytes]:
    """The dims of the file's tensor in values, and its bytes: every value put where the pattern says."""
    assert tensor.layout is not None
    layout = parse_file_layout(tensor.layout, dict(tensor.sizes))
    sizes = dims(layout, len(values), len(values[0]), matrices or 1)
    shape = [sizes[name] for name in layout.order]
    stored, bits = {}, plane.code_bits or plane.bits
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            number = 0
            for size, at in zip(shape, where(layout, sizes, (i, j)), strict=True):
                number = number * size + at
            stored[number] = value
    low = (low_first or bool(plane.code_bits)) if tensor.pack is None else tensor.pack == "low-first"
    out = bytearray()
    if bits >= 8:
        for number in range(len(stored)):
            out += stored[number].to_bytes(bits // 8, "little")
        return shape, bytes(out)
    per = 8 // bits
    for first in range(0, len(stored), per):
        codes = [stored[first + i] for i in range(per)]
        out.append(sum(code << (bits * (i if low else per - 1 - i)) for i, code in enumerate(codes)))
    bare = MATRICES in layout.order and matrices is None
    return [size for name, size in zip(layout.order, shape, strict=True) if not (bare and name == MATRICES)], bytes(out)


def plane_of(plane: Plane, values: list[list[int]], low_first: bool) -> torch.Tensor:
    """The plane as it is stored: rows of whole bytes."""
    bits, out = plane.bits, bytearray()
    for row in values:
        if bits >= 8:
            out += b"".join(value.to_bytes(bits // 8, "little") for value in row)
            continue
        per = 8 // bits
        for first in range(0, len(row), per):
            codes = row[first : first + per]
            out.append(sum(code << (bits * (i if low_first else per - 1 - i)) for i, code in enumerate(codes)))
    dtype = {16: torch.bfloat16, 32: torch.float32}.get(bits, torch.uint8)
    return torch.frombuffer(bytearray(out), dtype=torch.uint8).view(dtype).view(len(values), -1)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*as_bytes)


@given(cases())
@settings(max_examples=50, deadline=None)
def test_the_shape_of_a_weight_follows_from_that_of_its_codes(case) -> None:  # type: ignore[no-untyped-def]
    """Unless two unknown sizes are joined in one dim of the file's tensor."""
    plane, tensor, low_first, matrices, rows, columns = case
    stored = plane_of(plane, [[0] * columns] * rows, low_first)
    by = as_generated(bound(Stored(plane.name, plane.bits, plane.code_bits), tensor, low_first))
    at = places.place(by, Facts(tuple(stored.shape), stored.dtype), matrices)
    dims = re.findall(r"\(([^)]*)\)|(\w+)", tensor.layout.partition("->")[2])
    is_known = all(len({*"mgkc"} & {*" ".join(names).split()}) < 2 for names in dims)
    expected = (matrices, rows // matrices, columns) if matrices else (rows, columns)
    assert places.weight_shape(by, at.shape, max(1, 8 // plane.bits)) == (expected if is_known else None)


@given(cases(), st.data())
@settings(max_examples=50, deadline=None)
def test_boxes_and_whole_tensors_hold_the_values_that_the_pattern_says(case, data) -> None:  # type: ignore[no-untyped-def]
    plane, tensor, low_first, matrices, rows, columns = case
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randint(0, 2 ** (plane.code_bits or plane.bits), (rows, columns), generator=generator).tolist()
    stored = plane_of(plane, values, low_first)
    at = places.place(
        as_generated(bound(Stored(plane.name, plane.bits, plane.code_bits), tensor, low_first)),
        Facts(tuple(stored.shape), stored.dtype),
        matrices,
    )
    _, expected = written_by_integers(plane, tensor, low_first, matrices, values)
    in_file = torch.frombuffer(bytearray(expected), dtype=torch.uint8).view(TORCH[tensor.dtype]).view(at.shape)
    assert same(places.write(at, stored, TORCH[tensor.dtype]), in_file)
    r0, c0 = data.draw(st.integers(0, rows)), data.draw(st.integers(0, stored.shape[1]))
    r1, c1 = data.draw(st.integers(r0, rows)), data.draw(st.integers(c0, stored.shape[1]))
    read = places.read(at, (r0, r1), (c0, c1), lambda index: in_file[index])
    assert same(read, stored[r0:r1, c0:c1])


def test_dims_may_only_count_the_values() -> None:
    tensor = FileTensor(name="{name}", dtype="U8", layout="(r a) k -> (r k a) -> r (k a)", sizes={"a": 3})
    by, plane = as_generated(bound(Stored("rowwise_scale", 8), tensor, True)), torch.arange(30, dtype=torch.uint8)
    at, plane = places.place(by, Facts((6, 5), torch.uint8), None), plane.view(6, 5)
    in_file = plane.view(2, 3, 5).mT.reshape(2, 15)
    assert at.shape == in_file.shape
    assert same(places.write(at, plane, torch.uint8), in_file)
    stored = held.Stored(Path("f"), "w", "U8", (2, 15), 0, 30)
    source = BoundSource("w", at.plane, ((stored, at),), shared=False)
    for rows, columns in product(combinations(range(7), 2), combinations(range(6), 2)):
        box = slice(*rows), slice(*columns)
        assert same(source.read(box, lambda _, index: in_file[index]), plane[box])
    with pytest.raises(NotationError, match="`a` is missing"):
        parse_file_layout("(r a) k -> (r k a) -> r k", {"a": 3})
    with pytest.raises(NotationError, match="counts the values of one dim"):
        parse_file_layout("(r a) k -> r (k a) -> r (a k)", {"a": 3})


@given(st.integers(0, 2**32 - 1), st.sampled_from(["2688 / x", "x / 2688"]))
@settings(max_examples=100, deadline=None)
def test_a_quotient_is_undone_or_refused(word: int, form: str) -> None:
    """What is written from any fp32 value is read as a value that writes the same again."""
    x = torch.tensor([word], dtype=torch.int64).to(torch.int32).view(torch.float32)
    tensor = FileTensor(name="{name}_scale_2", dtype="F32", form=form, layout="scalar")
    at = places.place(as_generated(bound(Stored(AMAX.name, AMAX.bits), tensor, True)), Facts((1,), torch.float32), None)
    assert at.shape == ()
    in_file = places.write(at, x, torch.float32)
    assert in_file.shape == ()
    if in_file.isnan():
        return
    read = places.read(at, (0, 1), (0, 1), lambda index: in_file[index])
    assert same(places.write(at, read, torch.float32), in_file)


def test_a_quotient_that_nothing_has_is_refused() -> None:
    """Of 2688 / x, not every fp32 value is one."""
    tensor = FileTensor(name="{name}_global_scale", dtype="F32", form="2688 / x")
    at = places.place(as_generated(bound(Stored(AMAX.name, AMAX.bits), tensor, True)), Facts((1,), torch.float32), None)
    words = torch.arange(0x3FF80000, 0x3FF80400, dtype=torch.int32)
    near = _near(words)
    quotients = set((torch.full_like(near, 2688.0) / near).tolist())
    refused = 0
    for value in words.view(torch.float32):
        one = value.reshape(1)
        if value.item() in quotients:
            read = places.read(at, (0, 1), (0, 1), lambda index, one=one: one[index])
            assert torch.equal(torch.tensor([2688.0]) / read, one)
            continue
        with pytest.raises(LayoutError, match="no fp32 value x gives"):
            places.read(at, (0, 1), (0, 1), lambda index, one=one: one[index])
        refused += 1
    assert 0 < refused < len(words)


def _near(words: torch.Tensor) -> torch.Tensor:
    """Every fp32 value between the quotients of the first and the last, and some beside."""
    first, last = (2688.0 / words[[-1, 0]].view(torch.float32)).view(torch.int32).tolist()
    return torch.arange(first - 8, last + 8, dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("bits", [2, 4, 8, 32])
def test_a_plane_as_it_is_moves_without_unpacking(bits: int) -> None:
    plane = Plane("rowwise_data", "data", 1, 1, bits)
    tensor = FileTensor(name="{name}", dtype="U8" if bits < 32 else "F32")
    found, layout = bound(Stored(plane.name, plane.bits), tensor, True)
    assert found.bits == max(bits, 8)
    assert layout == AS_STORED
