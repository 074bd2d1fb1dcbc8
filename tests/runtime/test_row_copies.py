"""What copies tensors into what ranks send and out of what all have sent, under Triton's interpreter: torch's bytes."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.copies import MOVING, WORD, copies_in, copies_out

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
SIZES = st.lists(st.sampled_from([1, 3, 16, 100, 2048, 2049, 5000]), min_size=1, max_size=4)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "usable", lambda *_: True)


def values_of(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Of all sizes, with ties between bf16 values, infinities and -0."""
    generator = torch.Generator().manual_seed(seed + numel)
    values = torch.randn(numel, generator=generator) * torch.logspace(-30, 30, numel)
    special = [-0.0, float("inf"), -float("inf"), 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38]
    for at, value in enumerate(special[:numel]):
        values[at] = value
    return values.to(dtype)


def placed(sizes: list[int], first: int) -> list[int]:
    return [*accumulate(sizes[:-1], initial=first)]


CASES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]


@settings(deadline=None, max_examples=10)
@given(SIZES, st.sampled_from([0, 8, 5]), st.sampled_from(CASES))
def test_a_rank_sends_what_torch_would_copy(
    sizes: list[int], first: int, case: tuple[torch.dtype, torch.dtype]
) -> None:
    source, dtype = case
    tensors = [values_of(size, source, at) for at, size in enumerate(sizes)]
    row = torch.full(((sum(sizes) + first + 7) * dtype.itemsize,), 7, dtype=torch.uint8)
    expected = row.clone()
    expected.view(dtype)[first : first + sum(sizes)] = torch.cat([tensor.to(dtype) for tensor in tensors])
    copies = copies_in(tensors, placed(sizes, first), dtype, row)
    assert copies is not None
    for _ in range(2):
        copies(row)
        assert torch.equal(row, expected)


@settings(deadline=None, max_examples=10)
@given(
    SIZES, st.sampled_from([0, 8, 5]), st.integers(2, 4), st.sampled_from([torch.float32, torch.bfloat16]), st.data()
)
def test_whole_tensors_have_the_parts_of_all_ranks(
    sizes: list[int], first: int, ranks: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Those that are said to move wherever they lie in a call; the others where they lay."""
    row = (sum(sizes) + first + 3) * dtype.itemsize
    rows = torch.randint(0, 255, (ranks * row,), dtype=torch.uint8, generator=torch.Generator().manual_seed(row))
    tensors = [torch.zeros(ranks * size, dtype=dtype) for size in sizes]
    starts = placed(sizes, first)
    moving = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True, max_size=MOVING))
    copies = copies_out(tensors, starts, ranks, rows, moving)
    assert copies is not None
    seen = rows.view(ranks, row).view(dtype)
    for _ in range(2):
        copies(rows, *[tensors[at] for at in moving])
        for tensor, start, size in zip(tensors, starts, sizes, strict=True):
            expected = seen[:, start : start + size].contiguous().view(-1)
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
            tensor.zero_()
        for at in moving:
            tensors[at] = torch.zeros_like(tensors[at])


def test_as_many_tensors_as_may_move() -> None:
    tensors = [torch.zeros(2 * 24, dtype=WORD) for _ in range(MOVING + 2)]
    rows = torch.arange(2 * 24 * len(tensors)).view(2, -1)
    starts = [24 * at for at in range(len(tensors))]
    copies = copies_out(tensors, starts, 2, rows.view(-1).view(torch.uint8), range(1, MOVING + 1))
    assert copies is not None
    lying = [torch.zeros_like(one) if 1 <= at <= MOVING else one for at, one in enumerate(tensors)]
    copies(rows.view(-1).view(torch.uint8), *lying[1 : MOVING + 1])
    for start, tensor in zip(starts, lying, strict=True):
        assert torch.equal(tensor.view(2, 24), rows[:, start : start + 24])


def test_codes_are_copied_as_words() -> None:
    codes = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (16, 64, 4096)]
    words = [one.view(WORD) for one in codes]
    row = torch.zeros(5000 * 8, dtype=torch.uint8)
    copies = copies_in(words, placed([2, 8, 512], 3), WORD, row)
    assert copies is not None
    copies(row)
    assert torch.equal(row[24 : 24 + 4176], torch.cat(codes))


def test_what_no_kernel_copies() -> None:
    row = torch.zeros(4096, dtype=torch.uint8)
    strided = torch.zeros(8, 8).t()
    for tensors, dtype in (
        ([strided], torch.float32),
        ([torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)], torch.bfloat16),
        ([torch.zeros(4, dtype=torch.bfloat16)], torch.float32),
        ([torch.zeros(0)], torch.float32),
        ([torch.zeros(4, dtype=torch.float64)], torch.float64),
    ):
        assert copies_in(tensors, [0] * len(tensors), dtype, row) is None
    assert copies_out([torch.zeros(4, dtype=torch.float64)], [0], 2, row) is None
