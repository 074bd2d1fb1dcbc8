"""Experts under the names of released files: which names transformers gives them, and their bytes and values."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from sharding_of_layers import shard_layers
from test_files_of_others import same, tensors_in
from torch import Tensor

import layoutc
from layoutc import checkpoint
from layoutc.checkpoint.bindings.names import named_parts
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: pip install 'layoutc[integrations]'"
)
Tensors = dict[str, Tensor]
# Sizes of a tiny model, under the names that configs give them.
SIZES = {
    **{"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_k": 2, "moe_topk": 2},
    **{"layer_types": ["full_attention"] * 2, "layers_block_type": ["moe", "full_attention"], "use_cache": False},
    **{"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64},
    **{"shared_expert_intermediate_size": 128, "moe_shared_expert_intermediate_size": 128, "pad_token_id": 0},
    **{"attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 1, "expert_layer_offset": 0},
    **{"interleave_moe_layer_step": 1, "intermediate_size_mlp": 256},
}
OF_MODELS = (
    *("mixtral", "minimax", "minimax_m2", "phimoe", "lfm2_moe", "jamba", "nemotron_h", "qwen2_moe", "qwen3_moe"),
    *("qwen3_next", "deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe", "olmoe", "flex_olmo"),
    *("exaone_moe", "solar_open", "afmoe"),
)


def model_of(kind: str, device: str = "cpu") -> Any:
    """A tiny model in bf16."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    of_kind = CONFIG_MAPPING[kind]
    known = {*of_kind().to_dict(), *of_kind.attribute_map} - ({"layer_types"} if kind == "nemotron_h" else set())
    config = of_kind(**{name: size for name, size in SIZES.items() if name in known})
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(torch.bfloat16)


@pytest.mark.parametrize("kind", OF_MODELS)
def test_names_are_those_that_transformers_writes(kind: str) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    from layoutc.integrations.transformers import names_in_files

    model = model_of(kind, "meta")
    state, rename = dict(model.state_dict()), names_in_files(model)
    ours = [part for name, one in state.items() for part in named_parts(rename(name), one.shape[0])]
    assert sorted(ours) == sorted(revert_weight_conversion(model, state))
    assert any(".experts.3." in name for name in ours)


def released(kind: str, path: Path, files: str, chosen: Callable[[str], bool]) -> tuple[Any, Path]:
    """A model, and its folder under transformers' names with some of its matrices quantized."""
    model_of(kind).save_pretrained(path / "plain")
    names = [name for name, one in tensors_in(path / "plain").items() if one.dim() == 2 and chosen(name)]
    checkpoint.convert_safetensors(path / "plain", path / "release", files=files, match=names)
    return model_of(kind, "meta").to_empty(device="cpu"), path / "release"


def values_of(model: Any) -> Tensors:
    """All values in fp32."""
    return {
        name: one.dequantize(torch.float32) if isinstance(one, QuantizedTensor) else one.float()
        for name, one in model.state_dict().items()
    }


