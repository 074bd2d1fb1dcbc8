"""A group whose gathers and reductions are much like the ones before: FSDP2's own, in fewer steps.

FSDP2 asks the hooks of every weight, copies what has arrived into a tensor of each, and calls hooks again. Here a
`GatherPlan` sends the bytes that FSDP2 would send, in its order, so each rank may gather in one way or the other. FSDP2
makes the first gather, which allocates, and those in CUDA graphs, under transforms, and of what no plan can send.

With `torch_private`, `registry` and `gathered` the only module that reads FSDP2's private names.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import AllGatherState, FSDPParamGroup

from layoutc.runtime import product_mode, streams
from layoutc.runtime.captures import capturing
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import PassName
from layoutc.runtime.fsdp2 import gather_plan
from layoutc.runtime.fsdp2.gather_plan import GatherPlan, NoPlan
from layoutc.runtime.fsdp2.gradient_rows import CopiesInOneLaunch
from layoutc.runtime.product_mode import Settings
from layoutc.runtime.sharding import gathered
from layoutc.runtime.torch_private import (
    changed,
    profiling,
    reductions,
    say_changed,
    say_left,
    transform,
    without_torch_function,
)
from layoutc.runtime.torch_private.reductions import Reduction

FORWARD: PassName = "forward"  # of whose planes values are made, in both passes
_RESULT = (
    *("all_gather_output", "all_gather_event", "all_gather_work"),
    *("param_all_gather_input_dtypes", "param_all_gather_input_numels", "all_gather_input_split_sizes"),
)
_OF_GROUP = (
    *("_all_gather_process_group", "_all_gather_comm", "_all_gather_result", "_sharded_state", "_training_state"),
    *("_reduce_scatter_process_group", "_reduce_scatter_comm"),
    *("_reshard_after_forward_event", "unshard_in_backward", "fsdp_params", "device", "device_handle", "comm_ctx"),
    *("_to_unsharded", "_wait_all_gather_streams_on_event", "_with_fqn"),
)


class _Begun(AllGatherResult):
    """A gather that `SteadyGroup` began."""

    plan: GatherPlan


class _ReduceScatter(CopiesInOneLaunch, DefaultReduceScatter):
    """FSDP2's own, of which it allows itself to take another one's place."""


class SteadyGroup(FSDPParamGroup):
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
        if decides := self._is_of_another_mode():
            self._check_values()
        plan = None if decides or not self._is_at_rest() else self._plan()
        if plan is None:
            super().unshard(async_op)
        else:
            with self._labelled("FSDP::all_gather"):
                self._all_gather_result = self._begun(plan, async_op)
        self._awaits_backward = self._awaits_backward or self._is_of_a_graph()

    def wait_for_unshard(self) -> None:
        """Makes the parameters whole, if a gather has begun."""
        result = self._all_gather_result
        if isinstance(result, _Begun):
            with self._labelled("FSDP::all_gather_copy_out"):
                self._finish(result)
        else:
            super().wait_for_unshard()

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
        made = gather_plan.plan_of(self, self._all_gather_process_group.size())
        # What it allocated for good, what runs on this stream may still use; gathers write it on theirs.
        self._wait_all_gather_streams_on_event(streams.current(self.device, self.device_handle).record_event())
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
        with self._labelled("FSDP::post_backward_reduce"):
            reductions.take(self)
            reductions.reduce(self, self._reduction, grads)

    def _gradients(self) -> list[Tensor]:
        """Those that are reduced in few steps; none of what is left to FSDP2, which frees them as it goes."""
        if self._reduces is None:
            names = reductions.unknown(self)
            self._reduces = not names
            if names:
                say_changed(names, "reductions")
        grads = reductions.gradients_of(self) if self._reduces and self._is_eager() else None
        if grads and (self._reduction is None or not self._reduction.is_of(self, grads)):
            self._reduction = reductions.reduction_of(self, grads)
            self._reduces = self._reduction is not None
        return grads if grads is not None and self._reduces else []

    def _to_unsharded(self) -> None:
        """Puts the gathered parameters into their modules, without asking their class for what FSDP2 compares."""
        with without_torch_function():
            super()._to_unsharded()  # type: ignore[no-untyped-call]

    def forget_plans(self) -> None:
        """From now on, gathers are FSDP2's, until `carry` is called again."""
        self._of_values, self._plans = None, None

    def _is_of_another_mode(self) -> bool:
        """True if hooks must decide anew whether gathers leave values or codes, which they do for forward."""
        return self._mode != product_mode.current() and self._training_state is not TrainingState.PRE_BACKWARD

    def _check_values(self) -> None:
        """Raises LayoutError for weights that are still gathered as values, and are now to be multiplied as codes."""
        if self._of_values is None or self._sharded_state is ShardedState.SHARDED:
            return
        settings = product_mode.in_effect(gathered.shard_of(self._of_values).own_products)
        if settings.products != "dequantize":
            raise LayoutError(
                f"{self._with_fqn('weights')} are still gathered, as values, which {settings} does not "
                f"multiply; {gathered.RESHARD}"
            )

    def _is_of_a_graph(self) -> bool:
        return torch.is_grad_enabled() and self._training_state is TrainingState.FORWARD

    def _is_at_rest(self) -> bool:
        """True for sharded parameters that nothing but this gather waits for."""
        if self._all_gather_result is not None or self._sharded_state is not ShardedState.SHARDED:
            return False
        if self._reshard_after_forward_event is not None:
            return False
        if not self.unshard_in_backward and self._training_state is TrainingState.PRE_BACKWARD:
            return False
        return self._is_eager()

    def _is_eager(self) -> bool:
        return transform() is None and not capturing(self.device) and not torch.compiler.is_compiling()

    def _labelled(self, label: str) -> AbstractContextManager[Any]:
        """What shows in profiles as FSDP2's own gathers do."""
        return torch.profiler.record_function(self._with_fqn(label)) if profiling() else nullcontext()

    @torch.no_grad()
    def _begun(self, plan: GatherPlan, async_op: bool) -> _Begun:
        """As FSDP2's foreach_all_gather: what is sent is copied on one stream, into its place in what all send; the
        collective runs on another."""
        copies, gathers = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        group, comm, handle = self._all_gather_process_group, self._all_gather_comm, self.device_handle
        with streams.on(copies, handle):
            output = comm.allocate((plan.nbytes * group.size(),), dtype=torch.uint8, device=self.device)
            sent = output.narrow(0, plan.nbytes * group.rank(), plan.nbytes)
            plan.fill(sent)
        gathers.wait_stream(copies)
        with streams.on(gathers, handle):
            work = comm(output_tensor=output, input_tensor=sent, group=group, async_op=async_op)
            begun = _Begun(output, gathers.record_event(), work, [], [], [])
        begun.plan = plan
        return begun

    @torch.no_grad()
    def _finish(self, result: _Begun) -> None:
        """As FSDP2's wait_for_unshard, which says when the bytes that have arrived may be freed."""
        context, current = self.comm_ctx, streams.current(self.device, self.device_handle)
        in_forward = self._training_state is TrainingState.FORWARD
        if in_forward and (before := context.all_gather_state) is not None:
            self._wait_all_gather_streams_on_event(before.event)
            context.all_gather_state = None
        output, event, work = result[:3]
        if event is not None:
            current.wait_event(event)
        if work is not None:
            work.wait()
        result.plan.arrive(output)
        self._to_unsharded()
        done = current.record_event()
        if in_forward and work is None:
            context.all_gather_state = AllGatherState(result, done)
        else:
            self._wait_all_gather_streams_on_event(done)
        self._all_gather_result = None


