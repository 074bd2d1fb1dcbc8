"""Models that were made on the meta device: after `to_empty` and a load, what no file has is made anew, or named."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import config
from safetensors.torch import save_file
from torch import Tensor, nn

from layoutc.checkpoint import load_safetensors, quantize_as_stored

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "use_cache": False}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def configs(name: str) -> Any:
    import transformers

    if name == "llama3":
        scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
        scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        return transformers.LlamaConfig(**SIZES, **HEADS, rope_parameters=scaled)
    if name == "gemma3":  # two kinds of frequencies, and a factor of embeddings
        return transformers.Gemma3TextConfig(**SIZES, **HEADS, layer_types=["full_attention"])
    return transformers.CLIPTextConfig(  # numbers of positions
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )


def model_of(name: str) -> Any:
    from transformers import AutoModelForCausalLM, CLIPTextModel

    made = CLIPTextModel if name == "clip" else AutoModelForCausalLM
    return (made._from_config if name == "clip" else made.from_config)(configs(name), dtype=torch.bfloat16)


def rubbish(model: nn.Module) -> None:
    """What `to_empty` may leave."""
    for value in (*model.parameters(), *model.buffers()):
        value.detach().fill_(77 if not value.is_floating_point() else float("nan"))


@pytest.mark.parametrize("name", ["llama3", "gemma3", "clip"])
def test_a_model_of_transformers_is_what_its_own_loader_makes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = model_of(name).eval()
    theirs.save_pretrained(tmp_path)
    theirs = type(theirs).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    with torch.device("meta"):
        model = model_of(name)
    model.to_empty(device="cpu").eval()
    model.tie_weights()  # which to_empty undoes
    rubbish(model)
    done = load_safetensors(model, tmp_path)
    assert done.missing == ()
    wanted, found = dict(theirs.named_buffers()), dict(model.named_buffers())
    assert wanted.keys() == found.keys()
    assert all(torch.equal(value, found[key]) for key, value in wanted.items())
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in theirs.state_dict().items())
    assert not any(hasattr(one, "_is_hf_initialized") for one in model.parameters())
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens)[0], theirs(tokens)[0])


def test_weights_that_are_quantized_are_left_alone(tmp_path: Path) -> None:
    """A folder of FP8, as the page on files shows it; and the next load too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    source = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    tensors = dict(source.state_dict())
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        rows, columns = (-(-size // 128) for size in tensors[key].shape)
        tensors[key] = tensors[key].clamp(-1, 1).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = torch.full((rows, columns), 0.5)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}'
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    quantize_as_stored(model, tmp_path)
    model.to_empty(device="cpu")
    for _ in range(2):
        for buffer in model.buffers():
            buffer.fill_(float("nan"))
        assert load_safetensors(model, tmp_path).missing == ()
        assert torch.equal(model.model.rotary_emb.inv_freq, source.model.rotary_emb.inv_freq)
        held: Any = model.model.layers[0].self_attn.q_proj.weight
        wanted = tensors["model.layers.0.self_attn.q_proj.weight"].float() * 0.5
        assert torch.equal(held.dequantize(torch.float32), wanted)


class Rotary(nn.Module):
    """A model of one's own, whose frequencies no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.ones(4), persistent=False)
        self.register_buffer("nothing", None, persistent=False)
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Nobody runs it."""
        return x


def test_buffers_of_other_models_are_named(tmp_path: Path) -> None:
    save_file({"rope.layer.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.ModuleDict({"rope": Rotary()})
    assert load_safetensors(model.to_empty(device="cpu"), tmp_path) == (("rope.frequencies",), ())
