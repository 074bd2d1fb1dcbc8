"""The most bytes that gathers and gradients add to resident ones during a step: a walk in FSDP2's order.

Checks the moments that can be highest, in steps after the first: while a collective runs, after a gather's copy-out,
and while a group's weights are dequantized on gather, when codes and values coexist. FSDP2 of torch 2.11 to 2.14 keeps
one gather's buffer until forward's next gather has been issued, gathers backward's next group while this one computes,
and keeps the input of one reduce-scatter. An exchange keeps the gradients themselves instead.

With activations, the peak is at another moment: later layers' activations are freed by the time gradients are largest.
"""

from __future__ import annotations

from dataclasses import dataclass

from layoutc.budget.activations import Activations
from layoutc.budget.groups import Group, Groups


@dataclass(frozen=True)
class Peaks:
    """Bytes on top of weights, masters and moments. root: gathered weights that stay until backward is done. layer: the
    most that any layer holds while it computes. forward, backward: each pass's peak without activations; backward's
    includes sharded gradients. whole: the peak with activations, of which `activations` bytes exist then."""

    root: int
    layer: int
    forward: int
    backward: int
    whole: int = 0
    activations: int = 0

    @property
    def most(self) -> int:
        """The higher peak of both passes, without activations."""
        return max(self.forward, self.backward)


@dataclass
class _Highest:
    """The highest total seen, and how much of it is activations."""

    most: int = 0
    activations: int = 0

    def see(self, activations: int, *others: int) -> None:
        """Records moments that share the same activations."""
        if (most := activations + max(others)) > self.most:
            self.most, self.activations = most, activations


def peaks(groups: Groups, kept: Activations) -> Peaks:
    """The peaks of a step whose layers compute one after another, each with all of its groups gathered."""
    none = Activations((0,) * len(groups.layers), (0,) * len(groups.layers), 0)
    root = sum(group.gather("forward").held for group in groups.root)
    held = [[max(g.gather("forward").held, g.gather("backward").held) for g in one] for one in groups.layers]
    layer = max(map(sum, held), default=0)
    plain = [_forward(groups, none), _backward(groups, root, none)]
    whole = max(_forward(groups, kept), _backward(groups, root, kept), key=lambda one: one.most)
    return Peaks(root, layer, plain[0].most, plain[1].most, whole.most, whole.activations)


def _buffer(group: Group, which: str) -> int:
    """Bytes of the collective's output buffer, which contains its input."""
    return group.gather(which).sent * group.ranks if group.ranks > 1 else 0


def _forward(groups: Groups, activations: Activations) -> _Highest:
    seen, kept, held, before = _Highest(), 0, 0, 0
    for layer, own in zip((groups.root, *groups.layers), (0, *activations.kept), strict=True):
        inside, before = 0, before + own
        for group in layer:
            buffer = _buffer(group, "forward")
            inside += group.gather("forward").held
            # The last buffer is freed when this one is copied out, and codes once they are dequantized.
            seen.see(before, held + inside + kept + buffer + group.gather("forward").arrived)
            kept = buffer
        if layer is groups.root:
            held = inside
    return seen


def _backward(groups: Groups, root: int, activations: Activations) -> _Highest:
    """Walks layers from last to first, each with its gradients. The root's exist from the start and are reduced last. A
    layer stays gathered while its experts compute, which are a separate group if other ranks shard them."""
    early = sum(
        piece.placed.matrix[0] * piece.placed.matrix[1] * group.dtypes.gathered
        for group in groups.root
        for piece, member in zip(group.trained, (m for m in group.members if m.piece.trains), strict=True)
        if member.weight.kind != "embedding" or member.weight.tied
    )
    order = [group for layer in reversed(groups.layers) for group in layer]
    seen, sharded, kept, before = _Highest(), 0, 0, sum(activations.kept)
    seen.see(activations.total, root)
    following = iter([*(_buffer(group, "backward") for group in order[1:]), 0])
    for at, layer in reversed([*enumerate(groups.layers)]):
        open_, coming, here = 0, 0, before + activations.computing[at]
        for group in layer:  # gathered, then the next one's gather is issued
            base, own = root + early + sharded + kept, group.gather("backward")
            seen.see(before, base + open_ + _buffer(group, "backward") + own.held + own.arrived)
            open_, coming = open_ + own.held, next(following)
            seen.see(here, base + open_ + coming)
        for group in reversed(layer):  # inner groups get their gradients first, and are freed
            base = root + early + sharded + coming
            computing = open_ + group.gradients + kept
            open_ -= group.gather("backward").held
            kept = _input(group)
            seen.see(here, base + computing)
            before -= activations.kept[at] if group is layer[0] else 0
            seen.see(before, base + open_ + kept + _reducing(group))
            sharded += _kept_gradients(group)
    for group in groups.root:
        computing = root + group.gradients + _whole_embeddings(group) + kept
        kept = _input(group)
        seen.see(0, sharded + computing, sharded + kept + _reducing(group))
        sharded += _kept_gradients(group)
    return seen


def _kept_gradients(group: Group) -> int:
    """Bytes of sharded gradients, in the parameters' dtype."""
    return group.trained_elements * group.dtypes.stored


def _input(group: Group) -> int:
    """Bytes that FSDP2 keeps until the next group is reduced: the reduce-scatter's input, or whole gradients."""
    return group.gradients if group.exchanges else group.reduced * group.ranks


def _reducing(group: Group) -> int:
    """Bytes on top of `_input`: whole gradients while they are copied in, then the output; in an exchange, the sent and
    received bytes and the sum, also for codes among replicas. The variables of FSDP2's loop over gradients keep the
    last one, and the last reordered one (experts sharded on rows), alive to the end; without it, nothing is kept."""
    if not group.trained:
        return 0
    sizes = [piece.placed.matrix[0] * piece.placed.matrix[1] * group.dtypes.gathered for piece in group.trained]
    ordered = [at for at, piece in enumerate(group.trained) if piece.placed.dim][-1:]
    again = sum(sizes[at] for at in ordered)
    last = sum(sizes[at] for at in {len(sizes) - 1, *ordered})
    if group.ranks == 1 or group.reduces_in_few_steps:
        again = last = 0
    converted = _kept_gradients(group) if group.dtypes.stored != group.dtypes.reduced else 0
    if group.sent_among is not None:
        codes, sums = group.sent_among
        between = group.replicas * (codes + max(codes, sums)) if sums else (1 + group.replicas) * codes
        converted = max(converted, between)
    if group.exchanges and group.exchange:  # the loop's last gradient is in `_input` already
        sent = group.sent_gradients * group.ranks
        before = group.trained_elements * group.ranks * group.dtypes.gathered
        most = max(sent + before, 2 * sent) if group.exchange.codes else 2 * sent
        return again + group.reduced + max(most, converted)
    return max(group.gradients + again, group.reduced + converted + last)


def _whole_embeddings(group: Group) -> int:
    """Bytes of whole gradients of embeddings that tensor parallelism cuts: DTensor materializes them, and they are
    alive while FSDP2 takes its part."""
    return sum(
        member.weight.elements * group.dtypes.gathered
        for member in group.members
        if member.weight.kind == "embedding" and member.piece.trains and member.piece.placed.parts > 1
    )
