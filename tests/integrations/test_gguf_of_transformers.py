"""GGUF files beside transformers' own loader, and on one to three ranks: values, logits, and files byte for byte."""

from __future__ import annotations

import filecmp
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
from harness import Ranks, mesh_of
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc.checkpoint import convert_gguf, export_gguf, load_gguf, quantize_as_stored
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}: pip install 'layoutc[{extra}]'")
    for name, extra in (("transformers", "integrations"), ("gguf", "formats"))
]
LAYERS = 2
IDS = torch.arange(24).reshape(2, 12)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", LAYERS)


def theirs(file: Path) -> Any:
    """The model that transformers loads of a file."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


def model_of(file: str | Path, device: str = "cpu") -> Any:
    """A model of transformers, quantized as the file is; one that was on the meta device holds rubbish."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(gguf_files.config(LAYERS), dtype=torch.float32)
    assert set(quantize_as_stored(model, file).values()) == {"q8_0", "q4_k", "q6_k"}
    if device == "meta":
        for buffer in model.to_empty(device="cpu").buffers():
            buffer.fill_(float("nan"))
    return model


def values_of(model: Any) -> dict[str, torch.Tensor]:
    """fp32 values of all parameters, whole."""
    found = {}
    for name, param in model.named_parameters():
        whole = param.full_tensor() if hasattr(param, "full_tensor") else param
        found[name] = (whole.dequantize(torch.float32) if isinstance(whole, QuantizedTensor) else whole).detach()
    return found


def test_values_and_logits_are_those_of_transformers(file: Path, tmp_path: Path) -> None:
    model, other = model_of(file, "meta"), theirs(file)
    assert not load_gguf(model, file).missing
    expected = gguf_files.expected(file)
    for name, value in values_of(model).items():
        assert torch.equal(value, expected[name]), name
        assert torch.equal(value, dict(other.named_parameters())[name]), name
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, other(input_ids=IDS).logits)
    export_gguf(model, tmp_path / "out.gguf", source=file)
    assert filecmp.cmp(file, tmp_path / "out.gguf", shallow=False)


def test_a_plain_folder_is_what_transformers_loads(file: Path, tmp_path: Path) -> None:
    """With the config.json that is made of the file's keys: the logits of its loader of GGUF files."""
    from transformers import AutoModelForCausalLM

    assert convert_gguf(file, tmp_path / "plain", dtype=torch.float32).no_config == ""
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    other = theirs(file)
    for name in ("rms_norm_eps", "rope_parameters", "head_dim", "max_position_embeddings", "tie_word_embeddings"):
        ours, known = getattr(model.config, name), getattr(other.config, name)
        assert ours == (pytest.approx(known) if isinstance(known, float) else known), name
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, other(input_ids=IDS).logits)


