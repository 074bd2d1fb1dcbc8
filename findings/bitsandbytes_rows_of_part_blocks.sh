#!/usr/bin/env bash
# Guess: on a CPU, dequantize_4bit(quantize_4bit(w)) is off by half a step of codes at most, whatever the shape of w:
# both count blocks over the flattened weight, as on GPUs.
# What happens: quantize_4bit counts blocks over the flattened weight, and dequantize_4bit's CPU code counts them row by
# row. Where a row is no whole number of blocks (96 columns in blocks of 64; 32 columns), most values are multiplied by
# the scale of another block: 11% of normal values are off by more than half a step. No error, no warning. The same
# codes are right when read by bitsandbytes' code for any device (backends.default), which rows of odd length take.
# Versions: bitsandbytes 0.50.2, torch 2.11.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.11.0' 'numpy==2.2.6' 'bitsandbytes==0.50.2'
cat > "$folder/program.py" <<'PROGRAM'
import bitsandbytes
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

print("bitsandbytes", bitsandbytes.__version__, "torch", torch.__version__)
torch.manual_seed(0)
for shape in ((64, 128), (64, 96), (64, 32), (64, 33)):
    w = torch.randn(shape)
    codes, state = quantize_4bit(w, blocksize=64, quant_type="nf4")
    padded = torch.nn.functional.pad(w.flatten(), (0, -w.numel() % 64)).view(-1, 64)
    assert torch.equal(state.absmax, padded.abs().amax(1)), "scales are those of the flattened weight"
    by_cpu = dequantize_4bit(codes, state)
    by_any = _dequantize_4bit_compute(codes.reshape(-1), state.absmax, state.code, 64, shape, torch.float32)
    # The widest step of NF4 is 0.304 of a block's largest value.
    bound = (0.5 * 0.304 * state.absmax.repeat_interleave(64))[: w.numel()].view(shape) + 1e-6
    wrong = ((by_cpu - w).abs() > bound).sum().item()
    print(shape, "values off by more than half a step:", wrong, "of", w.numel(), "by the CPU's code;",
          ((by_any - w).abs() > bound).sum().item(), "by that for any device")
    assert not ((by_any - w).abs() > bound).any()
    assert (wrong > 0) == (shape[1] in (96, 32)), shape
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
