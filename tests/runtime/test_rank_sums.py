"""What copies gradients for ranks, and what adds them up, under Triton's interpreter: bytes of torch and of numpy."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton

from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.rank_chunks import rank_chunks
from layoutc.runtime.kernels.rank_sums import rank_sum, scaling, sum_in_order
from layoutc.runtime.triton.reductions import rank_sum_kernel


def parts_of(ranks: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of very different sizes, so that the order of additions is seen; and infinities, a NaN and -0."""
    generator = torch.Generator().manual_seed(ranks * numel)
    parts = torch.randn(ranks, numel, generator=generator) * torch.logspace(-6, 4, ranks)[:, None]
    parts[:, 0], parts[0, 1], parts[:, 2] = -0.0, float("inf"), float("nan")
    return parts.to(dtype)


def expected(parts: torch.Tensor, divisor: int) -> np.ndarray:
    rows = list(parts.to(torch.float32).numpy())
    found: np.ndarray = reduce(np.add, rows) / np.float32(divisor)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ranks", "numel", "divisor"), [(2, 4096, 2), (3, 5000, 3), (7, 9, 7), (4, 4097, 1)])
def test_both_ways_add_in_the_order_of_ranks(ranks: int, numel: int, divisor: int, dtype: torch.dtype) -> None:
    parts, out = parts_of(ranks, numel, dtype), torch.empty(numel)
    rank_sum(parts, out, divisor)
    assert out.numpy().tobytes() == expected(parts, divisor).tobytes()
    if triton.knobs.runtime.interpret:
        out.fill_(1)
        number, divides = scaling(divisor)
        rank_sum_kernel[(-(-numel // 1024),)](parts, out, numel, ranks, number, DIVIDE=divides, TILE=1024)
        assert out.numpy().tobytes() == expected(parts, divisor).tobytes()


def test_another_order_gives_other_bytes() -> None:
    parts = parts_of(7, 100, torch.bfloat16)
    assert not torch.equal(sum_in_order(parts)[3:], sum_in_order(parts.flip(0))[3:])


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_chunks_of_ranks_are_those_of_torch(ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that ranks share unevenly, ranks without any, vectors, whole tiles and parts of them."""
    monkeypatch.setattr(launch, "usable", lambda *_: True)
    shapes = [(64, 128), (ranks, 48), (5, 7), (1, 9000), (33,), (6, 3, 4), (4096 * ranks, 2)]
    seeded = torch.Generator().manual_seed(ranks)
    grads = [torch.randn(shape, generator=seeded).to(dtype) for shape in shapes]
    chunks = [padded_chunks(grad, ranks) for grad in grads]
    expected = torch.stack([torch.cat([one[rank] for one in chunks]) for rank in range(ranks)])
    out = torch.full_like(expected, -1)
    assert rank_chunks(grads, ranks, out)
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
    for others in ([grads[0].t()], [grads[0].float()], [grads[0], grads[1][:0]]):
        assert not rank_chunks(others, ranks, out)


def padded_chunks(grad: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """As torch.chunk cuts it, flat, all as long as the first one."""
    parts = [part.flatten() for part in torch.chunk(grad, ranks)]
    parts += [grad.flatten()[:0]] * (ranks - len(parts))
    return [F.pad(part, (0, parts[0].numel() - part.numel())) for part in parts]
