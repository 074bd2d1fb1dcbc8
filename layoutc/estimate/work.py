"""A rank's work for an FSDP group in a step: what it sends, multiplies and updates, and how long that takes.

Callers that know a model define its groups; the times on a card and a link are the same for all models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from layoutc.estimate.links import Links, Ring
from layoutc.estimate.machine import Machine
from layoutc.estimate.state import Wire
from layoutc.estimate.streams import GroupTimes, in_a_row, run, tasks_of, together_if_many
from layoutc.ints.gathers import leaves_values, values_cost_nothing
from layoutc.plan.plan import Plan
from layoutc.plan.products import OPERANDS, ProductName, operand

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, Pass] = ("forward", "backward")
ALONE = Ring(1, 1)
Runs = Literal["compiled", "eager", "graph"]  # graph: captured in a CUDA graph, without host time
BF16, FP32 = 2, 4  # bytes
PRODUCTS_OF: Mapping[Pass, tuple[ProductName, ...]] = {
    "forward": ("forward",),
    "backward": ("grad_input", "grad_weight"),
}
ATTENTION = {"forward": 1.0, "backward": 2.5}  # operations of flash attention's passes, relative to forward


@dataclass(frozen=True)
class Use:
    """How weights are stored and used. plan: None for bf16. cast: quantized at each gather. low: products in low
    precision. exchange: how `layoutc.exchange_gradients` sends gradients; None: FSDP2 reduces them. among: the same for
    sums among replicas. on_gather: whether gathers leave values, by `layoutc.set_products_`; None: values if they cost
    nothing, the default of `layoutc.dequantize`.
    """

    name: str
    plan: Plan | None = None
    cast: bool = False
    low: bool = False
    exchange: Wire | None = None
    among: Wire | None = None
    on_gather: bool | None = None

    @property
    def problem(self) -> str:
        """Why weights can't be used like this, and what works instead; "" if they can."""
        if self.plan is None or not (self.on_gather and self.low):
            return ""
        return "weights that are dequantized on gather have no products in low precision; leave out one of the two"

    def leaves_values(self, packs: Sequence[bool], stays: bool = False, value: int = BF16) -> bool:
        """Whether gathers of a group leave values. packs: for each weight in the recipe, whether it can be dequantized
        from the gather's output. stays: stays gathered after forward. value: bytes per value."""
        if self.plan is None or self.on_gather is not None:
            return self.plan is not None and bool(self.on_gather)
        free = [values_cost_nothing(fits, value, self.plan.passes_differ, stays) for fits in packs]
        return not self.low and any(leaves_values([None] * len(free), free))


@dataclass(frozen=True)
class Product:
    """An (m, k) weight that multiplies `times` a rank's tokens. quantized: in the recipe. trains: has a gradient."""

    m: int
    k: int
    times: float = 1.0
    quantized: bool = True
    trains: bool = True


@dataclass(frozen=True)
class Sent:
    """A group's collectives over a ring. forward, backward: bytes that a rank sends. rows: trained elements of shards.

    reduced: bytes of a reduce-scatter's output; if `exchanged`, the bytes sent to each rank. replicated: bytes summed
    over the ring of `replicas`. among: bytes of (codes, sums) sent to each other replica; None: they are all-reduced.
    packed: bytes of a gather that are dequantized directly from its output, so that nothing copies them out.
    """

    ring: Ring
    forward: int
    backward: int
    rows: int
    reduced: int = 0
    exchanged: bool = False
    replicated: int = 0
    replicas: Ring = ALONE
    packed: int = 0
    among: tuple[int, int] | None = None

    @property
    def ranks(self) -> int:
        """Ranks in the ring."""
        return self.ring.ranks


@dataclass(frozen=True)
class Work:
    """A group's work. products: on this rank. optimizer: bytes that its step moves. quantized: elements of the whole
    weights in the recipe, `weights` in number. values: gathers leave values. attention: columns of attention. width:
    columns of elementwise work. again: backward recomputes forward."""

    sent: tuple[Sent, ...]
    products: tuple[Product, ...]
    optimizer: int = 0
    quantized: int = 0
    weights: int = 0
    values: bool = False
    attention: float = 0.0
    width: float = 0.0
    again: bool = False

    @property
    def rows(self) -> int:
        """Elements of this rank's shards."""
        return sum(one.rows for one in self.sent)


@dataclass(frozen=True)
class Load:
    """A rank's tokens in a step, in sequences of `sequence` tokens."""

    tokens: int
    sequence: int


@dataclass(frozen=True)
class Parts:
    """A rank's seconds in a step, by part, each as if it ran alone; `total` accounts for overlap.

    undisturbed: the total if streams did not slow each other; the machine's `interference`, by which they do, was
    measured on only two links. overlapped: while compute and a link are busy. exposed: the total without forward,
    backward and the optimizer. reduce_scatter: includes exchanges of gradients, with their copies and sums. all_reduce:
    among replicas. within, across: all collectives within a host, and across hosts. memory: the memory-bound part of
    forward, backward and the optimizer.
    """

    forward: float
    backward: float
    gather_forward: float
    gather_backward: float
    reduce_scatter: float
    all_reduce: float
    within: float
    across: float
    optimizer: float
    memory: float
    host: float
    overlapped: float
    exposed: float
    total: float
    undisturbed: float


