"""Cuts that would split a block are refused with numbers and with sizes that work; gather figures count every byte."""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_models import RECIPES, recipe

from layoutc.runtime.errors import LayoutError, ShardAlignmentError
from layoutc.runtime.facts import Layout, cdiv
from layoutc.runtime.sharding import aligned, check_alignment


def facts(name: str) -> Layout:
    """A recipe's LAYOUT."""
    layout = recipe(name).LAYOUT
    assert isinstance(layout, Layout)
    return layout


def cut_is_clean(rows: int, per_rank: int, multiple: int) -> bool:
    """By enumeration: no boundary between two ranks falls inside a group of `multiple` rows."""
    boundaries = [rank * per_rank for rank in range(1, cdiv(rows, per_rank))]
    return all(boundary % multiple == 0 for boundary in boundaries)


def suggestions(message: str) -> tuple[list[int], list[int]]:
    """The sizes of dim 0 and the world sizes that a message offers."""
    found = re.search(r"dim 0 can be ([^;]*); with dim 0 of \d+, the world size can be ([^.]*)\.", message)
    assert found, message
    sizes, worlds = ([int(number) for number in re.findall(r"\d+", text)] for text in found.groups())
    return sizes, worlds


def test_136_rows_over_8_ranks_do_not_shard_in_blocks_of_16() -> None:
    with pytest.raises(ShardAlignmentError) as caught:
        check_alignment(facts("nvfp4"), (136, 64), 17, world=8, name="layers.0.wq")
    message = str(caught.value)
    for piece in (
        "layers.0.wq: shape (136, 64) does not shard over 8 ranks in nvfp4",
        "17 rows a rank",
        "a multiple of 16 rows (one rowwise scale covers 16 rows; blocks 16x16 rowwise, 16x16 columnwise)",
        "At world size 8, dim 0 can be 128 or 256",
        "with dim 0 of 136, the world size can be ",
    ):
        assert piece in message


def test_384_rows_in_blocks_of_128_do_not_shard_over_2_ranks_though_128_divides_384() -> None:
    with pytest.raises(ShardAlignmentError) as caught:
        check_alignment(facts("fp8_block"), (384, 512), 192, world=2, name="w")
    message = str(caught.value)
    for piece in (
        "w: shape (384, 512) does not shard over 2 ranks in fp8_block: 192 rows a rank",
        "a multiple of 128 rows (one rowwise scale covers 128 rows; blocks 128x128 rowwise, 128x128 columnwise)",
        "At world size 2, dim 0 can be 256 or 512; with dim 0 of 384, the world size can be 1 or 3.",
    ):
        assert piece in message


def test_96_rows_a_rank_suit_mxfp8() -> None:
    check_alignment(facts("mxfp8"), (768, 64), 96, world=8)


def test_the_world_size_is_derived_from_the_cut_when_unknown() -> None:
    with pytest.raises(ShardAlignmentError, match="over 8 ranks"):
        check_alignment(facts("nvfp4"), (136, 64), 17)


def test_leading_dims_count_as_rows() -> None:
    """4 experts of 24 rows: one expert a rank is 24 rows, two are 48, which 4 ranks reach with 6 experts."""
    with pytest.raises(ShardAlignmentError, match=r"shape \(4, 24, 32\) .*: 24 rows a rank.*dim 0 can be 6;"):
        check_alignment(facts("nvfp4"), (4, 24, 32), 1, world=4)
    check_alignment(facts("nvfp4"), (4, 24, 32), 2, world=2)


def test_the_error_is_both_a_layout_error_and_a_value_error() -> None:
    assert issubclass(ShardAlignmentError, LayoutError)
    assert issubclass(ShardAlignmentError, ValueError)


@given(rows=st.integers(1, 600), per_rank=st.integers(1, 700), multiple=st.sampled_from([1, 2, 3, 16, 32, 128]))
@settings(max_examples=300, deadline=None)
def test_aligned_is_what_enumerating_the_boundaries_finds(rows: int, per_rank: int, multiple: int) -> None:
    if per_rank >= rows:
        assert aligned(rows, per_rank, multiple)
    elif aligned(rows, per_rank, multiple):
        assert cut_is_clean(rows, per_rank, multiple)
    else:
        assert not cut_is_clean(rows, per_rank, multiple)


