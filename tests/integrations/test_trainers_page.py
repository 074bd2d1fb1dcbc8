"""The blocks of docs/pages/trainers.md run as they are written, and a package that is missing is named."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import forget
from harness import Ranks
from torch import nn

import layoutc
from layoutc import checkpoint

pytestmark = pytest.mark.checkout
PAGE = Path(__file__).parents[2] / "docs" / "pages" / "trainers.md"
PACKAGES = dict.fromkeys(("accelerate", "lightning", "peft", "transformers"), "integrations")
TITLED = re.compile(r'```python title="([\w.]+)"\n(.*?)```', re.S)
MODULES = {**PACKAGES, "torchtitan": "torchtitan"}


def block(package: str) -> str:
    """The one that names the package's module."""
    page = PAGE.read_text(encoding="utf-8")
    (found,) = [text for text in re.findall(r"```\w+\n(.*?)```", page, re.S) if f"integrations.{package}" in text]
    return str(found)


def test_diffusers_reads_what_the_page_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers: pip install diffusers")
    kind = diffusers.DiTTransformer2DModel
    model = kind(
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=1,
        sample_size=8,
        num_embeds_ada_norm=8,
        norm_num_groups=8,
    )
    layoutc.quantize_(model, "mxfp8", param_filter=["*.attn1.*.weight"])
    monkeypatch.chdir(tmp_path)
    (found,) = [
        text
        for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
        if "save_config" in text
    ]
    exec(found, {"checkpoint": checkpoint, "model": model, "torch": torch, "Path": Path})
    read = dict(kind.from_pretrained("out").named_parameters())
    for name, param in model.named_parameters():
        values = param.dequantize() if hasattr(param, "planes") else param
        assert torch.equal(read[name], values.bfloat16().float())


