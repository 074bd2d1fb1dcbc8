#!/usr/bin/env bash
# Guess: QuantizedHuggingFaceStorageReader of torch.distributed.checkpoint, pointed at an FP8 folder whose scales it does
# not know, raises, as a loader would that is named for quantized files.
# What happens: a weight is dequantized only if the index has `*.weight_scale_inv` (or `*_scales`) for it. FP8 weights with
# any other name of their scales, `weight_scale` of compressed-tensors and ModelOpt, or `gate_up_proj_scale_inv` of stacked
# experts in transformers 5, arrive as their bare codes: a weight of deviation 0.02 has one of about 100, and no error or
# warning. The size of blocks is not read, either, from config.json or from the shape of the scales: in blocks of 64x64
# the scales of other blocks are taken, a relative error of 0.1 in place of 0.026.
# Versions: torch 2.13.0, safetensors 0.8.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.3.5' 'safetensors==0.8.0'
cat > "$folder/program.py" <<'PROGRAM'
import json
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

folder = Path(sys.argv[1], "model")
folder.mkdir()
print("torch", torch.__version__)


def load(tensors, name, shape):
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    target = {name: torch.empty(shape)}
    dcp.load(target, storage_reader=QuantizedHuggingFaceStorageReader(str(folder)), no_dist=True)
    return target[name]


def quantized(weight, size):
    m, k = weight.shape
    tiles = weight.view(m // size, size, k // size, size)
    scale = tiles.abs().amax((1, 3)) / 448
    return (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(m, k), scale


def error(loaded):
    return round(((loaded - weight).norm() / weight.norm()).item(), 3)


torch.manual_seed(0)
weight = torch.randn(256, 256) * 0.02
codes, scale = quantized(weight, 128)
loaded = load({"layer.weight": codes, "layer.weight_scale_inv": scale}, "layer.weight", (256, 256))
print("weight_scale_inv: relative error", error(loaded))
assert error(loaded) < 0.03

loaded = load({"layer.weight": codes, "layer.weight_scale": scale}, "layer.weight", (256, 256))
print("weight_scale: deviation of the loaded weight", round(loaded.std().item(), 1), "of", round(weight.std().item(), 3))
assert torch.equal(loaded, codes.float())

stacked = {"experts.gate_up_proj": codes[None].contiguous(), "experts.gate_up_proj_scale_inv": scale[None].contiguous()}
loaded = load(stacked, "experts.gate_up_proj", (1, 256, 256))
print("stacked experts: deviation", round(loaded.std().item(), 1))
assert torch.equal(loaded[0], codes.float())

codes, scale = quantized(weight, 64)
loaded = load({"layer.weight": codes, "layer.weight_scale_inv": scale}, "layer.weight", (256, 256))
print("blocks of 64x64: relative error", error(loaded))
assert error(loaded) > 0.09
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder"
