"""safetensors in and out of models on one process: all recipes, ties, names, and files that are not what they say."""

from __future__ import annotations

import builtins
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import unshipped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import ROOT
from quantized_cases import module, raw, same, same_tensors, snapshot, weight
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from weight_recipes import WEIGHTS

import layoutc
from layoutc.checkpoint import convert_safetensors, export_safetensors, inspect, load_safetensors, quantize_as_stored
from layoutc.checkpoint.common.regions import Box, entries_of, rows_of
from layoutc.checkpoint.safetensors import files, writing
from layoutc.checkpoint.safetensors.files import read_folder, read_header
from layoutc.runtime.errors import DamagedError, LayoutError
from layoutc.runtime.facts import Plane
from layoutc.runtime.train.convert import recipe_class
from layoutc.runtime.weight.tensor import QuantizedTensor

BF16 = torch.bfloat16


class Tied(nn.Module):
    """A head that is the embedding's weight, one layer, and a buffer."""

    def __init__(self, rows: int = 128, columns: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, columns)
        self.layer = nn.Linear(columns, rows)
        self.head = nn.Linear(columns, rows, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3))


def tied(recipe: str | None, *sizes: int) -> Tied:
    """In bf16, and quantized where a recipe is given."""
    torch.manual_seed(0)
    model = Tied(*sizes).to(BF16)
    if recipe is not None:
        layoutc.quantize_(model, recipe, filter_fn=lambda m, _: isinstance(m, nn.Linear | nn.Embedding))
    return model


