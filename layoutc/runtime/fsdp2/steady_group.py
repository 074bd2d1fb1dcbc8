"""A group whose gathers and reductions are much like the ones before: FSDP2's own, in fewer steps.

FSDP2 asks the hooks of every weight, copies what has arrived into a tensor of each, and calls hooks again. Here a
`GatherPlan` sends the bytes that FSDP2 would send, in its order, so each rank may gather in one way or the other. FSDP2
makes the first gather, which allocates, and those in CUDA graphs, under transforms, and of what no plan can send.
`planned_groups` has the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime import product_mode
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import PassName
from layoutc.runtime.fsdp2 import gather_plan
from layoutc.runtime.fsdp2.gather_plan import GatherPlan, NoPlan
from layoutc.runtime.fsdp2.gradient_rows import CopiesInOneLaunch
from layoutc.runtime.product_mode import Settings
from layoutc.runtime.sharding import gathered
from layoutc.runtime.torch_private import planned_groups, reductions, say_changed, say_left
from layoutc.runtime.torch_private.planned_groups import PlannedGroup, PlannedReduceScatter
from layoutc.runtime.torch_private.reductions import Reduction

FORWARD: PassName = "forward"  # of whose planes values are made, in both passes


class ReduceScatter(CopiesInOneLaunch, PlannedReduceScatter):
    """FSDP2's own, with a buffer that one launch copies gradients into."""


class SteadyGroup(PlannedGroup):
    """FSDP2's group of parameters, with `carry`."""

    _reduces: bool | None  # whether FSDP2 reduces gradients as is known; None before it does
    _reduction: Reduction | None  # once there were gradients
    _of_values: Any  # the first FSDPParam whose gathers leave values; None if all leave codes
    _of_codes: Any  # the first one whose gathers leave codes
    _mode: Settings  # of all weights, under which that was decided
    _awaits_backward: bool  # gathered in a forward pass that may have a graph, since the last backward
    _plans: dict[PassName, GatherPlan | None] | None  # None: none is to be made; of a pass: FSDP2 is left to it

    def unshard(self, async_op: bool = False) -> None:
        """Begins a gather, if there is something to gather."""
        if self._is_of_another_mode():
            self._check_values()
            self.by_hooks(async_op)
        else:
            super().unshard(async_op)
        self._awaits_backward = self._awaits_backward or (torch.is_grad_enabled() and self.in_forward)

    def _plan(self) -> GatherPlan | None:
        """The plan of the pass that gathers; None if FSDP2 is to gather: for the first time, or what no plan can."""
        if self._plans is None:
            return None
        which = FORWARD if self._of_codes is None else gather_plan.pass_of(self._of_codes)
        plan = self._plans.get(which)
        if plan is not None and plan.holds():
            return plan
        if (plan is None and which in self._plans) or not gather_plan.is_allocated(self.fsdp_params):
            return None
        made = gather_plan.plan_of(self, self.ranks)
        self.gathers_wait()  # what it allocated for good, what runs on this stream may still use
        if isinstance(made, NoPlan):
            say_left(*made)
            self._plans[which] = None
            return None
        self._plans[which] = made
        return made if made.holds() else None

    def post_backward(self, *unused: Any) -> None:
        """Reduces the gradients that backward has left, and frees what was gathered."""
        self._awaits_backward = False
        grads = self._gradients()
        if not grads or self._reduction is None:
            super().post_backward(*unused)
            return
        with self.labelled("FSDP::post_backward_reduce"):
            reductions.take(self)
            reductions.reduce(self, self._reduction, grads)

    def _gradients(self) -> list[Tensor]:
        """Those that are reduced in few steps; none of what is left to FSDP2, which frees them as it goes."""
        if self._reduces is None:
            names = reductions.unknown(self)
            self._reduces = not names
            if names:
                say_changed(names, "reductions")
        grads = reductions.gradients_of(self) if self._reduces and self.is_eager() else None
        if grads and (self._reduction is None or not self._reduction.is_of(self, grads)):
            self._reduction = reductions.reduction_of(self, grads)
            self._reduces = self._reduction is not None
        return grads if grads is not None and self._reduces else []

    def forget_plans(self) -> None:
        """From now on, gathers are FSDP2's, until `carry` is called again."""
        self._of_values, self._plans = None, None

    def _is_of_another_mode(self) -> bool:
        """True if hooks must decide anew whether gathers leave values or codes, which they do for forward."""
        return self._mode != product_mode.current() and not self.for_backward

    def _check_values(self) -> None:
        """Raises LayoutError for weights that are still gathered as values, and are now to be multiplied as codes."""
        if self._of_values is None or self.is_sharded:
            return
        settings = product_mode.in_effect(gathered.shard_of(self._of_values).own_products)
        if settings.products != "dequantize":
            raise LayoutError(
                f"{self.named('weights')} are still gathered, as values, which {settings} does not "
                f"multiply; {gathered.RESHARD}"
            )


def carry(group: Any, weights: Sequence[Any], decisions: Sequence[gathered.Decision]) -> None:
    """Has an FSDPParamGroup gather by plans, from its second gather on, and copy gradients in one launch.

    weights: its FSDPParams that are not plain. decisions: what their gathers leave. A group of somebody else's class,
    of one rank, of `replicate`, or of a torch that gathers in other steps, is left as it is.
    """
    if getattr(group.mesh_info, "shard_process_group", None) is None:
        return
    if foreign := planned_groups.class_of(group):
        say_left(gathered.name_of(group.fsdp_params[0]), f"its group is a {foreign}")
    elif names := planned_groups.unknown(group):
        say_changed(names, "gathers and reductions")
    elif planned_groups.take(group, SteadyGroup, ReduceScatter):
        leaves = list(zip(weights, [one.values for one in decisions], strict=True))
        group._of_values = next((one for one, values in leaves if values), None)
        group._of_codes = next((one for one, values in leaves if not values), None)
        group._plans, group._mode = {}, decisions[0].mode
        group._awaits_backward = True  # perhaps: hooks, which call this, run without gradients
        group._reduction = group._reduces = None
