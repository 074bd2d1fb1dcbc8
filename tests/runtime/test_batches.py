"""Batches under Triton's interpreter: the reference's bytes for each matrix, whatever else is in the batch.

test_kernels.py compares a launch of its own with the reference.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy_models import recipe, reference
from quantized_cases import same, same_bits
from test_kernels import HALVES, QUANTIZING, bits, weight
from torch import Tensor
from weight_recipes import WEIGHTS

import layoutc.recipes
from layoutc.runtime import numerics
from layoutc.runtime.errors import UnsupportedOperator
from layoutc.runtime.kernels import amaxes, batches, launch
from layoutc.runtime.kernels.recipe_kernels import Kernels
from layoutc.runtime.quantize.weights import requantize_batch_, requantize_many_
from layoutc.runtime.weight.tensor import QuantizedTensor

triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")
pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

NAMES = sorted(path.parent.name for path in Path(layoutc.recipes.__file__).parent.glob("*/kernels.py"))
SINGLE = ["grad_fp8", "grad_int4", "nvfp4_gradient"]  # a seed for each matrix
APART = ["fp8_channel_bf16"]  # a launch for each source
GROUPED = [name for name in QUANTIZING if name not in SINGLE]
USABLE = launch.usable
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kernels(name: str) -> Kernels:
    return importlib.import_module(f"layoutc.recipes.{name}.kernels").KERNELS


def ragged(name: str, count: int) -> list[tuple[int, int]]:
    """Shapes that are whole tiles in no dim, one tile or several, for a recipe: some of 16 columns, some of fewer."""
    layout = recipe(name).LAYOUT
    um, uk = layout.multiple_m, layout.multiple_k
    wide = 160 // uk * uk if uk < 160 else uk
    shapes = [(um if um > 1 else 3, uk if uk > 1 else 7), (2 * um if um > 1 else 9, wide), (um, uk)]
    return [shapes[index % 3] for index in range(count)]


def poisoned(name: str, x: Tensor, orientations: Sequence[str]) -> dict[str, Tensor]:
    """Planes to write into, which hold what no kernel writes everywhere."""
    facts = launch.plane_facts(recipe(name).LAYOUT, *x.shape, orientations)
    return {plane: torch.full(shape, 0x5A, dtype=dtype) for plane, (shape, dtype) in facts.items()}


def compare(name: str, xs: list[Tensor], orientations: tuple[str, ...]) -> None:
    """Of a batch, into poisoned planes, and of the reference."""
    layout = recipe(name).LAYOUT
    amaxes = [recipe(name).Tensor.shared_amax(x) for x in xs] if layout.shares_amax else None
    outs = [poisoned(name, x, orientations) for x in xs]
    kernels(name).quantize_batch(xs, amaxes, orientations, outs)
    for index, (x, out) in enumerate(zip(xs, outs, strict=True)):
        amax = amaxes[index] if amaxes else None
        alone = reference(name).quantize_reference(x, amax=amax, orientations=orientations)
        assert alone.keys() == out.keys()
        for plane, stored in alone.items():
            assert torch.equal(bits(stored), bits(out[plane])), (index, tuple(x.shape), plane)


# Of each rule for scales one; test_a_batch_of_every_recipe has all.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in HALVES for dtype in (DTYPES if name in ("mxfp8", "nvfp4") else [torch.bfloat16])],
    ids=str,
)
def test_a_group_gives_the_bytes_of_the_reference(name: str, dtype: torch.dtype) -> None:
    """Ragged shapes, every special value, all orientations at once and each by itself."""
    layout = recipe(name).LAYOUT
    xs = [weight(m, k, seed).to(dtype) for seed, (m, k) in enumerate(ragged(name, 3))]
    compare(name, xs, layout.orientations)
    for orientation in layout.orientations if dtype == torch.bfloat16 and len(layout.orientations) > 1 else ():
        compare(name, xs[:2], (orientation,))


@pytest.mark.parametrize("name", ["fp8_current", "nvfp4"])
@pytest.mark.parametrize("small", [0, 33])
def test_tables_of_one_matrix_and_of_many(name: str, small: int) -> None:
    """More rows than the smaller size of tables holds, too: of one unit, which all go into one table."""
    assert batches.ROWS[0] < 33
    one, several, unit = ragged(name, 3)
    shapes = [one, several, *[unit] * small] if small else [one]
    xs = [weight(m, k, seed).to(torch.bfloat16) for seed, (m, k) in enumerate(shapes)]
    compare(name, xs, recipe(name).LAYOUT.orientations[:1])


def test_more_matrices_than_a_table_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go into several launches, and so do more programs than a launch may have."""
    monkeypatch.setattr(batches, "ROWS", (2, 4))
    xs = [weight(m, k, seed) for seed, (m, k) in enumerate(ragged("fp8_block", 11))]
    compare("fp8_block", xs, ("rowwise",))
    assert torch.equal(bits(amaxes.batch_amax(xs)), bits(torch.cat([numerics.tensor_amax(x) for x in xs])))
    rows = [(3, 0), (4, 1), (2**31 - 5, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7)]
    cuts = [[row[1] for row in cut] for cut in batches._launches(rows)]
    assert cuts == [[0, 1], [2, 3, 4, 5], [6, 7]]


