"""Kernels of every recipe under Triton's interpreter: the bytes of the reference, at small and ragged shapes.

The interpreter casts by integer arithmetic, as cards do that have no fp8 of their own; tests/bench/kernels.py compares
the card's casts. conftest.py starts the interpreter where there is no card.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy_models import all_bf16, laid_out, recipe, reference
from test_numerics_models import SPECIAL, values
from weight_recipes import ALL_PAIRS

import layoutc.recipes
from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.recipe_kernels import Kernels

triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")

FOLDER = Path(layoutc.recipes.__file__).parent
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/kernels.py"))
# fp16 takes the tiles of bf16 and is read as it is, so one recipe of each rule for scales reads it; bf16 too, of which
# the conformance suite asks every recipe.
HALVES = ["fp8_block", "fp8_current", "int4_group32", "int8_block", "mxfp8", "mxint8", "nvfp4", "nvfp4_4over6"]
READ = [(name, torch.float32) for name in NAMES] + [(name, torch.float16) for name in HALVES]
READ += [(name, torch.bfloat16) for name in (NAMES if ALL_PAIRS else HALVES)]


def kernels(name: str) -> Kernels:
    return importlib.import_module(f"layoutc.recipes.{name}.kernels").KERNELS


QUANTIZING = [name for name in NAMES if kernels(name).quantize_tile is not None]  # of others, the reference does


def shapes(name: str) -> list[tuple[int, int]]:
    """One that is whole tiles in no dim, one a little wider than the widest tile of the recipe's kernels."""
    layout, made = recipe(name).LAYOUT, kernels(name)
    um, uk = layout.multiple_m, layout.multiple_k
    tiles = [*made.quantize_sizes.values(), *made.dequantize_sizes.values(), *(made.buffer_sizes or {}).values()]
    widest = max(tile[1] for tile in (*tiles, made.lay_out_size))
    return [(3 * um if um > 1 else 5, uk if uk > 1 else 7), (um, (min(widest, 1024) + 32) // uk * uk)]


def weight(m: int, k: int, seed: int) -> torch.Tensor:
    """Values of many kinds, and every special one."""
    rng = np.random.default_rng(seed)
    x = np.choose(rng.integers(0, 3, (m, k)), [values(kind, (m, k), rng) for kind in ("normal", "heavy", "bits")])
    for special in SPECIAL:
        x[rng.integers(0, m), rng.integers(0, k)] = special
    return torch.from_numpy(x.astype(np.float32))


def bits(values: torch.Tensor) -> torch.Tensor:
    """What is compared: bytes, where all NaN are one."""
    if not values.is_floating_point():
        return values
    return values.masked_fill(values.isnan(), float("nan")).contiguous().view(torch.uint8)


def compare(name: str, x: torch.Tensor, orientations: tuple[str, ...]) -> None:
    layout, (m, k) = recipe(name).LAYOUT, tuple(x.shape)
    amax: Any = recipe(name).Tensor.shared_amax(x) if layout.shares_amax else None
    values_in = x
    if layout.amax_of_matrices:  # each row is a matrix
        values_in, amax = x.view(m, 1, k), torch.stack([recipe(name).Tensor.shared_amax(row[None]) for row in x])
    seed = {"seed": torch.tensor([0x243F6A8885A308D3])} if layout.stochastic else {}
    expected = reference(name).quantize_reference(x, amax=amax, orientations=orientations, **seed)
    if name in QUANTIZING:
        made = kernels(name).quantize(x, amax, orientations, **seed)
        assert made.keys() == expected.keys()
        for plane, stored in expected.items():
            assert torch.equal(bits(stored), bits(made[plane])), plane
    planes = expected if amax is None else {**expected, "amax": layout.stored_amax(amax)}
    if not layout.history:
        plain, moved = laid_out(name, planes, (m, k), orientations), kernels(name).lay_out(planes, m, k, orientations)
        buffers = recipe(name).quantize_buffers(values_in, amax=amax, orientations=orientations, **seed)
        fused = kernels(name).buffer_sizes is not None
        at_once = kernels(name).quantize_buffers(x, amax, orientations, **seed) if fused else buffers
        assert list(plain) == list(moved) == list(buffers) == list(at_once)
        for buffer, entries in plain.items():
            for found in (moved, buffers, at_once):
                assert torch.equal(bits(entries), bits(found[buffer])), buffer
        if layout.swizzled:
            moved = kernels(name).lay_out(planes, m, k, orientations, True)
            at_once = kernels(name).quantize_buffers(x, amax, orientations, True, **seed) if fused else moved
            for found in (moved, at_once):
                for buffer in (name for name in plain if name.endswith("_data")):
                    assert torch.equal(bits(plain[buffer]), bits(found[buffer])), buffer
            for orientation in orientations:
                expected_scale = reference(name).gemm_scale(plain, orientation)
                for found in (moved, at_once):
                    assert torch.equal(bits(expected_scale), bits(found[f"{orientation}_scale"]))
    for orientation in orientations:
        values_ = reference(name).dequantize_reference(planes, m, k, orientation)
        found = kernels(name).dequantize(planes, m, k, orientation, x.dtype)
        assert torch.equal(bits(values_.to(x.dtype)), bits(found)), (orientation, x.dtype)


@pytest.mark.sample(8)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "dtype"), READ, ids=str)
def test_quantize_and_dequantize_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    """All orientations at once, then each by itself; from a dtype, and back to it."""
    layout = recipe(name).LAYOUT
    for seed, (m, k) in enumerate(shapes(name)[: 2 if dtype == torch.bfloat16 else 1]):
        compare(name, weight(m, k, seed).to(dtype), layout.orientations)
    for orientation in layout.orientations if dtype == torch.float32 else ():
        compare(name, weight(*shapes(name)[0], 7), (orientation,))


