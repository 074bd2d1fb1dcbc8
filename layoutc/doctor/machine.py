"""Checks cards, drivers, and FSDP2 as the runtime reads it: asks torch, and shards one module."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from layoutc.doctor.findings import Line
from layoutc.runtime.kernels.launch import level_of
from layoutc.runtime.torch_private import fsdp2

DRIVER = Path("/proc/driver/nvidia/version")
LEVELS = {
    0: "kernels convert with integer arithmetic",
    90: "kernels convert to FP8 with the card's own instructions",
    100: "kernels convert to FP8, FP6, FP4 and E8M0 with the card's own instructions",
}


def look() -> list[Line]:
    """Lines about torch's build, the driver, each card, and FSDP2's names."""
    return [*_cards(), *_fsdp2()]


def driver() -> str:
    """The version of the NVIDIA driver; "" if none is loaded."""
    try:
        text = DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", text)
    return found[1] if found else "of an unknown version"


def _cards() -> Iterator[Line]:
    built, loaded = torch.version.cuda, driver()
    yield Line("torch is built for", "fine", f"CUDA {built}" if built else "CPUs")
    if not torch.cuda.is_available():
        if loaded and not built:
            fix = "install a torch with CUDA: https://pytorch.org/get-started/locally"
            yield Line("cards", "missing", f"the driver {loaded} is loaded, and this torch is for CPUs", fix)
        elif loaded:
            fix = f"update the driver, or install a torch for an older CUDA than {built}"
            yield Line("cards", "missing", f"the driver is {loaded}, and torch finds no card", fix)
        else:
            yield Line("cards", "without", "none: the reference runs, which is plain torch")
        return
    yield Line("driver", "fine", loaded or "unknown")
    for number in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        words = f"{name}, compute capability {capability[0]}.{capability[1]}: {LEVELS[level_of(capability)]}"
        yield Line(f"card {number}", "fine", words)
    if importlib.util.find_spec("triton") is None:
        yield Line("kernels", "missing", "there is a card, and no Triton to run them", "pip install 'layoutc[triton]'")


def _fsdp2() -> Iterator[Line]:
    """Shards a module over a group of one rank, and reads everything that the runtime reads."""
    import torch.distributed as dist

    about = "what is read of FSDP2"
    if not dist.is_available():
        yield Line(about, "missing", "this torch has no torch.distributed", "install a torch that has it")
        return
    if dist.is_initialized():
        yield Line(about, "without", "not looked at: a process group is there already")
        return
    try:
        count, lost = _names_read()
    except Exception as error:  # any error means that FSDP2 does not run here
        yield Line(about, "missing", f"{type(error).__name__}: {error}", fsdp2.FIX)
        return
    yield Line(about, "fine", f"as in torch {fsdp2.RUNS_WITH}: {count} parameter found by its private names")
    if lost:
        found = f"{lost} of FSDP2 differ: its own steps are taken, with the same bytes in more time of the host"
        yield Line("gathers in few steps", "without", found, fsdp2.FIX)
        return
    others = "a warning names a parameter that is offloaded, on another dim, or has hooks of its own, and says so once"
    yield Line("gathers in few steps", "fine", f"of what is sharded on dim 0: {others}")


def _names_read() -> tuple[int, str]:
    import torch.distributed as dist

    with tempfile.TemporaryDirectory(prefix="layoutc-doctor-", ignore_cleanup_errors=True) as folder:
        store = f"file://{Path(folder).as_posix()}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            return _parameters_of_a_module()
        finally:
            dist.destroy_process_group()


def _parameters_of_a_module() -> tuple[int, str]:
    """The number of parameters found, and the names that gathers and reductions in few steps lack."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(8, 8, bias=False)
    fully_shard(module, mesh=DeviceMesh("cpu", torch.arange(1)))
    shard = next(module.parameters())
    module(torch.zeros(1, 8)).sum().backward()
    groups = [group for param, group in fsdp2.parameters() if param.sharded_param is shard]
    count = len(groups)
    if count != 1:
        fsdp2.refuse(f"_module_state_mapping leads to {count} of 1 parameter")
    try:
        from layoutc.runtime.torch_private import planned_groups, reductions
    except ImportError as error:
        return count, str(error)
    lost = [one.unknown(groups[0]) for one in (planned_groups, reductions)]
    return count, ", ".join(filter(None, lost))
