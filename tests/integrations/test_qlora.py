"""QLoRA under FSDP2: a base that bitsandbytes quantized, with PEFT's adapters; its own weights beside it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import test_peft
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of
from storages import live_bytes, look_at_what_comes
from test_frozen_bases import kept_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import layoutc
from layoutc.budget.choice import Picks
from layoutc.checkpoint import load_safetensors, quantize_as_stored
from layoutc.models.weights import Weight, in_layers

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}: pip install 'layoutc[integrations,formats]'")
    for name in ("transformers", "peft", "bitsandbytes")
]

NF4 = {"blocksize": 64, "quant_type": "nf4"}
doubly = pytest.mark.parametrize("double", [False, True], ids=["", "double quantization"])


def plain() -> Any:
    """A tiny Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 320, "vocab_size": 96, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, use_cache=False, **sizes))


def write(folder: Path, double: bool = False) -> None:
    """The model's files with linear layers as bitsandbytes quantizes and stores them; double: their scales as well."""
    from bitsandbytes.functional import quantize_4bit
    from safetensors.torch import save_file
    from transformers import BitsAndBytesConfig

    model, tensors = plain(), dict[str, Tensor]()
    for name, value in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        tensors[name], state = quantize_4bit(value, **NF4, compress_statistics=double)
        tensors |= {f"{name}.{key}": one for key, one in state.as_dict(packed=True).items()}
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=double,
    )
    model.config.quantization_config = how.to_dict()
    model.config.save_pretrained(folder)


def of_layoutc(folder: str) -> Any:
    """The base out of these files, as layoutc holds it."""
    model = plain().requires_grad_(False)
    assert len(quantize_as_stored(model, folder)) == 14
    assert load_safetensors(model, folder) == ((), ())
    return model


def of_bitsandbytes(folder: str) -> Any:
    """The same by transformers and bitsandbytes."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=torch.float32).requires_grad_(False)


BASES = {"layoutc": of_layoutc, "bitsandbytes": of_bitsandbytes}


def adapted(whose: str, folder: str) -> Any:
    """With PEFT's adapters on all linear layers of the blocks."""
    from peft import LoraConfig, get_peft_model

    model = BASES[whose](folder)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return model.train()  # in eval mode, as transformers gives it, bitsandbytes packs weights anew on CPUs


def steps(model: nn.Module) -> list[float]:
    """Losses of some steps of AdamW on the adapters."""
    return test_peft.steps(model, torch.optim.AdamW([param for _, param in test_peft.trains(model)], lr=1e-2))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """What this rank has of plain tensors."""
    return sum((one._local_tensor if isinstance(one, DTensor) else one).nbytes for one in tensors)


def sharded(model: Any) -> Any:
    """Each block, and the root."""
    mesh = mesh_of(dist.get_world_size())
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trains(folder: str) -> tuple[list[float], int, int]:
    """(losses, which are those of one process; bytes of the base that this rank holds, and planned ones)."""
    expected = steps(adapted("layoutc", folder))
    weights = [
        Weight(name, tuple(param.shape), "norm" if "norm" in name else "linear", trains=param.requires_grad)
        for name, param in of_layoutc(folder).named_parameters()
    ]
    kept = kept_of("nf4_bitsandbytes", in_layers("model", "", weights), Picks(only=("*_proj.weight",)))
    mesh_of(dist.get_world_size())  # which has tensors of its own
    look_at_what_comes()
    before = live_bytes()
    model = sharded(adapted("layoutc", folder))
    with layoutc.strict():
        losses = steps(model)
    assert losses == expected
    assert losses[-1] < losses[1]
    assert all(param.grad is None for param in model.parameters() if not param.requires_grad)
    rest = before + bytes_of([*(param for _, param in test_peft.trains(model)), *model.buffers()])
    return losses, live_bytes(rest + kept) - rest, kept


@doubly
def test_adapters_train_as_in_one_process_and_ranks_share_the_base(two: Ranks, tmp_path: Path, double: bool) -> None:
    """To the bit; what a rank holds of the base is what the plan says, codes and scales, to the byte."""
    write(tmp_path, double)
    answers = two.run(trains, str(tmp_path))
    assert answers[0][0] == answers[1][0]
    assert [held for _, held, _ in answers] == [kept for _, _, kept in answers]


@doubly
def test_one_process_reads_and_trains_as_bitsandbytes_does(tmp_path: Path, double: bool) -> None:
    """Values and losses, to the bit."""
    from bitsandbytes.functional import dequantize_4bit

    write(tmp_path, double)
    ours, theirs = of_layoutc(str(tmp_path)), of_bitsandbytes(str(tmp_path))
    weights = [(name, module.weight) for name, module in theirs.named_modules() if name.endswith("_proj")]
    assert len(weights) == 14
    for name, weight in weights:
        values = dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(ours.get_parameter(f"{name}.weight").dequantize(), values), name
    assert steps(adapted("layoutc", str(tmp_path))) == steps(adapted("bitsandbytes", str(tmp_path)))


def theirs(folder: str) -> tuple[list[float], int]:
    """By bitsandbytes alone: losses, which are those of one process; bytes of all scales that this rank holds."""
    expected, model = steps(adapted("bitsandbytes", folder)), sharded(adapted("bitsandbytes", folder))
    losses = steps(model)
    assert losses == expected
    states = {
        id(module.quant_state): module.quant_state for module in model.modules() if hasattr(module, "quant_state")
    }
    return losses, sum(state.absmax.nbytes for state in states.values())


def test_bitsandbytes_own_weights_train_too_and_keep_all_scales_on_each_rank(two: Ranks, tmp_path: Path) -> None:
    """To the same losses."""
    write(tmp_path)
    quantized = [param for name, param in plain().named_parameters() if name.endswith("_proj.weight")]
    scales = sum(4 * param.numel() // 64 for param in quantized)
    assert two.run(theirs, str(tmp_path)) == [(steps(adapted("layoutc", str(tmp_path))), scales)] * 2
