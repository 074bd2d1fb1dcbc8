"""Exchanged gradients on cards: those of FSDP2's reduce-scatter to the bit, and the kernel's sums those of torch.

    torchrun --nproc-per-node 2 tests/gpu/exchange_nccl.py
    torchrun --nproc-per-node 4 tests/gpu/exchange_nccl.py replicas

On two ranks a sum has one order, so gradients, losses and weights after steps are compared byte for byte: plain
weights, quantized ones and ones that are cast on gather, eager, compiled, and captured in a CUDA graph.

Gradients that travel as codes: kernels write the bytes of the recipes' references, and eager and captured
steps give the same losses, gradients and weights, as random bits follow from counters. The same of sums among replicas,
which are alike on all of them: over two ranks, and over four, in both ways that codes travel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import layoutc
from layoutc.runtime.kernels.rank_chunks import Chunks
from layoutc.runtime.kernels.rank_sums import Codes, rank_sum, sum_in_order
from layoutc.runtime.product_mode import Where
from layoutc.runtime.weight.tensor import QuantizedTensor

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
FORMS = [
    (use, way)
    for use in ("plain", "layoutc:fp8_block", "layoutc:nvfp4", "cast:mxfp8")
    for way in ("eager", "compiled", "captured")
]


class Block(nn.Module):
    """A feed-forward layer whose weights FSDP2 pads: its rows over some worlds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 992), nn.Linear(992, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


def trained(
    use: str,
    way: str,
    exchanges: bool | str,
    device: torch.device,
    own: Where | None = None,
    modes: Sequence[Where] = ("gather",) * 6,
    among: str | None = None,
    **options: Any,
) -> tuple[list[float], list[Tensor]]:
    """Losses of six steps, the last gradients, and the bytes of weights. exchanges: also the recipe of codes. own: mode
    of each weight. modes: that of all weights, in each step. among: the recipe of replicas. options: of fully_shard."""
    options = {"mp_policy": POLICY, **options}
    torch._dynamo.reset()
    torch.manual_seed(0)
    kind, _, recipe = use.partition(":")
    with device:
        model = nn.Sequential(*[Block() for _ in range(3)])
    if kind != "plain":
        (layoutc.quantize_ if kind == "layoutc" else layoutc.cast_on_gather_)(model, recipe)
    if own is not None:
        layoutc.set_products_(model, "dequantize", dequantize=own)
    for block in model:
        if way == "compiled":
            block.compile()
        fully_shard(block, **options)
    fully_shard(model, **options)
    if exchanges:
        layoutc.exchange_gradients(model, None if exchanges is True else exchanges, replicas=among)
    settings: dict[str, Any] = {"lr": 1e-3, "fused": True, "capturable": way == "captured"}
    optimizer: Any = (
        layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), **settings)
        if kind == "layoutc"
        else torch.optim.AdamW(model.parameters(), **settings)
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(64, 512, generator=generator).to(device, torch.bfloat16) for _ in range(6)]
    x, loss = batches[0].clone(), torch.zeros(())

    def step() -> None:
        nonlocal loss
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()

    losses, run, stream = [], step, torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for at, batch in enumerate(batches):
            if at == 3 and way == "captured":
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with (
                    layoutc.dequantize(modes[at]),
                    torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
                ):
                    step()
                run = graph.replay
            x.copy_(batch)
            with layoutc.dequantize(modes[at]):
                run()
            torch.cuda.synchronize()
            losses.append(float(loss.detach()))
    held: list[Tensor] = []
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert isinstance(param.grad, DTensor)
        local: Any = param._local_tensor
        held += [param.grad._local_tensor.clone()]
        held += list(local.planes().values()) if isinstance(local, QuantizedTensor) else [local.detach()]
    return losses, held


def sums(device: torch.device) -> None:
    """The kernel, of sizes that tiles divide and others, beside torch's additions."""
    for ranks in (2, 3, 8):
        for numel in (4096, 5000, 1 << 20, (1 << 20) + 7):
            for dtype in (torch.bfloat16, torch.float16):
                parts = torch.randn(ranks, numel, device=device) * torch.logspace(-3, 3, ranks, device=device)[:, None]
                parts[0, :3] = torch.tensor([float("inf"), float("nan"), -0.0], device=device)
                out = torch.empty(numel, device=device)
                rank_sum(parts := parts.to(dtype), out, ranks)
                expected = sum_in_order(parts) / torch.full((), float(ranks), device=device)
                assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0)), (ranks, numel, dtype)


