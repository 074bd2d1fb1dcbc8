"""GGUF files: as the package gguf writes and reads them, by hand where nobody would write them so, and hostile ones."""

from __future__ import annotations

import filecmp
import json
import os
import random
import re
import struct
import sys
from collections.abc import Callable
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf_files
import hostile
import pytest
import torch
import unshipped
from click.testing import CliRunner
from numpy_models import recipe
from places import ROOT

import layoutc
from layoutc import checkpoint
from layoutc.checkpoint.gguf import planning
from layoutc.checkpoint.gguf.architectures import ARCHITECTURES, Names
from layoutc.checkpoint.gguf.container import read_header
from layoutc.checkpoint.gguf.kinds import kinds_of
from layoutc.checkpoint.gguf.values import Rotated
from layoutc.checkpoint.gguf.writing import OpenGguf
from layoutc.cli.app import main
from layoutc.recipes import q8_0
from layoutc.runtime.bindings.gguf_types import TYPES
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor
from layoutc.spec.checks.read import read_spec

needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="needs gguf: pip install 'layoutc[formats]'")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf", reason="needs gguf: pip install 'layoutc[formats]'")
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def unstated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a type that no recipe states: Q5_K."""
    pytest.importorskip("gguf", reason="needs gguf: pip install 'layoutc[formats]'")
    return gguf_files.write(
        tmp_path_factory.mktemp("gguf") / "tiny.gguf", kinds=gguf_files.KINDS | {"ffn_down": "Q5_K"}
    )


def loaded(file: Path) -> Any:
    """A model quantized as the file is, and filled."""
    model = gguf_files.skeleton()
    checkpoint.quantize_as_stored(model, file)
    checkpoint.load_gguf(model, file)
    return model


# ------------------------------------------------------------------------------------------------------------- by hand
U8, U16, U32, STRING, ARRAY, U64 = 0, 2, 4, 8, 9, 10
F32_TYPE, Q8_0_TYPE = 0, 8
Tensors = dict[str, tuple[tuple[int, ...], int, int, bytes]]  # dims, innermost first; type; offset; bytes


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


LLAMA = key("general.architecture", STRING, text("llama"))
WORDS = key("a", ARRAY, struct.pack("<IQ", STRING, 10**5) + b"".join(text("x" * i) for i in range(50)) * 2000)
VALUES = struct.pack("<4f", 1, 2, 3, 4)
TWO: Tensors = {"output_norm.weight": ((4,), F32_TYPE, 0, VALUES), "token_embd.weight": ((4, 1), F32_TYPE, 32, VALUES)}


def by_hand(
    keys: list[bytes] | None = None,
    tensors: Tensors = TWO,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
    order: str = "<",
) -> bytes:
    """A file by the definition, of key-values and tensors."""
    keys = [LLAMA] if keys is None else keys
    made = magic + struct.pack(f"{order}IQQ", version, *(counts or (len(tensors), len(keys)))) + b"".join(keys)
    for name, (dims, kind, offset, _) in tensors.items():
        made += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    made += bytes(-len(made) % alignment)
    for *_, data in tensors.values():
        made += data + bytes(-len(data) % alignment)
    return made


# -------------------------------------------------------------------------------------------------- beside the package
@needs_gguf
def test_types_are_those_of_the_package() -> None:
    import gguf

    theirs = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: tuple(one) for number, one in TYPES.items() if number in theirs} == theirs


@needs_gguf
def test_a_spec_states_a_type_of_the_package_alone() -> None:
    """Of all names and numbers there, beside records of 144 bytes for 256 elements."""
    import gguf

    text = (ROOT / "specs/q4_k.yaml").read_text(encoding="utf-8")
    kinds = [(kind.name, kind.value) for kind in gguf.GGMLQuantizationType]
    alike = [kind.name for kind, sizes in gguf.GGML_QUANT_SIZES.items() if sizes == (256, 144)]
    stated = [*kinds, *(("Q4_K", number) for number in range(45)), *((name, 12) for name, _ in kinds)]
    for name, number in stated:
        _, found = read_spec(
            text.replace("type: Q4_K, number: 12", f"type: {name}, number: {number}"), "specs/q4_k.yaml"
        )
        fits = name in alike and (name, number) in kinds
        assert [item.code for item in found] == ([] if fits else ["LC369"]), (name, number)


@needs_gguf
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_names_are_those_of_the_package(name: str) -> None:
    """Every name there, both ways; and the package's architecture has such tensors."""
    import gguf

    number = next(one for one, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    theirs, names = gguf.get_tensor_name_map(number, 12), Names(ARCHITECTURES[name])
    there = {gguf.TENSOR_NAMES[one] for one in gguf.MODEL_TENSORS[number]}
    for in_file, ours in ARCHITECTURES[name].modules.items():
        parameter, tensor = ours.replace("{n}", "11"), in_file.replace("{n}", "11")
        assert theirs.get_name(parameter) == tensor
        assert in_file.replace("{n}", "{bid}") in there
        for last in ("weight", "bias"):
            assert names.in_files(f"{parameter}.{last}") == ((f"{tensor}.{last}",), in_file)
    for ours, several in ARCHITECTURES[name].stacked.items():
        parameter, tensors = ours.replace("{n}", "11"), tuple(one.replace("{n}", "11") for one in several)
        assert names.in_files(parameter) == (tuple(f"{one}.weight" for one in tensors), several[0])
        parts = ("gate_proj", "up_proj") if parameter.endswith("gate_up_proj") else (parameter.rpartition(".")[2],)
        module = parameter.rpartition(".")[0]
        assert tuple(theirs.get_name(f"{module}.{part}") for part in parts) == tensors
        assert {one.replace("{n}", "{bid}") for one in several} <= there
    assert names.in_files("model.layers.x.mlp.up_proj.weight") is None
    assert names.in_files("lm_head.other") is None


def test_rows_go_where_the_converter_has_them() -> None:
    import numpy as np

    rows, rotated = np.arange(96), Rotated(96, 3)
    in_file = gguf_files.in_file(rows, 3)  # row of the model at each row of the file
    assert rotated.in_model(torch.arange(96)).tolist() == in_file.tolist()
    assert rotated.in_file(torch.from_numpy(in_file)).tolist() == rows.tolist()


@needs_gguf
def test_values_are_those_of_the_package_and_the_file_comes_back(file: Path, tmp_path: Path) -> None:
    """Weights of types that recipes state keep their bytes; others are dequantized where the model is plain."""
    model = gguf_files.skeleton(device="meta")
    recipes = checkpoint.quantize_as_stored(model, file)
    assert set(recipes.values()) == {"q8_0", "q4_k", "q6_k"}
    assert len(recipes) == 8
    model.to_empty(device="cpu")
    done = checkpoint.load_gguf(model, file)
    assert done == ((), (), ("model.embed_tokens.weight",))
    expected = gguf_files.expected(file)
    for name, param in model.named_parameters():
        ours = param.dequantize(torch.float32) if isinstance(param, QuantizedTensor) else param
        assert torch.equal(ours, expected[name]), name
    checkpoint.export_gguf(model, tmp_path / "out.gguf", source=file)
    assert filecmp.cmp(file, tmp_path / "out.gguf", shallow=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


@needs_gguf
def test_weights_are_read_and_written_some_rows_at_a_time(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a few rows, the last one shorter, are those of the whole."""
    for name, size in (("gguf.values.CHUNK", 5000), ("gguf.writing.CHUNK", 5000), ("gguf.writing.COPIED", 1000)):
        monkeypatch.setattr(f"layoutc.checkpoint.{name}", size)
    monkeypatch.setattr("layoutc.checkpoint.safetensors.values.DEQUANTIZED", 5000)
    expected = gguf_files.expected(file)
    for model in (loaded(file), gguf_files.skeleton()):
        checkpoint.load_gguf(model, file)
        for name, param in model.named_parameters():
            ours = param.dequantize(torch.float32) if isinstance(param, QuantizedTensor) else param
            assert torch.equal(ours, expected[name]), name
        checkpoint.export_gguf(model, tmp_path / "out.gguf", source=file)
        assert filecmp.cmp(file, tmp_path / "out.gguf", shallow=False)
        (tmp_path / "out.gguf").unlink()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(0.75)
    checkpoint.export_gguf(model, tmp_path / "out.gguf", source=file, quantize=True)
    found, name = gguf_files.expected(tmp_path / "out.gguf"), "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(found[name], q8_0.quantize(expected[name] * 0.75).dequantize(torch.float32))


@needs_gguf
def test_what_is_quantized_is_what_the_file_has_so(file: Path) -> None:
    """Whichever recipe is named, weights of other types have theirs; what the file does not have stays plain."""
    model = gguf_files.skeleton()
    model.add_module("own", torch.nn.Linear(256, 256))
    recipes = checkpoint.quantize_as_stored(model, file, files="q8_0/gguf")
    assert "own.weight" not in recipes
    assert recipes == checkpoint.quantize_as_stored(gguf_files.skeleton(), file)
    other = torch.nn.ModuleDict({"own": torch.nn.Linear(256, 256)})
    with pytest.raises(LayoutError, match=r"holds no parameter of the model in a type .*F32, Q4_K, Q6_K, Q8_0"):
        checkpoint.quantize_as_stored(other, file)
    plain = gguf_files.skeleton()
    with pytest.raises(LayoutError, match=r"share_amax=True joins nothing: .*tiny\.gguf holds no neighbouring weights"):
        checkpoint.quantize_as_stored(plain, file, share_amax=True)
    assert not any(isinstance(one.data, QuantizedTensor) for one in plain.parameters())


@needs_gguf
def test_a_plain_model_in_bf16_takes_every_type_and_gives_the_file_back(file: Path, tmp_path: Path) -> None:
    """Bytes that stand for a plain tensor's values, in its dtype, are kept."""
    model = gguf_files.skeleton().to(torch.bfloat16)
    done = checkpoint.load_gguf(model, file)
    assert len(done.dequantized) == 9
    expected = gguf_files.expected(file)
    assert all(torch.equal(param, expected[name].bfloat16()) for name, param in model.named_parameters())
    checkpoint.export_gguf(model, tmp_path / "out.gguf", source=file)
    assert filecmp.cmp(file, tmp_path / "out.gguf", shallow=False)


@needs_gguf
def test_what_was_trained_is_written_anew_and_the_rest_is_kept(file: Path, tmp_path: Path) -> None:
    import gguf

    model, out = loaded(file), tmp_path / "out.gguf"
    with torch.no_grad():
        model.model.norm.weight += 1
        model.model.embed_tokens.weight += 1
        model.lm_head.weight.copy_(torch.randn(72, 256, generator=torch.Generator().manual_seed(1)))
    checkpoint.export_gguf(model, out, source=file)
    expected, before = gguf_files.expected(out), gguf_files.expected(file)
    for name, param in model.named_parameters():
        ours = param.dequantize(torch.float32) if isinstance(param, QuantizedTensor) else param
        assert torch.equal(ours, expected[name]), name
    changed = {name for name, value in expected.items() if not torch.equal(value, before[name])}
    assert changed == {"model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"}
    theirs, ours = gguf.GGUFReader(file), gguf.GGUFReader(out)
    types = {a.name: b.tensor_type.name for a, b in zip(theirs.tensors, ours.tensors, strict=True)}
    assert types["token_embd.weight"] == "F32"
    assert types["blk.0.ffn_down.weight"] == "Q6_K"
    assert [one.contents() for one in theirs.fields.values()] == [one.contents() for one in ours.fields.values()]
    again = gguf_files.skeleton()
    checkpoint.quantize_as_stored(again, out)
    checkpoint.load_gguf(again, out)
    checkpoint.export_gguf(again, tmp_path / "again.gguf", source=out)
    assert filecmp.cmp(out, tmp_path / "again.gguf", shallow=False)


@needs_gguf
def test_weights_that_are_cast_on_gather_are_written_as_they_are_multiplied(file: Path, tmp_path: Path) -> None:
    model = gguf_files.skeleton()
    checkpoint.load_gguf(model, file)
    wanted = dict(model.named_parameters())["model.layers.0.self_attn.q_proj.weight"].detach().clone()
    layoutc.cast_on_gather_(model, "q8_0", param_filter=["*.q_proj.weight"])
    checkpoint.export_gguf(model, tmp_path / "out.gguf", source=file)
    found = gguf_files.expected(tmp_path / "out.gguf")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found, q8_0.quantize(wanted).dequantize(torch.float32))


Q5_K = """layoutc: 1
name: my_q5_k
summary: GGUF Q5_K
formats: {u5: {integer: 5, offset: 0}, u6: {integer: 6, offset: 0}}
shape: {k: 256}
element: {format: u5}
scale:
  format: u6
  rule: scale-and-minimum
  zero: u6
  super: {format: f16, rule: scale-first, of-max: true, block: {m: 1, k: 256}}
orientations:
  rowwise:
    block: {m: 1, k: 32}
    data: {layout: m k}
    scale: {layout: m k/32}
    record:
      size: 256
      fields:
        - super
        - super_zero
        - scale 0:4 bits 0:6 | scale 4:8 bits 4:6
        - zero 0:4 bits 0:6 | zero 4:8 bits 4:6
        - scale 4:8 bits 0:4 | zero 4:8 bits 0:4
        - HIGH
        - data 0:32 bits 0:4 | data 32:64 bits 0:4
        - data 64:96 bits 0:4 | data 96:128 bits 0:4
        - data 128:160 bits 0:4 | data 160:192 bits 0:4
        - data 192:224 bits 0:4 | data 224:256 bits 0:4
files:
  gguf: {summary: GGUF, record: {container: gguf, type: Q5_K, number: 13}}
""".replace("HIGH", " | ".join(f"data {at}:{at + 32} bits 4:5" for at in range(0, 256, 32)))


@needs_gguf
def test_a_recipe_of_ones_own_adds_a_type(unstated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights keep their bytes, without a line of code."""
    unshipped.add("my_q5_k", Q5_K)
    model = gguf_files.skeleton()
    checkpoint.quantize_as_stored(model, unstated)
    layoutc.quantize_(model, recipe("my_q5_k"), param_filter=["*.down_proj.weight"])
    done = checkpoint.load_gguf(model, unstated)
    assert done.dequantized == ("model.embed_tokens.weight",)
    weight = model.model.layers[0].mlp.down_proj.weight
    assert torch.equal(
        weight.dequantize(torch.float32), gguf_files.expected(unstated)["model.layers.0.mlp.down_proj.weight"]
    )
    checkpoint.export_gguf(model, tmp_path / "out.gguf", source=unstated)
    assert filecmp.cmp(unstated, tmp_path / "out.gguf", shallow=False)
    by_name = gguf_files.skeleton()
    monkeypatch.setattr(planning, "find", recipe)  # as of a recipe in the working directory
    chosen = checkpoint.quantize_as_stored(by_name, unstated, files="my_q5_k/gguf")
    assert {name.rpartition("mlp.")[2] for name, named in chosen.items() if named == "my_q5_k"} == {"down_proj.weight"}
    monkeypatch.setitem(TYPES, 13, TYPES[14])  # as of a package that an older layoutc made of a spec that is wrong
    with pytest.raises(LayoutError, match=r"my_q5_k/gguf states type 13 of GGUF as Q5_K, 176 bytes .* is wrong"):
        kinds_of([type(weight.data)])


BOTH_WAYS = """layoutc: 1
name: my_q8_0
summary: GGUF Q8_0, with codes of its own for the backward pass
shape: {m: 32, k: 32}
element: {format: int8}
scale: {format: f16, rule: scale-first, unrounded: true}
orientations:
  rowwise:
    block: {m: 1, k: 32}
    data: {layout: m k}
    scale: {layout: m k/32}
    record: {size: 32, fields: [scale, data]}
  columnwise:
    block: {m: 32, k: 1}
    data: {layout: k m}
    scale: {layout: k m/32}
files:
  gguf: {summary: GGUF, record: {container: gguf, type: Q8_0, number: 8}}
"""


@needs_gguf
def test_codes_that_files_do_not_have_are_quantized_from_their_values(file: Path, tmp_path: Path) -> None:
    unshipped.add("my_q8_0", BOTH_WAYS)
    model = gguf_files.skeleton()
    layoutc.quantize_(model, recipe("my_q8_0"), param_filter=["*.k_proj.weight"])
    checkpoint.load_gguf(model, file)
    weight = model.model.layers[0].self_attn.k_proj.weight
    values = gguf_files.expected(file)["model.layers.0.self_attn.k_proj.weight"]
    made = recipe("my_q8_0").quantize(values, orientations=("columnwise",)).planes()
    assert torch.equal(weight.dequantize(torch.float32), values)
    assert all(torch.equal(plane, weight.planes()[name]) for name, plane in made.items())
    checkpoint.export_gguf(model, tmp_path / "out.gguf", source=file)
    assert filecmp.cmp(file, tmp_path / "out.gguf", shallow=False)


@needs_gguf
def test_a_file_converts_to_a_plain_folder(file: Path, tmp_path: Path) -> None:
    """Under transformers' names, which a plain model loads; files of others follow from that."""
    done = checkpoint.convert_gguf(file, tmp_path / "plain", dtype=torch.bfloat16, max_shard_bytes=300_000)
    assert len(done.files) > 1
    assert done.left == ()
    plain, model = gguf_files.skeleton().to(torch.bfloat16), gguf_files.skeleton().to(torch.bfloat16)
    checkpoint.load_safetensors(plain, tmp_path / "plain")
    checkpoint.load_gguf(model, file)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())
    with pytest.raises(FileExistsError, match="convert into a new folder"):
        checkpoint.convert_gguf(file, tmp_path / "plain", dtype="bfloat16")
    with pytest.raises(ValueError, match="dtype= must be float32, bfloat16 or float16, not int8"):
        checkpoint.convert_gguf(file, tmp_path / "other", dtype="int8")
    (tmp_path / "bad.gguf").write_bytes(file.read_bytes()[:-100])
    with pytest.raises(LayoutError, match="is truncated"):
        checkpoint.convert_gguf(tmp_path / "bad.gguf", tmp_path / "other", dtype="bfloat16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.gguf", "plain"]


@needs_gguf
def test_a_plain_folder_becomes_a_file_like_another(unstated: Path, tmp_path: Path) -> None:
    """What has not changed keeps its bytes; the rest is quantized to the same types, where recipes state them."""
    checkpoint.convert_gguf(unstated, tmp_path / "plain", dtype=torch.float32)
    done = checkpoint.convert_to_gguf(tmp_path / "plain", tmp_path / "same.gguf", source=unstated)
    assert done.files == ("same.gguf",)
    assert len(done.quantized) == 9
    assert filecmp.cmp(unstated, tmp_path / "same.gguf", shallow=False)
    model = gguf_files.skeleton()
    checkpoint.load_safetensors(model, tmp_path / "plain")
    changed = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")
    with torch.no_grad():
        for name in changed:
            model.get_submodule(name).weight.mul_(0.75)
    checkpoint.export_safetensors(model, tmp_path / "tuned")
    types = checkpoint.convert_to_gguf(tmp_path / "tuned", tmp_path / "tuned.gguf", source=unstated).quantized
    assert "blk.0.attn_q.weight" in types
    assert "blk.0.ffn_down.weight" not in types  # Q5_K, which no recipe states: plain
    found, before = gguf_files.expected(tmp_path / "tuned.gguf"), gguf_files.expected(unstated)
    for name, kind in zip(changed, ("q8_0", "q4_k", ""), strict=True):
        values = before[f"{name}.weight"] * 0.75
        made = recipe(kind).quantize(values).dequantize(torch.float32) if kind else values
        assert torch.equal(found[f"{name}.weight"], made), name
    left = before.keys() - {f"{name}.weight" for name in changed}
    assert all(torch.equal(found[name], before[name]) for name in left)
    assert (
        checkpoint.export_gguf(model, tmp_path / "live.gguf", source=unstated, quantize=True)["output.weight"] == "Q8_0"
    )
    assert filecmp.cmp(tmp_path / "tuned.gguf", tmp_path / "live.gguf", shallow=False)
    layoutc.quantize_(model, "mxfp4", param_filter=["*.q_proj.weight"])
    checkpoint.export_safetensors(model, tmp_path / "quantized")
    with pytest.raises(LayoutError, match="holds quantized weights: make them plain first"):
        checkpoint.convert_to_gguf(tmp_path / "quantized", tmp_path / "other.gguf", source=unstated)


@needs_gguf
def test_the_command_converts_files_both_ways(file: Path, tmp_path: Path) -> None:
    plain, again = str(tmp_path / "plain"), str(tmp_path / "again.gguf")
    done = CliRunner().invoke(main, ["convert", str(file), plain, "--dtype", "float32", "--json"])
    told = json.loads(done.stdout)
    assert len(told.pop("dequantized")) == 9
    assert told == {"files": ["model.safetensors"], "quantized": [], "left": [], "no_config": "", "copied": []}
    done = CliRunner().invoke(main, ["convert", plain, again, "--like", str(file)])
    assert done.exit_code == 0
    assert "again.gguf; 9 weights quantized" in done.stderr
    assert filecmp.cmp(file, again, shallow=False)
    for arguments, code, words in (
        ((str(file), "x", "--files", "mxfp8/compressed_tensors"), 2, "is a file: of GGUF files --dtype makes a plain"),
        ((str(file), "x"), 2, "say what to write: --files RECIPE/BINDING, --dtype, or --like FILE.gguf"),
        ((str(file), "x", "--like", str(file)), 2, "--like writes a folder of plain safetensors"),
        ((plain, "x", "--like", str(file), "--match", "*"), 2, "--match and --from do not go with it"),
        ((str(tmp_path / "nothing"), "x", "--dtype", "float32"), 2, "is no folder, and no file"),
        ((__file__, "x", "--dtype", "float32"), 1, "is not a GGUF file"),
        ((plain, again, "--like", str(file)), 1, "exists: export into a new file"),
    ):
        done = CliRunner().invoke(main, ["convert", *arguments])
        assert done.exit_code == code, done.output
        assert words in " ".join(done.stderr.split())


@needs_gguf
@pytest.mark.parametrize("heads", ["one number", "one of each layer"])
def test_config_json_has_what_keys_and_shapes_say(heads: str, file: Path, tmp_path: Path) -> None:
    if heads != "one number":
        file = gguf_files.write(tmp_path / "in.gguf", head_count=[4], head_count_kv=[2], feed_forward_length=[512])
        assert {*loaded(file).state_dict()} == {*gguf_files.expected(file)}
    assert checkpoint.convert_gguf(file, tmp_path / "plain", dtype="bfloat16").no_config == ""
    sizes = gguf_files.SIZES | {"num_hidden_layers": 1, "vocab_size": 72, "head_dim": 64}
    assert json.loads((tmp_path / "plain/config.json").read_text()) == sizes | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


@needs_gguf
def test_what_a_killed_conversion_left_is_named_by_the_next(file: Path, tmp_path: Path) -> None:
    """A folder, or a file; nothing is removed, since it may be of one that still runs."""
    plain, again = tmp_path / "plain", tmp_path / "again.gguf"
    left, other = tmp_path / ".plain.0123abcd.partly", tmp_path / ".again.gguf.89abcdef.partly"
    left.mkdir()
    other.touch()
    with pytest.warns(UserWarning, match=r"plain: \.plain\.0123abcd\.partly beside it is left of an export or a conv"):
        checkpoint.convert_gguf(file, plain, dtype="float32")
    with pytest.warns(
        UserWarning, match=r"again\.gguf: \.again\.gguf\.89abcdef\.partly beside it is left of an export"
    ):
        checkpoint.convert_to_gguf(plain, again, source=file)
    assert {*tmp_path.iterdir()} == {plain, again, left, other}


@needs_gguf
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_K"])
def test_finite_values_that_float16_does_not_hold_are_refused(kind: str, tmp_path: Path) -> None:
    """Of a type that a recipe states, and of one that the package dequantizes; bfloat16 holds them."""
    import gguf

    file = gguf_files.write(tmp_path / "in.gguf", kinds=gguf_files.KINDS | {"ffn_up": kind})
    held, raw = read_header(file).tensors["blk.0.ffn_up.weight"], bytearray(file.read_bytes())
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    for at in range(held.begin, held.end, nbytes):
        raw[at : at + 2] = struct.pack("<e", 60000.0)  # a record's scale
    file.write_bytes(raw)
    values = gguf_files.expected(file)["model.layers.0.mlp.up_proj.weight"]
    over = values.half().isinf().sum()
    assert over > 65_536
    words = (
        f"model.layers.0.mlp.up_proj.weight: {over:,} finite values would be infinite in float16, whose largest is "
        f"65504; the largest of them is {values.abs().max():g}, which bfloat16 and float32 can hold"
    )
    with pytest.raises(LayoutError, match=re.escape(words)):
        checkpoint.convert_gguf(file, tmp_path / "plain", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]
    checkpoint.convert_gguf(file, tmp_path / "plain", dtype="bfloat16")


SCALED = key("llama.rope.scaling.type", STRING, text("yarn"))
HUGE = key("llama.attention.layer_norm_rms_epsilon", 12, struct.pack("<d", 1e300))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([LLAMA], "the file has no number llama.context_length, llama.block_count, llama.embedding_length, "),
        ([LLAMA, SCALED], "llama.rope.scaling.type scales rotary dims, but does not say how in full"),
        ([LLAMA, HUGE], "the file has no number llama.context_length, llama.block_count, llama.embedding_length, "),
        (
            [LLAMA, key("llama.attention.head_count", ARRAY, struct.pack("<IQ2I", U32, 2, 4, 8))],
            "llama.attention.head_count differs from layer to layer, [4, 8], but a field of a config is one number",
        ),
        ([key("general.architecture", STRING, text("phi3"))], "layoutc knows no config fields of phi3 without exp"),
    ],
    ids=range(5),
)
def test_where_keys_say_too_little_there_is_no_config_json(keys: list[bytes], words: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(by_hand(keys))
    arguments = ["convert", str(tmp_path / "a.gguf"), str(tmp_path / "plain"), "--dtype", "float32"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0
    assert f"no config.json, take the model's own: {words}" in " ".join(done.stderr.split())
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["model.safetensors"]


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"block_count": 0}, "llama.block_count is 0, but must be a whole number of 1 or more"),
    "fewer layers": ({"block_count": 1}, "llama.block_count is 1, but the file has tensors of 2 layers, up to 1"),
    "more layers": ({"block_count": 33}, "llama.block_count is 33, but the file has tensors of 2 layers, up to 1"),
    "width": (
        {"embedding_length": 512},
        "token_embd.weight has shape [72, 256], but the file's keys make it [72, 51",
    ),
    "rows": ({"feed_forward_length": 256}, "blk.0.ffn_gate.weight has shape [512, 256], but the file's keys make"),
    "heads": ({"head_count": 8}, "blk.0.attn_k.weight has shape [128, 256], but the file's keys make it [64, 256]"),
    "heads of keys": ({"head_count_kv": 4}, "blk.0.attn_k.weight has shape [128, 256], but the file's keys make it"),
    "more heads of keys": ({"head_count_kv": 8}, "llama has 4 query heads, which is not a multiple of its 8 key heads"),
    "no length": ({"context_length": 0}, "llama.context_length is 0, but must be a whole number of 1 or more"),
}