@pytest.mark.parametrize(("architecture", "name"), [("llama", "Mixtral"), ("qwen3moe", "Qwen3Moe")])
def test_a_plain_folder_of_experts_is_what_transformers_loads(architecture: str, name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    more = {"expert_feed_forward_length": gguf_files.SIZES["intermediate_size"]} if architecture != "llama" else {}
    file = gguf_files.write(tmp_path / "in.gguf", experts=True, architecture=architecture, **more)
    assert convert_gguf(file, tmp_path / "plain", dtype=torch.float32).no_config == ""
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    assert type(model).__name__ == f"{name}ForCausalLM"
    assert model.config.num_experts_per_tok == 2
    other = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    load_gguf(other, file, strict=False)
    expected = values_of(other)
    assert all(
        torch.equal(value, expected[name])
        for name, value in values_of(model).items()
        if ".q_norm" not in name and ".k_norm" not in name
    )


# ----------------------------------------------------------------------------------------------------------- many ranks
def sharded(file: str, *, runs: bool = False) -> Any:
    """runs: a model of transformers; else its parameters alone."""
    if runs:
        model = model_of(file)
    else:
        model = gguf_files.skeleton(LAYERS)
        quantize_as_stored(model, file)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    load_gguf(model, file)
    return model


def exports(file: str, out: str) -> bool:
    """On ranks: load, compare with the package's values, and export."""
    model, expected = sharded(file), gguf_files.expected(Path(file))
    same = all(torch.equal(value, expected[name]) for name, value in values_of(model).items())
    export_gguf(model, out, source=file)
    return same


def test_ranks_load_their_slices_and_write_the_same_file(file: Path, two: Ranks, three: Ranks, tmp_path: Path) -> None:
    """What N ranks have written, M load and write again."""
    source = file
    for ranks in (two, three, two):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        assert ranks.run(exports, str(source), str(out)) == [True] * ranks.world
        assert filecmp.cmp(file, out, shallow=False)
        source = out


def exports_experts(file: str, out: str, dim: int) -> bool:
    """On ranks that cut experts, or the rows of each: load, compare with the package's values, and export."""
    from torch.distributed.tensor import Shard

    model = gguf_files.skeleton(LAYERS, experts=True)
    quantize_as_stored(model, file)
    for layer in model.model.layers:
        fully_shard(layer, shard_placement_fn=lambda param: Shard(dim if param.dim() == 3 else 0))
    fully_shard(model)
    load_gguf(model, file)
    expected = gguf_files.expected(Path(file))
    same = all(torch.equal(value, expected[name]) for name, value in values_of(model).items())
    export_gguf(model, out, source=file)
    return same


@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_load_their_slices_of_experts(dim: int, two: Ranks, tmp_path: Path) -> None:
    """Three experts on two ranks; or half of the rows of each, which end inside gate or up."""
    file = gguf_files.write(tmp_path / "in.gguf", LAYERS, experts=True)
    assert two.run(exports_experts, str(file), str(tmp_path / "out.gguf"), dim) == [True, True]
    assert filecmp.cmp(file, tmp_path / "out.gguf", shallow=False)


def test_experts_are_those_of_transformers(tmp_path: Path) -> None:
    """Gate before up in each expert. Its loader takes the sizes of experts from a config that it is given."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = {"moe_intermediate_size": gguf_files.SIZES["intermediate_size"], "num_experts": gguf_files.EXPERTS}
    config = Qwen3MoeConfig(
        vocab_size=gguf_files.VOCABULARY, num_hidden_layers=1, head_dim=64, **gguf_files.SIZES, **sizes
    )
    file = gguf_files.write(tmp_path / "in.gguf", experts=True, architecture="qwen3moe")
    other = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, config=config, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    quantize_as_stored(model, file)
    done = load_gguf(model, file, strict=False)
    assert {name.rpartition("self_attn.")[2] for name in done.missing} == {"q_norm.weight", "k_norm.weight"}
    expected = values_of(other)
    assert all(torch.equal(value, expected[name]) for name, value in values_of(model).items())


def exports_of_parts(file: str, out: str) -> bool:
    """On ranks that tensor parallelism cuts weights over: by rows inside heads, and by columns inside of rows."""
    import torch.distributed as dist
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    model, plan = gguf_files.skeleton(LAYERS), dict[str, ParallelStyle]()
    quantize_as_stored(model, file)
    for n in range(LAYERS):
        by_rows = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
        plan |= {f"model.layers.{n}.{name}": ColwiseParallel() for name in by_rows}
        plan[f"model.layers.{n}.mlp.down_proj"] = RowwiseParallel()
    parallelize_module(model, mesh_of(dist.get_world_size()), plan)
    load_gguf(model, file)
    expected = gguf_files.expected(Path(file))
    same = all(torch.equal(value, expected[name]) for name, value in values_of(model).items())
    export_gguf(model, out, source=file)
    return same


def test_parts_of_heads_and_of_rows_come_together(two: Ranks, tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "in.gguf", LAYERS, gguf_files.KINDS | {"ffn_down": "Q4_K"})
    assert two.run(exports_of_parts, str(file), str(tmp_path / "out.gguf")) == [True, True]
    assert filecmp.cmp(file, tmp_path / "out.gguf", shallow=False)


def tunes(file: str, out: str) -> list[float]:
    """Trains a little, exports, and returns some logits."""
    model = sharded(file, runs=True)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    export_gguf(model, out, source=file)
    with torch.no_grad():
        logits: list[float] = model.eval()(input_ids=IDS).logits.flatten().tolist()
    return logits


def test_a_tuned_model_is_what_transformers_loads(file: Path, two: Ranks, tmp_path: Path) -> None:
    (logits, _), out = two.run(tunes, str(file), str(tmp_path / "out.gguf")), tmp_path / "out.gguf"
    with torch.no_grad():
        assert theirs(out).eval()(input_ids=IDS).logits.flatten().tolist() == logits
    before, after = gguf_files.expected(file), gguf_files.expected(out)
    assert all(not torch.equal(before[name], after[name]) for name in before)


def refused(good: str, bad: str, out: str) -> list[str]:
    """What each of a load, a load of different files, and an export of different sources says, on this rank."""
    import torch.distributed as dist

    model, told = sharded(good), []
    before = values_of(model)
    first = dist.get_rank() == 0
    for file in (bad, good if first else bad):
        try:
            load_gguf(model, file)
        except LayoutError as error:
            told.append(str(error))
    try:
        export_gguf(model, f"{out}.gguf", source=good if first else bad)
    except LayoutError as error:
        told.append(str(error))
    try:
        export_gguf(model, f"{out}/below/a.gguf", source=good)
    except OSError as error:
        told.append(str(error))
    assert all(torch.equal(value, before[name]) for name, value in values_of(model).items())
    return told


def test_all_ranks_refuse_alike(file: Path, two: Ranks, tmp_path: Path) -> None:
    """What only one rank finds too; and nothing is left behind."""
    bad, taken = tmp_path / "bad.gguf", tmp_path / "taken"
    bad.write_bytes(file.read_bytes()[:-100])
    taken.write_bytes(b"")
    for told in two.run(refused, str(file), str(bad), str(taken)):
        assert len(told) == 4
        assert "is truncated" in told[0]
        assert told[1].startswith("rank 1: ")
        assert "is truncated" in told[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.gguf", "taken"]
