"""Configs that `architectures.yaml` lacks, as the installed transformers builds them: beside its own modules."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from layoutc.models import forwards, installed, read
from layoutc.models.weights import Model, ModelError, full_name

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: pip install 'layoutc[integrations]'"
)
TEXT: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 130},
    **{"num_key_value_heads": 2, "head_dim": 16},
}
ROUTED = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
ROUTED |= {"moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_ssm": 128}
SEEN = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "depth": 2}
SEEN |= {"num_heads": 4, "out_hidden_size": 64, "image_size": 32, "patch_size": 16}
# model_type -> the class that published configs name, and sizes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4_text": ("Llama4ForCausalLM", {**TEXT, **ROUTED, "intermediate_size_mlp": 96}),
    "llama4": ("Llama4ForConditionalGeneration", {"text_config": {**TEXT, **ROUTED, "intermediate_size_mlp": 96}}),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "hidden_size": 512, "head_dim": 128},
            "vision_config": {**SEEN, "out_hidden_size": 512},
        },
    ),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", {"text_config": TEXT, "vision_config": SEEN}),
    "qwen3_next": ("Qwen3NextForCausalLM", {**TEXT, **ROUTED, "shared_expert_intermediate_size": 32}),
    "mistral3": ("Mistral3ForConditionalGeneration", {"text_config": {"model_type": "mistral", **TEXT}}),
    "ministral3": ("Ministral3ForCausalLM", TEXT),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**TEXT, **ROUTED, **LATENT, "head_dim": 4}),
    "glm4_moe": ("Glm4MoeForCausalLM", {**TEXT, **ROUTED}),
    "gemma3": ("Gemma3ForConditionalGeneration", {"text_config": {**TEXT, "sliding_window": 32}}),
    "phi3": ("Phi3ForCausalLM", {**TEXT, "pad_token_id": 1}),
    "olmo2": ("Olmo2ForCausalLM", TEXT),
    "olmo3": ("Olmo3ForCausalLM", TEXT),
    "granite": ("GraniteForCausalLM", TEXT),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {**TEXT, **ROUTED, **STATES, "layer_types": ["mamba", "attention"] * 2},
    ),
    "falcon_h1": ("FalconH1ForCausalLM", {**TEXT, **STATES}),
    "bamba": ("BambaForCausalLM", {**TEXT, **STATES, "attn_layer_indices": [1, 3]}),
    "minimax": ("MiniMaxForCausalLM", {**TEXT, **ROUTED, "layer_types": ["full_attention", "linear_attention"] * 2}),
    "ernie4_5": ("Ernie4_5ForCausalLM", TEXT),
    "smollm3": ("SmolLM3ForCausalLM", {**TEXT, "pad_token_id": 1}),
    "cohere2": ("Cohere2ForCausalLM", TEXT),
    "starcoder2": ("Starcoder2ForCausalLM", TEXT),
    "whisper": ("WhisperForConditionalGeneration", {"d_model": 72, "encoder_layers": 3, "decoder_layers": 3}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 64, "num_layers": 3, "vocab_size": 130}),
    "bert": ("BertForMaskedLM", {**TEXT, "num_hidden_layers": 3}),
    "vit": ("ViTForImageClassification", {**SEEN, "num_hidden_layers": 3}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 130}),
    "llama": ("LlamaForSequenceClassification", TEXT),
}


def config_of(kind: str) -> dict[str, Any]:
    named, fields = CASES[kind]
    return {"model_type": kind, "architectures": [named], **fields}


def built(kind: str) -> Any:
    import transformers

    named, fields = CASES[kind]
    with torch.device("meta"):
        return getattr(transformers, named)(transformers.AutoConfig.for_model(kind, **fields))


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", CASES)
def test_weights_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """Names, ties, shapes, what is an nn.Linear, what the blocks are; and activations of each block are counted."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(kind)))
    model, theirs = read.read(str(path)), built(kind)
    named = {}
    for layer in model.all_layers:
        for weight in layer.weights:
            named |= dict.fromkeys((full_name(layer, weight), *weight.tied), weight)
    params = dict(theirs.named_parameters(remove_duplicate=False))
    assert {name: weight.shape for name, weight in named.items()} == {
        name: tuple(p.shape) for name, p in params.items()
    }
    assert model.elements == theirs.num_parameters()
    linear = {f"{name}.weight" for name, one in theirs.named_modules() if isinstance(one, torch.nn.Linear)}
    assert linear == {name for name, weight in named.items() if weight.kind == "linear"} | (
        linear & {name for weight in named.values() if weight.kind == "embedding" for name in weight.tied}
    )
    routed = [weight for weight in named.values() if weight.kind == "experts"]
    assert {weight.share for weight in routed} <= {2 / 8, 1 / 8}
    blocks = [name for name, one in theirs.named_modules() if type(one).__name__ in theirs._no_split_modules]
    assert {layer.name for layer in model.layers} == {name for name in blocks if name.rpartition(".")[2].isdigit()}
    of_text = [layer for layer in model.layers if "vision" not in layer.name and "visual" not in layer.name]
    assert all(layer.saved is not None and layer.saved.eager >= layer.saved.compiled > 0 for layer in of_text)


@pytest.mark.parametrize("kind", ["olmo2", "granite", "ernie4_5"])
def test_activations_are_what_autograd_saves(kind: str) -> None:
    """Of a model with values, as called: all storages that forward leaves, of one layer more, to the byte."""
    import transformers

    counted = []
    for layers in (2, 3):
        made = transformers.AutoConfig.for_model(kind, **{**TEXT, "num_hidden_layers": layers, "use_cache": False})
        own = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).train()
        plain = {one.untyped_storage().data_ptr() for one in (*own.parameters(), *own.buffers())}
        saved: dict[int, torch.Tensor] = {}

        def keep(one: torch.Tensor, saved: dict[int, torch.Tensor] = saved) -> torch.Tensor:
            saved[one.untyped_storage().data_ptr()] = one
            return one

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            out = own(input_ids=torch.arange(64)[None])
        counted.append(sum(one.untyped_storage().nbytes() for at, one in saved.items() if at not in plain))
        del out
    found = forwards.counted(built(kind), [f"model.layers.{at}" for at in range(4)], 64)
    assert found["model.layers.3"].eager == counted[1] - counted[0]


def refused(content: dict[str, Any], folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError) as error:
        read.read(str(path))
    return str(error.value)


def test_without_transformers_what_would_work_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted by a table that is of other models."""
    monkeypatch.setattr(installed, "knows", lambda kind: False)
    for kind in ("olmo2", "llama"):
        said = refused(config_of(kind), tmp_path)
        assert "whose weights are not known" in said
        assert "pip install -U transformers" in said
        assert "module:factory" in said
    assert "is of LlamaForSequenceClassification" in refused(config_of("llama"), tmp_path)


def test_what_transformers_can_not_build_is_said(tmp_path: Path) -> None:
    assert "transformers" in refused({"model_type": "olmo2", "hidden_size": "wide"}, tmp_path)
    said = refused({"model_type": "olmo2", "text_config": {"num_hidden_layers": 10**9}}, tmp_path)
    assert "num_hidden_layers is 1000000000, and must be at most 10,000" in said
    assert "has the model_type 'my_model'" in refused({"model_type": "my_model"}, tmp_path)


def test_code_that_a_config_names_is_not_run(tmp_path: Path) -> None:
    named = {**config_of("olmo2"), "auto_map": {"AutoModelForCausalLM": "somebody/model--modeling.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(named))
    model: Model = read.read(str(tmp_path))
    assert "Olmo2ForCausalLM" in model.notes[0]
