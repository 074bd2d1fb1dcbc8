"""PEFT's adapters merged into a quantized base and taken out again, as rollouts do at each sync: the base's bytes."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks, on
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc.runtime.dispatch import update_warnings
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft: pip install 'layoutc[integrations]'")

RECIPES = [
    name
    for name in import_module("layoutc.recipes").RECIPES
    if not import_module(f"layoutc.recipes.{name}.layout").LAYOUT.not_weights
]


def model_of(recipe: str, *, rows: int = 128) -> Any:
    """Two frozen linear layers in a recipe."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, rows, bias=False), nn.Linear(256, rows, bias=False)).requires_grad_(False)
    layoutc.quantize_(model, recipe)
    return model


def lora(**more: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["0", "1"], init_lora_weights=False, **more)


def adapted(model: Any, config: Any) -> Any:
    """A model with adapters that are not zero."""
    from peft import get_peft_model

    made: Any = get_peft_model(model, config)
    draw = torch.Generator().manual_seed(1)
    for param in made.parameters():
        if param.requires_grad:
            param.data.copy_(torch.randn(param.shape, generator=draw) * 0.05)
    return made


def weights_of(model: nn.Module) -> list[QuantizedTensor]:
    """This rank's parts of quantized weights."""
    locals_of = (getattr(param, "_local_tensor", param) for param in model.parameters())
    return [one for one in locals_of if isinstance(one, QuantizedTensor)]


