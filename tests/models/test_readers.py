"""Models in every form that a user can name one, and what is no model: what is said, and that nothing large is read."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from layoutc.models import config, read, shapes
from layoutc.models.expressions import evaluate
from layoutc.models.weights import MOST_SIZE, ModelError, Weight, in_layers, kind_by_name, layer_of

LLAMA = {
    "model_type": "llama",
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128},
}


def header(path: Path, tensors: dict[str, tuple[str, list[int]]], length: int | None = None) -> Path:
    """A safetensors file that ends behind its header."""
    entries = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in tensors.items()
    }
    content = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content)
    return path


def as_tensors(fields: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    model = config.read(fields, "config")
    return {
        f"{layer.name}.{w.name}".lstrip("."): ("BF16", list(w.shape))
        for layer in model.all_layers
        for w in layer.weights
    }


def test_a_config_and_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    of_file, of_folder = read.read(str(tmp_path / "config.json")), read.read(str(tmp_path))
    assert of_file == of_folder
    assert [layer.name for layer in of_file.layers] == ["model.layers.0", "model.layers.1"]
    assert of_file.elements == 2 * 128 * 64 + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64)


def test_headers_of_files_give_the_same_weights(tmp_path: Path) -> None:
    """By an index, as a folder, and as one file; kinds follow from names."""
    tensors = as_tensors(LLAMA)
    names = list(tensors)
    first, second = dict(list(tensors.items())[:7]), dict(list(tensors.items())[7:])
    header(tmp_path / "model-1.safetensors", first)
    header(tmp_path / "model-2.safetensors", second)
    by_folder = read.read(str(tmp_path))
    index = {"weight_map": {name: f"model-{1 if name in first else 2}.safetensors" for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    by_index = read.read(str(tmp_path / "model.safetensors.index.json"))
    whole = read.read(str(header(tmp_path / "whole.safetensors", tensors)))
    stated = config.read(LLAMA, "config")
    for found in (by_folder, by_index, whole):
        assert sorted(found.names()) == sorted(stated.names())
        kinds = {f"{u.name}.{w.name}": (w.shape, w.kind) for u in found.all_layers for w in u.weights}
        assert kinds == {f"{u.name}.{w.name}": (w.shape, w.kind) for u in stated.all_layers for w in u.weights}


def test_a_folder_of_an_unknown_architecture_is_read_from_its_headers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody_knows"}))
    header(tmp_path / "model.safetensors", {"blocks.0.up.weight": ("F32", [8, 4])})
    assert read.read(str(tmp_path)).names() == ["blocks.0.up.weight"]


def test_scales_of_checkpoints_are_left_out_and_said(tmp_path: Path) -> None:
    tensors = {"layers.0.up.weight": ("F8_E4M3", [256, 128]), "layers.0.up.weight_scale_inv": ("F32", [2, 1])}
    found = read.read(str(header(tmp_path / "m.safetensors", tensors)))
    assert found.names() == ["layers.0.up.weight"]
    assert any("1 scales" in note for note in found.notes)


def test_shapes() -> None:
    found = shapes.read(["up*3=96x64", "embed=128x64", "experts*3=4x96x64", "norm=64"])
    assert [(layer.name, [w.kind for w in layer.weights]) for layer in found.all_layers] == [
        ("", ["embedding", "norm"]),
        *((f"layers.{layer}", ["linear", "experts"]) for layer in range(3)),
    ]


@pytest.mark.parametrize("times", [10_001, 99_999, 10**12])
def test_shapes_have_no_more_layers_than_configs(times: int) -> None:
    words = f"--shapes: the number of layers of 'a*{times}=1x1' is {times}, and must be a whole number from 1 to 10,000"
    with pytest.raises(ModelError, match=re.escape(words)):
        shapes.read([f"a*{times}=1x1"])
    assert len(shapes.read(["a*10000=1x1"]).layers) == 10_000


def test_layers_of_several_kinds_are_counted_together() -> None:
    """As in headers and indexes, whose names say what layer a weight is in."""
    many = [Weight(f"{kind}.{i}.a", (1, 1), "linear") for kind in ("encoder", "decoder") for i in range(5001)]
    with pytest.raises(ModelError, match="a file: the number of layers is 10002, and must be a whole number from 1 to"):
        in_layers("a", "a file", many)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up.weight", ("model.layers.3", "mlp.up.weight")),
        ("h.0.mlp.experts.7.w1", ("h.0", "mlp.experts.7.w1")),
        ("lm_head.weight", ("", "lm_head.weight")),
        ("a.b2.weight", ("", "a.b2.weight")),
    ],
)
def test_layers_are_the_outermost_lists(name: str, layer: tuple[str, str]) -> None:
    assert layer_of(name) == layer


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("model.embed_tokens.weight", (128, 64), "embedding"),
        ("transformer.wte.weight", (128, 64), "embedding"),
        ("mlp.gate.weight", (8, 64), "router"),
        ("mlp.router.weight", (8, 64), "router"),
        ("mlp.gate_proj.weight", (96, 64), "linear"),
        ("self_attn.q_norm.weight", (16,), "norm"),
        ("ln_f.weight", (16,), "norm"),
        ("self_attn.sinks", (4,), "other"),
        ("mlp.experts.gate_up_proj", (8, 96, 64), "experts"),
        ("mlp.experts.gate_up_proj_bias", (8, 96), "bias"),
        ("q_proj.bias", (64,), "bias"),
        ("conv.weight", (8, 3, 3, 3), "other"),
    ],
)
def test_kinds_by_name(name: str, shape: tuple[int, ...], kind: str) -> None:
    assert kind_by_name(name, shape) == kind


def bad_config(**fields: Any) -> dict[str, Any]:
    return {key: value for key, value in {**LLAMA, **fields}.items() if value is not ...}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            bad_config(model_type="mine"),
            "'mine', whose weights are not known; known are language models of deepseek_v3",
        ),
        (bad_config(model_type=...), "has the model_type None"),
        (bad_config(hidden_size=...), "has no hidden_size, by which its weights are sized"),
        (bad_config(hidden_size="64"), "hidden_size"),
        (bad_config(vocab_size=0), "vocab_size is 0, and must be a whole number from 1"),
        (bad_config(vocab_size=True), "vocab_size is True"),
        (bad_config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000, and must be a whole number from 1"),
        (bad_config(num_attention_heads=0), "can't be worked out"),
        (
            bad_config(hidden_size=float("nan")),
            "can't be worked out: hidden_size is nan",
        ),
        (bad_config(intermediate_size=float("-inf")), "can't be worked out: intermediate_size is -inf"),
        (bad_config(head_dim="x"), "num_attention_heads * head_dim has an operand that is not a number"),
        (bad_config(head_dim=1e308), "num_attention_heads * head_dim is inf, and must be a number from 0"),
        (bad_config(head_dim=-64), "num_attention_heads * head_dim is -256, and must be a number from 0"),
        ([1], "is a list, and should be a mapping"),
    ],
)
def test_bad_configs(tmp_path: Path, content: Any, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError) as error:
        read.read(str(path))
    assert said in str(error.value)


def test_bad_files(tmp_path: Path) -> None:
    def said(path: Path | str) -> str:
        with pytest.raises(ModelError) as error:
            read.read(str(path))
        return str(error.value)

    assert "does not exist; name a known name, a config.json" in said(tmp_path / "nothing")
    assert "has no config.json, no model.safetensors.index.json and no .safetensors file" in said(tmp_path)
    (tmp_path / "text.json").write_text("{")
    assert "is not JSON" in said(tmp_path / "text.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert "is not JSON" in said(tmp_path / "deep.json")
    tensors = {"a.weight": ("BF16", [4, 4])}
    assert "is truncated or no safetensors file" in said(header(tmp_path / "a.safetensors", tensors, 2**62))
    assert "does not say what a is" in said(header(tmp_path / "b.safetensors", {"a": (3, [4])}))  # type: ignore[dict-item]
    assert "has the shape [-4]" in said(header(tmp_path / "c.safetensors", {"a": ("F32", [-4])}))
    assert "Give the model's config.json" in said(header(tmp_path / "d.safetensors", {"a_blocks": ("U8", [4, 4])}))
    assert "has no weights" in said(header(tmp_path / "e.safetensors", {}))
    twice = tmp_path / "twice"
    twice.mkdir()
    for name in ("a", "b"):
        header(twice / f"{name}.safetensors", tensors)
    assert "which another file of" in said(twice)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "../a.safetensors"}}))
    assert "not a file of the same folder" in said(index)
    index.write_text(json.dumps({"weight_map": {"a.weight": "gone.safetensors"}}))
    assert "an index has no shapes" in said(index)
    header(tmp_path / "f.safetensors", tensors)
    index.write_text(json.dumps({"weight_map": {"b.weight": "f.safetensors"}}))
    assert "says that f.safetensors holds b.weight, but it does not" in said(index)


@pytest.mark.parametrize("text", ["up", "up=", "up=4096", "=4x4", "up=0x4", "up=4x4x4x4x4", "up*0=4x4", "a b=4x4"])
def test_bad_shapes(text: str) -> None:
    if text == "up=4096":
        assert shapes.read([text]).elements == 4096  # a vector
        return
    with pytest.raises(ModelError, match="is not a shape of a weight; write NAME=ROWSxCOLUMNS"):
        shapes.read([text])


def test_what_is_typed_is_what_is_planned() -> None:
    """Spaces around a shape are none of it; of weights without a layer, each is the root's."""
    found = shapes.read(
        [" up*2=96x64", "down=64X96 ", "experts=4x96x64", "lm_head=128x64", "gate=8x64", "cube=2x3x4x5"]
    )
    assert found.root.weights == (
        Weight("down", (64, 96), "linear", 1.0),
        Weight("experts", (4, 96, 64), "experts"),
        Weight("lm_head", (128, 64), "linear", 1.0),
        Weight("gate", (8, 64), "linear", 1.0),
        Weight("cube", (2, 3, 4, 5), "other"),
    )
    assert [(layer.name, layer.weights) for layer in found.layers] == [
        (f"layers.{at}", (Weight("up", (96, 64), "linear", 1.0),)) for at in range(2)
    ]
    assert (found.name, found.source, found.notes) == ("shapes", "--shapes", ())


