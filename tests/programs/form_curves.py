"""Losses of a byte-level transformer under each form of AdamW's state and of gradients on the wire, by seeds.

    python tests/programs/form_curves.py --steps 1000 --seeds 5 [--forms "fp32;8bit;..."] [--recipe nvfp4] [--json FILE]

A run is a process of its own, and one whose gradients travel is two ranks over gloo. Prints a line for each form: the
mean of the last tenth of its losses over all seeds, how far that is from its base's, and the seeds' own distances.
Exits with 1 if a form's are higher by more than its bound. `tests/programs/test_form_curves.py` runs short ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc.bench.demo import Config, Transformer, corpus


@dataclass(frozen=True)
class Form:
    """How one run differs from its base, and how much higher than the base's its last losses may be."""

    bound: float = 0.0
    base: str = "fp32"
    optimizer: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    wire: str = ""  # the recipe that gradients travel in; "": FSDP2's own reduce-scatter


FORMS: Mapping[str, Form] = {
    "fp32": Form(),
    "8bit": Form(0.005, optimizer={"state": "8bit"}),
    "fp8": Form(0.01, optimizer={"state": "fp8"}),
    "4bit": Form(0.02, optimizer={"state": "4bit"}),
    "8bit, bf16 masters": Form(0.01, optimizer={"state": "8bit", "masters": "bf16"}),
    "fp32 wire": Form(base="fp32 wire", ranks=2),
    "grad_fp8": Form(0.005, base="fp32 wire", ranks=2, wire="grad_fp8"),
    "grad_int4": Form(0.015, base="fp32 wire", ranks=2, wire="grad_int4"),
}


def losses(config: Config, form: Form, recipe: str | None, steps: int, seed: int, text: Tensor) -> list[float]:
    """The mean loss of all ranks in each step: weights and batches follow from the seed alone."""
    torch.manual_seed(seed)
    model = Transformer(config)
    if recipe:
        layoutc.quantize_(model, recipe)
    elif "masters" in form.optimizer:
        model.to(torch.bfloat16)  # a plain weight in bf16 is its own master
    if form.ranks > 1:
        for layer in (*model.blocks, model):
            fully_shard(layer)
    if form.wire:
        layoutc.exchange_gradients(model, form.wire, seed=seed)
    optimizer = layoutc.AdamW(model.parameters(), lr=config.lr, seed=seed, **form.optimizer)  # type: ignore[arg-type]
    drawn, found = torch.Generator().manual_seed(seed), list[float]()
    part = slice(dist.get_rank(), None, form.ranks) if form.ranks > 1 else slice(None)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (step + 1) / (0.05 * steps + 1), 1.05 * (steps - step) / steps)
        at = torch.randint(len(text) - config.context - 1, (config.batch, 1), generator=drawn)
        batch = text[at + torch.arange(config.context + 1)].long()[part]
        loss = F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach()
        if form.ranks > 1:
            dist.all_reduce(shown)
        found.append(shown.item() / form.ranks)
    return found


def last(found: Sequence[float]) -> float:
    """The mean of the last tenth of the losses of one run."""
    return mean(found[-max(len(found) // 10, 1) :])


def one(config: Config, given: argparse.Namespace) -> None:
    """Prints the losses of one run, as JSON: the work of a process that `started` started."""
    form = FORMS[given.one]
    torch.set_num_threads(1)  # which is faster than several for a model as small as this
    if form.ranks > 1:
        dist.init_process_group("gloo")
    found = losses(config, form, given.recipe, given.steps, given.seed, corpus())
    if form.ranks > 1 and dist.get_rank():
        found = []
    if form.ranks > 1:
        dist.destroy_process_group()
    if found:
        print(json.dumps(found), flush=True)


def started(arguments: Sequence[str], name: str, seed: int) -> list[float]:
    """The losses of one run, in processes of its own. Raises RuntimeError with what a run that failed printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(FORMS[name].ranks)]
    launcher = torchrun if FORMS[name].ranks > 1 else []
    command = [sys.executable, *launcher, __file__, *arguments, "--one", name, "--seed", str(seed)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}, seed {seed}:\n{done.stderr[-4000:]}")
    return [float(loss) for loss in json.loads(done.stdout.splitlines()[-1])]


def verdicts(found: Mapping[str, Sequence[float]]) -> tuple[list[str], list[str]]:
    """A line for each form of the last losses of its seeds, and the forms that are beyond their bounds."""
    lines, beyond = list[str](), list[str]()
    for name, each in found.items():
        form, base = FORMS[name], found[FORMS[name].base]
        away = mean(each) / mean(base) - 1
        seeds = " ".join(f"{100 * (own / other - 1):+.2f}" for own, other in zip(each, base, strict=True))
        if away > form.bound:
            beyond.append(name)
        bound = f"bound {100 * form.bound:.1f}%{', BEYOND' if away > form.bound else ''}"
        lines.append(f"{name:<20} {mean(each):.4f}  {100 * away:+.2f}%  {bound}  by seeds {seeds}")
    return lines, beyond


def main(arguments: Sequence[str]) -> int:
    """Runs the forms and their bases, and says which are beyond their bounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--recipe", default=None, help="of the weights; they are plain without one")
    parser.add_argument("--forms", default=";".join(FORMS), help="by semicolons; their bases run too")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--json", type=Path, help="a file for the last losses of every run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        one(Config((), given.steps, dim=given.dim, layers=given.layers, context=64, lr=1e-3), given)
        return 0
    wanted = given.forms.split(";")
    names = list(dict.fromkeys(name for form in wanted for name in (FORMS[form].base, form)))
    with ThreadPoolExecutor(given.at_once) as pool:
        runs = {name: [pool.submit(started, arguments, name, seed) for seed in range(given.seeds)] for name in names}
        found = {name: [last(run.result()) for run in each] for name, each in runs.items()}
    lines, beyond = verdicts(found)
    print("\n".join(lines), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"arguments": [*arguments], "last": found}, indent=1) + "\n")
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
