"""Kernels of recipes that nobody ships on a card, against the reference: blocks of any size, ranges, long sums."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which kernels are written in")
import unshipped

from layoutc.bench.peers import same
from layoutc.runtime.weight.returned_buffers import by_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(8, 8), (104, 200), (48, 96), (480, 960), (1064, 2088)]
EXCHANGED_SHAPES = [(32, 32), (64, 64), (128, 320), (480, 960), (512, 1024)]


def weights(m: int, k: int) -> Iterator[torch.Tensor]:
    """Ordinary values, any bits, special values among ordinary ones."""
    generator = torch.Generator().manual_seed(m + k)
    plain = torch.randn(m, k, generator=generator) * 0.02
    yield plain
    drawn = torch.randint(-(2**31), 2**31 - 1, (m, k), generator=generator, dtype=torch.int64)
    yield drawn.to(torch.int32).view(torch.float32).nan_to_num(1.0)
    special = plain.clone()
    for value in (float("nan"), float("inf"), -float("inf"), -0.0, 3.4e38, 1e-45):
        special.view(-1)[torch.randint(0, m * k, (1,), generator=generator)] = value
    yield special


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("name", [*unshipped.names(), *unshipped.exchanged()])
def test_kernels_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    """One weight and a batch of it, into planes and buffers and back, all orientations at once and each by itself."""
    unshipped.add_if_known(name)
    recipe = importlib.import_module(f"layoutc.recipes.{name}")
    reference = importlib.import_module(f"layoutc.recipes.{name}.reference")
    if importlib.util.find_spec(f"layoutc.recipes.{name}.kernels") is None:
        pytest.skip("a recipe that has kernels: the reference serves this one everywhere")
    kernels, layout = importlib.import_module(f"layoutc.recipes.{name}.kernels").KERNELS, recipe.LAYOUT
    shapes = EXCHANGED_SHAPES if name in unshipped.exchanged() else SHAPES
    shapes = [(m, k) for m, k in shapes if m % layout.multiple_m == 0 and k % layout.multiple_k == 0]
    assert shapes
    for m, k in shapes:
        for x in weights(m, k):
            given = x.to(dtype)
            card = given.cuda()
            amax = recipe.Tensor.shared_amax(given) if layout.shares_amax else None
            shared = None if amax is None else amax.cuda()
            for asked in dict.fromkeys((layout.orientations, *((one,) for one in layout.orientations))):
                expected = reference.quantize_reference(given, amax=amax, orientations=asked)
                made = kernels.quantize(card, shared, asked)
                strided = kernels.quantize(card.t().contiguous().t(), shared, asked)
                copies = 3 if kernels.batched else 0
                outs = [{plane: torch.empty_like(values) for plane, values in made.items()} for _ in range(copies)]
                kernels.quantize_batch([card] * copies, None if shared is None else [shared] * copies, asked, outs)
                for plane, values in expected.items():
                    for found in (made, strided, *outs):
                        assert same(values, found[plane].cpu()), (plane, m, k, asked)
                planes = expected if amax is None else {**expected, "amax": layout.stored_amax(amax)}
                moved = {plane: values.cuda() for plane, values in planes.items()}
                laid_out = kernels.lay_out(moved, m, k, asked)
                for buffer, values in by_reference(layout, reference, planes, (m, k), asked).items():
                    assert same(values, laid_out[buffer].cpu()), (buffer, m, k, asked)
                for orientation in asked:
                    values = reference.dequantize_reference(planes, m, k, orientation).to(dtype)
                    found = kernels.dequantize(moved, m, k, orientation, dtype)
                    assert same(values, found.cpu()), (orientation, m, k)
