"""What files of others hold beside a model's weights: scales of activations, layers that the model lacks, configs."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_files_of_others import FOLDERS, WRITERS, model_of, same_files, tensors_in
from torch import Tensor

import layoutc
from layoutc.checkpoint import convert_safetensors, export_safetensors, load_safetensors, quantize_as_stored
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}: pip install 'layoutc[{extra}]'")
    for name, extra in (("transformers", "integrations"), ("compressed_tensors", "formats"))
]


def write(path: Path, folder: str, more: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """The folder as its program writes it, with more tensors and keys of its quantization_config."""
    model = model_of(folder)
    tensors, quantization = WRITERS[folder](dict(model.state_dict()))
    path.mkdir()
    save(path, tensors | (more or {}))
    stated = model.config.to_dict() | {"quantization_config": quantization | config}
    stated["architectures"] = [type(model).__name__]
    (path / "config.json").write_text(json.dumps(stated, default=str), encoding="utf-8")
    return path


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})


def mtp(rows: int = 256) -> dict[str, Tensor]:
    """Tensors of a layer that predicts more tokens, as DeepSeek-V3's release has it: number 61, which transformers'
    class says that it ignores."""
    torch.manual_seed(3)
    layer = "model.layers.61"
    return {
        f"{layer}.eh_proj.weight": torch.randn(rows, 2 * rows).bfloat16(),
        f"{layer}.enorm.weight": torch.randn(rows).bfloat16(),
        f"{layer}.self_attn.o_proj.weight": torch.randn(rows, 128).to(torch.float8_e4m3fn),
        f"{layer}.self_attn.o_proj.weight_scale_inv": torch.rand(rows // 128, 1),
    }


def of_activations() -> dict[str, Tensor]:
    """Scales and zero points that programs write for activations and caches, beside weights and beside modules; and
    the frequencies that Llama's first files have in each layer."""
    layer = "model.layers.0"
    names = ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.output_scale", "mlp.up_proj.input_zero_point")
    found = {f"{layer}.{name}": torch.full((1,), 0.5 + i) for i, name in enumerate(names)}
    return found | {f"{layer}.self_attn.rotary_emb.inv_freq": torch.rand(24)}


@pytest.mark.parametrize(("folder", "more"), [("deepseek", mtp()), ("channel", of_activations())], ids=["mtp", "kv"])
def test_what_releases_have_beside_a_model_is_named_and_left(
    folder: str, more: dict[str, Tensor], tmp_path: Path
) -> None:
    path, model = write(tmp_path / "in", folder, more), model_of(folder)
    quantize_as_stored(model, path)
    with pytest.warns(
        UserWarning, match=f"{sorted(more)[0]}, .* and {len(more) - 2} more are for other programs alone"
    ):
        assert load_safetensors(model, path) == ((), ())
    alone = model_of(folder)
    quantize_as_stored(alone, write(tmp_path / "alone", folder))
    load_safetensors(alone, tmp_path / "alone")
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        if isinstance(ours, QuantizedTensor):
            ours, theirs = ours.dequantize(), theirs.dequantize()  # type: ignore[attr-defined]
        assert torch.equal(ours, theirs), name


def test_what_changes_values_or_has_no_such_name_is_refused(tmp_path: Path) -> None:
    """AWQ's scale of a layer's input is a part of the weight; and a model that is not DeepSeek's ignores no layer."""
    more = {
        "model.layers.0.mlp.up_proj.pre_quant_scale": torch.ones(192),
        "model.layers.61.enorm.weight": torch.ones(1),
    }
    path, model = write(tmp_path / "in", "channel", more), model_of("channel")
    quantize_as_stored(model, path)
    with pytest.raises(LayoutError) as caught:
        load_safetensors(model, path)
    assert all(f"{name} is in the files, but not in the model" in str(caught.value) for name in more)


# ------------------------------------------------------------------------------------------------------- the way back
CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
INPUT = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
# Folder -> more keys of its quantization_config, and more tensors: as releases have both.
RELEASES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "channel": ({"kv_cache_scheme": CACHE, "ignore": ["re:.*lm_head", "re:.*gate$"]}, of_activations()),
    "deepseek": ({"scale_fmt": "ue8m0"}, mtp()),
    "nvfp4": (
        {"config_groups": {"group_0": {"targets": ["Linear"], "input_activations": INPUT | {"dynamic": "local"}}}},
        {"model.layers.0.mlp.up_proj.input_global_scale": torch.ones(1)},
    ),
    "modelopt": ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "ignore": ["lm_head*"]}, {}),
}
OF_CACHES = {f"model.layers.0.self_attn.{one}_proj.{one}_scale": torch.full((1,), 0.25) for one in "kv"}


