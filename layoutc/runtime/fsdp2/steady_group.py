"""The gather and reduction fast path of a group: what FSDP2 does, in fewer steps.

FSDP2 calls the hooks of every weight, copies gathered bytes into a tensor for each, and calls hooks again. Here a
`GatherPlan` sends the same bytes in FSDP2's order, so ranks may mix both ways. FSDP2 itself makes the first gather,
which allocates, and gathers under transforms, and of what no plan can send.
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
from layoutc.runtime.fsdp2 import gather_plan, hooks
from layoutc.runtime.fsdp2.gather_plan import GatherPlan
from layoutc.runtime.fsdp2.gradient_rows import GradientRows, Turns, in_rows
from layoutc.runtime.product_mode import Settings
from layoutc.runtime.sharding import gathered
from layoutc.runtime.sharding.registry import Sharding
from layoutc.runtime.streams import capturing
from layoutc.runtime.torch_private import planned_groups, reductions, say_changed, say_left
from layoutc.runtime.torch_private.fsdp2 import gathered_of, name_of, outputs_of, shard_of
from layoutc.runtime.torch_private.planned_groups import DefaultReduceScatter, PlannedGroup
from layoutc.runtime.torch_private.reductions import Reduction

FORWARD: PassName = "forward"  # both passes dequantize its planes


class ReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, with a buffer into which one launch copies gradients."""

    def __init__(self, ranks: int) -> None:
        self._turns = Turns(ranks)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of a reduction, or its result; gradients are views of the latter."""
        made = super().allocate(size, dtype=dtype, device=device)
        return made if self._turns.is_result(made.numel()) else made.as_subclass(GradientRows)

    @staticmethod
    def joined(grads: Sequence[Tensor], ranks: int, numel: int, dtype: torch.dtype) -> Tensor:
        """FSDP2's buffer, (numel,), after gradients were copied into it."""
        return in_rows(grads, ranks, numel, dtype).view(numel)


class SteadyGroup(PlannedGroup):
    """FSDP2's group of parameters, with `carry`."""

    _reduces: bool | None  # whether FSDP2 reduces gradients in the known way; None before the first reduction
    _reduction: Reduction | None  # after the first gradients
    _of_values: Any  # the first FSDPParam whose gathers leave values; None if all leave codes
    _of_codes: hooks.Gathered | None  # of the first one whose gathers leave codes
    _mode: Settings  # the global mode under which that was decided
    _awaits_backward: bool  # a forward pass that may need backward has gathered since the last backward
    _plans: dict[PassName, GatherPlan | None] | None  # None: no plans; None for a pass: FSDP2 gathers it

    def unshard(self, async_op: bool = False) -> None:
        """Starts a gather unless the group is gathered."""
        super().unshard(async_op)
        self._awaits_backward = self._awaits_backward or (torch.is_grad_enabled() and self.in_forward)

    def _plan(self) -> GatherPlan | None:
        """The plan of the current pass. None if FSDP2 must gather: the first time, what no plan can send, and where
        hooks must decide again, in forward, whether gathers leave values or codes."""
        if self._mode != product_mode.current() and not self.for_backward:
            self._check_values()
            return None
        if self._plans is None or not self._is_at_rest():
            return None
        which = FORWARD if self._of_codes is None else self._of_codes.codes_in(self.for_backward)
        plan, captured = self._plans.get(which), capturing(self.device)
        if captured and (plan is None or plan.quantizing is not None):
            return None  # what quantizes into rows keeps launches by their addresses
        if plan is not None and plan.holds():
            return plan
        if captured or (plan is None and which in self._plans):
            return None
        if not all(outputs_of(param) and gathered_of(param) is not None for param in self.fsdp_params):
            return None  # FSDP2 has not gathered all of them yet
        made = gather_plan.plan_of(self, self.ranks)
        self.gathers_wait()  # work on this stream may still use FSDP2's outputs
        self._plans[which] = made
        return made if made is not None and made.holds() else None

    def post_backward(self, *unused: Any) -> None:
        """Reduces the gradients of backward and frees the gathered weights."""
        self._awaits_backward = False
        if self._reduces is None:
            self._reduces = not (names := reductions.unknown(self))
            if names:
                say_changed(names, "reductions")
        grads = reductions.gradients_of(self) if self._reduces and self.is_eager() else None
        if grads and (self._reduction is None or not self._reduction.is_of(self, grads)):
            self._reduction = reductions.reduction_of(self, grads)
            self._reduces = self._reduction is not None
        if not grads or self._reduction is None:
            del grads  # FSDP2 frees them as it goes
            super().post_backward(*unused)
            return
        with self.labelled("FSDP::post_backward_reduce"):
            reductions.take(self)
            reductions.reduce(self, self._reduction, grads)

    def forget_plans(self) -> None:
        """Leaves gathers to FSDP2 until `carry` is called again."""
        self._of_values, self._plans = None, None

    def _check_values(self) -> None:
        """Raises LayoutError if weights are still gathered as values but must now be multiplied as codes."""
        if self._of_values is None or self.is_sharded:
            return
        settings = product_mode.in_effect(shard_of(self._of_values).own_products)
        if settings.products != "dequantize":
            raise LayoutError(
                f"{self.named('weights')} are still gathered, as bf16 weights, which {settings} does not multiply; "
                f"{gathered.RESHARD}"
            )


def carry(sharding: Sharding) -> None:
    """Makes an FSDPParamGroup gather by plans, from its second gather on, and copy gradients in one launch.

    sharding: of one of its weights, after it was decided what gathers leave. Groups of one rank, or of `replicate`, are
    left unchanged. So are, with a warning, groups of a user's class or hooks, and of a torch that gathers otherwise.
    """
    if sharding.process_group is None:
        return
    weights, group = gathered.weights_of(sharding), sharding.group()
    for one in weights:
        if not _as_generated(recipe := shard_of(one).QUANTIZED):
            name = f"{recipe.__module__}.{recipe.__qualname__}"
            say_left(name_of(one), f"the hooks of {name} are not those that `layoutc build` writes")
            return
    if planned_groups.take(group, SteadyGroup, ReduceScatter):
        steady: Any = group
        decisions: list[Any] = [gathered.decision_of(one) for one in weights]
        leaves = list(zip(weights, [one.values for one in decisions], strict=True))
        steady._of_values = next((one for one, values in leaves if values), None)
        steady._of_codes = next((hooks.gathered_of(one) for one, values in leaves if not values), None)
        steady._plans, steady._mode = {}, decisions[0].mode
        steady._awaits_backward = True  # unknown: hooks, which call this, run under no_grad
        steady._reduction = steady._reduces = None


def _as_generated(recipe: Any) -> bool:
    """Whether a class's hooks are those that layoutc generates: one call of `send`, and one of `receive`."""
    hooks_of = {"send": recipe.fsdp_pre_all_gather, "receive": recipe.fsdp_post_all_gather}
    for name, hook in hooks_of.items():
        code = getattr(hook, "__code__", None)  # its constants are a docstring or None
        if code is None or code.co_names != ("all_gather", name) or len(code.co_consts) > 1:
            return False
    return True