def planes_of(model: nn.Module) -> list[Tensor]:
    """Copies of all their bytes."""
    return [plane.detach().clone().view(torch.uint8) for one in weights_of(model) for plane in one.planes().values()]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been said yet."""
    monkeypatch.setattr(update_warnings, "_warned", set())


@pytest.mark.sample(20)
@pytest.mark.filterwarnings("ignore:peft.tuners")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_base_comes_back_byte_for_byte(recipe: str) -> None:
    """Merged bytes are those of the sum, quantized again, each time the same."""
    model = adapted(model_of(recipe), lora())
    before = planes_of(model)
    weights = weights_of(model)
    layers = [one for one in model.modules() if hasattr(one, "lora_A")]
    sums = [w.dequantize() + one.get_delta_weight("default") for w, one in zip(weights, layers, strict=True)]
    quantize = import_module(f"layoutc.recipes.{recipe}").quantize
    for safe in (False, True):
        model.merge_adapter(safe_merge=safe)
        for weight, total in zip(weights_of(model), sums, strict=True):
            assert torch.equal(weight, quantize(total.detach()))
        assert not same(planes_of(model), before)
        model.unmerge_adapter()
        assert same(planes_of(model), before)


@pytest.mark.filterwarnings("ignore:peft.tuners")
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_delayed"])
def test_pair_after_pair_moves_no_byte_and_costs_no_memory_between(recipe: str) -> None:
    """Whose one amax let norms grow. Adapters change between: what comes back is kept, not computed."""
    model = adapted(model_of(recipe, rows=64), lora())
    before, trains = planes_of(model), [one for one in model.parameters() if one.requires_grad]
    for _ in range(4):
        model.merge_adapter()
        for one in trains:
            one.data.mul_(1.1)
        model.unmerge_adapter()
    assert same(planes_of(model), before)
    assert all(
        one.store.writes.base is not None and one.store.writes.base[0].weight is None for one in weights_of(model)
    )


def _of(name: str, **more: Any) -> Callable[[], Any]:
    def made() -> Any:
        import peft

        return getattr(peft, name)(**{"target_modules": ["0", "1"], **more})

    return made


TUNERS = {
    "dora": lambda: lora(use_dora=True),
    "ia3": _of("IA3Config", feedforward_modules=["1"], init_ia3_weights=False),
    "loha": _of("LoHaConfig", r=4, init_weights=False),
    "lokr": _of("LoKrConfig", r=4, init_weights=False),
    "oft": _of("OFTConfig", r=0, oft_block_size=8, init_weights=False),
    "hra": _of("HRAConfig", r=4, init_weights=False),
    "vera": _of("VeraConfig", r=4, init_weights=False),
    "adalora": _of("AdaLoraConfig", total_step=10, init_lora_weights=False),
    "fourierft": _of("FourierFTConfig", n_frequency=8),
    "c3a": _of("C3AConfig", block_size=64, init_weights=False),
    "randlora": _of("RandLoraConfig", r=4, init_weights=False),
    "hira": _of("HiraConfig", r=4, init_weights=False),
    "road": _of("RoadConfig", group_size=64, init_weights=False),
}


@pytest.mark.filterwarnings("ignore:peft.tuners", "ignore:Unmerge result can be inaccurate")
@pytest.mark.parametrize(
    ("recipe", "tuner"),
    [(("nvfp4", "fp8_current", "mxfp8_frozen", "nf4")[at % 4], name) for at, name in enumerate(TUNERS)],
)
def test_so_it_does_for_tuners_that_multiply_and_replace(recipe: str, tuner: str) -> None:
    model = adapted(model_of(recipe), TUNERS[tuner]())
    before = planes_of(model)
    merged = list[list[Tensor]]()
    for safe in (False, True, False):
        model.merge_adapter(safe_merge=safe)
        merged.append(planes_of(model))
        model.unmerge_adapter()
        assert same(planes_of(model), before)
    assert not same(merged[0], before)
    assert same(merged[0], merged[2])


@pytest.mark.filterwarnings("ignore:peft.tuners", "ignore:Already unmerged")
def test_several_adapters_copies_and_disabling() -> None:
    """All of them come out at once; a copy of a merged model has its base too; PEFT unmerges to disable adapters."""
    model = adapted(model_of("nvfp4"), lora())
    model.add_adapter("other", lora(use_dora=True))
    before = planes_of(model)
    model.merge_adapter(["default", "other"])
    both = planes_of(model)
    other = copy.deepcopy(model).to(torch.bfloat16)
    assert same(planes_of(other), both)
    other.unmerge_adapter()
    assert same(planes_of(other), before)
    with model.disable_adapter():
        model.get_base_model()[0](torch.ones(1, 256))
    assert same(planes_of(model)[:2], before[:2])
    model.unmerge_adapter()
    assert same(planes_of(model), before)


def test_a_model_that_is_merged_for_good_keeps_nothing_beside() -> None:
    """And its next adapters come out to what it is now."""
    model = adapted(model_of("fp8_block"), lora())
    with pytest.warns(
        UserWarning, match=r"peft.tuners.lora.layer merges adapters into quantized weights \(0.weight of"
    ):
        merged = model.merge_and_unload()
    del model
    gc.collect()
    assert all(one.store.writes.base is None for one in weights_of(merged))
    before = planes_of(merged)
    again = adapted(merged, lora())
    again.merge_adapter()
    assert not same(planes_of(again), before)
    again.unmerge_adapter()
    assert same(planes_of(again), before)


@pytest.mark.filterwarnings("ignore:peft.tuners")
def test_what_is_written_into_a_merged_weight_stays_and_is_named() -> None:
    """A load between: PEFT subtracts from it, and what that loses is named for each weight."""
    model = adapted(model_of("nvfp4"), lora())
    model.merge_adapter()
    loaded = torch.full((128, 256), 0.5)
    with torch.no_grad():
        for one in weights_of(model):
            one.copy_(loaded)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.unmerge_adapter()
    told = [str(one.message) for one in caught]
    assert [text.partition(" of shape")[0] for text in told] == [
        f"aten.sub_.Tensor updates {name}.weight" for name in ("0", "1")
    ]
    assert all("layoutc.merge_(weight, delta, keep_base=True)" in text for text in told)


def test_arithmetic_in_place_is_named_each_time_for_each_weight() -> None:
    """Not once in a process; by lists too."""
    model = model_of("fp8_current")
    weights = list(model.parameters())
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"aten.sub_.Tensor updates 1.weight of shape") as caught:
            weights[1].sub_(torch.ones(128, 256))
        assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"_foreach_add_.List updates 0.weight of .*, 1.weight of .* in place"):
        torch._foreach_add_(weights, [torch.ones(128, 256)] * 2)


# ------------------------------------------------------------------------------------------------------------- by hand
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_merge_has_an_undo(recipe: str) -> None:
    weight = model_of(recipe)[0].weight
    before, delta = planes_of(nn.ParameterList([weight])), torch.randn(128, 256) * 0.05
    total = weight.dequantize() + delta
    error = layoutc.merge_(weight, delta, keep_base=True)
    assert torch.equal(weight, import_module(f"layoutc.recipes.{recipe}").quantize(total))
    assert layoutc.merge_(weight, delta, keep_base=True) > 0 < error
    layoutc.unmerge_(weight)
    assert same(planes_of(nn.ParameterList([weight])), before)
    layoutc.unmerge_(weight)  # nothing is left to take back
    assert same(planes_of(nn.ParameterList([weight])), before)
    layoutc.merge_(weight, delta, keep_base=True)
    layoutc.merge_(weight, delta)
    with pytest.raises(
        LayoutError, match=r"0.weight .*has kept nothing from before a merge: call layoutc.merge_\(weight, delta, keep"
    ):
        layoutc.unmerge_(weight)
    with pytest.raises(TypeError, match=r"unmerge_ takes from quantized weights; .* write weight.sub_\(delta\)"):
        layoutc.unmerge_(torch.ones(2, 2))
    with pytest.raises(TypeError, match=r"write weight\.add_\(delta\)"):
        layoutc.merge_(torch.ones(2, 2), torch.ones(2, 2))


@on("two")
def test_merged_adapters_stream_from_shards() -> None:
    """Merged LoRA, by the base's names: the bytes of one process, as the engine's files hold them."""
    from layoutc.checkpoint import stream_export
    from layoutc.integrations.peft import merge, merged_state

    update_warnings._warned.add("merge")
    alone, model = (adapted(model_of("fp8_block"), lora()) for _ in range(2))
    fully_shard(model)
    with pytest.raises(ValueError, match="is sharded: save the adapters"):
        merge(model)
    with pytest.raises(ValueError, match=r"0 has adapters that are not merged, 2 layers in all: merge_adapter"):
        merged_state(model)
    with pytest.raises(LayoutError, match=r"0\.base_layer\.weight is the base of a layer with adapters\. Merge them"):
        list(stream_export(model, files="deepseek"))
    model.merge_adapter()
    found = dict(stream_export(merged_state(model), files="deepseek"))
    model.unmerge_adapter()
    expected = dict(stream_export(alone.merge_and_unload(), files="deepseek"))
    assert {"0.weight", "1.weight"} < {*found}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), one.view(torch.uint8)) for name, one in expected.items())


def merges_or_says(name: str, safe: bool) -> tuple[bool, bool, bool]:
    """Of a tuner in shards: whether the merge warns that torch drops
    it, whether bytes moved on any rank, and whether `merged_state` refuses."""
    from layoutc.integrations.peft import merged_state

    update_warnings._warned.clear()
    model = adapted(model_of("mxfp8_frozen", rows=256), TUNERS[name]() if name != "lora" else lora())
    fully_shard(model)
    before = planes_of(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.merge_adapter(safe_merge=safe)
    warned = any("computes merged values of 0.weight of shape" in str(one.message) for one in caught)
    moved = not same(planes_of(model), before)
    try:
        merged_state(model)
    except ValueError as error:
        return warned, moved, "0 is sharded, and nothing was merged into its weight, 2 layers in all" in str(error)
    return warned, moved, False


@pytest.mark.parametrize(
    ("tuner", "safe", "merges"),
    [
        ("lora", False, True),
        ("lora", True, False),
        ("dora", False, False),
        ("ia3", False, False),
        ("hira", False, True),
    ],
)
def test_a_merge_that_torch_drops_in_shards_is_said(two: Ranks, tuner: str, safe: bool, merges: bool) -> None:
    """And `merged_state` refuses what would be the base's weights; HiRA computes values and writes them in place."""
    assert two.run(merges_or_says, tuner, safe) == [(tuner == "hira" or not merges, merges, not merges)] * 2


