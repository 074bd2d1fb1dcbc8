"""FSDP2 on two gloo processes: it trains bit-identically to one process, and its checkpoint restores every byte."""

from __future__ import annotations

import importlib
import sys
import tempfile
import warnings
from math import lcm
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layoutc
from layoutc.conformance.ranks import RankError
from layoutc.conformance.registry import TALLY, Failure, Skipped, check
from layoutc.conformance.subject import Subject
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight.tensor import QuantizedTensor

STEPS = 3
Job = tuple[str, str, int, int]  # the package's folder and name, width, seed


class Different(AssertionError):
    """Raised if bytes differ that should be equal; the parent process prints it."""


class Net(nn.Module):
    """Two layers and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> (n, width)."""
        for layer in self.layers:
            x = F.gelu(layer(x))
        result: Tensor = self.head(x)
        return result


def _net(job: Job, salt: int = 0) -> Net:
    folder, package, width, seed = job
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    torch.manual_seed(seed + salt)
    net = Net(width)
    layoutc.quantize_(net, importlib.import_module(package))
    return net


def _sharded(net: Net) -> Net:
    from torch.distributed.fsdp import fully_shard

    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    return net


def _adam(net: nn.Module) -> Any:
    return layoutc.MasterWeights(torch.optim.AdamW, net.parameters(), lr=1e-2, weight_decay=0.1)


