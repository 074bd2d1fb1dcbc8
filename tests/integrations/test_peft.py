"""LoRA on a frozen quantized base, by PEFT and by hand: trained as one process does, saved, loaded and merged."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Ranks
from models import make_uneven, my_share
from storages import live_bytes, look_at_what_comes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import layoutc
from layoutc.runtime.weight.tensor import QuantizedTensor

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}: pip install 'layoutc[integrations]'")
    for name in ("transformers", "peft")
]

STEPS = 10


def base(recipe: str) -> Any:
    """A tiny Llama that is frozen, its linear layers but the head in the recipe."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 96, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, use_cache=False, **sizes))
    make_uneven(model)
    model.requires_grad_(False)
    layoutc.quantize_(model, recipe, param_filter=["model.layers.*_proj.weight"])
    return model


class Adapted(nn.Module):
    """A layer with adapters of its own making."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, k) -> (n, m)."""
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


def adapted(recipe: str, how: str, seed: int = 1) -> Any:
    """The base with adapters on all of its quantized layers."""
    model = base(recipe)
    torch.manual_seed(seed)
    if how == "peft":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        return get_peft_model(model, config)
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(module, Adapted):
                setattr(module, name, Adapted(child))
    return model


def sharded(model: Any) -> Any:
    """Each layer, and the root."""
    for layer in (model.get_base_model() if hasattr(model, "get_base_model") else model).model.layers:
        fully_shard(layer)
    return fully_shard(model)


