#!/usr/bin/env bash
# Guess: FSDP2 reduces the gradients of a block in the policy's reduce_dtype, whenever its parameters start to train
# (gradual unfreezing).
# What happens: FSDP2 takes dtypes from the parameters that train at the first forward. Of a block that is wholly frozen
# then, it keeps no reduce_dtype and no dtype of gradients. Once such a block trains, bf16 parameters have their
# gradients summed in bf16, without an error or a warning, although the policy says fp32: on four ranks 339 of 512 are
# what fp32 gives. fp32 parameters under param_dtype=bf16 end in "attempting to assign a gradient with dtype
# 'c10::BFloat16' to a tensor with grad_dtype 'Float'".
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def values(rank: int) -> torch.Tensor:
    return torch.randn(1, 512, generator=torch.Generator().manual_seed(rank)).bfloat16()


def gradient(dtype: torch.dtype, frozen_at_first: bool) -> str:
    """How many of 512 gradients are the mean over ranks, rounded once to the parameters' dtype."""
    layer = nn.Linear(512, 4, bias=False, dtype=dtype)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    x = values(dist.get_rank())
    layer.requires_grad_(not frozen_at_first)
    layer(x)
    layer.requires_grad_(True)
    try:
        layer(x).sum().backward()
    except RuntimeError as error:
        return str(error).splitlines()[0][:104]
    mean = torch.stack([values(rank)[0].double() for rank in range(4)]).mean(0).to(dtype)
    return f"{(layer.weight.grad.full_tensor()[0] == mean).sum().item()} of 512 are the mean, rounded once"


def rank(number: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29873", RANK=str(number), WORLD_SIZE="4")
    dist.init_process_group("gloo")
    cases = [(dtype, frozen) for dtype in (torch.bfloat16, torch.float32) for frozen in (False, True)]
    found = [gradient(*case) for case in cases]
    if number == 0:
        print("torch", torch.__version__)
        for (dtype, frozen), text in zip(cases, found, strict=True):
            print(f"{dtype} parameters, {'frozen in the first forward' if frozen else 'trained from the start'}: {text}")
    assert found[0].startswith("512") and not found[1].startswith("512"), found
    assert "rounded once" in found[2] and "grad_dtype" in found[3], found
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank, nprocs=4, start_method="fork")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