@given(
    name=st.sampled_from(["nvfp4", "mxfp8", "fp8_block"]),
    blocks=st.integers(1, 40),
    inner=st.sampled_from([(), (1,), (3,), (8,), (16,), (2, 24)]),
    world=st.integers(1, 40),
)
@settings(max_examples=250, deadline=None)
def test_every_suggested_size_and_world_works_and_is_the_nearest(
    name: str, blocks: int, inner: tuple[int, ...], world: int
) -> None:
    layout = facts(name)
    size = cdiv(blocks * layout.multiple_m, prod(inner))
    while size * prod(inner) % layout.multiple_m:
        size += 1

    def works(dim: int, ranks: int) -> bool:
        rows = dim * prod(inner)
        if rows % layout.multiple_m:
            return False
        return cut_is_clean(rows, cdiv(dim, ranks) * prod(inner), layout.shard_rows)

    try:
        check_alignment(layout, (size, *inner, 64), cdiv(size, world), world=world, name="w")
    except ShardAlignmentError as error:
        sizes, worlds = suggestions(str(error))
    else:
        assert works(size, world)
        return
    assert not works(size, world)
    assert sizes, "some size always works"
    assert worlds, "one rank always works"
    for suggested in sizes:
        assert works(suggested, world)
        check_alignment(layout, (suggested, *inner, 64), cdiv(suggested, world), world=world)
    for suggested in worlds:
        assert works(size, suggested)
        check_alignment(layout, (size, *inner, 64), cdiv(size, suggested), world=suggested)
    below = max(w for w in range(1, world) if works(size, w))
    assert below in worlds


@pytest.mark.parametrize("multiple_m", [1, 3, 5])
def test_suggested_sizes_are_sizes_that_the_recipe_takes(multiple_m: int) -> None:
    layout = dataclasses.replace(facts("nvfp4"), multiple_m=multiple_m)
    with pytest.raises(ShardAlignmentError) as caught:
        check_alignment(layout, (15 * 17, 64), 64 - 1, world=5)
    for size in suggestions(str(caught.value))[0]:
        layout.check_shape((size, 64))
        check_alignment(layout, (size, 64), cdiv(size, 5), world=5)


# --------------------------------------------------------------------------------------------------------------- gather
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("world", [1, 2, 8])
def test_gather_counts_the_bytes_of_every_shard(name: str, world: int) -> None:
    layout, (m, k) = facts(name), (2048, 4096)
    for which in ("forward", "backward", "both"):
        gather = layout.gather(m, k, world, which)  # type: ignore[arg-type]
        whole = layout.planes(m, k)
        assert tuple(gather.planes) == layout.travels[which]  # type: ignore[index]
        assert gather.nbytes == sum(whole[plane].nbytes for plane in gather.planes)
        assert gather.bytes_per_rank * world == gather.nbytes
        assert gather.world == world
    assert layout.gather(m, k, world).nbytes == layout.bytes_per_element * m * k


@pytest.mark.parametrize(
    ("name", "per_element"),
    [
        ("nvfp4", Fraction(129, 256)),
        ("mxfp8", Fraction(33, 32)),
        ("fp8_block", Fraction(4097, 4096)),
        ("fp8_current", Fraction(1)),
    ],
)
def test_bytes_gathered_for_a_large_weight(name: str, per_element: Fraction) -> None:
    assert Fraction(facts(name).gather(4096, 14336, 8).nbytes, 4096 * 14336) == per_element


def test_nvfp4_sends_each_scale_once() -> None:
    planes = facts("nvfp4").gather(1024, 512, 4).planes
    assert {name: plane.shape for name, plane in planes.items()} == {
        "rowwise_data": (256, 256),
        "rowwise_scale": (16, 32),
    }


def test_short_shards_are_counted_as_padded_ones() -> None:
    """256 rows over 17 ranks: 16 ranks of 16 rows and an empty one, which sends as many bytes as the others."""
    gather = facts("nvfp4").gather(256, 32, 17)
    assert gather.planes["rowwise_data"].shape == (16, 16)
    assert gather.nbytes == 17 * (16 * 16 + 1 * 2)


def test_gather_refuses_what_does_not_shard() -> None:
    with pytest.raises(ShardAlignmentError, match="nvfp4"):
        facts("nvfp4").gather(144, 64, 4)


@pytest.mark.parametrize("shape", [(136, 64), (128, 72)])
def test_gather_refuses_shapes_that_the_recipe_does_not_take(shape: tuple[int, int]) -> None:
    """Else half a block would be missing from the count."""
    with pytest.raises(ValueError, match=rf"\({shape[0]}, {shape[1]}\)"):
        facts("nvfp4").gather(*shape, 1)


def test_per_tensor_recipes_shard_anywhere() -> None:
    for rows in (1, 2, 7, 130):
        for world in (1, 2, 3, 8):
            gather = facts("fp8_current").gather(rows, 5, world)
            assert gather.bytes_per_rank == cdiv(rows, world) * 5
