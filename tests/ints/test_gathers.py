"""What ranks send in a gather and what it leaves, by enumeration; the runtime and the plan count alike."""

from __future__ import annotations

from itertools import product

import pytest
from numpy_models import RECIPES, recipe
from places import SPECS

from layoutc.build import pipeline
from layoutc.ints import gathers
from layoutc.ints.cuts import Cuts, sent_blocks
from layoutc.plan import wire


def test_slots_hold_the_planes_of_either_pass() -> None:
    """In order, in as few bytes as that takes."""
    for forward, backward in product(product([1, 2, 5], repeat=2), product([1, 3, 5], repeat=3)):
        slots = gathers.slots(forward, backward)
        assert slots == gathers.slots(backward, forward)
        for number, slot in enumerate(slots):
            held = [sizes[number] for sizes in (forward, backward) if number < len(sizes)]
            assert slot == max(held)


def test_what_travels_in_one_tensor_is_cut_between_blocks_and_lies_at_16_bytes() -> None:
    """No rank sends a part of a block, and the planes of all ranks begin at multiples of 16 bytes."""
    for rows, world, block, width in product(range(1, 40), (1, 2, 3), (1, 2, 8), (1, 4, 16)):
        cuts = Cuts.of(rows, world)
        whole = all(last % block == 0 or last == rows for _, last in map(cuts.bounds, range(world)))
        sent = sent_blocks(cuts, block) * width
        assert gathers.fits_pack([(block, sent)], cuts) == (whole and sent % 16 == 0), (rows, world, block, width)
        assert gathers.fits_pack([(1, 16), (block, sent)], cuts) == gathers.fits_pack([(block, sent)], cuts)


def test_a_group_leaves_values_together_or_by_choice() -> None:
    """Own choices are kept. Weights without one leave the same, values only where these cost none of them anything."""
    for count in (1, 2, 3):
        for chosen in product([None, True, False], repeat=count):
            for free in product([True, False], repeat=count):
                left = gathers.leaves_values(chosen, free)
                assert all(own is None or own == one for own, one in zip(chosen, left, strict=True))
                others = {one for own, one in zip(chosen, left, strict=True) if own is None}
                assert len(others) <= 1
                if True in others:
                    assert count > 1
                    assert all(free)
                    assert False not in chosen


def test_values_cost_nothing_in_16_bits_that_are_freed_after_forward() -> None:
    free = product([True, False], (1, 2, 4), [True, False], [True, False])
    assert [case for case in free if gathers.values_cost_nothing(*case)] == [(True, 2, False, False)]


def test_gradients_are_reduced_in_few_steps_over_shards_of_rows_alone() -> None:
    """One parameter that is cut otherwise has FSDP2 reduce the whole group."""
    kinds = list(product((0, 1, 2), (1, 2, 4)))
    for replicas, *params in [(r, *p) for r in (1, 2) for n in (0, 1, 2, 3) for p in product(kinds, repeat=n)]:
        few = gathers.reduces_in_few_steps(replicas, params)
        assert few == (replicas == 1 and set(params) <= {(0, 1)}), (replicas, params)
        assert not few or gathers.reduces_in_few_steps(replicas, params[1:])


@pytest.mark.parametrize("name", RECIPES)
def test_the_runtime_and_the_plan_count_alike(name: str) -> None:
    """Slots of both passes, and what fits into a pack, of weights of many sizes over many ranks."""
    layout = recipe(name).LAYOUT
    spec, _, _ = pipeline.read((SPECS / f"{name}.yaml").read_bytes(), name)
    assert spec is not None
    plan = pipeline.plan_for(spec)
    for rows, columns, world in product((1, 2, 3, 8, 17, 128), (1, 2, 5), (1, 2, 3, 8)):
        m, k = rows * layout.multiple_m, columns * layout.multiple_k
        cuts = Cuts.of(m, world)
        for which, gather in (("forward", plan.forward), ("backward", plan.backward), ("both", plan.both)):
            sent = [facts.nbytes for facts in layout.sent(which, cuts, k).values()]  # type: ignore[arg-type]
            slots = layout.slots(which, cuts, k)  # type: ignore[arg-type]
            assert wire.slots(plan, gather, cuts, k) == (slots or tuple(sent)), (which, m, k, world)
        planes = layout.sent("forward", cuts, k).items()
        held = [(layout.stored[plane].rows_per_value or 1, facts.nbytes) for plane, facts in planes]
        assert wire.packs(plan.forward, cuts, k) == gathers.fits_pack(held, cuts)
