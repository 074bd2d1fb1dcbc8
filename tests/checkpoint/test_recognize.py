"""Which bindings there are, also where several recipes have one layout; and which of them read a folder's weights."""

from __future__ import annotations

import importlib
import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import unshipped
from safetensors.torch import load_file, save_file
from torch import nn

from layoutc.checkpoint import convert_safetensors, load_safetensors, quantize_as_stored
from layoutc.checkpoint.held.stored import Stored
from layoutc.checkpoint.safetensors import recognize
from layoutc.checkpoint.safetensors.choosing import Fit, alternatives, check_all_fit, holding, told
from layoutc.checkpoint.safetensors.recognize import Bound, bindings_of, chosen, installed, is_for
from layoutc.recipes import (
    fp8_block,
    fp8_block_e8m0,
    mxfp4,
    mxfp4_gpt_oss,
    nf4_bitsandbytes,
    nvfp4_1d,
    nvfp4_modelopt,
)
from layoutc.runtime.errors import LayoutError


def test_a_recipe_without_files_hides_no_files_of_its_layout() -> None:
    """Whichever comes last: a recipe of one's own may have the layout of one that is installed."""
    unshipped.add_if_known("nf4_frozen")
    other: Any = importlib.import_module("layoutc.recipes.nf4_frozen")
    ours: Any = nf4_bitsandbytes.Tensor
    assert other.Tensor.LAYOUT.layout_id == ours.LAYOUT.layout_id
    for classes in ([ours, other.Tensor], [other.Tensor, ours]):
        assert [one.label for one in bindings_of(classes)] == [
            "nf4_bitsandbytes/bitsandbytes",
            "nf4_bitsandbytes/bitsandbytes_double",
        ]


@pytest.mark.parametrize(("typed", "meant"), [("fp8_blok/deepseek", "fp8_block/deepseek"), ("deepsek", "deepseek")])
def test_misspelled_bindings_are_answered_with_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(LayoutError, match=f"has files '{typed}'; did you mean {meant}\\?"):
        chosen(typed, installed())
    with pytest.raises(LayoutError, match=r"'q8_0/gguf' is of one file, not of a folder: .* --like FILE\.gguf"):
        chosen("q8_0/gguf", installed())
    with pytest.raises(LayoutError, match=r"files 'zebra'; bindings there are: .*fp8_block/deepseek"):
        chosen("zebra", installed())


def test_equal_bindings_of_a_layout_are_one() -> None:
    """Else files of a copied recipe would fit two."""
    copied: Any = type("Copied", (fp8_block.Tensor,), {})
    found = bindings_of([fp8_block.Tensor, copied, copied])
    assert found == [Bound(copied, binding) for binding in fp8_block.Tensor.LAYOUT.files.values()]


def fit(names: str, cls: Any = fp8_block.Tensor, binding: str = "deepseek") -> Fit:
    return Fit(Bound(cls, cls.LAYOUT.files[binding]), tuple(names))


def test_bindings_that_hold_some_of_the_same_weights_are_alternatives() -> None:
    """Also where only a third holds some of both; the one that holds most comes first."""
    a, b, c = fit("ab"), fit("cd", mxfp4.Tensor, "gpt_oss"), fit("bce", mxfp4_gpt_oss.Tensor, "gpt_oss")
    assert alternatives([a, b]) == [[a], [b]]
    assert alternatives([a, b, c]) == [[c, a, b]]
    assert alternatives([]) == []


def test_of_alternatives_those_that_convert_are_left_out() -> None:
    converts, exact = fit("ab", nvfp4_1d.Tensor, "modelopt"), fit("b", nvfp4_modelopt.Tensor, "modelopt")
    assert converts.bound.converts
    assert alternatives([converts, exact]) == [[exact]]
    assert alternatives([converts]) == [[converts]]


def test_a_refusal_counts_where_a_weight_follows_no_other() -> None:
    error = LayoutError("what is wrong")
    check_all_fit([fit("ab"), fit("c")], [(error, fit("ac"))])
    with pytest.raises(LayoutError, match="what is wrong"):
        check_all_fit([fit("ab"), fit("c")], [(error, fit("ad"))])