def codes(device: torch.device) -> None:
    """Codes, scales, what they miss, and sums: of the kernels on a card, and of the reference on the host."""
    for recipe in ("grad_fp8", "grad_int4"):
        made = Codes(recipe)
        for ranks, n in ((2, 4096), (3, 5000), (8, (1 << 18) + 7)):
            for dtype in (torch.bfloat16, torch.float32):
                values = (torch.randn(ranks, n, device=device) * torch.logspace(-42, 3, n, device=device)).to(dtype)
                values[0, 1:4] = torch.tensor([float("inf"), float("nan"), -0.0], device=device)
                rest = torch.randn(ranks, n, device=device) * 1e-3
                found = []
                for where in (device, torch.device("cpu")):
                    seed, own = torch.tensor([2**62 + 77], device=where), rest.to(where, copy=True)
                    rows, out = made.quantize(values.to(where), seed, own), torch.empty(n, device=where)
                    made.add(rows, out, float(ranks), True, seed)
                    assert int(seed) == 2**62 + 78
                    planes = made.row(n).planes_in(rows).values()
                    found.append([one.float().cpu().nan_to_num(7.0) for one in (*planes, own, out)])
                assert all(map(torch.equal, *found)), (recipe, ranks, n, dtype)
        chunks(made, device)


def chunks(made: Codes, device: torch.device) -> None:
    """Codes of gradients as they lie: those of their copies in rows."""
    for ranks, shapes in ((2, [(512, 64), (1000,), (96, 4096)]), (3, [(100, 64), (7, 33), (1,), (4096,), (40, 512)])):
        for first, dtype in ((0, torch.bfloat16), (0, torch.float32), (1, torch.bfloat16)):  # addresses of odd values
            sizes = [torch.Size(shape).numel() for shape in shapes]
            grads = [torch.randn(first + size, device=device).to(dtype)[first:] for size in sizes]
            grads = [grad.view(shape) for grad, shape in zip(grads, shapes, strict=True)]
            each = [F.pad(grad, (0, 0) * (grad.dim() - 1) + (0, -len(grad) % ranks)).view(ranks, -1) for grad in grads]
            rows, seed = torch.cat(each, 1), torch.tensor([5], device=device)
            found = [made.quantize(one, seed) for one in (Chunks(grads, ranks, rows.shape[1]), rows)]
            planes = [made.row(rows.shape[1]).planes_in(one).values() for one in found]
            assert all(map(torch.equal, *planes)), (ranks, shapes, first, dtype)


def replicas(device: torch.device) -> None:
    """Replicas of one rank, and of two where there are four; in fp32, and in bf16, of which four add up parts."""
    world = dist.get_world_size()
    shapes = [(world, 1), *([(2, 2)] if world == 4 else [])]
    for shape in shapes:
        mesh: DeviceMesh = init_device_mesh("cuda", shape, mesh_dim_names=("copies", "slices"))
        for reduced in (torch.float32, torch.bfloat16):
            for use, among in (("plain", "grad_int4"), ("layoutc:nvfp4", "grad_fp8")):
                given = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduced), "among": among}
                eager = trained(use, "eager", "grad_fp8", device, **given)
                again = trained(use, "captured", "grad_fp8", device, **given)
                assert eager[0] == again[0], (shape, use, eager[0], again[0])
                assert all(map(torch.equal, eager[1], again[1])), (shape, use)
                for held in eager[1]:
                    codes = held.contiguous().view(-1).view(torch.uint8)
                    theirs = torch.empty(shape[0] * codes.numel(), dtype=torch.uint8, device=device)
                    dist.all_gather_into_tensor(theirs, codes, group=mesh.get_group("copies"))
                    assert theirs.view(shape[0], -1).eq(codes).all(), (shape, use)
                if dist.get_rank() == 0:
                    print(
                        f"{shape}, {reduced}, {use}, {among} among replicas: equal, to {eager[0][-1]:.6f}", flush=True
                    )


def main() -> None:
    """All forms; the first rank prints."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    replicas(device)
    if sys.argv[1:] == ["replicas"]:
        dist.destroy_process_group()
        return
    sums(device)
    codes(device)
    for use, way in FORMS:
        losses, held = trained(use, way, False, device)
        others, theirs = trained(use, way, True, device)
        assert losses == others, (use, way, losses, others)
        assert all(map(torch.equal, held, theirs)), (use, way)
        if dist.get_rank() == 0:
            print(f"{use}, {way}: losses, gradients and weights equal, to {losses[-1]:.6f}", flush=True)
    for recipe in ("grad_fp8", "grad_int4"):
        for use in ("plain", "layoutc:nvfp4"):
            eager = trained(use, "eager", recipe, device)
            again = trained(use, "captured", recipe, device)
            assert eager[0] == again[0], (use, recipe, eager[0], again[0])
            assert all(map(torch.equal, eager[1], again[1])), (use, recipe)
            if dist.get_rank() == 0:
                print(f"{use}, {recipe}: eager and captured equal, to {eager[0][-1]:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