@needs_gguf
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_keys_that_tensors_contradict_give_no_config_json(name: str, tmp_path: Path) -> None:
    """Whatever says something else than the tensors: of layers, heads and sizes."""
    keys, words = CONTRADICTIONS[name]
    path = gguf_files.write(tmp_path / "a.gguf", 2, **keys)
    done = checkpoint.convert_gguf(path, tmp_path / "plain", dtype="bfloat16")
    assert words in done.no_config
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["model.safetensors"]


@needs_gguf
@pytest.mark.parametrize("what", ["_entries", "put", "finish"])
def test_an_export_that_fails_leaves_nothing(
    what: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its begin, at its end, and when it gets its name."""

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    model = loaded(file)
    monkeypatch.setattr(OpenGguf, what, fails)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.export_gguf(model, tmp_path / "out.gguf", source=file)
    assert not list(tmp_path.iterdir())


@needs_gguf
def test_listing_names_recipes_and_types(file: Path) -> None:
    facts = checkpoint.inspect(file)
    kinds = {entry.name: entry.kind for entry in facts.entries}
    assert facts.form == "gguf"
    assert sum(entry.stored_bytes for entry in facts.entries) < facts.bytes_on_disk
    assert {entry.pieces for entry in facts.entries} == {1}
    assert next(entry for entry in facts.entries if entry.name == "output_norm.weight").stored_bytes == 1024
    assert facts.bytes_on_disk == file.stat().st_size
    assert kinds["blk.0.ffn_down.weight"] == "q6_k/gguf"
    assert kinds["token_embd.weight"] == "q6_k/gguf"
    assert kinds["blk.0.attn_q.weight"] == "q8_0/gguf"
    assert kinds["blk.0.ffn_up.weight"] == "q4_k/gguf"
    assert kinds["output_norm.weight"] == "float32"


# ---------------------------------------------------------------------------------------------------- what does not fit
@needs_gguf
def test_what_does_not_fit_is_refused_before_anything_is_written(unstated: Path, tmp_path: Path) -> None:
    model = gguf_files.skeleton()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layoutc.quantize_(model, "q4_k", param_filter=["*.down_proj.weight", "*.q_proj.weight"])
    with pytest.raises(LayoutError) as caught:
        checkpoint.load_gguf(model, unstated)
    text = str(caught.value)
    assert (
        "down_proj.weight is Q5_K in the file, which no installed recipe states, and q4_k in the model: leave" in text
    )
    assert "q_proj.weight: layout 64846d8d7432 in the files" in text
    kept = model.model.norm.weight  # type: ignore[union-attr]
    assert torch.equal(kept, before["model.norm.weight"])  # type: ignore[arg-type]
    checkpoint.load_gguf(model, unstated, convert=True)
    assert not torch.equal(kept, before["model.norm.weight"])  # type: ignore[arg-type]
    with pytest.raises(
        LayoutError, match="no installed recipe has files 'deepseek' of GGUF; there are q4_k/gguf, q6_k/gguf, q8_0"
    ):
        checkpoint.quantize_as_stored(gguf_files.skeleton(), unstated, files="deepseek")
    small = gguf_files.skeleton()
    del small.lm_head
    with pytest.raises(LayoutError, match=r"output\.weight is in the file, but not in the model"):
        checkpoint.load_gguf(small, unstated)
    with pytest.raises(LayoutError, match=r"output\.weight is in .*tiny\.gguf, but not in the model"):
        checkpoint.export_gguf(small, tmp_path / "out.gguf", source=unstated)
    more = gguf_files.skeleton(2)
    with pytest.raises(
        LayoutError, match=r"layers\.1\.input_layernorm\.weight is not in the file, as blk\.1\.attn_norm"
    ):
        checkpoint.load_gguf(more, unstated)
    tied = gguf_files.skeleton()
    tied.lm_head.weight = tied.model.embed_tokens.weight  # type: ignore[union-attr, assignment]
    with pytest.raises(LayoutError, match=r"token_embd\.weight and output\.weight, which are one parameter .*: untie"):
        checkpoint.load_gguf(tied, unstated)
    other = gguf_files.skeleton()
    layoutc.quantize_(other, "int8_block", param_filter=["*.q_proj.weight"])
    with pytest.raises(
        LayoutError,
        match=r"GGUF has no type for int8_block, the recipe of .*q_proj\.weight\. .*q4_k/gguf, q6_k/gguf, q8_0",
    ):
        checkpoint.export_gguf(other, tmp_path / "out.gguf", source=unstated)
    (tmp_path / "out.gguf").touch()
    with pytest.raises(FileExistsError, match="export into a new file"):
        checkpoint.export_gguf(loaded(unstated), tmp_path / "out.gguf", source=unstated)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


@needs_gguf
def test_what_a_file_has_beside_a_model_is_named_left_and_copied(tmp_path: Path) -> None:
    """Layers that predict more tokens, whose number the file's keys say, encoders, and scales of activations. What else
    a model lacks is refused."""
    import numpy as np

    extra = {
        "blk.1.nextn.eh_proj.weight": np.ones((8, 4), np.float32),
        "blk.0.attn_q.input_scale": np.ones(1, np.float32),
        "mm.0.weight": np.ones((4, 4), np.float32),
    }
    path = gguf_files.write(tmp_path / "more.gguf", 2, beside=extra, nextn_predict_layers=1)
    model = gguf_files.skeleton()
    quantized = checkpoint.quantize_as_stored(model, path)
    named = r"blk\.0\.attn_q\.input_scale, blk\.1\.attn_k\.weight and 10 more are for other"
    with pytest.warns(UserWarning, match=named):
        done = checkpoint.load_gguf(model, path)
    assert done.unexpected == ()
    assert len(quantized) == 8
    checkpoint.export_gguf(model, tmp_path / "same.gguf", source=path)
    assert (tmp_path / "same.gguf").read_bytes() == path.read_bytes()
    converted = checkpoint.convert_gguf(path, tmp_path / "plain", dtype="bfloat16")
    assert {*extra, "blk.1.attn_q.weight"} <= {*converted.left}
    assert len(converted.left) == 12
    plain = gguf_files.write(tmp_path / "two.gguf", 2)
    with pytest.raises(LayoutError, match=r"blk\.1\.attn_k\.weight is in the file, but not in the model"):
        checkpoint.load_gguf(model, plain)
    with pytest.raises(LayoutError, match=r"blk\.1\.attn_k\.weight is in .*two\.gguf, but not in the model"):
        checkpoint.export_gguf(model, tmp_path / "out.gguf", source=plain)


def test_names_are_translated_where_a_model_has_its_own(file: Path, tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"llama": gguf_files.skeleton()})

    def rename(name: str) -> str:
        return name.removeprefix("llama.")

    with pytest.raises(LayoutError, match=r"none of its architecture's names \(as llama\.model.*: pass rename="):
        checkpoint.load_gguf(model, file)
    checkpoint.quantize_as_stored(model, file, rename=rename)
    checkpoint.load_gguf(model, file, rename=rename)
    checkpoint.export_gguf(model, tmp_path / "out.gguf", source=file, rename=rename)
    assert filecmp.cmp(file, tmp_path / "out.gguf", shallow=False)


# ------------------------------------------------------------------------------------------------------- the definition
class Small(torch.nn.Module):
    """What the file of two tensors holds, under transformers' names."""

    def __init__(self) -> None:
        super().__init__()
        norm, table = torch.nn.RMSNorm(4), torch.nn.Embedding(1, 4)
        self.model = torch.nn.ModuleDict({"norm": norm, "embed_tokens": table})
        torch.nn.init.zeros_(norm.weight)
        torch.nn.init.zeros_(table.weight)


def load(path: Path) -> str:
    """How a load is refused; "" where it gives what the file holds. Nothing else may happen."""
    model = Small()
    try:
        checkpoint.load_gguf(model, path)
    except LayoutError as error:
        assert not any(value.any() for value in model.state_dict().values())
        return f"{type(error).__name__}: {error}"
    expected = torch.tensor([1.0, 2, 3, 4])
    same = all(torch.equal(value.flatten(), expected) for value in model.state_dict().values())
    return "" if same else "other values"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (by_hand(), ""),
        (by_hand(version=2), ""),
        (by_hand(tensors=dict(reversed(TWO.items()))), ""),  # entries in another order than bytes
        (by_hand([key("general.alignment", U32, struct.pack("<I", 64)), LLAMA],
                 {n: (d, k, 2 * o, v) for n, (d, k, o, v) in TWO.items()}, alignment=64), ""),
        (by_hand([LLAMA, key("a", ARRAY, struct.pack("<IQ", ARRAY, 2) + 2 * struct.pack("<IQB", U8, 1, 7))]), ""),
        (by_hand([LLAMA, key("a", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text(""))]), ""),
        (by_hand([LLAMA, WORDS]), ""),  # some MB
        (by_hand(tensors=TWO | {"rope_freqs.weight": ((4,), F32_TYPE, 64, VALUES)}), ""),
        (by_hand([key("general.architecture", STRING, text("gemma"))]), "is of architecture 'gemma'; names are known"),
        (by_hand([]), "is of architecture None; names are known of llama"),
        (by_hand([LLAMA, key("split.count", U16, struct.pack("<H", 3))]), "split.no is None of 3 files, which can"),
        (by_hand([LLAMA, key("split.count", U16, struct.pack("<H", 1))]), ""),
        (by_hand(tensors=TWO | {"blk.0.attn_q.weight": ((4, 1), F32_TYPE, 64, VALUES)}), "in the file, but not in the"),
        (by_hand(tensors=TWO | {"output_norm.weight": ((2, 2), F32_TYPE, 0, VALUES)}), "norm.weight: shape .2, 2. in"),
        (by_hand(tensors=TWO | {"output_norm.weight": ((4,), 26, 0, VALUES)}), "I32 in the files, but the model has"),
    ],
    ids=range(15),
)  # fmt: skip
def test_files_by_the_definition(made: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(made)
    told = load(tmp_path / "a.gguf")
    assert re.search(words, told) if words else not told, told


@needs_gguf
def test_types_that_recipes_state_need_no_package(
    file: Path, unstated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, name, None)
    checkpoint.export_gguf(loaded(file), tmp_path / "out.gguf", source=file)
    assert filecmp.cmp(file, tmp_path / "out.gguf", shallow=False)
    with pytest.raises(ImportError, match=r"is not installed: pip install gguf"):
        checkpoint.load_gguf(gguf_files.skeleton(), unstated)


@needs_gguf
def test_types_whose_values_nobody_knows_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ggml's Q8_K, which is for products alone; and a type that is newer than the package."""
    import gguf

    tensors: Tensors = {
        "output_norm.weight": TWO["output_norm.weight"],
        "token_embd.weight": ((256, 1), 15, 32, bytes(292)),
    }
    (tmp_path / "a.gguf").write_bytes(by_hand(tensors=tensors))
    model = Small()
    model.model["embed_tokens"] = torch.nn.Embedding(1, 256)
    older = IntEnum("older", {one.name: one.value for one in gguf.GGMLQuantizationType if one.name != "Q8_K"})
    for known in (gguf.GGMLQuantizationType, older):
        monkeypatch.setattr(gguf, "GGMLQuantizationType", known)
        with pytest.raises(LayoutError, match=r"token_embd\.weight is Q8_K in the file, which the installed gguf"):
            checkpoint.load_gguf(model, tmp_path / "a.gguf")
        assert not model.model["norm"].weight.any()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"head_count": 3}, "the 4 rows of blk.0.attn_q.weight are not pairs in heads, of which .*head_count says 3"),
        ({"head_count_kv": 2}, "attn_q.weight are not pairs in heads, of which llama.attention.head_count says None"),
        ({"head_count": 0}, "head_count says 0"),
    ],
)
def test_heads_that_rows_are_not_made_of_are_refused(keys: dict[str, int], words: str, tmp_path: Path) -> None:
    made = [key(f"llama.attention.{name}", U32, struct.pack("<I", value)) for name, value in keys.items()]
    tensors: Tensors = {"blk.0.attn_q.weight": ((1, 4), F32_TYPE, 0, VALUES)}
    (tmp_path / "a.gguf").write_bytes(by_hand([LLAMA, *made], tensors))
    attention = torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict({"q_proj": torch.nn.Linear(1, 4, bias=False)})})
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([attention])})})
    with pytest.raises(LayoutError, match=words):
        checkpoint.load_gguf(model, tmp_path / "a.gguf")


