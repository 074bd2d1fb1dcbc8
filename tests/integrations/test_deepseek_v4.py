"""DeepSeek-V4's files: two recipes in one folder, under names of the release's own; loaded, sharded, and written back.

The folder is written with numpy from the published layout: dense weights in E4M3 with an E8M0 scale for 128x128,
experts in pairs of E2M1 with one for 1x32, both as `scale` beside `weight`. transformers reads what is compared.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from sharding_of_layers import shard_layers
from test_files_of_others import same, tensors_in
from torch import Tensor

import layoutc
from layoutc.checkpoint import (
    convert_safetensors,
    export_safetensors,
    inspect,
    load_safetensors,
    quantize_as_stored,
    stream_export,
)
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: pip install 'layoutc[integrations]'"
)
Tensors = dict[str, Tensor]
EXPERTS, DENSE = "mxfp4", "fp8_block_e8m0"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# The layers of attention and the shared expert that the release has in FP8, by their last names.
IN_FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")


def model_of(inner: int = 96) -> Any:
    """A tiny V4 in bf16, whose sizes are no multiples of 128. inner: the columns that experts have in between."""
    from transformers import AutoModelForCausalLM, DeepseekV4Config

    config = DeepseekV4Config(
        **{"vocab_size": 96, "hidden_size": 256, "moe_intermediate_size": inner, "num_hidden_layers": 2, "hc_mult": 2},
        **{"num_attention_heads": 4, "head_dim": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "sliding_window": 16},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 64, "use_cache": False},
        **{"index_n_heads": 2, "index_head_dim": 32, "index_topk": 4, "mlp_layer_types": ["moe", "moe"]},
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
    )
    torch.manual_seed(0)
    # From 5.24 on transformers keeps norms and others in fp32, beside bf16 in modules that FSDP2 can't part.
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(torch.bfloat16)


def released(inner: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The names of a release, by hand: file's name -> the model's, and the shape there."""
    layer = {
        "attn.attn_sink": "self_attn.sinks",
        "attn.wq_a.weight": "self_attn.q_a_proj.weight",
        "attn.q_norm.weight": "self_attn.q_a_norm.weight",
        "attn.wq_b.weight": "self_attn.q_b_proj.weight",
        "attn.wkv.weight": "self_attn.kv_proj.weight",
        "attn.norm.weight": "self_attn.kv_norm.weight",
        "attn.wo_a.weight": "self_attn.o_a_proj.weight",
        "attn.wo_b.weight": "self_attn.o_b_proj.weight",
        "attn.compressor.ape": "self_attn.compressor.position_bias",
        "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
        "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
        "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
        "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
        "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
        "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
        "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
        "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
        "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
        "ffn.gate.weight": "mlp.gate.weight",
        "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
        "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
        "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
        "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        **{f"hc_{where}_{what}": f"{where}_hc.{what}" for where in ("attn", "ffn") for what in ("fn", "base", "scale")},
    }
    names = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
    names |= {"norm.weight": "model.norm.weight"} | {
        f"hc_head_{w}": f"model.hc_head.hc_{w}" for w in ("fn", "base", "scale")
    }
    names |= {f"layers.{i}.{file}": f"model.layers.{i}.{ours}" for i in range(2) for file, ours in layer.items()}
    shapes = {name: tuple(value.shape) for name, value in model_of(inner).state_dict().items()}
    return {file: (ours, shapes[ours]) for file, ours in names.items() if ours in shapes}