def plain_values(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    """bf16 values, without the tied name and the buffer, as Hugging Face writes them."""
    return {name: weight(*p.shape, seed=seed, dtype=BF16) for name, p in model.named_parameters()}


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def oracle(recipe: str, value: Tensor) -> dict[str, Tensor]:
    """Planes by the recipe's reference; amaxes, which it takes as given, are those of a new weight."""
    planes: dict[str, Tensor] = module(recipe).quantize_reference(value)
    held = module(recipe).quantize(value).planes()
    return {name: planes.get(name, plane) for name, plane in held.items()}


def state(model: nn.Module) -> list[bytes]:
    """All bytes of a model."""
    found = []
    for value in model.state_dict().values():
        planes = value.planes().values() if isinstance(value, QuantizedTensor) else [value]
        found += [bytes(raw(plane).tolist()) for plane in planes]
    return found


@pytest.mark.sample(6)
@pytest.mark.parametrize("recipe", WEIGHTS)
def test_every_recipe_loads_plain_values_and_comes_back_as_it_was(recipe: str, tmp_path: Path) -> None:
    width = max(128, recipe_class(recipe).LAYOUT.multiple_k)
    model = tied(recipe, 128, width)
    values = plain_values(model)
    assert load_safetensors(model, write(tmp_path / "hf", values)) == (("steps",), ())
    assert model.head.weight is model.embed.weight
    for name in ("embed.weight", "layer.weight"):
        held: Any = model.get_parameter(name)
        assert same_tensors(oracle(recipe, values[name]), held.planes()), name
    assert torch.equal(model.layer.bias, values["layer.bias"])

    assert export_safetensors(model, tmp_path / "quantized") == ["model.safetensors"]
    found = load_file(tmp_path / "quantized" / "model.safetensors")
    names = [f"{name}.{plane}" for name in ("embed.weight", "layer.weight") for plane in held.planes()]
    assert found.keys() == {*names, "layer.bias", "steps"}
    assert all(
        torch.equal(raw(found[f"{name}.{plane}"]), raw(tensor))
        for name in ("embed.weight", "layer.weight")
        for plane, tensor in oracle(recipe, values[name]).items()
    )
    other = tied(recipe, 128, width)
    assert load_safetensors(other, tmp_path / "quantized") == ((), ())
    assert state(other) == state(model)
    plain = tied(None, 128, width)
    load_safetensors(plain, tmp_path / "quantized", convert=True)
    export_safetensors(model, tmp_path / "plain", dtype=BF16)
    for name, value in load_file(tmp_path / "plain" / "model.safetensors").items():
        held = model.state_dict()[name]
        want = held.dequantize(BF16) if isinstance(held, QuantizedTensor) else held
        assert torch.equal(raw(value), raw(want)), name
        assert torch.equal(raw(value), raw(plain.state_dict()[name])), name


def test_finite_values_that_a_dtype_does_not_hold_are_refused(tmp_path: Path) -> None:
    """Of quantized weights and plain ones, exported and converted; what is infinite already is passed on."""
    plain: Any = nn.Linear(32, 4, dtype=BF16)
    model: Any = nn.Sequential(nn.Linear(256, 4))
    with torch.no_grad():
        plain.weight[0, :3] = torch.tensor([1e6, -65520.0, float("inf")])
        model[0].weight.fill_(1e6)
    layoutc.quantize_(model, "fp8_block")
    export_safetensors(model, tmp_path / "codes", files="compressed_tensors")
    words = (
        (plain, r"^weight: 2 finite values would be infinite in float16, whose largest is 65504; .* 999424, which bf"),
        (model, r"^0.weight: 1,024 finite values would be infinite in float16, .* is 983040, which bfloat16 and flo"),
    )
    for one, told in words:
        with pytest.raises(LayoutError, match=told):
            export_safetensors(one, tmp_path / "half", dtype=torch.float16)
    with pytest.raises(LayoutError, match=words[1][1]):
        convert_safetensors(tmp_path / "codes", tmp_path / "half", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["codes"]
    export_safetensors(plain, tmp_path / "wide", dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_quantized_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tied("mxfp8")
    values = {name: weight(*p.shape, seed=2, dtype=dtype) for name, p in model.named_parameters()}
    load_safetensors(model, write(tmp_path, values))
    held: Any = model.layer.weight
    assert same_tensors(oracle("mxfp8", values["layer.weight"]), held.planes())
    assert torch.equal(model.layer.bias, values["layer.bias"].to(BF16))


def test_names_are_renamed_both_ways_and_either_tied_name_will_do(tmp_path: Path) -> None:
    model = tied("nvfp4")
    values = plain_values(model)
    values["head.weight"] = values.pop("embed.weight")
    folder = write(tmp_path / "hf", {f"model.{name}": value for name, value in values.items()})
    load_safetensors(model, folder, rename=lambda name: f"model.{name}")
    held: Any = model.embed.weight
    assert same_tensors(oracle("nvfp4", values["head.weight"]), held.planes())
    export_safetensors(model.state_dict(), tmp_path / "out", rename=lambda name: f"model.{name}")
    assert all(name.startswith("model.") for name in load_file(tmp_path / "out" / "model.safetensors"))
    other = tied("nvfp4")
    load_safetensors(torch.compile(other, backend="eager"), tmp_path / "out", rename=lambda name: f"model.{name}")
    assert state(other) == state(model)
    with pytest.raises(ValueError, match=r"embed\.weight would both be x|and embed\.weight would both be"):
        export_safetensors(model, tmp_path / "none", rename=lambda name: "x")


def test_what_is_missing_or_too_much_is_told_where_that_is_allowed(tmp_path: Path) -> None:
    model = tied("mxfp8")
    values = plain_values(model)
    del values["layer.bias"]
    before = model.layer.bias.detach().clone()
    loaded = load_safetensors(model, write(tmp_path, values | {"else": torch.zeros(1)}), strict=False)
    assert loaded == (("steps", "layer.bias"), ("else",))
    assert torch.equal(model.layer.bias, before)


def test_weights_that_are_cast_on_gather_take_plain_values_and_start_their_history_anew(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 128, bias=False, dtype=BF16))
    layoutc.cast_on_gather_(model, "fp8_delayed")
    model(torch.ones(2, 128, dtype=BF16))
    value = weight(128, 128, seed=4, dtype=BF16)
    load_safetensors(model, write(tmp_path / "hf", {"0.weight": value}))
    held: Any = model[0].weight
    assert same(held.quantize(), module("fp8_delayed").quantize(value))
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["0.weight"], value)


def test_one_orientation_is_exported_and_loads_where_no_other_is_held(tmp_path: Path) -> None:
    value = weight(128, 128, dtype=BF16)
    rowwise = module("mxfp8").quantize(value, orientations=("rowwise",))
    export_safetensors({"weight": rowwise}, tmp_path / "out")
    model = nn.Linear(128, 128, bias=False, dtype=BF16)
    model.weight = nn.Parameter(module("mxfp8").quantize(torch.zeros_like(value), orientations=("rowwise",)))
    load_safetensors(model, tmp_path / "out")
    assert same(model.weight.data, rowwise)
    layoutc.quantize_(both := nn.Linear(128, 128, bias=False, dtype=BF16), "mxfp8")
    before = state(both)
    with pytest.raises(LayoutError, match=r"weight: the files have its rowwise_data.* also needs columnwise_data"):
        load_safetensors(both, tmp_path / "out")
    assert state(both) == before


# ------------------------------------------------------------------------------------------------------ files and forms
def test_an_export_has_the_form_of_hugging_face(tmp_path: Path) -> None:
    model = tied("mxfp8", 256, 128)
    names = export_safetensors(model, tmp_path / "out", max_shard_bytes=70_000)
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = {name: tensor for file in names for name, tensor in load_file(tmp_path / "out" / file).items()}
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    _, metadata, _ = read_header(tmp_path / "out" / names[0])
    assert metadata["format"] == "pt"
    entry = json.loads(metadata["layoutc"])["embed.weight"]
    assert entry["shape"] == [256, 128]
    assert (entry["recipe"], entry["layout_id"]) == ("mxfp8", module("mxfp8").LAYOUT.layout_id)
    assert all(isinstance(value, str) for value in metadata.values())
    mode = (tmp_path / "out" / names[0]).stat().st_mode
    (tmp_path / "new").touch()
    assert mode == (tmp_path / "new").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out"]


def test_an_empty_folder_is_taken_and_one_with_files_is_not(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_safetensors(tied("mxfp8"), tmp_path / "out")
    with pytest.raises(FileExistsError, match="not empty"):
        export_safetensors(tied("mxfp8"), tmp_path / "out")


def test_a_killed_export_leaves_no_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (child := os.fork()) == 0:
        monkeypatch.setattr(writing, "sync", lambda _: os._exit(9))  # once all files are written
        export_safetensors({"a": torch.ones(9), "b": torch.ones(8)}, tmp_path / "out", max_shard_bytes=36)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [path.name[:5] for path in tmp_path.iterdir()] == [".out."]
    export_safetensors({"a": torch.ones(9)}, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["a"].tolist() == [1.0] * 9


def test_exports_that_can_not_be_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    quantized = module("mxfp8").quantize(weight(128, 128))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ({"a": quantized}, {"dtype": torch.int8}, "dtype must be floating point"),
        ({"a": quantized}, {"max_shard_bytes": 0}, "max_shard_bytes must be positive"),
        ({"a": torch.empty(2, device="meta")}, {}, "a is on the meta device"),
        ({"a": quantized.t()}, {}, "a view or a part of a weight"),
        ({"a": quantized[16:48]}, {}, "a view or a part of a weight"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, {}, "can't hold torch.complex64"),
        ({"a": quantized, "a.rowwise_data": torch.zeros(2)}, {}, "would both be named a.rowwise_data"),
    ]
    for given_state, options, words in cases:
        with pytest.raises((LayoutError, ValueError), match=words):
            export_safetensors(given_state, tmp_path / "out", **options)
        assert not list(tmp_path.iterdir())


def test_without_safetensors_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"layoutc\[safetensors\]"):
        load_safetensors(nn.Linear(2, 2), tmp_path)
    export_safetensors({"a": torch.ones(9)}, tmp_path / "out")  # which needs no package
    monkeypatch.undo()
    assert load_file(tmp_path / "out" / "model.safetensors")["a"].tolist() == [1.0] * 9


def rewritten(file: Path, change: Any) -> None:
    """Writes a file's header anew, as `change` makes it."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    raw_header = json.dumps(header).encode()
    file.write_bytes(len(raw_header).to_bytes(8, "little") + raw_header + content[8 + length :])


def described(change: Any) -> Any:
    """A change of what the metadata says of layer.weight."""

    def changed(header: dict[str, Any]) -> None:
        entries = json.loads(header["__metadata__"]["layoutc"])
        change(entries["layer.weight"])
        header["__metadata__"]["layoutc"] = json.dumps(entries)

    return changed


FORGED: list[tuple[Any, str]] = [
    (lambda h: h["layer.bias"].pop("shape"), "entry for layer.bias lacks a valid dtype, shape or data_offsets"),
    (lambda h: h["layer.bias"].update(shape=[-1, -128]), "entry for layer.bias lacks a valid"),
    (lambda h: h["layer.bias"].update(shape=[127]), r"layer.bias of shape \(127,\) in BF16 can't be bytes"),
    (lambda h: h["layer.bias"]["data_offsets"].__setitem__(1, 1 << 40), "is truncated: layer.bias ends at byte"),
    (lambda h: h.pop("layer.bias"), "its header describes|begins at byte"),
    (lambda h: h.update(again=h["layer.bias"]), "begins at byte"),
    (lambda h: h.update(__metadata__=[]), "metadata of the header is not a mapping"),
    (lambda h: h["__metadata__"].update(layoutc="{"), "metadata of layoutc is not JSON"),
    (described(lambda e: e.pop("crc32")), "metadata of layer.weight is not what export_safetensors writes"),
    (described(lambda e: e["crc32"].update(rowwise_data=1)), r"CRC-32 differs"),
    (described(lambda e: e.update(shape=[256, 64])), "should be Facts"),
    (described(lambda e: e["planes"].update(more="uint8") or e["crc32"].update(more=1)), "does not hold"),
    (described(lambda e: e.update(format=99)), "in format 99; this version of layoutc reads 1"),
    (described(lambda e: e.update(layout_id="0" * 12)), "which no installed recipe has"),
]


@pytest.mark.parametrize(("change", "words"), FORGED)
def test_forged_headers_are_refused_and_nothing_is_written(change: Any, words: str, tmp_path: Path) -> None:
    model = tied("mxfp8")
    export_safetensors(model, tmp_path / "out")
    rewritten(tmp_path / "out" / "model.safetensors", change)
    other = tied("mxfp8")
    load_safetensors(other, write(tmp_path / "hf", plain_values(other, 9)))
    before = state(other)
    with pytest.raises(LayoutError, match=words):
        load_safetensors(other, tmp_path / "out")
    assert state(other) == before


def test_metadata_of_another_kind_is_refused_by_inspect_and_load(tmp_path: Path) -> None:
    """Each fact of a weight as something else that JSON can hold: told in words of ours, or of no matter to inspect."""
    model, other = tied("mxfp8"), tied("mxfp8")
    export_safetensors(model, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    content, entry = file.read_bytes(), {}
    rewritten(file, described(entry.update))
    before, shown = state(other), inspect(tmp_path / "out")
    for fact, value in entry.items():
        for wrong in (None, "x", 1.5, -1, [], [-1], [None], {}, {"x": None}):
            if type(wrong) is type(value) and wrong in ("x", -1, {}, []):
                continue
            file.write_bytes(content)
            rewritten(file, described(lambda e, fact=fact, wrong=wrong: e.update({fact: wrong})))
            with pytest.raises(LayoutError):
                load_safetensors(other, tmp_path / "out")
            assert state(other) == before
            with suppress(LayoutError):
                found = inspect(tmp_path / "out")
                assert [one.shape for one in found.entries] == [one.shape for one in shown.entries], (fact, wrong)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400), flip=st.integers(0, 399), bit=st.integers(0, 7))
def test_no_damage_to_a_small_file_goes_unseen(cut: int, flip: int, bit: int, tmp_path: Path) -> None:
    """Shortened anywhere, or with any bit flipped: refused, or read as values of the same shapes."""
    file = write(tmp_path, {"a": torch.arange(24.0), "b": torch.ones(3, 5, dtype=BF16)}) / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:cut])
    if cut < len(good):
        with pytest.raises(DamagedError):
            read_folder(tmp_path)
    bad = bytearray(good)
    bad[flip % len(good)] ^= 1 << bit
    file.write_bytes(bad)
    try:
        found = read_folder(tmp_path).tensors
    except DamagedError:
        return
    assert all(tensor.end <= len(good) for tensor in found.values())


def test_a_folder_without_files_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor .*pytorch_model\.bin"):
        load_safetensors(nn.Linear(2, 2), tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(
        FileNotFoundError, match=r"\): copy model\.safetensors\.index\.json too, or rename a single file"
    ):
        load_safetensors(nn.Linear(2, 2), tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_safetensors(nn.Linear(2, 2), tmp_path / "nowhere")


def test_a_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4, bias=False)
    with pytest.raises(LayoutError, match=r"call model\.to_empty"):
        load_safetensors(model, write(tmp_path, {"weight": torch.zeros(4, 4)}))


def test_block_scaled_fp8_of_others_is_refused_by_its_dtype(tmp_path: Path) -> None:
    model = tied("mxfp8")
    values = plain_values(model)
    values["layer.weight"] = values["layer.weight"].to(torch.float8_e4m3fn)
    values["layer.weight_scale_inv"] = torch.ones(1, 1)
    before = snapshot(model.layer.weight.data)  # type: ignore[arg-type]
    hint = "quantized values of other programs are not converted: dequantize the checkpoint first"
    with pytest.raises(
        LayoutError, match=rf"layer\.weight: F8_E4M3 in the files, but mxfp8 takes F32, BF16 and F16; {hint}"
    ):
        load_safetensors(model, write(tmp_path, values))
    assert same_tensors(before, model.layer.weight.data.planes())  # type: ignore[operator]


# --------------------------------------------------------------------------------------------------------------- shapes
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    recipe=st.sampled_from(["fp8_block", "mxfp6_e2m3", "int4_group32", "nvfp4", "int8_rowwise"]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    experts=st.integers(0, 2),
    data=st.data(),
)
def test_any_shape_comes_back(recipe: str, rows: int, columns: int, experts: int, data: Any, tmp_path: Path) -> None:
    layout = module(recipe).LAYOUT
    odd = data.draw(st.integers(1, 40)) if layout.multiple_m == 1 else layout.multiple_m
    shape = (*([experts] if experts else []), rows * odd, columns * max(layout.multiple_k, 8))
    value = weight(*shape, seed=rows, dtype=BF16)
    quantized = module(recipe).quantize(value)
    folder = Path(tempfile.mkdtemp(dir=tmp_path))  # one test path serves all examples
    export_safetensors({"weight": quantized}, folder)
    model = nn.Module()
    model.weight = nn.Parameter(module(recipe).quantize(torch.zeros_like(value)))
    load_safetensors(model, folder)
    assert same(model.weight.data, quantized)
    plain = nn.Module()
    plain.weight = nn.Parameter(torch.zeros_like(value))
    load_safetensors(plain, folder, convert=True)
    assert torch.equal(plain.weight.data, quantized.dequantize())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_box_is_the_rows_that_it_says(data: Any) -> None:
    """Against torch's own indexing."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4)))
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    matrix = numbers.view(-1, shape[-1])
    runs = rows_of(shape, box)
    assert bool(runs) == (0 not in box.shape)
    plane = Plane(1, 1, torch.uint8)
    pieces = [matrix[entries_of(plane, matrix.shape, rows, shape[-1])] for rows in runs]
    found = torch.cat(pieces).flatten() if pieces else numbers.new_empty(0)
    assert torch.equal(found, numbers[box.slices].flatten())


WORDS_OF_SIX = """files:
  mine:
    summary: files of mine
    tensors:
      data: {name: "{name}", dtype: DTYPE}
      scale: {name: "{name}_scale", dtype: U8}
    config: {quant_method: NAME}
    recognize: [quant_method]
"""


@pytest.mark.parametrize("dtype", ["U32", "I64"])
def test_codes_of_six_bits_in_words_that_they_cross(dtype: str, tmp_path: Path) -> None:
    """As MLX packs them: each row one run of bits, lowest first, here made by numpy; the same words come back."""
    name = f"six_bits_in_{dtype.lower()}"
    text = (ROOT / "specs/mxfp6_e2m3.yaml").read_text(encoding="utf-8").replace("name: mxfp6_e2m3", f"name: {name}")
    unshipped.add(name, text + WORDS_OF_SIX.replace("DTYPE", dtype).replace("NAME", name))
    codes = np.random.default_rng(0).integers(0, 64, (64, 96), dtype=np.uint8)
    bits = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :6].reshape(64, -1)
    packed = np.packbits(bits, axis=-1, bitorder="little").view({"U32": "<u4", "I64": "<i8"}[dtype])
    tensors = {"0.weight": torch.from_numpy(packed), "0.weight_scale": torch.full((64, 3), 128, dtype=torch.uint8)}
    model = nn.Sequential(nn.Linear(96, 64, bias=False))
    layoutc.quantize_(model, module(name))
    load_safetensors(model, write(tmp_path / "in", tensors), files="mine")
    exponents, fractions = codes >> 3 & 3, codes & 7
    magnitudes = np.where(exponents == 0, fractions / 8, (1 + fractions / 8) * 2.0 ** (exponents.astype(int) - 1))
    expected = torch.from_numpy(np.where(codes >> 5, -2, 2) * magnitudes).float()
    assert torch.equal(model[0].weight.dequantize(torch.float32), expected)
    export_safetensors(model, tmp_path / "out", files="mine")
    assert same_tensors(load_file(tmp_path / "out" / "model.safetensors"), tensors)


