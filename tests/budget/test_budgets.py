"""Budgets of models: the largest rank by brute force, what parallelism divides, what is chosen, and what is monotone.

That the bytes are FSDP2's: tests/distributed/test_planned_bytes.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from layoutc.budget.activations import activations
from layoutc.budget.choice import Picks, check_patterns
from layoutc.budget.groups import groups_of
from layoutc.budget.mesh import Mesh, Placed, place
from layoutc.budget.shards import Dtypes, Gathered, Piece, Resident, gathered, largest, resident
from layoutc.budget.totals import Budget, Setting, budget, works_of
from layoutc.cli.reading import plan_of
from layoutc.estimate.links import Links, Ring
from layoutc.estimate.machine import H200, NVLINK, links_of
from layoutc.estimate.state import EXCHANGED, MASTERS, STATES, State, wire_of
from layoutc.estimate.work import Load, Use
from layoutc.models import config, shapes
from layoutc.models.weights import Model, Weight, full_name
from layoutc.plan.plan import Plan
from layoutc.runtime.fsdp2.replicas import Replicas, Sender
from layoutc.runtime.kernels.rank_sums import Codes

CONFIGS = ROOT / "tests" / "models" / "configs"
RECIPES = ("mxfp8", "nvfp4", "fp8_block", "fp8_delayed", "hybrid_fp8", "int8_rowwise")
NONE = State(moments=(), counter=0)
AT = Setting(Picks(), Dtypes(), Load(8192, 8192), Links(NVLINK, NVLINK), H200)


@cache
def plan(name: str) -> Plan:
    return plan_of(ROOT / "specs" / f"{name}.yaml")


@cache
def model(stem: str) -> Model:
    return config.read(json.loads((CONFIGS / f"{stem}.json").read_text(encoding="utf-8")), stem)


def use(name: str, **options: Any) -> Use:
    return Use(name, plan(name), **options)


@given(
    st.sampled_from(RECIPES),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 70),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_the_largest_rank_is_the_largest_of_all(
    recipe: str, sizes: list[tuple[int, int]], ranks: int, cast: bool
) -> None:
    """It is looked for among the first few."""
    layout = plan(recipe).layout
    pieces = tuple(
        Piece(Placed((m * layout.multiple_m, k * layout.multiple_k * 8), ranks), plan(recipe), cast) for m, k in sizes
    )
    totals = []
    for rank in range(ranks):
        held = Resident()
        for piece in pieces:
            held += resident(piece, rank, AT.dtypes)
        totals.append(held.total)
    assert largest(pieces, AT.dtypes).total == max(totals)


@pytest.mark.parametrize(("recipe", "again"), [("fp8_block", 0), ("nvfp4", 2)])
def test_masters_are_read_once_where_the_step_writes_codes(recipe: str, again: int) -> None:
    """By bytes of an element: of one weight, the gradient, its master and moments twice, codes; and masters again for a
    recipe with an amax of the whole weight, or where torch's AdamW steps them."""
    stated = shapes.read(["up=1024x512"])
    state = replace(STATES["8bit"], masters=MASTERS["bf16"])
    moved = []
    for one in (state, State()):
        (group,) = groups_of(stated, use(recipe), AT.picks, Mesh(1), replace(AT.dtypes, state=one)).every
        (piece,) = group.trained
        moved.append((group.optimized - gathered(piece, "both", group.dtypes).sent) / (1024 * 512))
    assert moved == [4 + 2 * 2 + 2 * 2 * (1 + 4 / 256) + again, 4 + 2 * 4 + 2 * 8 + 4]


@given(st.sampled_from(RECIPES), st.integers(1, 40), st.integers(1, 4), st.integers(1, 70), st.booleans())
@settings(max_examples=40, deadline=None)
def test_masters_and_moments_of_all_ranks_are_those_of_the_weight(
    recipe: str, m: int, k: int, ranks: int, cast: bool
) -> None:
    """However few rows the last ranks have: a quantized weight has fp32 masters, one that is cast is its own."""
    layout = plan(recipe).layout
    shape = m * layout.multiple_m, k * layout.multiple_k * 8
    piece = Piece(Placed(shape, ranks), plan(recipe), cast)
    held = [resident(piece, rank, AT.dtypes) for rank in range(ranks)]
    assert sum(one.masters for one in held) == (0 if cast else 4 * prod(shape))
    assert sum(one.moments - AT.dtypes.state.counter for one in held) == 8 * prod(shape)


