"""Files that torchao's own functions write of its tensors, as transformers calls them; torchao reads the values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from layoutc.checkpoint import convert_safetensors, export_safetensors, load_safetensors, quantize_as_stored
from layoutc.runtime.errors import LayoutError

torchao = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install 'layoutc[integrations]'")
RECIPES = {"float8 by rows": "fp8_rowwise", "float8": "fp8_current", "int8": "int8_rowwise"}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 48)).bfloat16()


def written(form: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Writes a folder; returns the values."""
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    monkeypatch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda _: None)  # of products
    configs = {
        "float8 by rows": torchao.Float8WeightOnlyConfig(),
        "float8": torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerTensor()),
        "int8": torchao.Int8WeightOnlyConfig(version=2),
    }
    theirs = model()
    torchao.quantize_(theirs, configs[form])
    tensors, metadata = flatten_tensor_state_dict(theirs.state_dict())
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata)
    config = {"quant_method": "torchao", "quant_type": {"default": config_to_dict(configs[form])}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return {name: one.dequantize().detach() for name, one in theirs.state_dict().items()}


@pytest.mark.parametrize("form", RECIPES)
def test_weights_keep_their_bytes_and_values(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, ours = written(form, tmp_path / "theirs", monkeypatch), model()
    there = load_file(tmp_path / "theirs" / "model.safetensors")
    assert quantize_as_stored(ours, tmp_path / "theirs") == dict.fromkeys(("0.weight", "2.weight"), RECIPES[form])
    for param in ours.parameters():
        param.data.zero_()
    load_safetensors(ours, tmp_path / "theirs")
    for name, value in values.items():
        found: Any = ours.get_parameter(name)
        if name in ("0.weight", "2.weight"):
            codes = there[f"{name[0]}._weight_qdata"].view(torch.uint8)
            assert torch.equal(found.planes()["rowwise_data"].view(torch.uint8), codes)
            found = found.dequantize(torch.bfloat16)
        assert torch.equal(found, value)
    convert_safetensors(tmp_path / "theirs", tmp_path / "plain", dtype=torch.bfloat16)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert plain.keys() == values.keys()
    assert all(torch.equal(plain[name], value) for name, value in values.items())
    with pytest.raises(LayoutError, match=rf"does not write their codes; export as {RECIPES[form]}/"):
        export_safetensors(ours, tmp_path / "out", files="torchao", source=tmp_path / "theirs")
    export_safetensors(ours, tmp_path / "out", files="compressed_tensors", source=tmp_path / "theirs")
    codes = load_file(tmp_path / "out" / "model.safetensors")["0.weight"]
    assert torch.equal(codes.view(torch.uint8), there["0._weight_qdata"].view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("0._weight_zero_point", torch.ones(64, 1, dtype=torch.int8), "is not 0 everywhere"),
        ("0._weight_act_pre_scale", torch.ones(96, dtype=torch.bfloat16), "0._weight_act_pre_scale beside it"),
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
