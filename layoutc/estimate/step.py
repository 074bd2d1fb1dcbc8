"""The estimate of a training step: bytes by the compiler's plan, seconds by a link and a machine, overlap by streams.

Products, copies and collectives take what they take alone; `layoutc.estimate.streams` finds what runs side by side.
Left out: the loss and what comes before the first block, norms' reductions, and memory that runs out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from layoutc.estimate.links import Link
from layoutc.estimate.machine import Machine
from layoutc.estimate.model import BF16, FP32, Model
from layoutc.estimate.streams import GroupTimes, run, tasks_of
from layoutc.ints.sizes import cdiv
from layoutc.plan.plan import Plan
from layoutc.plan.products import OPERANDS, ProductName, operand
from layoutc.plan.wire import bytes_per_rank

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, Pass] = ("forward", "backward")
ADAM = 7 * FP32  # bytes an element: AdamW reads master, gradient and two moments, and writes all but the gradient
PRODUCTS_OF: Mapping[Pass, tuple[ProductName, ...]] = {
    "forward": ("forward",),
    "backward": ("grad_input", "grad_weight"),
}
ATTENTION = {"forward": 1.0, "backward": 2.5}  # operations of flash attention's passes, of forward's


@dataclass(frozen=True)
class Use:
    """How weights are stored: plan None for bf16. cast: quantized as they are gathered. low: products on codes."""

    name: str
    plan: Plan | None = None
    cast: bool = False
    low: bool = False


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of a rank in a step, by part, each as if it ran alone; `total` is with what overlaps.

    undisturbed: the total if streams did not slow one another; how much they do, the machine's `interference`, follows
    from two links alone. overlapped: while both streams are busy. exposed: the total without forward, backward and the
    optimizer. bytes: what a rank holds after one gather of one group, in each pass; reduced: of gradients that one
    reduce-scatter adds up.
    """

    name: str
    world: int
    forward: float
    backward: float
    gather_forward: float
    gather_backward: float
    reduce_scatter: float
    optimizer: float
    host: float
    overlapped: float
    exposed: float
    total: float
    undisturbed: float
    bytes_forward: int
    bytes_backward: int
    bytes_reduced: int


def sent(use: Use, shape: tuple[int, int], world: int, which: Pass) -> int:
    """The bytes of a weight that each rank sends in a pass: by the plan, or bf16 rows."""
    m, k = shape
    if use.plan is None:
        return cdiv(m, world) * k * BF16
    return bytes_per_rank(use.plan, use.plan.forward if which == "forward" else use.plan.backward, m, k, world)


def problems(use: Use, model: Model) -> list[str]:
    """Why weights of the model can't have the recipe, with what they could be; [] if they can."""
    if use.plan is None:
        return []
    if use.plan.not_weights:
        return [f"{use.name} is for activations and gradients, not for weights: {use.plan.not_weights}"]
    m, k = use.plan.layout.multiple_m, use.plan.layout.multiple_k
    bad = [f"{rows}x{columns}" for rows, columns in dict.fromkeys(model.block.weights) if rows % m or columns % k]
    return (
        [f"{use.name} takes rows in multiples of {m} and columns in multiples of {k}, not {', '.join(bad)}"]
        if bad
        else []
    )


def estimate(use: Use, model: Model, world: int, link: Link, machine: Machine, eager: bool = True) -> StepEstimate:
    """A step of the model on `world` ranks. Raises ValueError for what can't be: see `problems`, and worlds below 1.

    eager: with the host's time; that of compiled models was not measured, and is taken as none.
    """
    if world < 1:
        raise ValueError(f"{world} ranks can't hold a model: world is 1 or more")
    for problem in problems(use, model):
        raise ValueError(problem)
    block, plain = model.block, Use("bf16")
    norms = sum(cdiv(length, world) for length in block.plain) * BF16
    own = {one: sum(sent(use, shape, world, one) for shape in block.weights) + norms for one in PASSES}
    rows = sum(cdiv(m, world) * k for m, k in block.weights) + norms // BF16  # entries of a rank's shard
    compute = {one: _compute(use, model, world, machine, one, own[one], rows) for one in PASSES}
    host = machine.group_host + len(block.weights) * _weight_host(use, machine) if eager else 0.0
    group = GroupTimes(
        gather_forward=link.gather(own["forward"], world),
        forward=compute["forward"],
        gather_backward=link.gather(own["backward"], world),
        backward=compute["backward"],
        reduce=link.reduce_scatter(rows * FP32, world),
        host_forward=host / 2,
        host_backward=host / 2,
    )
    root = sum(sent(plain, shape, world, "forward") for shape in model.root)
    head = 2 * model.tokens * sum(m * k for m, k in model.root[1:]) / (machine.products[""] * machine.in_step)
    optimizer = model.groups * _optimizer(use, model, world, rows) + root // BF16 * ADAM
    groups = list(_with_root(group, model.groups, link, world, root, head))
    tasks = tasks_of(groups, optimizer / machine.memory)
    times = run(tasks, machine.interference)
    forward, backward = sum(one.forward for one in groups), sum(one.backward for one in groups)
    return StepEstimate(
        name=use.name,
        world=world,
        forward=forward,
        backward=backward,
        gather_forward=sum(one.gather_forward for one in groups),
        gather_backward=sum(one.gather_backward for one in groups),
        reduce_scatter=sum(one.reduce for one in groups),
        optimizer=optimizer / machine.memory,
        host=host * model.groups,
        overlapped=times.overlapped,
        exposed=times.total - forward - backward - optimizer / machine.memory,
        total=times.total,
        undisturbed=run(tasks).total,
        bytes_forward=own["forward"] * world,
        bytes_backward=own["backward"] * world,
        bytes_reduced=rows * FP32 * world,
    )


