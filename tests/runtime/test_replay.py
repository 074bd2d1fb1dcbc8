"""Programs that are run again from what the first one called give what each gives by itself, or are run as they are."""

from __future__ import annotations

from typing import Any

import pytest
import replay
import torch

triton = pytest.importorskip("triton", reason="needs triton, whose interpreter this is")
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(interpreter.GridExecutor.__init__, "__wrapped__"), reason="needs TRITON_INTERPRET=1, made quick"
)
PROGRAMS, SIZE = 5, 16


@triton.jit
def largest(x):
    """A function that a kernel calls."""
    return tl.max(tl.abs(x), axis=0)


@triton.jit
def first_by_index(a, b, c, d):
    """Of two pairs, that of the larger value, or of the lower index: no reduction that numpy has."""
    is_first = (a > c) | ((a == c) & (b < d))
    return tl.where(is_first, a, c), tl.where(is_first, b, d)


@triton.jit
def straight(x, out, count, rounds, SIZE: tl.constexpr):
    """Loads, masks, reductions, a loop as long as an argument says; nothing is decided by values."""
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    values = tl.load(x + places, mask=places < count, other=1.0)
    for _ in range(rounds):
        values = values * 1.5 + 1
    if rounds > 2:
        values = values / largest(values)
    values = values + tl.cumsum(values, axis=0) - tl.sum(tl.reshape(values, (4, 4)), axis=1).sum(axis=0)
    best, place = tl.reduce((values, tl.arange(0, SIZE)), 0, first_by_index)
    tl.store(out + places, values + best + place, mask=places < count)


@triton.jit
def decided_by_index(x, out, count, rounds, SIZE: tl.constexpr):
    """The second program does something else."""
    pid = tl.program_id(0)
    values = tl.load(x + pid * SIZE + tl.arange(0, SIZE))
    if pid == 1:
        values = values * 2
    tl.store(out + pid * SIZE + tl.arange(0, SIZE), values)


@triton.jit
def decided_by_value(x, out, count, rounds, SIZE: tl.constexpr):
    """Programs whose first value is positive do something else."""
    pid = tl.program_id(0)
    if tl.load(x + pid * SIZE) > 0:
        values = tl.load(x + pid * SIZE + tl.arange(0, SIZE))
    else:
        values = tl.full((SIZE,), 7.0, tl.float32)
    tl.store(out + pid * SIZE + tl.arange(0, SIZE), values)


@triton.jit
def counted_by_value(x, out, count, rounds, SIZE: tl.constexpr):
    """As many rounds as the index says."""
    pid = tl.program_id(0)
    values = tl.load(x + pid * SIZE + tl.arange(0, SIZE))
    for _ in range(pid):
        values = values * 2
    tl.store(out + pid * SIZE + tl.arange(0, SIZE), values)


@triton.jit
def transposed(x, out, count, rounds, SIZE: tl.constexpr):
    """The interpreter makes a transpose beside its builder."""
    places = tl.program_id(0) * SIZE + tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out + places, tl.load(x + places).T)


@triton.jit
def one_after_another(x, out, count, rounds, SIZE: tl.constexpr):
    """Each program reads what the one before has written."""
    pid = tl.program_id(0)
    before = tl.load(out + tl.maximum(pid * SIZE - SIZE, 0) + tl.arange(0, SIZE))
    tl.store(out + pid * SIZE + tl.arange(0, SIZE), before + tl.load(x + pid * SIZE + tl.arange(0, SIZE)))
    tl.atomic_add(out + count - 1, 1.0)


@triton.jit
def decided_late(x, out, count, rounds, SIZE: tl.constexpr):
    """What is stored is not stored again to find out."""
    pid = tl.program_id(0)
    tl.atomic_add(out + pid, 1.0)
    if tl.load(x + pid * SIZE) > 0:
        tl.atomic_add(out + pid, 1.0)


# How many of five programs are made of an earlier one's calls, where the first values of these are +, +, +, - and -.
KERNELS = {straight: 4, one_after_another: 4, decided_by_index: 3, decided_by_value: 3}
KERNELS |= dict.fromkeys((counted_by_value, transposed, decided_late), 0)


@pytest.mark.parametrize("rounds", [0, 3])
@pytest.mark.parametrize(("kernel", "count"), KERNELS.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_programs(kernel: Any, count: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, whatever the others do; again in a further launch, of other values."""
    again: list[bool] = []
    original = replay.replayed
    monkeypatch.setattr(replay, "replayed", lambda recorder: (again.append(original(recorder)), again[-1])[1])

    def run(x: torch.Tensor, least: int) -> torch.Tensor:
        monkeypatch.setattr(replay, "LEAST", least)
        out = torch.zeros_like(x)
        kernel[(PROGRAMS,)](x, out, x.numel() - 3, rounds, SIZE)
        return out

    for seed in (0, 1):
        x = torch.randn(PROGRAMS * SIZE, generator=torch.Generator().manual_seed(seed))
        x[::SIZE] = x[::SIZE].abs() * torch.tensor([1, 1, 1, -1, -1])
        expected = run(x, 1000)
        again.clear()
        assert torch.equal(run(x, 2), expected)
        assert again.count(True) == count
        assert not replay.RECORDING
        assert not any(name.startswith("create_") for name in vars(interpreter.interpreter_builder))


@triton.jit
def beyond(x, out, SIZE: tl.constexpr):
    """Fails in Python."""
    tl.store(out + tl.program_id(0), tl.load(x))
    tl.static_assert(SIZE < 16, "too large")


def test_a_program_that_fails_leaves_nothing_behind() -> None:
    x = torch.zeros(4)
    with pytest.raises(interpreter.InterpreterError, match="too large"):
        beyond[(4,)](x, torch.zeros(4), 16)
    assert not replay.RECORDING
    assert not any(name.startswith("create_") for name in vars(interpreter.interpreter_builder))
    out = torch.zeros(4)
    beyond[(4,)](x + 3, out, 8)
    assert torch.equal(out, x + 3)
