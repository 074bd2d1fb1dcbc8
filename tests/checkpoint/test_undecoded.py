"""Codes never pass for values: what a folder, a file or a model holds in a scheme that nothing decodes is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf_files import skeleton
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from layoutc.checkpoint import (
    convert_safetensors,
    export_safetensors,
    load_gguf,
    load_safetensors,
    quantize_as_stored,
    stream_export,
)
from layoutc.checkpoint.gguf.convert import convert_gguf, convert_to_gguf
from layoutc.checkpoint.held.undecoded import Described, undecoded
from layoutc.cli.app import main
from layoutc.runtime.errors import LayoutError

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def codes(*shape: int) -> Tensor:
    return torch.randint(1, 100, shape, dtype=torch.uint8)


def fp8(name: str) -> dict[str, Tensor]:
    """As DeepSeek's files have a weight."""
    return {f"{name}.weight": codes(128, 128).view(E4M3), f"{name}.weight_scale_inv": torch.ones(1, 1)}


def int4(name: str, **more: Tensor) -> dict[str, Tensor]:
    """As compressed-tensors packs a weight in groups of 128."""
    packed = {
        "weight_packed": codes(128, 64).view(torch.int32),
        "weight_scale": torch.ones(128, 1, dtype=BF16),
        "weight_shape": torch.tensor([128, 128]),
    }
    return {f"{name}.{last}": one for last, one in (packed | more).items()}


FP8_CONFIG: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True}}},
}
NORM = {"norm.weight": torch.ones(128, dtype=BF16)}


