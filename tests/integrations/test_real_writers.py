"""What other packages write of a tiny Llama: loaded, trained, exported for the package to read, and converted there
and back. docs/pages/works-with.md has the table of it, which `pytest --update-golden` writes.

Each row is a folder that the package itself writes, on a CPU, and that it reads again by its own loader.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from test_files_of_others import same_files, tensors_in
from torch import Tensor, nn

import layoutc
from layoutc.checkpoint import convert_safetensors, export_safetensors, load_safetensors, quantize_as_stored
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

pytestmark = [
    *(
        pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}: pip install 'layoutc[{extra}]'")
        for name, extra in (
            ("transformers", "integrations"),
            ("accelerate", "integrations"),
            ("compressed_tensors", "formats"),
            ("bitsandbytes", "formats"),
        )
    ),
    pytest.mark.filterwarnings("ignore:.* are for other programs alone"),
    pytest.mark.filterwarnings("ignore:.*are rounded to codes:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*the scales are written as F32"),
]
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # by vLLM
PAGE = Path(__file__).parents[2] / "docs" / "pages" / "works-with.md"
ONE_SCALE = (
    "nvfp4_modelopt/modelopt",
    "fp8_current/modelopt",
    "nvfp4_compressed_tensors/compressed_tensors",
    "fp8_current/compressed_tensors",
    "fp8_current/fp8",
)
OF_ACTIVATIONS = ("input_scale", "input_global_scale", "k_scale", "v_scale")
HEADING = "## Files that other packages write"
Writer = Callable[[Any, Path], None]
Reader = Callable[[Path, torch.dtype], Any]


def model_of(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A tiny Llama, whose columns are multiples of 128."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=96, num_hidden_layers=2, use_cache=False, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


# --------------------------------------------------------------------------------------------------- compressed-tensors
def compressed(
    model: Any,
    folder: Path,
    preset: str,
    kv: bool = False,
    joined: bool = False,
    alone: bool = False,
    **changed: Any,
) -> None:
    """As llm-compressor saves: a scheme applied, scales of the weights' extremes, compressed in place. kv: also scales
    of keys and values. joined: one global scale for weights that vLLM joins. alone: activations are as they were, for
    which it has a format of another name. changed: arguments of the weights' scheme.
    """
    from compressed_tensors.compressors.model_compressors.model_compressor import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    try:
        scheme = preset_name_to_scheme(preset, ["Linear"])
    except KeyError:
        pytest.skip(f"compressed-tensors {version('compressed-tensors')} has no {preset}")
    scheme.weights = by = scheme.weights.model_copy(update=changed)
    scheme.input_activations = None if alone else scheme.input_activations
    cache = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}} if kv else {}
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], **cache))
    for name, module in model.named_modules():
        for beside in (
            "input_scale",
            "input_global_scale",
            "k_scale",
            "v_scale",
        ):  # of activations, which none are here
            if hasattr(module, beside):
                getattr(module, beside).data.fill_(0.5)
        if not name.endswith("_proj"):
            continue
        weight = module.weight.detach()
        parts = in_parts(weight, by)
        near = nn.utils.parameters_to_vector(beside_it(model, name) if joined else [weight]).detach()
        level = [generate_gparam(near.min(), near.max())] if by.strategy == "tensor_group" else []
        scale, zero = calculate_qparams(parts.amin((1, 3)), parts.amax((1, 3)), by, *level)
        found = {"weight_scale": scale, "weight_zero_point": zero}
        found |= {"weight_global_scale": level[0]} if level else {}
        for key, value in found.items():
            if hasattr(module, key):
                param = getattr(module, key)
                param.data = value.reshape(param.shape).to(param.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def beside_it(model: Any, name: str) -> list[Tensor]:
    """The weights that vLLM joins with a module's."""
    parent, _, own = name.rpartition(".")
    group = next((group for group in JOINED if own in group), (own,))
    return [model.get_submodule(f"{parent}.{one}").weight for one in group]