def trains(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The adapters."""
    return ((name, param) for name, param in model.named_parameters() if param.requires_grad)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, count: int = STEPS) -> list[float]:
    """Losses of some steps."""
    losses = []
    for step in range(first, first + count):
        ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(step % 2))
        loss = model(input_ids=ids, labels=ids).loss
        (loss * (my_share() if isinstance(model, FSDPModule) else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def whole(param: Tensor) -> Tensor:
    """All of a parameter."""
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach()


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that a rank needs: shards, as they are stored, and the state of what trains."""
    total = 0
    for param in model.parameters():
        local = param._local_tensor if isinstance(param, DTensor) else param
        planes = local.planes().values() if isinstance(local, QuantizedTensor) else [local]
        total += sum(plane.untyped_storage().nbytes() for plane in planes)
    states = [one for state in optimizer.state.values() for one in state.values()]
    locals_of = [one._local_tensor if isinstance(one, DTensor) else one for one in (*states, *model.buffers())]
    return total + sum(one.untyped_storage().nbytes() for one in locals_of)


def trains_as_one_process(recipe: str, how: str, on_gather: bool) -> float:
    """Losses and adapters, to the bit; the base stays as it was. Returns its bytes an element."""
    alone = adapted(recipe, how)
    expected = steps(alone, torch.optim.AdamW([param for _, param in trains(alone)], lr=1e-2))
    look_at_what_comes()
    before = live_bytes()
    model = sharded(adapted(recipe, how))
    if on_gather:
        layoutc.set_products_(model, "dequantize", dequantize="gather")
    optimizer = torch.optim.AdamW([param for _, param in trains(model)], lr=1e-2)
    with layoutc.strict():
        assert steps(model, optimizer) == expected
    assert expected[-1] < expected[1]
    needed = held(model, optimizer)
    rest = live_bytes(before + needed) - before - needed
    assert abs(rest) <= 4096, f"{rest} bytes more than the {needed} of shards and the optimizer's state"
    for (name, param), (_, one) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert torch.equal(whole(param), one.detach()), name
        assert param.grad is None
    weights = [p for p in model.parameters() if isinstance(p, DTensor) and isinstance(p._local_tensor, QuantizedTensor)]
    assert len(weights) == 14
    assert not any(weight._local_tensor.store.writes.initial or weight.requires_grad for weight in weights)
    nbytes = sum(plane.nbytes for w in weights for plane in whole(w).planes().values())
    return nbytes / sum(weight.numel() for weight in weights)


@pytest.mark.parametrize(
    ("recipe", "how", "on_gather"),
    [
        ("nvfp4", "peft", False),
        ("mxfp8", "by hand", False),
        ("mxfp8_frozen", "peft", False),
        ("nvfp4", "peft", True),
        ("fp8_block", "by hand", True),
    ],
)
def test_adapters_train_as_in_one_process_and_the_base_takes_its_codes_alone(
    two: Ranks, recipe: str, how: str, on_gather: bool
) -> None:
    """No masters, no gradients, no initial values; columnwise codes where the recipe has them alone."""
    at_most = {"fp8_block": 1.02, "mxfp8": 2.07, "mxfp8_frozen": 1.04, "nvfp4": 0.51}[recipe]
    for per_element in two.run(trains_as_one_process, recipe, how, on_gather):
        assert 0.5 <= per_element <= at_most


ADAPTERS = StateDictOptions(ignore_frozen_params=True)


def is_saved(recipe: str, how: str, folder: str) -> list[float]:
    """Adapters and their optimizer, without the base, in a checkpoint; steps after that are those of the run itself."""
    model, other = sharded(adapted(recipe, how)), sharded(adapted(recipe, how, seed=2))
    optimizers = [torch.optim.AdamW([param for _, param in trains(one)], lr=1e-2) for one in (model, other)]
    steps(model, optimizers[0], count=2)
    weights, moments = get_state_dict(model, optimizers[0], options=ADAPTERS)
    assert len(weights) == 28
    dcp.save({"adapters": weights, "optimizer": moments}, checkpoint_id=folder)
    weights, moments = get_state_dict(other, optimizers[1], options=ADAPTERS)
    dcp.load({"adapters": weights, "optimizer": moments}, checkpoint_id=folder)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_state_dict(other, optimizers[1], model_state_dict=weights, optim_state_dict=moments, options=options)
    after = steps(model, optimizers[0], 2, 2)
    assert steps(other, optimizers[1], 2, 2) == after
    if how == "peft":
        full = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
        state = get_model_state_dict(model, options=full)
        if dist.get_rank() == 0:
            model.save_pretrained(f"{folder}/peft", state_dict=state)
    return steps(model, optimizers[0], 4, 1)


@pytest.mark.parametrize("how", ["peft", "by hand"])
def test_adapters_are_saved_without_their_base_and_train_on(two: Ranks, tmp_path: Path, how: str) -> None:
    """PEFT's files too: they load onto a base in one process."""
    (loss, other) = two.run(is_saved, "mxfp8", how, str(tmp_path / "run"))
    assert loss == other
    files = sum(path.stat().st_size for path in (tmp_path / "run").glob("*.distcp"))
    numbers = sum(param.numel() for _, param in trains(adapted("mxfp8", how)))
    assert files < 3 * 4 * numbers + 28 * 2 * 3 * 4096
    if how == "peft":
        from peft import PeftModel

        model = PeftModel.from_pretrained(base("mxfp8"), tmp_path / "run" / "peft")
        ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(0))
        assert [float(model(input_ids=ids, labels=ids).loss.detach())] == loss


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "nvfp4"])
def test_merging_says_what_it_costs(recipe: str) -> None:
    """The bytes are those of the sum, quantized once; the error is that of these bytes."""
    from layoutc.integrations.peft import merge

    model = adapted(recipe, "peft")
    layers = {name: one for name, one in model.get_base_model().named_modules() if hasattr(one, "lora_A")}
    sums = {
        f"{name}.weight": one.get_base_layer().weight.dequantize() + one.get_delta_weight("default").detach()
        for name, one in layers.items()
    }
    merged, errors = merge(model)
    assert errors.keys() == sums.keys()
    assert len(errors) == 14
    for name, error in errors.items():
        weight, total = merged.get_parameter(name), sums[name]
        assert isinstance(weight, QuantizedTensor)
        assert torch.equal(weight, import_module(f"layoutc.recipes.{recipe}").quantize(total))
        expected = float((weight.dequantize() - total).norm() / total.norm())
        assert error == pytest.approx(expected, rel=1e-5)
    low, high = {"fp8_block": (0.02, 0.04), "mxfp8": (0.02, 0.04), "nvfp4": (0.06, 0.13)}[recipe]
    assert all(low < error < high for error in errors.values()), errors


@pytest.mark.parametrize("more", [{"use_dora": True}, {"lora_bias": True}])
def test_adapters_that_are_more_than_a_product_are_refused_and_nothing_is_merged(more: dict[str, bool]) -> None:
    """On quantized layers; on others PEFT merges them itself."""
    from peft import LoraConfig, get_peft_model

    from layoutc.integrations.peft import merge

    for targets in ("all-linear", ["o_proj"]):
        model = base("mxfp8")
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **more))
        kept = {name: param.detach().clone() for name, param in model.named_parameters()}
        with pytest.raises(
            ValueError, match="adapter default is more than a product of two matrices: keep it separate"
        ):
            merge(model)
        assert all(torch.equal(param.detach(), kept[name]) for name, param in model.named_parameters())
