"""Weights that are dequantized on gather, on cards: losses, gradients and weights of those that layers dequantize.

    torchrun --nproc-per-node 2 tests/gpu/on_gather_nccl.py

Compared byte for byte: quantized weights and ones that are cast on gather, eager, compiled, and captured in a CUDA
graph. By the weights' own choice, by default, and where the mode of all weights changes between steps. Their planes
travel in packs where ranks have whole blocks, and by themselves where cuts split blocks.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from exchange_nccl import trained

from layoutc.runtime.product_mode import Where

ON_GATHER: Where = "gather"
BY_LAYERS: Where = "layer"

FORMS = [
    (use, way)
    for use in (
        "layoutc:fp8_block",
        "layoutc:nvfp4",
        "layoutc:fp8_current",
        "layoutc:mxfp8_2d",
        "cast:nvfp4",
        "cast:fp8_current",
    )
    for way in ("eager", "compiled", "captured")
]


def main() -> None:
    """All forms; the first rank prints."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    different = 0
    for use, way in FORMS:
        losses, held = trained(use, way, False, device, modes=(BY_LAYERS,) * 6)
        chosen: dict[str, dict[str, Any]] = {"chosen": {"own": ON_GATHER}, "by default": {}}
        if way != "captured":  # replays follow the mode of their capture
            chosen["switched"] = {"modes": (ON_GATHER, ON_GATHER, BY_LAYERS, BY_LAYERS, ON_GATHER, ON_GATHER)}
        for how, options in chosen.items():
            others, theirs = trained(use, way, True, device, **options)
            same: Any = losses == others and all(map(torch.equal, held, theirs))
            different += not same
            if dist.get_rank() == 0:
                result = "equal" if same else f"DIFFER: {losses} and {others}"
                print(f"{use}, {way}, {how}: losses, gradients and weights {result}, to {losses[-1]:.6f}", flush=True)
    dist.destroy_process_group()
    assert not different


if __name__ == "__main__":
    main()
