"""The estimate of a training step: bytes by the compiler's plan, seconds by a link and a machine, overlap by streams.

Products, copies and collectives take what they take alone; `layoutc.estimate.streams` finds what runs side by side.
Left out: the loss and what comes before the first block, norms' reductions, and memory that runs out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from layoutc.estimate.links import Link
from layoutc.estimate.machine import Machine
from layoutc.estimate.model import BF16, FP32, Model
from layoutc.estimate.state import ADAMW
from layoutc.estimate.work import PASSES, Load, Parts, Pass, Product, Runs, Sent, Use, Work, step
from layoutc.ints.cuts import Cuts
from layoutc.ints.sizes import cdiv
from layoutc.plan.wire import bytes_per_rank, own_bytes, packs


@dataclass(frozen=True)
class StepEstimate(Parts):
    """The parts of a step, of equal groups.

    bytes: what has arrived with one gather of one group, in each pass; reduced: of gradients that one reduce-scatter,
    or exchange, adds up, as they travel.
    """

    name: str
    world: int
    bytes_forward: int
    bytes_backward: int
    bytes_reduced: int


def sent(use: Use, shape: tuple[int, int], world: int, which: Pass) -> int:
    """The bytes of a weight that each rank sends in a pass: by the plan, or bf16 rows."""
    m, k = shape
    if use.plan is None:
        return cdiv(m, world) * k * BF16
    if use.on_gather:  # values are those of forward in both passes
        return own_bytes(use.plan.forward, Cuts.of(m, world), k)
    return bytes_per_rank(use.plan, use.plan.forward if which == "forward" else use.plan.backward, m, k, world)


def packed(use: Use, shapes: Sequence[tuple[int, int]], world: int) -> int:
    """The bytes that each rank sends of a group's weights, if these travel in one tensor, all of them; see `Sent`."""
    fit = _fit(use, shapes, world)
    if not use.on_gather or len(fit) < 2 or not all(fit):
        return 0
    return sum(sent(use, shape, world, "forward") for shape in shapes)


def settled(use: Use, shapes: Sequence[tuple[int, int]], world: int) -> Use:
    """The same, saying whether gathers of a group of these weights leave values."""
    return replace(use, on_gather=use.leaves_values(_fit(use, shapes, world)))


def _fit(use: Use, shapes: Sequence[tuple[int, int]], world: int) -> list[bool]:
    """Whether each weight can travel in one tensor with others; [] of plain ones."""
    if use.plan is None:
        return []
    return [world > 1 and packs(use.plan.forward, Cuts.of(m, world), k) for m, k in shapes]


def problems(use: Use, model: Model) -> list[str]:
    """Why weights of the model can't have the recipe, with what they could be; [] if they can."""
    if use.plan is None:
        return []
    if use.plan.not_weights:
        return [f"{use.name} is {use.plan.not_weights}"]
    if use.problem:
        return [use.problem]
    m, k = use.plan.layout.multiple_m, use.plan.layout.multiple_k
    bad = [f"{rows}x{columns}" for rows, columns in dict.fromkeys(model.block.weights) if rows % m or columns % k]
    return (
        [f"{use.name} takes rows in multiples of {m} and columns in multiples of {k}, not {', '.join(bad)}"]
        if bad
        else []
    )


def estimate(
    use: Use,
    model: Model,
    world: int,
    link: Link,
    machine: Machine,
    runs: Runs = "compiled",
    together: int = 1,
) -> StepEstimate:
    """A step of the model on `world` ranks. Raises ValueError for what can't be: see `problems`, and worlds below 1.

    runs: how steps run, which decides what they take of the host. together: how many follow one another.
    """
    if world < 1:
        raise ValueError(f"{world} ranks can't hold a model: world is 1 or more")
    if together < 1:
        raise ValueError(f"{together} steps can't follow one another: together is 1 or more")
    for problem in problems(use, model):
        raise ValueError(problem)
    block, plain = model.block, Use("bf16")
    use = settled(use, block.weights, world)
    norms = sum(cdiv(length, world) for length in block.plain) * BF16
    own = {one: sum(sent(use, shape, world, one) for shape in block.weights) + norms for one in PASSES}
    rows = sum(cdiv(m, world) * k for m, k in block.weights) + norms // BF16  # entries of a rank's shard
    both = use.plan.both if use.plan else None
    exchanged = use.exchange is not None and world > 1
    gradients = rows * (BF16 if exchanged else FP32), exchanged
    written = sum(bytes_per_rank(use.plan, both, m, k, world) for m, k in block.weights) if use.plan and both else 0
    quantizing = FP32 * rows + written if use.plan and not use.cast else 0
    group = Work(
        sent=(Sent(world, own["forward"], own["backward"], rows, *gradients, packed(use, block.weights, world)),),
        products=tuple(Product(m, k) for m, k in block.weights),
        optimizer=ADAMW.moved(rows, rows, 1) + quantizing,
        quantized=block.elements if use.plan else 0,
        weights=len(block.weights),
        values=bool(use.on_gather),
        attention=model.dim,
        width=model.dim + model.ffn,
    )
    root = sum(sent(plain, shape, world, "forward") for shape in model.root)
    around = Work(
        sent=(Sent(world, root, 0, root // BF16, root // BF16 * (BF16 if exchanged else FP32), exchanged),),
        products=tuple(Product(m, k, quantized=False) for m, k in model.root[1:]),
        optimizer=ADAMW.moved(root // BF16, root // BF16, 1),
    )
    parts = step(use, [group] * model.groups, around, Load(model.tokens, model.sequence), link, machine, runs, together)
    return StepEstimate(
        **{field.name: getattr(parts, field.name) for field in fields(Parts)},
        name=use.name,
        world=world,
        bytes_forward=own["forward"] * world,
        bytes_backward=own["backward"] * world,
        bytes_reduced=gradients[0] * world,
    )
