#!/usr/bin/env bash
# Guess: on a CPU without AVX-512, bf16 products are two to four times as slow as in fp32, since values are converted,
# and whether a matrix is stored by rows or by columns matters little, as in fp32.
# What happens: without AVX-512 torch multiplies bf16 by loops of its own, one for each order of memory. A right operand
# that lies by rows takes ten times as long as one that lies by columns, with the same values: x @ w.T, a linear
# layer's forward, is fast, and g @ w, its backward, is not. In fp32 both take the same. A copy of w by columns
# (w.T.contiguous().T) makes g @ w as fast as the forward. CI machines and laptops are such CPUs; here the instructions
# are limited, so that any x86 CPU shows it.
# Versions: torch 2.13.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.3.5'
cat > "$folder/program.py" <<'PROGRAM'
import time
from collections.abc import Callable

import torch

torch.set_num_threads(1)
torch.manual_seed(0)


def fastest(product: Callable[[], torch.Tensor]) -> float:
    """Milliseconds of the fastest of five."""
    product()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        product()
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; 512x1024 by 1024x256, milliseconds")
slower = {}
for dtype in (torch.float32, torch.bfloat16):
    g, w = torch.randn(512, 1024).to(dtype), torch.randn(1024, 256).to(dtype)
    by_columns = w.T.contiguous().T
    assert torch.equal(w, by_columns)
    rows, columns = fastest(lambda: g @ w), fastest(lambda: g @ by_columns)
    slower[dtype] = rows / columns
    print(f"{dtype}: right operand by rows {rows:.1f}, by columns {columns:.1f}: {slower[dtype]:.1f} times")
assert slower[torch.float32] < 2, slower
assert slower[torch.bfloat16] > 3, slower
PROGRAM
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 "$folder/venv/bin/python" "$folder/program.py"
