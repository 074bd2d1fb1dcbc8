"""Two scales tried for each block, against Transformer Engine's arithmetic in numpy and ml_dtypes (statement 15).

The models here sum errors in the order of its kernels: one by one along the contracted axis, then by halves.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_models import F32, FLT_MAX, SPECS, Array, block_amax, e2m1, e4m3, from_e2m1, from_e4m3, pack_nibbles, spread
from test_made_up_recipes import load
from test_numerics_models import values

from layoutc.runtime import numerics
from layoutc.spec.checks.read import read_spec

M, K = 32, 48


def compiled(block: str, parameters: str) -> ModuleType:
    """The reference of nvfp4_4over6 with other blocks or parameters; columnwise has the block transposed."""
    text = (SPECS / "nvfp4_4over6.yaml").read_text(encoding="utf-8")
    if block == "1x16":
        row, column = "block: {m: 1, k: 16}", "block: {m: 16, k: 1}"
        first, second, third = text.split("block: {m: 16, k: 16}")
        text = first + row + second + column + third
    spec, found = read_spec(
        text.replace("rule: four-over-six", f"rule: four-over-six{parameters}"), "nvfp4_4over6.yaml"
    )
    assert spec is not None, found
    return load(spec)[0]


def grids(seed: int) -> Array:
    """Blocks whose values are nearly quarters of their amax, which suit the wider scale, or thirds, which do not."""
    rng = np.random.default_rng(seed)
    quarters, thirds = rng.integers(1, 5, (M, K)) / 4, rng.integers(1, 4, (M, K)) / 3
    suits = rng.integers(0, 2, (M // 16, K // 16)).astype(bool).repeat(16, 0).repeat(16, 1)
    x = np.where(suits, quarters, thirds) * rng.uniform(0.999, 1, (M, K))
    x[0, 0] = 2.1  # so that the wider scale of the others fits under 448, and near a code
    return x.astype(F32)


def by_halves(lines: Array) -> Array:
    """Sums over the first dim, 16 or 1 long, as a warp adds up its lanes."""
    while len(lines) > 1:
        lines = lines[: len(lines) // 2] + lines[len(lines) // 2 :]
    return lines[0]


@np.errstate(all="ignore")
def rowwise(x: Array, bm: int, bound: float, squared: bool) -> tuple[Array, Array, Array]:
    """Codes and scales of blocks of bm x 16, and which of them took the wider scale."""
    tensor_amax = np.max(np.abs(x))
    s_enc = np.minimum(F32(bound * 6) / tensor_amax, FLT_MAX)
    s_enc = F32(1) if tensor_amax == 0 or s_enc == 0 else s_enc
    base = block_amax(x, bm, 16) / F32(6) * s_enc
    tried = []
    for widening in (1.0, 1.5):
        scale = e4m3(base * F32(widening))
        multiplier = np.minimum(F32(1) / (from_e4m3(scale) * (F32(1) / s_enc)), FLT_MAX)
        codes = e2m1(x * spread(multiplier, bm, 16, x.shape))
        value = from_e2m1(codes) * spread(from_e4m3(scale), bm, 16, x.shape) * tensor_amax / F32(6 * bound)
        miss = value - x
        miss = miss * miss if squared else np.abs(miss)
        lanes = np.zeros((x.shape[0], x.shape[1] // 16), F32)
        for column in range(16):
            lanes = lanes + miss[:, column::16]
        tried.append((scale, codes, by_halves(np.moveaxis(lanes.reshape(-1, bm, lanes.shape[1]), 1, 0))))
    (scale6, codes6, error6), (scale4, codes4, error4) = tried
    wider = error4 < error6  # a tie keeps the narrower
    codes = np.where(spread(wider, bm, 16, x.shape), codes4, codes6)
    return codes, np.where(wider, scale4, scale6), wider


@pytest.mark.sample(4)
@pytest.mark.parametrize("block", ["16x16", "1x16"])
@pytest.mark.parametrize("bound", [256, 448])
@pytest.mark.parametrize("squared", [False, True])
def test_each_block_keeps_the_scale_that_misses_less(block: str, bound: int, squared: bool) -> None:
    """Codes, scales and decoded values, both orientations, both bounds, both measures."""
    parameters = (", bound: 448" if bound == 448 else "") + (", squared: true" if squared else "")
    reference, bm = compiled(block, parameters), 16 if block == "16x16" else 1

    @given(
        st.sampled_from(["grids", "normal", "heavy", "powers", "zero", "ties", "constant", "huge"]),
        st.integers(0, 2**16),
    )
    @settings(max_examples=12, deadline=None)
    def compare(kind: str, seed: int) -> None:
        x = grids(seed) if kind == "grids" else values(kind, (M, K), np.random.default_rng(seed))
        planes = {name: plane.numpy() for name, plane in reference.quantize_reference(torch.from_numpy(x)).items()}
        codes, scale, _ = rowwise(x, bm, bound, squared)
        np.testing.assert_array_equal(planes["rowwise_data"], pack_nibbles(codes))
        np.testing.assert_array_equal(planes["rowwise_scale"], scale)
        if block == "1x16":
            transposed, transposed_scale, _ = rowwise(np.ascontiguousarray(x.T), 1, bound, squared)
            np.testing.assert_array_equal(planes["columnwise_data"], pack_nibbles(transposed.T))
            np.testing.assert_array_equal(planes["columnwise_scale"], transposed_scale.T)
        if kind not in ("huge", "powers", "heavy"):  # there, decoded values overflow
            planes["amax"] = np.max(np.abs(x)).reshape(1)
            back = reference.dequantize_reference({k: torch.from_numpy(v) for k, v in planes.items()}, M, K)
            factor = from_e4m3(scale) * planes["amax"] * F32(1 / (6 * bound))
            np.testing.assert_array_equal(back.numpy(), from_e2m1(codes) * spread(factor, bm, 16, x.shape))

    compare()
    wider = np.mean([rowwise(grids(seed), bm, bound, squared)[2] for seed in range(5)])
    assert 0.1 < wider < 0.9, "else the test could not tell the candidates apart"


def test_a_tie_keeps_the_amax_at_six() -> None:
    """Statement 15: zeros miss nothing under both scales, and neither do values that both grids hold."""
    reference = compiled("16x16", "")
    x = torch.zeros(16, 16)
    x[0, 0] = 6.0  # 6 under the narrower scale, 4 under the wider one: exact in both
    planes = reference.quantize_reference(x)
    assert planes["rowwise_scale"].item() == e4m3(np.array([256], F32))[0]
    assert planes["rowwise_data"][0, 0] == 0x7
    x[0, 1] = 4.5  # 3 of 4 under the wider scale, between 4 and 6 under the other
    planes = reference.quantize_reference(x)
    assert planes["rowwise_scale"].item() == e4m3(np.array([384], F32))[0]
    assert planes["rowwise_data"][0, 0] == 0x6 | 0x5 << 4


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from("mk"), st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_block_sums_are_added_in_the_stated_order(bm: int, bk: int, first: str, seed: int) -> None:
    """Against fp32 additions one at a time, for blocks whose sizes are no powers of two."""
    blocks = values("heavy", (2 * bm, 3 * bk), np.random.default_rng(seed)).reshape(2, bm, 3, bk)
    found = numerics.block_sum(torch.from_numpy(blocks), first).numpy()
    for i, j in np.ndindex(2, 3):
        block = blocks[i, :, j] if first == "k" else blocks[i, :, j].T
        lanes = np.zeros(1 << (len(block) - 1).bit_length(), F32)
        for number, line in enumerate(block):
            total = line[0]
            for value in line[1:]:
                total = F32(total + value)
            lanes[number] = total
        np.testing.assert_array_equal(found[i, j], by_halves(lanes))
