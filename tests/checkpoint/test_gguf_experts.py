"""Weights of experts in GGUF files: one tensor or several for a weight of three dims, values by the package gguf."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch

from layoutc import checkpoint
from layoutc.recipes import q4_k
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

pytest.importorskip("gguf", reason="needs gguf: pip install 'layoutc[formats]'")
GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "moe.gguf", experts=True)


def check(model: Any, file: Path) -> None:
    """Every value is the package's."""
    expected = gguf_files.expected(file)
    for name, param in model.named_parameters():
        ours = param.dequantize(torch.float32) if isinstance(param, QuantizedTensor) else param
        assert torch.equal(ours, expected[name]), name


@pytest.mark.parametrize("apart", [False, True])
def test_experts_keep_their_bytes(apart: bool, file: Path, tmp_path: Path) -> None:
    model = gguf_files.skeleton(experts=True, apart=apart)
    recipes = checkpoint.quantize_as_stored(model, file)
    assert recipes[DOWN] == "q6_k"
    assert recipes[GATE_UP.replace("gate_up", "up" if apart else "gate_up")] == "q4_k"
    done = checkpoint.load_gguf(model, file)
    assert done == ((), (), ("model.embed_tokens.weight",))
    check(model, file)
    checkpoint.export_gguf(model, tmp_path / "out.gguf", source=file)
    assert filecmp.cmp(file, tmp_path / "out.gguf", shallow=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("chunk", [None, 5000])
def test_plain_experts_take_values_and_give_the_file_back(
    chunk: int | None, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also some rows at a time, and by pieces that end inside a matrix."""
    if chunk is not None:
        for name in ("gguf.values.CHUNK", "gguf.writing.CHUNK", "safetensors.values.DEQUANTIZED"):
            monkeypatch.setattr(f"layoutc.checkpoint.{name}", chunk)
    model = gguf_files.skeleton(experts=True)
    checkpoint.load_gguf(model, file)
    check(model, file)
    checkpoint.export_gguf(model, tmp_path / "out.gguf", source=file)
    assert filecmp.cmp(file, tmp_path / "out.gguf", shallow=False)
    with torch.no_grad():
        dict(model.named_parameters())[GATE_UP].mul_(0.75)
    before = gguf_files.expected(file)
    types = checkpoint.export_gguf(model, tmp_path / "plain.gguf", source=file)
    assert {name: kind for name, kind in types.items() if "exps" in name} == {
        "blk.0.ffn_gate_exps.weight": "F32",
        "blk.0.ffn_up_exps.weight": "F32",
        "blk.0.ffn_down_exps.weight": "Q6_K",
    }
    check(model, tmp_path / "plain.gguf")
    types = checkpoint.export_gguf(model, tmp_path / "tuned.gguf", source=file, quantize=True)
    assert types["blk.0.ffn_up_exps.weight"] == "Q4_K"
    found = gguf_files.expected(tmp_path / "tuned.gguf")
    assert torch.equal(found[GATE_UP], q4_k.quantize(before[GATE_UP] * 0.75).dequantize(torch.float32))
    assert torch.equal(found[DOWN], before[DOWN])
    again = gguf_files.skeleton(experts=True)
    checkpoint.load_gguf(again, tmp_path / "plain.gguf")
    check(again, tmp_path / "plain.gguf")


def test_parts_of_different_types(tmp_path: Path) -> None:
    """Nothing quantized holds both; plain weights take what each stands for."""
    file = gguf_files.write(tmp_path / "in.gguf", kinds=gguf_files.OF_EXPERTS | {"ffn_up_exps": "Q6_K"}, experts=True)
    model = gguf_files.skeleton(experts=True)
    assert GATE_UP not in checkpoint.quantize_as_stored(model, file)
    checkpoint.load_gguf(model, file)
    check(model, file)
    checkpoint.export_gguf(model, tmp_path / "out.gguf", source=file)
    assert filecmp.cmp(file, tmp_path / "out.gguf", shallow=False)
    apart = gguf_files.skeleton(experts=True, apart=True)
    assert checkpoint.quantize_as_stored(apart, file)["model.layers.0.mlp.experts.up_proj"] == "q6_k"
    checkpoint.load_gguf(apart, file)
    check(apart, file)
    import layoutc

    other = gguf_files.skeleton(experts=True)
    layoutc.quantize_(other, "q4_k", param_filter=["*.gate_up_proj"])
    with pytest.raises(LayoutError, match=r"gate_up_proj is Q4_K and Q6_K in the file, a part in each, which is no"):
        checkpoint.load_gguf(other, file)


def test_what_does_not_fit_is_refused(file: Path, tmp_path: Path) -> None:
    model = gguf_files.skeleton()
    with pytest.raises(LayoutError, match=r"ffn_up_exps\.weight is in the file, but not in the model"):
        checkpoint.load_gguf(model, file)
    dense = gguf_files.write(tmp_path / "dense.gguf")
    experts = gguf_files.skeleton(experts=True)
    with pytest.raises(
        LayoutError, match=r"gate_up_proj is not in the file, as blk\.0\.ffn_gate_exps\.weight, blk\.0\.ffn_up_exps"
    ):
        checkpoint.load_gguf(experts, dense)
    small = gguf_files.skeleton(experts=True)
    small.model.layers[0].mlp.experts.gate_up_proj = torch.nn.Parameter(torch.zeros(3, 1023, 256))
    with pytest.raises(LayoutError, match=r"gate_up_proj: shape \(3, 1024, 256\) in the files, \(3, 1023, 256\) in"):
        checkpoint.load_gguf(small, file)
    with pytest.raises(LayoutError, match=r"gate_up_proj of shape \(3, 1023, 256\) is not 2 equal parts: blk\.0"):
        checkpoint.export_gguf(small, tmp_path / "out.gguf", source=file)


def test_experts_convert_to_a_plain_folder_and_back(file: Path, tmp_path: Path) -> None:
    checkpoint.convert_gguf(file, tmp_path / "plain", dtype=torch.float32)
    model = gguf_files.skeleton(experts=True)
    checkpoint.load_safetensors(model, tmp_path / "plain")
    check(model, file)
    checkpoint.convert_to_gguf(tmp_path / "plain", tmp_path / "same.gguf", source=file)
    assert filecmp.cmp(file, tmp_path / "same.gguf", shallow=False)
