#!/usr/bin/env bash
# Guess: torch.distributed.checkpoint's QuantizedHuggingFaceStorageReader, which has code for MXFP4 as in gpt-oss, gives
# all values of `*_blocks`, or raises.
# What happens: it fills the first G columns of each row, G being the number of groups in a row (1/32 of the values), and
# leaves the rest of the target as it was, without an error or a warning. The tensor's size is corrected from groups and
# bytes, (experts, rows, G, 16), to values, (experts, rows, 32 * G); the size of the piece in the file, with which requests
# are intersected, is not, and its third number is G. The values that do arrive are right. FP8 in blocks of 128x128 is
# read whole by the same reader.
# Versions: torch 2.13.0 (2.14.1 does the same), safetensors 0.8.0.
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
    target = {name: torch.full(shape, torch.nan)}
    dcp.load(target, storage_reader=QuantizedHuggingFaceStorageReader(str(folder)), no_dist=True)
    return target[name]


torch.manual_seed(0)
experts, rows, groups = 2, 8, 4
codes = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8)
scales = torch.randint(120, 128, (experts, rows, groups), dtype=torch.uint8)
name = "model.layers.0.mlp.experts.down_proj"
loaded = load({f"{name}_blocks": codes, f"{name}_scales": scales}, f"{name}_blocks", (experts, rows, groups * 32))

half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
table = torch.cat([half, -half])
values = table[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(-2) * torch.exp2(scales - 127.0)[..., None]
values = values.flatten(-2)
written = ~loaded.isnan()
print("MXFP4: columns written, of", groups * 32, ":", written.all((0, 1)).sum().item())
assert written[..., :groups].all() and not written[..., groups:].any()
assert torch.equal(loaded[..., :groups], values[..., :groups])

weight = torch.randn(256, 256).to(torch.float8_e4m3fn)
scale = torch.rand(2, 2)
loaded = load({"layer.weight": weight, "layer.weight_scale_inv": scale}, "layer.weight", (256, 256))
print("FP8 in blocks: values written, of", weight.numel(), ":", (~loaded.isnan()).sum().item())
blocks = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
assert torch.equal(loaded, weight.float() * blocks)
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder"
