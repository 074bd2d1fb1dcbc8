"""Checkpoints as they are released: scales of other dtypes, of a whole weight or of an expert, groups of other sizes.

Each folder is written by the package whose format it is, or laid out by the format's definition; values are read by the
package's own code.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from harness import Ranks
from test_files_of_others import (
    awq,
    awq_values,
    bitsandbytes,
    compressed,
    gptq,
    gptq_values,
    nf4_config,
    same_files,
    tensors_in,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import layoutc
from layoutc.checkpoint import (
    convert_safetensors,
    export_safetensors,
    load_safetensors,
    quantize_as_stored,
    stream_export,
)
from layoutc.checkpoint.safetensors import recognize
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}: pip install 'layoutc[{extra}]'")
    for name, extra in (
        ("transformers", "integrations"),
        ("compressed_tensors", "formats"),
        ("bitsandbytes", "formats"),
    )
]
Tensors = dict[str, Tensor]
Writer = Callable[[Tensors], tuple[Tensors, dict[str, Any]]]
Values = Callable[[Tensors, str], Tensor]


class Mlp(nn.Module):
    """Two linear layers whose sizes are multiples of 128 and not of three ranks, and one that stays plain."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up_proj = nn.Linear(256, 384, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(384, 256, bias=False, dtype=dtype)
        self.head = nn.Linear(256, 32, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.down_proj(self.up_proj(x).relu()))
        return out


