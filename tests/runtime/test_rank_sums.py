"""What copies gradients for ranks, and what adds them up, under Triton's interpreter: bytes of torch and of numpy."""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import unshipped
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce_scatter_copy_in

from layoutc.runtime.fsdp2 import gradient_rows, steady_group
from layoutc.runtime.fsdp2.gradient_rows import GradientRows
from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.rank_chunks import GRADS, Chunks, rank_chunks
from layoutc.runtime.kernels.rank_sums import Codes, rank_sum, scaling, sum_in_order
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


def gradients(ranks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows that ranks share unevenly, ranks without any, vectors, whole tiles and parts of them; odd numbers."""
    shapes = [(64, 128), (ranks, 48), (5, 7), (1, 9000), (33,), (6, 3, 4), (4096 * ranks, 2)]
    seeded = torch.Generator().manual_seed(ranks)
    grads = [torch.randn(shape, generator=seeded).to(dtype) for shape in shapes]
    grads[0].view(-1)[:4] = torch.tensor([-0.0, float("inf"), float("nan"), torch.finfo(dtype).smallest_normal / 4])
    return grads


def in_rows(grads: list[torch.Tensor], ranks: int) -> torch.Tensor:
    chunks = [padded_chunks(grad, ranks) for grad in grads]
    return torch.stack([torch.cat([one[rank] for one in chunks]) for rank in range(ranks)])


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)


@pytest.mark.sample(6)
@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("into", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_chunks_of_ranks_are_those_of_torch(
    ranks: int, dtype: torch.dtype, into: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "usable", lambda *_: True)
    grads = gradients(ranks, dtype)
    expected = in_rows(grads, ranks).to(into or dtype)
    out = torch.full_like(expected, -1)
    assert rank_chunks(grads, ranks, out)
    assert torch.equal(bits(out), bits(expected))
    other = torch.float64 if dtype == torch.float32 else torch.float32
    for others in ([grads[0].t()], [grads[0].to(other), grads[1]], [grads[0], grads[1][:0]], [grads[0].double()]):
        assert not rank_chunks(others, ranks, out)
    assert not rank_chunks(grads, ranks, out.to(torch.float64))


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("count", [1, 16, 17, 40])
def test_chunks_of_gradients_that_lie_elsewhere_each_time(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a launch has arguments for, and fewer; at addresses that are multiples of 16, and that are not."""
    monkeypatch.setattr(launch, "usable", lambda *_: True)
    ranks = 2
    for turn in range(3):
        memory = torch.randn(count, 256).to(torch.bfloat16)
        grads = [one[turn : turn + 16 + 2 * (at % 8)].view(-1, 2) for at, one in enumerate(memory)]
        expected = in_rows(grads, ranks).to(torch.float32)
        out = torch.full_like(expected, -1)
        assert rank_chunks(grads, ranks, out)
        assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("into", [torch.bfloat16, torch.float32])
def test_fsdp2_copies_gradients_by_the_kernel(
    into: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own function, into the buffer that it asks for; what it allocates then is a plain tensor."""
    if kernels and not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    copied: list[bool] = []
    copy = gradient_rows.rank_chunks

    def counted(*args: Any) -> bool:
        copied.append(copy(*args))
        return copied[-1]

    monkeypatch.setattr(launch, "usable", lambda *_: kernels)
    monkeypatch.setattr(gradient_rows, "rank_chunks", counted)
    grads, ranks, device = gradients(4, torch.bfloat16)[:4], 4, torch.device("cpu")
    expected = in_rows(grads, ranks).to(into).flatten()
    comm = steady_group.ReduceScatter(ranks)
    for _ in range(2):
        buffer = comm.allocate((expected.numel(),), dtype=into, device=device)
        result = comm.allocate((expected.numel() // ranks,), dtype=into, device=device)
        assert (type(buffer), type(result)) == (GradientRows, torch.Tensor)
        foreach_reduce_scatter_copy_in(grads, buffer, ranks)
        assert torch.equal(bits(buffer.as_subclass(torch.Tensor)), bits(expected))
    assert copied == [kernels, kernels]


def test_the_buffer_of_gradients_is_a_plain_tensor_to_others() -> None:
    values = torch.arange(8.0)
    buffer = values.clone().as_subclass(GradientRows)
    assert buffer.div_(2) is buffer
    assert torch.equal(buffer.as_subclass(torch.Tensor), values / 2)
    assert {type(buffer + 1), type(buffer[2:4])} == {torch.Tensor}
    columns = buffer.view(2, 4)
    assert (type(columns), columns.data_ptr()) == (GradientRows, buffer.data_ptr())
    grads, found, expected = [torch.rand(3, 4), torch.rand(3, 1)], torch.empty(3, 2, 3), torch.empty(3, 2, 3)
    torch.ops.fsdp.chunk_cat(grads, 1, 2, out=found.as_subclass(GradientRows))
    torch.ops.fsdp.chunk_cat(grads, 1, 2, out=expected)
    assert torch.equal(found, expected)


def padded_chunks(grad: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """As torch.chunk cuts it, flat, all as long as the first one."""
    parts = [part.flatten() for part in torch.chunk(grad, ranks)]
    parts += [grad.flatten()[:0]] * (ranks - len(parts))
    return [F.pad(part, (0, parts[0].numel() - part.numel())) for part in parts]


def wide(ranks: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of all sizes, zeros and numbers below the least normal one among them; a NaN, and infinities."""
    values = torch.randn(ranks, n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-42, 4, n)
    values[:, 1:4] = torch.tensor([float("inf"), float("nan"), -0.0])
    values[:, -4:] = 0.0
    return values.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit, but for the bits of NaN."""
    return torch.equal(bits(one.nan_to_num(7.0)), bits(other.nan_to_num(7.0)))


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("recipe", ["grad_fp8", "grad_int4"])
@pytest.mark.parametrize(
    ("ranks", "n", "dtype", "into", "keeps"),
    [
        (2, 4096, torch.bfloat16, torch.float32, False),
        (3, 1000, torch.float32, torch.bfloat16, True),
        (2, 130, torch.float16, torch.float32, True),
    ],
)
def test_kernels_of_codes_are_the_reference(
    recipe: str,
    ranks: int,
    n: int,
    dtype: torch.dtype,
    into: torch.dtype,
    keeps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Codes and scales for each rank, what codes miss, sums, and the seed after them."""
    codes, values = Codes(recipe), wide(ranks, n, dtype)
    found = []
    for kernels in (False, True):
        monkeypatch.setattr(launch, "usable", lambda *_, kernels=kernels: kernels)
        seed, rest = torch.tensor([2**62 + 77]), torch.full((ranks, n), 1e-3) if keeps else None
        rows, out = codes.quantize(values, seed, rest), torch.empty(n, dtype=into)
        codes.add(rows, out, 3.0, True, seed)
        assert seed.item() == 2**62 + 78
        planes = [plane.float() for plane in codes.row(n).planes_in(rows).values()]
        found.append([*planes, out.float(), *([] if rest is None else [rest])])
    assert all(map(same, *found))
    assert rest is None or rest.isfinite().all()
    assert out[:128].isnan().all()
    assert out[200:].isfinite().all()


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("grads", "ranks", "keeps"),
    [
        (gradients(2, torch.bfloat16), 2, False),
        (gradients(3, torch.float32), 3, True),
        ([torch.ones(9, 16, dtype=torch.float16)] * GRADS, 2, False),
        ([torch.ones(4096), torch.ones(6, 4096)], 2, False),  # tiles end where chunks do
    ],
)
def test_codes_of_gradients_are_those_of_copied_ones(
    grads: list[torch.Tensor], ranks: int, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a copy into rows."""
    monkeypatch.setattr(launch, "usable", lambda *_: True)
    rows, codes = in_rows(grads, ranks), Codes("grad_fp8")
    chunks = Chunks(grads, ranks, rows.shape[1])
    assert codes.reads(chunks)
    rests = [torch.full(rows.shape, 1e-3) for _ in range(2)] if keeps else [None, None]
    made = [codes.quantize(one, torch.tensor([5]), rest) for one, rest in zip((chunks, rows), rests, strict=True)]
    read, copied = (codes.row(rows.shape[1]).planes_in(one).values() for one in made)
    assert all(map(same, read, copied))
    assert not keeps or torch.equal(*rests)


OWN = """layoutc: 1
name: {name}
summary: a recipe of one's own for gradients
use: {use}
shape: {{k: {multiple}}}
element: {element}
scale: {scale}
orientations:
  rowwise:
    block: {{m: 1, k: {block}}}
    data: {{layout: m k}}
    scale: {{layout: m k/{block}}}
"""


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("element", "scale", "block", "multiple", "has_kernels"),
    [
        ("{format: int4, round: stochastic}", "{format: f32, rule: min-max, zero: int8}", 64, 64, True),
        ("{format: e3m2}", "{format: e8m0, rule: power-of-two}", 32, 32, True),
        ("{format: e2m1, pack: low-first}", "{format: e8m0, rule: power-of-two}", 32, 32, True),
        ("{format: e4m3}", "{format: bf16, rule: scale-first, of-max: true}", 48, 1, False),
    ],
)
def test_recipes_of_ones_own(
    element: str, scale: str, block: int, multiple: int, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero points, codes of 6 bits, rounding to nearest, and blocks that fill no tile, which the reference serves."""
    use = "weight" if "zero" in scale else "wire"
    text = OWN.format(name="{name}", use=use, element=element, scale=scale, block=block, multiple=multiple)
    name = unshipped.name_of(text)
    unshipped.add(name, text.replace("{name}", name))
    codes, values = Codes(import_module(f"layoutc.recipes.{name}")), wide(3, 5000, torch.bfloat16)
    values[:, 1:3] = 0.0
    assert (codes._kernels is not None) is has_kernels
    found = []
    for kernels in (False, True):
        monkeypatch.setattr(launch, "usable", lambda *_, kernels=kernels: kernels)
        seed, out = torch.tensor([5]), torch.empty(5000)
        rows = codes.quantize(values, seed)
        codes.add(rows, out, 0.5, False, seed)
        found.append([*(plane.float() for plane in codes.row(5000).planes_in(rows).values()), out])
    assert all(map(same, *found))
    sums = sum_in_order(values) * 0.5
    assert (out - sums).norm() < 0.2 * sums.norm()