@pytest.mark.parametrize(("count", "expected"), [(2, [0, 2, 1, 3, 4, 6, 5, 7]), (1, [0, 2, 4, 6, 1, 3, 5, 7])])
def test_rows_of_heads_are_moved_in_biases_too(count: int, expected: list[int], tmp_path: Path) -> None:
    """Pairs (0, 1), (2, 3) of a head become its halves (0, 2), (1, 3)."""
    rows = struct.pack("<8f", *range(8))
    tensors: Tensors = {
        "blk.0.attn_q.weight": ((1, 8), F32_TYPE, 0, rows),
        "blk.0.attn_q.bias": ((8,), F32_TYPE, 32, rows),
        "blk.0.attn_k.bias": ((8,), F32_TYPE, 64, rows),
    }
    heads = key("llama.attention.head_count", U32, struct.pack("<I", count))
    (tmp_path / "a.gguf").write_bytes(by_hand([LLAMA, heads], tensors))
    attention = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(1, 8), "k_proj": torch.nn.Linear(1, 8)})
    layers = torch.nn.ModuleList([torch.nn.ModuleDict({"self_attn": attention})])
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": layers})})
    done = checkpoint.load_gguf(model, tmp_path / "a.gguf", strict=False)
    assert done == (("model.layers.0.self_attn.k_proj.weight",), (), ())
    for value in (attention["q_proj"].weight, attention["q_proj"].bias, attention["k_proj"].bias):
        assert value.flatten().tolist() == expected