def test_merged_adapters_are_exported_by_the_names_of_the_base(tmp_path: Path) -> None:
    """The bytes of a model that is merged for good."""
    from safetensors.torch import load_file

    from layoutc.checkpoint import export_safetensors
    from layoutc.integrations.peft import merged_state

    update_warnings._warned.add("merge")
    alone, model = (adapted(model_of("fp8_block"), lora()) for _ in range(2))
    model.merge_adapter()
    export_safetensors(merged_state(model), tmp_path / "merged", files="deepseek")
    export_safetensors(alone.merge_and_unload(), tmp_path / "alone", files="deepseek")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "alone"))
    assert {"0.weight", "1.weight"} < found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), one.view(torch.uint8)) for name, one in expected.items())


def of_experts(recipe: str) -> Any:
    """A model of transformers with quantized experts, stacked."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(vocab_size=96, num_hidden_layers=1, **sizes)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layoutc.quantize_(model, recipe, param_filter=["*_proj.weight", "*.experts.*"], keep_values=False)
    return model.requires_grad_(False)


@pytest.mark.filterwarnings("ignore:peft.tuners", "ignore:.*engines join", "ignore:.*target_parameters")
@pytest.mark.parametrize(
    ("recipe", "files", "by"),
    [("nvfp4_modelopt_experts", "modelopt", "add_adapter"), ("fp8_block", "deepseek", "get_peft_model")],
)
def test_adapters_of_experts_and_by_transformers_merge_and_are_exported(
    recipe: str, files: str, by: str, tmp_path: Path
) -> None:
    """As rollouts do at each sync, by transformers' own path and by PEFT's: adapters of stacked experts lie in layers
    in layers; all names are the base's, and the bytes those of the sums."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer

    from layoutc.checkpoint import export_safetensors, load_safetensors, stream_export
    from layoutc.integrations.peft import merge, merged_state

    names = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]
    how = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
    model, base = of_experts(recipe), of_experts(recipe)
    wrapped: Any = adapted(model, how) if by == "get_peft_model" else model
    if wrapped is model:
        model.add_adapter(how)
    layers = [one for one in model.modules() if isinstance(one, BaseTunerLayer)]
    before, sums = planes_of(model), dict[str, Tensor]()
    for layer in layers:
        for param in (one for one in layer.parameters() if one.requires_grad):
            torch.nn.init.normal_(param, std=0.05)
        key = getattr(layer, "parameter_name", "weight")
        weight, delta = getattr(layer.get_base_layer(), key), layer.get_delta_weight("default")
        sums["q_proj" if key == "weight" else key] = weight.dequantize() + delta
    with pytest.raises(ValueError, match=r"adapters that are not merged, 3 layers in all: merge"):
        merged_state(wrapped)
    for _ in range(3):
        for layer in layers:
            layer.merge()
        merged = merged_state(wrapped)
        assert merged.keys() == base.state_dict().keys()
        for name, total in sums.items():
            found = next(one for key, one in merged.items() if f"{name}" in key.removesuffix(".weight").split("."))
            assert torch.equal(found, import_module(f"layoutc.recipes.{recipe}").quantize(total.detach()))
        streamed = {name: one.clone() for name, one in stream_export(merged, files=files)}
        for layer in reversed(layers):
            layer.unmerge()
        assert same(planes_of(model), before)
    assert streamed.keys() == {name for name, _ in stream_export(base, files=files)}
    for layer in layers:
        layer.merge()
    export_safetensors(merged_state(wrapped), tmp_path / "out", files=files)
    load_safetensors(base, tmp_path / "out", files=files)
    assert same(planes_of(base), planes_of(model))
    if by == "get_peft_model":
        wrapped.unmerge_adapter()
        assert merge(wrapped)[1].keys() == {*names, "model.layers.0.self_attn.q_proj.weight"}
    else:
        with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM has adapters by its own add_adapter"):
            merge(model)


