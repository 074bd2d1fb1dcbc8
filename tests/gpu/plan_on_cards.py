"""Plans beside runs: the most bytes that are allocated in a step, and its time, of transformers' Llama and Qwen 3 MoE.

    python tests/gpu/plan_on_cards.py --plan plans.json                              # where the compiler is installed
    torchrun --nproc-per-node 2 tests/gpu/plan_on_cards.py plans.json [--only llama] # on cards

The first writes what `layoutc plan` says of each case; the second trains it under FSDP2, with layers as groups, and
prints both, in order, and each peak and plan as a share of the first case's of its model and tokens, which is bf16.
Peaks are the allocator's, after the first steps, which make the optimizer's state; without
cards, of tiny models (`--tiny` beside `--plan`), those of all storages that live. Exits with 1 if a peak is more than
5% from its plan, if more than 1% of a plan stays allocated after its case, or if a compiled step on cards is more than
15% from its estimate, which has no modules whose norms and activations are kernels each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RANKS, STEPS, WARM = 2, 5, 3
AIMS = {"8bit-fp32": 0.72, "8bit-bf16": 0.62}  # of bf16's peak
HEADS = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "use_cache": False, "num_hidden_layers": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
        **HEADS,
    },
    "qwen3_moe": {
        **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16},
        **{"moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True},
        **HEADS,
    },
}
TINY = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 8}
TINY |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "moe_intermediate_size": 96, "num_experts": 8}


@dataclass(frozen=True)
class Case:
    """A model, the recipe of its weights (bf16: plain), how products are, what backward computes again, and whether
    layers are compiled."""

    model: str
    recipe: str = "bf16"
    low: bool = False
    full: bool = False
    compiled: bool = False
    sequence: int = 2048
    batch: int = 2
    state: str = ""  # of moments and masters, as 8bit-bf16

    @property
    def alike(self) -> tuple[Any, ...]:
        """What cases share whose memory is compared: the model and its tokens, and how its layers run."""
        return self.model, self.full, self.compiled, self.sequence, self.batch

    @property
    def name(self) -> str:
        words = [self.model, self.recipe, "low" * self.low, "full" * self.full, "compiled" * self.compiled, self.state]
        return " ".join(filter(None, [*words, f"{self.batch} x {self.sequence}"]))


CASES = (
    Case("llama"),
    Case("llama", "nvfp4"),
    Case("llama", "nvfp4", state="8bit-fp32"),
    Case("llama", "nvfp4", state="8bit-bf16"),
    Case("llama", full=True, batch=4),
    Case("qwen3_moe"),
    Case("qwen3_moe", "nvfp4"),
    Case("llama", compiled=True),
    Case("llama", "nvfp4", compiled=True),
    Case("llama", "fp8_current", low=True, compiled=True),
)


def fields(case: Case, tiny: bool) -> dict[str, Any]:
    """Of the config."""
    own = MODELS[case.model]
    return {**own, **{key: size for key, size in TINY.items() if key in own}} if tiny else own


def plans(path: str, card: str, tiny: bool) -> None:
    """Writes each case's plan."""
    from click.testing import CliRunner

    from layoutc.cli.app import main

    made = []
    for case in CASES:
        with open(config := f"{path}.config.json", "w", encoding="utf-8") as file:
            json.dump(fields(case, tiny), file)
        tokens = ["--sequence", "256" if tiny else str(case.sequence), "--batch", str(case.batch)]
        runs = [] if case.compiled else ["--eager"]
        how = [*runs, "--checkpointing", "full" if case.full else "none", "--card", card, "--world", str(RANKS)]
        recipe = [] if case.recipe == "bf16" else ["--recipe", case.recipe, *(["--low"] if case.low else [])]
        state = ["--state", "8bit", "--masters", case.state.partition("-")[2]] if case.state else []
        shown = CliRunner().invoke(main, ["plan", config, *tokens, *how, *recipe, *state, "--json"])
        if shown.exit_code:
            raise SystemExit(shown.output)
        budget = json.loads(shown.stdout)["budgets"][-1]
        made.append(
            {"name": case.name, "tiny": tiny, "memory": budget["memory"], "step": budget["step"]["total"]}
            | {key: budget[key] for key in ("resident", "peaks")}
        )
        os.remove(config)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(made, file)


class Allocated(TorchDispatchMode):
    """The most bytes of storages that live, where no allocator says so: those before, and what operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, StorageWeakRef] = {}
        self.most = 0
        gc.collect()
        self._keep(gc.get_objects())

    def _keep(self, found: Iterable[Any]) -> None:
        for one in found:
            if type(one) is torch.Tensor or type(one) is torch.nn.Parameter:
                storage = one.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._keep(tree_leaves((args, kwargs, out)))
        self.live = {at: one for at, one in self.live.items() if not one.expired()}
        sizes = (torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in self.live.values())
        self.most = max(self.most, sum(one.nbytes() for one in sizes if one is not None))
        return out


@contextmanager
def peak(device: torch.device, found: list[int]) -> Iterator[None]:
    """Appends the most bytes that are allocated inside."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated())
        return
    with Allocated() as mode:
        yield
    found.append(mode.most)


