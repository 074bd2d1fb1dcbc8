"""An FSDP2 parameter group with planned gathers: FSDP2's collectives and streams, with less host work around them.

The copy of gradients for a reduction can be replaced too. Everything else is FSDP2's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter as DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import AllGatherState, FSDPParamGroup

from layoutc.runtime import streams
from layoutc.runtime.torch_private import changed, profiling, say_changed, say_left, transform, without_torch_function
from layoutc.runtime.torch_private.fsdp2 import name_of

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


Plan = Any  # a GatherPlan, of a higher layer: a row's bytes, how to fill it, and how to make parameters of all rows


class _Begun(AllGatherResult):
    """A gather that was started by a plan."""

    plan: Plan


class PlannedGroup(FSDPParamGroup):
    """A replacement class for existing FSDP2 groups. Subclasses choose which gathers have a plan, in `_plan`."""

    @property
    def ranks(self) -> int:
        """The number of ranks that the parameters are sharded over."""
        return int(self._all_gather_process_group.size())

    @property
    def in_forward(self) -> bool:
        """True while the group gathers for a forward pass."""
        return self._training_state is TrainingState.FORWARD

    @property
    def for_backward(self) -> bool:
        """True while the group gathers for backward."""
        return self._training_state is TrainingState.PRE_BACKWARD

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are sharded: False from a gather until its results are freed."""
        return self._sharded_state is ShardedState.SHARDED

    def named(self, label: str) -> str:
        """A label with the names of the group's modules."""
        found: str = self._with_fqn(label)
        return found

    def labelled(self, label: str) -> AbstractContextManager[Any]:
        """A profiler label like FSDP2's."""
        return torch.profiler.record_function(self.named(label)) if profiling() else nullcontext()

    def is_eager(self) -> bool:
        """False under transforms and while torch.compile traces."""
        return transform() is None and not torch.compiler.is_compiling()

    # --------------------------------------------------------------------------------------------------------- gathers
    def _plan(self) -> Plan | None:
        """The plan for the gather that is starting, if parameters are at rest; None if FSDP2 must gather."""
        raise NotImplementedError

    def unshard(self, async_op: bool = False) -> None:
        """Starts a gather unless the group is gathered."""
        if (plan := self._plan()) is None:
            super().unshard(async_op)
            return
        with self.labelled("FSDP::all_gather"):
            self._all_gather_result = self._begun(plan, async_op)

    def wait_for_unshard(self) -> None:
        """Finishes the gather that was started, if any, and makes the parameters whole."""
        result = self._all_gather_result
        if isinstance(result, _Begun):
            with self.labelled("FSDP::all_gather_copy_out"):
                self._finish(result)
        else:
            super().wait_for_unshard()

    def gathers_wait(self) -> None:
        """Makes gathers wait for the current stream."""
        self._wait_all_gather_streams_on_event(streams.current(self.device, self.device_handle).record_event())

    def _to_unsharded(self) -> None:
        """Puts the gathered parameters into their modules, bypassing their class in FSDP2's comparisons."""
        with without_torch_function():
            super()._to_unsharded()  # type: ignore[no-untyped-call]

    def _is_at_rest(self) -> bool:
        """True if parameters are sharded, and no other gather or reshard of the group is pending."""
        if self._all_gather_result is not None or not self.is_sharded:
            return False
        if self._reshard_after_forward_event is not None:
            return False
        if not self.unshard_in_backward and self.for_backward:
            return False
        return self.is_eager()

    @torch.no_grad()
    def _begun(self, plan: Plan, async_op: bool) -> _Begun:
        """Like FSDP2's foreach_all_gather: fills the rank's row on one stream, and runs the collective on another."""
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
        """Like FSDP2's wait_for_unshard, with the same events for when received bytes may be freed."""
        context, current = self.comm_ctx, streams.current(self.device, self.device_handle)
        if self.in_forward and (before := context.all_gather_state) is not None:
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
        if self.in_forward and work is None:
            context.all_gather_state = AllGatherState(result, done)
        else:
            self._wait_all_gather_streams_on_event(done)
        self._all_gather_result = None


def take(group: Any, cls: type[PlannedGroup], reduce_scatter: Callable[[int], DefaultReduceScatter]) -> bool:
    """Changes an FSDPParamGroup's class, and replaces FSDP2's default reduce-scatter.

    Returns False for a group of one rank, which gathers nothing. Warns and returns False for a group of a user's class,
    and for a torch whose gathers are unknown.
    """
    if type(group) is not FSDPParamGroup and not isinstance(group, PlannedGroup):
        say_left(name_of(group.fsdp_params[0]), f"its group is a {type(group).__name__}")
        return False
    if names := unknown(group):
        say_changed(names, "gathers and reductions")
        return False
    if group._all_gather_process_group.size() == 1:
        return False
    group.__class__ = cls
    if type(group._reduce_scatter_comm) is DefaultReduceScatter:
        group._reduce_scatter_comm = reduce_scatter(group._reduce_scatter_process_group.size())
    return True


def unknown(group: Any) -> str:
    """The names used here that this torch lacks or has changed; "" if none."""
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
