"""transformers.Trainer with a tiny Llama of its own making: both uses train as one process does, to the bit."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import product_modes
import pytest
import torch
import torch.distributed as dist
from engines import forget, use_fsdp2
from harness import Ranks
from models import make_uneven
from torch import Tensor
from torch.distributed.tensor import DTensor

import layoutc
from layoutc.runtime.product_mode import Mode

pytestmark = [  # looked for, not imported, which takes seconds of every run
    pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}: pip install 'layoutc[integrations]'")
    for name in ("transformers", "accelerate")
]

STEPS = 3


def llama(recipe: str, use: str, uneven: bool = False, share_amax: Any = False) -> Any:
    """Two layers and 64 columns, nothing downloaded; linear layers but the head in the recipe."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, use_cache=False, **sizes))
    if uneven:
        make_uneven(model)
    convert = layoutc.quantize_ if use == "quantized" else layoutc.cast_on_gather_
    layers: Any = {"filter_fn": lambda m, name: isinstance(m, torch.nn.Linear) and "layers" in name}
    chosen = convert(model, recipe, share_amax=share_amax, **layers)
    assert len(chosen) == 14
    return model


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Token ids."""

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 96, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def trainer(model: Any, use: str, sharded: bool, folder: str, steps: int = 0, callback: Any = None) -> Any:
    """Two texts a step: one on each of two ranks, or one after the other. steps: with a checkpoint after two."""
    from transformers import Trainer, TrainingArguments

    forget()
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1 if dist.is_initialized() else 2,
        max_steps=steps or STEPS,
        learning_rate=1e-2,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="steps" if steps else "no",
        save_steps=2,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
    )
    options: dict[str, Any] = {}
    if callback is not None:
        options["callbacks"] = [callback(model)]
    if use == "quantized":
        options["optimizers"] = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2), None
    made = Trainer(model=model, args=arguments, train_dataset=Texts(), **options)
    if sharded:
        use_fsdp2(made.accelerator, "LlamaDecoderLayer")
        made.is_fsdp_enabled = True
    return made


def values(param: Tensor) -> Tensor:
    """All of a parameter, as plain values: shards that cut blocks are put together after they are dequantized."""
    held: Any = param._local_tensor if isinstance(param, DTensor) else param.data
    plain: Tensor = getattr(held, "plain", held.dequantize() if hasattr(held, "planes") else held)
    if not isinstance(param, DTensor):
        return plain
    options: Any = {"run_check": False, "shape": param.shape, "stride": param.stride()}
    return DTensor.from_local(plain, param.device_mesh, param.placements, **options).full_tensor()


def trained(
    recipe: str, use: str, sharded: bool, products: Mode = "dequantize", on_gather: bool = False
) -> tuple[list[float], list[list[float]]]:
    """Losses as logged, and what every parameter is after the last step."""
    model = llama(recipe, use)
    if on_gather:
        layoutc.set_products_(model, "dequantize", dequantize="gather")
    with tempfile.TemporaryDirectory() as folder, product_modes.products(products):
        made = trainer(model, use, sharded, folder)
        made.train()
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    if sharded:
        assert all(isinstance(param, DTensor) for param in model.parameters())
    return losses, [values(param).flatten().tolist() for param in model.parameters()]


@pytest.mark.parametrize(
    ("recipe", "use", "products", "on_gather"),
    [
        ("nvfp4", "quantized", "dequantize", False),
        ("mxfp8", "cast", "dequantize", False),
        ("fp8_block", "cast", "reference", False),
        ("nvfp4", "quantized", "dequantize", True),
    ],
)
def test_a_trainer_trains_as_one_process(two: Ranks, recipe: str, use: str, products: Mode, on_gather: bool) -> None:
    """On two ranks, sharded by FSDP2 and replicated by DDP, against two texts one after the other."""
    losses, expected = trained(recipe, use, False, products)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    for sharded in (True,) if on_gather else (True, False):
        for found, held in two.run(trained, recipe, use, sharded, products, on_gather):
            assert found == losses
            assert held == expected


@pytest.mark.parametrize("kind", ["GptOss", "Mixtral"])
def test_experts_of_transformers_multiply_in_low_precision(kind: str) -> None:
    """By rows and by columns, as the modules themselves read them: nothing is dequantized unasked."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96, "num_attention_heads": 4, "head_dim": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=2, num_key_value_heads=2, **sizes, **experts)
    config._experts_implementation = "grouped_mm"
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    names = layoutc.quantize_(model, "fp8_block", param_filter=["*.experts.*_proj"])
    assert len(names) == 4
    found = layoutc.coverage(model)
    assert {row.name for row in found if row.kind == "quantized"} == set(names)
    assert 0.8 < found.share < 1
    by_columns = model.model.layers[0].mlp.experts.gate_up_proj.shape == (4, 64, 256)
    assert by_columns == (kind == "GptOss")
    tokens = torch.randint(0, 96, (2, 32))
    before, dequantized = layoutc.products_without_kernel(), layoutc.implicit_dequantizes()
    losses = []
    for mode in ("dequantize", "reference"):
        product_modes.set_products_(model, mode)  # type: ignore[arg-type]
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] != losses[1]
    assert layoutc.implicit_dequantizes() == dequantized
    counted = layoutc.products_without_kernel() - before
    assert {name.split(":")[0]: number for name, number in counted.items()} == {
        f"fp8_block {product}": 4 for product in ("forward", "grad_input", "grad_weight")
    }
    assert all(model.get_parameter(name).grad is not None for name in names)