def in_parts(weight: Tensor, by: Any) -> Tensor:
    """(rows of parts, rows of a part, columns of parts, columns of a part): what shares a scale is a part."""
    m, k = weight.shape
    sizes = {"tensor": (m, k), "channel": (1, k), "block": by.block_structure}
    rows, columns = sizes.get(by.strategy, (1, by.group_size))
    return weight.reshape(m // rows, rows, k // columns, columns)


def read_by_compressed_tensors(folder: Path, dtype: torch.dtype) -> Any:
    """By transformers, which takes 0.15 and later; before, by the package itself."""
    from compressed_tensors.compressors.model_compressors.model_compressor import ModelCompressor
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    if Version(version("compressed-tensors")) < Version("0.15"):
        model, tensors = model_of(dtype), tensors_in(folder)
        model.load_state_dict({name: tensors[name] for name in model.state_dict() if name in tensors}, strict=False)
        own = [name for name, _ in model.named_parameters()]
        try:
            ModelCompressor.from_pretrained(str(folder)).decompress(str(folder), model)
        except (NotImplementedError, RuntimeError) as error:  # NVFP4, MXFP4 and zero points
            pytest.skip(f"compressed-tensors before 0.15 can't read its own files of this scheme: {error}")
        return SimpleNamespace(named_parameters=lambda: [(name, model.get_parameter(name)) for name in own])
    how = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=dtype)


def auto_round(model: Any, folder: Path, scheme: str) -> None:
    """auto-round rounds to nearest, and writes compressed-tensors' files."""
    from auto_round import AutoRound
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(96)}, unk_token="0"))
    model.config.architectures = [type(model).__name__]
    how: dict[str, Any] = {"scheme": scheme, "iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
    by = AutoRound(model, PreTrainedTokenizerFast(tokenizer_object=words), **how)
    by.quantize_and_save(str(written := folder.with_name("written")), format="llm_compressor")
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        next(written.rglob(file)).rename(folder / file)


# --------------------------------------------------------------------------------------------------------- transformers
def fp8_of_transformers(model: Any, folder: Path, **how: Any) -> None:
    """By the operation that transformers quantizes with as it loads: its loader asks for a card before."""
    from safetensors.torch import save_file
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config, tensors = FineGrainedFP8Config(**how), dict[str, Tensor]()
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=config))
    for name, value in model.state_dict().items():
        tensors |= quantizer.convert({name: value}) if name.endswith("_proj.weight") else {name: value}
    folder.mkdir()
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    model.config.quantization_config = config.to_dict()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)


def read_fp8(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    how = FineGrainedFP8Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=dtype)


# --------------------------------------------------------------------------------------------------------- bitsandbytes
def bitsandbytes(model: Any, folder: Path, **how: Any) -> None:
    """transformers loads the plain model by bitsandbytes, and saves it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain, bits = folder.with_name(f"{folder.name}-plain"), how or {"load_in_8bit": True}
    model.save_pretrained(plain)
    if how:
        bits = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
        bits |= {f"bnb_4bit_{key}": value for key, value in how.items()}
    by: Any = BitsAndBytesConfig(**bits)
    found = AutoModelForCausalLM.from_pretrained(plain, quantization_config=by, device_map="cpu", dtype=model.dtype)
    found.save_pretrained(folder)


def read_by_bitsandbytes(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=dtype).dequantize()


# ------------------------------------------------------------------------------------------------------------------ MLX
def mlx(model: Any, folder: Path, bits: int = 4, group: int = 64, mode: str = "affine", **of: int) -> None:
    """mlx_lm loads the plain model, and saves it as mlx_lm.convert does. of: the bits of modules whose names end so."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model.save_pretrained(plain := folder.with_name(f"{folder.name}-plain"))
    own, config = load_model(plain)

    def of_module(path: str, module: Any) -> bool | dict[str, Any]:
        found = [one for end, one in of.items() if path.endswith(end)]
        return {"group_size": group, "bits": found[0], "mode": mode} if found else True

    own, config = quantize_model(own, config, group, bits, mode=mode, quant_predicate=of_module if of else None)
    save_model(folder, own)
    save_config(config, folder / "config.json")


