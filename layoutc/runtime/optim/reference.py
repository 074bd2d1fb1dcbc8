"""AdamW's step of one shard, in plain torch, on any device: the definition that the kernels follow, byte for byte."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.random_bits import counted_words


class Options(NamedTuple):
    """What a step depends on beside tensors."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class Chance(NamedTuple):
    """What random bits follow from: a seed, a parameter's number and step, and its shard's first row and column."""

    seed: int
    number: int
    step: int
    first: tuple[int, int]


def update(
    values: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: int, options: Options, exact: bool = True
) -> None:
    """Updates fp32 values and moments in place: (m, k) each. step: from 1 on.

    The order of operations, and what is rounded once, is that of torch.optim.AdamW with foreach. exact: square roots
    are rounded to nearest, as cards do; torch's on CPUs are now and then one bit off.
    """
    lr, beta1, beta2, eps, decay = options
    if decay:
        values.mul_(1 - lr * decay)
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    divisor = root(second) if exact else second.sqrt()
    divisor.div_((1 - beta2**step) ** 0.5).add_(eps)
    values.addcdiv_(first, divisor, value=lr / (1 - beta1**step) * -1)


def root(x: Tensor) -> Tensor:
    """The square root, rounded to nearest."""
    return x.sqrt() if x.is_cuda else x.double().sqrt().float()


# ------------------------------------------------------------------------------------------------------------- masters
def read_master(master: Tensor, low: Tensor | None) -> Tensor:
    """fp32 values of a master: fp32 itself, bf16, or bf16 and the signed byte below it (uint8)."""
    if low is None:
        return master.to(torch.float32, copy=True)
    high = master.view(torch.int16).to(torch.int32) << 16
    return (high + (((low.to(torch.int32) ^ 0x80) - 0x80) << 8)).view(torch.float32)


def write_master(values: Tensor, master: Tensor, low: Tensor | None, chance: Chance | None) -> Tensor:
    """Writes fp32 (m, k) values into a master of the same shape; returns the values that it then has.

    chance: for masters that are not fp32, which are rounded by random bits. None: to nearest.
    """
    if master.dtype == torch.float32:
        master.copy_(values)
        return values
    count = 16 if low is None else 8
    bits = values.view(torch.int32)
    if chance is None:
        half = 1 << (count - 1)
        added = half - 1 + ((bits >> count) & 1)
    else:
        m, k = values.shape
        added = chance_bits(chance, m, k, count, values.device)
    nan = torch.tensor(0x7FC00000, dtype=torch.int32, device=values.device)
    bits = torch.where(values.isnan(), nan, (bits + added) & -(1 << count))
    high = bits
    if low is not None:
        low.copy_(((bits >> 8) & 0xFF).to(torch.uint8))
        high = bits + 0x8000
    master.copy_((high >> 16).to(torch.int16).view(torch.bfloat16))
    return bits.view(torch.float32)


def chance_bits(chance: Chance, m: int, k: int, count: int, device: torch.device) -> Tensor:
    """`count` random bits for each element of (m, k), int32, which depend on where it lies in the whole weight.

    Eight elements of a row share a counter of Philox, (column // 8, row, number, 0), under the key (seed, step): each
    takes the upper bits of half a word, the lower half first.
    """
    row, column = chance.first
    groups = -(-k // 8)
    zeros = torch.zeros(m, groups, dtype=torch.int64, device=device)
    columns = torch.arange(groups, device=device) + column // 8
    rows = torch.arange(row, row + m, device=device)[:, None]
    words = counted_words([zeros + columns, zeros + rows, zeros + chance.number, zeros], chance.seed, chance.step)
    halves = [(word >> (shift - count)) & ((1 << count) - 1) for word in words for shift in (16, 32)]
    return torch.stack(halves, dim=-1).view(m, groups * 8)[:, :k].to(torch.int32)