def of_transformers(path: Path) -> Tensors:
    """The values that transformers reads, in fp32."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    how = FineGrainedFP8Config(dequantize=True)
    return values_of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=how))


@pytest.mark.parametrize("kind", ["mixtral", "minimax_m2", "lfm2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_names_that_save_pretrained_does_not_write_are_named(kind: str, tmp_path: Path) -> None:
    from layoutc.integrations.transformers import names_in_files

    model, own = model_of(kind), " have the model's own names"
    model.save_pretrained(tmp_path / "theirs")
    theirs = tensors_in(tmp_path / "theirs").keys()
    for form in ("dtype", "files") if kind != "gpt_oss" else ("dtype",):
        how: dict[str, Any] = {"dtype": torch.bfloat16} if form == "dtype" else {"files": "deepseek"}
        if form == "files":
            layoutc.quantize_(model, "fp8_block", param_filter=["*.experts.gate_up_proj", "*.experts.down_proj"])
        for rename in (None, names_in_files(model)):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                checkpoint.export_safetensors(model, tmp_path / "out", rename=rename, **how)
            experts = {name for name in tensors_in(tmp_path / "out") if ".experts." in name and "_scale" not in name}
            shutil.rmtree(tmp_path / "out")
            assert any(own in str(one.message) for one in said) == (not experts <= theirs), (form, rename)
    if kind == "mixtral":
        with pytest.warns(UserWarning, match=rf"the stream: .*{own}.* rename=names_in_files\(model\)"):
            assert list(checkpoint.stream_export(model, files="deepseek"))


@pytest.mark.parametrize("kind", ["mixtral", "nemotron_h"])
def test_a_release_loads_trains_and_is_written_back(kind: str, tmp_path: Path) -> None:
    from layoutc.integrations.transformers import names_in_files

    model, path = released(kind, tmp_path, "fp8_block/deepseek", lambda name: ".experts." in name or "_proj" in name)
    rename = names_in_files(model, path)
    stacks = [name for name, one in model.named_parameters() if one.dim() == 3]
    assert checkpoint.quantize_as_stored(model, path, rename=rename).keys() >= {*stacks}
    assert checkpoint.load_safetensors(model, path, rename=rename).unexpected == ()
    assert same(values_of(model), of_transformers(path))

    out = tmp_path / "out"
    checkpoint.export_safetensors(model, out, files="deepseek", rename=rename, source=path)
    assert same(tensors_in(out), tensors_in(path))
    assert same(dict(checkpoint.stream_export(model, files="deepseek", rename=names_in_files(model))), tensors_in(path))

    tokens = torch.randint(1, 128, (2, 16))
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    checkpoint.export_safetensors(model, tmp_path / "tuned", files="deepseek", rename=rename, source=path)
    assert not same(tensors_in(tmp_path / "tuned"), tensors_in(path))
    assert same(values_of(model), of_transformers(tmp_path / "tuned"))


def test_plain_experts_beside_quantized_layers_are_stacked_and_come_back(tmp_path: Path) -> None:
    from layoutc.integrations.transformers import names_in_files

    model, path = released("mixtral", tmp_path, "fp8_block/deepseek", lambda name: "_proj" in name)
    rename = names_in_files(model, path)
    assert len(checkpoint.quantize_as_stored(model, path, rename=rename)) == 8
    checkpoint.load_safetensors(model, path, rename=rename)
    assert same(values_of(model), of_transformers(path))
    checkpoint.export_safetensors(model, tmp_path / "out", files="deepseek", rename=rename)
    assert same(tensors_in(tmp_path / "out"), tensors_in(path))
    assert same(values_of(model), of_transformers(tmp_path / "out"))
    assert same(dict(checkpoint.stream_export(model, files="deepseek", rename=rename)), tensors_in(path))
    checkpoint.export_safetensors(model, tmp_path / "plain again", dtype=torch.bfloat16, rename=rename)
    assert tensors_in(tmp_path / "plain again").keys() == tensors_in(tmp_path / "plain").keys()


def exports(path: str, out: str) -> None:
    """On ranks: load sharded, and export."""
    from layoutc.integrations.transformers import names_in_files

    model = model_of("mixtral", "meta")
    rename = names_in_files(model, path)
    checkpoint.quantize_as_stored(model, path, rename=rename)
    shard_layers(model, model.model.layers)
    checkpoint.load_safetensors(model.to_empty(device="cpu"), path, rename=rename)
    checkpoint.export_safetensors(model, out, files="deepseek", rename=rename, source=path)


def test_ranks_load_their_slices_of_plain_and_of_quantized_parts(three: Ranks, tmp_path: Path) -> None:
    _, path = released("mixtral", tmp_path, "fp8_block/deepseek", lambda name: ".1.block_sparse_moe.experts." in name)
    three.run(exports, str(path), str(tmp_path / "out"))
    assert same(tensors_in(tmp_path / "out"), tensors_in(path))


def test_files_under_other_names_are_refused_with_what_names_them(tmp_path: Path) -> None:
    model, path = released("mixtral", tmp_path, "fp8_block/deepseek", lambda name: ".experts." in name)
    call = r"Pass rename=names_in_files\(model, folder\), of layoutc\.integrations\.transformers"
    has = r"has model\.layers\.0\.block_sparse_moe\.experts\.0\.w1\.weight\."
    with pytest.raises(LayoutError, match=f"{has} {call}"):
        checkpoint.quantize_as_stored(model, path)
    layoutc.quantize_(model, "fp8_block", param_filter=["*.experts.*"])
    with pytest.raises(LayoutError, match=rf"gate_up_proj is not in the files; they have .*\.0\.w1\.weight\. {call}"):
        checkpoint.load_safetensors(model, path)


def test_stacks_of_transposed_matrices_are_refused_and_linear_layers_load(tmp_path: Path) -> None:
    """Llama 4's experts, which files in FP8 hold one by one, as linear layers have them."""
    from safetensors.torch import save_file
    from transformers.quantizers.base import SequentialLlama4TextExperts

    model_of("llama4_text").save_pretrained(tmp_path / "plain")
    tensors = tensors_in(tmp_path / "plain")
    for experts in {name.rpartition(".")[0] for name in tensors if name.endswith("experts.gate_up_proj")}:
        gate_up, down = (tensors.pop(f"{experts}.{name}").transpose(1, 2) for name in ("gate_up_proj", "down_proj"))
        for expert, (both, one) in enumerate(zip(gate_up, down, strict=True)):
            parts = zip(("gate_proj", "up_proj", "down_proj"), (*both.chunk(2), one), strict=True)
            tensors |= {f"{experts}.{expert}.{name}.weight": part.contiguous() for name, part in parts}
    save_file(tensors, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    path, match = tmp_path / "release", ["*_proj.weight"]
    checkpoint.convert_safetensors(tmp_path / "plain", path, files="fp8_rowwise/compressed_tensors", match=match)

    model = model_of("llama4_text")
    transposed = r"is a matrix of \[256, 128\], whose transpose .*SequentialLlama4TextExperts\(config\)"
    with pytest.raises(LayoutError, match=transposed):
        checkpoint.quantize_as_stored(model, path)
    for layer in model.model.layers:
        layer.feed_forward.experts = SequentialLlama4TextExperts(model.config).to(torch.bfloat16)
    checkpoint.quantize_as_stored(model, path)
    checkpoint.load_safetensors(model, path)
    checkpoint.export_safetensors(model, tmp_path / "out", files="compressed_tensors", source=path)
    assert same(tensors_in(tmp_path / "out"), tensors_in(path))
    values = {name: one.bfloat16() for name, one in values_of(model).items()}
    name = "model.layers.0.feed_forward.experts.3.down_proj.weight"
    scale, codes = (tensors_in(path)[name + end].float() for end in ("_scale", ""))
    assert torch.equal(values[name], (codes * scale).bfloat16())
