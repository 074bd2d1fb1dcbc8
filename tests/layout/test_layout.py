"""The layout algebra: chains are bijections up to repeats and padding; numpy, torch and generated code agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_models import RECIPES, Array, laid_out, recipe_layout, reference, variant, write

from layoutc.layout.chain import Join, Reorder
from layoutc.layout.layout import Buffer, Chain, Layout, Pad, Permute, Repeat, Split, Step, swizzle_chain
from layoutc.runtime import numerics
from layoutc.spec.notation import parse_swizzle

SWIZZLE = parse_swizzle("(rt a b) (ct c) -> rt ct b a c", {"a": 4, "b": 32, "c": 4})
SHAPES = {
    "fp8_block": ((1, 3), (48, 80), (130, 257), (256, 128)),
    "fp8_current": ((3, 5), (16, 8)),
    "fp8_delayed": ((3, 5), (16, 8)),
    "mxfp8": ((32, 32), (96, 64), (160, 96)),
    "nvfp4": ((16, 16), (48, 80), (144, 16)),
}


# ------------------------------------------------------------------------------------------------- chains against numpy
@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """A chain of up to four random steps over a small array; pad and repeat sizes are chosen freely."""
    start = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    shape, steps = start, list[Step]()
    for _ in range(draw(st.integers(0, 4))):
        dims = len(shape)
        dim = draw(st.integers(0, dims - 1))
        kind = draw(st.sampled_from(["permute", "repeat", "pad", "split", "reorder", "join"]))
        step: Step
        if kind == "permute":
            step = Permute(tuple(draw(st.permutations(range(dims)))))
        elif kind == "repeat":
            times = draw(st.integers(1, 4))
            step = Repeat(dim, times, draw(st.integers(1, shape[dim] * times)))
        elif kind == "pad":
            step = Pad(tuple(draw(st.integers(1, 6)) for _ in range(dims)))
        elif kind == "reorder":
            step = Reorder(dim, tuple(draw(st.permutations(range(shape[dim])))))
        elif kind == "join":
            step = Join((*[1] * dim, dims - dim))
        else:
            sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=2)))
            if shape[dim] % prod(sizes) or dims + len(sizes) > 5:
                continue
            step = Split(dim, sizes, draw(st.integers(0, len(sizes))))
        if prod(step.shape(shape)) > 2000:
            continue
        steps.append(step)
        shape = step.shape(shape)
    bits = draw(st.sampled_from([4, 6, 8, 32]))
    if shape[-1] * bits % 8:
        steps.append(Pad((*(1 for _ in shape[:-1]), 4)))
    return Chain(start, tuple(steps), bits, draw(st.booleans()))


def apply_in_numpy(chain: Chain) -> Array:
    """The flat numbers of the start array's values where they end up, -1 for padding."""
    array = np.arange(prod(chain.start)).reshape(chain.start)
    for step in chain.steps:
        match step:
            case Permute(order):
                array = array.transpose(order)
            case Repeat(dim, times, limit):
                array = np.take(np.repeat(array, times, axis=dim), range(limit), axis=dim)
            case Pad(multiples):
                array = np.pad(
                    array, [(0, -n % of) for n, of in zip(array.shape, multiples, strict=True)], constant_values=-1
                )
            case Split(dim, sizes, rest):
                parts = (*sizes[:rest], -1, *sizes[rest:])
                array = array.reshape(*array.shape[:dim], *parts, *array.shape[dim + 1 :])
            case Reorder(dim, order):
                array = np.take(array, order, axis=dim)
            case Join(counts):
                array = array.reshape(*array.shape[: len(counts) - 1], -1)
    return array


@given(chains())
@settings(max_examples=25, deadline=None)
def test_a_chain_agrees_with_numpy_in_both_directions(chain: Chain) -> None:
    expected = apply_in_numpy(chain)
    assert chain.shapes[-1] == expected.shape
    assert chain.nbytes * 8 == expected.size * chain.bits
    for slot, number in enumerate(expected.flat):
        index = None if number < 0 else tuple(int(i) for i in np.unravel_index(number, chain.start))
        assert chain.value_at(*divmod(slot * chain.bits, 8)) == index


@given(chains())
@settings(max_examples=25, deadline=None)
def test_positions_and_value_at_are_mutual_inverses_and_cover_every_byte(chain: Chain) -> None:
    expected, found = apply_in_numpy(chain), dict[tuple[int, int], tuple[int, ...]]()
    for index in itertools.product(*map(range, chain.start)):
        positions = chain.positions(index)
        assert len(positions) == int((expected == np.ravel_multi_index(index, chain.start)).sum())
        for position in positions:
            assert position not in found, "two values at one position"
            assert chain.value_at(*position) == index
            found[position] = index
    slots = {divmod(slot * chain.bits, 8) for slot in range(expected.size)}
    padding = {slot for slot in slots if chain.value_at(*slot) is None}
    assert set(found) | padding == slots
    assert not set(found) & padding
    covered = {bit for byte, bit in slots for bit in range(byte * 8 + bit, byte * 8 + bit + chain.bits)}
    assert covered == set(range(chain.nbytes * 8))