@pytest.mark.parametrize(
    ("recipe", "stays", "left"),
    [
        ("nvfp4", False, 4),  # the amax of the whole weight
        ("mxfp8", True, 0),
        ("fp8_current", True, 4),  # its scale
        ("fp8_delayed", False, 4 + 4096 + 4),  # its scale, its history, and the amax that the cast remembers
        ("fp8_delayed", True, 4 + 4096 + 4 + 4096),
    ],
)
def test_what_gathers_of_cast_weights_leave_by_hand(recipe: str, stays: bool, left: int) -> None:
    piece = Piece(Placed((256, 256), 2), plan(recipe), cast=True, stays=stays)
    assert resident(piece, 0, AT.dtypes).left == left


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", [2, 3, 8, 24])
def test_what_is_sent_is_what_the_layout_says(recipe: str, world: int) -> None:
    """LAYOUT.gather of the generated package, for matrices and for experts."""
    from numpy_models import recipe as generated

    layout = generated(recipe).LAYOUT
    for shape in ((384, 256), (96, 128), (1024, 512)):
        piece = Piece(Placed(shape, world), plan(recipe))
        for which in ("forward", "backward", "both"):
            facts = layout.gather(*shape, world, which)
            assert gathered(piece, which, AT.dtypes).sent == facts.bytes_per_rank
            assert gathered(piece, which, AT.dtypes).held >= facts.nbytes


def test_more_ranks_than_experts_are_padded() -> None:
    """FSDP2 cuts dim 0: 8 experts over 64 ranks travel eight times over."""
    shape = (8, 96, 64)
    piece = Piece(Placed(shape, 64), plan("mxfp8"))
    once = gathered(Piece(Placed(shape, 8), plan("mxfp8")), "forward", AT.dtypes)
    assert gathered(piece, "forward", AT.dtypes) == replace(once, held=8 * once.held)


@pytest.mark.parametrize(
    ("mesh", "dense", "experts"),
    [
        (Mesh(64), ((1536, 7168), 64), ((256, 4096, 7168), 64)),
        (Mesh(64, replicas=2), ((1536, 7168), 32), ((256, 4096, 7168), 32)),
        (Mesh(64, experts=16), ((1536, 7168), 64), ((16, 4096, 7168), 4)),
        (Mesh(64, tensor=4), ((1536, 7168), 16), ((256, 1024, 7168), 16)),
        (Mesh(64, 2, 4, 16), ((1536, 7168), 8), ((16, 4096, 7168), 2)),
    ],
)
def test_where_weights_lie(mesh: Mesh, dense: Any, experts: Any) -> None:
    layer = model("deepseek-v3").layers[5]
    by_name = {weight.name: weight for weight in layer.weights}
    placed = place(by_name["self_attn.q_a_proj.weight"], mesh)  # which tensor parallelism does not cut
    assert (placed.shape, placed.ranks) == dense
    placed = place(by_name["mlp.experts.gate_up_proj"], mesh)
    assert (placed.shape, placed.ranks) == experts
    if mesh.tensor > 1:
        assert place(by_name["self_attn.q_b_proj.weight"], mesh).shape == (24576 // mesh.tensor, 1536)
        assert place(by_name["self_attn.o_proj.weight"], mesh).shape == (7168, 16384 // mesh.tensor)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh(64, replicas=3), "64 ranks can't be divided into 3 replicas of 1 tensor-parallel ranks each"),
        (Mesh(64, tensor=128), "64 ranks can't be divided into 1 replicas of 128"),
        (Mesh(64, experts=24), "64 ranks of a replica can't be divided among 24 expert-parallel ranks"),
    ],
)
def test_meshes_that_can_not_be(mesh: Mesh, said: str) -> None:
    assert said in mesh.problem()
    with pytest.raises(ValueError, match="can't be divided"):
        budget(model("llama-3.1-8b"), Use("bf16"), mesh, AT)


def chosen(found: Budget) -> dict[str, str]:
    return {line.name: line.plain for line in found.weights}