@pytest.mark.thorough
def test_packages_that_are_missing_are_named() -> None:
    """In a process where none of them can be imported, and torch once."""
    program = (
        f"import importlib, sys; sys.modules.update(dict.fromkeys({sorted(MODULES)}))\n"
        f"for package in {list(MODULES)}:\n"
        "    try: importlib.import_module(f'layoutc.integrations.{package}')\n"
        "    except ModuleNotFoundError as error: print(package, '|', error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=True)
    told = dict(line.split(" | ", 1) for line in done.stdout.splitlines())
    assert list(told) == list(MODULES)
    for package, message in told.items():
        assert f"pip install 'layoutc[{MODULES[package]}]'" in message
        assert package in message.replace(f"layoutc[{MODULES[package]}]", "")


def test_torchtitan_takes_the_command_lines() -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan: pip install 'layoutc[torchtitan]'")
    from torchtitan.config import ConfigManager

    found = []
    for line in titan_lines():
        config = ConfigManager().parse_args(line)
        section = config.layoutc
        found.append(
            (config.model_spec.name, config.model_spec.flavor, section.recipe, section.use, section.param_filter)
        )
        assert section.products == "dequantize"
    experts = ["layers.*.w?_*", "layers.*.attention.*.weight"]
    assert found == [
        ("llama3", "debugmodel", "mxfp8", "quantized", ["layers.*.weight"]),
        ("qwen3", "debugmodel_moe", "mxfp8", "cast_on_gather", experts),
    ]


def titan_lines() -> list[list[str]]:
    """The arguments of torchtitan's program in each of the page's commands."""
    commands = block("torchtitan").replace("\\\n", " ").splitlines()
    return [(words := shlex.split(line))[words.index("torchtitan.train") + 1 :] for line in commands]


def test_torchtitan_trains_by_them(one: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the page's tokenizer and text, which have all that the debug models ask for; short, and on a CPU."""
    pytest.importorskip("torchtitan", reason="needs torchtitan: pip install 'layoutc[torchtitan]'")
    import titan

    program = dict(TITLED.findall(PAGE.read_text(encoding="utf-8")))["write_assets.py"]
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=900)
    for line in titan_lines():
        placed = [str(tmp_path / word) if word.startswith("assets") else word for word in line]
        folder = ["--dump-folder", str(tmp_path / "out")]
        (found,) = one.run(titan.losses, [*placed, *folder, *titan.SHORT], seconds=300.0)
        assert len(found) == 2
        assert all(4.0 < loss < 9.0 for loss in found)


def linear(*_: Any) -> nn.Module:
    """A model."""
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


@pytest.mark.thorough
def test_accelerate_runs_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'layoutc[integrations]'")
    monkeypatch.chdir(tmp_path)
    forget()
    loader = torch.utils.data.DataLoader(torch.randn(4, 32), batch_size=2)
    names: dict[str, Any] = {"accelerator": accelerate.Accelerator(cpu=True), "model": linear(), "loader": loader}
    text = block("accelerate")
    assert "\n...\n" in text
    steps = "for x in loader:\n    accelerator.backward(model(x).square().mean())\n    optimizer.step()"
    exec(text.replace("\n...\n", f"\n{steps}\n"), {"torch": torch, **names})
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.thorough
def test_the_program_for_accelerate_trains_and_exports(tmp_path: Path) -> None:
    """On two ranks, as the page starts it."""
    if find_spec("accelerate") is None:
        pytest.skip("needs accelerate: pip install 'layoutc[integrations]'")
    page = PAGE.read_text(encoding="utf-8")
    name = "train_accelerate.py"
    (tmp_path / name).write_text(dict(TITLED.findall(page))[name], encoding="utf-8")
    (command,) = re.findall(rf"^\.venv/bin/torchrun (.* {name})$", page, re.M)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = subprocess.run(
        [*ranks, *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (loss,) = re.findall(r"^nvfp4: loss (\d\.\d+)$", done.stdout, re.M)
    assert float(loss) < 2.0  # of values of variance 1, and their neighbours: what a model that does nothing has
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_lightning_takes_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module and callback; tests/integrations/test_lightning.py trains so on ranks."""
    if find_spec("lightning") is None:
        pytest.skip("needs lightning: pip install 'layoutc[integrations]'")
    from lightning.pytorch import LightningModule

    import layoutc.integrations.lightning as ours

    made: list[dict[str, Any]] = []
    monkeypatch.setattr(ours, "shard", lambda model, mesh, **options: made.append(options) or model)
    names: dict[str, Any] = {"layoutc": layoutc, "torch": torch, "LightningModule": LightningModule}
    names |= {"Transformer": linear, "config": None, "Block": nn.Linear, "ModelParallelStrategy": SimpleNamespace}
    names["Trainer"] = SimpleNamespace
    exec(block("lightning"), names)
    module = names["Mine"]()
    module.model, module._device_mesh = None, object()
    module.configure_model()
    assert made == [{"recipe": "nvfp4", "blocks": nn.Linear}]
    assert isinstance(module.configure_optimizers(), layoutc.MasterWeights)
    assert isinstance(names["trainer"].callbacks[0], ours.LayoutcCallback)


@pytest.mark.thorough
def test_transformers_runs_the_block(tmp_path: Path) -> None:
    for package in ("transformers", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'layoutc[integrations]'")
    from test_transformers import Texts
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    forget()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, use_cache=False, **sizes))
    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
    names: dict[str, Any] = {"layoutc": layoutc, "torch": torch, "model": model, "arguments": arguments}
    names["Trainer"] = lambda *a, **options: Trainer(*a, train_dataset=Texts(), **options)
    exec(block("transformers"), names)
    trainer = names["trainer"]
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, layoutc.MasterWeights)
    trainer.save_model(str(tmp_path / "saved"))
    LlamaForCausalLM.from_pretrained(tmp_path / "saved")


def test_peft_runs_the_block(tmp_path: Path, one: Ranks) -> None:
    for package in ("transformers", "peft"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'layoutc[integrations]'")
    one.run(runs_the_block_of_peft, str(tmp_path))


def runs_the_block_of_peft(folder: str) -> None:
    """In a group of one process; then what the text below it says."""
    from peft import PeftModel
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    def llama() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, use_cache=False, **sizes))

    ids = torch.arange(16).view(1, -1)
    step = "model(input_ids=ids, labels=ids).loss.backward()\noptimizer.step()"
    names: dict[str, Any] = {"layoutc": layoutc, "torch": torch, "model": llama(), "ids": ids}
    names |= {"fully_shard": fully_shard, "get_model_state_dict": get_model_state_dict}
    text = block("peft").replace("\n...\n", f"\n{step}\n").replace('"adapters"', repr(f"{folder}/adapters"))
    assert step in text
    exec(text, names | {"StateDictOptions": StateDictOptions}, names)
    base = llama()
    layoutc.quantize_(base, "mxfp8_frozen", param_filter=["model.layers.*_proj.weight"])
    merged, errors = names["merge"](PeftModel.from_pretrained(base, f"{folder}/adapters"))
    assert len(errors) == 7
    assert merged.model.layers[0].mlp.up_proj.weight.LAYOUT.name == "mxfp8_frozen"
