"""What files of others hold beside a model's weights: scales of activations, layers that the model lacks, configs."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_files_of_others import WRITERS, model_of
from torch import Tensor

from layoutc.checkpoint import load_safetensors, quantize_as_stored
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}: pip install 'layoutc[{extra}]'")
    for name, extra in (("transformers", "integrations"), ("compressed_tensors", "formats"))
]


def write(path: Path, folder: str, more: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """The folder as its program writes it, with more tensors and keys of its quantization_config."""
    from safetensors.torch import save_file

    model = model_of(folder)
    tensors, quantization = WRITERS[folder](dict(model.state_dict()))
    contiguous = {name: tensor.contiguous() for name, tensor in (tensors | (more or {})).items()}
    path.mkdir()
    save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
    stated = model.config.to_dict() | {"quantization_config": quantization | config}
    stated["architectures"] = [type(model).__name__]
    (path / "config.json").write_text(json.dumps(stated, default=str), encoding="utf-8")
    return path


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