def test_what_stays_plain_and_why() -> None:
    found = chosen(budget(model("gpt-oss-20b"), use("mxfp8"), Mesh(8), AT))
    layer = "model.layers.*."
    assert found[f"{layer}self_attn.q_proj.weight"] == found["lm_head.weight"] == ""
    assert found["model.embed_tokens.weight"] == "an embedding"
    assert found["model.norm.weight"] == "a norm"
    assert found[f"{layer}mlp.router.weight"] == "a router"
    assert "--experts" in found[f"{layer}mlp.experts.gate_up_proj"]
    both = chosen(budget(model("gpt-oss-20b"), use("mxfp8"), Mesh(8), replace(AT, picks=Picks(experts=True))))
    assert both[f"{layer}mlp.experts.gate_up_proj"] == ""
    assert both[f"{layer}mlp.experts.gate_up_proj_bias"] == "a bias"
    picks = Picks(only=("*.o_proj.weight", "*experts.down_proj"), leave=("*.0.*",))
    some = budget(model("gpt-oss-20b"), use("mxfp8"), Mesh(8), replace(AT, picks=picks))
    taken = {line.name: line.count for line in some.weights if not line.plain}
    assert taken == {f"{layer}self_attn.o_proj.weight": 23, f"{layer}mlp.experts.down_proj": 23}
    assert some.quantized == 23 * (4096 * 2880 + 32 * 2880 * 2880)


def test_shapes_that_a_recipe_does_not_take() -> None:
    found = chosen(budget(shapes.read(["up=40x64", "down=64x64"]), use("mxfp8"), Mesh(2), AT))
    assert found == {"up": "mxfp8 takes rows in multiples of 32, not 40: quantize_ refuses it", "down": ""}


def test_tied_heads_stay_plain() -> None:
    tied = config.read({**config_of("llama-3.1-8b"), "tie_word_embeddings": True}, "tied")
    found = budget(tied, use("mxfp8"), Mesh(8), replace(AT, picks=Picks(only=("*",))))
    assert chosen(found)["model.embed_tokens.weight"] == "tied to lm_head.weight, which quantize_ would untie"