# ----------------------------------------------------------------------------------------- as others write and read it
def fp8_of_transformers(state: Tensors, ends: str = "_proj.weight", **how: Any) -> tuple[Tensors, dict[str, Any]]:
    """transformers' own quantizer."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config, tensors = FineGrainedFP8Config(**how), dict[str, Tensor]()
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=config))
    for name, value in state.items():
        tensors |= quantizer.convert({name: value}) if name.endswith(ends) else {name: value}
    stated: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return tensors, stated | {"modules_to_not_convert": ["head"]}


def with_scales(state: Tensors, write: Writer, ends: str, to: Callable[[Tensor], Tensor]) -> Any:
    """The same with scales of another dtype."""
    tensors, config = write(state)
    return {name: to(one) if name.endswith(ends) else one for name, one in tensors.items()}, config


def read_by_transformers(tensors: Tensors, name: str) -> Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    by = Fp8Dequantize(None)
    found: Tensor = by._dequantize_one(tensors[name], tensors[f"{name}_scale_inv"], output_dtype=torch.bfloat16)
    return found


def read_by_compressed_tensors(tensors: Tensors, name: str, config: dict[str, Any]) -> Tensor:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    module = name.rpartition(".")[0]
    mine = {key.removeprefix(f"{module}."): one for key, one in tensors.items() if key.startswith(f"{module}.")}
    found = BaseCompressor.get_value_from_registry(config["format"]).decompress(mine, scheme)
    weight: Tensor = found["weight"]
    return weight


def one_scale(state: Tensors, ends: tuple[str, str], shape: tuple[int, ...], config: dict[str, Any]) -> Any:
    """By definition: amax / 448 of the weight in bf16, or fp32 for ModelOpt's, and a static scale of activations."""
    tensors: Tensors = {}
    dtype = torch.float32 if config["quant_method"] == "modelopt" else torch.bfloat16
    for name, value in state.items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        scale = (value.float().abs().amax() / 448).to(dtype)
        module = name.rpartition(".")[0]
        tensors[name] = (value.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors |= {f"{module}.{ends[0]}": scale.reshape(shape), f"{module}.{ends[1]}": (scale * 3).reshape(shape)}
    return tensors, config


def times_scale(tensors: Tensors, name: str) -> Tensor:
    """ModelOpt's per-tensor FP8: codes times the one fp32 scale."""
    return tensors[name].float() * tensors[f"{name}_scale"]


def of_modelopt(state: Tensors, algo: str, block: tuple[int, int], to: torch.dtype) -> Any:
    """By definition: a scale for each block of rows and columns, amax over the largest code. Those of rows are flat."""
    tensors: Tensors = {}
    for name, value in state.items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        m, k = value.shape
        rows, columns = block[0], block[1] or k
        blocks = value.float().reshape(m // rows, rows, k // columns, columns)
        scale = blocks.abs().amax((1, 3), keepdim=True) / (448 if to.is_floating_point else 127)
        codes = blocks / scale
        tensors[name] = (codes if to.is_floating_point else codes.round()).reshape(m, k).to(to)
        tensors[f"{name}_scale"] = scale if block[1] else scale.flatten()
    return tensors, {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["head"]}


def times_scales(tensors: Tensors, name: str) -> Tensor:
    """Codes times the scale of their block."""
    codes, scale = tensors[name].float(), tensors[f"{name}_scale"]
    scale = scale if scale.dim() == 4 else scale.view(-1, 1, 1, 1)
    m, k = codes.shape
    return (codes.view(scale.shape[0], -1, scale.shape[2], k // scale.shape[2]) * scale).view(m, k)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_CODES = torch.cat([E2M1, -E2M1])


def in_mxfp4(state: Tensors, config: dict[str, Any]) -> Any:
    """OCP's MXFP4 by definition, as MLX (its mode mxfp4) has it, in words of eight codes."""
    tensors: Tensors = {}
    for name, value in state.items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        blocks = value.float().reshape(len(value), -1, 32)
        exponent = blocks.abs().amax(-1).log2().floor() - 2
        scaled = blocks / exponent.exp2()[..., None]
        codes = (scaled[..., None] - E2M1_CODES).abs().argmin(-1).to(torch.uint8).flatten(1)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        scale = (exponent + 127).to(torch.uint8)
        tensors[name] = packed.view(torch.uint32)
        tensors[name.removesuffix("weight") + "scales"] = scale
    return tensors, config


def mxfp4_values(tensors: Tensors, name: str) -> Tensor:
    packed = tensors[name].view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    scale = tensors[name.removesuffix("weight") + "scales"]
    return E2M1_CODES[codes] * (scale.float() - 127).exp2().repeat_interleave(32, 1)


def read_by_bitsandbytes(tensors: Tensors, name: str) -> Tensor:
    """By its CPU code; by its code for any device where blocks run across rows, which the former counts row by row."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

    beside = {key: one for key, one in tensors.items() if key.startswith(f"{name}.")}
    state = QuantState.from_dict(
        {key.removeprefix(f"{name}."): one for key, one in beside.items()}, torch.device("cpu")
    )
    values: Tensor
    if state.shape[-1] % state.blocksize:
        scale = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
        codes = tensors[name].reshape(-1)
        values = _dequantize_4bit_compute(codes, scale, state.code, state.blocksize, state.shape, state.dtype)
    else:
        values = dequantize_4bit(tensors[name], state)
    return values


class Scheme(NamedTuple):
    """Who writes it, who reads it (by compressed-tensors where None), the binding of exports, one that converts there
    and back; and whether scales keep the dtype of the source when they change."""

    write: Writer
    read: Values | None
    files: str
    other: str
    keeps: bool = True


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda scale: scale.to(dtype)


UE8M0 = partial(fp8_of_transformers, scale_fmt="ue8m0")
BLOCKS = ("deepseek", "fp8_block/compressed_tensors")
# What packages write themselves is in test_real_writers.py.
SCHEMES = {
    "block_bf16": Scheme(
        partial(with_scales, write=fp8_of_transformers, ends="_scale_inv", to=to(torch.bfloat16)),
        read_by_transformers,
        *BLOCKS,
    ),
    "block_bytes": Scheme(
        partial(with_scales, write=UE8M0, ends="_scale_inv", to=lambda scale: scale.view(torch.uint8)),
        read_by_transformers,
        *BLOCKS,
    ),
    "tensor_of_transformers": Scheme(  # Devstral, Ministral
        partial(
            one_scale,
            ends=("weight_scale_inv", "activation_scale"),
            shape=(),
            config={"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        ),
        read_by_transformers,
        "fp8",
        "fp8_current/modelopt",
        keeps=False,
    ),
    "tensor_of_modelopt": Scheme(
        partial(
            one_scale,
            ends=("weight_scale", "input_scale"),
            shape=(),
            config={"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["head"]},
        ),
        times_scale,
        "modelopt",
        "fp8_current/compressed_tensors",
    ),
    "blocks_of_modelopt": Scheme(
        partial(of_modelopt, algo="FP8_PB_WO", block=(128, 128), to=torch.float8_e4m3fn),
        times_scales,
        "modelopt",
        "fp8_block/deepseek",
    ),
    "int8_of_modelopt": Scheme(
        partial(of_modelopt, algo="W8A8_SQ_PER_CHANNEL", block=(1, 0), to=torch.int8),
        times_scales,
        "modelopt",
        "int8_rowwise/compressed_tensors",
    ),
    "mxfp4_of_mlx": Scheme(
        partial(in_mxfp4, config={"mode": "mxfp4", "bits": 4, "group_size": 32}),
        mxfp4_values,
        "mlx",
        "mxfp4/compressed_tensors",
    ),
}


ON_RANKS = ("block_bytes", "tensor_of_transformers")  # one of each kind of plane


def folder_of(path: Path, tensors: Tensors, config: Any) -> None:
    """A folder as a release has it."""
    from safetensors.torch import save_file

    path.mkdir(exist_ok=True)
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config}), encoding="utf-8")


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of each scheme, written once."""
    folders: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in folders:
            tensors, config = SCHEMES[name].write(dict(Mlp().state_dict()))
            path = folders[name] = tmp_path_factory.mktemp(name)
            folder_of(path, tensors, config)
        return folders[name]

    return of


def values_of(name: str, path: Path, weight: str) -> Tensor:
    """A weight by the package's own code, in the dtype that it computes in."""
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    read = SCHEMES[name].read or partial(read_by_compressed_tensors, config=config)
    return read(tensors_in(path), weight)


def check_values(name: str, path: Path, model: nn.Module) -> None:
    for key, param in model.named_parameters():
        if isinstance(param, QuantizedTensor):
            values = values_of(name, path, key)
            assert torch.equal(param.dequantize(values.dtype), values), key
        else:
            assert torch.equal(param, tensors_in(path)[key]), key


def loaded(path: Path) -> Mlp:
    model = Mlp()
    names = quantize_as_stored(model, path)
    assert set(names) == {"up_proj.weight", "down_proj.weight"}
    load_safetensors(model, path)
    return model


@pytest.mark.filterwarnings("ignore:.* are for other programs alone")
@pytest.mark.parametrize("name", SCHEMES)
def test_a_released_scheme_loads_trains_and_is_written_back(
    name: str, released: Callable[[str], Path], tmp_path: Path
) -> None:
    """Byte for byte where nothing changed, there and back by another binding too; and after a step the package reads
    what was trained."""
    path, scheme = released(name), SCHEMES[name]
    model = loaded(path)
    check_values(name, path, model)
    export_safetensors(model, tmp_path / "same", files=scheme.files, source=path)
    assert same_files(path, tmp_path / "same")
    recipe = next(type(param).LAYOUT.name for param in model.parameters() if isinstance(param, QuantizedTensor))
    convert_safetensors(path, tmp_path / "there", files=scheme.other)
    convert_safetensors(tmp_path / "there", tmp_path / "back", files=f"{recipe}/{scheme.files}")
    assert same_files(path, tmp_path / "back", but=("input_scale", "activation_scale"))
    values = {key: values_of(name, path, key) for key in ("up_proj.weight", "down_proj.weight")}
    convert_safetensors(path, tmp_path / "plain", dtype=values["up_proj.weight"].dtype)
    assert all(torch.equal(tensors_in(tmp_path / "plain")[key], one) for key, one in values.items())
    optimizer = layoutc.MasterWeights(torch.optim.SGD, model.parameters(), lr=2.0)
    model(torch.ones(4, 256, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    with warnings.catch_warnings(record=True) as said:
        export_safetensors(model, tmp_path / "tuned", files=scheme.files, source=path)
    assert any("the scales are written as F32" in str(one.message) for one in said) != scheme.keeps
    before, after = tensors_in(path), tensors_in(tmp_path / "tuned")
    assert not same_files(path, tmp_path / "tuned")
    check_values(name, tmp_path / "tuned", model)
    assert not scheme.keeps or {key: one.dtype for key, one in before.items()} == {
        key: one.dtype for key, one in after.items()
    }


def in_packs(**changed: Any) -> Writer:
    return compressed("W4A16" if changed.pop("symmetric", True) else "W4A16_ASYM", "pack-quantized", **changed)


class Blocks(NamedTuple):
    """Who writes blocks of another size, or scales of another dtype, than any recipe has; who reads them (by
    compressed-tensors where None), and what they are called."""

    write: Writer
    read: Values | None
    label: str
    dtype: torch.dtype = torch.bfloat16


HALF, WHOLE = torch.float16, torch.float32
OTHER_BLOCKS = {
    "int4_16": Blocks(in_packs(group_size=16), None, "groups of 16"),
    "int4_row": Blocks(in_packs(strategy="channel", group_size=None), None, "one scale a row"),
    "int4_f16": Blocks(in_packs(group_size=128), None, "int4_packed128/.*, scales of other dtypes", HALF),
    "int4_zeros_32": Blocks(in_packs(symmetric=False, group_size=32), None, "int4_packed128_zeros/.*, groups of 32"),
    "gptq_row": Blocks(partial(gptq, each=-1), gptq_values, "gptq/gptq, one scale a row", HALF),
    "gptq_80": Blocks(partial(gptq, each=80), gptq_values, "gptq/gptq, groups of 80", HALF),  # the last is shorter
    "awq_64": Blocks(partial(awq, each=64), awq_values, "awq/awq, groups of 64", HALF),
    "nf4_128_double": Blocks(
        partial(bitsandbytes, double=True, blocksize=128), read_by_bitsandbytes, "bitsandbytes_double, groups of 128"
    ),
    "nf4_512": Blocks(
        partial(bitsandbytes, blocksize=512), read_by_bitsandbytes, "bitsandbytes, blocks of 512 across rows"
    ),
    "nf4_512_double": Blocks(
        partial(bitsandbytes, double=True, blocksize=512), read_by_bitsandbytes, "_double, blocks of 512 across rows"
    ),
}


def loads_sharded(path: str, plain: str, dtype: torch.dtype) -> bool:
    """On ranks: whether a sharded plain model takes the values that a plain folder has."""
    model, expected = Mlp(dtype), tensors_in(Path(plain))
    fully_shard(model)
    for param in model.parameters():
        param.data.zero_()
    load_safetensors(model, path, convert=True)
    full = {name: param.full_tensor() for name, param in model.named_parameters()}  # type: ignore[attr-defined]
    return all(torch.equal(full[name], value) for name, value in expected.items())


@pytest.mark.parametrize("name", OTHER_BLOCKS)
def test_ranks_read_blocks_of_other_sizes_as_one_does(name: str, tmp_path: Path, two: Ranks) -> None:
    by, path = OTHER_BLOCKS[name], tmp_path / "in"
    folder_of(path, *by.write(dict(Mlp(by.dtype).state_dict())))
    convert_safetensors(path, tmp_path / "plain", dtype=by.dtype)
    assert two.run(loads_sharded, str(path), str(tmp_path / "plain"), by.dtype) == [True, True]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OTHER_BLOCKS)
def test_blocks_of_other_sizes_are_read_as_values(name: str, tmp_path: Path) -> None:
    """By a plain model, by one of another recipe, and without a model, to the bit; and quantize_as_stored says what
    would hold them as they are."""
    by, path = OTHER_BLOCKS[name], tmp_path / "in"
    tensors, config = by.write(dict(Mlp(by.dtype).state_dict()))
    folder_of(path, tensors, config)
    read = by.read or partial(read_by_compressed_tensors, config=config)
    expected = {key: read(tensors, key).to(by.dtype) for key in ("up_proj.weight", "down_proj.weight")}
    expected["head.weight"] = tensors["head.weight"]

    model = Mlp(by.dtype)
    for param in model.parameters():
        param.data.zero_()
    assert load_safetensors(model, path, convert=True) == ((), ())
    convert_safetensors(path, tmp_path / "plain", dtype=by.dtype)
    plain = tensors_in(tmp_path / "plain")
    for key, param in model.named_parameters():
        assert torch.equal(param, expected[key]), key
        assert torch.equal(plain[key], expected[key]), key

    quantized = Mlp(by.dtype)
    layoutc.quantize_(quantized, "mxfp8")
    load_safetensors(quantized, path, convert=True)
    convert_safetensors(path, tmp_path / "mxfp8", files="mxfp8/compressed_tensors")
    again = Mlp(by.dtype)
    layoutc.quantize_(again, "mxfp8", filter_fn=lambda _, name: name != "head")
    load_safetensors(again, tmp_path / "mxfp8", files="mxfp8/compressed_tensors")
    for one in ("up_proj", "down_proj"):
        assert torch.equal(getattr(quantized, one).weight.dequantize(), getattr(again, one).weight.dequantize())
    with pytest.raises(LayoutError, match=rf"2 weights, .* are in files of .*{by.label}, which .*convert=True"):
        quantize_as_stored(Mlp(by.dtype), path)
    with pytest.raises(LayoutError, match=r"up_proj.weight: the files have it quantized.* convert=True"):
        load_safetensors(Mlp(by.dtype), path)


@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("fp4", False)])
def test_rows_that_are_no_whole_blocks_are_read_as_values_beside_codes(
    kind: str, double: bool, two: Ranks, tmp_path: Path
) -> None:
    """In blocks of the recipe's size, beside a weight of whole blocks, which keeps its codes; odd numbers of values,
    rows shorter than a block, and names that tell the kind where config.json does not."""
    from safetensors.torch import save_file

    tensors: Tensors = {}
    for name, value in Ragged().state_dict().items():
        tensors |= in_bits4(name, value, quant_type=kind, compress_statistics=double)
    path, binding, recipe = tmp_path / "in", "bitsandbytes_double" if double else "bitsandbytes", f"{kind}_bitsandbytes"
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    config = {"quantization_config": nf4_config(double) | {"bnb_4bit_quant_type": kind}}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    expected = {name: read_by_bitsandbytes(tensors, name) for name in Ragged().state_dict()}

    assert load_safetensors(plain := Ragged(zeros=True), path, convert=True) == ((), ())
    convert_safetensors(path, tmp_path / "plain", dtype="bfloat16")
    assert all(torch.equal(param, expected[name]) for name, param in plain.named_parameters())
    assert all(torch.equal(one, expected[name]) for name, one in tensors_in(tmp_path / "plain").items())
    assert two.run(ragged_on_ranks, str(path), str(tmp_path / "plain")) == [True, True]
    with pytest.raises(LayoutError, match=rf"3 weights, such as even.weight, .*blocks of 64 across rows.*{recipe}"):
        quantize_as_stored(Ragged(), path)

    layoutc.quantize_(mixed := Ragged(zeros=True), recipe, filter_fn=lambda _, name: name == "whole")
    load_safetensors(mixed, path, convert=True)
    assert torch.equal(mixed.whole.weight.dequantize(torch.bfloat16), expected["whole.weight"])
    assert torch.equal(mixed.odd.weight, expected["odd.weight"])
    export_safetensors(mixed, tmp_path / "out", files=binding, source=path)
    kept = {name: one for name, one in tensors.items() if name.startswith("whole.")}
    assert all(torch.equal(tensors_in(tmp_path / "out")[name], one) for name, one in kept.items())
    export_safetensors(mixed, tmp_path / "scales", files="bitsandbytes", source=path)  # of codes of scales too
    assert tensors_in(tmp_path / "scales")["whole.weight.absmax"].dtype is torch.float32
    with pytest.raises(LayoutError, match=rf"even.weight: {recipe} takes columns in multiples of 64"):
        convert_safetensors(path, tmp_path / "refused", files=binding)  # which tells the recipe by the source's

    (path / "config.json").unlink()
    for source_files in (binding, f"{recipe}/{binding}"):
        convert_safetensors(path, tmp_path / source_files, dtype="bfloat16", source_files=source_files)
        assert same_files(tmp_path / source_files, tmp_path / "plain", but=())


class Ragged(nn.Module):
    """Rows of whole blocks of 64 values, of parts of them, and shorter ones; of odd numbers of values."""

    def __init__(self, zeros: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, m, k in (("whole", 96, 128), ("even", 80, 96), ("odd", 7, 33), ("short", 6, 32)):
            setattr(self, name, nn.Linear(k, m, bias=False, dtype=torch.bfloat16))
        for param in self.parameters() if zeros else ():
            param.data.zero_()


def in_bits4(name: str, value: Tensor, **how: Any) -> Tensors:
    """A weight as bitsandbytes has it in a state dict."""
    from bitsandbytes.functional import quantize_4bit

    codes, kept = quantize_4bit(value, blocksize=64, **how)
    return {name: codes} | {f"{name}.{key}": one for key, one in kept.as_dict(packed=True).items()}


def ragged_on_ranks(path: str, plain: str) -> bool:
    model, expected = Ragged(zeros=True), tensors_in(Path(plain))
    fully_shard(model)
    load_safetensors(model, path, convert=True)
    full = {name: param.full_tensor() for name, param in model.named_parameters()}  # type: ignore[attr-defined]
    return all(torch.equal(full[name], value) for name, value in expected.items())


def test_a_recipe_of_ones_own_holds_other_blocks_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the refusal says: a copy of a spec with other blocks, built here and named, byte for byte; also of files
    without g_idx, and by a binding that states nothing of experts."""
    from click.testing import CliRunner

    from layoutc.cli.app import main

    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(main, ["new", "gptq_of_32", "--from", "gptq"]).exit_code == 0
    spec, path = Path("specs/gptq_of_32.yaml"), tmp_path / "in"
    spec.write_text(re.sub(r" +parts:\n( {6}.*\n)+", "", spec.read_text().replace("128", "32")))
    assert CliRunner().invoke(main, ["build", str(spec)]).exit_code == 0
    tensors, config = gptq(dict(Mlp(HALF).state_dict()), each=32)
    folder_of(path, {name: one for name, one in tensors.items() if "g_idx" not in name}, config)

    model, files = Mlp(HALF), "gptq_of_32/gptq"
    assert set(quantize_as_stored(model, path, files=files).values()) == {"gptq_of_32"}
    assert load_safetensors(model, path, files=files) == ((), ())
    assert torch.equal(model.up_proj.weight.dequantize(HALF), gptq_values(tensors, "up_proj.weight"))
    export_safetensors(model, tmp_path / "out", files=files, source=path)
    convert_safetensors(path, tmp_path / "same", files=files, source_files=files)
    assert same_files(path, tmp_path / "out")
    assert same_files(path, tmp_path / "same")


def with_config(source: Path, folder: Path, config: Any) -> Path:
    """The same tensors beside another config.json."""
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_configs_as_people_write_them(released: Callable[[str], Path], tmp_path: Path) -> None:
    """Where transformers and vLLM look for them, in capitals, with keys of before, or without what has a default."""
    path = released("block_bf16")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    short = {"quant_method": "FP8"}
    for i, one in enumerate(
        (
            {"quantization_config": config | {"quant_method": "FP8", "fmt": "E4M3"}},
            {"quantization_config": short},
            {"compression_config": config},
            {"model_type": "some_vl", "text_config": {"hidden_size": 256, "quantization_config": config}},
            {"quantization_config": config, "text_config": {"hidden_size": 256, "quantization_config": config}},
        )
    ):
        folder = with_config(path, tmp_path / str(i), one)
        check_values("block_bf16", path, loaded(folder))
        convert_safetensors(folder, tmp_path / f"plain{i}", dtype=torch.bfloat16)
        left = (tmp_path / f"plain{i}" / "config.json").read_text() if i >= 3 else ""
        assert "quantization_config" not in left
        export_safetensors(loaded(folder), tmp_path / f"same{i}", files="deepseek", source=folder)
        assert i == 2 or json.loads((tmp_path / f"same{i}" / "config.json").read_text()) == one  # 2: under today's key
    for written, kind in (
        ({"quant_method": "AWQ", "w_bit": 4, "q_group_size": 128, "version": "GEMM", "zero_point": True}, "awq"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "format": "GPTQ", "desc_act": False}, "gptq"),
    ):
        labels = [one.label for one in recognize.recognized(written, recognize.installed())]
        assert labels == [f"{kind}/{kind}", f"{kind}/{kind}, scales of other dtypes"]
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}  # by which transformers goes, whatever the method is
    for written, label in (
        (nf4, "nf4_bitsandbytes/bitsandbytes"),
        (nf4 | {"quant_method": "bitsandbytes_4bit"}, "nf4_bitsandbytes/bitsandbytes"),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "nvfp4_modelopt/modelopt"),  # as vLLM has its name
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, "fp8_current/modelopt"),
    ):
        assert recognize.recognized(written, recognize.installed())[0].label == label
    for written in ({"load_in_8bit": True}, nf4 | {"bnb_4bit_quant_type": "int4"}):
        assert not recognize.recognized(written, recognize.installed())


def test_a_config_without_a_method_is_written_back_as_it_is(tmp_path: Path) -> None:
    """bitsandbytes' first ones have none, and their folder no second key, which MLX's have for theirs."""

    tensors, config = bitsandbytes(dict(Mlp().state_dict()))
    del config["quant_method"]
    (path := tmp_path / "in").mkdir()
    folder_of(path, tensors, config)
    export_safetensors(loaded(path), tmp_path / "out", files="bitsandbytes", source=path)
    assert same_files(path, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"quantization_config": config}


def of_auto_round(packing: str, data_type: str = "int", bits: int = 4, **more: Any) -> dict[str, Any]:
    """As auto-round 0.16 writes in its own format, of which other programs' loaders know the tensors."""
    stated = {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}", "data_type": data_type}
    return stated | {"bits": bits, "group_size": 32 if data_type == "mx_fp" else 128, "sym": True} | more


@pytest.mark.parametrize(
    ("config", "label"),
    [
        (of_auto_round("auto_gptq"), "gptq/gptq"),
        (of_auto_round("auto_awq"), "awq/awq"),
        (of_auto_round("gptq"), "gptq/gptq"),
        (of_auto_round("awq"), "awq/awq"),
        (of_auto_round("") | {"packing_format": "auto", "quant_method": "intel/auto-round"}, "gptq/gptq"),
        (of_auto_round("") | {"packing_format": None, "backend": "auto_round:exllamav2"}, None),
        (of_auto_round("gptqmodel"), None),
        (of_auto_round("llm_compressor", "mx_fp", act_bits=4), "mxfp4/compressed_tensors"),
        (of_auto_round("llm_compressor", "mx_fp", 8, act_bits=8), "mxfp8_frozen/compressed_tensors"),
        (of_auto_round("llm_compressor", "nv_fp", act_bits=4), None),
        (of_auto_round("exllamav2", bits=2), None),
    ],
)
def test_auto_rounds_own_format_is_that_of_the_program_whose_tensors_it_has(
    config: dict[str, Any], label: str | None
) -> None:
    labels = [one.label for one in recognize.recognized(config, recognize.installed())]
    assert (label in labels) if label else not labels


def test_auto_rounds_own_format_is_written_back(tmp_path: Path) -> None:
    """GPTQ's tensors but for g_idx, under its config: the values of GPTQ's definition, by an export, a conversion and a
    stream that add nothing; and with g_idx where no source says that files lack it."""

    config = of_auto_round("auto_gptq", block_name_to_quantize="layers")
    path, model, tensors = tmp_path / "in", Mlp(HALF), gptq(dict(Mlp(HALF).state_dict()))[0]
    folder_of(path, {name: one for name, one in tensors.items() if "g_idx" not in name}, config)
    assert set(quantize_as_stored(model, path).values()) == {"gptq"}
    assert load_safetensors(model, path) == ((), ())
    for name, param in model.named_parameters():
        if isinstance(param, QuantizedTensor):
            assert torch.equal(param.dequantize(HALF), gptq_values(tensors, name))
    export_safetensors(model, tmp_path / "out", files="gptq", source=path)
    convert_safetensors(path, tmp_path / "same", files="gptq/gptq")
    assert same_files(path, tmp_path / "out")
    assert same_files(path, tmp_path / "same")
    assert {name for name, _ in stream_export(model, files="gptq", source=path)} == tensors_in(path).keys()
    export_safetensors(model, tmp_path / "alone", files="gptq")
    assert tensors_in(tmp_path / "alone").keys() == tensors.keys()


def test_metas_fp8_of_fbgemm_is_loaded_and_written_back(tmp_path: Path) -> None:
    """As in Meta's FP8 release of Llama 3.1 405B: a scale for each row, as (rows, 1), and a bound of activations."""

    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    model, tensors = Mlp(torch.bfloat16), dict[str, Tensor]()
    for name, value in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        scale = value.float().abs().amax(1, keepdim=True) / 448
        tensors[name], tensors[f"{name}_scale"] = (value / scale).to(torch.float8_e4m3fn), scale
        tensors[f"{name.rpartition('.')[0]}.input_scale_ub"] = torch.tensor([1200.0])
    path = tmp_path / "in"
    folder_of(path, tensors, config)
    assert set(quantize_as_stored(model, path).values()) == {"fp8_rowwise"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load_safetensors(model, path) == ((), ())
        export_safetensors(model, tmp_path / "out", files="fbgemm", source=path)
        convert_safetensors(path, tmp_path / "plain", dtype=torch.float32)
    assert same_files(path, tmp_path / "out")
    plain = tensors_in(tmp_path / "plain")
    for name in (one for one in tensors if f"{one}_scale" in tensors):
        assert torch.equal(plain[name], tensors[name].float() * tensors[f"{name}_scale"])


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_stacks_of_fbgemm_are_refused_even_where_scales_have_the_shape_of_rows(part: str, tmp_path: Path) -> None:
    """FbgemmFp8Llama4TextExperts has x @ w: the scales (experts, hidden, 1) of its down_proj are those of columns."""
    e, n = 2, 64
    experts = nn.Module()
    experts.register_parameter(part, nn.Parameter(torch.randn(e, n, n)))
    scales = torch.rand(e, n, 1) if part == "down_proj" else torch.rand(e, 1, n)
    value = experts.get_parameter(part).detach()
    tensors = {f"experts.{part}": value.to(torch.float8_e4m3fn), f"experts.{part}_scale": scales}
    model = nn.ModuleDict({"experts": experts})
    folder_of(tmp_path / "in", tensors, {"quant_method": "fbgemm_fp8"})
    for call in (
        partial(quantize_as_stored, model),
        partial(load_safetensors, model, convert=True, strict=False),
        partial(convert_safetensors, folder=tmp_path / "out", dtype=torch.bfloat16),
    ):
        with pytest.raises(LayoutError, match=rf"experts\.{part}"):
            call(tmp_path / "in")


def older_folder(path: Path, file: str, text: Any, write: Callable[[Tensors], Any]) -> Tensors:
    """A folder whose config.json says nothing of weights, with an older program's file beside it."""
    from safetensors.torch import save_file

    tensors: Tensors = write(dict(Mlp(HALF).state_dict()))[0]
    path.mkdir()
    save_file({key: one.contiguous() for key, one in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text('{"hidden_size": 256}')
    (path / file).write_text(json.dumps(text), encoding="utf-8")
    return tensors


def test_a_config_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Beside a config.json without it, as AutoGPTQ, AutoAWQ and ModelOpt wrote them; what is written has it there."""
    fp8 = partial(of_modelopt, algo="FP8_PB_WO", block=(128, 128), to=torch.float8_e4m3fn)
    for file, text, write, read, recipe in (
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, gptq, gptq_values, "gptq"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4}, awq, awq_values, "awq"),
        (
            "hf_quant_config.json",
            {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "FP8_PB_WO", "exclude_modules": ["head"]},
            },
            fp8,
            times_scales,
            "fp8_block",
        ),
    ):
        path, model = tmp_path / recipe, Mlp(HALF)
        tensors = older_folder(path, file, text, write)
        assert set(quantize_as_stored(model, path).values()) == {recipe}
        load_safetensors(model, path)
        values = read(tensors, "up_proj.weight")
        assert torch.equal(model.up_proj.weight.dequantize(values.dtype), values)
        convert_safetensors(path, tmp_path / f"plain-{recipe}", dtype=values.dtype)
        assert torch.equal(tensors_in(tmp_path / f"plain-{recipe}")["up_proj.weight"], values)
        binding = "modelopt" if recipe == "fp8_block" else recipe
        export_safetensors(model, tmp_path / f"out-{recipe}", files=binding, source=path)
        assert same_files(path, tmp_path / f"out-{recipe}")
        assert load_safetensors(model, tmp_path / f"out-{recipe}") == ((), ())
        assert {one.name for one in (tmp_path / f"plain-{recipe}").iterdir()} == {"config.json", "model.safetensors"}
    path = tmp_path / "damaged"
    older_folder(path, "quant_config.json", {}, awq)
    (path / "quant_config.json").write_text("{")
    with pytest.raises(LayoutError, match=r"quant_config\.json: the config"):
        quantize_as_stored(Mlp(HALF), path)


def test_a_config_that_is_left_over_beside_plain_weights_is_refused(tmp_path: Path) -> None:
    """In the same words, before anything is written, with what to delete."""
    from safetensors.torch import save_file

    model, quantized = Mlp(), Mlp()
    layoutc.quantize_(quantized, "fp8_block")
    for file, config in (
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}),
        ("config.json", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),
    ):
        path, out = tmp_path / file.partition(".")[0], tmp_path / "out"
        path.mkdir()
        save_file(model.state_dict(), path / "model.safetensors")
        (path / file).write_text(json.dumps(config), encoding="utf-8")
        named = f"delete {file}" if file != "config.json" else "delete quantization_config from config.json"
        for use in (
            partial(load_safetensors, model, path),
            partial(quantize_as_stored, model, path),
            partial(convert_safetensors, path, out, dtype=torch.bfloat16),
            partial(export_safetensors, quantized, out, files="deepseek", source=path),
            lambda path=path: list(stream_export(quantized, files="deepseek", source=path)),
        ):
            with pytest.raises(LayoutError, match=rf"no tensor has their names\. .* {named}"):
                use()
        assert not out.exists()
        (path / file).unlink()
        assert load_safetensors(model, path) == ((), ())


def test_the_list_of_plain_modules_keeps_its_key(released: Callable[[str], Path], tmp_path: Path) -> None:
    path = released("block_bf16")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    del config["modules_to_not_convert"]
    folder = with_config(path, tmp_path / "in", {"quantization_config": config | {"ignored_layers": ["head"]}})
    model = Mlp()
    quantize_as_stored(model, folder)
    load_safetensors(model, folder)
    plain = model.down_proj.weight.dequantize(torch.bfloat16)
    model.down_proj.weight = nn.Parameter(plain)
    export_safetensors(model, tmp_path / "out", files="deepseek", source=folder)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written == config | {"ignored_layers": ["head", "down_proj"]}


FP8_CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}


def test_a_config_that_nothing_knows_is_answered_in_ten_lines(released: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    config = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}, "skip": ["x"] * 500}
    for i, one in enumerate((config, {"quant_method": "awq", "bits": 3, "group_size": 128, "version": "gemm"})):
        folder = with_config(released("block_bf16"), tmp_path / str(i), {"quantization_config": one})
        with pytest.raises(
            LayoutError, match=r"config.json has a quantization_config that no .* quant_method = "
        ) as found:
            quantize_as_stored(Mlp(), folder)
        assert str(found.value).count("\n") < 10
        assert all(len(line) < 300 for line in str(found.value).splitlines())
        assert ("name it, as files='fp8_block/deepseek'" in str(found.value)) == (one is config)
    assert "bits = 3" in str(found.value)
    assert "could be those of fp8_block/deepseek: if they are, write quant_method = 'fp8' in" in str(found.value)
    (folder / "model.safetensors").unlink()
    save_file({"up_proj.weight": torch.zeros(384, 256)}, folder / "model.safetensors")
    with pytest.raises(LayoutError, match=r"awq/awq, but for bits\n(.*\n)*.* `layoutc new mine --from awq`"):
        quantize_as_stored(Mlp(), folder)


@pytest.mark.parametrize(
    ("names", "config", "said"),
    [
        (("qweight", "qzeros"), {"quant_method": "gptq", "bits": 8, "group_size": 128}, "layoutc new mine --from gptq"),
        (("W_q", "scale"), {"quant_method": "hqq"}, "the program that wrote the files make plain weights"),
        (("compressed", "bitmask"), FP8_CHANNEL, "no tensor has their names. transformers makes a plain model of them"),
    ],
)
def test_weights_are_not_left_as_they_were_beside_codes_that_nothing_reads(
    names: tuple[str, ...], config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Nor with strict=False, which leaves out what files lack: they do not lack these."""

    tensors = {f"up_proj.{name}": torch.ones(96, 256, dtype=torch.int32) for name in names}
    folder_of(tmp_path, tensors, config)
    for call in (
        partial(load_safetensors, strict=False),
        partial(load_safetensors, strict=False, convert=True),
        quantize_as_stored,
    ):
        with pytest.raises(LayoutError, match=re.escape(said)):
            call(Mlp(), tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "activation_scheme": "static"},  # vLLM's own, as releases of 2024 have it
        {"quant_method": "modelopt", "quant_algo": "W4A8_FP8"},
    ],
)
def test_what_the_error_says_to_write_in_a_config_works(
    config: dict[str, Any], released: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = with_config(released("tensor_of_modelopt"), tmp_path / "in", {"quantization_config": config})
    sentence = r"could be those of fp8_current/modelopt: if they are, write (.*) in config\.json"
    ours = Mlp()
    layoutc.quantize_(ours, "fp8_current", param_filter=["*_proj.weight"])
    for model in (Mlp(), ours):
        for strict in (True, False):
            with pytest.raises(LayoutError, match=sentence) as said:
                load_safetensors(model, folder, convert=True, strict=strict)
    found = re.search(sentence, str(said.value))
    assert found is not None
    written = dict(one.replace("'", "").split(" = ") for one in found[1].split(", "))
    folder = with_config(folder, tmp_path / "right", {"quantization_config": config | written})
    model = Mlp()
    assert set(quantize_as_stored(model, folder).values()) == {"fp8_current"}
    load_safetensors(model, folder)
    state = tensors_in(folder)
    expected = state["up_proj.weight"].float() * state["up_proj.weight_scale"].float()
    assert torch.equal(model.up_proj.weight.dequantize(torch.float32), expected)
    with pytest.raises(ValueError, match=r"filter_fn=lambda module, name: .* name != '0'"):
        layoutc.quantize_(nn.Sequential(nn.Linear(24, 8)), "nvfp4")


def test_configs_of_mlx(released: Callable[[str], Path], tmp_path: Path) -> None:
    """It reads them under another key, and has had them there alone; a plain folder has none. A mode that no recipe has
    is refused in its name, with what would work."""
    path, by_default = released("mxfp4_of_mlx"), {"bits": 5, "group_size": 64}
    stated = json.loads((path / "config.json").read_text())["quantization_config"]
    for i, one in enumerate(({"quantization": stated}, {"quantization": stated, "quantization_config": stated})):
        folder, out = with_config(path, tmp_path / str(i), {"hidden_size": 256} | one), tmp_path / f"plain{i}"
        check_values("mxfp4_of_mlx", path, loaded(folder))
        convert_safetensors(folder, out, dtype=torch.bfloat16)
        assert json.loads((out / "config.json").read_text()) == {"hidden_size": 256}
        convert_safetensors(folder, tmp_path / f"same{i}", files="mxfp4/mlx")
        written = json.loads((tmp_path / f"same{i}" / "config.json").read_text())
        assert written["quantization"] == written["quantization_config"] == stated
    for i, one in enumerate((by_default, by_default | {"mode": "affine"})):
        folder = with_config(path, tmp_path / f"other{i}", {"quantization": one})
        with pytest.raises(LayoutError, match=r"mxfp4/mlx, but for mode, bits.*\nMLX .* --dequantize\n") as found:
            convert_safetensors(folder, tmp_path / "none", dtype=torch.bfloat16)
        assert str(found.value).count("\n") < 10


def test_weights_under_smoothed_activations_are_refused(released: Callable[[str], Path], tmp_path: Path) -> None:
    """ModelOpt's pre_quant_scale: activations are multiplied by it, so that the weights alone are another model."""
    from safetensors.torch import save_file

    path, tensors = released("int8_of_modelopt"), tensors_in(released("int8_of_modelopt"))
    (tmp_path / "in").mkdir()
    tensors["down_proj.pre_quant_scale"] = torch.ones(384)
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").symlink_to(path / "config.json")
    model = Mlp()
    quantize_as_stored(model, tmp_path / "in")
    for call in (
        lambda: load_safetensors(model, tmp_path / "in"),
        lambda: load_safetensors(Mlp(), tmp_path / "in", convert=True),
        lambda: convert_safetensors(tmp_path / "in", tmp_path / "out", dtype=torch.bfloat16),
    ):
        with pytest.raises(LayoutError, match=r"down_proj.weight \(I8 .* with down_proj.pre_quant_scale beside it"):
            call()


def test_headers_as_other_programs_write_them(released: Callable[[str], Path], tmp_path: Path) -> None:
    """MLX: no metadata, stated as null, and a header of any length; and tensors of a dtype that nothing here has, of
    no module and of those for other programs alone."""
    path, folder = released("block_bf16"), tmp_path / "in"
    raw = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length]) | {"__metadata__": None}
    end = len(raw) - 8 - length
    header["table"] = {"dtype": "C64", "shape": [3], "data_offsets": [end, end + 24]}
    header["up_proj.output_scale"] = {"dtype": "C64", "shape": [], "data_offsets": [end + 24, end + 32]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (1 - len(text) % 2)  # odd, so that nothing is aligned
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + raw[8 + length :] + b"complex!" * 4
    )
    (folder / "config.json").symlink_to(path / "config.json")
    model = Mlp()
    quantize_as_stored(model, folder)
    assert load_safetensors(model, folder, strict=False).unexpected == ("table",)
    check_values("block_bf16", path, model)
    convert_safetensors(folder, tmp_path / "out", files="fp8_block/deepseek")
    assert same_files(folder, tmp_path / "out")
    assert tensors_in(tmp_path / "out")["table"].dtype == torch.complex64
    with pytest.warns(UserWarning, match=r"^table of .* are not written"):
        export_safetensors(model, tmp_path / "exported", files="deepseek", source=folder)
    assert same_files(folder, tmp_path / "exported", but=("table",))
    assert tensors_in(tmp_path / "exported")["up_proj.output_scale"].dtype == torch.complex64


class Stacks(nn.Module):
    """Experts as transformers stacks them."""

    def __init__(self, rows: int = 256) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gate_up_proj = nn.Parameter(torch.randn(4, rows, 128, dtype=torch.bfloat16))
        self.down_proj = nn.Parameter(torch.randn(4, 128, 128, dtype=torch.bfloat16))


def of_experts(stacks: Stacks) -> nn.Module:
    return nn.Sequential(OrderedDict(mlp=nn.Sequential(OrderedDict(experts=stacks))))


def moves_stacks(path: str, out: str) -> bool:
    """On ranks: whether shards hold what the package reads, and an export."""
    model = of_experts(Stacks())
    quantize_as_stored(model, path)
    fully_shard(model)
    load_safetensors(model, path)
    same = True
    for name, param in model.named_parameters():
        full: Any = param.full_tensor()  # type: ignore[attr-defined]
        same &= torch.equal(full.dequantize(torch.bfloat16), read_by_transformers(tensors_in(Path(path)), name))
    export_safetensors(model, out, files="deepseek", source=path)
    return same


def test_experts_that_files_have_stacked(two: Ranks, tmp_path: Path) -> None:
    """As transformers' quantizer writes them, in place of a tensor for each expert; with a model and without."""

    state = {f"mlp.experts.{name}": one for name, one in Stacks().state_dict().items()}
    tensors, config = fp8_of_transformers(state, ends="_proj")
    folder_of(tmp_path / "in", tensors, config)
    assert two.run(moves_stacks, str(tmp_path / "in"), str(tmp_path / "out")) == [True, True]
    assert same_files(tmp_path / "in", tmp_path / "out")
    plain = of_experts(Stacks())
    load_safetensors(plain, tmp_path / "in", convert=True)
    convert_safetensors(tmp_path / "in", tmp_path / "plain", dtype=torch.bfloat16)
    for name, param in plain.named_parameters():
        values = read_by_transformers(tensors, name)
        assert torch.equal(param, values)
        assert torch.equal(tensors_in(tmp_path / "plain")[name], values)


def nvfp4_experts(folder: Path) -> Stacks:
    """The same experts in NVFP4, a tensor each under a global scale of its own; 192 rows of gate, which end inside of
    FP8's blocks."""

    model, state = Stacks(rows=384), dict[str, Tensor]()
    for number, matrix in enumerate(model.gate_up_proj.detach()):
        for part, rows in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
            state[f"mlp.experts.{number}.{part}.weight"] = rows * (number + 1)
        state[f"mlp.experts.{number}.down_proj.weight"] = model.down_proj.detach()[number]
    tensors, config = compressed("NVFP4A16", "nvfp4-pack-quantized")(state)
    folder_of(folder, tensors, config)
    return model


def test_experts_of_their_own_scales_go_into_a_plain_model_part_by_part(tmp_path: Path) -> None:
    """Also where a stack of them would share blocks or one amax, which a recipe has no place for."""
    stacks = nvfp4_experts(tmp_path / "nvfp4")
    model = of_experts(stacks)
    convert_safetensors(tmp_path / "nvfp4", tmp_path / "block", files="fp8_block/deepseek")
    for folder in ("nvfp4", "block"):
        load_safetensors(model, tmp_path / folder, convert=True)
        tensors = tensors_in(tmp_path / folder)
        config = json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]

        def read(name: str, tensors: Tensors = tensors, config: dict[str, Any] = config) -> Tensor:
            if config["quant_method"] == "compressed-tensors":
                return read_by_compressed_tensors(tensors, name, config).bfloat16()
            codes, scale = tensors[name].float(), tensors[f"{name}_scale_inv"]
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(codes), : codes.shape[1]]
            return (codes * scale).bfloat16()

        for number in range(4):
            parts = [read(f"mlp.experts.{number}.{part}.weight") for part in ("gate_proj", "up_proj")]
            assert torch.equal(stacks.gate_up_proj[number], torch.cat(parts))
            assert torch.equal(stacks.down_proj[number], read(f"mlp.experts.{number}.down_proj.weight"))


ONE_BY_ONE: dict[str, tuple[Writer, Values, torch.dtype]] = {
    "fp8_current/modelopt": (
        partial(
            one_scale,
            ends=("weight_scale", "input_scale"),
            shape=(),
            config={"quant_method": "modelopt", "quant_algo": "FP8"},
        ),
        times_scale,
        torch.float32,
    ),
    "gptq/gptq": (gptq, gptq_values, HALF),
    "awq/awq": (awq, awq_values, HALF),
    "nf4_bitsandbytes/bitsandbytes_double": (partial(bitsandbytes, double=True), read_by_bitsandbytes, torch.bfloat16),
}


@pytest.mark.filterwarnings("ignore:.* are for other programs alone", "ignore:.*engines join")
@pytest.mark.parametrize("label", ONE_BY_ONE)
def test_experts_that_files_have_one_by_one_are_stacked(label: str, tmp_path: Path) -> None:
    """As Qwen's releases in GPTQ have them, byte for byte there and back; under a scale for each weight they go into a
    plain model alone, which the refusal says."""

    write, read, dtype = ONE_BY_ONE[label]
    path, stacks = tmp_path / "in", Stacks().to(dtype)
    parts = {
        f"mlp.experts.{number}.{part}.weight": rows
        for number in range(4)
        for part, rows in zip(
            ("gate_proj", "up_proj", "down_proj"),
            (*stacks.gate_up_proj.detach()[number].chunk(2), stacks.down_proj.detach()[number]),
            strict=True,
        )
    }
    tensors, config = write(parts)
    folder_of(path, tensors, config)
    values = {name: read(tensors, name).to(dtype) for name in parts}
    gate_up = [[values[f"mlp.experts.{number}.{one}_proj.weight"] for one in ("gate", "up")] for number in range(4)]
    expected = torch.stack([torch.cat(both) for both in gate_up])

    plain, model = of_experts(Stacks().to(dtype)), of_experts(Stacks().to(dtype))
    load_safetensors(plain, path, convert=True)
    assert torch.equal(plain.mlp.experts.gate_up_proj, expected)
    assert torch.equal(plain.mlp.experts.down_proj[3], values["mlp.experts.3.down_proj.weight"])
    assert set(quantize_as_stored(model, path).values()) == {label.partition("/")[0]}
    if label.startswith("fp8_current"):
        with pytest.raises(LayoutError, match=r"its parts in the files have values of their own, .*convert=True"):
            load_safetensors(model, path)
        return
    load_safetensors(model, path)
    assert torch.equal(model.mlp.experts.gate_up_proj.dequantize(dtype), expected)
    export_safetensors(model, tmp_path / "out", files=label, source=path)
    assert same_files(path, tmp_path / "out")


def test_experts_of_their_own_scales_are_quantized_anew_when_asked_to(tmp_path: Path) -> None:
    """Into a stack that has one amax, as the values of all parts would be; and refused, in words, when not."""
    model, expected = of_experts(nvfp4_experts(tmp_path / "in")), of_experts(Stacks(384)).float()
    load_safetensors(expected, tmp_path / "in", convert=True)
    recipe = "nvfp4_compressed_tensors"
    layoutc.quantize_(model, recipe, param_filter=lambda name, _: True)
    with pytest.raises(LayoutError, match=r"values of their own, .* convert=True .* nvfp4_compressed_tensors_experts"):
        load_safetensors(model, tmp_path / "in")
    assert load_safetensors(model, tmp_path / "in", convert=True) == ((), ())
    layoutc.quantize_(expected, recipe, param_filter=lambda name, _: True)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert isinstance(one, QuantizedTensor)
        assert isinstance(other, QuantizedTensor)
        assert all(torch.equal(plane, other.planes()[key]) for key, plane in one.planes().items())
    export_safetensors(model, tmp_path / "out", files="compressed_tensors", source=tmp_path / "in")
    assert load_safetensors(model, tmp_path / "out") == ((), ())
    again = of_experts(Stacks(384))
    quantize_as_stored(again, tmp_path / "out")
    assert load_safetensors(again, tmp_path / "out") == ((), ())


def values_of_stacks(path: Path) -> dict[str, Tensor]:
    """What compressed-tensors, or the definition of ModelOpt's files, reads of each stack."""
    tensors = tensors_in(path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))["quantization_config"]

    def read(name: str) -> Tensor:
        if config["quant_method"] == "compressed-tensors":
            return read_by_compressed_tensors(tensors, name, config).bfloat16()
        codes = tensors[name]
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        elements = values[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
        factor = tensors[f"{name}_scale"].float() * tensors[f"{name}_scale_2"]
        return (elements * factor.repeat_interleave(16, 1)).bfloat16()

    gate_up = [[read(f"mlp.experts.{n}.{part}.weight") for part in ("gate_proj", "up_proj")] for n in range(4)]
    return {
        "gate_up_proj": torch.stack([torch.cat(both) for both in gate_up]),
        "down_proj": torch.stack([read(f"mlp.experts.{n}.down_proj.weight") for n in range(4)]),
    }


def test_experts_of_their_own_scales_that_files_have_stacked(tmp_path: Path) -> None:
    """One tensor of codes, of scales, and of a number for each matrix: compressed-tensors' bytes of each expert,
    stacked under ModelOpt's names. Values are those of the definition; exports and conversions write the same bytes."""
    from safetensors.torch import save_file

    model = nvfp4_experts(tmp_path / "apart")
    apart = tensors_in(tmp_path / "apart")
    names, tensors = [f"mlp.experts.{number}.down_proj" for number in range(4)], dict[str, Tensor]()
    tensors["mlp.experts.down_proj"] = torch.stack([apart[f"{name}.weight_packed"] for name in names])
    tensors["mlp.experts.down_proj_scale"] = torch.stack([apart[f"{name}.weight_scale"] for name in names])
    levels = torch.cat([apart[f"{name}.weight_global_scale"].reshape(1) for name in names])
    tensors["mlp.experts.down_proj_scale_2"] = 1 / levels * torch.arange(1, 5)
    tensors["mlp.experts.down_proj"][2], tensors["mlp.experts.down_proj_scale_2"][2] = 0x80, 0  # -0 and 0, uncalibrated
    tensors["mlp.experts.gate_up_proj"] = model.gate_up_proj.detach()
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": config}), encoding="utf-8")

    codes, table = tensors["mlp.experts.down_proj"], torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack([codes & 15, codes >> 4], -1).flatten(2).long()
    factor = tensors["mlp.experts.down_proj_scale"].float() * tensors["mlp.experts.down_proj_scale_2"][:, None, None]
    expected = torch.where(codes > 7, -table[codes & 7], table[codes & 7]) * factor.repeat_interleave(16, 2)
    stacks = Stacks(384)
    held = of_experts(stacks)
    assert quantize_as_stored(held, tmp_path / "in") == {"mlp.experts.down_proj": "nvfp4_modelopt_experts"}
    assert load_safetensors(held, tmp_path / "in") == ((), ())
    assert torch.equal(stacks.down_proj.dequantize(torch.float32), expected)  # type: ignore[operator]
    export_safetensors(held, tmp_path / "out", files="modelopt", source=tmp_path / "in")
    assert same_files(tmp_path / "in", tmp_path / "out")
    for name, tensor in stream_export(held, files="modelopt", source=tmp_path / "in"):
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), tensors[name].reshape(-1).view(torch.uint8)), name
    convert_safetensors(tmp_path / "in", tmp_path / "plain", dtype=torch.float32)
    assert torch.equal(tensors_in(tmp_path / "plain")["mlp.experts.down_proj"], expected)
    convert_safetensors(tmp_path / "in", tmp_path / "same", files="nvfp4_modelopt_experts/modelopt")
    assert same_files(tmp_path / "in", tmp_path / "same")
    tensors["mlp.experts.down_proj_scale_2"][1] = 0
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    for read in (
        lambda: load_safetensors(held, tmp_path / "in"),
        lambda: load_safetensors(of_experts(Stacks(384)), tmp_path / "in", convert=True),
        lambda: convert_safetensors(tmp_path / "in", tmp_path / "no", dtype=torch.bfloat16),
    ):
        with pytest.raises(LayoutError, match=r"experts.down_proj_scale_2\[1\] in the files is 0, which is no scale"):
            read()


