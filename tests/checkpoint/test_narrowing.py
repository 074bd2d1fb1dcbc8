"""Values that a dtype does not hold: beyond it they are refused by name, rounded they are said once.

And scales of whole weights that scale nothing.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import skeleton
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import layoutc
from layoutc.checkpoint import (
    convert_safetensors,
    export_safetensors,
    load,
    load_gguf,
    load_safetensors,
    quantize_as_stored,
    save,
)
from layoutc.checkpoint.gguf.convert import convert_gguf
from layoutc.runtime.errors import LayoutError

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def folder(path: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def two(dtype: torch.dtype) -> nn.ModuleDict:
    """Two weights and a bias."""
    return nn.ModuleDict({"a": nn.Linear(64, 32, dtype=dtype), "b": nn.Linear(64, 32, bias=False, dtype=dtype)})


def zeros(dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.zeros(value.shape, dtype=dtype) for name, value in two(dtype).state_dict().items()}


@pytest.mark.parametrize(
    ("stored", "into", "values"),
    [(F32, F16, (1e6, -70000.0)), (BF16, F16, (1e6, -1e9)), (F32, BF16, (3.4e38, -3.4e38))],
)
@pytest.mark.parametrize("use", ["plain", "cast_on_gather_", "quantize_"])
def test_finite_values_beyond_the_models_dtype_are_refused_by_name(
    stored: torch.dtype, into: torch.dtype, values: tuple[float, float], use: str, tmp_path: Path
) -> None:
    """All weights at once, and none is changed; infinities stay what they are."""
    tensors, model = zeros(stored), two(into)
    tensors["a.weight"][3, 5], tensors["b.weight"][0, 0] = values
    tensors["a.bias"][0] = float("inf")
    if use == "quantize_" and into is BF16:
        pytest.skip("codes reach as far as bf16 does")
    if use != "plain":
        getattr(layoutc, use)(model, "mxfp8")
    before = {name: torch.clone(value) for name, value in model.state_dict().items()}
    with pytest.raises(
        LayoutError, match=r"(?s)a.weight: 1 finite values would be .*b.weight: 1 finite values would be"
    ) as raised:
        load_safetensors(model, folder(tmp_path / "in", tensors))
    assert "a.bias" not in str(raised.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_layoutcs_own_checkpoints_too(tmp_path: Path) -> None:
    """Of plain values and of codes, into plain weights and quantized ones; nothing is loaded."""
    for source, use in ((F32, False), (F32, True)):
        model, other, quantized = two(source), two(F16), two(F16)
        with torch.no_grad():
            model["b"].weight.fill_(1e6)
        if use:
            layoutc.quantize_(model, "mxfp8")
        layoutc.quantize_(quantized, "nvfp4")
        save(model.state_dict(), tmp_path / str(use), no_dist=True)
        before = torch.clone(other["a"].weight)
        for into in (other, quantized):
            with pytest.raises(LayoutError, match=r"b\.weight: 2,048 finite values would be infinite in float16"):
                load(into.state_dict(), tmp_path / str(use), convert=True)
        assert torch.equal(before, other["a"].weight)


def test_rounding_is_said_once_with_the_names_of_what_it_changes(tmp_path: Path) -> None:
    tensors = zeros(F32) | {"a.weight": torch.full((32, 64), 1 + 2**-12), "a.bias": torch.full((32,), 0.5)}
    path, model = folder(tmp_path / "in", tensors), two(BF16)
    with pytest.warns(UserWarning, match=r"values were rounded .*: a.weight \(F32 to BF16\)\. ") as said:
        load_safetensors(model, path)
    assert len(said) == 1
    assert torch.equal(model["a"].weight, torch.ones(32, 64, dtype=BF16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_safetensors(two(F32), path)
        save_file(tensors | {"a.weight": torch.ones(32, 64)}, path / "model.safetensors")
        load_safetensors(two(BF16), path)  # fp32 in the file, but of values that bf16 has


FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def large(path: Path) -> Path:
    """An FP8 weight whose value is 2^20."""
    codes = torch.ones(128, 128).to(torch.float8_e4m3fn)
    return folder(path, {"a.weight": codes, "a.weight_scale_inv": torch.full((1, 1), 2.0**20)}, FP8)


def test_codes_that_stand_for_values_beyond_fp16_are_refused(tmp_path: Path) -> None:
    """In loads, conversions and exports; bf16 takes them."""
    path, model = large(tmp_path / "in"), nn.ModuleDict({"a": nn.Linear(128, 128, bias=False, dtype=F16)})
    words = r"a.weight: 16,384 finite values would be infinite in float16"
    with pytest.raises(LayoutError, match=words):
        load_safetensors(model, path, convert=True)
    with pytest.raises(LayoutError, match=words):
        convert_safetensors(path, tmp_path / "out", dtype=F16)
    convert_safetensors(path, tmp_path / "plain", dtype=BF16)
    assert load_file(tmp_path / "plain" / "model.safetensors")["a.weight"].unique().tolist() == [2.0**20]
    quantize_as_stored(model, path)
    load_safetensors(model, path)
    for state in (model.state_dict(), {"a.weight": torch.full((128, 128), 2.0**20)}):
        with pytest.raises(LayoutError, match=words):
            export_safetensors(state, tmp_path / "out", dtype=F16)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in", "plain"]


def test_gguf_files_too(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'layoutc[formats]'")

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    norm, rows = np.full(256, 1 + 2**-12, np.float32), np.full((128, 256), 1e6, np.float32)
    writer.add_tensor("output_norm.weight", norm)
    writer.add_tensor("blk.0.attn_v.weight", rows)
    q5 = gguf.GGMLQuantizationType.Q5_1
    for name, value in (("blk.0.attn_k.weight", rows / 1e6), ("blk.0.attn_q.weight", np.full((256, 256), 40000.0))):
        packed = gguf.quants.quantize(value.astype(np.float32), q5)
        if value.max() > 1:  # 31 * scale of fp16 + least
            packed.reshape(-1, 24)[:, :4] = np.array([40000, 40000], np.float16).view(np.uint8)
            packed.reshape(-1, 24)[:, 4:] = 255
        writer.add_tensor(name, packed, raw_dtype=q5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    words = r"(?s)q_proj.weight: 65,536 finite values would be .*v_proj.weight: 32,768 finite values would be"
    with pytest.raises(LayoutError, match=words):
        load_gguf(skeleton().to(F16), path, strict=False)
    with pytest.raises(LayoutError, match=r"q_proj.weight: 65,536 finite values would be infinite in float16"):
        convert_gguf(path, tmp_path / "out", dtype=F16)
    with pytest.warns(UserWarning, match=r"values were rounded .*, model.norm.weight \(F32 to BF16\)"):
        load_gguf(skeleton().to(BF16), path, strict=False)


def nvfp4(recipe: str, level: float, *, zero: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A weight of 16 x 32 as ModelOpt and compressed-tensors have it."""
    codes = torch.full((16, 16), 0x80 if zero else 0x12, dtype=torch.uint8)  # -0 and 0, or 1 and 0.5
    scale, whole = torch.full((16, 2), 2.0).to(torch.float8_e4m3fn), torch.tensor(level)
    if recipe == "modelopt":
        tensors = {"a.weight": codes, "a.weight_scale": scale, "a.weight_scale_2": whole}
        return tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    tensors = {"a.weight_packed": codes, "a.weight_scale": scale, "a.weight_global_scale": whole[None]}
    return tensors, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