def written(path: Path, experts: str = "fp4") -> Tensors:
    """Writes the folder; returns the values that it stands for, in fp32, by the names of the files."""
    from safetensors.torch import save_file

    inner = 96 if experts == "fp4" else 128
    rng, state, tensors, values = np.random.default_rng(3), model_of(inner).state_dict(), Tensors(), Tensors()

    def scales(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        bytes_ = rng.integers(116, 122, shape).astype(np.uint8)
        return bytes_, np.exp2(bytes_.astype(np.float32) - 127)

    def in_fp8(module: str, m: int, k: int) -> None:
        codes = torch.from_numpy(rng.integers(0, 127, (m, k)) + 128 * rng.integers(0, 2, (m, k))).to(torch.uint8)
        stored, factor = scales(-(-m // 128), -(-k // 128))
        tensors[f"{module}.weight"] = codes.view(torch.float8_e4m3fn)
        tensors[f"{module}.scale"] = torch.from_numpy(stored).view(torch.float8_e8m0fnu)
        wide = np.repeat(np.repeat(factor, 128, 0), 128, 1)[:m, :k]
        values[f"{module}.weight"] = codes.view(torch.float8_e4m3fn).float() * torch.from_numpy(wide)

    def in_fp4(module: str, m: int, k: int) -> None:
        pairs = rng.integers(0, 256, (m, k // 2)).astype(np.uint8)
        stored, factor = scales(m, k // 32)
        tensors[f"{module}.weight"] = torch.from_numpy(pairs.view(np.int8))
        tensors[f"{module}.scale"] = torch.from_numpy(stored).view(torch.float8_e8m0fnu)
        codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(m, k)
        values[f"{module}.weight"] = torch.from_numpy(E2M1[codes] * np.repeat(factor, 32, 1))

    for file, (ours, shape) in released(inner).items():
        module = file.removesuffix(".weight")
        if module.rpartition(".")[2] in IN_FP8 and "compressor" not in module:
            in_fp8(module, *shape)
        else:
            tensors[file] = state[ours].clone()
    for layer in range(2):
        for expert in range(4):
            for name, m, k in (("w1", inner, 256), ("w2", 256, inner), ("w3", inner, 256)):
                (in_fp4 if experts == "fp4" else in_fp8)(f"layers.{layer}.ffn.experts.{expert}.{name}", m, k)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = model_of(inner).config.to_dict()
    config["quantization_config"] = {
        **{"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic"},
        "weight_block_size": [128, 128],
    }
    if experts == "fp4":
        config["quantization_config"]["expert_dtype"] = experts
    config["architectures"] = ["DeepseekV4ForCausalLM"]
    (path / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    return values


def stacked(values: Tensors) -> Tensors:
    """The values by the model's names: experts in a stack, w1 over w3."""
    found = {ours: values[file] for file, (ours, _) in released(96).items() if file in values}
    for layer in range(2):
        of = [[values[f"layers.{layer}.ffn.experts.{e}.{w}.weight"] for w in ("w1", "w2", "w3")] for e in range(4)]
        experts = f"model.layers.{layer}.mlp.experts"
        found[f"{experts}.gate_up_proj"] = torch.stack([torch.cat([w1, w3]) for w1, _, w3 in of])
        found[f"{experts}.down_proj"] = torch.stack([w2 for _, w2, _ in of])
    return found


def loaded(path: Path, *, shard: bool = False, **options: Any) -> Any:
    """The model that a trainer makes: quantized as the files are, perhaps sharded, and loaded."""
    from layoutc.integrations.transformers import names_in_files

    model = model_of(json.loads((path / "config.json").read_text())["moe_intermediate_size"])
    rename = names_in_files(model, path)
    quantize_as_stored(model, path, rename=rename)
    if shard:
        shard_layers(model, model.model.layers)
    assert load_safetensors(model, path, rename=rename, **options) == ((), ())
    return model


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_values_are_those_of_the_layout_and_files_come_back(experts: str, tmp_path: Path) -> None:
    """What the config says of experts follows from the recipes that a model has; without a word they are in FP8."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    from layoutc.integrations.transformers import names_in_files

    values = stacked(written(tmp_path / "in", experts))
    model = loaded(tmp_path / "in")
    how = {name: p.LAYOUT.name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    in_experts = EXPERTS if experts == "fp4" else DENSE
    assert how == {name: in_experts if ".mlp.experts." in name else DENSE for name in values}
    for name in values:
        assert torch.equal(model.get_parameter(name).dequantize(torch.float32), values[name]), name
    out, rename = tmp_path / "out", names_in_files(model, tmp_path / "in")
    export_safetensors(model, out, files="deepseek_v4", rename=rename)
    assert same(tensors_in(tmp_path / "in"), tensors_in(out))
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantization.get("expert_dtype", "fp8") == experts
    assert quantization["scale_fmt"] == "ue8m0"
    assert same(dict(stream_export(model, files="deepseek_v4", rename=rename)), tensors_in(out))
    for folder in (tmp_path / "in", out):
        theirs: Any = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
        )
        for name, param in model.named_parameters():
            ours = param.dequantize(torch.bfloat16) if isinstance(param, QuantizedTensor) else param
            assert torch.equal(ours, theirs.get_parameter(name)), name


def exports(path: str, out: str) -> bool:
    """On ranks: load, and export in files of a few weights each. True if shards and logits are those of one process."""
    from layoutc.integrations.transformers import names_in_files

    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model, whole = loaded(Path(path), shard=True), loaded(Path(path), process_group=groups[dist.get_rank()])
    equal = True
    for name, param in model.named_parameters():
        full: Any = param.full_tensor()
        if isinstance(full, QuantizedTensor):
            expected = whole.get_parameter(name).planes()
            equal &= all(torch.equal(plane, expected[key]) for key, plane in full.planes().items())
        else:
            equal &= torch.equal(full, whole.get_parameter(name))
    ids = torch.arange(12).reshape(2, 6)
    equal &= torch.equal(model(input_ids=ids).logits, whole(input_ids=ids).logits)
    rename = names_in_files(model, path)
    export_safetensors(model, out, files="deepseek_v4", rename=rename, max_shard_bytes=60_000)
    return equal


def test_ranks_load_their_slices_and_write_the_same_files(three: Ranks, tmp_path: Path) -> None:
    written(tmp_path / "in")
    assert three.run(exports, str(tmp_path / "in"), str(tmp_path / "out")) == [True] * 3
    assert same(tensors_in(tmp_path / "in"), tensors_in(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_a_folder_of_two_recipes_is_listed_and_converted_without_a_model(tmp_path: Path) -> None:
    values = written(tmp_path / "in")
    kinds = {entry.name: entry.kind for entry in inspect(tmp_path / "in").entries}
    for name in values:
        recipe = EXPERTS if ".experts." in name else DENSE
        assert kinds[name] == f"{recipe}/deepseek_v4", name
    convert_safetensors(tmp_path / "in", tmp_path / "plain", dtype="float32")
    found = tensors_in(tmp_path / "plain")
    assert all(torch.equal(found[name], value) for name, value in values.items())
    assert not any(name.endswith(".scale") for name in found)


def test_a_plain_model_takes_both_recipes_when_asked_to(tmp_path: Path) -> None:
    """And one that has only its experts quantized."""
    from layoutc.integrations.transformers import names_in_files

    values = stacked(written(tmp_path / "in"))
    for experts_too in (False, True):
        model = model_of().float()
        if experts_too:
            layoutc.quantize_(model, EXPERTS, param_filter=["*.mlp.experts.*"], keep_values=False)
        rename = names_in_files(model, tmp_path / "in")
        with pytest.raises(LayoutError, match=r"the files have it quantized in fp8_block_e8m0, the model has it plain"):
            load_safetensors(model, tmp_path / "in", rename=rename)
        assert load_safetensors(model, tmp_path / "in", rename=rename, convert=True) == ((), ())
        for name, expected in values.items():
            ours: Any = model.get_parameter(name)
            ours = ours.dequantize(torch.float32) if isinstance(ours, QuantizedTensor) else ours
            assert torch.equal(ours, expected), name


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "ffn.experts.1.w2.weight",
            torch.zeros(256, 48),
            r"w2.weight is F32 of \[256, 48\], but a weight of this shape",
        ),
        (
            "ffn.experts.1.w2.scale",
            torch.zeros(256, 1, dtype=torch.uint8),
            r"w2.scale is U8 of \[256, 1\], but a weight",
        ),
        (
            "attn.wq_a.weight",
            torch.zeros(64, 256),
            r"wq_a.weight is F32 of \[64, 256\], but a weight of this shape has",
        ),
        ("attn.wq_a.scale", torch.zeros(2, 2), r"wq_a.scale is F32 of \[2, 2\], but a weight of this shape has"),
    ],
    ids=range(4),
)
def test_what_no_recipe_of_the_folder_has_is_refused(name: str, tensor: Tensor, message: str, tmp_path: Path) -> None:
    """Before anything is quantized, converted or listed as if it were whole."""
    from safetensors.torch import save_file

    from layoutc.integrations.transformers import names_in_files

    written(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    save_file(tensors_in(tmp_path / "in") | {f"layers.0.{name}": tensor}, file, metadata={"format": "pt"})
    model = model_of()
    with pytest.raises(LayoutError, match=message):
        quantize_as_stored(model, tmp_path / "in", rename=names_in_files(model, tmp_path / "in"))
    assert not any(isinstance(param, QuantizedTensor) for param in model.parameters())
    with pytest.raises(LayoutError, match=message):
        convert_safetensors(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    with pytest.warns(UserWarning, match=message):
        inspect(tmp_path / "in")


def test_a_name_that_transformers_reads_as_anothers_is_refused(tmp_path: Path) -> None:
    """What its save_pretrained writes, with `model.` before the release's names: there it reads `norm` as `kv_norm`."""
    from layoutc.integrations.transformers import names_in_files

    model = model_of()
    model.save_pretrained(tmp_path)
    rename = names_in_files(model, tmp_path)
    assert rename("model.layers.1.self_attn.q_a_proj.weight") == "model.layers.1.attn.wq_a.weight"
    with pytest.raises(
        LayoutError, match=r"model.norm.weight would be .* reads as model.kv_norm.weight: pass `rename`"
    ):
        rename("model.norm.weight")
