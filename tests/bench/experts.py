"""Steps of models with experts under FSDP2, and where their time goes on the card and on the host.

    torchrun --nproc-per-node 2 tests/bench/experts.py [--variants bf16 fp8_block+low ...] [--batch 8 2] [--json FILE]

Models are transformers' own. Each variant is built once and takes its steps eager, then with compiled layers. `RECIPE`
are quantized weights, experts among them, under MasterWeights, whose products are as they are by default; `+cast`
casts fp32 weights on gather instead; `+low` has products in low precision where a card has the kernel, and `+fused`
experts computed by layoutc's own implementation. `torchao` is torchao's training in FP8 by rows, of linear layers and
of experts, all three products. Printed, of the slowest rank: the median step and the host's part of it, before it
waits for the card; the peak of memory; the loss; of the first rank with --profile the card's time by class. The JSON
has the kernels that take most, and what is allocated where that is most.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import card_time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import layoutc
from layoutc.runtime.operands.expert_rows import gated, routes_of
from layoutc.runtime.operands.groups import Groups

HEADS = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "use_cache": False}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_hidden_layers": 8},
        **{"moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True},
    },
    "mixtral": {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 2},
        **{"num_local_experts": 8, "num_experts_per_tok": 2},
    },
}
QUANTIZED = ["*_proj.weight", "*experts.*_proj", "lm_head.weight"]
TINY = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_hidden_layers": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 128, "vocab_size": 512, "moe_intermediate_size": 128, "num_experts": 4}
TINY |= {"num_experts_per_tok": 2}


def by_torchao(self: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts by torchao's products. Its gradients of weights take groups in multiples of 16 tokens, and it does not
    pad them: tokens are moved to padded groups in one pass, as torchtitan moves them."""
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as multiply

    order, rows, ends = routes_of(chosen, self.num_experts)
    apart = Groups(ends, len(order)).apart(16)
    assert apart is not None
    token = order.new_full((apart.size,), len(x)).index_copy(0, apart.rows, order // chosen.shape[1])
    padded = torch.cat((x, x.new_zeros((1, x.shape[1]))))[token]
    both = multiply(padded, self.gate_up_proj.transpose(-2, -1), apart.ends, pad_token_groups_for_grouped_mm=False)
    made = multiply(gated(both), self.down_proj.transpose(-2, -1), apart.ends, pad_token_groups_for_grouped_mm=False)
    return (made[apart.rows[rows]] * weights[..., None]).sum(1).to(x.dtype)


def convert_to_torchao(model: Any) -> None:
    """Linear layers as well; experts are `by_torchao`."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("torchao", by_torchao)
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))
    model.set_experts_implementation("torchao")


def of_transformers(name: str, fields: dict[str, Any]) -> Any:
    """A model of its own."""
    import transformers

    importlib.import_module("layoutc.integrations.transformers_experts")  # registers them
    config = transformers.AutoConfig.for_model(name, **fields)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def built(variant: str, options: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    """The model under FSDP2, and its optimizer."""
    recipe, *ways = variant.split("+")
    fields = MODELS[options.model] | HEADS
    if options.tiny:
        fields |= {key: size for key, size in TINY.items() if key in fields}
    torch.manual_seed(0)
    with torch.device(device):
        model = of_transformers(options.model, fields)
    model.train()
    if recipe == "torchao":
        convert_to_torchao(model)
    else:
        model.set_experts_implementation("layoutc" if "fused" in ways else "grouped_mm")
    plain = recipe in ("bf16", "torchao") or "cast" in ways
    if not plain:
        layoutc.quantize_(model, recipe, param_filter=QUANTIZED)
    elif "cast" in ways:
        layoutc.cast_on_gather_(model, recipe, param_filter=QUANTIZED)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    adamw: dict[str, Any] = {"lr": 1e-5, "fused": True}
    if plain:
        return model, torch.optim.AdamW(model.parameters(), **adamw)
    return model, layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), **adamw)


def measured(step: Callable[[], torch.Tensor], options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What warm steps take, on the slowest rank."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(options.warm):
        loss = step()
    gc.collect()
    gc.freeze()
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, hosts = [], []
    for _ in range(options.steps):
        dist.barrier()
        wait()
        began = time.perf_counter()
        loss = step()
        hosts.append((time.perf_counter() - began) * 1e3)
        wait()
        times.append((time.perf_counter() - began) * 1e3)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    figures = [statistics.median(times), max(times) - min(times), statistics.median(hosts), peak, float(loss)]
    slowest = torch.tensor(figures, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    row: dict[str, Any] = dict(zip(("ms", "spread", "host", "peak", "loss"), slowest.tolist(), strict=True))
    if options.profile and device.type == "cuda":
        row["card"] = card_time.table(*card_time.recorded(step))
        row["allocated"] = card_time.allocated(step)
    gc.unfreeze()
    return row


def taken(variant: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The rows of a variant: each batch, eager and compiled."""
    model, optimizer = built(variant, options, device)
    mode: Callable[[], AbstractContextManager[None]] = nullcontext
    if "low" in variant.split("+"):
        mode = partial(layoutc.products, "low_precision")
    rows = []
    for form in sorted(options.forms, reverse=True):  # eager first: compiled layers stay so
        if form == "compiled":
            torch._dynamo.reset()
            torch._dynamo.config.recompile_limit = 64
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        for batch in options.batch:
            shape = (batch, 64 if options.tiny else options.sequence)
            generator = torch.Generator().manual_seed(dist.get_rank())
            ids = torch.randint(0, model.config.vocab_size, shape, generator=generator).to(device)

            def step(ids: torch.Tensor = ids) -> torch.Tensor:
                loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            row: dict[str, Any] = {"variant": variant, "form": form, "batch": batch}
            try:
                with mode():
                    row |= measured(step, options, device)
            except torch.OutOfMemoryError as error:
                row["error"] = str(error)[:200]
            rows.append(row)
            if dist.get_rank() == 0:
                print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    name = f"{row['variant']} {row['form']} {row['batch']}"
    if "error" in row:
        return f"{name}: {row['error']}"
    text = f"{name}: {row['ms']:.1f} ms ({row['spread']:.1f}), host {row['host']:.1f}, {row['peak'] / 2**30:.2f} GiB, "
    text += f"loss {row['loss']:.4f}"
    if "card" in row:
        card = row["card"]
        text += f"\n    idle {card['idle']}, collectives alone {card['collectives alone']}, {card['classes']}"
    return text


def main() -> None:
    """Runs the variants; writes what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="qwen3_moe")
    parser.add_argument("--variants", nargs="+", default=["bf16", "fp8_block+low", "fp8_rowwise+low", "nvfp4"])
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 2])
    parser.add_argument("--forms", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    for name, value in (("sequence", 2048), ("steps", 5), ("warm", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a model for CPUs")
    parser.add_argument("--json")
    options = parser.parse_args()
    cards = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cards else torch.device("cpu")
    if cards:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cards else "gloo")
    rows: list[dict[str, Any]] = []
    for variant in options.variants:
        rows += taken(variant, options, device)
        gc.collect()
        if cards:
            torch.cuda.empty_cache()
        if options.json and dist.get_rank() == 0:
            with open(options.json, "w", encoding="utf-8") as file:
                ran = {"kind": "experts", "device": torch.cuda.get_device_name() if cards else "cpu"}
                ran |= {"torch": torch.__version__, "transformers": importlib.metadata.version("transformers")}
                ran |= {"model": options.model}
                json.dump(ran | {"world": dist.get_world_size(), "command": " ".join(sys.argv), "rows": rows}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