def step(
    use: Use,
    groups: Sequence[Work],
    root: Work,
    load: Load,
    links: Links,
    machine: Machine,
    runs: Runs = "compiled",
    together: int = 1,
) -> Parts:
    """Estimates a step over groups in forward's order. root: gathered before the first, kept until backward is done.

    runs: how steps run, which decides their host time. together: how many steps run back to back, starting with idle
    ranks and cards; the result is their mean.
    """
    if not groups:  # there is only the root
        groups, root = [root], Work((), ())
    times: dict[Work, GroupTimes] = {}
    for work in groups:
        if work not in times:
            times[work] = _times(use, work, load, links, machine, runs)
    head = sum(2 * load.tokens * one.times * one.m * one.k for one in root.products)
    head /= machine.products[""] * machine.in_step
    whole = _with_root([times[work] for work in groups], _times(use, root, load, links, machine, "graph"), head)
    made = together_if_many(whole)
    every = Counter([*groups, root])
    optimizer = sum(count * work.optimizer for work, count in every.items())
    host = sum(one.host_forward + one.host_backward for one in made)
    tasks = in_a_row(tasks_of(made, optimizer / machine.memory), together, host)
    ran = run(tasks, machine.interference, links.within.disturbed)
    total = ran.total / together
    forward, backward = sum(one.forward for one in made), sum(one.backward for one in made)
    moved = sum(one.memory_forward + one.memory_backward for one in made)
    near, far = (
        sum(count * _in_collectives(work, links, machine, crosses) for work, count in every.items())
        for crosses in (False, True)
    )
    return Parts(
        forward=forward,
        backward=backward,
        gather_forward=sum(one.gather_forward for one in made),
        gather_backward=sum(one.gather_backward for one in made),
        reduce_scatter=sum(one.reduce for one in made),
        all_reduce=sum(one.all_reduce for one in made),
        within=near,
        across=far,
        optimizer=optimizer / machine.memory,
        memory=moved + optimizer / machine.memory,
        host=host,
        overlapped=ran.overlapped / together,
        exposed=total - forward - backward - optimizer / machine.memory,
        total=total,
        undisturbed=run(tasks).total / together,
    )


def _times(use: Use, work: Work, load: Load, links: Links, machine: Machine, runs: Runs) -> GroupTimes:
    forward, memory_forward = _compute(use, work, load, machine, "forward")
    backward, memory_backward = _compute(use, work, load, machine, "backward")
    if work.again:
        backward, memory_backward = backward + forward, memory_backward + memory_forward
    return GroupTimes(
        gather_forward=_gathered(work, links, "forward"),
        forward=forward,
        gather_backward=_gathered(work, links, "backward"),
        backward=backward,
        memory_forward=memory_forward,
        memory_backward=memory_backward,
        reduce=sum(_reduced(one, links, machine) for one in work.sent),
        all_reduce=sum(_added_up(one, links, machine) for one in work.sent),
        host_forward=_host(use, work, machine, "forward", runs),
        host_backward=_host(use, work, machine, "backward", runs),
    )


def _gathered(work: Work, links: Links, which: Pass) -> float:
    """Seconds of a group's gathers in a pass; some have none in one of the passes."""
    return sum(links.gather(nbytes, one.ring) for one in work.sent if (nbytes := getattr(one, which)))


def _reduced(one: Sent, links: Links, machine: Machine) -> float:
    """Seconds of reducing gradients over ranks, on the stream that sends them; 0 if no weights are trained.

    An exchange copies gradients into a buffer here, quantizes that if it sends codes, and sums in fp32.
    """
    if not one.rows:
        return 0.0
    if not one.exchanged:
        return links.reduce_scatter(one.reduced, one.ring)
    copied = 2 * BF16 * one.rows if one.reduced < BF16 * one.rows else 0
    moved = (BF16 * one.rows + copied + 2 * one.reduced) * one.ranks + FP32 * one.rows
    return links.exchange(one.reduced, one.ring) + moved / machine.memory


def _added_up(one: Sent, links: Links, machine: Machine) -> float:
    """Seconds of summing over replicas, including quantizing sums and reading all replicas' codes."""
    if one.among is None:
        return links.all_reduce(one.replicated, one.replicas)
    codes, sums = one.among
    moved = 2 * FP32 * one.rows + (1 + one.replicas.ranks) * codes + (codes + sums) * one.replicas.ranks * bool(sums)
    sent = links.exchange(codes, one.replicas) + links.gather(sums, one.replicas) if sums else 0.0
    return (sent or links.gather(codes, one.replicas)) + moved / machine.memory


def _in_collectives(work: Work, links: Links, machine: Machine, crosses: bool) -> float:
    """Seconds of a group's collectives in a step that stay within a host, or that cross hosts."""
    found = 0.0
    for one in work.sent:
        if one.ring.crosses == crosses:
            found += sum(links.gather(nbytes, one.ring) for nbytes in (one.forward, one.backward) if nbytes)
            found += _reduced(one, links, machine)
        if one.replicas.crosses == crosses:
            found += _added_up(one, links, machine)
    return found


