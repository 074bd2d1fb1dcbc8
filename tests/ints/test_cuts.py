"""Where ranks cut rows and which blocks they then send, by enumeration; gather figures count every byte."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_models import RECIPES, recipe

from layoutc.ints.cuts import NO_HALO, Cuts, Halo, picks, sent_blocks
from layoutc.ints.sizes import cdiv
from layoutc.runtime.errors import LayoutError, UnsupportedOperator
from layoutc.runtime.facts import Facts, Layout, PassName
from layoutc.runtime.quantize.block_edges import _edges, _with_halo, check_whole_blocks
from layoutc.runtime.sharding.shards import RowSharding

PASSES: tuple[PassName, ...] = ("forward", "backward", "both")


def facts(name: str) -> Layout:
    """A recipe's LAYOUT."""
    layout = recipe(name).LAYOUT
    assert isinstance(layout, Layout)
    return layout


def blocks_of(cuts: Cuts, rank: int, block: int) -> list[int]:
    """By enumeration: the blocks that a rank has rows of, in order."""
    return sorted({row // block for row in range(*cuts.bounds(rank))})


def cuts_of(size: int, inner: int, world: int) -> Cuts:
    """How FSDP2 cuts dim 0 of `size` entries, each `inner` rows."""
    return Cuts(size * inner, cdiv(size, world) * inner, world)


CUTS = st.builds(cuts_of, st.integers(1, 150), st.sampled_from([1, 1, 1, 3, 16, 24]), st.integers(1, 40))
BLOCK = st.one_of(st.integers(1, 20), st.sampled_from([32, 64, 128, 4096]))
EXAMPLES = settings(max_examples=60, deadline=None)


@given(CUTS)
@EXAMPLES
def test_bounds_hand_out_every_row_once_in_rank_order(cuts: Cuts) -> None:
    rows = [range(*cuts.bounds(rank)) for rank in range(cuts.world)]
    assert [row for shard in rows for row in shard] == list(range(cuts.rows))
    assert all(len(shard) == cuts.per_rank for shard, after in pairwise(rows) if after)


@given(CUTS, BLOCK)
@EXAMPLES
def test_aligned_is_what_enumerating_the_cuts_finds(cuts: Cuts, block: int) -> None:
    ends = {cuts.bounds(rank)[1] for rank in range(cuts.world)} - {cuts.rows}
    assert cuts.aligned(block) == all(end % block == 0 for end in ends)
    assert cuts.inside(block) == sum(end % block > 0 for end in ends)
    assert cuts.ranks_inside(block) == sum(cuts.halo(rank, block).rows > 0 for rank in range(cuts.world))


@given(CUTS, BLOCK)
@EXAMPLES
def test_the_ranks_that_touch_a_block_have_all_of_its_rows_between_them(cuts: Cuts, block: int) -> None:
    for rank in range(cuts.world):
        assert list(range(*cuts.touched(rank, block))) == blocks_of(cuts, rank, block)
    for number in range(cdiv(cuts.rows, block)):
        holders = [rank for rank in range(cuts.world) if number in range(*cuts.touched(rank, block))]
        held = [row for rank in holders for row in range(*cuts.bounds(rank)) if row // block == number]
        assert held == list(range(number * block, min(cuts.rows, (number + 1) * block)))


@given(CUTS, BLOCK)
@EXAMPLES
def test_a_halo_is_the_rest_of_the_blocks_that_a_rank_touches(cuts: Cuts, block: int) -> None:
    for rank in range(cuts.world):
        (first, last), halo = cuts.bounds(rank), cuts.halo(rank, block)
        touched = blocks_of(cuts, rank, block)
        whole = [row for row in range(cuts.rows) if row // block in touched]
        assert whole == (list(range(first - halo.before, last + halo.after)) if last > first else [])
        assert halo.rows == len(whole) - (last - first)
        assert not halo.tied
        assert not (halo.rows and cuts.aligned(block))


@given(CUTS, BLOCK)
@EXAMPLES
def test_a_rank_sends_as_many_blocks_as_the_one_that_touches_the_most(cuts: Cuts, block: int) -> None:
    assert sent_blocks(cuts, block) == max(len(blocks_of(cuts, rank, block)) for rank in range(cuts.world))


@given(CUTS, BLOCK)
@EXAMPLES
def test_picks_take_each_block_from_the_first_rank_that_has_rows_of_it(cuts: Cuts, block: int) -> None:
    """What arrives: of each rank the blocks that it touches, filled up to as many as any sends."""
    sent = sent_blocks(cuts, block)
    arrived: list[tuple[int, int] | None] = []
    for rank in range(cuts.world):
        touched = blocks_of(cuts, rank, block)
        arrived += [(rank, number) for number in touched] + [None] * (sent - len(touched))
    assert len(arrived) == cuts.world * sent
    count = cdiv(cuts.rows, block)
    chosen = picks(cuts, block)
    assert (chosen is None) == cuts.aligned(block)
    taken = [arrived[position] for position in (range(count) if chosen is None else chosen)]
    owners = {row // block: rank for rank in reversed(range(cuts.world)) for row in range(*cuts.bounds(rank))}
    assert taken == [(owners[number], number) for number in range(count)]


@given(CUTS, BLOCK)
@EXAMPLES
def test_aligned_cuts_send_no_block_twice_and_others_do(cuts: Cuts, block: int) -> None:
    times = Counter(number for rank in range(cuts.world) for number in range(*cuts.touched(rank, block)))
    assert cuts.aligned(block) == (set(times.values()) == {1})


def test_a_block_may_lie_on_many_ranks() -> None:
    """40 rows over 16 ranks, 3 each: the first block of 16 rows lies on ranks 0 to 5, the last on 10 to 13."""
    cuts = Cuts(40, 3, 16)
    assert [cuts.touched(rank, 16) for rank in (0, 5, 10, 13, 14)] == [(0, 1), (0, 2), (1, 3), (2, 3), (2, 2)]
    assert [cuts.halo(rank, 16) for rank in (0, 5, 13, 14)] == [Halo(0, 13), Halo(15, 14), Halo(7, 0), NO_HALO]
    assert (sent_blocks(cuts, 16), picks(cuts, 16)) == (2, (0, 11, 21))


@given(st.sampled_from(sorted(RECIPES)), st.integers(1, 90), st.integers(2, 9), st.integers(0, 2**32))
@EXAMPLES
def test_a_shard_among_its_halo_has_the_codes_and_scales_of_the_whole(
    name: str, size: int, world: int, seed: int
) -> None:
    """Also where many ranks share a block: each of them tells its own rows, and the halo has the extremes of all."""
    layout, of = facts(name), recipe(name)
    rows, k = size * layout.multiple_m, layout.column_multiple
    cuts = Cuts(rows, cdiv(rows, world), world)
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)) * torch.exp2(torch.arange(rows) % 7).view(
        -1, 1
    )
    row_shardings: list[Any] = [SimpleNamespace(rank=rank, cuts=cuts) for rank in range(world)]
    shards = [x[slice(*cuts.bounds(rank))] for rank in range(world)]
    heard = torch.stack(
        [_edges(layout, shard, row_sharding) for shard, row_sharding in zip(shards, row_shardings, strict=True)]
    )
    amax = of.Tensor.shared_amax(x) if layout.shares_amax else None
    whole = of.quantize(x, amax=amax)
    for row_sharding, shard in zip(row_shardings, shards, strict=True):
        if not len(shard):
            continue
        halo, (first, last) = cuts.halo(row_sharding.rank, layout.block_rows), cuts.bounds(row_sharding.rank)
        among = _with_halo(layout, shard, row_sharding, heard)
        planes = of.reference.quantize_reference(among, amax=amax)
        for plane, stored in planes.items():
            per = layout.stored[plane].rows_per_value
            if per is None:
                continue
            own = slice(halo.before // per, cdiv(halo.before + last - first, per))
            mine = slice(first // per, cdiv(last, per))
            assert torch.equal(stored[own].view(torch.uint8), whole.planes()[plane][mine].view(torch.uint8)), plane


def test_a_tied_halo_lies_in_the_tensor_of_which_its_own_is_a_part() -> None:
    assert not NO_HALO.tied
    assert Halo(1, 2, tied_after=True).tied
    assert Halo(1, 2, tied_before=True).tied
    assert Halo(1, 2).rows == 3


# --------------------------------------------------------------------------------------------------------------- gather
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("world", [1, 2, 8])
def test_gather_counts_the_bytes_of_every_shard(name: str, world: int) -> None:
    layout, (m, k) = facts(name), (2048, 4096)
    for which in PASSES:
        gather = layout.gather(m, k, world, which)
        whole = layout.planes(m, k)
        assert tuple(gather.planes) == layout.travels[which]
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


def test_ranks_on_both_sides_of_a_cut_send_the_scales_of_the_block() -> None:
    """144 rows over 8 ranks: 18 rows each, which lie in 2 blocks of 16; the weight has 9 blocks."""
    gather = facts("nvfp4").gather(144, 64, 8)
    assert {name: plane.shape for name, plane in gather.planes.items()} == {
        "rowwise_data": (18, 32),
        "rowwise_scale": (2, 4),
    }
    assert gather.bytes_per_rank == 18 * 32 + 2 * 4
    assert facts("nvfp4").gather(144, 64, 9).bytes_per_rank == 16 * 32 + 1 * 4


def test_passes_of_as_many_bytes_are_filled_up_where_cut_blocks_make_one_larger() -> None:
    """Columnwise scales are doubled, rowwise ones never: FSDP2 wants slots of one size, so forward fills its own up."""
    forward, backward, both = (facts("mxfp8").gather(96, 64, 2, which) for which in PASSES)
    assert [plane.shape for plane in forward.planes.values()] == [(48, 64), (48, 2)]
    assert [plane.shape for plane in backward.planes.values()] == [(48, 64), (2, 64)]
    assert (forward.filling, backward.filling, both.filling) == (2 * 64 - 48 * 2, 0, 0)
    assert forward.bytes_per_rank == backward.bytes_per_rank == 48 * 64 + 2 * 64
    assert both.bytes_per_rank == 2 * 48 * 64 + 48 * 2 + 2 * 64


@given(st.sampled_from(RECIPES), st.integers(1, 40), st.integers(1, 5), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_gather_counts_what_the_rows_of_each_rank_touch(name: str, rows: int, columns: int, world: int) -> None:
    layout = facts(name)
    m, k = rows * max(layout.multiple_m, 8), columns * max(layout.multiple_k, 8)
    per_rank = cdiv(m, world)
    shards = [range(m)[rank * per_rank : (rank + 1) * per_rank] for rank in range(world)]
    whole = layout.planes(m, k)
    gathers = {which: layout.gather(m, k, world, which) for which in PASSES}
    for which, gather in gathers.items():
        for plane, sent in gather.planes.items():
            per_value = layout.stored[plane].rows_per_value or 1
            most = max(len({row // per_value for row in shard}) for shard in shards)
            assert sent == Facts((most, *whole[plane].shape[1:]), whole[plane].dtype)
        assert tuple(gather.planes) == layout.travels[which]
        assert gather.filling >= 0
        assert gather.nbytes >= sum(whole[plane].nbytes for plane in gather.planes)
    assert gathers["forward"].bytes_per_rank == gathers["backward"].bytes_per_rank, "FSDP2 sizes slots once"
    cuts = Cuts(m, per_rank, world)
    sizes = {which: [plane.nbytes for plane in gather.planes.values()] for which, gather in gathers.items()}
    for which in ("forward", "backward"):
        slots = layout.slots(which, cuts, k)
        assert bool(slots) is (sizes["forward"] != sizes["backward"]), "planes go as they are where passes are alike"
        assert all(own <= slot for own, slot in zip(sizes[which], slots, strict=False))


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


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "nvfp4"])
def test_plain_values_are_written_where_the_shard_is_cut_as_its_row_sharding_says(name: str) -> None:
    """Not where it holds other rows around its own, nor where those are another tensor's."""
    whole = import_module(f"layoutc.recipes.{name}").quantize(torch.randn(256, 256))
    cuts = Cuts(256, 100, 3)
    row_sharding = RowSharding(None, 1, cuts)  # type: ignore[arg-type]
    shard = whole[100:200].clone()
    expected = cuts.halo(1, shard.LAYOUT.block_rows)
    others = Halo(expected.before + 1, expected.after), Halo(expected.before, 0), expected._replace(tied_after=True)
    for halo in others:
        shard.store.halo = halo
        with pytest.raises(LayoutError, match="rank 1 should hold"):
            check_whole_blocks(shard, row_sharding)
    shard.store.halo = expected
    check_whole_blocks(shard, row_sharding)
    with pytest.raises(UnsupportedOperator, match="cut inside a block"):
        check_whole_blocks(shard, None)
    check_whole_blocks(whole[:128].clone(), None)
