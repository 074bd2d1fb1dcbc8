"""Losses of a byte-level transformer under layoutc.AdamW, in fp32 and in each form of moments and masters, by seeds.

    python tests/programs/state_curves.py --steps 1000 --seeds 5 [--forms fp32,8bit,...] [--recipe nvfp4]

Prints a line for each form: the mean of the last tenth of its losses, over all seeds, and how far that is from fp32's.
Exits with 1 if a form's are higher by more than its bound. `tests/programs/test_state_curves.py` runs a short one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import layoutc
from layoutc.bench.demo import Config, Transformer, corpus

# The form's arguments, and how much higher than fp32's its last losses may be.
FORMS: Mapping[str, tuple[Mapping[str, str], float]] = {
    "fp32": ({}, 0.0),
    "8bit": ({"state": "8bit"}, 0.005),
    "fp8": ({"state": "fp8"}, 0.01),
    "4bit": ({"state": "4bit"}, 0.02),
    "8bit, bf16 masters": ({"state": "8bit", "masters": "bf16"}, 0.01),
}


def losses(config: Config, form: str, recipe: str | None, steps: int, seed: int, text: Tensor) -> list[float]:
    """The loss of each step: weights and batches follow from the seed alone."""
    torch.manual_seed(seed)
    model = Transformer(config)
    if recipe:
        layoutc.quantize_(model, recipe)
    elif "masters" in FORMS[form][0]:
        model.to(torch.bfloat16)  # a plain weight in bf16 is its own master
    arguments: dict[str, Any] = dict(FORMS[form][0])
    optimizer = layoutc.AdamW(model.parameters(), lr=config.lr, seed=seed, **arguments)
    drawn, found = torch.Generator().manual_seed(seed), list[float]()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (step + 1) / (0.05 * steps + 1), 1.05 * (steps - step) / steps)
        at = torch.randint(len(text) - config.context - 1, (config.batch, 1), generator=drawn)
        batch = text[at + torch.arange(config.context + 1)].long()
        loss = F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def last(found: Sequence[Sequence[float]]) -> float:
    """The mean of the last tenth of the losses of all seeds."""
    tails = [one[-max(len(one) // 10, 1) :] for one in found]
    return sum(map(sum, tails)) / sum(map(len, tails))


def main(arguments: Sequence[str]) -> int:
    """Runs the forms, seed by seed, and says which are beyond their bounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--recipe", default=None)
    parser.add_argument("--forms", default=";".join(FORMS), help="by semicolons; fp32 always runs")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # which is faster than several for a model as small as this
    config, text = Config((), given.steps, dim=given.dim, layers=given.layers, context=64, lr=1e-3), corpus()
    forms = list(dict.fromkeys(["fp32", *given.forms.split(";")]))
    means, worst = dict[str, float](), 0
    for form in forms:
        runs = [losses(config, form, given.recipe, given.steps, seed, text) for seed in range(given.seeds)]
        means[form] = last(runs)
        away, bound = means[form] / means["fp32"] - 1, FORMS[form][1]
        beyond = away > bound
        worst |= beyond
        said = f"{100 * away:+.2f}%, bound {100 * bound:.1f}%{', BEYOND' if beyond else ''}"
        print(f"{form:<20} {means[form]:.4f}  {said}", flush=True)
    return int(worst)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
