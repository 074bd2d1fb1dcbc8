"""Files of other programs: loaded as those programs read them, trained on ranks, and written back byte for byte.

Each folder is written by the package that defines its format, or from the published definition; each export is read by
the package's own loader.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from sharding_of_layers import shard_layers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

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

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}: pip install 'layoutc[{extra}]'")
    for name, extra in (
        ("transformers", "integrations"),
        ("compressed_tensors", "formats"),
        ("bitsandbytes", "formats"),
    )
]
Tensors = dict[str, Tensor]

# Folder -> the binding that users name, None where config.json tells of one only; and that of an export.
FOLDERS: dict[str, tuple[str | None, str]] = {
    "gpt_oss": (None, "gpt_oss"),
    "deepseek": (None, "deepseek"),
    "mxfp4": (None, "compressed_tensors"),
    "mxfp8": ("mxfp8/compressed_tensors", "compressed_tensors"),
    "mxfp8_frozen": ("mxfp8_frozen/compressed_tensors", "compressed_tensors"),
    "channel": (None, "compressed_tensors"),
    "block": (None, "compressed_tensors"),
    "nvfp4": (None, "compressed_tensors"),
    "modelopt": (None, "modelopt"),
    "channel16": (None, "compressed_tensors"),
    "int4_32": (None, "compressed_tensors"),
    "int4_128": (None, "compressed_tensors"),
    "int4_zeros": (None, "compressed_tensors"),
    "awq": (None, "awq"),
    "gptq": (None, "gptq"),
    "bitsandbytes": (None, "bitsandbytes"),
    "bitsandbytes_double": (None, "bitsandbytes_double"),
}
F16 = ("awq", "gptq")
NF4_STATE = "quant_state.bitsandbytes__nf4"
BY_HAND = ("modelopt", "awq", "gptq")  # whose packages need a card: by their published definition


# --------------------------------------------------------------------------------------------------------------- models
def config_of(folder: str) -> Any:
    """A tiny model's config. Its sizes are no multiples of blocks of 128, nor of the ranks."""
    from transformers import DeepseekV3Config, GptOssConfig, LlamaConfig

    if folder == "gpt_oss":
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
        return GptOssConfig(
            vocab_size=96, num_hidden_layers=2, head_dim=16, num_local_experts=5, num_experts_per_tok=2, **sizes
        )
    if folder == "deepseek":
        return DeepseekV3Config(
            **{"vocab_size": 96, "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "use_cache": False},
            **{"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
        )
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    if folder in ("int4_128", "int4_zeros", "awq", "gptq"):  # groups of 128 columns
        sizes |= {"hidden_size": 256, "intermediate_size": 384}
    return LlamaConfig(vocab_size=96, num_hidden_layers=1, use_cache=False, **sizes)


def model_of(folder: str) -> Any:
    """The model in bf16, or fp32 where scales of the files have the weight's dtype, and must be fp32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.float32 if folder in ("channel", "block") else torch.float16 if folder in F16 else torch.bfloat16
    return AutoModelForCausalLM.from_config(config_of(folder), dtype=dtype)


# --------------------------------------------------------------------------------------------------- as others write it
def gpt_oss(state: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Experts as rows of 16 bytes for 32 codes along the contraction, which is the second dim of the model's."""
    torch.manual_seed(1)
    tensors = {}
    for name, value in state.items():
        if value.dim() == 3:
            e, k, n = value.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (e, n, k // 32, 16)).to(torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(116, 122, (e, n, k // 32)).to(torch.uint8)
        else:
            tensors[name] = value
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return tensors, {"quant_method": "mxfp4", "modules_to_not_convert": plain}


def deepseek(state: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """arXiv 2412.19437: blocks of 128x128 over their amax / 448, the fp32 `weight_scale_inv`; an expert a tensor."""
    tensors: Tensors = {}

    def quantized(name: str, w: Tensor) -> None:
        m, k = w.shape
        padded = torch.zeros(-(-m // 128) * 128, -(-k // 128) * 128)
        padded[:m, :k] = w
        blocks = padded.view(-(-m // 128), 128, -1, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).view(padded.shape)[:m, :k]
        tensors[name] = codes.to(torch.float8_e4m3fn).contiguous()
        tensors[f"{name}_scale_inv"] = scale

    for name, value in state.items():
        module = name.rpartition(".")[0]
        if value.dim() == 3:
            for expert, w in enumerate(value):
                for part, rows in zip(*_parts(name, w), strict=True):
                    quantized(f"{module}.{expert}.{part}.weight", rows.float())
        elif name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            quantized(name, value.float())
        else:
            tensors[name] = value
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return tensors, config


def _parts(name: str, w: Tensor) -> tuple[list[str], list[Tensor]]:
    return (["gate_proj", "up_proj"], list(w.chunk(2))) if "gate_up" in name else (["down_proj"], [w])


def compressed(preset: str, form: str, **changed: Any) -> Callable[[Tensors], tuple[Tensors, dict[str, Any]]]:
    """By compressed-tensors: its scales, its codes, its config."""

    def write(state: Tensors) -> tuple[Tensors, dict[str, Any]]:
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        scheme = preset_name_to_scheme(preset, ["Linear"])
        scheme.weights = scheme.weights.model_copy(update=changed)
        by, compressor = scheme.weights, BaseCompressor.get_value_from_registry(form)
        tensors = {}
        for name, value in state.items():
            if not name.endswith("_proj.weight"):
                tensors[name] = value
                continue
            if by.strategy in ("group", "tensor_group"):
                groups = value.reshape(len(value), -1, by.group_size)
                lowest, highest = groups.amin(-1), groups.amax(-1)
            elif by.strategy == "channel":
                lowest, highest = value.amin(1, keepdim=True), value.amax(1, keepdim=True)
            elif by.strategy == "tensor":
                lowest, highest = value.amin().reshape(1), value.amax().reshape(1)
            else:
                lowest, highest = (_of_blocks(value, pick) for pick in (torch.amin, torch.amax))
            grouped = by.strategy == "tensor_group"
            level = {"weight_global_scale": generate_gparam(value.min(), value.max())} if grouped else {}
            scale, zero = calculate_qparams(lowest, highest, by, *level.values())
            level |= {} if by.symmetric else {"weight_zero_point": zero}
            made = compressor.compress({"weight": value.clone(), "weight_scale": scale} | level, scheme)
            module = name.rpartition(".")[0]
            tensors |= {f"{module}.{key}": tensor for key, tensor in made.items()}
        config = QuantizationConfig(
            config_groups={"group_0": scheme}, format=form, quantization_status="compressed", ignore=["lm_head"]
        )
        return tensors, json.loads(json.dumps(config.to_dict(), default=str))

    return write


def _of_blocks(w: Tensor, pick: Callable[[Tensor], Tensor]) -> Tensor:
    rows = [
        torch.stack([pick(w[i : i + 128, j : j + 128]) for j in range(0, w.shape[1], 128)])
        for i in range(0, len(w), 128)
    ]
    return torch.stack(rows)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def modelopt(state: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """NVIDIA's export, as published: blocks of 16 over E4M3 scales times the fp32 `weight_scale_2`."""
    tensors: Tensors = {}
    for name, value in state.items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        level = value.abs().amax().float() / (6.0 * 448.0)
        blocks = value.float().reshape(len(value), -1, 16)
        scale = blocks.abs().amax(-1) / (6.0 * level)
        scale[scale == 0] = 1.0
        scale = scale.clamp(2**-9, 448.0).to(torch.float8_e4m3fn)
        scaled = (blocks / (scale.float() * level).unsqueeze(-1)).reshape(value.shape)
        distance = (scaled.abs().clamp(max=6.0).unsqueeze(-1) - E2M1).abs()
        tied = distance == distance.amin(-1, keepdim=True)  # two are as near: the even code
        codes = torch.where(tied.sum(-1) == 2, tied.int().argmax(-1) + tied.int().argmax(-1) % 2, tied.int().argmax(-1))
        codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
        module = name.rpartition(".")[0]
        tensors[name] = codes[:, ::2] | codes[:, 1::2] << 4
        tensors |= {f"{name}_scale": scale, f"{name}_scale_2": level, f"{module}.input_scale": level * 3}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    return tensors, config


def modelopt_values(tensors: Tensors, name: str) -> Tensor:
    """(codes) * (E4M3 scale * fp32 scale), in fp32, as the export's reader computes it."""
    codes = torch.stack([tensors[name] & 15, tensors[name] >> 4], -1).flatten(1)
    values = E2M1[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    factor = tensors[f"{name}_scale"].float() * tensors[f"{name}_scale_2"]
    return (values.unflatten(1, (-1, 16)) * factor.unsqueeze(-1)).flatten(1)


def names_of_weights(model: Any) -> list[str]:
    """The weights that files written by hand hold quantized."""
    return [name for name, _ in model.named_parameters() if name.endswith("_proj.weight")]


ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of AWQ's codes in a word, lowest bits first


def in_words(codes: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Codes (rows, 8 n) -> (rows, n) I32: eight codes a word, one shift at a time."""
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for place, code in enumerate(order):
        words |= codes[:, code::8].long() << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def of_words(words: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """The inverse."""
    codes = torch.empty(len(words), 8 * words.shape[1], dtype=torch.int32)
    for place, code in enumerate(order):
        codes[:, code::8] = (words >> (4 * place)) & 15
    return codes


def grouped(value: Tensor, each: int) -> tuple[Tensor, Tensor, Tensor]:
    """(k, m) codes 0 to 15, (k / each, m) zero points and F16 scales, as both programs find them; -1: of whole rows."""
    each = each if each > 0 else value.shape[1]
    padded = torch.nn.functional.pad(value.float(), (0, -value.shape[1] % each))
    groups = padded.t().reshape(-1, each, len(value))
    lowest, highest = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scale = ((highest - lowest) / 15).clamp(min=1e-5).half()
    zero = (-lowest / scale.float()).round().clamp(1, 15)
    codes = (groups / scale.float()[:, None] + zero[:, None]).round().clamp(0, 15)
    return codes.reshape(-1, len(value))[: value.shape[1]].int(), zero.int(), scale


def awq(state: Tensors, each: int = 128) -> tuple[Tensors, dict[str, Any]]:
    """AutoAWQ's WQLinear_GEMM: qweight (k, m / 8) and qzeros (k / each, m / 8), eight columns a word in an order."""
    tensors: Tensors = {}
    for name, value in state.items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        module, (codes, zero, scale) = name.rpartition(".")[0], grouped(value, each)
        tensors |= {f"{module}.qweight": in_words(codes, ORDER), f"{module}.qzeros": in_words(zero, ORDER)}
        tensors[f"{module}.scales"] = scale
    config = {"quant_method": "awq", "bits": 4, "group_size": each, "version": "gemm", "zero_point": True}
    return tensors, config


def awq_values(tensors: Tensors, name: str) -> Tensor:
    """(codes - zeros) * scales, in F16."""
    module = name.rpartition(".")[0]
    codes, zero = of_words(tensors[f"{module}.qweight"], ORDER), of_words(tensors[f"{module}.qzeros"], ORDER)
    each = len(codes) // len(zero)
    scale, zero = (one.repeat_interleave(each, 0) for one in (tensors[f"{module}.scales"], zero))
    return ((codes - zero) * scale).t()


def gptq(state: Tensors, each: int = 128) -> tuple[Tensors, dict[str, Any]]:
    """AutoGPTQ's version 1: qweight (k / 8, m), eight of a column a word; qzeros (k / each, m / 8), less 1; g_idx."""
    tensors: Tensors = {}
    for name, value in state.items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        module, (codes, zero, scale) = name.rpartition(".")[0], grouped(value, each)
        tensors |= {f"{module}.qweight": in_words(codes.t()).t().contiguous(), f"{module}.qzeros": in_words(zero - 1)}
        groups = torch.tensor([i // (each if each > 0 else len(codes)) for i in range(len(codes))], dtype=torch.int32)
        tensors |= {f"{module}.scales": scale, f"{module}.g_idx": groups}
    config = {"quant_method": "gptq", "bits": 4, "group_size": each, "desc_act": False, "sym": False}
    return tensors, config | {"checkpoint_format": "gptq"}


def gptq_values(tensors: Tensors, name: str) -> Tensor:
    """scales * (codes - (zeros + 1)), in F16."""
    module = name.rpartition(".")[0]
    codes, zero = of_words(tensors[f"{module}.qweight"].t()).t(), of_words(tensors[f"{module}.qzeros"]) + 1
    of = tensors[f"{module}.g_idx"].long()
    return (tensors[f"{module}.scales"][of] * (codes - zero[of])).t()


def bitsandbytes(state: Tensors, double: bool = False, blocksize: int = 64) -> tuple[Tensors, dict[str, Any]]:
    """What Linear4bit puts into a state dict, for all linear layers but lm_head, as transformers quantizes. double:
    scales are quantized again."""
    from bitsandbytes.functional import quantize_4bit

    tensors: Tensors = {}
    for name, value in state.items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        tensors[name], kept = quantize_4bit(value, blocksize=blocksize, quant_type="nf4", compress_statistics=double)
        tensors |= {f"{name}.{key}": one for key, one in kept.as_dict(packed=True).items()}
    return tensors, nf4_config(double)


def nf4_config(double: bool) -> dict[str, Any]:
    """The config that transformers writes."""
    from transformers import BitsAndBytesConfig

    of_bf16: Any = torch.bfloat16
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=of_bf16,
        bnb_4bit_use_double_quant=double,
    )
    config: dict[str, Any] = how.to_dict()
    return config


WRITERS = {
    "gpt_oss": gpt_oss,
    "deepseek": deepseek,
    "mxfp4": compressed("MXFP4A16", "mxfp4-pack-quantized"),
    "mxfp8": compressed("MXFP8A16", "mxfp8-quantized"),
    "mxfp8_frozen": compressed("MXFP8A16", "mxfp8-quantized"),
    "channel": compressed("FP8_DYNAMIC", "float-quantized"),
    "block": compressed("FP8_BLOCK", "float-quantized"),
    "nvfp4": compressed("NVFP4A16", "nvfp4-pack-quantized"),
    "modelopt": modelopt,
    "channel16": compressed("FP8_DYNAMIC", "float-quantized"),
    "int4_32": compressed("W4A16", "pack-quantized", group_size=32),
    "int4_128": compressed("W4A16", "pack-quantized"),
    "int4_zeros": compressed("W4A16_ASYM", "pack-quantized"),
    "awq": awq,
    "gptq": gptq,
    "bitsandbytes": bitsandbytes,
    "bitsandbytes_double": partial(bitsandbytes, double=True),
}


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of each name, written once."""
    folders: dict[str, Path] = {}

    def of(folder: str) -> Path:
        if folder not in folders:
            from safetensors.torch import save_file

            model = model_of(folder)
            tensors, quantization = WRITERS[folder](dict(model.state_dict()))
            path = folders[folder] = tmp_path_factory.mktemp(folder)
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
            config = model.config.to_dict() | {"quantization_config": quantization}
            config["architectures"] = [type(model).__name__]
            (path / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
        return folders[folder]

    return of


def as_others_read(folder: str, path: Path, dtype: torch.dtype) -> Any:
    """The model that transformers loads, dequantized by the format's own code."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

    if folder in BY_HAND:
        tensors, model = tensors_in(path), model_of(folder)
        values = {"modelopt": modelopt_values, "awq": awq_values, "gptq": gptq_values}[folder]
        for name, param in model.named_parameters():
            param.data = (tensors[name] if name not in names_of_weights(model) else values(tensors, name)).to(dtype)
        return model
    if folder.startswith("bitsandbytes"):
        return AutoModelForCausalLM.from_pretrained(path, device_map="cpu", dtype=dtype).dequantize()
    how: Any = {"gpt_oss": Mxfp4Config, "deepseek": FineGrainedFP8Config}.get(folder, CompressedTensorsConfig)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=how(dequantize=True), dtype=dtype)


def tensors_in(path: Path) -> Tensors:
    from safetensors.torch import load_file

    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(left: Tensors, right: Tensors) -> bool:
    """The same names, dtypes, shapes and bytes."""
    return left.keys() == right.keys() and all(
        (one.dtype, one.shape) == (right[name].dtype, right[name].shape)
        and torch.equal(one.reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8))
        for name, one in left.items()
    )


def same_files(a: Path, b: Path, but: tuple[str, ...] = ()) -> bool:
    """The same tensors. but: how names end of those that `b` need not have."""
    left, right = tensors_in(a), tensors_in(b)
    return same({name: one for name, one in left.items() if name in right or not (but and name.endswith(but))}, right)


# ---------------------------------------------------------------------------------------------------------- one process
@pytest.mark.sample(3)
@pytest.mark.parametrize("folder", ["gpt_oss", "deepseek", "mxfp8", "block", "modelopt", "awq", "gptq"])
def test_values_are_those_that_others_read_and_files_come_back(
    folder: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of what no package here writes by itself, as test_real_writers.py has it, and of sizes that cut blocks."""
    path, model = written(folder), model_of(folder)
    names = quantize_as_stored(model, path, files=FOLDERS[folder][0])
    assert load_safetensors(model, path, files=FOLDERS[folder][0]) == ((), ())
    dtype = model.dtype
    theirs = dict(as_others_read(folder, path, dtype).named_parameters())
    assert len(names) == sum(isinstance(param, QuantizedTensor) for param in model.parameters()) > 0
    for name, param in model.named_parameters():
        ours = param.dequantize(dtype) if isinstance(param, QuantizedTensor) else param
        assert torch.equal(ours, theirs[name]), name
    out = tmp_path / "out"
    export_safetensors(model, out, files=FOLDERS[folder][1], source=path)
    assert same_files(path, out)
    again = dict(as_others_read(folder, out, dtype).named_parameters())
    assert all(torch.equal(again[name], theirs[name]) for name in theirs)


def test_a_plain_model_takes_the_values_when_asked_to(written: Callable[[str], Path]) -> None:
    path, model = written("deepseek"), model_of("deepseek")
    with pytest.raises(LayoutError, match=r"the files have it quantized in fp8_block, the model has it plain"):
        load_safetensors(model, path)
    load_safetensors(model, path, convert=True)
    theirs = dict(as_others_read("deepseek", path, torch.bfloat16).named_parameters())
    assert all(torch.equal(param, theirs[name]) for name, param in model.named_parameters())


def test_files_that_fit_several_recipes_or_none_say_which(written: Callable[[str], Path], tmp_path: Path) -> None:
    both = r"mxfp8/compressed_tensors, mxfp8_frozen/compressed_tensors"
    with pytest.raises(LayoutError, match=rf"pass files= one of {both}"):
        quantize_as_stored(model_of("mxfp8"), written("mxfp8"))
    config = json.loads((written("mxfp8") / "config.json").read_text())
    config["quantization_config"]["format"] = "of-my-own"
    for name, text in (("config.json", json.dumps(config)), ("model.safetensors", None)):
        if text is None:
            (tmp_path / name).symlink_to(written("mxfp8") / name)
        else:
            (tmp_path / name).write_text(text)
    with pytest.raises(LayoutError, match=r"quantization_config that no installed recipe knows: .*of-my-own"):
        quantize_as_stored(model_of("mxfp8"), tmp_path)


@pytest.mark.thorough
def test_torchaos_padded_scales_are_refused_with_what_reads_them(tmp_path: Path) -> None:
    """transformers' integration writes them; the call that the error gives puts the values into quantized weights."""
    pytest.importorskip("torchao", reason="needs torchao: pip install torchao")
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 128}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
    model.save_pretrained(tmp_path / "plain")
    quantization = TorchAoConfig(NVFP4WeightOnlyConfig())
    read = partial(AutoModelForCausalLM.from_pretrained, device_map="cpu")
    read(tmp_path / "plain", quantization_config=quantization).save_pretrained(tmp_path / "theirs")
    layoutc.quantize_(model, "fp8_block", param_filter=["*_proj.weight"])
    with pytest.raises(LayoutError, match=r"_scale: 64 does not split into pieces of 128\. .*model\.load_state_dict\("):
        load_safetensors(model, tmp_path / "theirs")
    theirs = read(tmp_path / "theirs")
    model.load_state_dict({name: one.dequantize() for name, one in theirs.state_dict().items()})
    name = "model.layers.0.mlp.up_proj.weight"
    found: Any = model.get_parameter(name)
    values = theirs.get_parameter(name).dequantize().detach()
    expected = importlib.import_module("layoutc.recipes.fp8_block").quantize(values)
    for plane, one in expected.planes().items():
        assert torch.equal(found.planes()[plane].view(torch.uint8), one.view(torch.uint8))


def changed(source: Path, folder: Path, name: str, tensor: Tensor) -> Path:
    """A copy of a folder with one other tensor."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(tensors_in(source) | {name: tensor}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").symlink_to(source / "config.json")
    return folder


def test_columns_in_the_order_of_activations_are_refused(written: Callable[[str], Path], tmp_path: Path) -> None:
    model, name = model_of("gptq"), "model.layers.0.mlp.up_proj.g_idx"
    shuffled = tensors_in(written("gptq"))[name].flip(0)
    path = changed(written("gptq"), tmp_path / "in", name, shuffled)
    quantize_as_stored(model, path)
    before = {key: value.clone() for key, value in model.model.layers[0].mlp.up_proj.weight.planes().items()}
    with pytest.raises(
        LayoutError, match=r"g_idx in the files does not number the columns in blocks of 128: .*desc_act"
    ):
        load_safetensors(model, path)
    after = model.model.layers[0].mlp.up_proj.weight.planes()
    assert all(torch.equal(before[key], after[key]) for key in before)
    with pytest.raises(LayoutError, match=r"g_idx in the files does not number the columns"):
        convert_safetensors(path, tmp_path / "out", dtype=torch.float32)


def test_sizes_that_files_state_are_those_of_the_weight(written: Callable[[str], Path], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight_shape"
    path = changed(written("int4_128"), tmp_path / "in", name, torch.tensor([384, 248]))
    model = model_of("int4_128")
    quantize_as_stored(model, path)
    with pytest.raises(LayoutError, match=r"weight_shape in the files does not say \[384, 256\]"):
        load_safetensors(model, path)


def of_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [320, 192]}


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("quant_map", torch.linspace(-1, 1, 16), "holds other values of codes than the recipe has"),
        ("quant_map", torch.zeros(17), r"is F32 of \[17\], but a weight of this shape has F32 of \[16\]"),
        (NF4_STATE, of_text(json.dumps(STATE | {"blocksize": 128})), "has 128 as blocksize, but a weight here has 64"),
        (NF4_STATE, of_text(json.dumps(STATE | {"shape": [192, 320]})), r"has \[192, 320\] as shape"),
        (NF4_STATE, of_text(json.dumps(STATE | {"nested": 1})), "has 1 as nested, but a weight here has nothing"),
        (NF4_STATE, of_text("[64]"), "is JSON of a list, not of a mapping"),
        (NF4_STATE, of_text("{" * 9), "is not JSON"),
        (NF4_STATE, torch.zeros(1 << 17, dtype=torch.uint8), r"is U8 of \[131072\]"),
    ],
    ids=range(8),
)
def test_what_files_state_beside_codes_is_that_of_the_recipe(
    key: str, tensor: Tensor, message: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    """And nothing is written before it is compared."""
    name = "model.layers.0.mlp.up_proj.weight"
    path = changed(written("bitsandbytes"), tmp_path / "in", f"{name}.{key}", tensor)
    model = model_of("bitsandbytes")
    layoutc.quantize_(model, "nf4_bitsandbytes", param_filter=["*_proj.weight"], keep_values=False)
    with pytest.raises(LayoutError, match=message) as caught:
        load_safetensors(model, path)
    assert f"{name}.{key}" in str(caught.value)


def test_what_files_may_state_otherwise_is_taken(written: Callable[[str], Path], tmp_path: Path) -> None:
    """A dtype that weights are dequantized to, which exports write as the spec has it."""
    name = f"model.layers.0.mlp.up_proj.weight.{NF4_STATE}"
    path = changed(written("bitsandbytes"), tmp_path / "in", name, of_text(json.dumps(STATE)))
    model = model_of("bitsandbytes")
    quantize_as_stored(model, path)
    load_safetensors(model, path)
    export_safetensors(model, tmp_path / "out", files="bitsandbytes")
    assert same_files(tmp_path / "out", written("bitsandbytes"))


def test_a_level_that_no_amax_gives_is_refused_by_a_recipe_of_amaxes_alone(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    """The recipe that stores what the files hold is chosen where none is asked for, and takes any."""
    name = "model.layers.0.mlp.up_proj.weight_global_scale"
    amaxes = torch.tensor([2688 / 1.95]).view(torch.int32) + torch.arange(-500, 500, dtype=torch.int32)
    quotients = set((torch.tensor(2688.0) / amaxes.view(torch.float32)).view(torch.int32).tolist())
    word = next(one for one in range(min(quotients) + 99, max(quotients)) if one not in quotients)
    level = torch.tensor([word], dtype=torch.int32).view(torch.float32)
    path = changed(written("nvfp4"), tmp_path / "in", name, level)
    model = model_of("nvfp4")
    quantize_as_stored(model, path, files="nvfp4_1d/compressed_tensors")
    with pytest.raises(LayoutError, match="no fp32 value x gives"):
        load_safetensors(model, path)
    model = model_of("nvfp4")
    assert set(quantize_as_stored(model, path).values()) == {"nvfp4_compressed_tensors"}
    load_safetensors(model, path)
    export_safetensors(model, tmp_path / "out", files="compressed_tensors")
    assert same_files(path, tmp_path / "out")


def test_scales_of_activations_are_named_and_copied_when_asked_for(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    path, model = written("modelopt"), model_of("modelopt")
    quantize_as_stored(model, path)
    with pytest.warns(UserWarning, match=r"input_scale, .* and 5 more are for other programs alone, and not loaded"):
        load_safetensors(model, path)
    export_safetensors(model, tmp_path / "without", files="modelopt")
    lacking = tensors_in(path).keys() - tensors_in(tmp_path / "without").keys()
    assert len(lacking) == 7
    assert all(name.endswith(".input_scale") for name in lacking)
    with pytest.raises(ValueError, match="source= needs files="):
        export_safetensors(model, tmp_path / "out", source=path)
    done = convert_safetensors(path, tmp_path / "same", files="nvfp4_modelopt/modelopt")
    assert same_files(path, tmp_path / "same")
    assert not done.left
    done = convert_safetensors(path, tmp_path / "other", files="fp8_block/deepseek")
    assert set(done.left) == lacking


# ----------------------------------------------------------------------------------------------------------- many ranks
def sharded(folder: str, path: str) -> Any:
    """The model as a trainer makes it: quantized as the files are, sharded, and loaded."""
    model = model_of(folder)
    quantize_as_stored(model, path, files=FOLDERS[folder][0])
    shard_layers(model, model.model.layers)
    load_safetensors(model, path, files=FOLDERS[folder][0])
    return model


def exports(folder: str, path: str, out: str) -> bool:
    """On ranks: load, and export in files of a few weights each. True if shards hold what one process does."""
    model, whole = sharded(folder, path), model_of(folder)
    quantize_as_stored(whole, path, files=FOLDERS[folder][0])
    load_safetensors(whole, path, files=FOLDERS[folder][0], process_group=alone())
    theirs = dict(whole.named_parameters())
    ids = torch.arange(12).reshape(2, 6)
    same = True
    for name, param in model.named_parameters():
        local: Any = param._local_tensor  # type: ignore[attr-defined]
        if isinstance(local, QuantizedTensor):
            full: Any = param.full_tensor()  # type: ignore[attr-defined]
            expected = theirs[name].planes()  # type: ignore[attr-defined]
            same &= all(torch.equal(plane, expected[key]) for key, plane in full.planes().items())
    same &= torch.equal(model(input_ids=ids).logits, whole(input_ids=ids).logits)
    export_safetensors(model, out, files=FOLDERS[folder][1], source=path, max_shard_bytes=30_000)
    return same


def alone() -> Any:
    """A group of this rank by itself."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


@pytest.mark.parametrize(
    "folder",
    [
        *("gpt_oss", "deepseek", "mxfp4", "channel", "nvfp4"),
        *("int4_zeros", "awq", "gptq", "bitsandbytes_double"),
    ],
)
def test_ranks_load_their_slices_and_write_the_same_files(
    folder: str, three: Ranks, written: Callable[[str], Path], tmp_path: Path
) -> None:
    """One of each kind of plane."""
    assert three.run(exports, folder, str(written(folder)), str(tmp_path / "out")) == [True] * 3
    assert same_files(written(folder), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def tunes(folder: str, path: str, out: str) -> tuple[list[float], list[float]]:
    """Trains, exports, and returns the losses and some logits."""
    model = sharded(folder, path)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    losses = []
    ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    export_safetensors(model, out, files=FOLDERS[folder][1])
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.arange(10)[None]).logits
    return losses, logits.flatten().tolist()


@pytest.mark.parametrize("folder", ["gpt_oss", "deepseek"])
def test_a_tuned_model_is_what_others_load(
    folder: str, two: Ranks, written: Callable[[str], Path], tmp_path: Path
) -> None:
    """Steps on two ranks: transformers reads the export, and computes the trainer's logits to the bit."""
    (losses, logits), _ = two.run(tunes, folder, str(written(folder)), str(tmp_path / "out"))
    assert losses[-1] < losses[0] - 0.05
    theirs = as_others_read(folder, tmp_path / "out", torch.bfloat16).eval()
    with torch.no_grad():
        found = theirs(input_ids=torch.arange(10)[None]).logits
    assert found.flatten().tolist() == logits
    assert not same_files(written(folder), tmp_path / "out")


def streams(path: str) -> tuple[bool, bool, bool]:
    """Of weights that are cast on gather: whether a stream, an export and the forward pass have the same bytes."""
    torch.manual_seed(3)
    model = model_of("mxfp8")
    layoutc.cast_on_gather_(model, "mxfp8", param_filter=["*_proj.weight"])
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model)
    model(input_ids=torch.arange(10)[None])
    gathered = {
        name: param.planes()["rowwise_data"].clone()
        for name, param in model.named_parameters()
        if isinstance(param, QuantizedTensor)
    }
    for layer in model.model.layers:
        layer.reshard()
    model.reshard()
    export_safetensors(model, path, files="compressed_tensors")
    exported, streamed, grads = tensors_in(Path(path)), {}, True
    for name, tensor in stream_export(model, files="compressed_tensors"):
        grads &= torch.is_grad_enabled()
        streamed[name] = tensor.clone()
    same = exported.keys() == streamed.keys() and all(
        torch.equal(one.view(torch.uint8), exported[name].view(torch.uint8)) for name, one in streamed.items()
    )
    of_forward = all(torch.equal(codes, exported[name].view(torch.uint8)) for name, codes in gathered.items())
    return same, of_forward and len(gathered) == 7, grads


def test_what_is_cast_on_gather_is_served_as_it_is_trained(two: Ranks, tmp_path: Path) -> None:
    assert two.run(streams, str(tmp_path / "out")) == [(True, True, True)] * 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")  # not FSDP2's subclass
    theirs = as_others_read("mxfp8", tmp_path / "out", torch.bfloat16)
    plain = dict(model_of("mxfp8").named_parameters())
    for name, param in theirs.named_parameters():
        quantized = name.endswith("_proj.weight")
        assert torch.equal(param, plain[name]) != quantized, name


def refused_stream() -> str:
    model = model_of("mxfp8")
    layoutc.quantize_(model, "int8_block", param_filter=["*.q_proj.weight"])
    try:
        next(iter(stream_export(model, files="compressed_tensors")))
    except LayoutError as error:
        return str(error)
    return ""


def test_a_stream_that_can_not_be_is_refused_on_all_ranks(two: Ranks) -> None:
    for message in two.run(refused_stream):
        assert "no recipe of the model has files 'compressed_tensors'" in message


def test_nn_linear_alone_counts_as_a_module_that_stays_plain(written: Callable[[str], Path], tmp_path: Path) -> None:
    """Embeddings and norms are no linear layers, and programs that read the list look for such alone."""
    path, model = written("block"), model_of("block")
    quantize_as_stored(model, path, files="fp8_block/compressed_tensors")
    load_safetensors(model, path)
    export_safetensors(model, tmp_path / "out", files="compressed_tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert isinstance(model.lm_head, nn.Linear)


def test_recipes_whose_configs_contradict_each_other_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    layoutc.quantize_(model, "nf4_bitsandbytes", param_filter=["0.weight"])
    layoutc.quantize_(model, "fp4_bitsandbytes", param_filter=["1.weight"])
    with pytest.raises(LayoutError, match=r"have files 'bitsandbytes' with different configs"):
        export_safetensors(model, tmp_path / "out", files="bitsandbytes")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------ without a model
@pytest.mark.sample(2)
@pytest.mark.parametrize("folder", ["deepseek", "gpt_oss", "mxfp4", "block"])
def test_a_folder_converts_to_what_others_read(folder: str, written: Callable[[str], Path], tmp_path: Path) -> None:
    """The values of each weight are those that the format's own package gives, and a model loads them as they are."""
    source = {"gpt_oss": "mxfp4_gpt_oss/gpt_oss"}.get(folder)
    done = convert_safetensors(
        written(folder), tmp_path / "out", dtype=torch.float32, source_files=source, max_shard_bytes=300_000
    )
    assert len(done.files) > 1
    assert not done.quantized
    theirs, plain = as_others_read(folder, written(folder), torch.float32), model_of(folder).float()
    if folder != "deepseek":  # whose files have an expert a tensor
        load_safetensors(plain, tmp_path / "out")
        assert all(torch.equal(one, dict(theirs.named_parameters())[name]) for name, one in plain.named_parameters())
    else:
        expected = deepseek_names(dict(theirs.state_dict()))
        found = tensors_in(tmp_path / "out")
        assert found.keys() == expected.keys()
        assert all(torch.equal(one.float(), expected[name]) for name, one in found.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config


def deepseek_names(state: Tensors) -> Tensors:
    """Stacked experts under the names of their files."""
    tensors = {}
    for name, value in state.items():
        if value.dim() == 3:
            for expert, w in enumerate(value):
                for part, rows in zip(*_parts(name, w), strict=True):
                    tensors[f"{name.rpartition('.')[0]}.{expert}.{part}.weight"] = rows
        else:
            tensors[name] = value
    return tensors


def test_a_shape_that_files_state_beside_codes_is_found_without_a_model(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    """bitsandbytes' codes are one column of bytes; rows and columns stand in its JSON alone."""
    path, names = written("bitsandbytes"), names_of_weights(model_of("bitsandbytes"))
    shapes = {name: tuple(param.shape) for name, param in model_of("bitsandbytes").named_parameters()}
    found = {entry.name: entry for entry in inspect(path).entries}
    assert {name for name, entry in found.items() if entry.kind == "nf4_bitsandbytes/bitsandbytes"} == {*names}
    assert {name: entry.shape for name, entry in found.items()} == shapes
    convert_safetensors(path, tmp_path / "out", dtype=torch.bfloat16)
    theirs = as_others_read("bitsandbytes", path, torch.bfloat16)
    plain = model_of("bitsandbytes")
    load_safetensors(plain, tmp_path / "out")
    assert all(torch.equal(one, dict(theirs.named_parameters())[name]) for name, one in plain.named_parameters())
    convert_safetensors(path, tmp_path / "same", files="nf4_bitsandbytes/bitsandbytes")
    assert same_files(path, tmp_path / "same")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (of_text(json.dumps(STATE | {"shape": [320, 320]})), r"is U8 of \[30720, 1\], but a weight of this shape has"),
        (of_text(json.dumps(STATE | {"shape": [2**61, 64]})), "but a weight of this shape has"),
        (of_text(json.dumps(STATE | {"shape": [640, 95]})), "columns in multiples of 64, not shape"),
        (of_text(json.dumps(STATE | {"shape": [-320, -192]})), "does not state the two sizes of a weight"),
        (of_text(json.dumps(STATE | {"shape": [True, 61440]})), "does not state the two sizes of a weight"),
        (of_text(json.dumps(STATE | {"shape": [61440]})), "does not state the two sizes of a weight"),
        (of_text(json.dumps(STATE | {"shape": "rows"})), "does not state the two sizes of a weight"),
        (of_text('{"shape": [320, 192], "shape": [192, 320]}'), "has the key 'shape' twice"),
        (of_text('{"a":' + "[" * 60000), "is little more than brackets"),
        (of_text('{"shape": ' + "9" * 5000 + "}"), "is not JSON|does not state the two sizes"),
        (torch.zeros(0, dtype=torch.uint8), "is not JSON"),
        (torch.zeros(1 << 17, dtype=torch.uint8), r"is U8 of \[131072\], but should be a text of at most 65536 bytes"),
        (torch.zeros(9, dtype=torch.float32), r"is F32 of \[9\], but should be a text"),
    ],
    ids=range(13),
)
def test_a_shape_that_can_not_be_is_refused_before_it_is_believed(
    tensor: Tensor, message: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    path = changed(written("bitsandbytes"), tmp_path / "in", f"{name}.{NF4_STATE}", tensor)
    with pytest.raises(LayoutError, match=message) as caught:
        convert_safetensors(path, tmp_path / "out", dtype=torch.bfloat16)
    assert name in str(caught.value)
    assert not (tmp_path / "out").exists()
    with pytest.warns(UserWarning, match=message):
        entries = inspect(path).entries
    assert name in {entry.name for entry in entries}


def test_a_weight_without_the_text_that_states_its_shape_is_refused(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    name = f"model.layers.0.mlp.up_proj.weight.{NF4_STATE}"
    tensors = tensors_in(written("bitsandbytes"))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").symlink_to(written("bitsandbytes") / "config.json")
    with pytest.raises(LayoutError, match=rf"{name}, which states its shape, is missing"):
        convert_safetensors(tmp_path, tmp_path / "out", dtype=torch.bfloat16)


def test_the_same_layout_moves_its_bytes_to_another_binding_and_back(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    kinds = [entry.kind for entry in inspect(written("deepseek")).entries]
    assert kinds.count("fp8_block/deepseek") == sum(
        name.endswith("_scale_inv") for name in tensors_in(written("deepseek"))
    )
    done = convert_safetensors(written("deepseek"), tmp_path / "a", files="fp8_block/compressed_tensors")
    assert not done.left
    assert sorted(done.quantized) == sorted(
        name.removesuffix("_scale_inv") for name in tensors_in(written("deepseek")) if name.endswith("_scale_inv")
    )
    convert_safetensors(tmp_path / "a", tmp_path / "b", files="fp8_block/deepseek")
    assert same_files(written("deepseek"), tmp_path / "b")


def test_recipes_whose_files_are_the_same_keep_bytes(tmp_path: Path) -> None:
    """Also codes and scales that quantizing their values again would not give."""
    from safetensors.torch import save_file

    model = model_of("mxfp8")
    layoutc.quantize_(model, "mxfp8", param_filter=["*_proj.weight"])
    export_safetensors(model, tmp_path / "a", files="compressed_tensors")
    tensors = tensors_in(tmp_path / "a")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = (tensors[name].float() / 16).to(torch.float8_e4m3fn)  # the block's largest code is small
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    for folder, source, recipe in (("b", "a", "mxfp8_frozen"), ("c", "b", "mxfp8")):
        convert_safetensors(tmp_path / source, tmp_path / folder, files=f"{recipe}/compressed_tensors")
        assert same_files(tmp_path / "a", tmp_path / folder)


def test_storage_of_codes_is_what_the_config_says(tmp_path: Path) -> None:
    """Of bitsandbytes, also with scales that are quantized anew."""
    from safetensors.torch import save_file

    model = nn.Sequential(nn.Linear(128, 64, bias=False))
    layoutc.quantize_(model, "nf4_bitsandbytes")
    export_safetensors(model, tmp_path / "a", files="bitsandbytes")
    tensors, path = tensors_in(tmp_path / "a"), tmp_path / "a" / "config.json"
    tensors["0.weight"] = tensors["0.weight"].reshape(-1).view(torch.bfloat16).reshape(-1, 1)
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    path.write_text(path.read_text().replace('"uint8"', '"bfloat16"'))
    for files in ("bitsandbytes", "bitsandbytes_double"):
        convert_safetensors(tmp_path / "a", tmp_path / files, files=f"nf4_bitsandbytes/{files}")
        config = json.loads((tmp_path / files / "config.json").read_text())["quantization_config"]
        assert config["bnb_4bit_quant_storage"] == "bfloat16"
        held = tensors_in(tmp_path / files)["0.weight"]
        assert held.dtype == torch.bfloat16
        assert torch.equal(held.view(torch.uint8), tensors["0.weight"].view(torch.uint8))


def test_plain_matrices_are_quantized_as_a_model_would(written: Callable[[str], Path], tmp_path: Path) -> None:
    """By name; the same bytes as a quantized model's export, also from the command line."""
    from click.testing import CliRunner

    from layoutc.cli.app import main

    model = model_of("mxfp8")
    export_safetensors(model, tmp_path / "plain", config={"model_type": "llama"})
    options = ["--files", "mxfp8/compressed_tensors", "--match", "*_proj.weight", "--json"]
    result = CliRunner().invoke(main, ["convert", str(tmp_path / "plain"), str(tmp_path / "a"), *options])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["quantized"]) == 7
    layoutc.quantize_(model, "mxfp8", param_filter=["*_proj.weight"])
    export_safetensors(model, tmp_path / "b", files="compressed_tensors")
    assert same_files(tmp_path / "a", tmp_path / "b")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]


def test_what_can_not_be_converted_says_why_and_leaves_nothing(written: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, message in (
        ({"files": "mxfp4/compressed_tensors"}, r"is a stack of experts"),
        ({"files": "compressed_tensors"}, r"is a stack of experts"),  # that of the source's recipe
        (
            {"dtype": torch.bfloat16},
            r"fit several recipes: pass source_files= \(--from\) one of mxfp4/gpt_oss, mxfp4_gpt_oss",
        ),
    ):
        options: Any = {"source_files": "mxfp4/gpt_oss"} if "files" in arguments else {}
        with pytest.raises(LayoutError, match=message):
            convert_safetensors(written("gpt_oss"), out, **arguments, **options)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"several recipes have such files: choose one of .*mxfp4/mlx, mxfp8/mlx"):
        convert_safetensors(written("block"), out, files="mlx")
    with pytest.raises(LayoutError, match=r"no tensor is named like 'nothing'"):
        convert_safetensors(written("block"), out, files="fp8_block/deepseek", match=["nothing"])
    with pytest.raises(LayoutError, match=r"layernorm.weight is F32 of \[192\]: `match` takes"):
        convert_safetensors(written("block"), out, files="fp8_block/deepseek", match=["*norm.weight"])
    with pytest.raises(ValueError, match=r"pass files= for quantized weights, or dtype="):
        convert_safetensors(written("block"), out)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("files", ["fp8_rowwise/compressed_tensors", "fp8_current/compressed_tensors"])
def test_own_exports_have_transformers_values_in_bf16_where_it_keeps_scales(files: str, tmp_path: Path) -> None:
    """It rounds fp32 scales to the model's dtype unless it dequantizes as it loads."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    plain = model_of("channel").to(torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    convert_safetensors(tmp_path / "plain", tmp_path / "out", files=files, match=["*_proj.weight"])
    load_safetensors(plain, tmp_path / "out", convert=True)
    how = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=how, dtype=torch.bfloat16)
    assert all(torch.equal(param, plain.get_parameter(name)) for name, param in theirs.named_parameters())
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert kept.model.layers[0].mlp.up_proj.weight_scale.dtype == torch.bfloat16
