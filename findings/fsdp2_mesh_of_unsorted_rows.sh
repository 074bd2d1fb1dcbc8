#!/usr/bin/env bash
# Guess: a mesh of two dims may list ranks in any order, as one that follows the machine's links does: FSDP2 shards over
# each row and replicates over each column, and training equals that of one process.
# What happens: process groups sort their ranks, and a rank's number in its group says which shard it holds, not its
# place in the mesh. Over [[1, 0], [3, 2]] all rows are turned alike, and nothing is wrong. Over [[3, 0], [1, 2]] ranks 3
# and 1, a column, hold other rows of each parameter: their gradients are averaged, and after three steps replicas have
# other weights than each other and than one process, without an error or a warning.
# Versions: torch 2.13.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.3.5'
cat > "$folder/program.py" <<'PROGRAM'
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

MESHES = ([[0, 1], [2, 3]], [[1, 0], [3, 2]], [[3, 0], [1, 2]])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss(of: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return of(x).square().mean()


def weights(ranks: list[list[int]] | None) -> torch.Tensor:
    """After three steps: over a mesh, or of one process that sees the batches of all ranks."""
    trained = model()
    if ranks is not None:
        fully_shard(trained, mesh=DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    for step in range(3):
        seen = [dist.get_rank()] if ranks is not None else range(4)
        sum(loss(trained, rank, step) / len(seen) for rank in seen).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [param.full_tensor() if ranks is not None else param for param in trained.parameters()]
    return torch.cat([one.detach().flatten() for one in whole])


def rank(number: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29874", RANK=str(number), WORLD_SIZE="4")
    dist.init_process_group("gloo")
    alone = weights(None)
    for ranks in MESHES:
        own = weights(ranks)
        every = [torch.empty_like(own) for _ in range(4)]
        dist.all_gather(every, own)
        off = max(float((one - alone).abs().max()) for one in every)
        apart = max(float((one - every[0]).abs().max()) for one in every)
        if number == 0:
            print(f"torch {torch.__version__}, mesh {ranks}: off by {off:.1e} from one process, ranks apart by {apart:.1e}")
        assert (off > 1e-2 and apart > 1e-3) if ranks == MESHES[2] else (off < 1e-6 and apart == 0), (ranks, off, apart)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank, nprocs=4, start_method="fork")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
