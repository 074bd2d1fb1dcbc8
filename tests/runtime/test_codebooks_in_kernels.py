"""Values of codebooks in kernels: held by a program, and looked up in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")

import triton.language as tl  # noqa: E402

from layoutc.runtime import triton as lt  # noqa: E402

VALUES = tuple(float(3 * index - 20) for index in range(16))


@triton.jit
def held(codes, out, VALUES: tl.constexpr, M: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(out + at, lt.from_codebook(tl.load(codes + at), VALUES, 16, True))


@triton.jit
def from_memory(codes, books, out, FIRST: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, K)
    tl.store(out + at, lt.looked_up(books, tl.load(codes + at).to(tl.int32), FIRST, COUNT))


@pytest.fixture(autouse=True)
def interpreted() -> None:
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")


@pytest.mark.parametrize("shape", [(2, 4), (2, 64), (8, 2)], ids=["few codes", "many", "as many as values"])
def test_programs_hold_a_codebook(shape: tuple[int, int]) -> None:
    codes = torch.randint(0, 16, shape, dtype=torch.int32)
    out = torch.empty(shape)
    kernel: Any = held
    kernel[(1,)](codes, out, VALUES, *shape)
    assert torch.equal(out, torch.tensor(VALUES)[codes])


def test_a_codebook_in_memory_is_never_left() -> None:
    """Codes of damaged files: 16 values between others, and all codes of 8 bits."""
    codes, books, out = torch.arange(256, dtype=torch.uint8), torch.full((64,), float("nan")), torch.empty(256)
    books[32:48] = torch.tensor(VALUES)
    kernel: Any = from_memory
    kernel[(1,)](codes, books, out, 32, 16, 256)
    assert torch.equal(out, torch.tensor(VALUES).repeat(16))
