"""AdamW: moments and masters in recipes, updated together with the weights' codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime.optim.by_rule import ByRule, Masters
from layoutc.runtime.optim.states import State


class AdamW(ByRule):
    """AdamW (arXiv 1711.05101) for plain and quantized weights, with moments and masters stored in recipes.

    params: parameters, or parameter groups. lr, betas, eps, weight_decay: as for torch.optim.AdamW.
    state: how moments are stored: "fp32"; "8bit" (exp_avg in adam_m8, exp_avg_sq in adam_v8); "fp8"; "4bit"; or a dict
    of recipes. masters: "fp32"; "f24", bf16 and a byte, rounded to nearest; or "bf16" with stochastic rounding; a plain
    bf16 weight is then its own master.
    least: weights with fewer elements, and weights with one dim, keep fp32. The size of the whole weight counts.
    seed: seeds the random bits. With state and masters in fp32 and an `lr` that is a number, steps on a CPU match
    torch.optim.AdamW bit for bit.

    On a card, one launch reads the reduced gradients in place. It writes masters, moments, and the codes of all weights
    whose scales depend on blocks alone. `explain()` names the weights that later launches requantize. The result does
    not depend on the number of ranks: random bits depend on `seed`, the step, and the element's position in its
    weight. After one eager step, a CUDA graph can capture steps if `lr` is a tensor or does not change.

    Gradients, replaced parameters, checkpoints and errors of a step work as in MasterWeights. Raises ValueError for an
    unknown `state` or `masters`.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "fp8_block")
        ['0.weight']
        >>> optimizer = layoutc.AdamW(model.parameters(), lr=1e-3, state="fp8", masters="bf16")
        >>> model(torch.randn(4, 128)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: State = "fp32",
        masters: Masters = "fp32",
        least: int = 4096,
        seed: int = 0,
    ) -> None:
        """`params`: as for torch.optim.AdamW, also groups and named parameters. seed: 32 bits, for the random bits.

        Raises ValueError for options out of range. Raises LayoutError for parameters in other dtypes than fp32, bf16
        and fp16, and for shards whose cuts would split blocks of moments.
        """
        if min(float(lr), eps, weight_decay) < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"AdamW needs lr, eps and weight_decay of 0 or more and betas in [0, 1), not lr={lr}, eps={eps}, "
                f"weight_decay={weight_decay}, betas={betas}"
            )
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(torch.optim.AdamW, params, state=state, masters=masters, least=least, seed=seed, **options)
