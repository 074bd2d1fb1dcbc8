"""FSDP2's all-gather hooks on ranks simulated in one process: gathered shards equal the whole quantized weight."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.conformance.material import as_fp32, expect, expect_same, expect_same_all, shared_amax, weight
from layoutc.conformance.model.codes import Array
from layoutc.conformance.model.placing import buffers
from layoutc.conformance.model.weights import Planes
from layoutc.conformance.registry import Failure, Skipped, check
from layoutc.conformance.subject import Subject
from layoutc.ints.sizes import cdiv, up
from layoutc.runtime.facts import PassName
from layoutc.runtime.fsdp2 import hooks

PASSES: tuple[PassName, ...] = ("forward", "backward", "both")
WORLDS = range(1, 9)
Inputs = list[tuple[Tensor, ...]]


class Mesh:
    """The part of a DeviceMesh that a hook reads."""

    def __init__(self, world: int) -> None:
        self.world = world

    def size(self) -> int:
        """The number of ranks."""
        return self.world


def rows_of(x: Tensor, world: int) -> list[Tensor]:
    """Cuts dim 0 like FSDP2: ceil(size / world) entries each; the last pieces may be short or empty."""
    step = cdiv(x.shape[0], world)
    return [x[min(rank * step, x.shape[0]) : (rank + 1) * step] for rank in range(world)]


def shards_of(subject: Subject, x: Tensor, world: int) -> list[Any]:
    """Each rank's rows, quantized separately with the shared amax."""
    amax = shared_amax(subject, x)
    return [subject.quantize(rows, **amax) for rows in rows_of(x, world)]


def send(shards: list[Any], which: PassName, shape: tuple[int, ...]) -> tuple[Inputs, list[Any]]:
    """The inputs and metadata that each rank's pre-all-gather hook returns."""
    world = len(shards)
    padded = cdiv(shape[0], world) * prod(shape[1:-1])
    with hooks.simulate(which, shape, padded):
        sent = [shard.fsdp_pre_all_gather(Mesh(world)) for shard in shards]
    return [inputs for inputs, _ in sent], [metadata for _, metadata in sent]


def collect(inputs: Inputs) -> tuple[Tensor, ...]:
    """The all-gather: for each sent tensor, all ranks' bytes in rank order."""
    return tuple(
        torch.cat([tensors[i].reshape(-1) for tensors in inputs]).view(-1, *like.shape[1:])
        for i, like in enumerate(inputs[0])
    )


def fits(subject: Subject, shape: tuple[int, ...], world: int) -> bool:
    """True if the recipe accepts a weight of this shape and its cuts split no block."""
    per_rank, rows = cdiv(shape[0], world) * prod(shape[1:-1]), prod(shape[:-1])
    um, uk = subject.units
    whole = rows % um == 0 and shape[-1] % uk == 0
    whole &= all(part.shape[0] * prod(shape[1:-1]) % um == 0 for part in rows_of(torch.empty(shape[0], 0), world))
    return whole and (per_rank >= rows or per_rank % subject.plan.shard_rows == 0)


def weights(subject: Subject, world: int) -> Iterator[tuple[int, ...]]:
    """Shapes that can be sharded: even, a short last rank, empty ranks, ragged, leading dims."""
    unit, um = subject.rows, subject.units[0]
    k = up(min(subject.blocks[1], 64) + 8, subject.units[1])
    short = up(1, um)
    candidates = [
        (world * unit, k),
        (2 * world * unit - (unit if unit > um else um), k),
        ((world - 1) * unit + short, k),
        (max(world - 1, 1), unit, k),
        (cdiv(world, 2), 2, unit, k),
    ]
    seen = [shape for shape in dict.fromkeys(candidates) if fits(subject, shape, world)]
    large = 300_000  # elements; recipes with large blocks get fewer shapes
    yield from (shape for shape in seen if prod(shape) <= large or shape == seen[0] or subject.thorough)