def read_by_mlx(folder: Path, dtype: torch.dtype) -> Any:
    """mlx_lm loads, and its values are those of fp32: in 16 bits it rounds products and sums, each by itself."""
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    def to_torch(value: Any) -> Tensor:
        return torch.from_numpy(np.array(value.astype(mx.float32)))

    found, _ = load_model(folder)
    values = {name: to_torch(one).to(dtype) for name, one in tree_flatten(found.parameters())}
    for name, module in found.named_modules():
        if hasattr(module, "bits"):
            biases = module.biases.astype(mx.float32) if module.mode == "affine" else None
            scales = module.scales.astype(mx.float32) if biases is not None else module.scales
            how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            values[f"{name}.weight"] = to_torch(mx.dequantize(module.weight, scales, biases, **how))
    own = {name: one for name, one in values.items() if not name.endswith((".scales", ".biases"))}
    return SimpleNamespace(named_parameters=lambda: own.items())


# ------------------------------------------------------------------------------------------------------------- ModelOpt
def modelopt(model: Any, folder: Path, config: str) -> None:
    """As its examples do: one of its configs, calibrated, and exported for engines."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model.config.architectures = [type(model).__name__]
    ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    mtq.quantize(model, deepcopy(getattr(mtq, f"{config}_CFG")), lambda own: own(input_ids=ids))
    with torch.no_grad():
        export_hf_checkpoint(model, export_dir=folder)


def read_by_modelopt(folder: Path, dtype: torch.dtype) -> Any:
    """Engines load such folders, and not ModelOpt; its own tensors say what the codes are."""
    from modelopt.torch.quantization import qtensor

    algo = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_algo"].upper()
    values = dict[str, Tensor]()
    for name, codes in (tensors := tensors_in(folder)).items():
        if (scale := tensors.get(f"{name}_scale")) is None:
            if not name.endswith(("_scale", "_scale_2")):
                values[name] = codes
            continue
        shape, how = [codes.shape[0], codes.shape[1]], {"scale": scale, "dtype": torch.float32}
        if "FP4" in algo:
            shape[1] *= 2
            how["block_sizes"] = {-1: 16 if "NV" in algo else 32}
        if "NVFP4" in algo:
            kind, how["double_scale"] = qtensor.NVFP4QTensor, tensors[f"{name}_scale_2"]
        elif "MX" in algo:
            kind = qtensor.MXFP4QTensor if "FP4" in algo else qtensor.MXFP8QTensor
        else:
            kind = qtensor.INT8QTensor if codes.dtype == torch.int8 else qtensor.FP8QTensor
            if algo == "FP8_PB_WO":
                how |= {"block_sizes": {-1: 128, -2: 128}, "scale": scale.reshape(scale.shape[0], -1)}
            elif scale.dim():
                how["scale"] = scale[:, None]
        values[name] = kind(torch.Size(shape), torch.float32, codes).dequantize(**how)
    return SimpleNamespace(named_parameters=lambda: values.items())


# ----------------------------------------------------------------------------------------------------------------- rows
@dataclass(frozen=True)
class Package:
    """Who writes, in words, and its loader. needs: what is imported. quantized: the weights of the model that are."""

    words: str
    read: Reader
    needs: str
    quantized: int = 14


@dataclass(frozen=True)
class Row:
    """A scheme of a package.

    name: as its package calls it. write: writes a model's folder. files: recipe and binding that load it. there: the
    recipe and binding that convert goes by, the same where there is no other that has all of its values. named: the
    folder fits several recipes, and users name one. dtype: of the model.
    """

    package: Package
    name: str
    write: Writer
    files: str
    there: str = ""
    named: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def id(self) -> str:
        return f"{self.package.words.partition(',')[0]}: {self.name}"


@dataclass(frozen=True)
class Refused:
    """A scheme of a package that no recipe has."""

    package: Package
    name: str
    write: Writer
    id = Row.id


CT = Package("compressed-tensors", read_by_compressed_tensors, "compressed_tensors")
AUTO_ROUND = Package("auto-round, for llm-compressor", read_by_compressed_tensors, "auto_round")
FP8 = Package("transformers, FineGrainedFP8Config", read_fp8, "accelerate")
BNB = Package("bitsandbytes, by transformers", read_by_bitsandbytes, "bitsandbytes")
MODELOPT = Package("ModelOpt", read_by_modelopt, "modelopt")
MLX = Package("mlx_lm", read_by_mlx, "mlx_lm", 16)  # embeddings and the head, too


def ct(preset: str, recipe: str, there: str = "", name: str = "", **more: Any) -> Row:
    of_row = {key: more.pop(key) for key in ("named", "dtype") if key in more}
    there = there and f"{there}/compressed_tensors" if "/" not in there else there
    write = partial(compressed, preset=preset, **more)
    return Row(CT, name or preset, write, f"{recipe}/compressed_tensors", there, **of_row)


def fp8(name: str, files: str, there: str, **how: Any) -> Row:
    return Row(FP8, name, partial(fp8_of_transformers, **how), files, there)


def bits4(name: str, binding: str = "bitsandbytes", **how: Any) -> Row:
    kind = name[:3].lower()
    return Row(BNB, name, partial(bitsandbytes, quant_type=kind, **how), f"{kind}_bitsandbytes/{binding}")


def mo(name: str, config: str, recipe: str, there: str = "", named: bool = False) -> Row:
    return Row(MODELOPT, name, partial(modelopt, config=config), f"{recipe}/modelopt", there, named)


def affine(bits: int) -> Row:
    return Row(MLX, f"affine, {bits} bits", partial(mlx, bits=bits), f"int{bits}_affine64/mlx")


ROWS = (
    ct("W4A16", "int4_packed128"),
    ct("W4A16", "int4_packed32", name="W4A16, groups of 32", group_size=32),
    ct("W4A16_ASYM", "int4_packed128_zeros"),
    ct("W8A8", "int8_rowwise"),
    ct("W8A8", "int8_rowwise", name="W8A8, fp32 scales", dtype=torch.float32),
    ct("FP8", "fp8_current", "fp8_current/modelopt"),
    ct("FP8_DYNAMIC", "fp8_channel_bf16", "fp8_rowwise"),
    ct("FP8_DYNAMIC", "fp8_channel_bf16", "fp8_rowwise", name="FP8_DYNAMIC, with FP8 keys and values", kv=True),
    ct("FP8_DYNAMIC", "fp8_rowwise", name="FP8_DYNAMIC, fp32 scales", dtype=torch.float32),
    ct("FP8_DYNAMIC", "fp8_rowwise", name="FP8_DYNAMIC, fp16 scales", dtype=torch.float16),
    ct("FP8_DYNAMIC", "fp8_channel_bf16", "fp8_rowwise", name="FP8, weights alone, a scale each row", alone=True),
    ct("FP8", "fp8_current", "fp8_current/modelopt", name="FP8, weights alone", alone=True),
    ct("FP8_BLOCK", "fp8_block", "fp8_block/deepseek"),
    ct("FP8_BLOCK", "fp8_block", "fp8_block/deepseek", name="FP8_BLOCK, fp32 scales", dtype=torch.float32),
    ct("FP8_BLOCK", "fp8_block", "fp8_block/deepseek", name="FP8_BLOCK, fp16 scales", dtype=torch.float16),
    ct("NVFP4A16", "nvfp4_compressed_tensors"),
    ct("NVFP4", "nvfp4_compressed_tensors"),
    ct("NVFP4A16", "nvfp4_compressed_tensors", name="NVFP4A16, one global scale for q, k and v", joined=True),
    ct("MXFP4A16", "mxfp4", "mxfp4/deepseek_v4"),
    ct("MXFP4", "mxfp4", "mxfp4/deepseek_v4"),
    ct("MXFP4XFP8", "mxfp4", "mxfp4/deepseek_v4"),
    ct("MXFP8A16", "mxfp8", "mxfp8_frozen", named=True),
    ct("MXFP8", "mxfp8_frozen", named=True),
    Row(
        AUTO_ROUND,
        "MXFP4",
        partial(auto_round, scheme="MXFP4"),
        "mxfp4/compressed_tensors",
        "mxfp4/deepseek_v4",
    ),
    fp8("blocks of 128x128", "fp8_block/deepseek", "fp8_block/compressed_tensors"),
    fp8("E8M0 scales", "fp8_block/deepseek", "fp8_block/compressed_tensors", scale_fmt="ue8m0"),
    fp8("static activations", "fp8_block/deepseek", "fp8_block/compressed_tensors", activation_scheme="static"),
    fp8("one scale a weight", "fp8_current/fp8", "", weight_block_size=None),
    bits4("NF4"),
    bits4("NF4 in bf16", quant_storage=torch.bfloat16),
    bits4("NF4 in fp16", quant_storage=torch.float16),
    bits4("NF4 in fp32", quant_storage=torch.float32),
    bits4("NF4, scales quantized", "bitsandbytes_double", use_double_quant=True),
    bits4("NF4 in bf16, scales quantized", "bitsandbytes_double", use_double_quant=True, quant_storage=torch.bfloat16),
    bits4("FP4"),
    bits4("FP4 in bf16, scales quantized", "bitsandbytes_double", use_double_quant=True, quant_storage=torch.bfloat16),
    mo("NVFP4", "NVFP4_DEFAULT", "nvfp4_modelopt"),
    mo("W4A16_NVFP4", "W4A16_NVFP4", "nvfp4_modelopt"),
    mo("FP8", "FP8_DEFAULT", "fp8_current", "fp8_current/compressed_tensors"),
    mo("FP8_PB_WO", "FP8_2D_BLOCKWISE_WEIGHT_ONLY", "fp8_block", "fp8_block/deepseek"),
    mo("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PER_CHANNEL_PER_TOKEN", "fp8_rowwise", "fp8_rowwise/compressed_tensors"),
    mo("W8A8_SQ_PER_CHANNEL, not smoothed", "INT8_DEFAULT", "int8_rowwise", "int8_rowwise/compressed_tensors"),
    mo("MXFP4", "MXFP4_DEFAULT", "mxfp4", "mxfp4/compressed_tensors"),
    mo("MXFP8", "MXFP8_DEFAULT", "mxfp8_frozen", "mxfp8_frozen/compressed_tensors", named=True),
    *(affine(bits) for bits in (2, 3, 4, 6, 8)),
    Row(MLX, "nvfp4", partial(mlx, group=16, mode="nvfp4"), "nvfp4_mlx/mlx"),
    Row(MLX, "mxfp4", partial(mlx, group=32, mode="mxfp4"), "mxfp4/mlx", "mxfp4/compressed_tensors"),
    Row(MLX, "mxfp8", partial(mlx, bits=8, group=32, mode="mxfp8"), "mxfp8_frozen/mlx", "mxfp8_frozen/modelopt", True),
)
REFUSED = (
    *(
        Refused(CT, preset, partial(compressed, preset=preset))
        for preset in ("W8A16", "W4A8", "W4AFP8", "W2A16", "MXFP6A16")
    ),
    Refused(FP8, "blocks of 64x64", partial(fp8_of_transformers, weight_block_size=(64, 64))),
    Refused(BNB, "LLM.int8()", bitsandbytes),
    Refused(MODELOPT, "W4A16_AWQ", partial(modelopt, config="INT4_AWQ")),
    Refused(MODELOPT, "W4A8_AWQ", partial(modelopt, config="W4A8_AWQ_BETA")),
    Refused(MODELOPT, "W8A16", partial(modelopt, config="INT8_WEIGHT_ONLY")),
    Refused(MODELOPT, "W4A8_MXFP4_FP8", partial(modelopt, config="W4A8_MXFP4_FP8")),
    Refused(MODELOPT, "W4A8_NVFP4_FP8, groups of 32", partial(modelopt, config="W4A8_NVFP4_FP8")),
)


# ---------------------------------------------------------------------------------------------------------------- tests
def loaded(row: Row, folder: Path) -> Any:
    model, files = model_of(row.dtype), row.files if row.named else None
    fused = "one global scale" in row.name
    assert set(quantize_as_stored(model, folder, files=files, share_amax=fused).values()) == {
        row.files.partition("/")[0]
    }
    assert load_safetensors(model, folder, files=files) == ((), ())
    return model


def check_values(model: nn.Module, theirs: nn.Module, quantized: int) -> None:
    expected = dict(theirs.named_parameters())
    assert sum(isinstance(param, QuantizedTensor) for param in model.parameters()) == quantized
    for name, param in model.named_parameters():
        values = param.dequantize(expected[name].dtype) if isinstance(param, QuantizedTensor) else param
        assert torch.equal(values, expected[name]), name


@pytest.mark.sample(3)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_a_package_writes_is_loaded_trained_and_read_by_it_again(row: Row, tmp_path: Path) -> None:
    pytest.importorskip(row.package.needs)
    path, binding = tmp_path / "in", row.files.rpartition("/")[2]
    row.write(model_of(row.dtype), path)
    model, theirs = loaded(row, path), row.package.read(path, row.dtype)
    check_values(model, theirs, row.package.quantized)

    export_safetensors(model, tmp_path / "same", files=binding, source=path)
    assert same_files(path, tmp_path / "same")
    check_values(model, row.package.read(tmp_path / "same", row.dtype), row.package.quantized)

    source = row.files if row.named else None
    convert_safetensors(path, tmp_path / "there", files=row.there or row.files, source_files=source)
    convert_safetensors(tmp_path / "there", tmp_path / "back", files=row.files, source_files=row.there or row.files)
    assert same_files(path, tmp_path / "back", but=OF_ACTIVATIONS if row.there else ())
    convert_safetensors(path, tmp_path / "plain", dtype=row.dtype, source_files=source)
    plain, expected = tensors_in(tmp_path / "plain"), dict(theirs.named_parameters())
    assert all(torch.equal(plain[name], value.to(row.dtype)) for name, value in expected.items())

    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    for step in range(2):
        ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        export_safetensors(model, tmp_path / "tuned", files=binding, source=path)
    apart = any("have scales that differ" in str(one.message) for one in caught)
    assert apart == (row.files in ONE_SCALE and "one global scale" not in row.name)
    found = row.package.read(tmp_path / "tuned", row.dtype)
    check_values(loaded(row, tmp_path / "tuned"), found, row.package.quantized)
    if binding != "bitsandbytes_double":  # whose scales an export rounds
        check_values(model, found, row.package.quantized)
    moved = [name for name, value in found.named_parameters() if not torch.equal(value, expected[name])]
    assert {name for name in expected if name.endswith("_proj.weight")} <= {*moved}


def test_integers_of_a_model_of_ones_own_load_as_codes(tmp_path: Path) -> None:
    """Without a source's config: the package packs 8-bit integers whose activations no config quantizes."""
    if Version(pytest.importorskip("compressed_tensors").__version__) < Version("0.15"):
        pytest.skip("transformers reads compressed-tensors' files from 0.15 on")
    from transformers import AutoModelForCausalLM

    model = model_of()
    layoutc.quantize_(model, "int8_rowwise", param_filter=["*_proj.weight"])
    export_safetensors(model, tmp_path / "out", files="compressed_tensors")
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).named_parameters())
    for name, param in model.named_parameters():
        if isinstance(param, QuantizedTensor):
            assert torch.equal(theirs[name], param.planes()["rowwise_data"].view(torch.int8)), name