def test_nibbles_that_lie_in_two_buffers_are_stored_in_both() -> None:
    """In rows, and transposed, by one launch."""
    compare("nvfp4", weight(*shapes("nvfp4")[0], 7).bfloat16(), recipe("nvfp4").LAYOUT.orientations)


def used(expression: ast.expr) -> set[str]:
    """Names in an expression; that of no name for a number."""
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)} or {""}


@pytest.mark.parametrize("name", HALVES)
def test_a_constant_never_stands_left_of_a_tile(name: str) -> None:
    """Triton 3.9's interpreter makes a constant of `CONSTANT - tile`, and then can't pass it to a function."""
    tree = ast.parse((FOLDER / name / "kernels.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    constants = {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}
    operations = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
    assert not [ast.unparse(one) for one in operations if used(one.left) <= constants and used(one.right) - constants]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", HALVES)
def test_a_transposed_weight_and_given_planes(name: str) -> None:
    """Strides are followed; planes to write into are filled whole, whatever they held, and must be contiguous."""
    layout, (m, k) = recipe(name).LAYOUT, shapes(name)[0]
    x = weight(k, m, 3).t()
    amax = recipe(name).Tensor.shared_amax(x) if layout.shares_amax else None
    seed = {"seed": torch.tensor([1])} if layout.stochastic else {}
    expected = reference(name).quantize_reference(x, amax=amax, **seed)
    out = {plane: torch.full(stored.shape, 0x5A, dtype=stored.dtype) for plane, stored in expected.items()}
    kernels(name).quantize(x, amax, layout.orientations, out, **seed)
    for plane, stored in expected.items():
        assert torch.equal(bits(stored), bits(out[plane])), plane
    first = next(iter(expected))
    bad = {**out, first: out[first].repeat_interleave(2, -1)[..., ::2]}
    if not bad[first].is_contiguous():
        with pytest.raises(ValueError, match=f"{layout.name}: {first} must be contiguous"):
            kernels(name).quantize(x, amax, layout.orientations, bad)


@pytest.mark.parametrize("name", ["fp8_current", "fp8_block_1d"])
def test_values_that_lie_apart(name: str) -> None:
    """Neither rows nor columns are runs of values: every other one, and one value for all, as a sum's gradient is."""
    for x in (torch.randn(64, 512)[:, ::2], torch.ones(()).expand(64, 256), torch.ones(1, 256).expand(64, 256)):
        amax = recipe(name).Tensor.shared_amax(x) if recipe(name).LAYOUT.shares_amax else None
        expected = reference(name).quantize_reference(x, amax=amax)
        made = kernels(name).quantize(x, amax, recipe(name).LAYOUT.orientations)
        assert all(torch.equal(bits(stored), bits(made[plane])) for plane, stored in expected.items())
    alone = torch.empty(1).as_strided((1, 1), (5, 7))
    assert launch.in_runs(alone).stride() == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_transpose_read_rows_from_multiples_of_sixteen_bytes_on(dtype: torch.dtype) -> None:
    """ptxas gets the code for narrower loads wrong (12.8 and 12.9, sm_90): other matrices are copied first."""
    space = torch.arange(64 * 80, dtype=torch.float32).to(dtype)
    whole = space[: 64 * 64].view(64, 64)
    ragged = space[: 64 * 50].view(64, 50)  # no copy helps: these take two launches
    for x in (whole, whole[:, :48], whole[16:], ragged):
        assert launch.in_rows(x) is x
    for x in (
        space[1 : 1 + 64 * 64].view(64, 64),
        space.view(64, 80)[:, 8:40].t(),
        space[: 64 * 72].view(64, 72)[:, :64],
    ):
        copied = launch.in_rows(x)
        assert copied.is_contiguous()
        assert copied.data_ptr() % 16 == 0
        assert torch.equal(copied, x)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_1d", "mxfp6_e3m2", "e3m4_block", "mxint8"])
def test_all_bf16_inputs(name: str) -> None:
    """65,536 inputs, each in a block with others of its kind."""
    x = torch.from_numpy(all_bf16()).to(torch.bfloat16).view(64, 1024)
    compare(name, x, recipe(name).LAYOUT.orientations[:1])


@pytest.mark.parametrize("block_k", [None, 1, 16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (70, 300)])
def test_amax_of_columns_and_of_all(shape: tuple[int, int], block_k: int | None) -> None:
    """With a NaN and an infinity in the weight, and without."""
    from layoutc.runtime import numerics
    from layoutc.runtime.kernels import amaxes

    x = weight(*shape, 1)
    for each in (x, x.nan_to_num(1.0, 2.0, -3.0)):
        assert torch.equal(bits(numerics.matrix_amax(each, block_k)), bits(amaxes.matrix_amax(each, block_k)))


def test_amaxes_that_pass_are_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than are made at a time: each starts at 0 and keeps what it got, aligned as kernels want it."""
    from layoutc.runtime.kernels import amaxes

    monkeypatch.setattr(amaxes, "ZEROS", 3)
    monkeypatch.setattr(amaxes, "_zeros", {})
    xs = [weight(5, 33, seed) / (seed + 1) for seed in range(8)]
    found = [amaxes.matrix_amax(x, None, passing=True) for x in xs]
    for x, amax in zip(xs, found, strict=True):
        assert amax.shape == (1,)
        assert amax.data_ptr() % 16 == 0
        assert torch.equal(bits(amax), bits(amaxes.matrix_amax(x, None)))
    assert len({amax.untyped_storage().data_ptr() for amax in found}) == 3


def test_an_amax_that_a_graph_captures_is_filled_by_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay must start from 0 again."""
    from layoutc.runtime.kernels import amaxes

    monkeypatch.setattr(amaxes, "_zeros", {})
    monkeypatch.setattr(amaxes, "capturing", lambda _: True)
    amaxes.matrix_amax(weight(5, 33, 0), None, passing=True)
    assert amaxes._zeros == {}


def test_an_amax_of_inference_mode_leaves_none_for_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which can't save tensors of that mode."""
    from layoutc.runtime.kernels import amaxes

    monkeypatch.setattr(amaxes, "_zeros", {})
    with torch.inference_mode():
        amaxes.matrix_amax(weight(5, 33, 0), None, passing=True)
    assert not amaxes.matrix_amax(weight(5, 33, 1), None, passing=True).is_inference()
