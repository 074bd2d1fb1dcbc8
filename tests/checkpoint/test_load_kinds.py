"""What a load converts, it converts as stated; what it does not, it refuses before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from numpy_models import recipe
from torch import Tensor

from layoutc import checkpoint
from layoutc.runtime.errors import DamagedError, LayoutError


def values(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(64, 64, generator=generator, dtype=torch.float64).to(dtype)


def live(kind: str) -> dict[str, Any]:
    """A state dict whose first entries load before the one in question, and whose last do after it."""
    middle = (
        recipe(kind).quantize(torch.zeros(64, 64))
        if kind not in dir(torch)
        else torch.zeros(64, 64).to(getattr(torch, kind))
    )
    return {"a": torch.zeros(3), "b": recipe("nvfp4").quantize(torch.zeros(64, 64)), "m": middle, "z": torch.zeros(3)}


def saved(folder: Path, middle: Tensor) -> None:
    state = live("float32") | {"a": torch.ones(3), "b": recipe("nvfp4").quantize(values(torch.float32))}
    checkpoint.save(state | {"m": middle, "z": torch.ones(3)}, folder)


def raw(tensor: Any) -> list[bytes]:
    planes = tensor.planes().values() if hasattr(tensor, "planes") else [tensor]
    return [plane.contiguous().flatten().view(torch.uint8).numpy().tobytes() for plane in planes]


@pytest.mark.parametrize("kind", ["mxfp8", "fp8_current", "fp8_delayed", "int8_rowwise"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]
)
def test_plain_values_are_quantized_from_float32(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    """float64 is rounded to it, to nearest, and float8 is exact in it. Written in place, after all else is checked."""
    plain = values(dtype)
    saved(tmp_path / "plain", plain)
    state = live(kind)
    checkpoint.load(state, tmp_path / "plain", convert=True)
    given = plain if dtype in (torch.float32, torch.float16, torch.bfloat16) else plain.to(torch.float32)
    assert raw(state["m"]) == raw(recipe(kind).quantize(given))
    assert state["a"].tolist() == state["z"].tolist() == [1.0] * 3


REFUSED = [
    (torch.complex64, "mxfp8", r"m: complex64 in the checkpoint can't become mxfp8"),
    (torch.int64, "mxfp8", r"m: int64 in the checkpoint can't become mxfp8"),
    (torch.float4_e2m1fn_x2, "mxfp8", r"m: float4_e2m1fn_x2 in the checkpoint can't become mxfp8"),
    (torch.float4_e2m1fn_x2, "float32", r"m: float4_e2m1fn_x2 in the checkpoint can't become float32"),
    (torch.complex64, "float32", r"m: complex64 in the checkpoint can't become float32"),
    (torch.float32, "int64", r"m: float32 in the checkpoint can't become int64"),
]


@pytest.mark.sample(len(REFUSED))
@pytest.mark.parametrize(("dtype", "kind", "words"), REFUSED)
def test_what_can_not_be_converted_is_refused_before_anything_is_written(
    dtype: torch.dtype, kind: str, words: str, tmp_path: Path
) -> None:
    plain = (
        values(torch.float32).to(torch.uint8).view(dtype) if dtype.itemsize == 1 else values(torch.float32).to(dtype)
    )
    saved(tmp_path / "plain", plain)
    state = live(kind)
    before = {name: raw(tensor) for name, tensor in state.items()}
    with pytest.raises(LayoutError, match=words):
        checkpoint.load(state, tmp_path / "plain", convert=True)
    assert {name: raw(tensor) for name, tensor in state.items()} == before


def test_a_part_that_takes_no_values_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Its scale covers more than the part, which copy_ would say when other tensors have been written."""
    saved(tmp_path / "plain", values(torch.float32)[:32].clone())
    state = live("fp8_current")
    state["m"] = state["m"][:32]
    before = {name: raw(tensor) for name, tensor in state.items()}
    with pytest.raises(LayoutError, match="is a part of a weight whose scale covers more than the part"):
        checkpoint.load(state, tmp_path / "plain", convert=True)
    assert {name: raw(tensor) for name, tensor in state.items()} == before


def test_an_item_of_another_dtype_than_its_metadata_says(tmp_path: Path) -> None:
    """Of the same shape, and whole."""
    import io
    import pickle

    saved(tmp_path / "plain", values(torch.float32))
    (tmp_path / "plain" / "layoutc.json").unlink()
    metadata = pickle.loads((tmp_path / "plain" / ".metadata").read_bytes())
    data = io.BytesIO()
    torch.save(values(torch.float32).to(torch.float64), data)
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == "m")
    info.relative_path, info.offset, info.length, info.crc32 = "__1_0.distcp", 0, len(data.getvalue()), None
    (tmp_path / "plain" / "__1_0.distcp").write_bytes(data.getvalue())
    (tmp_path / "plain" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match=r"m: torch.float64 is stored, but \.metadata says torch.float32"):
        checkpoint.load(live("float32"), tmp_path / "plain")


def test_a_plain_value_where_the_model_has_a_tensor_is_refused(tmp_path: Path) -> None:
    """It would take the tensor's place in the state dict."""
    saved(tmp_path / "plain", 3)  # type: ignore[arg-type]
    state = live("float32")
    before = {name: raw(tensor) for name, tensor in state.items()}
    with pytest.raises(LayoutError, match="m is a tensor in the state dict, but a plain value in the checkpoint"):
        checkpoint.load(state, tmp_path / "plain")
    assert {name: raw(tensor) for name, tensor in state.items()} == before
