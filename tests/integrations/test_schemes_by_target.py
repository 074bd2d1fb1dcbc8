"""Folders of several schemes, each for the modules that its targets name: blocks beside channels, FP8 beside int4.

compressed-tensors writes the folder, and reads what is written.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from test_files_of_others import same_files, tensors_in
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc.checkpoint import convert_safetensors, export_safetensors, inspect, load_safetensors, quantize_as_stored
from layoutc.runtime.quantize.weights import quantize
from layoutc.runtime.weight.tensor import QuantizedTensor

pytestmark = pytest.mark.skipif(
    find_spec("compressed_tensors") is None, reason="needs compressed-tensors: pip install 'layoutc[formats]'"
)
SCHEMES = {
    "block": "FP8_BLOCK",
    "channel": "FP8_DYNAMIC",
    "packed": "W4A16",
    "zeros": "W4A16_ASYM",
    "nvfp4": "NVFP4A16",
}
RECIPES = {
    "block.weight": "fp8_block",
    "channel.weight": "fp8_channel_bf16",
    "packed.weight": "int4_packed128",
    "zeros.weight": "int4_packed128_zeros",
    "nvfp4.weight": "nvfp4_compressed_tensors",
}


class Layers(nn.Module):
    """A linear layer for each scheme, of which two differ in zero points alone, and one that stays plain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = dict.fromkeys(SCHEMES, (256, 256)) | {"block": (256, 384), "channel": (384, 256)}
        for name, (k, m) in (sizes | {"head": (256, 32)}).items():
            self.add_module(name, nn.Linear(k, m, bias=False, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, by compressed-tensors: its config, its scales, its codes."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from safetensors.torch import save_file

    model, folder = Layers(), tmp_path_factory.mktemp("mixed")
    groups = {
        f"group_{i}": preset_name_to_scheme(preset, [f"re:.*{name}$"])
        for i, (name, preset) in enumerate(SCHEMES.items())
    }
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["head"]))
    for name in SCHEMES:
        layer: Any = getattr(model, name)
        by, weight, level = layer.quantization_scheme.weights, layer.weight.detach(), ()
        if by.strategy == "block":
            pieces = weight.view(len(weight) // 128, 128, -1, 128).transpose(1, 2).flatten(2)
        else:
            pieces = weight.view(len(weight), -1, by.group_size or weight.shape[1])
        if name == "nvfp4":
            layer.weight_global_scale.data.copy_(generate_gparam(weight.min(), weight.max()))
            level = (layer.weight_global_scale.data,)
        scale, zero = calculate_qparams(pieces.amin(-1), pieces.amax(-1), by, *level)
        layer.weight_scale.data.copy_(scale)
        if not by.symmetric:
            layer.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    save_file({key: one.contiguous() for key, one in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    compressor.update_config(str(folder))
    return folder


def read_by_compressed_tensors(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder, each by the scheme whose targets name its module."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    model = Layers()
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    compressor: Any = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.load_state_dict(tensors_in(folder))
    compressor.decompress_model(model)
    return {name: one.detach() for name, one in model.named_parameters() if name.endswith("weight")}


def loaded(folder: Path) -> Layers:
    model = Layers()
    assert quantize_as_stored(model, folder) == RECIPES
    load_safetensors(model, folder)
    return model


def test_each_weight_is_read_by_its_own_scheme(mixed: Path, tmp_path: Path) -> None:
    """Into quantized weights and into plain ones, by a conversion, and in an inspection."""
    values, model, plain = read_by_compressed_tensors(mixed), loaded(mixed), Layers()
    load_safetensors(plain, mixed, convert=True)
    convert_safetensors(mixed, tmp_path / "plain", dtype=torch.bfloat16)
    for name, param in model.named_parameters():
        held = param.dequantize(torch.bfloat16) if isinstance(param, QuantizedTensor) else param
        assert torch.equal(held, values[name].bfloat16()), name
        assert torch.equal(plain.get_parameter(name), values[name].bfloat16()), name
        assert torch.equal(tensors_in(tmp_path / "plain")[name], values[name].bfloat16()), name
    assert {one.name for one in inspect(mixed).entries} == {*RECIPES, "head.weight"}


def exports(path: str, out: str, source: str | None) -> None:
    """On ranks: load shards, and export."""
    model = loaded(Path(path))
    fully_shard(model)
    load_safetensors(model, path)
    export_safetensors(model, out, files="compressed_tensors", source=source)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config


def test_a_folder_is_written_back_byte_for_byte(mixed: Path, two: Ranks, tmp_path: Path) -> None:
    """From ranks: with the source's config; and without a source, with one whose targets are names of modules, by which
    compressed-tensors reads the same values, and quantize_as_stored gives the same recipes."""
    two.run(exports, str(mixed), str(tmp_path / "same"), str(mixed))
    assert same_files(mixed, tmp_path / "same")
    assert config_of(tmp_path / "same") == config_of(mixed)
    export_safetensors(loaded(mixed), tmp_path / "alone", files="compressed_tensors")
    values = read_by_compressed_tensors(mixed)
    for name, one in read_by_compressed_tensors(tmp_path / "alone").items():
        assert torch.equal(one, values[name]), name
    groups = config_of(tmp_path / "alone")["config_groups"].values()
    assert sorted(target for one in groups for target in one["targets"]) == sorted(SCHEMES)
    loaded(tmp_path / "alone")


def test_a_config_changes_where_a_weight_has_another_scheme(mixed: Path, tmp_path: Path) -> None:
    """Also where the source knows both; and all weights in one scheme have that one alone."""
    model = loaded(mixed)
    state: dict[str, Any] = dict(model.state_dict())
    state["block.weight"] = quantize(
        type(model.get_parameter("channel.weight")), state["block.weight"].dequantize(torch.bfloat16)
    )
    export_safetensors(state, tmp_path / "moved", files="compressed_tensors", source=mixed)
    assert torch.equal(
        read_by_compressed_tensors(tmp_path / "moved")["block.weight"], state["block.weight"].dequantize(torch.bfloat16)
    )
    state["head.weight"] = quantize(type(model.get_parameter("nvfp4.weight")), state["head.weight"])  # of no target
    export_safetensors(state, tmp_path / "more", files="compressed_tensors", source=mixed)
    targets = [one["targets"] for one in config_of(tmp_path / "more")["config_groups"].values()]
    assert ["head", "nvfp4"] in targets
    convert_safetensors(mixed, tmp_path / "one", files="fp8_block/compressed_tensors")
    assert [one["weights"]["strategy"] for one in config_of(tmp_path / "one")["config_groups"].values()] == ["block"]
    read_by_compressed_tensors(tmp_path / "one")


def by_layers(folder: Path) -> tuple[Layers, Path]:
    """Two schemes of ModelOpt, with the config that its export writes of them."""
    from safetensors.torch import save_file

    model = Layers()
    algos = {
        "channel": ("fp8_current", {"quant_algo": "FP8"}),
        "nvfp4": ("nvfp4_modelopt", {"quant_algo": "NVFP4", "group_size": 16}),
    }
    for name, (recipe, _) in algos.items():
        layoutc.quantize_(model, recipe, param_filter=[f"{name}.weight"])
    export_safetensors(model, folder / "alone", files="modelopt")
    of = {
        "FP8": {"dynamic": False, "num_bits": 8, "type": "float"},
        "NVFP4": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
    }
    config = {
        "config_groups": {
            f"group_{i}": {
                "input_activations": of[said["quant_algo"]],
                "weights": of[said["quant_algo"]],
                "targets": [name],
            }
            for i, (name, (_, said)) in enumerate(algos.items())
        },
        "quantized_layers": {name: said for name, (_, said) in algos.items()},
        "ignore": ["head", "block", "packed", "zeros"],
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quant_method": "modelopt",
    }
    (folder / "theirs").mkdir()
    beside = {f"{name}.input_scale": torch.tensor(0.5) for name in algos}
    save_file(tensors_in(folder / "alone") | beside, folder / "theirs" / "model.safetensors")
    (folder / "theirs" / "config.json").write_text(json.dumps({"quantization_config": config}), encoding="utf-8")
    return model, folder / "theirs"


@pytest.mark.filterwarnings("ignore:.* are for other programs alone")
def test_schemes_of_modelopt_by_layer_come_back(tmp_path: Path) -> None:
    """With the source's config, byte for byte; and one by layers where nothing, or something else, is said."""
    model, theirs = by_layers(tmp_path)
    recipes = {"channel.weight": "fp8_current", "nvfp4.weight": "nvfp4_modelopt"}
    again = Layers()
    assert quantize_as_stored(again, theirs) == recipes
    load_safetensors(again, theirs)
    export_safetensors(again, tmp_path / "same", files="modelopt", source=theirs)
    assert same_files(theirs, tmp_path / "same")
    assert config_of(tmp_path / "same") == config_of(theirs)
    convert_safetensors(theirs, tmp_path / "plain", dtype=torch.bfloat16)
    for name in recipes:
        held: Any = model.get_parameter(name)
        assert torch.equal(tensors_in(tmp_path / "plain")[name], held.dequantize(torch.bfloat16))
    said = config_of(tmp_path / "alone")
    assert said["quant_algo"] == "MIXED_PRECISION"
    assert said["quantized_layers"] == {"channel": {"quant_algo": "FP8"}, "nvfp4": {"quant_algo": "NVFP4"}}
    assert quantize_as_stored(Layers(), tmp_path / "alone") == recipes
    state: dict[str, Any] = dict(again.state_dict())
    state["block.weight"] = quantize(type(again.get_parameter("nvfp4.weight")), state["block.weight"])
    export_safetensors(state, tmp_path / "moved", files="modelopt", source=theirs)
    moved = config_of(tmp_path / "moved")
    assert moved["quantized_layers"]["block"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert moved["ignore"] == ["head", "packed", "zeros"]
    assert quantize_as_stored(Layers(), tmp_path / "moved") == recipes | {"block.weight": "nvfp4_modelopt"}