def tunes_stacks(path: str, out: str) -> dict[str, Tensor]:
    """On ranks, or in one process: load shards, export and stream them, take a step, export. What shards then are."""
    model = of_experts(Stacks(384))
    assert all(name.endswith("_experts") for name in quantize_as_stored(model, path).values())
    if torch.distributed.is_initialized():
        fully_shard(model)
    load_safetensors(model, path)
    files = "compressed_tensors" if "compressed" in path else "modelopt"
    export_safetensors(model, f"{out}/same", files=files, source=path)
    for name, tensor in stream_export(model, files=files, source=path):
        there = tensors_in(Path(path))[name]
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), there.reshape(-1).view(torch.uint8)), name
    optimizer = layoutc.MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0)
    for number, param in enumerate(model.parameters()):
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
        param.grad = distribute(grad.to(param.dtype), param)
    optimizer.step()
    export_safetensors(model, f"{out}/tuned", files=files)
    values = {
        name.rpartition(".")[2]: getattr(one, "full_tensor", lambda one=one: one)()
        for name, one in model.named_parameters()
    }
    return {name: one.dequantize(torch.bfloat16).detach() for name, one in values.items()}


def distribute(grad: Tensor, param: Tensor) -> Tensor:
    mesh, placements = getattr(param, "device_mesh", None), getattr(param, "placements", None)
    return grad if mesh is None else distribute_tensor(grad, mesh, placements)


