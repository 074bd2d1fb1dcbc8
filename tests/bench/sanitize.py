"""Every kind of kernel of some recipes, at a ragged shape and at one of whole tiles, for compute-sanitizer to watch:

compute-sanitizer --tool memcheck python tests/bench/sanitize.py mxfp8 nvfp4 fp8_block fp8_current mxfp4
"""

from __future__ import annotations

import importlib
import sys

import torch

calls = 0
for name in sys.argv[1:]:
    package = importlib.import_module(f"layoutc.recipes.{name}")
    kernels = importlib.import_module(f"layoutc.recipes.{name}.kernels").KERNELS
    layout = package.LAYOUT
    flags = (True,) if layout.swizzled else ()
    for shape in ((160, 288), (128, 256)):
        m, k = layout.check_shape(shape)
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(m, k, device="cuda", dtype=dtype)
            x[3, 5] = float("nan")
            amax = package.Tensor.shared_amax(x) if layout.shares_amax else None
            planes = kernels.quantize(x, amax, layout.orientations)
            outs = [{plane: torch.empty_like(values) for plane, values in planes.items()} for _ in range(3)]
            planes |= {"amax": amax} if "amax" in layout.stored else {}
            kernels.lay_out(planes, m, k, layout.orientations, *flags)
            kernels.quantize_buffers(x, amax, layout.orientations, *flags)
            kernels.dequantize(planes, m, k, layout.orientations[0], dtype)
            kernels.quantize_batch([x] * 3, None if amax is None else [amax] * 3, layout.orientations, outs)
            calls += 5
torch.cuda.synchronize()
print("ran", calls, "calls")