def of_layers(name: str, *entries: int, kind: int = U32) -> bytes:
    """A key with an entry for each layer."""
    code = {U32: "I", U16: "H", STRING: "Q"}[kind]
    return key(f"llama.{name}", ARRAY, struct.pack(f"<IQ{len(entries)}{code}", kind, len(entries), *entries))


@pytest.mark.parametrize("kind", [U32, U16])
def test_heads_that_differ_from_layer_to_layer_order_the_rows_of_each(kind: int, tmp_path: Path) -> None:
    """attention.head_count_kv decides k also where it is an array; and attention.head_count decides q."""
    rows = struct.pack("<8f", *range(8))
    names = [f"blk.{n}.attn_{one}.bias" for n in range(2) for one in "qk"]
    tensors: Tensors = {name: ((8,), F32_TYPE, 32 * at, rows) for at, name in enumerate(names)}
    keys = [LLAMA, of_layers("attention.head_count", 4, 1, kind=kind), of_layers("attention.head_count_kv", 2, 1)]
    (tmp_path / "a.gguf").write_bytes(by_hand(keys, tensors))
    layers = torch.nn.ModuleList(
        torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict({f"{one}_proj": torch.nn.Linear(1, 8) for one in "qk"})})
        for _ in range(2)
    )
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": layers})})
    weights = {f"model.layers.{n}.self_attn.{one}_proj.weight" for n in range(2) for one in "qk"}
    assert {*checkpoint.load_gguf(model, tmp_path / "a.gguf", strict=False).missing} == weights
    state = {name: value for name, value in model.state_dict().items() if name.endswith("bias")}
    of_one, of_two = [0, 2, 4, 6, 1, 3, 5, 7], [0, 2, 1, 3, 4, 6, 5, 7]
    expected = {"0.self_attn.q": [*range(8)], "0.self_attn.k": of_two, "1.self_attn.q": of_one, "1.self_attn.k": of_one}
    found = {name.removeprefix("model.layers.").removesuffix("_proj.bias"): one.tolist() for name, one in state.items()}
    assert found == expected
    checkpoint.export_gguf(state, tmp_path / "out.gguf", source=tmp_path / "a.gguf")
    assert filecmp.cmp(tmp_path / "a.gguf", tmp_path / "out.gguf", shallow=False)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (of_layers("attention.head_count_kv"), "an entry for each of 0 layers, and none for blk.0.attn_k.weight"),
        (of_layers("attention.head_count_kv", 0, 1), "head_count_kv says 0 of layer 0"),
        (of_layers("attention.head_count_kv", 3, 1), "head_count_kv says 3 of layer 0"),
        (
            of_layers("attention.head_count_kv", *[1] * 5000),
            "head_count_kv, the heads of blk.0.attn_k.weight, must be an array of at most",
        ),
        (
            of_layers("attention.head_count_kv", 0, kind=STRING),
            "head_count_kv, the heads of blk.0.attn_k.weight, must be an array of at most",
        ),
        (key("llama.attention.head_count_kv", STRING, text("1")), "head_count_kv says '1'"),
    ],
    ids=["none", "0", "3", "many", "strings", "a string"],
)
def test_a_key_of_heads_that_says_nothing_is_not_taken_for_missing(told: bytes, words: str, tmp_path: Path) -> None:
    """head_count does not take its place."""
    heads = key("llama.attention.head_count", U32, struct.pack("<I", 1))
    (tmp_path / "a.gguf").write_bytes(by_hand([LLAMA, heads, told], {"blk.0.attn_k.weight": ((1, 4), 0, 0, VALUES)}))
    attention = torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict({"k_proj": torch.nn.Linear(1, 4, bias=False)})})
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([attention])})})
    with pytest.raises(LayoutError, match=words):
        checkpoint.load_gguf(model, tmp_path / "a.gguf")
    with pytest.raises(LayoutError, match=words):
        checkpoint.export_gguf(model, tmp_path / "out.gguf", source=tmp_path / "a.gguf")
    with pytest.raises(LayoutError, match=words):
        checkpoint.convert_gguf(tmp_path / "a.gguf", tmp_path / "plain", dtype="bfloat16")
    assert not (tmp_path / "plain").exists()