def test_what_mlx_writes_in_several_widths(tmp_path: Path) -> None:
    """The config has those of single modules: each is loaded in its recipe, and written back, also without a source."""
    pytest.importorskip("mlx_lm")
    mlx(model_of(), tmp_path / "in", down_proj=6, v_proj=6, lm_head=8)
    model, theirs = model_of(), read_by_mlx(tmp_path / "in", torch.bfloat16)
    found = quantize_as_stored(model, tmp_path / "in")
    assert found["model.layers.1.self_attn.v_proj.weight"] == "int6_affine64"
    assert found["lm_head.weight"] == "int8_affine64"
    assert found["model.embed_tokens.weight"] == "int4_affine64"
    assert load_safetensors(model, tmp_path / "in") == ((), ())
    check_values(model, theirs, 16)
    export_safetensors(model, tmp_path / "same", files="mlx", source=tmp_path / "in")
    assert same_files(tmp_path / "in", tmp_path / "same")
    export_safetensors(
        model, tmp_path / "anew", files="mlx", config=json.loads((tmp_path / "in-plain/config.json").read_text())
    )
    check_values(model, read_by_mlx(tmp_path / "anew", torch.bfloat16), 16)
    convert_safetensors(tmp_path / "in", tmp_path / "plain", dtype=torch.bfloat16)
    plain = tensors_in(tmp_path / "plain")
    assert all(torch.equal(plain[name], value.bfloat16()) for name, value in theirs.named_parameters())
    stated = {**json.loads((tmp_path / "anew/config.json").read_text())["quantization"]}
    assert (stated.pop("mode"), stated.pop("group_size")) == ("affine", 64)
    had = json.loads((tmp_path / "in/config.json").read_text())["quantization"]
    assert {name: one for name, one in had.items() if isinstance(one, dict)}.items() <= {
        name: one if isinstance(one, dict) else {"mode": "affine", "bits": stated["bits"], "group_size": 64}
        for name, one in {**dict.fromkeys(had, None), **stated}.items()
    }.items()


