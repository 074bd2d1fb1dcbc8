"""`layoutc bench`: times kernels and hooks on this machine; `python -m layoutc.bench` if only torch and Triton are
there.

A kernel's share is the fewest bytes that its work can move (x in, planes out) over its time, relative to a bf16 copy of
the same shape, measured in the same run and in the same way. `us`: over sets of inputs and outputs that L2 can't hold,
in a CUDA graph. `flushed_us`: one call after L2 was flushed, host included. Batches can't be in a graph. Outputs of
quantize are allocated beforehand; peers allocate theirs.

Peers: the recipe as its users would write it in plain torch, under torch.compile, and torchao's quantizers, with the
share of their bytes that differ from ours.

Hooks: the host time of fsdp_pre_all_gather and fsdp_post_all_gather for the shard of one rank, without the collective
in between, and the bytes that a rank contributes in each pass.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import torch

from layoutc.bench import clocks
from layoutc.bench.jobs import DTYPES, Job, Shape, amax_jobs, kernel_jobs, part, size
from layoutc.ints.cuts import Cuts
from layoutc.ints.sizes import cdiv
from layoutc.runtime.facts import PassName
from layoutc.runtime.fsdp2 import hooks as fsdp
from layoutc.runtime.kernels import launch
from layoutc.runtime.train.convert import recipe_class
from layoutc.runtime.weight.tensor import QuantizedTensor

RECIPES = ("fp8_current", "fp8_block", "mxfp8", "nvfp4")
SHAPE = (8192, 8192)
WORLD = 8
Say = Callable[[str], object]
Named = tuple[str, type[QuantizedTensor]]
NO_CARD = "kernels need a CUDA device and Triton; this measures only the hooks' host time and bytes"


class Timed(NamedTuple):
    """A piece of work on a card: the fewest bytes that it moves, its times, and shares of a copy's bandwidth."""

    recipe: str
    work: str
    dtype: str
    shape: Shape
    nbytes: int
    us: float | None  # None: it can't be in a graph
    share: float | None
    flushed_us: float
    flushed_share: float
    differs: float | None = None  # the share of a peer's bytes that are not those of our kernels


class Hooked(NamedTuple):
    """The hooks of one pass: host time, and bytes that a rank contributes and that it holds after the gather."""

    recipe: str
    shape: Shape
    world: int
    pass_name: PassName
    pre_us: float
    post_us: float
    sent: int
    gathered: int
    of_bf16: float


# ---------------------------------------------------------------------------------------------------------- what to do
def chosen(recipes: Sequence[str], shapes: Sequence[Shape], world: int) -> list[Named]:
    """The classes of recipes by name. Raises ValueError for unknown recipes, and for shapes that one does not take."""
    if world < 2:
        raise ValueError(f"hooks send nothing in a group of {world}; the smallest world is 2")
    classes = []
    for name in recipes or RECIPES:
        cls = recipe_class(name)
        for shape in shapes:
            cls.LAYOUT.check_shape(shape)
        classes.append((name, cls))
    return classes


# ------------------------------------------------------------------------------------------------------------- kernels
def timed(job: Job, shape: Shape, copied: tuple[float, float]) -> Timed:
    """Both times of a job, and their shares of a copy's bandwidth."""
    us = _in_a_graph(job) if job.in_graph else None
    share = None if us is None else job.nbytes / us / copied[0]
    flushed = clocks.flushed(job.make())
    torch.cuda.empty_cache()
    flushed_share = job.nbytes / flushed / copied[1]
    return Timed(job.recipe, job.work, job.dtype, shape, job.nbytes, us, share, flushed, flushed_share, job.differs)


def _in_a_graph(job: Job) -> float | None:
    """The time of a job in a CUDA graph. A peer that can't be captured has none."""
    try:
        return clocks.rotated(job.make, job.nbytes)
    except RuntimeError:
        if job.differs is None:
            raise
        torch.cuda.synchronize()
        return None


# --------------------------------------------------------------------------------------------------------------- hooks
def hooks(name: str, cls: type[QuantizedTensor], shape: Shape, world: int, device: torch.device) -> Iterator[Hooked]:
    """Times both hooks in each pass, and in the one that serves both, as FSDP2 calls them after the first time."""
    layout, rows = cls.LAYOUT, cdiv(shape[0], world)
    halo = Cuts(shape[0], rows, world).halo(0, layout.block_rows)
    matrix = rows + halo.rows, shape[1]
    mesh: Any = SimpleNamespace(size=lambda: world)
    stored = {
        plane: torch.zeros(facts.shape, dtype=facts.dtype, device=device)
        for plane, facts in layout.planes(*matrix).items()
    }
    shard: Any = cls(stored, (rows, shape[1]), torch.bfloat16, matrix=matrix, halo=halo)
    for which in get_args(PassName):
        with fsdp.simulate(which, shape, rows):
            sent, metadata = shard.fsdp_pre_all_gather(mesh)
            outputs = tuple(one.new_zeros(world * one.shape[0], *one.shape[1:]) for one in sent)
            whole, _ = shard.fsdp_post_all_gather(outputs, metadata, torch.bfloat16)
            pre = clocks.host(lambda: shard.fsdp_pre_all_gather(mesh))
            post = clocks.host(
                lambda: shard.fsdp_post_all_gather(outputs, metadata, torch.bfloat16, out=whole)  # noqa: B023
            )
        nbytes = size(sent)
        yield Hooked(name, shape, world, which, pre, post, nbytes, nbytes * world, nbytes / (2 * rows * shape[1]))