@pytest.mark.parametrize(("bits", "bit"), [(4, 2), (6, 4), (8, 4), (32, 3)])
def test_no_value_begins_in_the_middle_of_another(bits: int, bit: int) -> None:
    with pytest.raises(ValueError, match="no value begins"):
        Chain((4, 4), (), bits).value_at(0, bit)


def test_a_split_that_leaves_a_rest_is_refused() -> None:
    with pytest.raises(ValueError, match="6 does not split into pieces of 4"):
        Split(0, (2, 2)).shape((6,))


# -------------------------------------------------------------------------------------------------------------- packing
@given(
    bits=st.sampled_from([4, 6, 8]),
    low_first=st.booleans(),
    rows=st.integers(1, 4),
    groups=st.integers(1, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_torch_packs_where_the_chain_says(bits: int, low_first: bool, rows: int, groups: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, groups * 4), dtype=np.uint8)
    packed = numerics.pack(torch.from_numpy(codes), bits, low_first)
    assert packed.shape == (rows, groups * 4 * bits // 8)
    np.testing.assert_array_equal(packed.numpy().ravel(), write(codes, Chain(codes.shape, (), bits, low_first)))
    np.testing.assert_array_equal(numerics.unpack(packed, bits, low_first).numpy(), codes)


def test_nibbles_and_six_bit_codes_lie_where_the_spec_says() -> None:
    nibbles = torch.tensor([0x1, 0x2, 0x3, 0x4], dtype=torch.uint8)
    assert numerics.pack(nibbles, 4, low_first=True).tolist() == [0x21, 0x43]
    assert numerics.pack(nibbles, 4, low_first=False).tolist() == [0x12, 0x34]
    six = torch.tensor([0b000001, 0b000010, 0b000011, 0b100000], dtype=torch.uint8)
    assert numerics.pack(six, 6, low_first=True).tolist() == [0b10_000001, 0b0011_0000, 0b100000_00]
    assert numerics.pack(six, 6, low_first=False).tolist() == [0b000001_00, 0b0010_0000, 0b11_100000]


# -------------------------------------------------------------------------------------------------------------- swizzle
def closed_form(i: int, j: int, columns: int) -> int:
    """Where entry (i, j) of a scale matrix padded to 128 x 4 lies in 128x4 tiles of 512 bytes."""
    tile = (i // 128) * (columns // 4) + j // 4
    return tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (128, 12), (384, 4)])
def test_the_128x4_swizzle_equals_its_closed_form_and_is_a_bijection(shape: tuple[int, int]) -> None:
    chain = swizzle_chain(SWIZZLE, shape)
    for i, j in itertools.product(*map(range, shape)):
        (position,) = chain.positions((i, j))
        assert position == (closed_form(i, j, shape[1]), 0)
    assert len({chain.value_at(byte, 0) for byte in range(prod(shape))}) == prod(shape)


@pytest.mark.parametrize(
    ("index", "byte"),
    [
        ((0, 3), 3),
        ((0, 4), 512),
        ((1, 0), 16),
        ((31, 3), 499),
        ((32, 0), 4),
        ((127, 7), 1023),
        ((128, 0), 1024),
        ((200, 5), 1673),
    ],
)
def test_the_128x4_swizzle_has_the_known_spot_values(index: tuple[int, int], byte: int) -> None:
    assert swizzle_chain(SWIZZLE, (256, 8)).positions(index) == ((byte, 0),)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_generated_swizzle_equals_its_chain_and_unswizzle_undoes_it(name: str) -> None:
    shape = (256, 12)
    values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    swizzle = recipe_layout(name).swizzle
    assert swizzle is not None
    flat = reference(name).swizzle(values)
    np.testing.assert_array_equal(flat.numpy(), write(values.numpy(), swizzle_chain(swizzle, shape)))
    assert torch.equal(reference(name).unswizzle(flat, *shape), values)


@given(
    order=st.permutations(["r", "a", "b", "c", "d"]),
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
    tiles=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
@settings(max_examples=20, deadline=None)
def test_any_swizzle_pattern_is_a_bijection_that_numpy_agrees_with(
    order: list[str], sizes: tuple[int, ...], tiles: tuple[int, int]
) -> None:
    swizzle = parse_swizzle(f"(r a b) (c d) -> {' '.join(order)}", dict(zip("abd", sizes, strict=True)))
    a, b, d = sizes
    shape = (tiles[0] * a * b, tiles[1] * d)
    assert (swizzle.tile(0), swizzle.tile(1)) == (a * b, d)
    values = np.arange(prod(shape)).reshape(tiles[0], a, b, tiles[1], d)
    expected = values.transpose([["r", "a", "b", "c", "d"].index(name) for name in order]).ravel()
    chain = swizzle_chain(swizzle, shape)
    assert [
        np.ravel_multi_index(chain.value_at(byte, 0) or (0, 0), shape) for byte in range(prod(shape))
    ] == expected.tolist()


# -------------------------------------------------------------------------------------------------------------- buffers
def random_planes(layout: Layout, m: int, k: int) -> tuple[dict[str, torch.Tensor], dict[str, Array]]:
    """Random planes, as stored and as one value an entry. fp32 values are whole numbers, all different."""
    rng = np.random.default_rng(m * 1000 + k)
    stored, values = {}, {}
    for plane in layout.planes:
        shape = (layout.history or 1,) if plane.name == "amax" else plane.shape(m, k)
        if plane.dtype == "float32":
            values[plane.name] = np.arange(1, prod(shape) + 1, dtype=np.float32).reshape(shape)
            stored[plane.name] = torch.from_numpy(values[plane.name])
            continue
        shape = (m, k) if plane.kind == "data" else shape
        values[plane.name] = rng.integers(0, 2**plane.bits, shape, dtype=np.uint8)
        codes = torch.from_numpy(values[plane.name])
        low_first = layout.sources[0].quantization.low_first
        stored[plane.name] = codes if plane.bits == 8 else numerics.pack(codes, plane.bits, low_first)
    return stored, values


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name in RECIPES for shape in SHAPES[name]])
def test_generated_lay_out_puts_every_byte_where_the_chain_says(name: str, shape: tuple[int, int]) -> None:
    layout = recipe_layout(name)
    stored, values = random_planes(layout, *shape)
    made = laid_out(name, stored, shape, layout.orientations)
    for buffer in layout.buffers:
        actual = made[buffer.name]
        assert tuple(actual.shape) == buffer.shape(*shape)
        chain = buffer.chain(*shape)
        expected = write(values[buffer.plane.name].reshape(chain.start), chain)
        np.testing.assert_array_equal(
            actual.contiguous().view(torch.uint8).numpy().ravel(), expected, err_msg=buffer.name
        )
        assert not buffer.is_plane or actual is stored[buffer.plane.name], "a buffer that is its plane is not copied"