def trained(case: Case, tiny: bool, device: torch.device) -> tuple[Any, Any]:
    """The model under FSDP2, and its optimizer."""
    import transformers

    import layoutc

    own = dict(fields(case, tiny))
    config = transformers.AutoConfig.for_model(own.pop("model_type"), **own)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train()
    if case.full:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.recipe != "bf16":
        layoutc.quantize_(model, case.recipe)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        if case.compiled and device.type == "cuda":
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    fused: dict[str, Any] = {"lr": 1e-5, "fused": True}
    if case.recipe == "bf16":
        return model, torch.optim.AdamW(model.parameters(), **fused)
    if case.state:
        state, _, masters = case.state.partition("-")
        fused |= {"state": state, "masters": masters}
    return model, layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), **fused)


def run(case: Case, tiny: bool, device: torch.device) -> tuple[int, float]:
    """The most bytes of any rank in a step, and the seconds of one."""
    import layoutc

    model, optimizer = trained(case, tiny, device)
    shape = (case.batch, 256 if tiny else case.sequence)
    ids = torch.randint(0, model.config.vocab_size, shape, device=device)

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    most: list[int] = []
    times = []
    with layoutc.products("low_precision" if case.low else "dequantize"):
        for at in range(WARM + (0 if tiny else STEPS)):
            if at == WARM - 1:
                with peak(device, most):
                    step()
                continue
            dist.barrier()
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    made = torch.tensor([most[0], statistics.median(times[WARM - 1 :] or times)], dtype=torch.float64, device=device)
    dist.all_reduce(made, dist.ReduceOp.MAX)
    return int(made[0]), float(made[1])


def main() -> int:
    """Plans, or runs; 1 if one is too far from the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?")
    parser.add_argument("--plan", metavar="FILE")
    parser.add_argument("--card", default="h100")
    parser.add_argument("--tiny", action="store_true", help="of models for CPUs")
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    if asked.plan:
        plans(asked.plan, asked.card, asked.tiny)
        return 0
    with open(asked.file, encoding="utf-8") as file:
        stated = {one["name"]: one for one in json.load(file)}
    local, cards = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", local) if cards else torch.device("cpu")
    if cards:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cards else "gloo", **({"device_id": device} if cards else {}))
    bad, plain = 0, dict[tuple[Any, ...], tuple[float, float]]()
    for case in CASES:
        one = stated.get(case.name)
        if one is None or asked.only not in case.name:
            continue
        most, seconds = run(case, one["tiny"], device)
        off, slow = most / one["memory"] - 1, seconds / one["step"] - 1
        bad |= (abs(off) > 0.05 and (cards or not case.compiled)) or (cards and case.compiled and abs(slow) > 0.15)
        plain |= {case.alike: (most, one["memory"])} if case.recipe == "bf16" else {}
        of_peak, of_plan = plain.get(case.alike, (most, one["memory"]))
        if case.state:
            bad |= off > 0.02 or (cards and case.alike in plain and most / of_peak > AIMS[case.state])
        if dist.get_rank() == 0:
            gib, planned = most / 2**30, one["memory"] / 2**30
            acts = one["peaks"]["activations"] / 2**30
            print(
                f"{case.name}: peak {gib:.3f} GiB, planned {planned:.3f} ({off:+.1%}; activations {acts:.3f})",
                flush=True,
            )
            shares = f"{most / of_peak:.3f} of bf16's peak, planned {one['memory'] / of_plan:.3f}"
            print(f"    {shares}, aim {AIMS[case.state]}" if case.state else f"    {shares}", flush=True)
            print(f"    step {seconds * 1e3:.1f} ms, planned {one['step'] * 1e3:.1f} ({slow:+.1%})", flush=True)
            if cards:
                held = torch.cuda.max_memory_reserved() / 2**30
                free, total = torch.cuda.mem_get_info()
                print(f"    reserved {held:.2f} GiB, in use on the card {(total - free) / 2**30:.2f}", flush=True)
        torch._dynamo.reset()  # compiled code and FSDP2's hooks, which refer to one another, keep a model
        gc.collect()
        if cards:
            torch.cuda.empty_cache()
            left = torch.cuda.memory_allocated()
            bad |= left > 0.01 * one["memory"]  # it would count in the next case's peak
            print(f"    rank {dist.get_rank()}: {left / 2**20:.1f} MiB left", flush=True)
    dist.destroy_process_group()
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