# -------------------------------------------------------------------------------------------------------------- report
def run(recipes: Sequence[str], shapes: Sequence[Shape], world: int, peers: bool, say: Say) -> dict[str, Any]:
    """Measures, and reports each result to `say` at once; returns all results. Raises ValueError as `chosen`."""
    shapes = list(shapes) or [SHAPE]
    classes = chosen(recipes, shapes, world)
    card = torch.cuda.is_available() and launch.usable(torch.empty(1, device="cuda"))  # kernels can be timed
    device = torch.device("cuda" if card else "cpu")
    results: dict[str, Any] = {
        "kind": "kernels",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "device": torch.cuda.get_device_name() if card else "cpu",
        "copy_bytes_per_us": {},
        "kernels": [],
        "peers": [],
        "hooks": [],
    }
    say(f"{results['device']}, torch {results['torch']}, triton {results['triton'] or 'not installed'}")
    if not card:
        say(NO_CARD)
    for shape in shapes:
        say(f"\n{shape[0]} x {shape[1]}")
        if card:
            _time_kernels(classes, shape, peers, say, results)
        say(f"  {'hooks, ' + str(world) + ' ranks':<46} pre hook    post hook   sent by a rank   of bf16")
        for name, cls in classes:
            for row in hooks(name, cls, shape, world, device):
                results["hooks"].append(row._asdict())
                label = f"{name} {row.pass_name}"
                times = f"{row.pre_us:7.1f} us  {row.post_us:7.1f} us"
                say(f"  {label:<46} {times}   {row.sent / 2**20:9.3f} MiB     {row.of_bf16:.4f}")
    return results


def _time_kernels(classes: Sequence[Named], shape: Shape, peers: bool, say: Say, results: dict[str, Any]) -> None:
    """Every job of every recipe at a shape, into `found`."""
    from layoutc.bench import peers as others

    device = torch.device("cuda", torch.cuda.current_device())
    copied = clocks.copy_rates(shape)
    results["copy_bytes_per_us"]["x".join(map(str, shape))] = copied
    say(f"  a copy of bf16: {copied[0] / 1e6:.3f} TB/s, flushed {copied[1] / 1e6:.3f} TB/s")
    say(f"  {'':74} {'time':>9}   share    flushed   share")
    for dtype in DTYPES:
        for job in amax_jobs(shape, dtype, device):
            _note(timed(job, shape, copied), say, results["kernels"])
    for name, cls in classes:
        try:
            kernels = part(cls, "kernels").KERNELS
        except ImportError as error:
            say(f"  {name}: no kernels ({error})")
            continue
        if kernels.quantize_tile is None:
            say(f"  {name}: no quantize kernel, so quantizing is not timed")
        for dtype in DTYPES:
            for job in kernel_jobs(name, cls, shape, dtype, device):
                _note(timed(job, shape, copied), say, results["kernels"])
        for job in others.compiled_jobs(name, cls, shape, device, say) if peers else ():
            _note(timed(job, shape, copied), say, results["peers"])
    for job in others.other_jobs(shape, device, say) if peers else ():
        _note(timed(job, shape, copied), say, results["peers"])


def _note(row: Timed, say: Say, rows: list[dict[str, Any]]) -> None:
    rows.append(row._asdict())
    label = " ".join(filter(None, (row.recipe, row.work, row.dtype)))
    graph = f"{row.us:9.1f} us {row.share:6.3f}" if row.us is not None else " " * 19
    other = f"   other bytes: {row.differs:.4%}" if row.differs is not None else ""
    say(f"  {label:74} {graph} {row.flushed_us:9.1f} us {row.flushed_share:6.3f}{other}")


def _version(package: str) -> str | None:
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError:
        return None


def to_shape(text: str) -> Shape:
    """`4096x14336` -> (4096, 14336). Raises ValueError."""
    match = re.fullmatch(r"([1-9][0-9]{0,9})[xX]([1-9][0-9]{0,9})", text, re.ASCII)
    if match is None:
        raise ValueError(f"'{text}' is not a shape; write rows x columns, as in 4096x14336")
    return int(match[1]), int(match[2])


def main() -> int:
    """The same command without click."""
    parser = argparse.ArgumentParser(prog="python -m layoutc.bench", description="Time kernels and hooks.")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"default: {', '.join(RECIPES)}")
    parser.add_argument("--shape", action="append", default=[], metavar="MxK", help="can be repeated; 8192x8192")
    parser.add_argument("--world", type=int, default=WORLD, metavar="N", help="ranks of the hooks' group")
    parser.add_argument("--peers", action="store_true", help="also time torch.compile and torchao")
    parser.add_argument("--experts", action="store_true", help="time only products of experts")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    try:
        shapes = [to_shape(text) for text in arguments.shape]
        if arguments.experts:
            report_experts(arguments.json)
        else:
            report(arguments.recipes, shapes, arguments.world, arguments.peers, arguments.json)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _sayer(as_json: bool) -> Say:
    """Prints at once what is going on; to stderr where stdout is for JSON."""
    return partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)


def report_experts(as_json: bool) -> None:
    """Prints what products of experts take, as an entry of measured.json with as_json. Raises ValueError."""
    from layoutc.bench import experts

    found = experts.run(_sayer(as_json))
    if as_json:
        print(json.dumps(found, indent=1))


def report(recipes: Sequence[str], shapes: Sequence[Shape], world: int, peers: bool, as_json: bool) -> dict[str, Any]:
    """Prints and returns what `run` finds. With as_json one object goes to stdout, and what is going on to stderr."""
    results = run(recipes, shapes, world, peers, _sayer(as_json))
    if as_json:
        print(json.dumps(results))
    return results