def test_conversions_and_exports_take_small_files_along_and_say_what_they_did(tmp_path: Path) -> None:
    """Tokenizer and templates; nothing that states how the source's weights are quantized, and nothing large."""
    from click.testing import CliRunner

    from layoutc.cli.app import main

    plain, codes, back = tmp_path / "plain", tmp_path / "codes", tmp_path / "back"
    export_safetensors(nn.Sequential(nn.Linear(32, 64, bias=False)), plain, config={"model_type": "llama"})
    beside = ("generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "LICENSE")
    for name in (*beside, "notes.bin", "README.md"):
        (plain / name).write_text(name)
    for name in ("hf_quant_config.json", "quantize_config.json"):
        (plain / name).write_text("{}")
    done = CliRunner().invoke(main, ["convert", str(plain), str(codes), "--files", "mxfp8/compressed_tensors"])
    assert done.exit_code == 1
    assert "nothing says which of its plain ones to quantize: name them with match= (--match)" in done.stderr
    assert not codes.exists()
    words = ["--files", "mxfp8/compressed_tensors", "--match", "0.weight"]
    done = CliRunner().invoke(main, ["convert", str(plain), str(codes), *words])
    assert "1 weights quantized" in done.stderr
    (codes / "hf_quant_config.json").write_text("{}")
    done = CliRunner().invoke(main, ["convert", str(codes), str(back), "--dtype", "float32"])
    assert "1 weights dequantized" in done.stderr
    assert f"copied as they are: {', '.join(sorted(beside))}" in done.stderr.replace("\n", " ")
    for folder in (codes, back):
        assert {name: (folder / name).read_text() for name in beside} == {name: name for name in beside}
    names = {path.name for path in back.iterdir()}
    assert names == {*beside, "config.json", "model.safetensors"}
    model = nn.Sequential(nn.Linear(32, 64, bias=False))
    quantize_as_stored(model, codes, files="mxfp8/compressed_tensors")
    load_safetensors(model, codes)
    export_safetensors(model, tmp_path / "tuned", files="compressed_tensors", source=codes)
    tuned = tmp_path / "tuned"
    assert {path.name for path in tuned.iterdir()} == names
    assert {name: (tuned / name).read_text() for name in beside} == {name: name for name in beside}


def test_plain_experts_one_by_one_are_stacked_as_rename_says(tmp_path: Path) -> None:
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.up = nn.Parameter(torch.zeros(2, 64, 64))
    (tmp_path / "in").mkdir()
    parts = {f"experts.{i}.{w}.weight": torch.randn(32, 64) for i in range(2) for w in ("w1", "w3")}
    save_file(parts, tmp_path / "in" / "model.safetensors")
    refused = (
        r"experts\.up is not in the files; they have experts\.0\.w1\.weight\. Pass rename=.*'experts\.{expert}\.w1"
    )
    with pytest.raises(LayoutError, match=refused):
        load_safetensors(model, tmp_path / "in")
    names = {"experts.up": "experts.{expert}.w1.weight + experts.{expert}.w3.weight"}
    load_safetensors(model, tmp_path / "in", rename=names.__getitem__)
    assert torch.equal(model.experts.up, torch.cat([*parts.values()]).view(2, 64, 64))
    export_safetensors(model, tmp_path / "out", rename=names.__getitem__)
    there = load_file(tmp_path / "out" / "model.safetensors")
    assert there.keys() == parts.keys()
    assert all(torch.equal(one, parts[name]) for name, one in there.items())
    with torch.no_grad():
        model.experts.up[1, 40] = 1e6
    with pytest.raises(LayoutError, match=r"experts\.1\.w3\.weight: 64 finite values would be infinite"):
        export_safetensors(model, tmp_path / "narrow", rename=names.__getitem__, dtype=torch.float16)

    one = {**parts, "experts.1.w3.weight": torch.zeros(31, 64)}
    save_file(one, tmp_path / "in" / "model.safetensors")
    of_shape = (
        r"experts\.1\.w3\.weight, one of 2 parts of each matrix of experts\.up .* is F32 of \[31, 64\] in the files"
    )
    with pytest.raises(LayoutError, match=of_shape):
        load_safetensors(model, tmp_path / "in", rename=names.__getitem__)
    save_file({name: parts[name] for name in list(parts)[:3]}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(LayoutError, match=r"experts\.1\.w3\.weight, a part of experts\.up, is not in the files"):
        load_safetensors(model, tmp_path / "in", rename=names.__getitem__)
    layoutc.quantize_(model, "fp8_block", param_filter=["experts.up"])
    with pytest.raises(LayoutError, match=r"hold stacks whole, not as experts.*: leave out rename=, or pass files="):
        export_safetensors(model, tmp_path / "own", rename=names.__getitem__)


def test_tensors_that_an_index_leaves_out_are_read_as_others_read_them(tmp_path: Path) -> None:
    """Other loaders read whole files; a conversion that went by the index alone would lose a weight."""
    values = {name: torch.full((2, 2), float(number)) for number, name in enumerate(("a", "b", "c"))}
    values["a"] = torch.ones(2, dtype=torch.complex64)  # which is copied as bytes
    save_file({"a": values["a"], "c": values["c"]}, tmp_path / "1.safetensors")
    save_file({"b": values["b"]}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    convert_safetensors(tmp_path, tmp_path / "out", dtype=torch.float32)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], value) for name, value in values.items())
    save_file({"b": values["b"], "c": values["a"]}, tmp_path / "2.safetensors")
    with pytest.raises(DamagedError, match=r"2\.safetensors and 1\.safetensors hold different tensors c\."):
        convert_safetensors(tmp_path, tmp_path / "other", dtype=torch.float32)


def test_a_tensor_in_two_files_is_one_tensor_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some programs read all files, others what the index names: they would read different models."""
    monkeypatch.setattr(files, "CHUNK", 64)
    weight, last = torch.arange(64.0).view(8, 8), torch.arange(64.0).view(8, 8)
    last[-1, -1] = -1
    save_file({"a": torch.zeros(2), "0.weight": weight}, tmp_path / "1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for named in ("1.safetensors", "2.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "0.weight": named}}))
        for other in (last, weight.half(), weight.view(4, 16)):
            save_file({"b": torch.ones(2), "0.weight": other}, tmp_path / "2.safetensors")
            model = nn.Sequential(nn.Linear(8, 8, bias=False))
            before = model[0].weight.detach().clone()
            with pytest.raises(DamagedError, match=r"hold different tensors 0\.weight\. .* remove the wrong one"):
                load_safetensors(model, tmp_path, strict=False)
            assert torch.equal(model[0].weight, before)
        save_file({"b": torch.ones(2), "0.weight": weight}, tmp_path / "2.safetensors")
        load_safetensors(model, tmp_path, strict=False)
        assert torch.equal(model[0].weight, weight)