def served_planes(subject: Subject, tensor: Any, which: PassName) -> dict[str, Tensor]:
    """A gathered weight's planes without the amax. Fails unless it has all planes that the pass needs."""
    planes = {name: plane for name, plane in tensor.planes().items() if name != "amax"}
    served = {name for orientation in subject.facts.serves[which] for name in subject.facts.sources[orientation]}
    expect(served - {"amax"} <= set(planes), f"the gathered weight holds only {', '.join(planes)}", **{"pass": which})
    return planes


@check(
    "gather",
    "on 1 to 8 ranks, in every pass, gathers equal quantizing the whole weight, byte for byte",
    of_weights=True,
)
def gather(subject: Subject) -> None:
    """Includes uneven and empty shards."""
    for world in WORLDS:
        for number, shape in enumerate(weights(subject, world)):
            x = weight(subject, shape, ("plain", "zeros", "coarse")[number % 3])
            whole = subject.quantize(x, **shared_amax(subject, x))
            planes = subject.model.quantize(as_fp32(x))
            expected = Expected(
                planes,
                buffers(subject.layout, planes, *subject.matrix(shape)),
                {name: whole.values_of(name, torch.float32) for name in subject.layout.orientations},
            )
            shards = shards_of(subject, x, world)
            for which in PASSES:
                _gathers(subject, shards, expected, which, shape)


class Expected(NamedTuple):
    """The expected content of a gathered weight, for both passes."""

    planes: Planes
    buffers: dict[str, Array]
    values: dict[str, Tensor]


def _gathers(subject: Subject, shards: list[Any], expected: Expected, which: PassName, shape: tuple[int, ...]) -> None:
    world = len(shards)
    details: dict[str, Any] = {"world": world, "pass": which, "shape": shape}
    inputs, metadata = send(shards, which, shape)
    outputs = collect(inputs)
    serves = subject.facts.serves[which]
    for rank in sorted({0, world - 1}):
        result = shards[rank].fsdp_post_all_gather(outputs, metadata[rank], torch.float32)
        tensor, inner = result
        freed = not inner or bool(metadata[rank].route.slots)
        expect(type(tensor) is subject.tensor and freed, "the post hook returns something else", **details)
        expect(tuple(tensor.shape) == shape, f"gathered shape {tuple(tensor.shape)}", **details)
        expect(tensor.orientations == serves, f"serves {tensor.orientations}, planned {serves}", **details)
        planes = served_planes(subject, tensor, which)
        matrix = subject.matrix(shape)
        expect_same_all(subject, planes, {name: expected.planes[name] for name in planes}, matrix, rank=rank, **details)
        laid = {n: b for n, b in expected.buffers.items() if n.startswith(tuple(serves))}
        named = {n: b for n, b in tensor.buffers().items() if n.startswith(tuple(serves))}
        expect_same_all(subject, named, laid, matrix, rank=rank, **details)
        for orientation in serves:
            value = tensor.values_of(orientation, torch.float32)
            expect_same(subject, f"{orientation} values", value, expected.values[orientation], **details)


@check(
    "gather-again",
    "a gathered weight is refreshed in place: every plane, and every old view, is the new weight's",
    of_weights=True,
)
def gather_again(subject: Subject) -> None:
    """FSDP2 passes the same object to the post hook after each optimizer step."""
    for world in (1, 2, 4):
        shape = next(weights(subject, world))
        for which in PASSES:
            first, second = weight(subject, shape), weight(subject, shape, salt=1) * 8.0
            details: dict[str, Any] = {"world": world, "pass": which, "shape": shape}
            shards = shards_of(subject, first, world)
            inputs, metadata = send(shards, which, shape)
            outputs = collect(inputs)
            tensor, _ = shards[0].fsdp_post_all_gather(outputs, metadata[0], torch.float32)
            view = tensor.view(-1)
            fresh = shards_of(subject, second, world)
            inputs, metadata = send(fresh, which, shape)
            result = fresh[0].fsdp_post_all_gather(collect(inputs), metadata[0], torch.float32, out=tensor)
            expect(result is None, "with out=, the post hook returns something", **details)
            expected = subject.model.quantize(as_fp32(second))
            planes = served_planes(subject, tensor, which)
            expect_same_all(subject, planes, {n: expected[n] for n in planes}, subject.matrix(shape), **details)
            for orientation in subject.facts.serves[which]:
                seen, wanted = (q.values_of(orientation, torch.float32) for q in (view, tensor))
                expect_same(subject, "values of a view", seen, wanted.flatten(), **details)