def test_limits_are_the_largest_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a size, of a file, of a header, and of the weights of a model; one more is refused."""
    from layoutc.models import headers, weights

    assert shapes.read([f"up={MOST_SIZE}x1"]).elements == MOST_SIZE == 2**40
    with pytest.raises(ModelError, match="is larger than a weight can be"):
        shapes.read([f"up={MOST_SIZE + 1}x1"])
    for size, fits in ((MOST_SIZE, True), (MOST_SIZE + 1, False), (0, False), (1, True)):
        path = header(tmp_path / "sizes.safetensors", {"a": ("F32", [size])})
        if fits:
            assert read.read(str(path)).elements == size
        else:
            with pytest.raises(ModelError, match="has the shape"):
                read.read(str(path))
    path.write_bytes(b"12345")
    assert headers.content_of(path, 5) == b"12345"
    with pytest.raises(ModelError, match="has 5 bytes, and the most that is read is 4"):
        headers.content_of(path, 4)
    header(path, {"a": ("F32", [4])})
    length = path.stat().st_size - 8
    monkeypatch.setattr(headers, "MOST_JSON", length)
    assert [name for name, _ in headers.header(path)] == ["a"]
    monkeypatch.setattr(headers, "MOST_JSON", length - 1)
    with pytest.raises(ModelError, match=f"its header should have {length} bytes"):
        list(headers.header(path))
    path.write_bytes(bytes(7))
    with pytest.raises(ModelError, match="truncated or no safetensors"):
        list(headers.header(path))
    monkeypatch.setattr(weights, "MOST_WEIGHTS", 3)
    assert len(shapes.read(["up*3=4x4"]).names()) == 3
    with pytest.raises(ModelError, match="has 4 weights; the most that are planned is 3"):
        shapes.read(["up*4=4x4"])


def test_names_occur_once() -> None:
    with pytest.raises(ModelError, match="has up twice"):
        shapes.read(["up=4x4", "up=8x4"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:build", "no_such_module can't be imported"),
        ("json:build", "json has no function 'build'"),
        ("json:dumps", "raised TypeError on the meta device"),
        ("builtins:dict", "returned a dict, and should return a torch.nn.Module"),
    ],
)
def test_bad_factories(name: str, said: str) -> None:
    with pytest.raises(ModelError) as error:
        read.read(name)
    assert said in str(error.value)


def a_model() -> Any:
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 8)
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
            self.head = nn.Linear(8, 32, bias=False)
            self.head.weight = self.embed.weight
            self.layers[1].weight.requires_grad_(False)

    return Net()


def test_a_factory() -> None:
    found = read.read(f"{__name__}:a_model")
    assert [layer.name for layer in found.all_layers] == ["", "layers.0", "layers.1"]
    (embedding,) = found.root.weights
    assert (embedding.kind, embedding.tied, embedding.share) == ("embedding", ("head.weight",), 1.0)
    assert [(w.kind, w.trains) for w in found.layers[1].weights] == [("linear", False), ("bias", True)]


@pytest.mark.parametrize(
    ("text", "value"),
    [("a * (b + 2)", 15), ("a // b + a % b", 4 - 1 - 1), ("a if b is not None else 0", 3), ("not a == 3", False)],
)
def test_expressions(text: str, value: Any) -> None:
    assert evaluate(text, {"a": 3, "b": 3 if "(" in text else 2}) == value


@pytest.mark.parametrize("text", ["__import__('os')", "a.b", "[a]", "a ** a", "(lambda: 1)()"])
def test_expressions_are_arithmetic_alone(text: str) -> None:
    with pytest.raises(ValueError, match="is not arithmetic on sizes"):
        evaluate(text, {"a": 3})


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(ModelError, match="has no weights"):
        in_layers("m", "nothing", [])
