"""Mixtral, Qwen3-MoE and gpt-oss of transformers: one call covers their linear layers and experts, FSDP2 sends what the
layout says, and they train as one process does, to the bit."""

from __future__ import annotations

import copy
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from models import gathers
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc.ints.sizes import cdiv

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: pip install 'layoutc[integrations]'"
)
STEPS = 3
EVERYTHING = ["*_proj.weight", "*experts.*_proj", "lm_head.weight"]
SIZES = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False},
}
KINDS: dict[str, dict[str, int]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "GptOss": {"num_local_experts": 4},
}


def built(kind: str, recipe: str) -> Any:
    """Two layers of four experts, nothing downloaded."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    layoutc.quantize_(model, recipe, param_filter=EVERYTHING)
    return model


def covered(model: Any) -> float:
    """The share of the elements of linear and expert weights that are quantized: of matrices that are no embedding."""
    matrices = [param for name, param in model.named_parameters() if param.dim() > 1 and "embed" not in name]
    quantized = [param for param in matrices if hasattr(param, "LAYOUT")]
    return sum(map(Tensor.numel, quantized)) / sum(map(Tensor.numel, matrices))


def planned(model: Any, world: int) -> int:
    """The bytes that a rank sends when all groups are gathered for forward."""
    total = 0
    for param in model.parameters():
        *rows, columns = param.shape
        if hasattr(param, "LAYOUT"):
            total += param.LAYOUT.gather(prod(rows), columns, world=world, which="forward").bytes_per_rank
        else:
            total += cdiv(param.shape[0], world) * prod(param.shape[1:]) * param.element_size()
    return total


def losses(model: Any) -> list[float]:
    """All ranks see the same texts, so that the mean of their gradients is the gradient."""
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    curve = []
    for step in range(STEPS):
        ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


def trains(kind: str, recipe: str, implementation: str = "grouped_mm") -> None:
    model = built(kind, recipe)
    model.set_experts_implementation(implementation)
    assert covered(model) >= 0.95, layoutc.coverage(model)
    expected, bytes_sent = losses(copy.deepcopy(model)), planned(model, dist.get_world_size())
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with gathers() as sent, torch.no_grad():
        model(input_ids=ids)
    assert sum(sent) == bytes_sent
    model.reshard()
    assert losses(model) == expected


@pytest.mark.parametrize(("kind", "recipe"), [*zip(KINDS, ("fp8_block", "nvfp4", "fp8_block", "nvfp4"), strict=False)])
def test_they_are_covered_travel_as_planned_and_train_as_one_process(two: Ranks, kind: str, recipe: str) -> None:
    two.run(trains, kind, recipe)


@pytest.mark.parametrize(("kind", "recipe"), [("Qwen3Moe", "nvfp4"), ("Mixtral", "fp8_block"), ("GptOss", "fp8_block")])
def test_our_implementation_gives_what_theirs_gives(kind: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, to the bit, of three steps with two experts a token, where no sum over experts has an order; gpt-oss,
    which has biases, is transformers' own. An expert's tokens are in their order here, and theirs in any: on CPUs,
    torch.sort keeps it if it is asked to."""
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))
    import layoutc.integrations.transformers_experts  # noqa: F401

    curves = []
    for implementation in ("layoutc", "grouped_mm"):
        torch.manual_seed(0)
        model = built(kind, recipe)
        model.set_experts_implementation(implementation)
        curves.append(losses(model))
    assert curves[0] == curves[1]


def trains_by_ours(kind: str, recipe: str) -> None:
    import layoutc.integrations.transformers_experts  # noqa: F401

    trains(kind, recipe, "layoutc")


def test_our_implementation_trains_on_ranks_as_one_process_does(two: Ranks) -> None:
    two.run(trains_by_ours, "Qwen3Moe", "nvfp4")
