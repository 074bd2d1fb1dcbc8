#!/usr/bin/env bash
# Guess: assigning to `.data` of a parameter replaces its values, of a DTensor parameter (FSDP2) too.
# What happens: the assignment is accepted, without an error or a warning, and the values stay. Only what the wrapper
# says of itself changes: `shape` becomes that of the other tensor, while `to_local()` and `full_tensor()` give the old
# values in the old shape. So `merge` of tuners that assign (PEFT's DoRA and IA3, and LoRA with safe_merge=True) changes
# no weight of a sharded model. `copy_` and in-place arithmetic on `.data` do write.
# Versions: torch 2.11.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.11.0' 'numpy==2.2.6'
cat > "$folder/program.py" <<'PROGRAM'
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29871", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")
print("torch", torch.__version__)
mesh = init_device_mesh("cpu", (1,))

plain = nn.Parameter(torch.ones(4, 4))
plain.data = torch.zeros(4, 4)
print("plain parameter, largest value after .data = zeros:", plain.max().item())
assert plain.max() == 0

layer = nn.Linear(4, 4, bias=False)
nn.init.ones_(layer.weight)
fully_shard(layer, mesh=mesh)
weight = layer.weight
weight.data = weight.data * 0
print("FSDP2 parameter, largest value after .data = .data * 0:", weight.full_tensor().max().item())
assert weight.full_tensor().max() == 1
weight.data *= 0
print("FSDP2 parameter, largest value after .data *= 0:", weight.full_tensor().max().item())
assert weight.full_tensor().max() == 0

sharded = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
sharded.data = distribute_tensor(torch.zeros(2, 4), mesh, [Shard(0)])
print("DTensor of 4x4 after .data = one of 2x4:", tuple(sharded.shape), "and", tuple(sharded.full_tensor().shape))
assert sharded.shape == (2, 4) and sharded.full_tensor().shape == (4, 4)
dist.destroy_process_group()
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