@pytest.mark.parametrize(
    ("group", "dtype"), [(32, torch.bfloat16), (128, torch.float16), (64, torch.float16), (64, torch.float32)]
)
@pytest.mark.parametrize("bits", [3, 4])
def test_groups_and_dtypes_of_mlx_that_no_recipe_has_are_values(
    bits: int, group: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    pytest.importorskip("mlx_lm")
    mlx(model_of(dtype), tmp_path / "in", bits=bits, group=group)
    model, theirs = model_of(torch.float32), read_by_mlx(tmp_path / "in", dtype)
    with pytest.raises(LayoutError, match=rf"int{bits}_affine64/mlx, .* convert=True"):
        quantize_as_stored(model, tmp_path / "in")
    load_safetensors(model, tmp_path / "in", convert=True)
    for name, value in theirs.named_parameters():
        assert torch.equal(model.get_parameter(name), value.float()), name


@pytest.mark.sample(2)
@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.id)
def test_what_no_recipe_has_is_refused_and_never_plain(row: Refused, tmp_path: Path) -> None:
    pytest.importorskip(row.package.needs)
    row.write(model_of(), tmp_path / "in")
    with pytest.raises(LayoutError, match="quantization_config that no installed recipe knows"):
        quantize_as_stored(model_of(), tmp_path / "in")
    with pytest.raises(LayoutError, match="quantization_config that no installed recipe knows"):
        convert_safetensors(tmp_path / "in", tmp_path / "out", dtype=torch.bfloat16)
    assert not (tmp_path / "out").exists()


def table() -> str:
    lines = ["| written by | scheme | recipe and binding | converts there and back by |", "|---|---|---|---|"]
    for row in ROWS:
        files = f"`{row.files}`{', named by `files=`' if row.named else ''}"
        lines.append(f"| {row.package.words} | {row.name} | {files} | `{row.there or row.files}` |")
    lines += [f"| {row.package.words} | {row.name} | refused: no recipe has it | |" for row in REFUSED]
    return "\n".join(lines)


def test_the_page_has_the_rows(golden: Callable[[Path, str], None]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    section = re.compile(rf"(?<={re.escape(HEADING)}\n\n).*?(?=\n\n## |\Z)", re.DOTALL)
    words, tables = section.findall(page)[0].split("\n\n|", 1)
    assert tables
    golden(PAGE, section.sub(lambda _: f"{words}\n\n{table()}", page, count=1))
