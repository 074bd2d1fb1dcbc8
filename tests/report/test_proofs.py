"""Proofs hold for what the compiler derives, and fail for what it would be wrong to derive."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from calls import calls_of
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT, TESTS
from test_describe import NAMES, plan_of, recipe, six_bits

from layoutc.cli.app import main
from layoutc.layout import chain
from layoutc.layout.chain import Chain
from layoutc.plan.plan import Plan, derive
from layoutc.report import proofs, proofs_of_files, proofs_of_values
from layoutc.report.proofs import Proof, failures, prove
from layoutc.report.proofs_of_files import OF_FILES
from layoutc.report.proofs_of_values import transforms_cancel
from layoutc.spec.checks.read import read_spec

SPECS = ROOT / "specs"


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NAMES)
def test_everything_holds_for_shipped_recipes(name: str) -> None:
    found = prove(recipe(name))
    assert [proof for proof in found if not proof.holds or proof.counter] == []
    assert not any("too large" in proof.method for proof in found), "shipped recipes are small enough to enumerate"
    assert failures(found, "x.yaml") == []


def test_maps_are_walked_over_several_tiles_and_a_torn_one() -> None:
    """Of a buffer without pads, a weight of 2 x 3 tiles; of scales in tiles of 128 x 4 blocks, one that ends inside."""
    methods = {one.about: one.method for one in proofs.buffers_are_bijections(recipe("mxfp8"))}
    assert methods["rowwise_data"].endswith("enumerated, weights of 32 x 96")
    assert methods["rowwise_scale"].endswith("enumerated, weights of 256 x 384 and 160 x 160")


def test_everything_holds_for_codes_that_run_on() -> None:
    assert [proof for proof in prove(six_bits()) if not proof.holds] == []


def spec(m: int, k: int, rows: Any, columns: Any, pads: tuple[int, int], order: str, bits: int, pack: str) -> str:
    """A spec with blocks and pads of its own; `all` blocks have no dim in the scale's layout."""
    element = {4: "e2m1", 6: "e2m3", 8: "e4m3"}[bits]

    def orientation(data: str, block: Any) -> str:
        terms = [(axis, size) for axis, size in zip("mk", block, strict=True) if size != "all"]
        layout = " ".join(f"{axis}/{size}" for axis, size in terms) or "scalar"
        pad = f", pad: [{', '.join(map(str, pads[: len(terms)]))}]" if terms else ""
        return (
            f"{{block: {{m: {block[0]}, k: {block[1]}}}, data: {{layout: {data}}}, scale: {{layout: {layout}{pad}}}}}"
        )

    return f"""layoutc: 1
name: drawn
summary: drawn
shape: {{m: {m}, k: {k}}}
element: {{format: {element}{f", pack: {pack}" if bits < 8 else ""}}}
scale: {{format: e8m0, rule: power-of-two, round: up}}
orientations:
  rowwise: {orientation("m k", rows)}
  columnwise: {orientation(order, columns)}
"""


SIZE = st.sampled_from([1, 2, 3, 4, 5, 16, 32, "all"])


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(
        st.sampled_from([4, 12, 32]),
        st.sampled_from([4, 20, 32]),
        st.tuples(SIZE, SIZE),
        st.tuples(SIZE, SIZE),
        st.tuples(st.sampled_from([1, 3, 8]), st.sampled_from([1, 4])),
        st.sampled_from(["m k", "k m"]),
        st.sampled_from([4, 6, 8]),
        st.sampled_from(["low-first", "high-first"]),
    )
)
def test_everything_holds_for_any_spec_that_passes(drawn: Any) -> None:
    text = spec(*drawn)
    checked, _ = read_spec(text, "drawn.yaml")
    if checked is not None:
        assert [proof for proof in prove(plan_of(text, "drawn")) if not proof.holds] == []


@pytest.mark.parametrize("size", [2**31 - 1, 2**30, 6074001000])
def test_what_is_too_large_to_enumerate_is_quick(size: int) -> None:
    if size < 2**31:
        plan = plan_of(spec(1, 1, (size, 1), (1, size), (size, size), "m k", 8, "low-first"), "drawn")
    else:
        plan = plan_of(spec(12, 20, (2**19 - 1, 2**17 - 1), ("all", 1), (3, 1), "k m", 8, "low-first"), "drawn")
    proofs, calls = calls_of(lambda: prove(plan))
    assert [proof for proof in proofs if not proof.holds] == []
    assert calls < 200_000, calls