def config_of(stem: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{stem}.json").read_text(encoding="utf-8"))
    return found


def test_tensor_parallelism_cuts_between_blocks_or_not_at_all() -> None:
    weights = ["up=96x64", "down=64x96"]
    base = shapes.read(weights)
    layers = replace(
        base.root,
        weights=tuple(
            replace(weight, cut="rows" if weight.name == "up" else "columns") for weight in base.root.weights
        ),
    )
    found = chosen(budget(replace(base, root=layers), use("mxfp8"), Mesh(2, tensor=2), AT))
    assert found["up"] == "cuts of 48 rows by tensor parallelism fall inside blocks of 32 rows"
    assert found["down"] == "cuts of 48 columns by tensor parallelism are not at multiples of 32"
    whole_rows = chosen(budget(replace(base, root=layers), use("int8_rowwise"), Mesh(2, tensor=2), AT))
    assert "has scales that cover whole rows" in whole_rows["down"]


def test_patterns_like_no_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no weight of 2 or 3 dims has a name like '\*.w1'; there are 226"):
        check_patterns(model("llama-3.1-8b"), Picks(only=("*.w1",)))


def test_cuts_inside_of_blocks_have_sizes_without() -> None:
    found = budget(shapes.read(["up*2=144x64"]), use("nvfp4"), Mesh(8), AT)
    (cut,) = found.cuts
    assert (cut.name, cut.count, cut.inside, cut.free_rows, cut.free_worlds) == (
        *("layers.*.up", 2, 7),
        *((128, 256), (3, 9)),
    )
    assert found.traffic.exchanged == 2 * (4 + 2 * 2 * 64 * 4)  # an amax, and extremes of two blocks


def test_more_ranks_hold_less_until_padding_holds_them() -> None:
    totals = [budget(model("llama-3.1-70b"), use("nvfp4"), Mesh(world), AT).resident.total for world in (8, 64, 512)]
    assert totals == sorted(totals, reverse=True)
    padded = [budget(model("llama-3.1-70b"), Use("bf16"), Mesh(world), AT).padding for world in (8, 4096)]
    assert padded[0] == 0 < padded[1]


def test_replicas_hold_as_much_as_fewer_ranks_and_add_up_gradients() -> None:
    one, two = (budget(model("llama-3.1-8b"), use("mxfp8"), mesh, AT) for mesh in (Mesh(8), Mesh(16, replicas=2)))
    assert one.resident == two.resident
    assert one.peaks == two.peaks
    assert (one.traffic.replicated, two.traffic.replicated) == (0, one.traffic.reduced)
    assert (one.step.all_reduce, two.step.across) == (0, pytest.approx(two.step.all_reduce))


@pytest.mark.parametrize(
    ("mesh", "dense", "replicas"),
    [
        (Mesh(8), (8, 8), (1, 1)),
        (Mesh(64), (64, 8), (1, 1)),
        (Mesh(64, replicas=8), (8, 8), (8, 1)),
        (Mesh(64, replicas=16), (4, 4), (16, 2)),
        (Mesh(64, tensor=8), (8, 1), (1, 1)),
        (Mesh(32, replicas=2, tensor=2), (8, 4), (2, 1)),
        (Mesh(6), (6, 6), (1, 1)),
        (Mesh(24, replicas=4), (6, 5), (4, 1)),  # the second lies on two hosts
    ],
)
def test_which_links_collectives_take(mesh: Mesh, dense: tuple[int, int], replicas: tuple[int, int]) -> None:
    """Ranks of a ring, and those of them in a host of eight; by the ranks themselves."""
    (sending,) = works_of(
        model("llama-3.1-8b"), groups_of(model("llama-3.1-8b"), Use("bf16"), Picks(), mesh, Dtypes()), mesh, 8
    )[1].sent
    assert (sending.ring, sending.replicas) == (Ring(*dense), Ring(*replicas))
    shards = [range(at, mesh.shards * mesh.tensor, mesh.tensor) for at in range(mesh.tensor)]
    assert sending.ring.crosses == any(
        len({(first + rank) // 8 for rank in one}) > 1
        for one in shards
        for first in range(0, mesh.world, mesh.shards * mesh.tensor)
    )


def test_gathers_inside_of_a_host_are_not_charged_across() -> None:
    """Replicas of a host each: a slower network slows their all-reduce alone."""
    fast, slow = (replace(AT, links=links_of(speed)) for speed in (400e9, 12e9))
    one, other = (budget(model("llama-3.1-8b"), use("nvfp4"), Mesh(64, replicas=8), at).step for at in (fast, slow))
    assert (one.gather_forward, one.reduce_scatter, one.within) == (
        other.gather_forward,
        other.reduce_scatter,
        other.within,
    )
    assert one.all_reduce < other.all_reduce == pytest.approx(other.across)
    elements = model("llama-3.1-8b").elements
    assert other.all_reduce == pytest.approx(
        2 * 7 / 8 * elements / 8 * 4 / 12e9, rel=0.06
    )  # 0.93 of the half that adds


@given(
    st.sampled_from((*RECIPES, "bf16")),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(2, 9),
    st.integers(2, 4),
    st.sampled_from([Dtypes(), Dtypes(4, 4, 4), Dtypes(2, 2, 2)]),
)
@settings(max_examples=25, deadline=None)
def test_what_copies_exchanges_and_values_change_and_what_they_leave(
    recipe: str, cast: bool, sizes: list[tuple[int, int]], layers: int, ranks: int, copies: int, dtypes: Dtypes
) -> None:
    """Of any weights on any ranks; tests/distributed/test_planned_bytes.py has a case of each in FSDP2."""
    how = Use(recipe) if recipe == "bf16" else use(recipe, cast=cast)
    unit = (8, 64) if how.plan is None else (how.plan.layout.multiple_m, how.plan.layout.multiple_k)
    stated = [f"up{number}*{layers}={m * unit[0]}x{k * unit[1]}" for number, (m, k) in enumerate(sizes)]
    one, at = shapes.read([*stated, f"head={unit[0]}x{unit[1]}"]), replace(AT, dtypes=dtypes)
    codes = replace(how, on_gather=False) if how.plan else how
    alone, copied, exchanged = (
        budget(one, way, mesh, at)
        for way, mesh in (
            (codes, Mesh(ranks)),
            (codes, Mesh(ranks * copies, replicas=copies)),
            (replace(codes, exchange=EXCHANGED), Mesh(ranks)),
        )
    )
    assert copied.traffic == replace(alone.traffic, replicated=alone.traffic.reduced)
    assert (copied.resident, copied.peaks.forward) == (alone.resident, alone.peaks.forward)
    widens = dtypes == Dtypes()
    assert exchanged.exchange == widens
    assert exchanged.traffic == replace(alone.traffic, reduced=alone.traffic.reduced // (1 + widens))
    assert (exchanged.resident, exchanged.peaks.forward) == (alone.resident, alone.peaks.forward)
    assert alone.traffic.reduced * ranks >= one.elements * dtypes.reduced
    if how.plan is not None:
        values = budget(one, replace(how, on_gather=True), Mesh(ranks), at)
        assert replace(values.traffic, forward=0, backward=0) == replace(alone.traffic, forward=0, backward=0)
        assert replace(values.resident, left=0) == replace(alone.resident, left=0)
        passes = {line.name: (line.forward, line.backward) for line in values.weights}
        assert all(backward in (0, forward) for forward, backward in passes.values())


def test_frozen_weights_have_no_master_no_moments_and_no_gradient() -> None:
    base = shapes.read(["up=64x64"])
    frozen = replace(base, root=replace(base.root, weights=tuple(replace(w, trains=False) for w in base.root.weights)))
    held = budget(frozen, use("mxfp8"), Mesh(2), AT).resident
    assert (held.masters, held.moments, held.gradients) == (0, 0, 0)
    assert held.weights > 0


def test_one_rank_sends_nothing() -> None:
    found = budget(model("llama-3.1-8b"), use("mxfp8"), Mesh(1), AT)
    assert found.traffic == replace(found.traffic, forward=0, backward=0, reduced=0, replicated=0, exchanged=0)
    assert (found.step.gather_forward, found.step.reduce_scatter, found.cuts) == (0, 0, ())


@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
def test_an_exchange_sends_half_of_the_gradients_bytes_and_leaves_what_stays(name: str) -> None:
    how = Use(name, None if name == "bf16" else plan(name))
    for mesh in (Mesh(8), Mesh(16, replicas=2), Mesh(8, tensor=2)):
        before, after = (
            budget(model("llama-3.1-8b"), replace(how, exchange=EXCHANGED if on else None), mesh, AT)
            for on in (False, True)
        )
        assert (before.exchange, after.exchange) == (False, True)
        assert after.traffic == replace(before.traffic, reduced=before.traffic.reduced // 2)  # replicas add up in fp32
        assert (after.resident, after.peaks.forward) == (before.resident, before.peaks.forward)
        assert after.step.reduce_scatter < before.step.reduce_scatter
        assert after.step.total < before.step.total


@pytest.mark.parametrize("name", ["grad_fp8", "grad_int4"])
def test_codes_of_gradients_take_the_bytes_of_the_runtimes_rows(name: str) -> None:
    """Any number of elements: planes of blocks that are filled up, each a multiple of 16 bytes."""
    wire = wire_of(plan(name))
    codes = Codes(name)
    for elements in (1, 127, 128, 129, 4096, 5000, 218_112_000 // 2, 218_112_001):
        assert wire.sent.nbytes(elements) == codes.row(elements).nbytes
    with pytest.raises(ValueError, match="mxfp8 is not a recipe for gradients on the wire"):
        wire_of(plan("mxfp8"))


def test_codes_of_gradients_travel_in_any_dtype_and_error_feedback_stays() -> None:
    """One matrix of 6 x 512 over 4 ranks: shards of 2 rows, of which 8 blocks of 128 and their scales travel."""
    one = shapes.read(["up=6x512"])
    for dtypes in (Dtypes(), Dtypes(2, 2, 2)):
        at = replace(AT, dtypes=dtypes)
        before, after, kept = (
            budget(one, Use("bf16", exchange=wire), Mesh(4), at)
            for wire in (None, wire_of(plan("grad_fp8")), wire_of(plan("grad_fp8"), error_feedback=True))
        )
        assert after.exchange
        assert after.traffic == replace(before.traffic, reduced=8 * 128 + 8 * 4)
        rows, padded, sent = 2 * 512, 8 * 512, 4 * (8 * 128 + 8 * 4)
        added = dtypes.reduced * rows + max(sent + 2 * padded, 2 * sent)
        assert after.peaks.backward == 2 * 6 * 512 + added
        assert kept.resident.total - after.resident.total == 4 * 6 * 512


@pytest.mark.parametrize("name", ["grad_fp8", "grad_int4"])
@pytest.mark.parametrize("size", [4, 2])
def test_sums_of_replicas_take_the_bytes_of_the_runtimes_codes(name: str, size: int) -> None:
    """As codes of all, or of a part that is then sent as it is: never more than a ring sends to all-reduce them."""
    wire = wire_of(plan(name))
    for replicas in (2, 3, 4, 8, 64):
        group = SimpleNamespace(size=lambda replicas=replicas: replicas)
        runtime = Replicas(group, Sender(Codes(name), 0, False), "")
        for elements in (1, 129, 5000, 218_112_001):
            codes, sums = wire.among(elements, replicas, size)
            assert codes + sums == runtime.sends(elements, size)
            assert bool(sums) == bool(runtime.part(elements, size))
            if elements > 1000 * replicas:
                assert (codes + sums) * replicas < 0.9 * 2 * size * elements


def test_replicas_that_send_codes_by_hand() -> None:
    """One matrix of 6 x 512 over 2 shards: of 3 rows, so that replicas send each other 12 blocks of 128 and scales. Of
    eight replicas in 16 bits, each adds up 2 blocks."""
    one, wire = shapes.read(["up=6x512"]), wire_of(plan("grad_fp8"), error_feedback=True)
    for replicas, dtypes, codes, sums in ((2, Dtypes(), 12 * 128 + 12 * 4, 0), (8, Dtypes(2, 2, 2), 2 * 128 + 16, 512)):
        mesh, at = Mesh(2 * replicas, replicas=replicas), replace(AT, dtypes=dtypes)
        before, after = (budget(one, Use("bf16", among=among), mesh, at) for among in (None, wire))
        assert after.traffic == replace(before.traffic, replicated=codes + sums)
        assert after.resident.total - before.resident.total == 4 * 3 * 512  # what codes have missed of sums
        shard = 3 * 512 * dtypes.reduced
        between = replicas * (codes + sums) if sums else 3 * codes
        assert after.peaks.backward == max(before.peaks.backward, 2 * shard + shard + between + 2 * 6 * 512)
    assert budget(one, Use("bf16", among=wire), Mesh(4), AT) == budget(one, Use("bf16"), Mesh(4), AT)


def test_codes_among_replicas_take_less_of_a_slow_link() -> None:
    slow = replace(AT, links=Links(NVLINK, replace(NVLINK, bandwidth=5e9)))
    mesh = Mesh(64, replicas=8)
    before, after = (
        budget(model("llama-3.1-8b"), use("nvfp4", among=among), mesh, slow).step
        for among in (None, wire_of(plan("grad_int4")))
    )
    assert after.all_reduce < 0.55 * before.all_reduce
    assert after.total < before.total
    assert replace(after, all_reduce=0, across=0, total=0, exposed=0, overlapped=0, undisturbed=0) == replace(
        before, all_reduce=0, across=0, total=0, exposed=0, overlapped=0, undisturbed=0
    )


def test_one_rank_and_gradients_that_are_not_widened_are_not_exchanged() -> None:
    exchanging = use("mxfp8", exchange=EXCHANGED)
    assert budget(model("llama-3.1-8b"), exchanging, Mesh(1), AT) == budget(
        model("llama-3.1-8b"), use("mxfp8"), Mesh(1), AT
    )
    for dtypes in (Dtypes(4, 4, 4), Dtypes(2, 2, 2)):
        found = budget(model("llama-3.1-8b"), exchanging, Mesh(8), replace(AT, dtypes=dtypes))
        without = budget(model("llama-3.1-8b"), use("mxfp8"), Mesh(8), replace(AT, dtypes=dtypes))
        assert (found.exchange, found.traffic, found.peaks) == (False, without.traffic, without.peaks)


def test_the_peak_of_an_exchange_by_hand() -> None:
    """One matrix of 6 x 4 over 4 ranks, in the root: shards of 2 rows, so that 8 rows travel."""
    one = shapes.read(["up=6x4"])
    before, after = (
        budget(one, Use("bf16", exchange=EXCHANGED if on else None), Mesh(4), AT).peaks for on in (False, True)
    )
    whole, padded, shard = 6 * 4, 8 * 4, 2 * 4
    assert before.backward == max(2 * padded + 2 * whole, 4 * padded + max(2 * whole, 4 * shard + 2 * whole))
    assert after.backward == 2 * whole + 4 * shard + 2 * 2 * padded  # gradients, the sum, what is sent and what arrives


def test_groups_of_experts_follow_those_of_dense_weights() -> None:
    """In whichever order a layer has them."""
    first = model("gpt-oss-20b")
    layers = tuple(
        replace(layer, weights=tuple(sorted(layer.weights, key=lambda weight: weight.kind != "experts")))
        for layer in first.layers
    )
    for one in (first, replace(first, layers=layers)):
        for groups in groups_of(one, use("mxfp8"), AT.picks, Mesh(8, experts=4), AT.dtypes).layers:
            kinds = [{member.weight.kind == "experts" for member in group.members} for group in groups]
            assert kinds == [{False}, {True}]


@pytest.mark.parametrize(
    ("mesh", "per_host", "crosses"),
    [
        (Mesh(8), 8, False),
        (Mesh(12), 8, True),
        (Mesh(64), 8, True),
        (Mesh(64, replicas=8), 8, False),
        (Mesh(64, replicas=16), 8, False),
        (Mesh(24, replicas=4), 8, True),  # replicas of 6: the second lies on two hosts
        (Mesh(64, tensor=8), 8, True),
        (Mesh(64, replicas=8, tensor=8), 8, False),  # nothing is sharded
        (Mesh(64, replicas=4, tensor=16), 8, False),
        (Mesh(64, replicas=4, tensor=16, experts=8), 8, True),  # but experts, over two ranks
    ],
)
def test_which_ranks_shard_across_hosts(mesh: Mesh, per_host: int, crosses: bool) -> None:
    assert mesh.crosses(per_host) == crosses
    together = _sharded_together(mesh)
    assert crosses == any(len({rank // per_host for rank in group}) > 1 for group in together)


def _sharded_together(mesh: Mesh) -> list[list[int]]:
    """Groups of ranks, as torchtitan lays meshes out: replicas, then shards, then tensor-parallel ranks."""
    replica = mesh.shards * mesh.tensor
    found = []
    for first in range(0, mesh.world, replica):
        ranks = range(first, first + replica)
        found += [[*ranks[at :: mesh.tensor]] for at in range(mesh.tensor)]
        found += [[*ranks[at :: mesh.experts]] for at in range(mesh.experts)] if mesh.experts > 1 else []
    return found


@pytest.mark.parametrize("name", ["fp8_block", "nvfp4"])
@pytest.mark.parametrize("cast", [False, True])
def test_values_take_what_plain_weights_take_and_gathers_send_codes(name: str, cast: bool) -> None:
    for mesh in (Mesh(8), Mesh(16, replicas=2), Mesh(8, tensor=2)):
        ways = (Use("bf16"), *(use(name, cast=cast, on_gather=on) for on in (False, True)))
        plain, codes, values = (budget(model("llama-3.1-8b"), one, mesh, AT) for one in ways)
        assert (plain.on_gather, codes.on_gather, values.on_gather) == (False, False, True)
        assert values.traffic == codes.traffic
        assert replace(values.resident, left=0) == replace(codes.resident, left=0)
        assert values.resident.left <= codes.resident.left
        assert values.peaks.layer == plain.peaks.layer
        assert values.peaks.forward > codes.peaks.forward
        assert values.step.host < codes.step.host


@pytest.mark.parametrize(
    ("how", "ranks", "values"),
    [
        ({}, 8, True),
        ({"cast": True}, 8, True),
        ({"low": True}, 8, False),
        ({}, 1, False),
        ({}, 48, False),  # 1,024 rows are 22 a rank: cuts inside of blocks
    ],
)
def test_which_gathers_leave_values_by_default(how: dict[str, Any], ranks: int, values: bool) -> None:
    """Those of layers, whose weights are freed after forward; not those of the root."""
    groups = groups_of(model("llama-3.1-8b"), use("nvfp4", **how), AT.picks, Mesh(ranks), AT.dtypes)
    for group in groups.every:
        taken = [one.piece for one in group.members if one.piece.plan is not None]
        assert taken
        assert all(one.on_gather == (values and not group.stays) for one in taken)


def test_gathers_of_passes_that_differ_leave_codes_by_default() -> None:
    at = replace(AT, dtypes=Dtypes(4, 4, 4, NONE))
    for name, dtypes in (("mxfp8", AT.dtypes), ("nvfp4", at.dtypes)):  # and those of values of 32 bits
        pieces = groups_of(model("llama-3.1-8b"), use(name), AT.picks, Mesh(8), dtypes).pieces
        assert not any(one.on_gather for one in pieces)


def test_the_peak_of_values_by_hand() -> None:
    """Two layers of two matrices over two ranks, in nvfp4: in backward the second is dequantized as its codes are
    there, beside the root; then the first one's planes are gathered, and dequantized beside its gradients."""
    two = shapes.read(["up*2=64x256", "down*2=64x256"])
    one = replace(use("nvfp4"), on_gather=True)
    at = replace(AT, dtypes=Dtypes(4, 2, 4, NONE))
    found, groups = (budget(two, one, Mesh(2), at), groups_of(two, one, AT.picks, Mesh(2), at.dtypes))
    shard = 2 * (32 * 128 + 2 * 16)
    [first], [last] = groups.layers
    assert first == last
    assert (first.at_once, first.gather("forward")) == (shard, Gathered(shard, 2 * 2 * 64 * 256, 0))
    values, whole, summed = 2 * 2 * 64 * 256, 2 * 2 * 64 * 256, 2 * 4 * 64 * 256
    assert found.peaks.forward == 2 * shard + 2 * shard + values  # the last buffer, this one, values
    reduced, grads = summed // 2, 2 * 4 * 64 * 256 // 2
    ends = max(
        values + 2 * shard,
        values + 2 * shard + whole,
        2 * shard + summed + max(whole, reduced + whole // 2),
        grads + values + 2 * shard + summed,
        grads + values + whole + summed,
        grads + summed + max(whole, reduced + whole // 2),
    )
    assert found.peaks.backward == ends


@pytest.mark.parametrize("name", ["mxfp8", "hybrid_fp8"])
def test_values_of_forward_are_gathered_for_both_passes(name: str) -> None:
    made = [budget(model("llama-3.1-8b"), use(name, on_gather=on), Mesh(8), AT) for on in (False, True)]
    codes, values = made
    assert all(line.backward in (0, line.forward) for line in values.weights)  # 0: of the root
    assert values.traffic.forward <= codes.traffic.forward  # which has room for backward's, where that sends more


def test_lines_add_up_to_the_traffic() -> None:
    found = budget(model("deepseek-v3"), use("nvfp4"), Mesh(256, experts=32), replace(AT, picks=Picks(experts=True)))
    for which in ("forward", "backward"):
        total = sum(line.count * getattr(line, which) for line in found.weights)
        assert total == getattr(found.traffic, which)
    assert sum(line.count * prod(line.shape) for line in found.weights) == model("deepseek-v3").elements


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: pip install 'layoutc[integrations]'")
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt_oss", "deepseek_v3"])
def test_what_is_quantized_is_what_quantize_takes(kind: str) -> None:
    """The default filter, on transformers' modules; and with the experts, the names that are passed."""
    import torch
    import transformers

    import layoutc

    fields = {
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 4, "vocab_size": 96, "num_local_experts": 4},
        **{"moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        **{"first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16},
        **{"qk_rope_head_dim": 32, "v_head_dim": 16, "head_dim": 16},
    }
    stated = config.read({"model_type": kind, **fields}, kind)
    groups = groups_of(stated, use("mxfp8"), Picks(), Mesh(2), Dtypes())
    planned = [
        full_name(layer, member.weight)
        for layer, own in zip(stated.all_layers, (groups.root, *groups.layers), strict=True)
        for group in own
        for member in group.members
        if member.piece.plan is not None
    ]
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **fields))
    assert sorted(planned) == sorted(layoutc.quantize_(theirs, "mxfp8"))


def test_a_weight_is_a_matrix_of_its_rows() -> None:
    assert Weight("w", (2, 3, 4), "experts").matrix == (6, 4)
    assert Weight("w", (5,), "norm").matrix == (5, 1)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: pip install 'layoutc[integrations]'")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "qwen3_moe"])
def test_activations_are_what_autograd_saves(kind: str) -> None:
    """Of transformers' modules as called: all storages that forward leaves, of one layer more, to the byte."""
    import torch
    import transformers

    fields = {
        **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 16, "vocab_size": 96, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32},
        **{"num_experts_per_tok": 2},
    }
    tokens, counted = 64, []
    for layers in (1, 2):
        config_ = transformers.AutoConfig.for_model(kind, **fields, num_hidden_layers=layers, use_cache=False)
        own = transformers.AutoModelForCausalLM.from_config(config_, dtype=torch.bfloat16).train()
        plain = {one.untyped_storage().data_ptr() for one in (*own.parameters(), *own.buffers())}
        saved: dict[int, torch.Tensor] = {}

        def keep(one: torch.Tensor, saved: dict[int, torch.Tensor] = saved) -> torch.Tensor:
            saved[one.untyped_storage().data_ptr()] = one
            return one

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            out = own(input_ids=torch.arange(tokens)[None])
        counted.append(sum(one.untyped_storage().nbytes() for at, one in saved.items() if at not in plain))
        del out
    stated = config.read({"model_type": kind, **fields, "num_hidden_layers": 1}, kind)
    load = Load(tokens, tokens)
    found = activations(stated, Mesh(1), load, "eager", "none")
    offsets = 4 * 4 if "experts" in str(stated.layers[0].weights) else 0  # of four groups of tokens, in all
    assert found.kept[0] == counted[1] - counted[0] - offsets
    full = activations(stated, Mesh(1), load, "eager", "full")
    assert full.kept[0] == 2 * 64 * tokens
    assert full.computing[0] > found.computing[0] + 0.9 * found.kept[0]
    assert activations(stated, Mesh(1), load, "compiled", "none").kept[0] < found.kept[0]
