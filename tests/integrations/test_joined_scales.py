"""Scales of whole weights that engines join into one: shared by what is quantized, named where they are apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_files_of_others import tensors_in
from test_real_writers import compressed, model_of

import layoutc
from layoutc.checkpoint import convert_safetensors, export_safetensors, load_safetensors, stream_export

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "compressed_tensors"))),
    reason="pip install 'layoutc[integrations,formats]'",
)
APART = r"engines join have scales that differ by up to [\d.]+ times \(.*_proj.*Engines take one"
GROUPS = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


def spread_out() -> Any:
    """A model whose joined weights have extremes of their own."""
    model = model_of(torch.float32)  # of bf16 compressed-tensors rounds global scales too
    with torch.no_grad():
        for at, (name, param) in enumerate(model.named_parameters()):
            param.mul_(1 + at % 5 if name.endswith("_proj.weight") else 1)
    return model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, folder = spread_out(), tmp_path_factory.mktemp("plain") / "model"
    model.save_pretrained(folder)
    return folder


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def largest(folder: Path) -> dict[str, float]:
    """By numpy: the amax of what each weight is joined with."""
    values = {name: np.abs(value.float().numpy()).max() for name, value in tensors_in(folder).items()}
    found = {name: float(value) for name, value in values.items() if name.endswith("_proj.weight")}
    for name in found:
        parent, own, _ = name.rsplit(".", 2)
        group = next((group for _, group in GROUPS if own in group), (own,))
        found[name] = float(max(values[f"{parent}.{one}.weight"] for one in group))
    return found


def test_matched_weights_are_what_compressed_tensors_writes_of_joined_ones(plain: Path, tmp_path: Path) -> None:
    """Byte for byte, with one global scale for each group."""
    compressed(spread_out(), tmp_path / "theirs", "NVFP4A16", joined=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_safetensors(
            plain, tmp_path / "ours", files="nvfp4_compressed_tensors/compressed_tensors", match=["*_proj.weight"]
        )
    theirs, ours = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert torch.equal(flat(value), flat(ours[name])), name


@pytest.mark.parametrize(
    ("files", "scale"),
    [
        ("nvfp4_modelopt/modelopt", lambda amax: np.float32(amax) / np.float32(2688)),
        ("fp8_current/modelopt", lambda amax: np.float32(amax) / np.float32(448)),
    ],
)
def test_each_scale_is_that_of_the_largest_of_its_group(
    files: str, scale: Callable[[float], float], plain: Path, tmp_path: Path
) -> None:
    """Also of weights that were quantized otherwise, and are quantized anew."""
    convert_safetensors(plain, tmp_path / "a", files=files, match=["*_proj.weight"])
    convert_safetensors(plain, tmp_path / "b", files="mxfp8_frozen/compressed_tensors", match=["*_proj.weight"])
    convert_safetensors(tmp_path / "b", tmp_path / "c", files=files)
    convert_safetensors(tmp_path / "b", tmp_path / "as_plain", dtype="float32")
    for folder, source in (("a", plain), ("c", tmp_path / "as_plain")):
        tensors, end = tensors_in(tmp_path / folder), "_scale_2" if "nvfp4" in files else "_scale"
        assert {name: tensors[name + end].item() for name in largest(source)} == {
            name: pytest.approx(scale(amax), rel=2e-7) for name, amax in largest(source).items()
        }


def test_scales_apart_are_named_by_all_that_reads_or_writes_them(plain: Path, tmp_path: Path) -> None:
    """And bytes stay as they are."""
    files = "nvfp4_modelopt/modelopt"
    model = spread_out()
    layoutc.quantize_(model, "nvfp4_modelopt", param_filter=["*_proj.weight"])
    with pytest.warns(UserWarning, match=APART):
        export_safetensors(model, tmp_path / "a", files="modelopt")
    with pytest.warns(UserWarning, match=APART):
        streamed = dict(stream_export(model, files="modelopt"))
    with pytest.warns(UserWarning, match=APART):
        convert_safetensors(tmp_path / "a", tmp_path / "b", files=files)
    with pytest.warns(UserWarning, match=APART):
        load_safetensors(model, tmp_path / "b")
    first, second = tensors_in(tmp_path / "a"), tensors_in(tmp_path / "b")
    for name, value in first.items():
        assert torch.equal(flat(value), flat(second[name]))
        assert torch.equal(flat(value), flat(streamed[name]))
    with warnings.catch_warnings():  # values need no engine
        warnings.simplefilter("error")
        convert_safetensors(tmp_path / "a", tmp_path / "values", dtype="bfloat16")