@pytest.mark.parametrize(
    ("step", "shape", "is_sound"),
    [
        *(
            (chain.Permute(order), (2, 3), order in ((0, 1), (1, 0)))
            for order in ((0, 1), (1, 0), (0, 0), (0,), (0, 2))
        ),
        *((chain.Repeat(0, 4, limit), (3, 5), limit > 8) for limit in (7, 8, 9, 12)),
        *((chain.Pad(multiples), (3, 5), 0 not in multiples) for multiples in ((1, 1), (0, 4), (4, 0), (4, 8))),
        *((chain.Split(1, sizes), (3, 12), 5 not in sizes) for sizes in ((2, 3), (5,), (12,), (4, 5))),
        *((chain.Reorder(1, order), (2, 3), len(set(order)) == 3) for order in ((2, 0, 1), (0, 1, 1), (0, 1))),
        *((chain.Join(counts), (2, 3, 4), sum(counts) == 3) for counts in ((1, 2), (3,), (1, 1), (2, 2))),
    ],
)
def test_a_step_of_a_large_buffer_is_judged_by_itself(step: Any, shape: tuple[int, ...], is_sound: bool) -> None:
    made = SimpleNamespace(steps=(step,), shapes=(shape, (1, 8)), bits=4)
    assert proofs._step_by_step(made) == ("" if is_sound else f"{step} on {shape}")  # type: ignore[arg-type]


def test_rows_of_a_large_buffer_are_whole_bytes() -> None:
    for last, bits in ((7, 4), (8, 4), (3, 6), (4, 6), (1, 8)):
        made: Any = SimpleNamespace(steps=(), shapes=((2, last),), bits=bits)
        assert (proofs._step_by_step(made) == "") == (last * bits % 8 == 0)


# ------------------------------------------------------------------------------------------------- wrong on purpose
def failing(plan: Plan) -> set[str]:
    return {proof.about for proof in prove(plan) if not proof.holds}


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 48])
def test_another_alignment_is_refuted(rows: int) -> None:
    assert failing(replace(recipe("nvfp4"), shard_rows=rows)) == {"shards"}


def test_an_alignment_that_packing_needs_is_missed() -> None:
    """Blocks of one row, but pairs of rows share bytes columnwise."""
    text = spec(2, 2, (1, "all"), (1, "all"), (1, 1), "k m", 4, "low-first")
    plan = plan_of(text, "drawn")
    assert plan.shard_rows == 2
    assert failing(plan) == set()
    assert failing(replace(plan, shard_rows=1)) == {"shards"}


def test_a_large_alignment_is_refuted_by_its_divisors() -> None:
    plan = plan_of(spec(1, 1, (2**20, 1), (1, 1), (1, 1), "m k", 8, "low-first"), "drawn")
    assert failing(plan) == set()
    assert failing(replace(plan, shard_rows=2**21)) == {"shards"}
    assert failing(replace(plan, shard_rows=2**19)) == {"shards"}


def test_a_gather_of_more_than_is_needed_is_refuted() -> None:
    plan = recipe("mxfp8")
    more = replace(plan.forward, planes=plan.both.planes)
    assert failing(replace(plan, forward=more)) == {"forward gather"}
    less = replace(plan.backward, planes=plan.backward.planes[:1])
    assert failing(replace(plan, backward=less)) == {"backward gather"}
    elsewhere = replace(plan.backward, serves=("rowwise",))
    assert failing(replace(plan, backward=elsewhere)) == {"backward gather"}


def test_two_copies_of_the_same_are_refuted() -> None:
    """An orientation with planes of its own, though it quantizes just as the other does."""
    plan = recipe("nvfp4")
    (source,) = plan.layout.sources
    planes = {kind: replace(getattr(source, kind), name=f"columnwise_{kind}") for kind in ("data", "scale")}
    twin = replace(source, name="columnwise", **planes)
    origins = (("rowwise", "rowwise"), ("columnwise", "columnwise"))
    layout = replace(plan.layout, sources=(source, twin), source_of=origins)
    assert "columnwise" in failing(replace(plan, layout=layout))


def test_an_orientation_made_of_other_planes_is_refuted() -> None:
    plan = recipe("mxfp8")
    shared = (("rowwise", "rowwise"), ("columnwise", "rowwise"))
    layout = replace(plan.layout, source_of=shared, sources=plan.layout.sources[:1])
    assert "columnwise" in failing(replace(plan, layout=layout))


