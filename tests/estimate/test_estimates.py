"""Estimates: the compiler's own bytes, what must be monotone, and how far they are from what was measured."""

from __future__ import annotations

import importlib
import sys
from dataclasses import fields, replace
from functools import cache
from itertools import product
from types import ModuleType

import pytest
from click import Choice, FloatRange
from numpy_models import recipe
from places import ROOT
from weight_recipes import CUT_APART, WEIGHTS

from layoutc.cli.estimate import estimate as estimate_command
from layoutc.cli.plan import plan as plan_command
from layoutc.estimate.links import Link, Links, Ring
from layoutc.estimate.machine import B200, CARDS, H100, H200, LEAST, MOST, NVLINK, Machine, factor_of, link_of
from layoutc.estimate.state import EXCHANGED
from layoutc.estimate.work import PASSES, Parts, Runs, Use
from layoutc.ints.sizes import cdiv


def _of_bench(name: str) -> ModuleType:
    folder = str(ROOT / "tests" / "bench")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


blocks = _of_bench("blocks")
llama, estimate, sent, works = blocks.llama, blocks.estimate, blocks.sent, blocks.works
SLOW = Link("slow", 9.5e9, 300e-6, 3.4e-6)
DIM = 1024
SMALL = llama(DIM, 2816, 16, 4, 4, 512, 1)
ELEMENTS = sum(m * k for m, k in SMALL.shapes) + 2 * DIM  # of a block
# Bounds of the absolute residuals in percent, which tests/bench/runs/estimates.json states: (kind, fitted) -> median,
# largest and how many are beyond 15%, of the middle of a point's runs and of the nearest of their range.
STATED = {
    ("gather", True): ((2, 3, 0), (2, 3, 0)),
    ("reduce-scatter", True): ((0.5, 0.5, 0), (0.5, 0.5, 0)),
    ("step", True): ((2, 9, 0), (0.5, 4, 0)),
    ("gather", False): ((5.2, 23, 1), (5.2, 23, 1)),
    ("step", False): ((5, 28, 6), (4, 15, 0)),
    ("exchanged", False): ((2.5, 8, 0), (2.5, 8, 0)),
    ("H100", False): ((6, 24, 4), (6, 24, 4)),
    ("on-gather", False): ((9.9, 11, 0), (9.9, 11, 0)),
    ("paired", False): ((6, 23, 3), (6, 23, 3)),
    ("paired", True): ((3.5, 11, 0), (3.5, 11, 0)),
    ("together", False): ((7.5, 58, 22), (7.5, 58, 22)),
}


@cache
def fit_steps() -> ModuleType:
    return _of_bench("fit_steps")


def use(name: str) -> Use:
    made = fit_steps().use(name)
    assert isinstance(made, Use)
    return made


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", WEIGHTS)
def test_bytes_are_those_that_the_generated_code_sends(name: str) -> None:
    """LAYOUT.gather, which tests/bench/wire.py counts in the collectives of 2 and 4 ranks; cuts inside blocks too."""
    layout = recipe(name).LAYOUT
    for shape, world, which in product((*SMALL.shapes, (384, 256)), (2, 3, 4, 24), PASSES):
        assert sent(use(name), shape, world, which) == layout.gather(*shape, world, which).bytes_per_rank


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4"])
def test_bytes_of_a_group(name: str) -> None:
    (sending,) = works(use(name), SMALL, 4)[1].sent
    norms = 2 * cdiv(DIM, 4) * 2
    for which in PASSES:
        assert getattr(sending, which) == norms + sum(sent(use(name), shape, 4, which) for shape in SMALL.shapes)
    assert 4 * sending.reduced == 4 * ELEMENTS


def test_shards_of_few_rows_are_padded() -> None:
    """More ranks than rows: FSDP2 pads each shard to a row, so that a weight travels several times over."""
    assert 16384 * sent(Use("bf16"), (1024, 8192), 16384, "forward") == 16 * 1024 * 8192 * 2


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("world", [2, 64, 16384])
def test_more_bandwidth_is_never_slower(name: str, world: int) -> None:
    totals = [estimate(use(name), SMALL, world, link_of(g * 1e9), H200).total for g in (1, 3, 10, 50, 400)]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("world", [2, 64, 16384])
def test_more_bytes_are_never_faster(world: int) -> None:
    """As many parameters of as many weights, so that only bytes differ: of columns, and of recipes."""
    wide = [SMALL.with_shapes((256, 64 * k)) for k in (4, 8, 32, 128)]
    for name in ("bf16", "fp8_block", "nvfp4"):
        totals = [estimate(use(name), model, world, SLOW, H200).total for model in wide]
        assert totals == sorted(totals)
    totals = [estimate(use(name), SMALL, world, SLOW, H200, "graph").total for name in ("nvfp4", "mxfp6_e2m3", "mxfp8")]
    assert totals == sorted(totals)