def _step(net: nn.Module, optimizer: Any, job: Job, step: int, share: float) -> float:
    generator = torch.Generator().manual_seed(job[3] + 1000 + step)
    x, y = (torch.randn(8, job[2], generator=generator) for _ in range(2))
    loss: Tensor = (net(x) - y).square().mean()
    (loss * share).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _share() -> float:
    """Rank 0 has the whole gradient and the others have none, so the mean is exact in any order."""
    import torch.distributed as dist

    return float(dist.get_world_size()) if dist.get_rank() == 0 else 0.0


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def _same(where: str, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if not actual.keys() <= expected.keys() or not actual:
        raise Different(f"{where}: there are {', '.join(actual) or 'none'}, not {', '.join(expected)}")
    for name, tensor in actual.items():
        a, b = _bytes(tensor), _bytes(expected[name])
        TALLY.bytes += len(a)
        if a.shape != b.shape or not torch.equal(a, b):
            byte = int((a != b).nonzero()[0]) if a.shape == b.shape else -1
            raise Different(f"{where}: {name} differs, first at byte {byte} of {len(b)}")


def trains(job: Job) -> None:
    """In every process, compares steps on shards with steps on the whole model."""
    whole, sharded = _net(job), _sharded(_net(job))
    one, other = _adam(whole), _adam(sharded)
    for step in range(STEPS):
        expected = _step(whole, one, job, step, 1.0)
        loss = _step(sharded, other, job, step, _share())
        if loss != expected:
            raise Different(f"step {step}: the loss is {loss!r}, in one process {expected!r}")
        _gathers_as(sharded, whole, f"after step {step}")


def _same_model(when: str, actual: nn.Module, expected: nn.Module, parts: str = "planes") -> None:
    """Compares this rank's parameters: planes or buffers of quantized ones, and plain ones directly."""
    for (name, one), (_, other) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        mine, theirs = (cast(Any, local_tensor(each.data)) for each in (one, other))
        if type(mine) is not type(theirs):
            raise Different(f"{when}: {name} is {type(mine).__name__}, not {type(theirs).__name__}")
        if isinstance(theirs, QuantizedTensor):
            _same(f"{when}, {name}", getattr(mine, parts)(), getattr(theirs, parts)())
        else:
            _same(when, {name: mine}, {name: theirs})


def _gathers_as(sharded: Any, whole: Net, when: str) -> None:
    modules = (*sharded.layers, sharded)
    for module in modules:
        module.unshard()
    _same_model(when, sharded, whole, "buffers")
    for module in modules:
        module.reshard()


def _trained(job: Job) -> tuple[Net, Any]:
    """Trains a sharded model for some steps; returns it and its optimizer."""
    warnings.simplefilter("ignore")
    model = _sharded(_net(job))
    optimizer = _adam(model)
    for step in range(STEPS):
        _step(model, optimizer, job, step, _share())
    return model, optimizer


def saves_and_loads(job: Job, folder: str) -> None:
    """Trains, saves, loads into another model, and compares bytes, masters and the following steps."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    model, optimizer = _trained(job)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    other = _sharded(_net(job, salt=1))
    other_optimizer = _adam(other)
    weights, moments = get_state_dict(other, other_optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    _same_model("restored", other, model)
    for step in range(STEPS, STEPS + 2):
        expected = _step(model, optimizer, job, step, _share())
        loss = _step(other, other_optimizer, job, step, _share())
        if loss != expected:
            raise Different(f"step {step} after loading: the loss is {loss!r}, without saving {expected!r}")


def saves(job: Job, folder: str) -> None:
    """Trains a model and saves its weights."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    dcp.save({"model": get_model_state_dict(_trained(job)[0])}, checkpoint_id=folder)


def _loads_alone(job: Job, folder: str) -> None:
    """Loads all ranks' checkpoint into an unsharded model in this process."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    whole, loaded = _net(job), _net(job, salt=1)
    optimizer = _adam(whole)
    for step in range(STEPS):
        _step(whole, optimizer, job, step, 1.0)
    with torch.no_grad():
        dcp.load({"model": loaded.state_dict(keep_vars=True)}, checkpoint_id=folder, no_dist=True)
    _same_model("loaded", loaded, whole)


def _counted(function: Any, *arguments: Any) -> int:
    """Runs a job on a rank and returns the number of bytes that it compared."""
    TALLY.clear()
    function(*arguments)
    return TALLY.bytes


def _job(subject: Subject) -> Job:
    if subject.ranks is None:
        raise Skipped("checks that start processes are off")
    world = subject.ranks.world
    width = lcm(world * subject.rows, subject.columns)
    width *= max(1, -(-32 // width))
    if width > 4096:
        raise Skipped(f"the smallest square weight that shards over {world} ranks has {width} rows")
    return str(subject.folder), subject.package.__name__, width, subject.seed


def _run(subject: Subject, job: Job, function: Any, *arguments: Any) -> None:
    assert subject.ranks is not None
    try:
        TALLY.bytes += min(subject.ranks.run(_counted, function, job, *arguments))
    except RankError as error:
        raise Failure(str(error), world=subject.ranks.world, shape=(job[2], job[2]), seed=subject.seed) from None


@check("fsdp2", "FSDP2 with 2 processes: 3 steps with MasterWeights equal those of one process", needs_processes=True)
def fsdp2(subject: Subject) -> None:
    """Compares losses, and all buffers of all gathered weights after every step."""
    _run(subject, _job(subject), trains)


@check("fsdp2-checkpoint", "a sharded checkpoint restores every byte, and the steps that follow", needs_processes=True)
def fsdp2_checkpoint(subject: Subject) -> None:
    """Saves and loads with torch.distributed.checkpoint on 2 processes."""
    job = _job(subject)
    with tempfile.TemporaryDirectory(prefix="layoutc-checkpoint-", ignore_cleanup_errors=True) as folder:
        _run(subject, job, saves_and_loads, str(Path(folder) / "saved"))


@check("reshard", "a checkpoint of 2 processes loads into one process, byte for byte", needs_processes=True)
def reshard(subject: Subject) -> None:
    """Shards of a weight whose scale covers all rows are refused."""
    from torch.distributed.checkpoint.api import CheckpointException

    job = _job(subject)
    with tempfile.TemporaryDirectory(prefix="layoutc-checkpoint-", ignore_cleanup_errors=True) as folder:
        saved = str(Path(folder) / "saved")
        _run(subject, job, saves, saved)
        try:
            _loads_alone(job, saved)
        except CheckpointException as error:  # a BaseException
            if not (subject.facts.shares_amax and "LayoutError" in str(error)):
                raise Failure(str(error).splitlines()[-1], shape=(job[2], job[2]), seed=subject.seed) from None
            raise Skipped("one scale covers all rows, so loading a weight in parts is refused") from None
        except Different as different:
            raise Failure(str(different), shape=(job[2], job[2]), seed=subject.seed) from None