def test_matrices_of_no_table_go_one_by_one() -> None:
    """Strided ones, empty ones and those of planes between multiples of 16 bytes; the rest still go together."""
    base = weight(64, 96, 0)
    xs = [base[:32, :64], base.t()[:64, :32], weight(32, 64, 1), base[:0], base[:32, ::3], weight(64, 32, 2)]
    tables, alone = batches.split(
        recipe("mxfp8").LAYOUT,
        ("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale"),
        xs,
        None,
        ("rowwise",),
        [poisoned("mxfp8", x, ("rowwise",)) for x in xs],
        (4, 1024),
        (4, 1024),
    )
    assert (sum(table.programs for table in tables), alone) == (8 + 16, [0, 1, 3, 4])
    compare("mxfp8", [x for x in xs if x.numel()], ("rowwise", "columnwise"))
    space = torch.empty(64 * 32 + 4, dtype=torch.uint8)
    odd = {**poisoned("mxfp8", xs[5], ("rowwise",)), "rowwise_data": space[4:].view(64, 32)}
    outs = [poisoned("mxfp8", xs[2], ("rowwise",)), odd]
    kernels("mxfp8").quantize_batch([xs[2], xs[5]], None, ("rowwise",), outs)
    for x, out in zip((xs[2], xs[5]), outs, strict=True):
        for plane, stored in kernels("mxfp8").quantize(x, None, ("rowwise",)).items():
            assert torch.equal(stored, out[plane])


def test_bad_batches_are_refused_before_work() -> None:
    xs = [weight(32, 32, 0), weight(32, 64, 1)]
    outs = [poisoned("nvfp4", x, ("rowwise",)) for x in xs]
    before = copy.deepcopy(outs)
    quantize_batch = kernels("nvfp4").quantize_batch
    with pytest.raises(ValueError, match="nvfp4: 2 matrices need as many outs"):
        quantize_batch(xs, None, ("rowwise",), outs[:1])
    with pytest.raises(ValueError, match="have one dtype"):
        quantize_batch([xs[0], xs[1].half()], None, ("rowwise",), outs)
    with pytest.raises(ValueError, match=r"rowwise_data must be contiguous torch.uint8 of shape \(32, 32\)"):
        quantize_batch(xs, None, ("rowwise",), [outs[0], {**outs[1], "rowwise_data": outs[0]["rowwise_data"]}])
    assert all(torch.equal(a[name], b[name]) for a, b in zip(outs, before, strict=True) for name in a)
    quantize_batch([], None, ("rowwise",), [])


@pytest.mark.parametrize("block_k", [None, 1, 16])
@pytest.mark.parametrize("count", [1, 70])
def test_amaxes_of_a_batch(block_k: int | None, count: int) -> None:
    """Mixed dtypes, strides and sizes; NaN and infinities in some."""
    shapes = [(1, 1), (5, 33), (16, 160), (70, 48)]
    xs = [weight(*shapes[seed % 4], seed).to(DTYPES[seed % 3]) for seed in range(count)]
    xs = [x.nan_to_num(1.0, 2.0, -3.0) if seed % 2 else x for seed, x in enumerate(xs)]
    xs += [weight(40, 20, 5).t(), weight(16, 64, 6)[:0]]
    expected = torch.cat([numerics.matrix_amax(x, block_k).flatten() for x in xs])
    found = amaxes.batch_amax(xs, block_k)
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert torch.equal(bits(expected), bits(found))
    assert amaxes.batch_amax([]).shape == (0,)


def test_a_table_is_made_once_for_the_same_places() -> None:
    """And anew when a plane moves, or the matrix."""
    batches._tables.cache_clear()
    xs = [weight(32, 64, seed) for seed in range(3)]
    outs = [poisoned("fp8_current", x, ("rowwise",)) for x in xs]
    shared = amaxes.batch_amaxes(xs, None)
    for _ in range(3):
        kernels("fp8_current").quantize_batch(xs, [amax.clone() for amax in shared[:1]] * 3, ("rowwise",), outs)
    assert batches._tables.cache_info().misses == 2
    outs[1] = poisoned("fp8_current", xs[1], ("rowwise",))
    kernels("fp8_current").quantize_batch(xs, [shared[0]] * 3, ("rowwise",), outs)
    assert batches._tables.cache_info().misses == 3


# ------------------------------------------------------------------------------------------------- an optimizer's step
@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels serve plain CPU tensors, as they do those of a card; the sizes of the batches that were quantized."""
    monkeypatch.setattr(launch, "usable", lambda x, dtype=None: type(x) is Tensor and x.numel() > 0)
    sizes: list[int] = []
    split = batches.split

    def noted(layout: Any, names: Any, xs: Sequence[Tensor], *rest: Any) -> Any:
        sizes.append(len(xs))
        return split(layout, names, xs, *rest)

    monkeypatch.setattr(batches, "split", noted)
    return sizes


@contextmanager
def off_card() -> Iterator[None]:
    """References serve plain CPU tensors, as ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "usable", USABLE)
        yield