def saves(recipe: str, use: str, folder: str, part: int) -> tuple[list[float], list[float]]:
    """Losses of two steps, then of two more by a trainer of its own; and what a saved model generates from."""
    from transformers import LlamaForCausalLM

    from layoutc.integrations.transformers import LayoutcCallback

    model = llama(recipe, use)
    made = trainer(model, use, dist.is_initialized(), f"{folder}/run", steps=2 * (part + 1), callback=LayoutcCallback)
    made.train(resume_from_checkpoint=f"{folder}/run/checkpoint-2" if part else None)
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    model.save_pretrained(f"{folder}/model-{part}")
    if dist.is_initialized():
        dist.barrier()
    loaded, told = LlamaForCausalLM.from_pretrained(f"{folder}/model-{part}", output_loading_info=True)
    assert not any(told.values()), told
    found = loaded.generate(torch.arange(8).view(1, -1), max_new_tokens=4, do_sample=False)
    assert found.shape == (1, 12)
    whole = [values(param) for param in model.parameters()]
    for held, param in zip(whole, loaded.parameters(), strict=True):
        assert torch.equal(held, param.detach())
    return losses, [float(param.sum()) for param in whole]


@pytest.mark.parametrize(("recipe", "use"), [("nvfp4", "quantized"), ("fp8_current", "cast")])
def test_a_trainer_saves_resumes_and_exports(two: Ranks, tmp_path: Path, recipe: str, use: str) -> None:
    """On two ranks as on one."""
    curves = []
    for part in range(2):
        alone, sums = saves(recipe, use, str(tmp_path / "one"), part)
        for losses, found in two.run(saves, recipe, use, str(tmp_path / "two"), part):
            assert losses == alone
            assert found == sums
        curves.append(alone)
    assert curves[1][:2] == curves[0]
    assert len(curves[1]) == 4


@pytest.mark.thorough
def test_a_run_that_resumes_in_one_process_goes_on_to_the_bit(tmp_path: Path) -> None:
    """From a checkpoint of plain values, and of masters."""
    from layoutc.integrations.transformers import LayoutcCallback

    curves = []
    for steps, folder, start in ((4, "straight", None), (2, "parts", None), (4, "parts", "parts/checkpoint-2")):
        model = llama("nvfp4", "quantized", uneven=True)
        made = trainer(model, "quantized", False, str(tmp_path / folder), steps, LayoutcCallback)
        made.train(resume_from_checkpoint=start and str(tmp_path / start))
        curves.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
    assert curves[2] == curves[0]
    assert len(curves[0]) == 4


def test_the_optimizer_has_its_own_fused(tmp_path: Path) -> None:
    """Weights that engines join share an amax by another name, so that Trainer hands AdamW the one that it has."""
    from layoutc.integrations.transformers import masters

    model = llama("fp8_current", "quantized", share_amax=[["q_proj", "k_proj", "v_proj"]])
    made = trainer(model, "cast", False, str(tmp_path))
    made.optimizer_cls_and_kwargs = (masters(torch.optim.AdamW), {"lr": 1e-2, "fused": True})
    made.train()
    assert all(group["fused"] for group in made.optimizer.optimizer.param_groups)
    attention = model.model.layers[0].self_attn
    q, k, v = (getattr(attention, f"{one}_proj").weight.data for one in "qkv")
    assert q.fused == k.fused == v.fused is not None
    assert torch.equal(q.planes()["rowwise_scale"], k.planes()["rowwise_scale"])
    assert torch.equal(q.planes()["rowwise_scale"], v.planes()["rowwise_scale"])


@pytest.mark.thorough
def test_the_optimizer_may_be_set_after_construction(tmp_path: Path) -> None:
    """As for trainers derived from this one whose constructors do not take it, such as trl's."""
    from layoutc.integrations.transformers import masters

    curves = []
    for late in (True, False):
        model = llama("nvfp4", "quantized")
        made = trainer(model, "cast", False, str(tmp_path))
        if late:
            made.optimizer_cls_and_kwargs = (masters(torch.optim.AdamW), {"lr": 1e-2})
        else:  # Trainer's own weight decay is 0
            made.optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2, weight_decay=0.0)
        made.train()
        assert isinstance(made.optimizer.optimizer, layoutc.MasterWeights)
        curves.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
    assert curves[0] == curves[1]
    assert len(curves[0]) == STEPS
