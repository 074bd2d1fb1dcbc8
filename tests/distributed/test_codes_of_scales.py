"""Files that have codes of scales, as bitsandbytes' double quantization makes them: read by slices, and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from layoutc.checkpoint import convert_safetensors, export_safetensors, load_safetensors, quantize_as_stored
from layoutc.checkpoint.safetensors.bound import held
from layoutc.checkpoint.safetensors.recognize import bindings_of
from layoutc.runtime.errors import DamagedError, LayoutError

SHAPES = {"0.weight": (101, 192), "1.weight": (5, 128)}  # 303 scales, so the first block of 256 ends inside of a row
STATE = "quant_state.bitsandbytes__nf4"
CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8",
}


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(k, m, bias=False) for m, k in SHAPES.values())).requires_grad_(False)


def write(folder: Path, **changed: Any) -> dict[str, NDArray[np.float32]]:
    """Files of random codes; the scales that they stand for, by their definition in numpy. changed: in the JSON."""
    from layoutc.recipes.nf4_bitsandbytes.files import FILES

    rng, tensors, expected = np.random.default_rng(0), dict[str, Tensor](), dict[str, NDArray[np.float32]]()
    values = rng.standard_normal(256).astype(np.float32)
    codebook = FILES["bitsandbytes"].codebook
    assert codebook is not None
    for number, (name, (m, k)) in enumerate(SHAPES.items()):
        codes = rng.integers(0, 256, m * k // 64).astype(np.uint8)
        scales = rng.standard_normal(-(-len(codes) // 256)).astype(np.float32)
        offset = np.float32(0.1 + number)
        spread = np.repeat(scales, 256)[: len(codes)]
        expected[name] = (values[codes] * spread + offset).reshape(m, k // 64)
        text = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [m, k], "nested_blocksize": 256}
        text |= {"nested_dtype": "float32", "nested_offset": float(offset)} | changed
        arrays = {
            "": rng.integers(0, 256, (m * k // 2, 1)).astype(np.uint8),
            ".absmax": codes,
            ".nested_absmax": scales,
            ".nested_quant_map": values,
            ".quant_map": np.array(codebook[2], np.float32),
            f".{STATE}": np.frombuffer(json.dumps(text).encode(), np.uint8),
        }
        tensors |= {name + key: torch.from_numpy(one.copy()) for key, one in arrays.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": CONFIG}), encoding="utf-8")
    return expected


def on_ranks(where: str, world: int, expected: dict[str, NDArray[np.float32]], codes: dict[str, Tensor]) -> None:
    """Planes of whole weights, gathered from ranks that each read their own rows."""
    mesh = mesh_of(world)
    if dist.get_rank() < world:
        group, found = mesh.get_group(), model()
        assert len(quantize_as_stored(found, where)) == 2
        fully_shard(found, mesh=mesh)
        assert load_safetensors(found, where, process_group=group) == ((), ())
        for name, param in found.named_parameters():
            planes = param.full_tensor().store.planes  # type: ignore[attr-defined]
            assert np.array_equal(planes["rowwise_scale"].numpy().view(np.int32), expected[name].view(np.int32)), name
            assert torch.equal(planes["rowwise_data"].reshape(-1), codes[name].reshape(-1)), name


@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_reads_the_scales_of_its_rows(four: Ranks, tmp_path: Path, world: int) -> None:
    expected = write(tmp_path)
    four.run(on_ranks, str(tmp_path), world, expected, load_file(tmp_path / "model.safetensors"))


def test_one_process_reads_them_and_writes_the_scales_themselves(tmp_path: Path) -> None:
    """Loading that gives the same bytes."""
    expected, source, out = write(tmp_path), model(), tmp_path / "out"
    names = quantize_as_stored(source, tmp_path)
    assert len(names) == 2
    assert load_safetensors(source, tmp_path) == ((), ())
    export_safetensors(source, out, files="nf4_bitsandbytes/bitsandbytes")
    again = model()
    assert len(quantize_as_stored(again, out)) == 2
    assert load_safetensors(again, out) == ((), ())
    for name, param in again.named_parameters():
        scales = param.store.planes["rowwise_scale"].numpy()  # type: ignore[attr-defined]
        assert np.array_equal(scales.view(np.int32), expected[name].view(np.int32))
        assert torch.equal(param.dequantize(), source.get_parameter(name).dequantize())  # type: ignore[operator]
    convert_safetensors(tmp_path, tmp_path / "converted", files="nf4_bitsandbytes/bitsandbytes")
    found = load_file(tmp_path / "converted" / "model.safetensors")
    assert {name: one.tolist() for name, one in found.items()} == {
        name: one.tolist() for name, one in load_file(out / "model.safetensors").items()
    }


def writes(where: str, out: str, world: int) -> None:
    """Reads files on ranks, and writes them again."""
    mesh = mesh_of(world)
    if dist.get_rank() < world:
        group, found = mesh.get_group(), model()
        quantize_as_stored(found, where)
        fully_shard(found, mesh=mesh)
        load_safetensors(found, where, process_group=group)
        export_safetensors(found, out, files="bitsandbytes_double", source=where, process_group=group)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_codes_of_any_codebook_and_offset_are_written_as_they_were(four: Ranks, tmp_path: Path, world: int) -> None:
    """To the byte, by ranks and by a conversion, where the files that the weights were read from are told."""
    write(tmp_path)
    four.run(writes, str(tmp_path), str(tmp_path / "out"), world)
    convert_safetensors(tmp_path, tmp_path / "converted", files="nf4_bitsandbytes/bitsandbytes_double")
    expected = load_file(tmp_path / "model.safetensors")
    for name in ("out", "converted"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert {key: (one.dtype, one.tolist()) for key, one in found.items()} == {
            key: (one.dtype, one.tolist()) for key, one in expected.items()
        }


def test_codes_of_a_codebook_that_a_binding_does_not_state_are_not_made(tmp_path: Path) -> None:
    """With the name of the files that work."""
    from layoutc.recipes import nf4_bitsandbytes

    bound = next(one for one in bindings_of([nf4_bitsandbytes.Tensor]) if one.binding.name == "bitsandbytes_double")
    planes = dict(bound.binding.planes)
    codes = planes["rowwise_scale"].codes
    assert codes is not None
    planes["rowwise_scale"] = planes["rowwise_scale"]._replace(codes=codes._replace(values=()))
    with pytest.raises(LayoutError, match=r"does not write their codes; export as nf4_bitsandbytes/bitsandbytes$"):
        held("0.weight", (2, 64), bound._replace(binding=bound.binding._replace(planes=planes)))


def scales_of(found: nn.Module) -> list[bytes]:
    return [bytes(param.store.planes["rowwise_scale"].numpy()) for param in found.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("offset", ["0.5", None, [1], 1e39, float("nan")])
def test_an_offset_that_is_no_number_is_refused_before_anything_is_written(tmp_path: Path, offset: Any) -> None:
    write(tmp_path, nested_offset=offset)
    found = model()
    quantize_as_stored(found, tmp_path)
    before = scales_of(found)
    with pytest.raises(DamagedError, match=r"no number to add|contains NaN"):
        load_safetensors(found, tmp_path)
    assert scales_of(found) == before


@pytest.mark.parametrize(
    ("key", "becomes", "words"),
    [
        (".nested_absmax", torch.zeros(3), r"F32 of \[3\], but .* F32 of \[2\]"),
        (".nested_quant_map", torch.zeros(16), r"F32 of \[16\], but .* F32 of \[256\]"),
        (".nested_quant_map", None, "0.weight.nested_quant_map is missing"),
        (f".{STATE}", None, "is missing"),
    ],
)
def test_what_codes_need_is_checked(tmp_path: Path, key: str, becomes: Tensor | None, words: str) -> None:
    write(tmp_path)
    file, found = tmp_path / "model.safetensors", model()
    quantize_as_stored(found, tmp_path)
    tensors = load_file(file)
    del tensors[f"0.weight{key}"]
    save_file(tensors | ({} if becomes is None else {f"0.weight{key}": becomes}), file)
    with pytest.raises(LayoutError, match=words):
        load_safetensors(found, tmp_path)