@pytest.mark.filterwarnings("ignore:.*target_parameters")
@on("two")
def test_experts_in_shards_come_back() -> None:
    """Adapters of stacked experts too: as in one process."""
    recipe = "nvfp4_modelopt_experts"
    from peft import LoraConfig

    from layoutc.integrations.peft import merged_state

    names = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]
    how = {"target_modules": ["q_proj"], "target_parameters": names, "init_lora_weights": False}
    update_warnings._warned.add("merge")
    alone, model = (adapted(of_experts(recipe), LoraConfig(r=4, **how)) for _ in range(2))
    fully_shard(model)
    before = planes_of(model)
    for one in (alone, model):
        one.merge_adapter()
    states = merged_state(alone), merged_state(model)
    names += ["model.layers.0.self_attn.q_proj.weight"]
    assert all(torch.equal(states[0][name], states[1][name].full_tensor()) for name in names)  # type: ignore[attr-defined]
    assert not same(planes_of(model), before)
    model.unmerge_adapter()
    assert same(planes_of(model), before)


def test_merged_adapters_are_written_into_gguf_files(tmp_path: Path) -> None:
    """By the names of the base, and with the bytes of the merge; the wrapped model is refused."""
    import gguf_files
    from peft import LoraConfig

    from layoutc.checkpoint import export_gguf, load_gguf, quantize_as_stored
    from layoutc.integrations.peft import merged_state

    file, out = gguf_files.write(tmp_path / "in.gguf", 1), tmp_path / "out.gguf"

    def base() -> Any:
        made = gguf_files.skeleton()
        quantize_as_stored(made, file)
        load_gguf(made, file)
        return made.requires_grad_(False)

    how = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, again = adapted(base(), how), base()
    before = planes_of(model)
    with pytest.raises(LayoutError, match="is the base of a layer with adapters"):
        export_gguf(model, out, source=file)
    with pytest.warns(UserWarning, match="merges adapters into quantized weights"):
        model.merge_adapter()
    export_gguf(merged_state(model), out, source=file)
    load_gguf(again, out)
    assert same(planes_of(again), planes_of(model))
    assert not same(planes_of(again), before)


