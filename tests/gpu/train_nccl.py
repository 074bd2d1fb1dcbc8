"""Started by torchrun, one process a GPU: every recipe under FSDP2 over NCCL against the same model in one process,
eager blocks against eager ones, compiled blocks against compiled ones.

All ranks see the same batch, so averaged gradients equal those of one process, and losses must be equal to the bit.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import layoutc

RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
MODES = ("resharded", "kept", "recompute", "offload")
COMPILED_RECIPES = ("fp8_current", "mxfp8")  # both passes gather the same codes; each has codes of its own
COMPILED = ("compiled", "compiled kept", "compiled recompute", "compiled recompute inside")
STEPS = 20


class Block(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim)
        self.recomputes = False

    def body(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x))


def losses(recipe: str, mode: str, device: torch.device) -> list[float]:
    """The loss curve of one run: alone, or sharded in a mode of FSDP2."""
    torch.manual_seed(0)
    with layoutc.quantized_init(recipe):
        model = nn.Sequential(*(Block(512) for _ in range(4)), nn.Linear(512, 512))
    model = model.to(device)
    options: dict[str, Any] = {"reshard_after_forward": "kept" not in mode}
    torch._dynamo.reset()
    for block in model[:-1] if "compiled" in mode else ():
        block.recomputes = "inside" in mode
        block.compile(fullgraph=True)
    if mode == "offload":
        options["offload_policy"] = CPUOffloadPolicy()
    if mode.endswith("recompute"):
        model = nn.Sequential(*(checkpoint_wrapper(block) for block in model))
    if not mode.startswith("alone"):
        for block in model:
            fully_shard(block, **options)
        fully_shard(model, **options)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    curve = []
    with layoutc.strict():
        for step in range(STEPS):
            x = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).to(device)
            loss = (model(x) - x.roll(1, 1)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
    return curve


def main() -> None:
    """Prints a line for each recipe and mode; fails on the first difference."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl")
    for recipe in RECIPES:
        # Inductor rounds otherwise where it fuses, and fuses otherwise where backward recomputes.
        kinds = ("alone", "alone compiled", "alone compiled inside")
        whole = {kind: losses(recipe, kind, device) for kind in kinds[: 3 if recipe in COMPILED_RECIPES else 1]}
        for mode in (*MODES, *(COMPILED if recipe in COMPILED_RECIPES else ())):
            sharded = losses(recipe, mode, device)
            alone = whole[kinds[0 if mode in MODES else 2 if "inside" in mode else 1]]
            same = sharded == alone
            # Offloaded masters are stepped on the CPU, whose AdamW may round in another order.
            close = mode == "offload" and max(abs(a - b) for a, b in zip(sharded, alone, strict=True)) < 1e-2
            assert same or close, (recipe, mode, alone, sharded)
            assert sharded[-1] < sharded[0]
            if dist.get_rank() == 0:
                verdict = "equal to the bit" if same else "close (masters stepped on the CPU)"
                print(f"{recipe}, {mode}: {STEPS} losses {verdict}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
