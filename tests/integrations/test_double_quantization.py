"""bitsandbytes' double quantization, written: its own bytes for the same scales, and what it and transformers read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Ranks
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_files_of_others import NF4_STATE, changed, of_text, same, same_files, tensors_in
from test_qlora import of_layoutc, plain, write
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc.checkpoint import (
    convert_safetensors,
    export_safetensors,
    load_safetensors,
    quantize_as_stored,
    stream_export,
)
from layoutc.checkpoint.held.codes import encode
from layoutc.runtime.errors import DamagedError, LayoutError

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}: pip install 'layoutc[integrations,formats]'")
    for name in ("transformers", "peft", "bitsandbytes")
]
DOUBLE = "bitsandbytes_double"
rounds = pytest.mark.filterwarnings("ignore:.*are rounded to codes:UserWarning")


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many of torch. In one, bitsandbytes adds scales up as exports do."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def codebook() -> tuple[float, ...]:
    from layoutc.recipes.nf4_bitsandbytes.files import VALUES_OF_DYNAMIC8

    return VALUES_OF_DYNAMIC8


def of_theirs(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """What bitsandbytes makes of a weight: tensors by the ends of their names."""
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    state.dtype = dtype
    return {"": codes} | {f".{key}": one for key, one in state.as_dict(packed=True).items()}


def scales_in(seed: int, count: int, spread: float) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(
        (np.abs(rng.standard_normal(count)) * np.exp(rng.uniform(-spread, spread, count))).astype("f")
    )


# ------------------------------------------------------------------------------------------------------------ the codes
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 3000), spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]))
@example(seed=0, count=256, spread=0.0)
@example(seed=0, count=257, spread=0.0)
@example(seed=1, count=32769, spread=0.5)
@example(seed=2, count=917504, spread=0.5)
def test_codes_are_those_that_bitsandbytes_makes_of_the_same_scales(seed: int, count: int, spread: float) -> None:
    """Offset, scales and codes, to the bit, of any number of scales."""
    from bitsandbytes.functional import quantize_blockwise

    scales = scales_in(seed, count, spread)
    with threads(1):
        offset = scales.mean()
    codes, state = quantize_blockwise(scales - offset, blocksize=256)
    found = encode(scales.view(1, -1), codebook(), 256)
    assert found.offset == offset.item()
    assert torch.equal(found.scale.view(torch.int32), state.absmax.view(torch.int32))
    assert torch.equal(found.codes.view(-1), codes)
    assert torch.equal(found.codebook.view(torch.int32), state.code.view(torch.int32))


@pytest.mark.usefixtures("one_thread")
def test_every_quotient_has_bitsandbytes_code() -> None:
    """All fp32 values that x + 1 has of x from -1 to 1: one in 16 of them, from one end to the other."""
    from bitsandbytes.functional import quantize_blockwise

    steps = torch.cat([torch.arange(0, 1 << 24, 16), torch.arange(1 << 24, (1 << 25) + 1, 32)]).double()
    values = (steps * 2**-24 - 1).float()
    blocks = torch.nn.functional.pad(values, (0, -len(values) % 254)).view(-1, 254)
    ends = torch.tensor([[1.0, -1.0]]).expand(len(blocks), 2)
    scales = torch.cat([blocks, ends], 1)
    flat = scales.reshape(-1) - scales.mean()  # as encode does, which is no 0
    found = encode(scales, codebook(), 256)
    assert torch.equal(found.codes.view(-1), quantize_blockwise(flat, blocksize=256)[0])


def test_the_mean_is_that_of_one_thread_whatever_torch_has() -> None:
    """With several, torch adds up long sums in pieces, and the last bit may differ: not in files."""
    scales, found = scales_in(3, 300_000, 0.5), set()
    for number in (1, 2, 4, 7):
        with threads(number):
            found.add(encode(scales.view(1, -1), codebook(), 256).offset)
    assert len(found) == 1


@pytest.mark.parametrize("values", [[0.0] * 300, [1e-42, 2e-42, 0.0], [2.5] * 257, [3e38, 1.0]])
@pytest.mark.usefixtures("one_thread")
def test_extremes_have_bitsandbytes_codes(values: list[float]) -> None:
    from bitsandbytes.functional import quantize_blockwise

    scales = torch.tensor(values)
    codes, state = quantize_blockwise(scales - scales.mean(), blocksize=256)
    found = encode(scales.view(1, -1), codebook(), 256)
    assert torch.equal(found.codes.view(-1), codes)
    assert torch.equal(found.scale, state.absmax)


@pytest.mark.parametrize("values", [[float("nan"), 1.0], [float("inf"), 1.0], [3e38, 3e38]])
def test_scales_without_a_finite_mean_have_no_codes(values: list[float]) -> None:
    with pytest.raises(LayoutError, match="not finite, or too large to subtract their mean"):
        encode(torch.tensor([values]), codebook(), 256)


def test_no_scales_have_no_codes() -> None:
    found = encode(torch.zeros(0, 4), codebook(), 256)
    assert (tuple(found.codes.shape), tuple(found.scale.shape), found.offset, found.error) == ((0, 4), (0,), 0.0, 0.0)


# ------------------------------------------------------------------------------------------------ weights of our making
SHAPES = [(101, 192), (5, 128), (300, 4096), (1, 64), (37, 1088)]


def ours(seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model that layoutc quantized, and the values that it had."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(k, m, bias=False) for m, k in SHAPES)).requires_grad_(False)
    for param in model.parameters():
        param.copy_(torch.randn(param.shape) * 0.02)
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    layoutc.quantize_(model, "nf4_bitsandbytes", param_filter=["*.weight"], keep_values=False)
    return model, values


@pytest.mark.usefixtures("one_thread")
def test_an_export_is_what_bitsandbytes_writes(tmp_path: Path) -> None:
    """Every tensor of each weight, in several files whose index has their bytes; a stream has the same."""
    model, values = ours()
    with pytest.warns(UserWarning, match=r"the scales of 4 weights are rounded to codes, by at most 0\.\d\d%"):
        export_safetensors(model, tmp_path / "out", files=DOUBLE, max_shard_bytes=100_000)
    expected = {name + key: one for name, value in values.items() for key, one in of_theirs(value).items()}
    assert same(tensors_in(tmp_path / "out"), expected)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in expected.values())
    with pytest.warns(UserWarning, match="are rounded to codes"):
        assert same(dict(stream_export(model, files=DOUBLE)), expected)


@pytest.mark.usefixtures("one_thread")
def test_a_conversion_is_what_bitsandbytes_writes(tmp_path: Path) -> None:
    """Of plain values, and of files that have the scales; files that have codes keep them."""
    from safetensors.torch import save_file

    model, values = ours()
    (tmp_path / "plain").mkdir()
    save_file(values, tmp_path / "plain" / "model.safetensors")
    export_safetensors(model, tmp_path / "scales", files="bitsandbytes")
    expected = {name + key: one for name, value in values.items() for key, one in of_theirs(value).items()}
    with pytest.warns(UserWarning, match="are rounded to codes"):
        convert_safetensors(tmp_path / "plain", tmp_path / "a", files=f"nf4_bitsandbytes/{DOUBLE}", match=["*.weight"])
    with pytest.warns(UserWarning, match="are rounded to codes"):
        convert_safetensors(tmp_path / "scales", tmp_path / "b", files=f"nf4_bitsandbytes/{DOUBLE}")
    convert_safetensors(tmp_path / "b", tmp_path / "c", files=f"nf4_bitsandbytes/{DOUBLE}")
    for name in "abc":
        assert same(tensors_in(tmp_path / name), expected), name
    config = json.loads((tmp_path / "c" / "config.json").read_text())["quantization_config"]
    assert config["bnb_4bit_use_double_quant"] is True


def exports(where: str) -> None:
    model, _ = ours()
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer)
    fully_shard(model)
    export_safetensors(model, where, files=DOUBLE, max_shard_bytes=100_000)


@rounds
def test_ranks_write_the_files_of_one_process(three: Ranks, tmp_path: Path) -> None:
    export_safetensors(ours()[0], tmp_path / "1", files=DOUBLE, max_shard_bytes=100_000)
    three.run(exports, str(tmp_path / "3"))
    assert same_files(tmp_path / "1", tmp_path / "3")


@rounds
def test_scales_are_rounded_by_less_than_a_step_of_codes(tmp_path: Path) -> None:
    """By at most the 1.2% of a scale that docs/pages/files.md says of normal weights; codes of elements stay."""
    model, _ = ours()
    export_safetensors(model, tmp_path / "out", files=DOUBLE)
    again = nn.Sequential(*(nn.Linear(k, m, bias=False) for m, k in SHAPES)).requires_grad_(False)
    quantize_as_stored(again, tmp_path / "out")
    load_safetensors(again, tmp_path / "out")
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        before, after = one.store.planes, other.store.planes  # type: ignore[attr-defined]
        assert (after["rowwise_scale"] / before["rowwise_scale"] - 1).abs().max() < 0.012
        assert torch.equal(after["rowwise_data"], before["rowwise_data"])


def refused(where: str) -> str:
    model, _ = ours()
    weight: Any = model.get_parameter("2.weight")
    weight.store.planes["rowwise_scale"][7, 3] = float("inf")
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer)
    fully_shard(model)
    try:
        export_safetensors(model, where, files=DOUBLE)
    except LayoutError as error:
        return str(error)
    return ""


def test_a_weight_without_codes_is_named_on_all_ranks_and_nothing_is_left(two: Ranks, tmp_path: Path) -> None:
    for message in two.run(refused, str(tmp_path / "out")):
        assert "2.weight.absmax: its values are not finite" in message
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------- weights that were read
@rounds
def test_transformers_loads_an_export_and_computes_our_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, found = (
        AutoModelForCausalLM.from_config(plain().config, dtype=torch.bfloat16).requires_grad_(False) for _ in range(2)
    )
    layoutc.quantize_(model, "nf4_bitsandbytes", param_filter=["*_proj.weight"], keep_values=False)
    out, ids = tmp_path / "out", torch.arange(12).reshape(2, 6)
    export_safetensors(model, out, files=DOUBLE)
    assert len(quantize_as_stored(found, out)) == 14
    assert load_safetensors(found, out) == ((), ())
    theirs: Any = AutoModelForCausalLM.from_pretrained(out, device_map="cpu", dtype=torch.bfloat16)
    logits = theirs.train()(input_ids=ids).logits  # in eval mode bitsandbytes packs weights anew on CPUs
    assert torch.equal(found(input_ids=ids).logits, logits)
    assert not torch.equal(model(input_ids=ids).logits, logits), "scales are rounded"


def test_files_that_bitsandbytes_wrote_come_back_with_their_source(tmp_path: Path) -> None:
    """By an export, a stream and a conversion; without the source, scales are rounded once more, and it is said."""
    write(tmp_path, double=True)
    model, expected = of_layoutc(str(tmp_path)), tensors_in(tmp_path)
    export_safetensors(model, tmp_path / "a", files=DOUBLE, source=tmp_path)
    convert_safetensors(tmp_path, tmp_path / "b", files=f"nf4_bitsandbytes/{DOUBLE}")
    assert same(tensors_in(tmp_path / "a"), expected)
    assert same(tensors_in(tmp_path / "b"), expected)
    assert same(dict(stream_export(model, files=DOUBLE, source=tmp_path)), expected)
    with pytest.warns(UserWarning, match=r"the scales of \d+ weights are rounded .* source=folder"):
        export_safetensors(model, tmp_path / "c", files=DOUBLE)
    assert not same(tensors_in(tmp_path / "c"), expected)


@pytest.mark.usefixtures("one_thread")
def test_a_weight_that_has_changed_gets_codes_of_its_own(tmp_path: Path) -> None:
    """And keeps the dtype of its text; the others keep all their bytes."""
    write(tmp_path, double=True)
    model, expected, name = of_layoutc(str(tmp_path)), tensors_in(tmp_path), "model.layers.1.mlp.up_proj.weight"
    value = torch.randn(320, 64) / 9
    model.get_parameter(name).copy_(value)
    with pytest.warns(UserWarning, match="the scales of 1 weights are rounded"):
        export_safetensors(model, tmp_path / "out", files=DOUBLE, source=tmp_path)
    expected |= {name + key: one for key, one in of_theirs(value, torch.float32).items()}
    assert same(tensors_in(tmp_path / "out"), expected)


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("nested_absmax", torch.zeros(9), r"is F32 of \[9\], but a weight of this shape has F32 of"),
        ("nested_quant_map", torch.zeros(3), r"is F32 of \[3\], but a weight of this shape has F32 of \[256\]"),
        (NF4_STATE, of_text('{"nested_offset": []}'), "has"),
        (NF4_STATE, of_text("{{{"), "is not JSON"),
    ],
    ids=range(4),
)
def test_a_source_that_is_damaged_is_refused_before_anything_is_written(
    key: str, tensor: Tensor, message: str, two: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in", double=True)
    path = changed(tmp_path / "in", tmp_path / "bad", f"model.layers.0.mlp.up_proj.weight.{key}", tensor)
    for found in two.run(export_of, str(tmp_path / "in"), str(path), str(tmp_path / "out")):
        kind, text = found
        assert kind in ("LayoutError", "DamagedError")
        assert "model.layers.0.mlp.up_proj.weight" in text
    with pytest.raises((LayoutError, DamagedError), match=message):
        export_safetensors(of_layoutc(str(tmp_path / "in")), tmp_path / "out", files=DOUBLE, source=path)
    assert not (tmp_path / "out").exists()


def export_of(folder: str, source: str, out: str) -> tuple[str, str]:
    model = of_layoutc(folder)
    try:
        export_safetensors(model, out, files=DOUBLE, source=source)
    except (LayoutError, DamagedError) as error:
        return type(error).__name__, str(error)
    return "", ""


@rounds
def test_a_source_in_other_files_keeps_nothing(tmp_path: Path) -> None:
    """One that has scales without codes, and one that is plain."""
    model = plain().requires_grad_(False)
    model.save_pretrained(tmp_path / "plain")
    layoutc.quantize_(model, "nf4_bitsandbytes", param_filter=["*_proj.weight"], keep_values=False)
    export_safetensors(model, tmp_path / "scales", files="bitsandbytes")
    export_safetensors(model, tmp_path / "out", files=DOUBLE)
    for source in ("scales", "plain"):
        export_safetensors(model, tmp_path / f"of {source}", files=DOUBLE, source=tmp_path / source)
        assert same_files(tmp_path / "out", tmp_path / f"of {source}")


def test_a_text_of_a_source_is_kept_where_scales_are_none_of_codes(tmp_path: Path) -> None:
    """The dtype that it has is for the program to choose."""
    write(tmp_path)
    export_safetensors(of_layoutc(str(tmp_path)), tmp_path / "out", files="bitsandbytes", source=tmp_path)
    assert same(tensors_in(tmp_path / "out"), tensors_in(tmp_path))