@pytest.mark.parametrize("program", ["compressed_tensors", "modelopt"])
def test_experts_of_their_own_scales_are_tuned_and_written_back(program: str, three: Ranks, tmp_path: Path) -> None:
    """Each expert's bytes are kept; a step quantizes each under an amax of its own, the same in one process as on
    ranks, of which the last has no expert."""
    path = tmp_path / program
    nvfp4_experts(path)
    if program == "modelopt":
        convert_safetensors(path, tmp_path / "modelopt_in", files="nvfp4_modelopt/modelopt")
        path = tmp_path / "modelopt_in"
    expected = values_of_stacks(path)
    model = of_experts(Stacks(384))
    quantize_as_stored(model, path)
    load_safetensors(model, path)
    for name, param in model.named_parameters():
        assert torch.equal(param.dequantize(torch.bfloat16), expected[name.rpartition(".")[2]])  # type: ignore[attr-defined]
    alone = tunes_stacks(str(path), str(tmp_path / "alone"))
    ranks = three.run(tunes_stacks, str(path), str(tmp_path / "ranks"))
    for out in ("alone", "ranks"):
        assert same_files(path, tmp_path / out / "same")
        tuned = values_of_stacks(tmp_path / out / "tuned")
        for values in [alone, *ranks]:
            assert all(torch.equal(one, tuned[name]) for name, one in values.items())
    scales = [
        one for name, one in tensors_in(tmp_path / "ranks" / "tuned").items() if "scale_2" in name or "global" in name
    ]
    assert len({float(one) for one in scales}) == 8  # one for each matrix, which gate and up share


def writes(name: str, path: str, out: str) -> None:
    """On ranks: load shards, and export."""
    model = Mlp()
    quantize_as_stored(model, path)
    fully_shard(model)
    load_safetensors(model, path)
    export_safetensors(model, out, files=SCHEMES[name].files, source=path)


@pytest.mark.filterwarnings("ignore:.* are for other programs alone")
@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks_write_the_same_bytes(name: str, three: Ranks, released: Callable[[str], Path], tmp_path: Path) -> None:
    three.run(writes, name, str(released(name)), str(tmp_path / "out"))
    assert same_files(released(name), tmp_path / "out")