@pytest.mark.parametrize(
    ("data", "scale", "for_dense", "for_experts"),
    [
        ("F8_E4M3", "F8_E8M0", True, False),
        ("I8", "F8_E8M0", False, True),
        ("U8", "U8", False, True),  # the same bytes
        ("F32", "F8_E8M0", True, True),  # nobody's: each says what it misses
        ("F8_E4M3", None, False, False),  # a plain weight in FP8
        (None, "F8_E8M0", True, True),
    ],
)
def test_dtypes_tell_bindings_of_one_folder_apart(
    data: str | None, scale: str | None, for_dense: bool, for_experts: bool
) -> None:
    stored = {"a.weight": data, "a.scale": scale}
    tensors = {name: Stored(Path("f"), name, dtype, (1,), 0, 1) for name, dtype in stored.items() if dtype}
    told = [fit("", cls, "deepseek_v4").bound for cls in (fp8_block_e8m0.Tensor, mxfp4.Tensor)]
    assert [is_for(one, "a.weight", (32, 32), tensors, told) for one in told] == [for_dense, for_experts]
    assert [is_for(one, "a.weight", (32, 32), tensors) for one in told] == [scale is not None] * 2
    assert not any(is_for(one, "a.weight", (32,), tensors, told) for one in told)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq", "sym": True}