def folder(path: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None) -> Path:
    path.mkdir()
    save_file(NORM | tensors, path / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


@pytest.mark.parametrize(
    ("tensors", "config", "source_files", "named"),
    [
        (fp8("a") | fp8("b"), None, None, ["a.weight", "b.weight"]),
        ({"a.weight": codes(128, 128).view(E4M3)} | fp8("b"), FP8_CONFIG, None, ["a.weight"]),
        (int4("a") | fp8("b"), FP8_CONFIG, None, ["a.weight_packed"]),
        (int4("a") | fp8("b"), None, "fp8_block/deepseek", ["a.weight_packed"]),
        (int4("a") | fp8("b"), None, "int4_packed128/compressed_tensors", ["b.weight"]),
        ({"a.weight": codes(128, 64), "a.weight_scale": codes(128, 8).view(E4M3)}, None, None, ["a.weight"]),
        ({"a.qweight": codes(16, 512).view(torch.int32)}, None, None, ["a.qweight"]),
        ({"experts.up_blocks": codes(2, 8, 4, 16)}, None, None, ["experts.up_blocks"]),
        ({"a.weight": codes(64, 1), "a.weight.absmax": torch.ones(2)}, None, None, ["a.weight"]),
        ({"a.weight": torch.ones(4, 4), "a.weight_scale_inv": torch.ones(1, 1)}, None, None, ["a.weight"]),
        ({"a.weight": torch.ones(4, 4), "a.scale": codes(4, 1).view(E4M3)}, None, None, ["a.weight"]),
        (int4("a", weight_zero_point=codes(16, 4).view(torch.int32)), INT4_CONFIG, None, ["a.weight_packed"]),
        ({"a.W_q": codes(64, 256).view(torch.float32), "a.scale": torch.ones(64, 1)}, None, None, ["a.W_q"]),
        ({"a.dense_weights": codes(64, 64).view(torch.int64)}, None, None, ["a.dense_weights"]),
        (fp8("b") | {"b.pre_quant_scale": torch.ones(128)}, FP8_CONFIG, None, ["b.weight"]),
    ],
)
@pytest.mark.parametrize("into", [{"dtype": BF16}, {"files": "fp8_block/compressed_tensors"}], ids=["plain", "files"])
def test_a_folder_with_codes_that_nothing_decodes_is_not_converted(
    tensors: dict[str, Tensor],
    config: dict[str, Any] | None,
    source_files: str | None,
    named: list[str],
    into: dict[str, Any],
    tmp_path: Path,
) -> None:
    """All of them are named at once, no other is, and nothing is written."""
    path = folder(tmp_path / "in", tensors, config)
    with pytest.raises(LayoutError, match="tensors hold codes that layoutc can't decode") as raised:
        convert_safetensors(path, tmp_path / "out", source_files=source_files, **into)
    text = str(raised.value)
    assert all(f"{name} (" in text for name in named)
    assert text.count(" of [") == len(named)
    assert [one.name for one in tmp_path.iterdir()] == ["in"]


def test_the_command_says_which_recipes_read_such_tensors(tmp_path: Path) -> None:
    path = folder(tmp_path / "in", fp8("a"), None)
    options = ["convert", str(path), str(tmp_path / "out"), "--dtype", "bfloat16"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 1
    assert "a.weight (F8_E4M3 of [128, 128] with a.weight_scale_inv beside it)" in result.stderr
    assert "fp8_block/deepseek" in result.stderr
    result = CliRunner().invoke(main, [*options, "--from", "fp8_block/deepseek"])
    assert result.exit_code == 0, result.stderr


def test_of_many_codes_the_message_counts_those_of_one_name(tmp_path: Path) -> None:
    path = folder(tmp_path / "in", {f"layers.{n}.weight": codes(2, 2).view(E4M3) for n in range(40)}, None)
    with pytest.raises(LayoutError, match=r"40 tensors .*: layers\.\*\.weight \(40, such as layers\.0\.weight, F8"):
        convert_safetensors(path, tmp_path / "out", dtype=BF16)


def test_integers_and_scales_of_models_are_values() -> None:
    plain = {
        "attention.bias": ("U8", (1, 1, 64, 64)),
        "gate.tid2eid": ("I32", (99, 2)),
        "embeddings.position_ids": ("I64", (1, 512)),
        "relative_position_index": ("I32", (49, 49)),
        "steps": ("I32", (3,)),
        "norm.weight": ("BF16", (64,)),
        "norm.scale": ("BF16", (64,)),
        "router.scale": ("BF16", (64,)),
        "router.proj.weight": ("BF16", (4, 64)),
        "mlp.weight": ("BF16", (4, 64)),
        "mlp.biases": ("BF16", (4,)),
        "mlp.input_scale": ("F32", ()),
        "self_attn.k_scale": ("F32", ()),
        "hc_attn_scale": ("F32", (3,)),
        "logit_scale": ("F32", ()),
        "done": ("BOOL", (4, 4)),
    }
    assert not undecoded({name: Described(*header) for name, header in plain.items()})


@pytest.mark.parametrize("strict", [False, True])
def test_a_load_reads_no_weight_that_something_beside_it_says_how_to_decode(strict: bool, tmp_path: Path) -> None:
    """A plain model, whatever the dtype; and a quantized one, whose binding leaves something out."""
    model = nn.ModuleDict({"a": nn.Linear(128, 128, bias=False), "norm": nn.RMSNorm(128)})
    before = model["a"].weight.clone()
    path = folder(tmp_path / "in", {"a.weight": torch.zeros(128, 128), "a.weight_scale": torch.ones(())}, None)
    with pytest.raises(LayoutError, match=r"a.weight \(F32 of \[128, 128\] with a.weight_scale beside it\)"):
        load_safetensors(model, path, strict=strict)
    assert torch.equal(model["a"].weight, before)
    zeros = codes(16, 4).view(torch.int32)
    path = folder(tmp_path / "zeros", int4("a", weight_zero_point=zeros), INT4_CONFIG)
    quantize_as_stored(model, path)
    with pytest.raises(LayoutError, match=r"a.weight_packed \(I32 of \[128, 16\] with a.weight_zero_point beside it\)"):
        load_safetensors(model, path, strict=strict)


def test_what_a_model_has_itself_beside_its_weight_is_loaded(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.zeros(4, 4)))
    model.register_parameter("weight_scale", nn.Parameter(torch.zeros(4)))
    path = tmp_path / "in"
    path.mkdir()
    save_file({"weight": torch.ones(4, 4), "weight_scale": torch.ones(4)}, path / "model.safetensors")
    assert load_safetensors(model, path) == ((), ())
    assert torch.equal(model.weight_scale, torch.ones(4))


@pytest.mark.parametrize("dtype", [None, BF16])
def test_an_export_refuses_codes_that_other_packages_layers_hold(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """As transformers' own FP8 layers have them, or bitsandbytes'."""
    state = {**fp8("a"), "b.weight": codes(64, 1), "c.weight": torch.zeros(4, 4), "steps": torch.arange(3)}
    with pytest.raises(LayoutError, match=r"the model: 2 tensors .*a.weight \(F8_E4M3.*; b.weight \(U8 of \[64, 1\]\)"):
        export_safetensors(state, tmp_path / "out", dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_a_stream_refuses_them_too() -> None:
    model = nn.ModuleDict({"a": nn.Linear(128, 128, bias=False)})
    import layoutc

    layoutc.quantize_(model, "fp8_block")
    state = model.state_dict() | {"b.weight": codes(64, 1)}
    with pytest.raises(LayoutError, match=r"b.weight \(U8 of \[64, 1\]\)"):
        next(iter(stream_export(state, files="deepseek")))


def gguf_of(path: Path, **more: np.ndarray[Any, Any]) -> Path:
    """A file of the tiny Llama in F32, with other tensors."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    tensors = {"token_embd.weight": np.zeros((72, 256), np.float32), "output_norm.weight": np.ones(256, np.float32)}
    for name, value in (tensors | more).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_files_with_codes_beside_the_types_of_records_are_refused(tmp_path: Path) -> None:
    """Integers as a weight, and llama.cpp's scale of a whole weight."""
    pytest.importorskip("gguf", reason="needs gguf: pip install 'layoutc[formats]'")
    scaled = {"blk.0.attn_v.weight": np.ones((128, 256), np.float32), "blk.0.attn_v.scale": np.ones(1, np.float32)}
    path = gguf_of(tmp_path / "scaled.gguf", **scaled)
    with pytest.raises(LayoutError, match=r"attn_v.weight \(F32 of \[128, 256\] with blk.0.attn_v.scale beside it\)"):
        load_gguf(skeleton(), path, strict=False)
    path = gguf_of(tmp_path / "integers.gguf", **{"blk.0.attn_v.weight": np.ones((128, 256), np.int8)})
    with pytest.raises(LayoutError, match=r"blk.0.attn_v.weight \(I8 of \[128, 256\]\)"):
        convert_gguf(path, tmp_path / "out", dtype=BF16)
    source = gguf_of(tmp_path / "source.gguf", **{"blk.0.attn_v.weight": np.ones((128, 256), np.float32)})
    with pytest.raises(LayoutError, match=r"a.weight \(F8_E4M3 of \[128, 128\] with a.weight_scale_inv beside it\)"):
        convert_to_gguf(folder(tmp_path / "in", fp8("a"), None), tmp_path / "new.gguf", source=source)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "new.gguf").exists()


def index(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32).repeat_interleave(128)


def two_groups(path: Path, order: Tensor) -> Path:
    """A weight in two groups of 128 columns, and the group of each column as compressed-tensors has it."""
    more = {"weight_packed": codes(128, 128).view(torch.int32), "weight_shape": torch.tensor([128, 256])}
    more |= {"weight_scale": torch.tensor([[1.0, 2.0]] * 128, dtype=BF16), "weight_g_idx": order}
    return folder(path, int4("a", **more), INT4_CONFIG)


@pytest.mark.parametrize("order", [index(1, 0), index(0, -1), index(0, 1).flip(0)], ids=["swapped", "part", "flipped"])
def test_columns_in_another_order_are_refused(order: Tensor, tmp_path: Path) -> None:
    """By a conversion, and by loads that are strict and not, of plain models and quantized ones."""
    path = two_groups(tmp_path / "in", order)
    words = r"a.weight_g_idx in the files does not number the columns in blocks of 128: .*actorder"
    with pytest.raises(LayoutError, match=words):
        convert_safetensors(path, tmp_path / "out", dtype=BF16)
    assert not (tmp_path / "out").exists()
    for quantized in (False, True):
        model = nn.ModuleDict({"a": nn.Linear(256, 128, bias=False), "norm": nn.RMSNorm(128)})
        if quantized:
            quantize_as_stored(model, path)
        for strict in (False, True):
            with pytest.raises(LayoutError, match=words):
                load_safetensors(model, path, strict=strict, convert=not quantized)


@pytest.mark.parametrize("order", [index(0, 1), index(-1, -1)], ids=["in_order", "unset"])
def test_an_index_in_order_or_of_minus_1_alone_says_nothing(order: Tensor, tmp_path: Path) -> None:
    """And is written back as it was, with the folder as a source."""
    torch.manual_seed(0)
    path = two_groups(tmp_path / "in", order)
    model = nn.ModuleDict({"a": nn.Linear(256, 128, bias=False), "norm": nn.RMSNorm(128)})
    load_safetensors(model, path, convert=True)
    convert_safetensors(path, tmp_path / "out", dtype=torch.float32)
    words = load_file(path / "model.safetensors")["a.weight_packed"]
    numbers = (words[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15).reshape(128, 256) - 8
    values = numbers * torch.tensor([1.0, 2.0]).repeat_interleave(128)
    assert torch.equal(model["a"].weight, values)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a.weight"], values)
    quantize_as_stored(model, path)
    load_safetensors(model, path)
    export_safetensors(model, tmp_path / "exported", files="compressed_tensors", source=path)
    convert_safetensors(path, tmp_path / "converted", files="int4_packed128/compressed_tensors")
    for name in ("exported", "converted"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == load_file(path / "model.safetensors").keys()
        assert torch.equal(found["a.weight_g_idx"], order)


@pytest.mark.parametrize("locations", [["weight_input", "input"], ["output"], ["weight_input", "weight_output"], []])
def test_weights_that_multiply_transformed_activations_are_refused(locations: list[str], tmp_path: Path) -> None:
    """As compressed-tensors has them. Transforms of weights alone are in their values."""
    apply = [{"location": one, "targets": ["Linear"]} for one in locations]
    config = INT4_CONFIG | {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}}
    path = folder(tmp_path / "in", int4("a"), config)
    model = nn.ModuleDict({"a": nn.Linear(128, 128, bias=False), "norm": nn.RMSNorm(128)})
    for call in (
        lambda: convert_safetensors(path, tmp_path / "out", dtype=BF16),
        lambda: load_safetensors(model, path, convert=True),
        lambda: quantize_as_stored(model, path),
    ):
        if not {"input", "output"} & {*locations}:
            call()
            continue
        with pytest.raises(LayoutError, match=r"transforms activations while the model runs \((in|out)put of"):
            call()