@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4"])
@on("two")
def test_a_base_in_shards_comes_back_too(recipe: str) -> None:
    """Of cuts inside blocks as well, with rows of other ranks. PEFT's LoRA, and `merge_`: merged as in one process; and
    each rank's own bytes."""
    update_warnings._warned.add("merge")
    alone, model = (adapted(model_of(recipe, rows=96), lora()) for _ in range(2))
    fully_shard(model)
    before = planes_of(model)
    wholes = [param for param in model.parameters() if isinstance(param._local_tensor, QuantizedTensor)]
    for _ in range(3):
        alone.merge_adapter()
        model.merge_adapter()
        for weight, one in zip(wholes, weights_of(alone), strict=True):
            assert torch.equal(weight.full_tensor(), one)
        assert not same(planes_of(model), before)
        alone.unmerge_adapter()
        model.unmerge_adapter()
        assert same(planes_of(model), before)
    delta = torch.randn(96, 256, generator=torch.Generator().manual_seed(2)) * 0.05
    for weight, one in zip(wholes, weights_of(alone), strict=True):
        error = layoutc.merge_(one, delta, keep_base=True)
        assert layoutc.merge_(weight, delta, keep_base=True) == pytest.approx(error, rel=1e-9)
        layoutc.unmerge_(weight)
    assert same(planes_of(model), before)