def gptq_folder(path: Path, config: dict[str, Any]) -> Path:
    """A weight of zeros, and its config."""
    path.mkdir()
    words = {"qweight": (16, 128), "qzeros": (1, 16)}
    tensors = {f"a.{last}": torch.zeros(shape, dtype=torch.int32) for last, shape in words.items()}
    save_file(tensors | {"a.scales": torch.ones(1, 128, dtype=torch.float16)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"checkpoint_format": "gptq_v2"}, "'gptq_v2' as checkpoint_format .* gptq/gptq have 'gptq'"),
        ({"bits": 8}, "8 as bits of its quantization_config"),
        ({"group_size": 64}, r"groups of 64: a.scales is F16 of \[1, 128\], but .* \[2, 128\]"),
        ({"quant_method": "awq"}, "'awq' as quant_method"),
    ],
)
def test_what_config_json_states_against_a_binding_that_is_named_is_refused(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """By all that read a folder, before anything is changed or written."""
    path, model = gptq_folder(tmp_path / "in", GPTQ | changed), nn.ModuleDict({"a": nn.Linear(128, 128, bias=False)})
    for call in (
        lambda: convert_safetensors(path, tmp_path / "out", dtype="float32", source_files="gptq"),
        lambda: quantize_as_stored(model, path, files="gptq/gptq"),
        lambda: load_safetensors(model, path, files="gptq", convert=True),
    ):
        with pytest.raises(LayoutError, match=words):
            call()
    assert type(model["a"].weight) is nn.Parameter
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("left_out", ["checkpoint_format", "quant_method", "bits", None])
def test_a_config_that_says_less_or_is_of_an_unknown_program_contradicts_nothing(
    left_out: str | None, tmp_path: Path
) -> None:
    config = {key: value for key, value in GPTQ.items() if key != left_out}
    config |= {"quant_method": "of-my-own"} if left_out is None else {}
    convert_safetensors(gptq_folder(tmp_path / "in", config), tmp_path / "out", dtype="float32", source_files="gptq")


def test_of_bindings_of_one_name_those_stay_that_config_json_does_not_contradict(tmp_path: Path) -> None:
    form: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": form}))
    labels = [one.label for one in told(tmp_path, "compressed_tensors", installed(), {})]
    recipes = ("nvfp4_1d", "nvfp4_compressed_tensors", "nvfp4_compressed_tensors_experts")
    assert labels == [f"{recipe}/compressed_tensors" for recipe in recipes]


@pytest.mark.parametrize("name", ["quanto_qmap.json", "quantization_map.json"])
def test_folders_of_quanto_say_what_they_are(tmp_path: Path, name: str) -> None:
    """As `QuantizedModelForCausalLM.save_pretrained` of optimum-quanto writes int4, and as its README does."""
    packed, scale = torch.zeros(32, 64, dtype=torch.uint8), torch.ones(64, 1)
    codes = {"0.weight._data._data": packed, "0.weight._scale": scale, "0.weight._shift": scale.clone()}
    save_file({**codes, "0.input_scale": torch.ones(())}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / name).write_text('{"0": {"weights": "qint4", "activations": "none"}}')
    said = rf"{name} describes files of \w+/quanto, .* names\. optimum-quanto reads them: .*named_parameters"
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    for call in (load_safetensors, quantize_as_stored, partial(load_safetensors, convert=True)):
        with pytest.raises(LayoutError, match=said):
            call(model, tmp_path)
    with pytest.raises(LayoutError, match=said):
        convert_safetensors(tmp_path, tmp_path / "out", dtype=torch.float32)


@pytest.mark.parametrize(("dtype", "recipe"), [(torch.int8, "int8_rowwise"), (torch.float8_e4m3fn, "fp8_rowwise")])
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32])
def test_quantos_bytes_load_with_its_values(
    scales: torch.dtype, dtype: torch.dtype, recipe: str, tmp_path: Path
) -> None:
    """optimum-quanto 0.2.7 multiplies codes by scales in the scales' dtype, which is that of the model."""
    torch.manual_seed(0)
    codes, scale = torch.randint(-127, 128, (64, 96)).to(dtype), (torch.rand(64, 1) / 64).to(scales)
    tensors = {"0.weight._data": codes, "0.weight._scale": scale, "0.input_scale": torch.ones((), dtype=scales)}
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "in" / "quanto_qmap.json").write_text('{"0": {"weights": "qint8", "activations": "none"}}')
    model = nn.Sequential(nn.Linear(96, 64, bias=False, dtype=scales))
    assert quantize_as_stored(model, tmp_path / "in") == {"0.weight": recipe}
    with pytest.warns(UserWarning, match=r"0\.input_scale are for other programs alone"):
        load_safetensors(model, tmp_path / "in")
    found: Any = model[0].weight
    assert torch.equal(found.planes()["rowwise_data"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.dequantize(scales), scale * codes.to(scales))
    convert_safetensors(tmp_path / "in", tmp_path / "plain", dtype=scales)
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(load_file(tmp_path / "plain" / "model.safetensors")["0.weight"], scale * codes.to(scales))
    (tmp_path / "in" / "quanto_qmap.json").unlink()  # as a state dict of torch.save has no map
    with pytest.raises(LayoutError, match=rf"0\.weight\._data .*{recipe}/quanto"):
        convert_safetensors(tmp_path / "in", tmp_path / "out", dtype=scales)


def test_one_of_the_weights_that_differ_in_numbers_says_which_bindings_a_folder_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every kind: the first layers may be plain, and a single weight may have a scheme of its own."""
    headers = [("head.weight", "F8_E4M3", (8, 256)), ("head.weight_scale", "F32", ())]
    for layer, expert in product(range(40), range(40)):
        name = f"layers.{layer}.experts.{expert}.up_proj.weight"
        headers += [(name, "F8_E4M3" if layer else "BF16", (128, 256))]
        headers += [(f"{name}_scale_inv", "F32", (1, 2))] if layer else []
    tensors = {name: Stored(Path("f"), name, dtype, shape, 0, 1) for name, dtype, shape in headers}
    fit_of, asked = recognize.fit_of, list[str]()
    monkeypatch.setattr(recognize, "fit_of", lambda *args: asked.append(args[1]) or fit_of(*args))
    found = {one.label for one in holding(installed(), tensors)}
    assert {"fp8_block/deepseek", "fp8_current/modelopt"} <= found
    assert len(asked) < 1000  # 100,000 weights took minutes
