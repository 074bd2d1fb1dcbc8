"""Requantizing the same weights repeatedly, as an optimizer does: what does not change is prepared once."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, chain
from math import prod
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.amaxes import amax_plans
from layoutc.runtime.kernels.batches import addresses_of
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.quantize.amax import join, reduce_max
from layoutc.runtime.quantize.block_edges import check_whole_blocks
from layoutc.runtime.quantize.weights import as_matrix, check_out
from layoutc.runtime.sharding.shards import RowSharding
from layoutc.runtime.streams import capturing, stream_of
from layoutc.runtime.torch_private import foreach_copy_
from layoutc.runtime.weight.tensor import QuantizedTensor, written

Pairs = Sequence[tuple[QuantizedTensor, Tensor]]


class Requantization:
    """`requantize_batch_` for the same targets and values while they keep their addresses: launch plans, with the
    reduction of amaxes between them."""

    def __init__(self, pairs: Pairs, groups: Sequence[dist.ProcessGroup], measured: Tensor | None) -> None:
        """Use `prepared`, which checks whether this is possible."""
        self._groups, self.device, self._measured = groups, pairs[0][1].device, measured
        self._place, self._stream = _place(pairs), stream_of(self.device)
        self._targets = [weakref.ref(target) for target, _ in pairs]
        self._amaxes: list[LaunchPlan] = []
        self._kinds: list[tuple[LaunchPlan, int | None]] = []  # of a recipe; with the position of the first amax
        self._sizes: list[int] = []
        self._fused = [target.fused for target, _ in pairs if target.LAYOUT.shares_amax]
        self._stored: list[tuple[int, int]] = []  # positions of targets with planes that are amaxes, and of these

    def holds(self, pairs: Pairs) -> bool:
        """True if these are the prepared targets and values, at the same addresses."""
        targets = [one() for one in self._targets]
        same = len(pairs) == len(targets) and all(map(is_, [target for target, _ in pairs], targets))
        here = capturing(self.device) or self._stream == stream_of(self.device)  # tables are copied on the stream
        return same and here and self._place == _place(pairs)

    def __call__(self, pairs: Pairs) -> None:
        """Requantizes. Collective over the groups if some targets share an amax."""
        pieces: Sequence[Tensor] = ()
        if self._sizes:
            if (packed := self._measured) is None:
                packed = torch.zeros(sum(self._sizes), dtype=torch.int32, device=self.device)
                for launches in self._amaxes:
                    launches(packed)
            pieces = torch.split_with_sizes(reduce_max(packed.view(torch.float32), self._groups), self._sizes)
            join(pieces, self._fused)
        for launches, first in self._kinds:
            launches(*() if first is None else (pieces[first],))
        if self._stored:
            stored = [(pairs[at][0], pieces[own]) for at, own in self._stored]
            foreach_copy_(
                [target.store.planes["amax"] for target, _ in stored],
                [target.LAYOUT.stored_amax(amax) for target, amax in stored],
            )
        written([target for target, _ in pairs])

    def prepare(self, pairs: Pairs) -> bool:
        """Prepares all launches; False if a weight needs more than batched launches."""
        sharing = [at for at, (target, _) in enumerate(pairs) if target.LAYOUT.shares_amax]
        matrices = [as_matrix(values, (target.store.rows, target.store.matrix[1])) for target, values in pairs]
        shapes = [pairs[at][0].LAYOUT.amax_shape(matrices[at].shape[1]) for at in sharing]
        self._sizes = [prod(shape) for shape in shapes]
        offsets = list(accumulate(self._sizes, initial=0))
        packed = torch.zeros(offsets.pop(), dtype=torch.int32, device=self.device)
        by_columns: dict[int | None, list[int]] = defaultdict(list)
        for number, at in enumerate(sharing if self._measured is None else ()):
            by_columns[pairs[at][0].LAYOUT.amax_columns].append(number)
        for block_k, numbers in by_columns.items():
            xs = [matrices[sharing[number]] for number in numbers]
            found, alone = amax_plans(packed, [offsets[number] for number in numbers], xs, block_k)
            if alone:
                return False
            self._amaxes += found
        examples = dict(zip(sharing, torch.split(packed.view(torch.float32), self._sizes), strict=True))
        kinds: dict[Any, list[int]] = defaultdict(list)
        for at, (target, _) in enumerate(pairs):
            kinds[type(target), target.store.declared, *target.store.planes].append(at)
        for (cls, *_), members in kinds.items():
            targets = [pairs[at][0] for at in members]
            amaxes = [examples[at] for at in members] if cls.LAYOUT.shares_amax else None
            xs, outs = [matrices[at] for at in members], [target.store.planes for target in targets]
            launches = cls.batch_plan(xs, amaxes, targets[0].orientations, outs)
            if launches is None:
                return False
            self._kinds.append((launches, sharing.index(members[0]) if amaxes else None))
            if amaxes and "amax" in cls.LAYOUT.stored:
                self._stored += [(at, sharing.index(at)) for at in members]
        return True


def prepared(
    pairs: Pairs,
    groups: Sequence[dist.ProcessGroup],
    row_shardings: Sequence[RowSharding | None],
    measured: Tensor | None = None,
) -> Requantization | None:
    """A Requantization; None if that takes more than a few launches, or can't be prepared now. Raises as `quantize`.

    measured: where the amaxes of each call are, as `amaxes` of `requantize_batch_`; None: launches find them.
    """
    first, device = pairs[0][1], pairs[0][1].device
    if capturing(device):
        return None
    for (target, values), row_sharding in zip(pairs, row_shardings, strict=True):
        layout = target.LAYOUT
        layout.check_weights(target.weight_name or "")
        check_out(layout, values, target, None, alone=not layout.shares_amax)
        check_whole_blocks(target, row_sharding)
        splits = row_sharding is not None and row_sharding.splits_blocks(layout)
        plain = type(values) is Tensor and values.dtype == first.dtype and values.device == device
        if splits or layout.history or not plain or not launch.usable(values) or target.store.halo.rows:
            return None
    if not launch.all_writable([target.store.planes for target, _ in pairs], device):
        return None
    requantization = Requantization(pairs, groups, measured)
    return requantization if requantization.prepare(pairs) else None


def _place(pairs: Pairs) -> tuple[int, ...]:
    """The addresses of all values and planes."""
    planes = chain.from_iterable([target.store.planes.values() for target, _ in pairs])
    return addresses_of(chain([values for _, values in pairs], planes))