def test_scales_of_caches_stay_beside_plain_attention(tmp_path: Path) -> None:
    """As ModelOpt's releases of DeepSeek-R1 in NVFP4 have them, in FP8, where attention is in bf16; and what a weight
    multiplied that is plain by now is named, and left out."""
    plain, model = model_of("modelopt"), model_of("modelopt")
    path = write(tmp_path / "in", "modelopt", OF_CACHES, kv_cache_scheme={"dynamic": False, "num_bits": 8})
    tensors, kept = tensors_in(path), dict(plain.state_dict())
    for name in [name for name in tensors if "self_attn" in name and name not in OF_CACHES]:
        del tensors[name]
    save(path, tensors | {name: one for name, one in kept.items() if "self_attn" in name})
    quantize_as_stored(model, path)
    load_safetensors(model, path)
    export_safetensors(model, tmp_path / "out", files="modelopt", source=path)
    assert same_files(path, tmp_path / "out")
    assert quantization_in(tmp_path / "out") == quantization_in(path)

    layoutc.quantize_(plain, "nvfp4_modelopt", param_filter=["*.down_proj.weight"])
    load_safetensors(plain, path, convert=True)
    with pytest.warns(UserWarning, match=r"gate_proj\.input_scale, .*up_proj\.input_scale of .* are not written"):
        export_safetensors(plain, tmp_path / "fewer", files="modelopt", source=path)
    found = tensors_in(tmp_path / "fewer")
    assert found.keys() >= OF_CACHES.keys() | {"model.layers.0.mlp.down_proj.input_scale"}
    assert not found.keys() & {f"model.layers.0.mlp.{one}_proj.input_scale" for one in ("gate", "up")}


def quantization_in(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())["quantization_config"]
    return found


@pytest.mark.parametrize("folder", RELEASES)
def test_a_folder_comes_back_with_its_config_and_all_tensors(folder: str, tmp_path: Path) -> None:
    """By export and by convert: the config says of activations and caches what it said, and lists are as they were."""
    config, more = RELEASES[folder]
    path, model = write(tmp_path / "in", folder, more, **config), model_of(folder)
    quantize_as_stored(model, path)
    with pytest.warns(UserWarning, match="are for other programs alone"):
        load_safetensors(model, path)
    binding = FOLDERS[folder][1]
    export_safetensors(model, tmp_path / "out", files=binding, source=path)
    recipe = next(
        name
        for name in ("fp8_rowwise", "fp8_block", "nvfp4_compressed_tensors", "nvfp4_modelopt")
        if name in {one.LAYOUT.name for one in model.parameters() if isinstance(one, QuantizedTensor)}
    )
    convert_safetensors(path, tmp_path / "converted", files=f"{recipe}/{binding}")
    for out in (tmp_path / "out", tmp_path / "converted"):
        assert same_files(path, out)
        assert quantization_in(out) == quantization_in(path)


def test_lists_of_plain_modules_change_by_what_has_changed(tmp_path: Path) -> None:
    """A weight that was plain leaves the list with the entry that named it; one that became plain is added; and
    config.json is what compressed-tensors reads."""
    from compressed_tensors.quantization import QuantizationConfig

    stated = {"ignore": ["re:.*(lm_head|up_proj)$", "elsewhere"], "kv_cache_scheme": CACHE}
    path, model = write(tmp_path / "in", "channel", **stated), model_of("channel")
    up, down = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
    tensors = tensors_in(path)
    tensors[f"{up}.weight"] = tensors[f"{up}.weight"].float() * tensors.pop(f"{up}.weight_scale")
    save(path, tensors)
    layoutc.quantize_(
        model, "fp8_rowwise", param_filter=["*.self_attn.*_proj.weight", "*.gate_proj.weight", "*.up_proj.weight"]
    )
    load_safetensors(model, path, convert=True)
    export_safetensors(model, tmp_path / "out", files="compressed_tensors", source=path)
    found = quantization_in(tmp_path / "out")
    assert found["ignore"] == ["elsewhere", "lm_head", down]
    assert f"{down}.weight_scale" not in tensors_in(tmp_path / "out")
    assert {key: one for key, one in found.items() if key != "ignore"} == {
        key: one for key, one in quantization_in(path).items() if key != "ignore"
    }
    read = QuantizationConfig.model_validate({key: one for key, one in found.items() if key != "quant_method"})
    assert read.kv_cache_scheme is not None
    assert read.config_groups["group_0"].input_activations is not None  # type: ignore[union-attr]


def test_files_of_another_form_have_no_scales_of_activations(tmp_path: Path) -> None:
    """ModelOpt's input_scale is amax / 2688, and compressed-tensors' input_global_scale is another number."""
    path, model = write(tmp_path / "in", "modelopt"), model_of("modelopt")
    quantize_as_stored(model, path, files="nvfp4_1d/modelopt")
    load_safetensors(model, path)
    scales = {name for name in tensors_in(path) if name.endswith(".input_scale")}
    with pytest.warns(UserWarning, match=r"input_scale, .* and 5 more of .* are not written"):
        export_safetensors(model, tmp_path / "out", files="compressed_tensors", source=path)
    done = convert_safetensors(
        path, tmp_path / "b", files="nvfp4_1d/compressed_tensors", source_files="nvfp4_1d/modelopt"
    )
    assert set(done.left) == scales
    for out in ("out", "b"):
        assert not any(name.endswith(("input_scale", "input_global_scale")) for name in tensors_in(tmp_path / out))
        assert "input_activations" not in quantization_in(tmp_path / out)["config_groups"]["group_0"]


def test_tensors_that_a_model_has_no_name_for_are_named_and_not_copied(tmp_path: Path) -> None:
    """They may be its weights under other names, as an adapter's base has them: a stale copy would be read."""
    path, model = write(tmp_path / "in", "channel"), model_of("channel")
    quantize_as_stored(model, path)
    load_safetensors(model, path)
    with pytest.warns(UserWarning, match=r"lm_head\.weight, .* of .* are not written: the model has no such"):
        export_safetensors(model, tmp_path / "out", files="compressed_tensors", source=path, rename="base.{}".format)
    assert all(name.startswith("base.") for name in tensors_in(tmp_path / "out"))