def test_latency_and_rule() -> None:
    near, far = Link("near", 1e9, 1e-3, 1e-6), Link("far", 1e8, 2e-3, 1e-5)
    ring, tree = Links(near, far), Links(near, far, rule="tree")
    one, host, hosts = Ring(1, 1), Ring(8, 8), Ring(64, 8)
    assert ring.latency(one) == tree.latency(one) == ring.gather(100, one) == ring.all_reduce(100, one) == 0
    assert ring.latency(host) == pytest.approx(1e-3 + 7e-6)
    assert ring.latency(hosts) == pytest.approx(2e-3 + 56e-6 + 7 * 1e-5)
    assert tree.latency(host) == pytest.approx(1e-3 + 3e-6)
    assert tree.latency(hosts) == pytest.approx(2e-3 + 3e-6 + 3e-5)
    assert ring.gather(1000, Ring(4, 4)) == pytest.approx(ring.latency(Ring(4, 4)) + 3000 / 1e9)
    half = replace(ring, within=replace(near, reduced=0.5))
    assert half.reduce_scatter(1000, Ring(4, 4)) == pytest.approx(ring.latency(Ring(4, 4)) + 6000 / 1e9)


def test_links_within_and_across_hosts() -> None:
    """A ring enters a host by the adapters of all its cards there, and is no faster than the link within."""
    near, far = Link("near", 1e9, 0, 0), Link("far", 1e8, 0, 0)
    links = Links(near, far)
    assert [links.bandwidth(one) for one in (Ring(8, 8), Ring(64, 8), Ring(64, 1), Ring(64, 4))] == [1e9, 8e8, 1e8, 4e8]
    assert replace(links, across=replace(far, bandwidth=5e8)).bandwidth(Ring(64, 8)) == 1e9
    assert links.gather(1000, Ring(8, 8)) == replace(links, across=replace(far, bandwidth=1.0)).gather(1000, Ring(8, 8))
    assert links.all_reduce(8000, Ring(8, 1)) == pytest.approx(2 * 7 * 1000 / 1e8)


def test_an_exchange_by_hand() -> None:
    """A message to each rank; what is for other hosts leaves by the card's own adapter."""
    links = Links(Link("near", 1e9, 1e-3, 1e-6, reduced=0.5), Link("far", 2e8, 1e-3, 1e-5), per_host=4)
    assert links.exchange(100, Ring(1, 1)) == 0
    assert links.exchange(1000, Ring(4, 4)) == pytest.approx(links.latency(Ring(4, 4)) + 3 * 1000 / 1e9)
    ring = Ring(16, 4)
    assert links.exchange(1000, ring) == pytest.approx(links.latency(ring) + 12 * 1000 / 2e8)
    assert replace(links, rule="tree").exchange(1000, ring) == links.exchange(1000, ring)
    for ranks in (8, 64, 4096):  # of a ring in fp32, half of a host's ranks times as much, or nearly
        ring = Ring(ranks, 4)
        gather, exchange = (s - links.latency(ring) for s in (links.gather(4000, ring), links.exchange(2000, ring)))
        assert exchange / gather == pytest.approx(4 / 2 * (ranks - 4) / (ranks - 1))