def test_a_plane_with_too_few_values_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    from layoutc.layout.layout import Plane

    monkeypatch.setattr(Plane, "shape", lambda plane, m, k: (m // (plane.per_m or m), k // (plane.per_k or k)))
    assert "rowwise_scale" in failing(recipe("fp8_block")), "a partial block has a scale of its own"


def not_partitioned(plan: Plan) -> set[str]:
    """What the prover of blocks alone finds wrong."""
    return {proof.about for proof in proofs.blocks_partition_the_weight(plan) if not proof.holds}


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_that_are_stored_too_rarely_or_too_often_are_refuted(
    off: int, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layoutc.layout.layout import Plane

    plan, right = recipe("fp8_block"), Plane.shape
    assert not_partitioned(plan) == set()

    def wrong(plane: Plane, m: int, k: int) -> tuple[int, ...]:
        shape = list(right(plane, m, k))
        shape[axis] += off
        return tuple(shape)

    monkeypatch.setattr(Plane, "shape", wrong)
    assert not_partitioned(plan) >= {"rowwise_data", "rowwise_scale"}


def test_entries_that_hold_the_scales_of_other_blocks_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirrored both ways, every scale has a place of its own, and it is another block's."""
    plan, images, origin = recipe("nvfp4"), chain.Repeat.images, chain.Repeat.origin
    assert not_partitioned(plan) == set()

    def mirrored(step: chain.Repeat, index: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*index[: step.dim], shape[step.dim] - 1 - index[step.dim], *index[step.dim + 1 :])

    monkeypatch.setattr(chain.Repeat, "images", lambda s, index, shape: images(s, mirrored(s, index, shape), shape))
    monkeypatch.setattr(
        chain.Repeat, "origin", lambda s, index, shape: (at := origin(s, index, shape)) and mirrored(s, at, shape)
    )
    bijective = [proof.holds for proof in proofs.buffers_are_bijections(plan) if proof.about.endswith("scale")]
    assert all(bijective)
    assert not_partitioned(plan) == {"rowwise_scale", "columnwise_scale"}


Damage = Callable[[pytest.MonkeyPatch], None]


def _clash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain.Repeat, "images", lambda step, index, shape: (index,))


def _swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain.Permute, "origin", lambda step, index, shape: index)


def _unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain.Pad, "origin", lambda step, index, shape: tuple(map(min, index, shape)))


def _nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain.Pad, "images", lambda step, index, shape: ())


@pytest.mark.parametrize("damage", [_clash, _swapped, _unpadded, _nowhere], ids=lambda damage: damage.__name__)
def test_steps_that_lose_or_mix_values_are_refuted(damage: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(monkeypatch)
    bad = next(proof for proof in prove(recipe("nvfp4")) if not proof.holds)
    assert bad.counter
    assert bad.about.endswith(("_scale", "_data"))


def test_codes_that_overlap_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chain, "_pack", lambda self, index: divmod(index[-1] * self.bits, 8))
    assert "rowwise_data" in failing(recipe("nvfp4"))


def test_a_swizzle_that_loses_a_part_is_refuted() -> None:
    plan = recipe("mxfp8")
    swizzle = plan.layout.swizzle
    assert swizzle is not None
    twice = replace(swizzle, order=tuple("a" if name == "b" else name for name in swizzle.order))
    assert failing(replace(plan, layout=replace(plan.layout, swizzle=twice))) == {"rowwise_scale, columnwise_scale"}


def test_random_bits_that_two_orientations_share_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs_of_values, "stream_of", lambda source: 0)
    assert failing(recipe("nvfp4_gradient")) == {"random bits"}


def test_a_transform_with_one_row_that_grows_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = proofs_of_values._matrix
    monkeypatch.setattr(
        proofs_of_values, "_matrix", lambda one: [*matrix(one)[:-1], [3 * entry for entry in matrix(one)[-1]]]
    )
    found = [one.counter for one in proofs_of_values.transforms_can_be_undone(recipe("nvfp4_gradient"))]
    assert "one may be 12 times as large" in found


@pytest.mark.parametrize(
    ("edit", "holds"),
    [
        ({}, True),
        ({"signs": 0xD7E9}, False),
        ({"signs": 0xD7E8 ^ 0xFFFF}, False),
        ({"size": 4, "signs": 0x8}, False),
        ({"size": 32}, False),
        ({"axis": "k"}, False),
        (None, False),
    ],
)
def test_transforms_that_do_not_cancel_are_refuted(edit: dict[str, Any] | None, holds: bool) -> None:
    """As if the plan had found a kernel for them. Nothing is compared but products of vectors."""
    others = {name: recipe("nvfp4_" + name).layout for name in ("activation", "gradient")}
    plan = derive(recipe("nvfp4").layout, {layout.name: layout for layout in others.values()})
    assert plan.products is not None
    activation = others["activation"]
    rowwise, columnwise = activation.sources
    changed = columnwise.quantization.transform
    changed = None if edit is None or changed is None else replace(changed, **edit)
    source = replace(columnwise, quantization=replace(columnwise.quantization, transform=changed))
    products = replace(plan.products, activation=replace(activation, sources=(rowwise, source)))
    (proof,) = transforms_cancel(replace(plan, products=products))
    assert (proof.about, proof.holds, bool(proof.counter)) == ("grad_weight", holds, not holds)


