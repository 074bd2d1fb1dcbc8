"""Files that torchao's own functions write of its tensors, as transformers calls them; torchao reads the values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from layoutc.checkpoint import convert_safetensors, export_safetensors, load_safetensors, quantize_as_stored
from layoutc.runtime.errors import LayoutError

torchao = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install 'layoutc[integrations]'")
RECIPES = {
    "float8 by rows": "fp8_rowwise",
    "float8": "fp8_current",
    "float8 by blocks": "fp8_block",
    "int8": "int8_rowwise",
    "int8 of intx": "int8_rowwise",
    "int8, static activations": "int8_rowwise",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4_modelopt",
    "nvfp4, static activations": "nvfp4_modelopt",
}
WEIGHTS = ("0.weight", "2.weight")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 384, bias=False), nn.LayerNorm(384), nn.Linear(384, 128)).bfloat16()


def written(form: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Writes a folder; returns the values."""
    from torchao.prototype.mx_formats import (
        MXDynamicActivationMXWeightConfig,
        NVFP4DynamicActivationNVFP4WeightConfig,
        NVFP4WeightOnlyConfig,
    )
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization.quantize_.common import KernelPreference

    emulated, fp4 = KernelPreference.EMULATED, torch.float4_e2m1fn_x2
    by_blocks = (torchao.PerBlock([1, 128]), torchao.PerBlock([128, 128]))
    monkeypatch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda _: None)  # of products
    configs = {
        "float8 by rows": torchao.Float8WeightOnlyConfig(),
        "float8": torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerTensor()),
        "float8 by blocks": torchao.Float8DynamicActivationFloat8WeightConfig(granularity=by_blocks),
        "int8": torchao.Int8WeightOnlyConfig(version=2),
        "int8 of intx": torchao.IntxWeightOnlyConfig(torch.int8, torchao.PerAxis(0)),
        "int8, static activations": torchao.Int8StaticActivationInt8WeightConfig(
            torch.full((1, 1), 0.5), granularity=[torchao.PerTensor(), torchao.PerRow()]
        ),
        "mxfp8": MXDynamicActivationMXWeightConfig(kernel_preference=emulated),
        "mxfp4": MXDynamicActivationMXWeightConfig(32, fp4, fp4, emulated),
        "nvfp4": NVFP4WeightOnlyConfig(),
        "nvfp4, static activations": NVFP4DynamicActivationNVFP4WeightConfig(step="convert", use_triton_kernel=False),
    }
    theirs = model()
    if "nvfp4, static" in form:
        torchao.quantize_(theirs, NVFP4DynamicActivationNVFP4WeightConfig(step="prepare"))
        theirs(torch.ones(2, 256, dtype=torch.bfloat16))
    torchao.quantize_(theirs, configs[form])
    tensors, metadata = flatten_tensor_state_dict(theirs.state_dict())
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata)
    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": type(configs[form]).__name__}}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return {name: one.dequantize().detach() for name, one in theirs.state_dict().items()}


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore:.* are for other programs alone")
@pytest.mark.parametrize("form", RECIPES)
def test_weights_keep_their_bytes_and_values(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, ours, recipe = written(form, tmp_path / "theirs", monkeypatch), model(), RECIPES[form]
    there = load_file(tmp_path / "theirs" / "model.safetensors")
    assert quantize_as_stored(ours, tmp_path / "theirs", files=f"{recipe}/torchao") == dict.fromkeys(WEIGHTS, recipe)
    for param in ours.parameters():
        param.data.zero_()
    load_safetensors(ours, tmp_path / "theirs")
    for name, value in values.items():
        found: Any = ours.get_parameter(name)
        if name in WEIGHTS:
            codes = there[f"{name[0]}._weight_qdata"].view(torch.uint8)
            assert torch.equal(found.planes()["rowwise_data"].view(torch.uint8), codes)
            found = found.dequantize(torch.bfloat16)
        assert torch.equal(found, value)
    convert_safetensors(tmp_path / "theirs", tmp_path / "plain", dtype=torch.bfloat16)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert plain.keys() == values.keys()
    assert all(torch.equal(plain[name], value) for name, value in values.items())
    with pytest.raises(LayoutError, match=rf"does not write their codes; export as {recipe}/"):
        export_safetensors(ours, tmp_path / "out", files="torchao", source=tmp_path / "theirs")
    files = "modelopt" if "nvfp4" in form else "compressed_tensors"
    export_safetensors(ours, tmp_path / "out", files=files, source=tmp_path / "theirs")
    again = model()
    load_safetensors(again, tmp_path / "out", convert=True)
    assert all(torch.equal(param, values[name]) for name, param in again.named_parameters())


def values_of_shards(path: str, files: str) -> dict[str, Tensor]:
    """On ranks: the values of weights whose shards end inside swizzled tiles of 128 rows."""
    ours = model()
    quantize_as_stored(ours, path, files=files)
    fully_shard(ours)
    load_safetensors(ours, path)
    full = {name: param.full_tensor() for name, param in ours.named_parameters()}  # type: ignore[attr-defined]
    return {name: (one.dequantize(torch.bfloat16) if name in WEIGHTS else one).detach() for name, one in full.items()}


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4", pytest.param("float8 by blocks", marks=pytest.mark.thorough)])
def test_shards_read_their_rows(form: str, two: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = written(form, tmp_path / "theirs", monkeypatch)
    for found in two.run(values_of_shards, str(tmp_path / "theirs"), f"{RECIPES[form]}/torchao"):
        assert found.keys() == values.keys()
        assert all(torch.equal(found[name], value) for name, value in values.items())


def test_scales_in_another_order_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MXTensor has them row by row outside of `quantize_`: the same names and dtypes, other dims."""
    written("mxfp8", tmp_path / "theirs", monkeypatch)
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"0._weight_scale": tensors["0._weight_scale"].reshape(384, 8)}, file)
    with pytest.raises(LayoutError, match=r"_weight_scale is F8_E8M0 of \[384, 8\]"):
        load_safetensors(model(), tmp_path / "theirs", strict=False, convert=True)
    with pytest.raises(LayoutError, match=r"_weight_scale is F8_E8M0 of \[384, 8\].* transformers reads them"):
        convert_safetensors(tmp_path / "theirs", tmp_path / "out", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("0._weight_zero_point", torch.ones(384, 1, dtype=torch.int8), "is not 0 everywhere"),
        ("0._weight_act_pre_scale", torch.ones(256, dtype=torch.bfloat16), "0._weight_act_pre_scale beside it"),
    ],
)
def test_what_changes_the_values_is_not_left_out(
    name: str, tensor: Tensor, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written("int8", tmp_path / "theirs", monkeypatch)
    file = tmp_path / "theirs" / "model.safetensors"
    save_file({**load_file(file), name: tensor}, file)
    ours = model()
    quantize_as_stored(ours, tmp_path / "theirs")
    for read in (ours, model()):
        with pytest.raises(LayoutError, match=said):
            load_safetensors(read, tmp_path / "theirs", strict=False, convert=True)
    with pytest.raises(LayoutError, match=said):
        convert_safetensors(tmp_path / "theirs", tmp_path / "out", dtype=torch.bfloat16)