@pytest.mark.parametrize("name", RECIPES)
def test_is_plane_is_true_just_where_the_chain_moves_nothing(name: str) -> None:
    """At a shape that fits no padding multiple, so that padding shows."""
    layout = recipe_layout(name)
    m, k = {"mxfp8": (96, 160), "nvfp4": (48, 80)}.get(name, (3, 5))
    for buffer in layout.buffers:
        chain = buffer.chain(m, k)
        every = list(itertools.product(*map(range, chain.start)))
        unmoved = all(
            chain.positions(index) == (divmod(slot * chain.bits, 8),) for slot, index in enumerate(every)
        ) and chain.nbytes == buffer.plane.nbytes(m, k)
        assert buffer.is_plane == unmoved, buffer.name


EDITS: list[tuple[Callable[[dict[str, Any]], None], set[str]]] = [
    (lambda d: None, {"rowwise_data", "columnwise_data"}),
    (lambda d: d["orientations"]["rowwise"]["scale"].pop("pad"), {"rowwise_data", "rowwise_scale", "columnwise_data"}),
    (lambda d: d["orientations"]["columnwise"]["data"].update(layout="k m"), {"rowwise_data"}),
    (lambda d: d["orientations"]["rowwise"]["data"].update(pad=[8, 1]), {"columnwise_data"}),
]


@pytest.mark.parametrize(("edit", "planes"), EDITS, ids=["mxfp8", "no pad", "transposed", "padded data"])
def test_is_plane_follows_pads_and_axis_order(edit: Callable[[dict[str, Any]], None], planes: set[str]) -> None:
    def without_swizzle(data: dict[str, Any]) -> None:
        data.pop("gemm")
        edit(data)

    assert {buffer.name for buffer in variant("mxfp8", without_swizzle).buffers if buffer.is_plane} == planes


def buffer_named(layout: Layout, name: str) -> Buffer:
    """A buffer by name."""
    return next(buffer for buffer in layout.buffers if buffer.name == name)


def test_a_stored_granularity_finer_than_the_block_repeats_its_scale() -> None:
    nvfp4 = recipe_layout("nvfp4")
    assert buffer_named(nvfp4, "rowwise_scale").repeats == (16, 1)
    assert buffer_named(nvfp4, "columnwise_scale").repeats == (16, 1)
    chain = buffer_named(nvfp4, "rowwise_scale").chain(48, 80)
    assert [byte // 8 for byte, _ in chain.positions((1, 2))] == list(range(16, 32))


def test_m_is_found_in_either_dim() -> None:
    nvfp4 = recipe_layout("nvfp4")
    dims = {buffer.name: buffer.m_dim for buffer in nvfp4.buffers}
    assert dims == {"rowwise_data": 0, "rowwise_scale": 0, "columnwise_data": 1, "columnwise_scale": 1}
    assert buffer_named(recipe_layout("fp8_current"), "rowwise_scale").m_dim is None
