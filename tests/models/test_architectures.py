"""`architectures.yaml` against transformers' own modules on the meta device: every parameter, its shape, its kind."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from layoutc.models import config, forwards, modules
from layoutc.models.weights import Model, full_name

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: pip install 'layoutc[integrations]'"
)
DENSE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 130,
}
MOE = {"num_local_experts": 6, "num_experts_per_tok": 2}
LATENT = {
    **{"moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    **{
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
    },
}
# Fields that configs leave out have the defaults of transformers' classes, unless a smaller model needs others.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "llama, no groups": ("llama", {}),
    "llama, biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, heads of their own size": ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "head_dim": None}),
    "mistral, defaults": ("mistral", {"num_attention_heads": 8}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen2, defaults, tied": ("qwen2", {"num_attention_heads": 32, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2}),
    "qwen3, biases": ("qwen3", {"num_key_value_heads": 2, "head_dim": 24, "attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe, defaults": ("qwen3_moe", {}),
    "qwen3_moe, some layers": (
        "qwen3_moe",
        {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_experts": 4, "head_dim": 24},
    ),
    "mixtral": ("mixtral", {**MOE, "num_key_value_heads": 2}),
    "mixtral, defaults": ("mixtral", {"num_attention_heads": 8}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 24, "n_shared_experts": 2}),
    "deepseek_v3, queries as they are": ("deepseek_v3", {**LATENT, "q_lora_rank": None, "attention_bias": True}),
    "deepseek_v3, defaults": ("deepseek_v3", {"num_hidden_layers": 5, "num_key_value_heads": 4}),
    "kimi_k2": ("kimi_k2", {**LATENT, "q_lora_rank": 24, "n_group": 1}),
    "gpt_oss": ("gpt_oss", {**MOE, "num_key_value_heads": 2, "head_dim": 16}),
    "gpt_oss, defaults": ("gpt_oss", {"num_attention_heads": 8}),
    "gpt_oss, no biases": ("gpt_oss", {**MOE, "num_key_value_heads": 2, "attention_bias": False}),
    "gemma": ("gemma", {"num_key_value_heads": 2, "head_dim": 24}),
    "gemma, defaults": ("gemma", {"num_attention_heads": 16}),
    "gemma, not tied": ("gemma", {"num_key_value_heads": 2, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma2": ("gemma2", {"num_key_value_heads": 2, "head_dim": 24}),
    "gemma2, defaults": ("gemma2", {}),
    "gemma3_text": ("gemma3_text", {"num_key_value_heads": 2, "head_dim": 24}),
    "gemma3_text, defaults": ("gemma3_text", {"tie_word_embeddings": False}),
}
BUILDING: dict[str, Any] = {}
# What transformers calls architectures whose own code is not part of it.
CALLED = {"kimi_k2": "deepseek_v3"}


def build() -> Any:
    """What `modules.read` calls."""
    import transformers

    kind, fields = CALLED.get(BUILDING["kind"], BUILDING["kind"]), BUILDING["fields"]
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **fields))


def described(model: Model) -> dict[str, tuple[tuple[int, ...], str, tuple[str, ...]]]:
    """Name -> shape, kind and ties."""
    return {
        full_name(layer, weight): (weight.shape, weight.kind, weight.tied)
        for layer in model.all_layers
        for weight in layer.weights
    }


def of_transformers(kind: str, fields: dict[str, Any]) -> Model:
    BUILDING.update(kind=kind, fields={key: value for key, value in fields.items() if key != "model_type"})
    return modules.read(f"{__name__}:build")


@needs_transformers
@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_transformers(case: str) -> None:
    kind, fields = CASES[case]
    stated = config.read({"model_type": kind, **DENSE, **fields}, case)
    theirs = of_transformers(kind, {**DENSE, **fields})
    assert described(stated) == described(theirs)
    assert [layer.name for layer in stated.layers] == [layer.name for layer in theirs.layers]


@needs_transformers
@pytest.mark.parametrize("case", CASES)
def test_configs_that_transformers_saves_have_the_parameters_that_they_were_made_with(case: str) -> None:
    """transformers renames fields: Qwen3-MoE's num_experts is saved as num_local_experts."""
    import transformers

    kind, fields = CASES[case]
    saved = json.loads(transformers.AutoConfig.for_model(CALLED.get(kind, kind), **DENSE | fields).to_json_string())
    assert described(config.read(saved, case)) == described(config.read({"model_type": kind, **DENSE, **fields}, case))


@needs_transformers
@pytest.mark.parametrize("kind", [kind for kind in config.known() if kind not in CALLED])
def test_activations_are_what_transformers_saves(kind: str) -> None:
    """Of each layer after the first, from one token to the next, to the byte."""
    fields: dict[str, Any] = {**DENSE, "num_hidden_layers": 3}
    if kind == "deepseek_v3":
        fields |= {**LATENT, "q_lora_rank": 24, "n_group": 4, "topk_group": 2}
    else:
        fields |= {"num_key_value_heads": 2, "head_dim": 16}
    if kind in ("mixtral", "gpt_oss"):
        fields |= MOE
    if kind == "qwen3_moe":
        fields |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    stated = config.read({"model_type": kind, **fields}, kind)
    made = []
    for tokens in (64, 128):
        BUILDING.update(kind=kind, fields=fields)
        with torch.device("meta"):
            theirs = build()
        made.append(forwards.counted(theirs, [f"model.layers.{at}" for at in range(3)], tokens))
    for layer in stated.layers[1:]:
        few, many = (one[layer.name] for one in made)
        assert layer.saved is not None
        assert layer.saved.eager == (many.eager - few.eager) / 64
        assert layer.attention == many.attention


def test_every_architecture_has_a_case() -> None:
    assert {kind for kind, _ in CASES.values()} == set(config.known())


@needs_transformers
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_that_are_kept_have_the_parameters_of_transformers(path: Path) -> None:
    """On the meta device: nothing is allocated."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in fields.items() if key not in ("architectures", "torch_dtype")}
    stated, theirs = config.read(fields, path.name), of_transformers(fields["model_type"], kept)
    assert described(stated) == described(theirs)


@pytest.mark.parametrize(
    ("stem", "elements"),
    [
        # Published: 8.03e9, 70.6e9, 405.9e9; 671.0e9; 20.9e9 and 116.8e9.
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("deepseek-v3", 671_026_404_352),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_totals_are_the_published_ones(stem: str, elements: int) -> None:
    path = Path(__file__).parent / "configs" / f"{stem}.json"
    assert config.read(json.loads(path.read_text(encoding="utf-8")), stem).elements == elements


def test_experts_multiply_the_tokens_that_are_sent_to_them() -> None:
    path = Path(__file__).parent / "configs" / "deepseek-v3.json"
    model = config.read(json.loads(path.read_text(encoding="utf-8")), "v3")
    active = sum(w.elements * w.share for layer in model.all_layers for w in layer.weights)
    assert active == pytest.approx(36.6e9, rel=0.01)  # of 671e9, 37e9 are active for a token; the embedding is not
    assert {w.share for layer in model.layers for w in layer.weights if w.kind == "experts"} == {8 / 256}