@pytest.mark.parametrize("level", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("program", "name"), [("modelopt", "a.weight_scale_2"), ("compressed_tensors", "a.weight_global_scale")]
)
def test_a_scale_of_a_whole_weight_that_is_none_is_refused_by_name(
    program: str, name: str, level: float, tmp_path: Path
) -> None:
    """By loads of quantized and plain models, and conversions, before anything is written."""
    path = folder(tmp_path / "in", *nvfp4(program, level, zero=False))
    words = rf"{name} in the files is {level:g}, which is no scale"
    with pytest.raises(LayoutError, match=words):
        convert_safetensors(path, tmp_path / "out", dtype=BF16)
    for recipe in (None, f"nvfp4_{program}", "nvfp4_1d"):
        model = nn.ModuleDict({"a": nn.Linear(32, 16, bias=False, dtype=BF16)})
        if recipe is not None:
            quantize_as_stored(model, path, files=f"{recipe}/{program}")
        with pytest.raises(LayoutError, match=words):
            load_safetensors(model, path, convert=recipe is None)
    assert not (tmp_path / "out").exists()


def test_a_scale_of_0_is_right_for_codes_of_0(tmp_path: Path) -> None:
    """As ModelOpt multiplies by it. compressed-tensors divides, and has NaN there itself."""
    path = folder(tmp_path / "in", *nvfp4("modelopt", 0.0, zero=True))
    convert_safetensors(path, tmp_path / "out", dtype=BF16)
    assert not load_file(tmp_path / "out" / "model.safetensors")["a.weight"].any()
    model = nn.ModuleDict({"a": nn.Linear(32, 16, bias=False)})
    load_safetensors(model, path, convert=True)
    assert not model["a"].weight.any()
    path = folder(tmp_path / "divided", *nvfp4("compressed_tensors", 0.0, zero=True))
    with pytest.raises(LayoutError, match=r"a.weight_global_scale in the files is 0"):
        convert_safetensors(path, tmp_path / "other", dtype=BF16)
