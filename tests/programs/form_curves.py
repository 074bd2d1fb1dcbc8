"""Losses of a byte-level transformer under each form of AdamW's state and of gradients on the wire, by seeds; and of
one with experts under each form of its weights.

    python tests/programs/form_curves.py --steps 1000 --seeds 5 [--forms "fp32;8bit;..."] [--recipe nvfp4] [--json FILE]
    python tests/programs/form_curves.py --steps 500 --seeds 3 --cards --dim 512 --layers 4 \\
        --forms "experts fp8_rowwise;experts nvfp4"
    python tests/programs/form_curves.py --cards --forms "grad_fp8;grad_int4"

A run is a process of its own, and one whose gradients travel is two ranks, of which one is forked from the other.
Prints a line for each form: the mean of the last tenth of its losses over all seeds, how far that is from its base's,
and the seeds' own distances. Exits with 1 if a form's are higher by more than its bound. Runs are on the CPU and over
gloo, or with --cards on the machine's cards in turn and over NCCL. `tests/programs/test_form_curves.py` runs short
ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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
    experts: bool = False  # of transformers' Qwen3-MoE, under FSDP2 in bf16
    recipe: str = ""  # of its weights, the router's and embeddings apart


FORMS: Mapping[str, Form] = {
    "fp32": Form(),
    "8bit": Form(0.005, optimizer={"state": "8bit"}),
    "fp8": Form(0.01, optimizer={"state": "fp8"}),
    "4bit": Form(0.02, optimizer={"state": "4bit"}),
    "8bit, bf16 masters": Form(0.01, optimizer={"state": "8bit", "masters": "bf16"}),
    "fp32 wire": Form(base="fp32 wire", ranks=2),
    "grad_fp8": Form(0.005, base="fp32 wire", ranks=2, wire="grad_fp8"),
    "grad_int4": Form(0.015, base="fp32 wire", ranks=2, wire="grad_int4"),
    "experts": Form(base="experts", experts=True),
    "experts fp8_rowwise": Form(0.01, base="experts", experts=True, recipe="fp8_rowwise"),
    "experts nvfp4": Form(0.01, base="experts", experts=True, recipe="nvfp4"),
}
QUANTIZED = ["*_proj.weight", "*experts.*_proj", "lm_head.weight"]
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def mixture(config: Config, recipe: str) -> Any:
    """A model with experts, 4 of 16 a token, in a group of its own: FSDP2's policy is what makes it bf16."""
    import transformers

    import layoutc.integrations.transformers_experts

    sizes = {"hidden_size": config.dim, "intermediate_size": config.dim, "moe_intermediate_size": config.dim}
    heads = {"num_attention_heads": config.heads, "num_key_value_heads": config.heads, "vocab_size": 256}
    routes = {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "use_cache": False}
    fields = {**sizes, **heads, **routes, "num_hidden_layers": config.layers, "head_dim": config.dim // config.heads}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen3_moe", **fields))
    model.set_experts_implementation("layoutc")
    if recipe:
        layoutc.quantize_(model, recipe, param_filter=QUANTIZED)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mp_policy=BF16)
    return model


def losses(config: Config, form: Form, recipe: str | None, steps: int, seed: int, text: Tensor) -> list[float]:
    """The mean loss of all ranks in each step: weights and batches follow from the seed alone."""
    torch.manual_seed(seed)
    device = torch.get_default_device()
    model: Any = mixture(config, form.recipe) if form.experts else Transformer(config)
    if recipe and not form.experts:
        layoutc.quantize_(model, recipe)
    elif "masters" in form.optimizer:
        model.to(torch.bfloat16)  # a plain weight in bf16 is its own master
    if form.ranks > 1:
        for layer in (*model.blocks, model):
            fully_shard(layer)
    if form.wire:
        layoutc.exchange_gradients(model, form.wire, seed=seed)
    optimizer = layoutc.AdamW(model.parameters(), lr=config.lr, seed=seed, **form.optimizer)  # type: ignore[arg-type]
    drawn, found = torch.Generator("cpu").manual_seed(seed), list[float]()
    part = slice(dist.get_rank(), None, form.ranks) if form.ranks > 1 else slice(None)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (step + 1) / (0.05 * steps + 1), 1.05 * (steps - step) / steps)
        at = torch.randint(len(text) - config.context - 1, (config.batch, 1), generator=drawn, device="cpu")
        batch = text[at + torch.arange(config.context + 1, device="cpu")].long()[part].to(device)
        made = model(batch[:, :-1])
        logits = made.logits if form.experts else made
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
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
    """Prints the losses of runs, one after another, as JSON: the work of a process that `started` started."""
    forms = [FORMS[name] for name in given.one.split(";")]
    torch.set_num_threads(1)  # which is faster than several for a model as small as this
    text, file = corpus(), Path(tempfile.mkdtemp(), "store")
    other = os.fork() if forms[0].ranks > 1 else None
    rank, backend = int(other == 0), "nccl" if given.cards else "gloo"
    torch.set_default_device(f"cuda:{rank}" if given.cards else "cpu")
    if given.cards:
        torch.cuda.set_device(rank)
    if other is not None:
        dist.init_process_group(backend, store=dist.FileStore(str(file), 2), rank=rank, world_size=2)
    elif forms[0].experts:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    found = list[list[float]]()
    for form in forms:
        with layoutc.products("low_precision") if form.recipe else nullcontext():
            found.append(losses(config, form, given.recipe, given.steps, given.seed, text))
    if dist.is_initialized():
        dist.destroy_process_group()
    if other == 0:
        return
    if other is not None and (status := os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])):
        raise SystemExit(f"the other rank ended with {status}")
    print(json.dumps(found), flush=True)


def started(arguments: Sequence[str], seed: int, *names: str) -> list[list[float]]:
    """The losses of runs on as many ranks, in processes of theirs. Raises RuntimeError with what a failure printed."""
    command = [sys.executable, __file__, *arguments, "--one", ";".join(names), "--seed", str(seed)]
    cards = (str((seed + rank) % torch.cuda.device_count()) for rank in range(FORMS[names[0]].ranks))
    visible = ",".join(cards) if "--cards" in arguments else ""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    if done.returncode:
        raise RuntimeError(f"{', '.join(names)}, seed {seed}:\n{done.stderr[-4000:]}")
    return [[float(loss) for loss in each] for each in json.loads(done.stdout.splitlines()[-1])]


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
    parser.add_argument("--cards", action="store_true", help="runs are on cards, a seed on one")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        batch = 64 if given.cards else 8
        one(Config((), given.steps, dim=given.dim, layers=given.layers, context=64, batch=batch, lr=1e-3), given)
        return 0
    wanted = given.forms.split(";")
    names = list(dict.fromkeys(name for form in wanted for name in (FORMS[form].base, form)))
    with ThreadPoolExecutor(given.at_once) as pool:
        runs = {name: [pool.submit(started, arguments, seed, name) for seed in range(given.seeds)] for name in names}
        found = {name: [last(run.result()[0]) for run in each] for name, each in runs.items()}
    lines, beyond = verdicts(found)
    print("\n".join(lines), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"arguments": [*arguments], "last": found}, indent=1) + "\n")
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
