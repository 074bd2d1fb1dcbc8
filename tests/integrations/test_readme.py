"""README's blocks for other packages' trainers run as they are written, and a package that is missing is named."""

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
from torch import nn

import layoutc

pytestmark = pytest.mark.checkout
README = Path(__file__).parents[2] / "README.md"
PACKAGES = {"accelerate": "integrations", "lightning": "integrations", "transformers": "integrations"}
MODULES = {**PACKAGES, "torchtitan": "torchtitan"}


def block(package: str) -> str:
    """The one that names the package's module."""
    section = README.read_text(encoding="utf-8").partition("### In trainers")[2].partition("\n### ")[0]
    (found,) = [text for text in re.findall(r"```\w+\n(.*?)```", section, re.S) if f"integrations.{package}" in text]
    return str(found)


@pytest.mark.parametrize("package", MODULES)
def test_a_package_that_is_missing_is_named(package: str) -> None:
    """In a process where it can't be imported; the others may be missing as well."""
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(MODULES)}))\n"
        f"try: import layoutc.integrations.{package}\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert f"pip install 'layoutc[{MODULES[package]}]'" in done.stdout
    assert package in done.stdout


def test_torchtitan_takes_the_command_line() -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan: pip install 'layoutc[torchtitan]'")
    from torchtitan.config import ConfigManager

    words = shlex.split(block("torchtitan").replace("\\\n", " "))
    config = ConfigManager().parse_args(words[words.index("torchtitan.train") + 1 :])
    section = config.layoutc
    assert (section.recipe, section.use, section.param_filter) == ("nvfp4", "quantized", ["layers.*.weight"])
    assert section.products == "dequantize"
    assert config.model_spec.flavor == "8B"


def linear(*_: Any) -> nn.Module:
    """A model."""
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


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
