"""Mixtures of experts as models have them: w1, w2 and w3; gate_up_proj and down_proj, by rows or transposed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, WIDTH, INNER = 2, 64, 128


class Gated(nn.Module):
    """As torchtitan has it: three weights of (experts, m, k), read transposed."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, rows, columns in (("w1", INNER, WIDTH), ("w2", WIDTH, INNER), ("w3", INNER, WIDTH)):
            values = torch.randn(EXPERTS, rows, columns, dtype=dtype) / 8
            setattr(self, name, nn.Parameter(values))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """Tokens in groups that end at offs."""
        w1, w2, w3 = (w.transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        inner = F.silu(F.grouped_mm(x, w1, offs=offs)) * F.grouped_mm(x, w3, offs=offs)
        made: Tensor = F.grouped_mm(inner, w2, offs=offs)
        return made


class Joined(nn.Module):
    """As transformers has it: gate and up in one weight, and biases; Mixtral's by rows, those of gpt-oss transposed."""

    def __init__(self, transposed: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.swapped = transposed
        for name, rows, columns in (("gate_up_proj", 2 * INNER, WIDTH), ("down_proj", WIDTH, INNER)):
            shape = (EXPERTS, columns, rows) if transposed else (EXPERTS, rows, columns)
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=dtype) / 8))
            setattr(self, f"{name}_bias", nn.Parameter(torch.zeros(EXPERTS, rows, dtype=dtype)))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """Tokens in groups that end at offs."""
        up, down = (w if self.swapped else w.transpose(-2, -1) for w in (self.gate_up_proj, self.down_proj))
        groups = torch.searchsorted(offs, torch.arange(len(x)), right=True)
        gate, value = (F.grouped_mm(x, up, offs=offs) + self.gate_up_proj_bias[groups]).chunk(2, -1)
        made: Tensor = F.grouped_mm(F.silu(gate) * value, down, offs=offs) + self.down_proj_bias[groups]
        return made


class Mixture(nn.Module):
    """An embedding, a layer, experts and a head."""

    def __init__(self, experts: type[nn.Module] = Gated, **options: Any) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.experts = nn.Linear(WIDTH, WIDTH), experts(**options)
        self.head = nn.Linear(WIDTH, 36, bias=False)

    def forward(self, tokens: Tensor, offs: Tensor) -> Tensor:
        """(tokens,) in groups that end at offs -> (tokens, 36)."""
        x = self.mixed(self.norm(self.embed(tokens)))
        # Cloned, so that gradients of x are added in one order, also where FSDP2 puts a function before the experts.
        made: Tensor = self.head(x + self.experts(x.clone(), offs))
        return made


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens, and where their groups end."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 32, (64,), generator=generator), torch.tensor([(24, 40, 64)[step % 3], 64]).int()