@check(
    "gather-sizes",
    "all ranks send contiguous bytes of equal sizes, the same in forward and backward, as planned",
    of_weights=True,
    compares="facts",
)
def gather_sizes(subject: Subject) -> None:
    """FSDP2 allocates the outputs once, and LAYOUT.gather states their sizes."""
    for world in WORLDS:
        for shape in weights(subject, world):
            shards = shards_of(subject, weight(subject, shape), world)
            sizes = {}
            for which in PASSES:
                details: dict[str, Any] = {"world": world, "pass": which, "shape": shape}
                inputs, metadata = send(shards, which, shape)
                for tensors in inputs:
                    raw = all(type(t) is Tensor and t.dtype == torch.uint8 and t.is_contiguous() for t in tensors)
                    expect(raw, "a rank sends something other than contiguous bytes", **details)
                sent = {tuple(t.numel() for t in tensors) for tensors in inputs}
                expect(len(sent) == 1, f"ranks send different sizes: {sent}", **details)
                sizes[which] = sent
                if world > 1 and len(shape) == 2 and not metadata[0].route.slots:
                    planned = tuple(f.nbytes for f in subject.facts.gather(*shape, world, which).planes.values())
                    expect(sent == {planned}, f"ranks send {sent}, planned {planned}", **details)
            both: dict[str, Any] = {"world": world, "shape": shape}
            expect(sizes["forward"] == sizes["backward"], f"sizes differ between passes: {sizes}", **both)


@check(
    "cut-blocks",
    "shards cut inside blocks gather to the whole weight, byte for byte, and send equal sizes",
    of_weights=True,
)
def cut_blocks(subject: Subject) -> None:
    """Two or more ranks share these blocks. Tensors that FSDP2 frees must own their storages."""
    unit, (um, uk) = subject.facts.block_rows, subject.units
    if unit == 1:
        raise Skipped("no rows share values")
    tried = 0
    for world in range(2, 9):
        for rows in (unit, 3 * unit, up(unit * world + unit // 2, um), 5 * unit):
            if rows % um or cdiv(rows, world) % unit == 0:
                continue
            tried += 1
            shape = (rows, uk)
            whole = subject.quantize(weight(subject, shape))
            shards = list(whole.split(cdiv(rows, world)))
            shards += [whole[:0] for _ in range(world - len(shards))]
            for which in PASSES:
                _joins(subject, shards, whole, which)
    if not tried:
        raise Failure("there is no weight whose shards cut a block; is block_rows right?")


def _joins(subject: Subject, shards: list[Any], whole: Any, which: PassName) -> None:
    world, shape = len(shards), tuple(whole.shape)
    details: dict[str, Any] = {"world": world, "pass": which, "shape": shape}
    inputs, metadata = send(shards, which, shape)
    sent = {tuple(t.numel() for t in tensors) for tensors in inputs}
    expect(len(sent) == 1, f"ranks send different sizes: {sent}", **details)
    planned = subject.facts.gather(*shape, world, which).bytes_per_rank
    expect(sum(next(iter(sent))) == planned, f"a rank sends {sent}, planned {planned} bytes", **details)
    tensor, inner = shards[0].fsdp_post_all_gather(collect(inputs), metadata[0], torch.float32)
    planes = served_planes(subject, tensor, which)
    expect_same_all(subject, planes, {name: whole.planes()[name] for name in planes}, **details)
    owned = all(plane.untyped_storage().nbytes() == plane.numel() * plane.element_size() for plane in inner)
    expect(owned, "an inner tensor does not own its storage", **details)