@pytest.mark.parametrize("name", ["bf16", "nvfp4"])
def test_an_exchange_takes_a_copy_off_the_compute_stream(name: str) -> None:
    """And puts another and a sum onto the link's."""
    before, after = (
        estimate(replace(use(name), exchange=EXCHANGED if on else None), SMALL, 4, SLOW, H200) for on in (False, True)
    )
    elements, links, ring = ELEMENTS, Links(SLOW, SLOW), Ring(4, 4)  # which four ranks share without padding
    copied = len(SMALL.model.layers) * elements * (2 + 4) / H200.memory
    assert before.backward - after.backward == pytest.approx(copied)
    moved = 2 + 2 + 2 + 4 / 4  # read, written, read again and the sum of a quarter
    expected = len(SMALL.model.layers) * (links.exchange(elements // 4 * 2, ring) + elements * moved / H200.memory)
    assert after.reduce_scatter == pytest.approx(expected)
    for part in ("forward", "gather_forward", "gather_backward", "optimizer", "host"):
        assert getattr(before, part) == getattr(after, part), part
    alone = (
        estimate(replace(use(name), exchange=EXCHANGED if on else None), SMALL, 1, SLOW, H200) for on in (False, True)
    )
    assert len(set(alone)) == 1


@pytest.mark.parametrize("cast", [False, True])
def test_values_that_gathers_leave_cost_the_host_and_the_card_less(cast: bool) -> None:
    """All weights of a group in one launch take what each by itself takes; codes are not copied out before. Casting is
    left, where there is any."""
    uses = (replace(use("nvfp4"), cast=cast, on_gather=on) for on in (False, True))
    before, after = (estimate(one, SMALL, 4, SLOW, H200) for one in uses)
    nbytes = sum(sent(use("nvfp4"), shape, 4, "forward") for shape in SMALL.shapes)
    for which in PASSES:
        copied = getattr(before, which) - getattr(after, which)
        assert copied == pytest.approx(len(SMALL.model.layers) * 2 * 4 * nbytes / H200.memory)
    weights = len(SMALL.model.layers) * len(SMALL.shapes)
    less = H200.weight_host - H200.graph_host + 2 * (H200.gather_host - H200.values_gather_host)
    assert before.host - after.host == pytest.approx(weights * less)
    plain = estimate(use("bf16"), SMALL, 4, SLOW, H200).host
    left = H200.cast_host - H200.weight_host if cast else 0.0
    more = left + 2 * (H200.values_gather_host - H200.plain_gather_host)
    assert after.host - plain == pytest.approx(weights * more - len(SMALL.model.layers) * H200.copied_host)
    for part in ("gather_forward", "gather_backward", "reduce_scatter", "optimizer"):
        assert getattr(before, part) == getattr(after, part), part


@pytest.mark.parametrize(
    ("shapes", "world", "packed"),
    [
        (((64, 256), (64, 256)), 2, 2 * (32 * 128 + 2 * 16)),
        (((64, 256), (64, 256)), 1, 0),
        (((64, 256),), 2, 32 * 128 + 2 * 16),
        (((64, 256), (64, 192)), 2, 0),  # the second has 2 x 12 bytes of scales
        (((64, 256), (64, 256), (48, 256)), 2, 0),  # 24 rows a rank cut a block
        (((368, 256), (384, 256)), 24, 2 * (16 * 128 + 16)),  # a rank has no rows of the first one
    ],
)
def test_which_planes_are_never_copied_out(shapes: tuple[tuple[int, int], ...], world: int, packed: int) -> None:
    """By hand, of nvfp4: each rank sends blocks of whole rows, and planes of multiples of 16 bytes, not copied out."""
    model = SMALL.with_shapes(*shapes)
    uses = (replace(use("nvfp4"), on_gather=on) for on in (False, True))
    before, after = (estimate(one, model, world, SLOW, H200).forward for one in uses)
    assert (before - after) * H200.memory / len(model.model.layers) == pytest.approx(2 * packed * world, abs=1e-3)


@pytest.mark.parametrize("name", CUT_APART)
def test_what_gathers_leave_no_values_of(name: str) -> None:
    """Products in low precision, which values don't have."""
    wanted = replace(use(name), on_gather=True)
    assert not wanted.problem
    assert "no products in low precision" in replace(wanted, low=True).problem


def test_interference_only_adds() -> None:
    """And a machine without it has no other total. Without the host, which this small model would wait for."""
    found = estimate(use("mxfp8"), SMALL, 8, SLOW, H200, "graph")
    calm = estimate(use("mxfp8"), SMALL, 8, SLOW, replace(H200, interference=0.0), "graph")
    assert calm.total == calm.undisturbed == found.undisturbed < found.total


def test_parts_and_total() -> None:
    """No part is longer than the step, and what is exposed is what is left of it."""
    found = estimate(use("nvfp4"), SMALL, 8, SLOW, H200)
    compute = found.forward + found.backward + found.optimizer
    link = found.gather_forward + found.gather_backward + found.reduce_scatter
    assert max(compute, link, found.host) <= found.total <= compute + link + found.host
    assert found.exposed == pytest.approx(found.total - compute)


def test_the_root_is_gathered_once() -> None:
    """The embedding and the head travel before the first group, and are reduced after it."""
    made = [llama(1024, 2816, 16, 4, 4, 512, 1, vocabulary) for vocabulary in (0, 8192)]
    bare, full = (estimate(Use("bf16"), model, 4, SLOW, H200) for model in made)
    rows = 2 * 8192 // 4 * 1024
    links, ring = Links(SLOW, SLOW), Ring(4, 4)
    assert full.gather_forward - bare.gather_forward == pytest.approx(links.gather(rows * 2, ring))
    assert full.gather_backward == bare.gather_backward
    assert full.reduce_scatter - bare.reduce_scatter == pytest.approx(links.reduce_scatter(rows * 4, ring))


def test_low_precision_uses_the_rate_of_the_kernel_and_only_where_there_is_one() -> None:
    model = llama(4096, 14336, 32, 8, 2, 4096, 4)

    def both(name: str) -> tuple[Parts, Parts]:
        plain, low = (estimate(replace(use(name), low=low), model, 1, NVLINK, H200) for low in (False, True))
        return plain, low

    plain, low = both("fp8_current")
    assert low.forward < 0.75 * plain.forward
    assert low.backward < 0.75 * plain.backward
    for name in ("mxfp8", "nvfp4"):  # no kernel before 10.0
        plain, low = both(name)
        assert low == plain
    for name in ("fp8_block", "fp8_block_1d"):  # nor any but on 9.0, which this card is
        plain, low = both(name)
        assert low.forward < plain.forward
        assert low.backward < plain.backward
        blackwell = replace(H200, capability=(10, 0))
        assert estimate(replace(use(name), low=True), model, 1, NVLINK, blackwell).forward == plain.forward


@pytest.mark.thorough
def test_constants_are_those_of_the_fit() -> None:
    """To the digits that machine.py has: from there, a round of the fit goes nowhere."""
    program = fit_steps()
    kept = program.Constants()
    found = program.fit(kept)
    for name in (*program.NAMES, "in_step"):
        assert getattr(kept.machine, name) == pytest.approx(getattr(found.machine, name), rel=0.02), name
    assert kept.peer_operand_bytes == pytest.approx(found.peer_operand_bytes, rel=0.02)
    assert kept.peer_linear == pytest.approx(found.peer_linear, rel=0.02)
    for link, world in (("NVLink", 2), ("NVLink", 4), ("sockets", 2)):
        for field in fields(Link):
            value = getattr(found.link(link, world), field.name)
            expected = pytest.approx(value, rel=0.02) if isinstance(value, float) else value
            assert getattr(kept.link(link, world), field.name) == expected, (link, world, field.name)


@pytest.mark.thorough
def test_residuals_are_as_stated() -> None:
    program = fit_steps()
    kept, found = program.Constants(), dict[tuple[str, bool], list[tuple[float, float]]]()
    for point in program.points():
        kind = point.label.split(",")[0].split(" ")[0].rstrip("s")
        found.setdefault((kind, point.fitted), []).append(point.errors(kept))
    assert found.keys() == STATED.keys()
    for key, errors in found.items():
        for stated, residuals in zip(STATED[key], zip(*errors, strict=True), strict=True):
            sizes = sorted(map(abs, residuals))
            median, largest, beyond = stated
            assert sizes[len(sizes) // 2] <= median, key
            assert sizes[-1] <= largest, key
            assert sum(size > 15 for size in sizes) == beyond, key


def test_residuals_by_hand() -> None:
    """Against the middle of the runs, and against the end of their range that is nearer."""
    program = fit_steps()

    def errors(seconds: float) -> tuple[float, float]:
        made = program.Point("", (1.2, 0.8, 1.0), False, lambda at: seconds).errors(program.Constants())
        assert isinstance(made, tuple)
        return made

    assert errors(1.1) == pytest.approx((10, 0))
    assert errors(1.5) == pytest.approx((50, 25))
    assert errors(0.4) == pytest.approx((-60, -50))


def test_one_step_is_one_point() -> None:
    """All runs of a step are in one row, so that none of them is held out of a fit to the others."""
    labels = [point.label for point in fit_steps().points()]
    assert len(labels) == len(set(labels))


def test_the_host_by_hand() -> None:
    """Forward has a third of a group's launches, and one of the two gathers; over one rank nothing is gathered."""
    machine = replace(H200, group_host=3.0, weight_host=0.3, cast_host=0.6, low_host=0.4)
    machine = replace(machine, plain_gather_host=0.01, gather_host=0.1, copied_host=0.05, graph_host=0.2)
    model = llama(1024, 4096, 16, 4, 1, 512, 1)
    weights = len(model.shapes)
    cases = {
        "bf16": (3.0, 0.01),
        "mxfp8": (3.0 + weights * 0.3, 0.1),
        "cast mxfp8": (3.0 + weights * 0.6, 0.1),
        "mxfp8+low": (3.0 + weights * 0.3, 0.1),  # no kernel on this card
        "fp8_block+low": (3.0 + weights * 0.7, 0.1),
        "fp8_current+low": (3.0 + weights * 0.7, 0.1),
    }
    for name, own in (("mxfp8", 0.0), ("cast mxfp8", 0.3)):  # products of plain weights; casting is left
        found = estimate(use(f"{name}+on_gather"), model, 1, SLOW, machine)
        assert found.host == pytest.approx(3.0 + weights * own)
    for name, (launches, gather) in cases.items():
        less = 0 if name == "bf16" else weights * (0.4 if name.startswith("fp8") else 0.2)
        runs: list[tuple[Runs, float]] = [("eager", launches), ("compiled", launches - less)]
        for world, gathers, (how, launches) in ((*one, run) for one in ((1, 0), (2, 2)) for run in runs):
            found = estimate(use(name), model, world, SLOW, machine, how)
            copied = 0.05 if world > 1 and name != "bf16" else 0  # of gradients, in one launch
            assert found.host == pytest.approx(launches - copied + gathers * weights * gather), (name, world)
            assert estimate(use(name), model, world, SLOW, machine, "graph").host == 0
    one, two = (estimate(use("mxfp8"), model, world, SLOW, machine) for world in (1, 2))
    assert one.total < two.total


def test_an_h100_is_an_h200_with_slower_memory() -> None:
    """What memory decides takes longer; products, links and the host do not."""
    for name in ("bf16", "nvfp4", "fp8_current+low"):
        fast, slow = (estimate(use(name), SMALL, 2, SLOW, card) for card in (H200, H100))
        assert slow.optimizer / fast.optimizer == pytest.approx(H200.memory / H100.memory)
        assert slow.forward > fast.forward
        assert (slow.host, slow.gather_forward, slow.reduce_scatter) == (
            fast.host,
            fast.gather_forward,
            fast.reduce_scatter,
        )
    for command in (estimate_command, plan_command):
        (card,) = [one.type for one in command.params if one.name == "card"]
        assert isinstance(card, Choice)
        assert list(card.choices) == list(CARDS)


def test_a_b200_is_an_extrapolation_that_says_so() -> None:
    """And has kernels for what no card before it has."""
    assert [name for name, card in CARDS.items() if card.extrapolated] == ["b200"]
    for name in ("bf16", "nvfp4+low", "mxfp8+low", "fp8_current+low"):
        slow, fast = (estimate(use(name), SMALL, 8, NVLINK, card, "graph") for card in (H200, B200))
        assert fast.forward < slow.forward
    plain, low = (
        estimate(use(name), blocks.llama(4096, 14336, 32, 8, 2, 4096, 4), 1, NVLINK, B200)
        for name in ("nvfp4", "nvfp4+low")
    )
    assert low.forward < 0.7 * plain.forward


@pytest.mark.parametrize("how", ["compiled", "eager"])
@pytest.mark.parametrize("factor", [0.6, 1.0, 2.9])
def test_a_host_is_found_from_a_step(factor: float, how: Runs) -> None:
    """The step of the host that is found is the one that was given, and only what the host takes has changed."""
    model = llama(4096, 14336, 32, 8, 8, 512, 1)

    def step(machine: Machine) -> float:
        return estimate(Use("bf16"), model, 2, NVLINK, machine, how).total

    slower = H100.with_host(factor)
    changed = {one.name for one in fields(Machine) if getattr(slower, one.name) != getattr(H100, one.name)}
    assert changed == (set() if factor == 1 else {one.name for one in fields(Machine) if one.name.endswith("_host")})
    assert factor_of(step(slower), H100, step) == pytest.approx(factor, rel=1e-6)


def test_a_host_that_is_found_can_be_stated() -> None:
    for command in (estimate_command, plan_command):
        (stated,) = (one.type for one in command.params if one.name == "host")
        assert isinstance(stated, FloatRange)
        assert (stated.min, stated.max) == (LEAST, MOST)


def test_a_step_that_the_card_decides_finds_no_host() -> None:
    """Nor does one that is longer than any host makes it."""
    long = llama(4096, 14336, 32, 8, 8, 4096, 4)

    def step(machine: Machine) -> float:
        return estimate(Use("bf16"), long, 2, NVLINK, machine).total

    with pytest.raises(ValueError, match="says nothing of the host: give a step of fewer tokens, or none"):
        factor_of(step(H200) * 1.02, H200, step)
    with pytest.raises(ValueError, match=r"is longer than the .* ms of a host that is 3 times as slow"):
        factor_of(step(H200.with_host(3)) * 1.1, H200, step)