def _with_root(groups: list[GroupTimes], root: GroupTimes, head: float) -> list[GroupTimes]:
    """The groups of a step. The root is gathered before the first, kept until backward, and reduced after the first."""
    first = groups[0]
    groups[0] = replace(
        first,
        gather_forward=first.gather_forward + root.gather_forward,
        reduce=first.reduce + root.reduce,
        all_reduce=first.all_reduce + root.all_reduce,
    )
    groups[-1] = replace(groups[-1], forward=groups[-1].forward + head, backward=groups[-1].backward + 2 * head)
    return groups


def _host(use: Use, work: Work, machine: Machine, which: Pass, runs: Runs) -> float:
    """Host seconds for a group in a pass: a gather, and the pass's launches, a third of which are forward's.

    FSDP2 gathers nothing over one rank. Groups with quantized weights reduce their gradients in few steps.
    """
    if runs == "graph":
        return 0.0
    taken = use.plan is not None and work.weights > 0
    seconds = machine.group_host
    if taken:
        own = machine.cast_host if use.cast else machine.weight_host
        if runs == "compiled" and not is_low(use, machine):
            own -= machine.graph_host
        if work.values:  # products are those of plain weights; only casting remains
            own = machine.cast_host - machine.weight_host if use.cast else 0.0
        low = runs == "eager" and is_low(use, machine)  # low-precision products cost an eager model more host time
        seconds += work.weights * (own + (machine.low_host if low else 0.0))
    seconds *= len(PRODUCTS_OF[which]) / sum(map(len, PRODUCTS_OF.values()))
    if taken and which == "backward" and any(one.ranks > 1 for one in work.sent):
        seconds -= machine.copied_host
    if any(one.ranks > 1 and getattr(one, which) for one in work.sent):
        quantized = work.weights if taken else 0
        plain = max(0, len(work.products) - quantized)
        of_codes = machine.values_gather_host if any(one.packed for one in work.sent) else machine.gather_host
        seconds += quantized * of_codes + plain * machine.plain_gather_host
    return seconds


def is_low(use: Use, machine: Machine) -> bool:
    """Whether any product runs in low precision."""
    products = use.plan.products if use.plan else None
    return products is not None and any(_low_rate(use, machine, one.name) for one in products.products)


def _compute(use: Use, work: Work, load: Load, machine: Machine, which: Pass) -> tuple[float, float]:
    """Seconds of a group's compute stream in a pass: products, attention, elementwise work and FSDP2's copies; and its
    memory-bound part, which is the last two."""
    seconds = sum(_product(use, one, load.tokens, machine, which) for one in work.products)
    half = load.sequence / 2  # causal
    operations = 4 * load.tokens * half * work.attention * ATTENTION[which]
    moved = machine.token_bytes * load.tokens * work.width * (1 if which == "forward" else 2) / 3
    in_recipe = use.plan is not None and work.quantized > 0
    for one in work.sent:
        moved += copied_bytes(use if in_recipe else Use("bf16"), one.ranks, getattr(one, which), one.rows)
        moved -= 2 * one.packed * one.ranks if getattr(one, which) else 0
        if which == "backward" and not one.exchanged:
            moved += (BF16 + FP32) * one.rows * one.ranks  # copy-in of gradients, in fp32
    seconds += operations / machine.attention
    if not in_recipe:
        return seconds + moved / machine.memory, moved / machine.memory
    if _low_rate(use, machine, PRODUCTS_OF[which][0]):
        entries = sum(one.times * (one.k if which == "forward" else one.m) for one in work.products if one.quantized)
        moved += machine.operand_bytes * load.tokens * entries
    else:
        # Dequantizing, in each product or on gather.
        moved += sum(getattr(one, which) * one.ranks for one in work.sent) + BF16 * work.quantized
    return seconds + moved / machine.memory, moved / machine.memory


def copied_bytes(use: Use, world: int, own: int, rows: int) -> float:
    """Bytes of memory that one gather of a group moves besides the collective: casts, copy-in and copy-out.

    FSDP2 copies what a rank sends into the gather's input, and what it receives out of its output.
    """
    moved = 2 * own + 2 * own * world
    if use.plan is None:
        return moved + (FP32 + BF16) * rows
    if use.cast:
        moved += FP32 * rows + own
    return moved


def _product(use: Use, one: Product, tokens: int, machine: Machine, which: Pass) -> float:
    names = [name for name in PRODUCTS_OF[which] if one.trains or name != "grad_weight"]
    rates = ((one.quantized and _low_rate(use, machine, name)) or machine.products[""] for name in names)
    return sum(2 * tokens * one.times * one.m * one.k / (rate * machine.in_step) for rate in rates)


def _low_rate(use: Use, machine: Machine, name: ProductName) -> float | None:
    """FLOP/s of a product in low precision; None if it is not wanted, or no kernel with a known rate serves it."""
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
