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
    """The square root, rounded to nearest; of numbers below 0, which no second moment is, that of 0."""
    x = x.clamp(min=0)
    return x.sqrt() if x.is_cuda else x.double().sqrt().float()


# ------------------------------------------------------------------------------------------------------------- masters
def write_master(values: Tensor, master: Tensor, chance: Chance) -> None:
    """Rounds fp32 (m, k) values by random bits into a bf16 master of the same shape."""
    m, k = values.shape
    bits = (values.view(torch.int32) + chance_bits(chance, m, k, values.device)) & -65536
    bits = torch.where(values.isnan(), 0x7FC00000, bits)
    master.copy_((bits >> 16).to(torch.int16).view(torch.bfloat16))


def chance_bits(chance: Chance, m: int, k: int, device: torch.device) -> Tensor:
    """16 random bits for each element of (m, k), int32, which depend on where it lies in the whole weight.

    Eight elements of a row share a counter of Philox, (column // 8, row, number, 0), under the key (seed, step): each
    takes half a word, the lower half first.
    """
    row, column = chance.first
    groups = -(-k // 8)
    zeros = torch.zeros(m, groups, dtype=torch.int64, device=device)
    columns = torch.arange(groups, device=device) + column // 8
    rows = torch.arange(row, row + m, device=device)[:, None]
    words = counted_words([zeros + columns, zeros + rows, zeros + chance.number, zeros], chance.seed, chance.step)
    halves = [(word >> shift) & 0xFFFF for word in words for shift in (0, 16)]
    return torch.stack(halves, dim=-1).view(m, groups * 8)[:, :k].to(torch.int32)
