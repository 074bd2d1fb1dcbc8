#!/usr/bin/env bash
# Guess: compressed-tensors' generate_gparam, whose argument dtype is torch.float32 by default, computes NVFP4's global
# scale, 448 * 6 / amax, in fp32.
# What happens: it divides in the dtype of the extremes, which is the weight's, and casts the result. Of bf16 weights the
# fp32 scale has the 8 bits of bf16. Of fp16 weights whose largest magnitude is below 2688 / 65504 = 0.041 the quotient is
# infinite, which becomes 1.0, "no global scaling", without a warning: the E4M3 scales of blocks, amax / 6, are then
# among its subnormal numbers. Weights of standard deviation 0.006 have a relative error of 0.133 in place of 0.096, and
# of 0.001 all of them become 0.
# Versions: compressed-tensors 0.20.0, torch 2.11.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'compressed-tensors==0.20.0' 'torch==2.11.0' 'numpy==2.2.6'
cat > "$folder/program.py" <<'PROGRAM'
from importlib.metadata import version

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

print("compressed-tensors", version("compressed-tensors"), "torch", torch.__version__)
by = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
normal = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
found, errors = {}, {}
for deviation in (0.006, 0.001):
    wide = (normal * deviation).half().float()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = wide.to(dtype)
        level = generate_gparam(weight.min(), weight.max())
        blocks = weight.view(256, -1, 16)
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), by, global_scale=level)
        values = fake_quantize(wide, scale, zero, by, global_scale=level)
        found[deviation, dtype], error = level.item(), ((values - wide).norm() / wide.norm()).item()
        errors[deviation, dtype] = error
        print(f"amax {wide.abs().max().item():.4f} in {dtype}: global scale {level.item():.7g}, relative error {error:.3f}")
    assert abs(found[deviation, torch.float32] * wide.abs().max().item() / 2688 - 1) < 1e-6
    of_bf16 = found[deviation, torch.bfloat16]
    assert torch.tensor(of_bf16).bfloat16().item() == of_bf16 != found[deviation, torch.float32]
    assert found[deviation, torch.float16] == 1.0
    assert errors[deviation, torch.float16] > 1.3 * errors[deviation, torch.float32]
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