def _with_root(group: GroupTimes, count: int, link: Link, world: int, root: int, head: float) -> Iterable[GroupTimes]:
    """The groups of a step. The root is gathered before the first, kept until backward, and reduced after the first."""
    for i in range(count):
        first, last = i == 0 and root > 0, i == count - 1
        yield GroupTimes(
            gather_forward=group.gather_forward + (link.gather(root, world) if first else 0),
            forward=group.forward + (head if last else 0),
            gather_backward=group.gather_backward,
            backward=group.backward + (2 * head if last else 0),
            reduce=group.reduce + (link.reduce_scatter(root // BF16 * FP32, world) if first else 0),
            host_forward=group.host_forward,
            host_backward=group.host_backward,
        )


def _weight_host(use: Use, machine: Machine) -> float:
    if use.plan is None:
        return 0.0
    return machine.cast_host if use.cast else machine.weight_host


def _compute(use: Use, model: Model, world: int, machine: Machine, which: Pass, own: int, rows: int) -> float:
    """Seconds of a group's compute stream in a pass: products, attention, elementwise work, and what FSDP2 copies."""
    seconds = sum(_products(use, m, k, model.tokens, machine, which) for m, k in model.block.weights)
    half = model.sequence / 2  # causal
    operations = 4 * model.tokens * half * model.dim * ATTENTION[which]
    moved = machine.token_bytes * model.tokens * (model.dim + model.ffn) * (1 if which == "forward" else 2) / 3
    moved += copied_bytes(use, model, world, own, rows)
    if which == "backward":
        moved += (BF16 + FP32) * rows * world  # gradients, joined in fp32
    if _low_rate(use, machine, PRODUCTS_OF[which][0]):
        entries = sum(k if which == "forward" else m for m, k in model.block.weights)
        moved += machine.operand_bytes * model.tokens * entries
    elif use.plan is not None:
        moved += own * world + BF16 * model.block.elements  # dequantized
    return seconds + operations / machine.attention + moved / machine.memory


def copied_bytes(use: Use, model: Model, world: int, own: int, rows: int) -> float:
    """Bytes of memory that one gather of a group moves besides the collective: casts, and copies in and out.

    FSDP2 copies what a rank sends into the gather's input, and what arrives out of its output.
    """
    moved = 2 * own + 2 * own * world
    if use.plan is None:
        return moved + (FP32 + BF16) * rows
    if use.cast:
        moved += FP32 * rows + own
    return moved


def _products(use: Use, m: int, k: int, tokens: int, machine: Machine, which: Pass) -> float:
    rates = (_low_rate(use, machine, name) or machine.products[""] for name in PRODUCTS_OF[which])
    return sum(2 * tokens * m * k / (rate * machine.in_step) for rate in rates)


def _low_rate(use: Use, machine: Machine, name: ProductName) -> float | None:
    """Operations a second of a product in low precision; None if it is not wanted, or has no kernel of a known rate."""
    products = use.plan.products if use.plan else None
    if not use.low or use.plan is None or products is None:
        return None
    cards = next(one for one in products.products if one.name == name).cards
    if cards is None or machine.capability < cards.least or (cards.below and machine.capability >= cards.below):
        return None
    roles = {"weight": use.plan.layout, "activation": products.activation, "gradient": products.gradient}
    pair = OPERANDS[name]
    role, orientation = next((one for one in pair if one[0] == "weight"), pair[0])
    found = operand(roles[role], orientation)
    return None if isinstance(found, str) else machine.products.get(found.scaling.name)


def _optimizer(use: Use, model: Model, world: int, rows: int) -> int:
    """Bytes of memory that an optimizer's step moves for a group: AdamW, and quantizing masters anew."""
    moved = ADAM * rows
    if use.plan is not None and not use.cast:
        both = use.plan.both
        moved += FP32 * rows + sum(bytes_per_rank(use.plan, both, m, k, world) for m, k in model.block.weights)
    return moved