def carry(group: Any, weights: Sequence[Any], decisions: Sequence[gathered.Decision]) -> None:
    """Has an FSDPParamGroup gather by plans, from its second gather on, and copy gradients in one launch.

    weights: its FSDPParams that are not plain. decisions: what their gathers leave. A group of somebody else's class,
    of one rank, of `replicate`, or of a torch that gathers in other steps, is left as it is.
    """
    if getattr(group.mesh_info, "shard_process_group", None) is None:
        return
    if type(group) not in (FSDPParamGroup, SteadyGroup):
        say_left(gathered.name_of(group.fsdp_params[0]), f"its group is a {type(group).__name__}")
        return
    if names := unknown(group):
        say_changed(names, "gathers and reductions")
    elif group._all_gather_process_group.size() > 1:
        group.__class__ = SteadyGroup
        leaves = list(zip(weights, [one.values for one in decisions], strict=True))
        group._of_values = next((one for one, values in leaves if values), None)
        group._of_codes = next((one for one, values in leaves if not values), None)
        group._plans, group._mode = {}, decisions[0].mode
        group._awaits_backward = True  # perhaps: hooks, which call this, run without gradients
        group._reduction = group._reduces = None
        if type(group._reduce_scatter_comm) is DefaultReduceScatter:
            group._reduce_scatter_comm = _ReduceScatter(group._reduce_scatter_process_group.size())


def unknown(group: Any) -> str:
    """What is used here that this torch has under another name, or with other parameters; "" if nothing."""
    signatures = {"unshard": ["self", "async_op"], "wait_for_unshard": ["self"]}
    return changed(
        {
            "AllGatherResult": AllGatherResult._fields == _RESULT,
            "AllGatherState": AllGatherState._fields == ("all_gather_result", "event"),
            "get_all_gather_streams": hasattr(group.comm_ctx, "get_all_gather_streams"),
            **{name: hasattr(group, name) for name in _OF_GROUP},
            **{name: [*signature(getattr(FSDPParamGroup, name)).parameters] == its for name, its in signatures.items()},
        }
    )