# ------------------------------------------------------------------------------------------------------------- hostile
def entry(
    dims: tuple[int, ...] = (4,), kind: int = F32_TYPE, offset: int = 0, name: str = "output_norm.weight"
) -> bytes:
    """A file of one entry and four values, as the entry says or not."""
    return by_hand(tensors={name: (dims, kind, offset, VALUES)})


def array(kind: int, count: int, rest: bytes = b"") -> bytes:
    return by_hand([LLAMA, key("a", ARRAY, struct.pack("<IQ", kind, count) + rest)])


STRINGS = by_hand([key("a", ARRAY, struct.pack("<IQ", STRING, 2**36))], {}, alignment=1)
MANY = by_hand([key(f"a{i}", ARRAY, struct.pack("<IQ", STRING, 10**6) + bytes(8 * 10**6)) for i in range(2)], {})
NESTED = struct.pack("<IQ", ARRAY, 1) * 100_000
FLAT = struct.pack("<IQ", U8, 0) * 70_000
SHORT = [key(f"a{i}", ARRAY, struct.pack("<IQ", U8, 4096) + bytes(4096)) for i in range(257)]
TEXT = by_hand([key("a", STRING, struct.pack("<Q", 2**24 + 1))])
SOUND = by_hand()
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not a GGUF file"),
    "a short one": (SOUND[:23], "not a GGUF file"),
    "another magic": (by_hand(magic=b"GGML"), "not a GGUF file"),
    "big-endian": (by_hand(order=">"), "a big-endian GGUF file, which layoutc does not read: convert it"),
    "version 1": (by_hand(version=1), "has GGUF version 1;"),
    "version 0": (by_hand(version=0), "has GGUF version 0;"),
    "version 4": (by_hand(version=4), "has GGUF version 4;"),
    "many tensors": (by_hand(counts=(2**63, 1)), "number of tensors is 9,223,372,036,854,775,808"),
    "some more tensors": (by_hand(counts=(3, 1)), "truncated|can't hold|has 0 dims|not UTF-8"),
    "many keys": (by_hand(counts=(2, 2**62)), "number of key-values is 4,611"),
    "a long key": (by_hand([struct.pack("<Q", 2**40) + bytes(99)]), "length of a key is 1,099,511,627,776"),
    "a key beyond 65,535": (by_hand([key("a" * 65_536, U8, b"1")]), "a key has 65536 bytes; the limit is 65535"),
    "a key of other bytes": (by_hand([text(b"\xff\xfe") + struct.pack("<IB", U8, 1)]), "a key is not UTF-8"),
    "a key twice": (by_hand([LLAMA, LLAMA]), "the key 'general.architecture' twice"),
    "a long string": (by_hand([key("a", STRING, struct.pack("<Q", 2**50))]), "length of the value of 'a' is 1,125"),
    "a string of other bytes": (by_hand([key("a", STRING, text(b"\xff"))]), "the value of 'a' is not UTF-8"),
    "a value of no type": (by_hand([key("a", 13, b"")]), "value of 'a' is of type 13, which GGUF does not define"),
    "an array of no type": (array(99, 4), "is an array of type 99"),
    "a long array": (array(U8, 2**61), "length of the value of 'a' is 2,305"),
    "a long array of wide values": (array(U64, len(SOUND)), "can't hold so many"),
    "a long array of strings": (array(STRING, 2**61), "length of the value of 'a' is 2,305"),
    "an array of a long string": (array(STRING, 1, struct.pack("<Q", 2**60)), "the value of 'a' should end at byte"),
    "arrays in arrays": (array(ARRAY, 1, NESTED), "arrays nested more than 4 deep"),
    "many arrays in arrays": (array(ARRAY, 70_000, FLAT), "make it 70,000 arrays in arrays in the header"),
    "arrays in arrays, of several keys": (
        by_hand([key(f"a{i}", ARRAY, struct.pack("<IQ", ARRAY, 35_000) + FLAT[:420_000]) for i in range(2)]),
        "'a1' would make it 70,000 arrays in arrays in the header, and the most that are read is 65,536",
    ),
    "more tensors than are read": (by_hand(counts=(140_000, 1)) + bytes(32 * 140_000), "make it 140,000 tensors in"),
    "more keys than are read": (by_hand(counts=(2, 70_000)) + bytes(13 * 70_000), "would make it 70,000 keys in"),
    "many short arrays": (by_hand(SHORT), "'a256' would make it 1,052,672 numbers in short arrays"),
    "alignment 0": (by_hand([LLAMA, key("general.alignment", U32, bytes(4))]), "alignment is 0, but is a power of"),
    "alignment 48": (by_hand([LLAMA, key("general.alignment", U32, struct.pack("<I", 48))]), "alignment is 48"),
    "a wide alignment": (by_hand([LLAMA, key("general.alignment", U32, struct.pack("<I", 2**31))]), "alignment is 21"),
    "alignment in words": (by_hand([LLAMA, key("general.alignment", STRING, text("32"))]), "alignment is '32'"),
    "no dims": (entry(()), "has 0 dims; a tensor has 1 to 4"),
    "many dims": (entry((1,) * 5), "has 5 dims"),
    "a size of 0": (entry((0,)), r"has shape \[0\]"),
    "large sizes": (entry((2**63, 2**63, 2**63, 2**63)), "has 28,948"),
    "an unknown type": (entry(kind=99), "is of type 99, which this version"),
    "a type that is no more": (entry(kind=4), "is of type 4, which"),
    "no row": (entry((32, 0), Q8_0_TYPE), r"has shape \[0, 32\]"),
    "half a block": (entry((4,), Q8_0_TYPE), "rows of Q8_0 are multiples of 32"),
    "a long name": (entry(name="x" * 65), "name of a tensor has 65 bytes; the limit is 64"),
    "an offset beyond": (entry(offset=2**62), "begins at byte 46116860184273880"),
    "an offset between": (entry(offset=8), "but what precedes it ends at"),
    "overlapping": (by_hand(tensors=TWO | {"token_embd.weight": ((4, 1), F32_TYPE, 0, VALUES)}), "what precedes it"),
    "a hole": (by_hand(tensors=TWO | {"token_embd.weight": ((4, 1), F32_TYPE, 64, VALUES)}), "what precedes it ends"),
    "a name twice": (
        by_hand(tensors={"aa": TWO["output_norm.weight"], "bb": TWO["token_embd.weight"]}).replace(b"bb", b"aa"),
        "the tensor 'aa' twice",
    ),
    "more bytes": (SOUND + bytes(32), "but its header describes"),
    "fewer bytes": (SOUND[:-17], "is truncated: 'token_embd.weight' ends at"),
}  # fmt: skip


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    made, words = HOSTILE[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(made)
    told = hostile.limited(lambda: load(path))
    assert re.match(f"DamagedError: .*(?:{words})", told, re.DOTALL), told
    assert len(told) < 1000


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: (path.write_bytes(by_hand(counts=(2**33, 1))), os.truncate(path, 2**40)), "8,589,934,592 tens"),
        (lambda path: (path.write_bytes(array(U8, 2**39)), os.truncate(path, 2**40)), "header has more than 10,"),
        (lambda path: (path.write_bytes(STRINGS), os.truncate(path, 2**40)), "make it 68,719,476,736 strings"),
        (lambda path: (path.write_bytes(by_hand(counts=(2, 3 * 10**6))), os.truncate(path, 2**40)), "3,000,000 keys"),
        (lambda path: (path.write_bytes(TEXT), os.truncate(path, 2**40)), "16777217 bytes; the limit is 16777216"),
        (lambda path: (path.write_bytes(MANY), os.truncate(path, 2**40)), "header has more than 10,000,000 bytes"),
    ],
    ids=["a pipe", "tensors", "an array", "strings", "many keys", "text", "a long header"],
)  # fmt: skip
def test_large_sparse_files_take_no_memory_and_no_time(
    make: Callable[[Path], Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layoutc.checkpoint.gguf.container.HEADER", 10**7)
    make(tmp_path / "a.gguf")
    told = hostile.limited(lambda: load(tmp_path / "a.gguf"))
    assert re.match(f"DamagedError: .*(?:{words})", told), told


MUTATIONS = 400


def test_mutated_files_are_refused_or_load_as_they_say(tmp_path: Path) -> None:
    """Bits flipped, parts cut out, repeated or filled: what is not refused in words changes values alone."""
    dice, path = random.Random("gguf"), tmp_path / "a.gguf"

    def run() -> str:
        refused = 0
        for number in range(MUTATIONS):
            found = bytearray(SOUND)
            at, length = dice.randrange(len(found)), dice.choice((1, 2, 4, 8))
            match dice.randrange(4):
                case 0:
                    found[at] ^= 1 << dice.randrange(8)
                case 1:
                    del found[at : at + length]
                case 2:
                    found[at:at] = found[at : at + length] * dice.choice((1, 1, 1000))
                case 3:
                    found[at : at + length] = bytes([dice.choice((0, 0xFF, 0x7F, 0x80))]) * length
            path.write_bytes(found)
            told = load(path)
            assert len(told) < 1000, f"{number}: {told}"
            refused += told not in ("", "other values")
        return f"{refused} were refused"

    told = hostile.limited(run)
    assert told.endswith(" were refused"), told
    assert int(told.split()[0]) > MUTATIONS // 2


def test_a_header_says_what_the_file_does(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(by_hand([LLAMA, key("x.y", U16, b"\1\2")]))
    header = read_header(tmp_path / "a.gguf")
    assert header.values == {"general.architecture": "llama", "x.y": 513}
    assert [(one.name, one.type, one.shape) for one in header.tensors.values()] == [
        ("output_norm.weight", "F32", (4,)),
        ("token_embd.weight", "F32", (1, 4)),
    ]