def one_by_one(batch: list[tuple[QuantizedTensor, Tensor]]) -> None:
    """What a step's requantization means."""
    for target, values in batch:
        layout = target.LAYOUT
        with off_card():
            amax = type(target).shared_amax(values.reshape(target.store.matrix)) if layout.shares_amax else None
            recipe(layout.name).quantize(values, amax=amax, out=target)


def test_a_batch_of_every_recipe(on_card: list[int]) -> None:
    """Two weights of each in one step; the bytes and the counters of one by one."""
    take_steps([name for name in NAMES if name in WEIGHTS], 2, 1, on_card)


def test_a_batch_with_histories(on_card: list[int]) -> None:
    """Four weights and three steps: the amaxes of all are put in front together."""
    take_steps(["fp8_delayed", "nvfp4"], 4, 3, on_card)


def take_steps(names: list[str], count: int, steps: int, sizes: list[int]) -> None:
    with off_card():
        targets = [
            recipe(name).quantize(weight(m, k, seed).nan_to_num(1.0, 2.0, -2.0))
            for name in names
            for seed, (m, k) in enumerate(ragged(name, count))
        ]
    others = [copy.deepcopy(target) for target in targets]
    for step in range(steps):
        values = [weight(*target.shape, 90 + step + index) for index, target in enumerate(targets)]
        writes = [target.store.writes.count for target in targets]
        sizes.clear()
        requantize_batch_(list(zip(targets, values, strict=True)), [])
        assert sizes == [count for name in names if name in GROUPED for _ in range(2 if name in APART else 1)]
        assert [target.store.writes.count for target in targets] == [count + 1 for count in writes]
        one_by_one(list(zip(others, values, strict=True)))
        for target, other in zip(targets, others, strict=True):
            for name, plane in other.planes().items():
                assert torch.equal(bits(plane), bits(target.planes()[name])), (target.LAYOUT.name, step, name)


def test_weights_that_hold_other_planes_go_elsewhere(on_card: list[int]) -> None:
    """Of one orientation, of another dtype, and planes that no kernel can write into."""
    make = recipe("mxfp8").quantize
    shape = (64, 64)
    with off_card():
        targets = [make(weight(*shape, seed)) for seed in range(4)]
        targets += [make(weight(*shape, seed), orientations="rowwise") for seed in range(4, 7)]
    strided = targets[0].map_planes(lambda plane: plane.repeat(1, 2)[:, : plane.shape[1]])
    targets[0] = targets[0].with_planes(strided)
    assert not launch.all_writable([targets[0].store.planes], torch.device("cpu"))
    values = [weight(*shape, 50 + index) for index in range(7)]
    values[1] = values[1].bfloat16()
    others = [copy.deepcopy(target) for target in targets]
    addresses = [[plane.data_ptr() for plane in target.planes().values()] for target in targets]
    requantize_batch_(list(zip(targets, values, strict=True)), [])
    assert sorted(on_card) == [2, 3]
    one_by_one(list(zip(others, values, strict=True)))
    assert all(same(target, other) for target, other in zip(targets, others, strict=True))
    assert addresses == [[plane.data_ptr() for plane in target.planes().values()] for target in targets]


def test_a_batch_is_checked_before_any_of_it_is_written(on_card: list[int]) -> None:
    targets = [recipe("nvfp4").quantize(weight(32, 32, seed)) for seed in range(2)]
    before = [target.planes()["rowwise_data"].clone() for target in targets]
    bad = targets[0][:16]
    with pytest.raises(UnsupportedOperator, match="is a part of a weight"):
        requantize_many_([(targets[1], weight(32, 32, 8)), (bad, weight(16, 32, 9))], [torch.ones(1), None])
    assert all(same_bits(a, t.planes()["rowwise_data"]) for a, t in zip(before, targets, strict=True))
    cut = recipe("fp8_block").quantize(weight(256, 128, 4))
    expected = copy.deepcopy(cut)
    for rows in (slice(0, 192), slice(64, 256)):
        values = weight(192, 128, 9)
        with pytest.raises(UnsupportedOperator, match="is cut inside a block of 128 rows"):
            requantize_many_([(targets[1], weight(32, 32, 8)), (cut[rows], values)], [torch.ones(1), None])
    assert same(cut, expected)
    assert same_bits(before[1], targets[1].planes()["rowwise_data"])


@pytest.mark.parametrize("name", ["rowwise_data", "rowwise_scale"])
def test_a_group_is_not_written_into_strided_planes(name: str) -> None:
    """Kernels see where a plane begins, and would write its rows over what lies between them."""
    xs = [weight(64, 64, seed) for seed in range(2)]
    outs = [poisoned("mxfp8", x, ("rowwise",)) for x in xs]
    plane = outs[1][name]
    wide = plane.repeat(1, 2)
    outs[1][name] = wide[:, : plane.shape[1]]
    before = wide.clone()
    with pytest.raises(ValueError, match=f"{name} must be contiguous"):
        kernels("mxfp8").quantize_batch(xs, None, ("rowwise",), outs)
    assert torch.equal(bits(wide), bits(before))