# -------------------------------------------------------------------------------------------------------- command line
def test_explain_prints_statements_and_methods() -> None:
    result = CliRunner().invoke(main, ["check", "--explain", str(SPECS / "nvfp4.yaml")])
    assert (result.exit_code, result.stderr) == (0, "1 spec, no problems\n")
    lines = result.stdout.splitlines()
    assert lines[0].endswith("nvfp4.yaml")
    assert all(line.startswith(("  proved  ", "          by: ")) for line in lines[1:])
    least = "forward gather: moves 0.5039 B/element, the least there is: 4 bits an element + 8 bits for 16x16"
    assert f"  proved  {least}; of a block that is cut, each rank that has rows of it sends the scales" in lines


def test_explain_for_machines() -> None:
    arguments = ["check", "--explain", "-q", "--format", "json", str(SPECS / "mxfp8.yaml")]
    items = [json.loads(line) for line in CliRunner().invoke(main, arguments).stdout.splitlines()]
    assert len(items) == len(prove(recipe("mxfp8")))
    assert all(item["holds"] and item["statement"] and item["method"] and item["counter"] is None for item in items)
    other = [argument if argument != "json" else "github" for argument in arguments]
    assert CliRunner().invoke(main, other).stdout == ""


def test_a_proof_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: Plan) -> Iterator[Proof]:
        yield Proof("shards", "two is one", "counted", False, "2 > 1")

    monkeypatch.setattr(proofs, "PROVERS", (wrong,))
    result = CliRunner().invoke(main, ["check", "--explain", "--format", "full", str(SPECS / "mxfp8.yaml")])
    assert result.exit_code == 1
    assert "FAILED  shards: two is one" in result.stdout
    assert "error[LC403]: not so: two is one" in result.stderr
    assert "= why: 2 > 1;" in result.stderr
    assert result.stderr.endswith("1 spec, 1 error\n")


def test_specs_with_errors_are_left_out_of_the_explanation() -> None:
    bad = TESTS / "errors" / "octal.yaml"
    result = CliRunner().invoke(main, ["check", "--explain", str(bad), str(SPECS / "mxfp8.yaml")])
    assert result.exit_code == 1
    assert "octal" not in result.stdout


def test_every_entry_of_a_buffer_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that holds another block's value is found, also where it is the last."""
    plan = recipe("mxfp8")
    buffer = next(buffer for buffer in plan.layout.buffers if buffer.plane.per_k == 32)
    shape, value_at = (8, 128), Chain.value_at
    assert proofs._not_its_block(buffer, *shape, True) == ""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(Chain, "value_at", lambda self, *at: asked.append(at) or value_at(self, *at))
    proofs._not_its_block(buffer, *shape, True)
    assert len(set(asked)) == 8 * 128 // 32
    last = asked[-1]
    monkeypatch.setattr(Chain, "value_at", lambda self, *at: (-1, -1) if at == last else value_at(self, *at))
    assert "holds the value of block (-1, -1)" in proofs._not_its_block(buffer, *shape, True)


def of_files(name: str) -> dict[str, str]:
    """Counterexamples of what is said about a recipe's files, by what they are about."""
    return {one.about: one.counter for prove in OF_FILES for one in prove(recipe(name))}


def test_files_hold_each_value_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss' codes lie transposed, AWQ's permuted in words. Two values in one place, or a plane in none, are told."""
    for name, about in (("mxfp4_gpt_oss", "files gpt_oss, rowwise_data"), ("awq", "files awq, rowwise_zero")):
        assert of_files(name)[about] == ""
    where = proofs_of_files.where
    monkeypatch.setattr(
        proofs_of_files, "where", lambda layout, sizes, index: where(layout, sizes, (max(index[0], 1), index[1]))
    )
    assert of_files("awq")["files awq, rowwise_scale"] == "the values at (0, 0) and (1, 0) both lie at (0, 1)"
    layout = recipe("awq").layout
    (files,) = layout.files
    binding = files.binding._replace(planes={k: v for k, v in files.binding.planes.items() if k != "rowwise_data"})
    lost: Any = SimpleNamespace(sources=layout.sources, planes=layout.planes, files=[files._replace(binding=binding)])
    found = [one.counter for one in proofs_of_files.planes_are_in_files(SimpleNamespace(layout=lost))]  # type: ignore[arg-type]
    assert found == ["rowwise_data is in 0 tensors"]
