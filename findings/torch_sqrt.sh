#!/usr/bin/env bash
# Guess: torch.sqrt of fp32 on CPUs is IEEE 754's square root, which is correctly rounded, as numpy's is and as the card's is.
# What happens: on a machine with AVX-512, 0.6% of random numbers are one unit in the last place off, in vectors and in single
# numbers; so is x ** 0.5. torch.sqrt of fp64, rounded to fp32, is exact. An optimizer that takes roots of second moments has
# other bytes on CPUs than on cards, and than in numpy.
# Versions: torch 2.13.0, numpy 2.2.6.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.2.6'
cat > "$folder/program.py" <<'PROGRAM'
import numpy as np
import torch

print("torch", torch.__version__, "numpy", np.__version__, "|", torch.backends.cpu.get_cpu_capability())
x = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0))
exact = np.sqrt(x.numpy().astype(np.float64)).astype(np.float32)
off = {
    "numpy.sqrt": int((np.sqrt(x.numpy()) != exact).sum()),
    "torch.sqrt of fp64, rounded": int((x.double().sqrt().float().numpy() != exact).sum()),
    "torch.sqrt": int((x.sqrt().numpy() != exact).sum()),
    "torch.pow(0.5)": int((x.pow(0.5).numpy() != exact).sum()),
}
for name, count in off.items():
    print(f"{name}: {count} of {len(x)} differ from the correctly rounded root")
assert off["numpy.sqrt"] == off["torch.sqrt of fp64, rounded"] == 0
assert torch.backends.cpu.get_cpu_capability() != "AVX512" or 0 < off["torch.sqrt"] < len(x) // 50
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
