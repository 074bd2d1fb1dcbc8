#!/usr/bin/env bash
# Guess: transformers loads a W4A16_ASYM folder that it has written with compressed-tensors, as it loads W4A16.
# What happens: compressed-tensors packs zero points of 4 bits along rows, eight to an int32: (32, 2) for 256 rows of 256
# columns in groups of 128. The model that transformers prepares for the load has one zero point for each row, (256, 2),
# so from_pretrained raises for mismatched sizes. With run_compressed=False the folder loads. W4A16, which has no zero
# points, loads either way.
# Versions: compressed-tensors 0.20.0, transformers 5.23.0, torch 2.11.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'compressed-tensors==0.20.0' 'transformers==5.23.0' 'torch==2.11.0' 'numpy==2.2.6' \
    'accelerate==1.15.0'
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
from importlib.metadata import version

import torch
from compressed_tensors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors import safe_open
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

logging.disable(logging.WARNING)
print(*(f"{name} {version(name)}" for name in ("compressed-tensors", "transformers", "torch")))
sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
config, tokens = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128), torch.arange(16)[None]


def written(preset: str, folder: str) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    groups = {"group_0": scheme}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], format="pack-quantized"))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            blocks = module.weight.detach().unflatten(1, (-1, 128))
            scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


loads = {}
for preset in ("W4A16", "W4A16_ASYM"):
    folder = f"{sys.argv[1]}/{preset}"
    written(preset, folder)
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        shapes = {tuple(file.get_slice(key).get_shape()) for key in file.keys() if key.endswith("weight_zero_point")}
    for compressed in (True, False):
        options = {} if compressed else {"quantization_config": CompressedTensorsConfig(run_compressed=False)}
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
            loads[preset, compressed] = bool(model(tokens).logits.isfinite().all())
        except RuntimeError as error:
            loads[preset, compressed] = False
            assert "mismatched_sizes" in str(error), error
        print(preset, "compressed" if compressed else "run_compressed=False", "loads:", loads[preset, compressed], *shapes)
assert loads == {("W4A16", True): True, ("W4A16", False): True, ("W4A16_ASYM", True): False, ("W4A16_ASYM", False): True}
assert shapes == {(32, 2)}
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder"
