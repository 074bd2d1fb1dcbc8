"""Values of codebooks in kernels: held by a program, and looked up in memory."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")

import triton.language as tl  # noqa: E402

from layoutc.runtime import triton as lt  # noqa: E402
from layoutc.runtime.optim import launches  # noqa: E402

VALUES = tuple(float(3 * index - 20) for index in range(16))


@triton.jit
def held(codes, out, VALUES: tl.constexpr, M: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(out + at, lt.from_codebook(tl.load(codes + at), VALUES, 16, True))


@triton.jit
def from_memory(codes, books, out, FIRST: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, K)
    tl.store(out + at, lt.looked_up(books, tl.load(codes + at).to(tl.int32), FIRST, COUNT))


@triton.jit
def encoded(x, out, STEPS: tl.constexpr, CODES: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(out + at, lt.to_codebook(tl.load(x + at), STEPS, CODES, COUNT, 255))


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


@pytest.mark.parametrize("count", [2, 15, 16, 17, 200, 255, 256])
def test_a_value_takes_the_code_of_the_last_step_it_reaches(count: int) -> None:
    """Compared one by one, or searched by halves: at each step, on both sides of it, and beyond all of them."""
    drawn = torch.Generator().manual_seed(count)
    steps = torch.randn(count - 1, generator=drawn).unique().sort().values
    steps = torch.cat([steps, steps.max() + 1 + torch.arange(count - 1 - len(steps))])
    codes = torch.randperm(256, generator=drawn)[:count].tolist()
    infinity = torch.tensor(float("inf"))
    beside = [torch.nextafter(steps, -infinity), steps, torch.nextafter(steps, infinity)]
    extremes = torch.tensor([-float("inf"), float("inf"), -0.0, 0.0, 3e38, -3e38])
    x = torch.cat([*beside, extremes, torch.full((1024 - 3 * len(steps) - 6,), float("nan"))])
    out = torch.empty(1024, dtype=torch.int32)
    kernel: Any = encoded
    kernel[(1,)](x, out, tuple(steps.tolist()), tuple(codes), count, 1024)
    expected = [255 if value != value else codes[sum(step <= value for step in steps.tolist())] for value in x.tolist()]
    assert out.tolist() == expected


@pytest.mark.parametrize(("count", "first"), [(17, 0), (32, 17), (200, 0), (255, 129), (256, 128), (255, 128)])
def test_codes_that_count_up_need_no_table(count: int, first: int) -> None:
    """From the first on, and from 0 after the last of their bits: the order of values of two's complement."""
    size = 1 << (count - 1).bit_length()
    codes = tuple((first + place) % size for place in range(count))
    assert lt.codebooks.in_order(codes)
    x = torch.arange(256, dtype=torch.float32)
    out = torch.empty(256, dtype=torch.int32)
    kernel: Any = encoded
    kernel[(1,)](x, out, tuple(float(place) for place in range(1, count)), codes, count, 256)
    assert out.tolist() == [codes[min(place, count - 1)] for place in range(256)]
    swapped = (codes[1], codes[0], *codes[2:])
    assert not lt.codebooks.in_order(swapped)
    kernel[(1,)](x, out, tuple(float(place) for place in range(1, count)), swapped, count, 256)
    assert out.tolist() == [swapped[min(place, count - 1)] for place in range(256)]


@triton.jit
def as_the_recipe(x, codebooks, out, ENCODE: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(out + at, ENCODE(tl.load(x + at), codebooks))


@pytest.mark.parametrize("steps", [(0.5, 1.0, 1.0 + 2**-20, 2.0), (2.0**-130, 0.5, 1.0), (0.0, 0.25, 1.0)])
def test_steps_without_buckets_of_their_own_are_searched(steps: tuple[float, ...]) -> None:
    assert lt.codebooks.words_of(steps) == []


@pytest.mark.parametrize("in_memory", [False, True], ids=["held by programs", "in memory"])
@pytest.mark.parametrize("name", ["adam_m8", "adam_v8", "adam_m4", "adam_v4"])
def test_a_dynamic_map_is_looked_at_once(name: str, in_memory: bool) -> None:
    """At each step, at the number before it and after it, at all values, and at bf16's numbers from -2 to 2."""
    recipe = importlib.import_module(f"layoutc.recipes.{name}.kernels")
    reference: Any = importlib.import_module(f"layoutc.recipes.{name}.reference")
    steps, infinity = torch.tensor(reference.ELEMENT_STEPS), torch.tensor(float("inf"))
    beside = [torch.nextafter(steps, -infinity), steps, torch.nextafter(steps, infinity)]
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat([*beside, torch.tensor(reference.ELEMENT_VALUES), halves])
    x = torch.cat([x, torch.zeros((1 << 17) - len(x))])
    out = torch.empty(len(x), dtype=torch.int32)
    kernel: Any = as_the_recipe
    codebooks = launches.books_of(recipe.KERNELS) if in_memory else None
    kernel[(1,)](x, codebooks, out, recipe.encode, len(x))
    assert torch.equal(out.to(torch.uint8), reference.encode(x))
