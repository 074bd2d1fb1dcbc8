"""The gather of a group whose quantized weights travel in one pack: FSDP2's own, in fewer steps.

FSDP2 asks the hooks of every weight, copies what has arrived into a tensor of each, and calls hooks again. Here the
pack is copied into what the rank sends, and dequantized from where it has arrived. What is sent are the bytes that
FSDP2 would send, in its order, so each rank may gather in one way or the other. The first gather is FSDP2's, and so are
those in CUDA graphs, under transforms, and of groups that have something else in them.

With `registry` and `gathered` the only module that reads FSDP2's private names.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import AllGatherState, FSDPParamGroup

from layoutc.runtime.captures import capturing
from layoutc.runtime.fsdp2.pack import ALIGNED, Pack
from layoutc.runtime.fsdp2.plain_run import PlainRun
from layoutc.runtime.sharding import gathered
from layoutc.runtime.torch_private import profiling, transform

_RESULT = (
    *("all_gather_output", "all_gather_event", "all_gather_work"),
    *("param_all_gather_input_dtypes", "param_all_gather_input_numels", "all_gather_input_split_sizes"),
)
_OF_GROUP = (
    *("_all_gather_process_group", "_all_gather_comm", "_all_gather_result", "_sharded_state", "_training_state"),
    *("_reshard_after_forward_event", "unshard_in_backward", "fsdp_params", "device", "device_handle", "comm_ctx"),
    *("_to_unsharded", "_wait_all_gather_streams_on_event", "_with_fqn"),
)


class Row(NamedTuple):
    """What each rank sends: bytes, since a pack is."""

    nbytes: int
    start: int  # of the pack, in bytes
    runs: Sequence[PlainRun]
    metadata: tuple[Any, Any, Any]  # the last fields of FSDP2's result


class _Begun(AllGatherResult):
    """A gather that `PackedGroup` began."""


class PackedGroup(FSDPParamGroup):
    """FSDP2's group of parameters, with `carry`."""

    _pack: Pack | None
    _row: Row | None  # None until FSDP2 has gathered once

    def unshard(self, async_op: bool = False) -> None:
        """Begins a gather, if there is something to gather."""
        if self._pack is None or self._row is None or not self._is_at_rest():
            super().unshard(async_op)
            return
        with self._labelled("FSDP::all_gather"):
            self._all_gather_result = self._begun(self._pack, self._row, async_op)

    def wait_for_unshard(self) -> None:
        """Makes the parameters whole, if a gather has begun."""
        result = self._all_gather_result
        if isinstance(result, _Begun):
            with self._labelled("FSDP::all_gather_copy_out"):
                self._finish(result)
            return
        super().wait_for_unshard()
        if self._row is None and self._pack is not None and result is not None:
            self._row = _row_of(result, self.fsdp_params, self._pack)
            self._pack = self._pack if self._row is not None else None

    def forget_pack(self) -> None:
        """From now on, gathers are FSDP2's."""
        self._pack = self._row = None

    def _is_at_rest(self) -> bool:
        """True for sharded parameters that nothing but this gather waits for."""
        if self._all_gather_result is not None or self._sharded_state is not ShardedState.SHARDED:
            return False
        if self._reshard_after_forward_event is not None:
            return False
        if not self.unshard_in_backward and self._training_state is TrainingState.PRE_BACKWARD:
            return False
        return transform() is None and not capturing(self.device)

    def _mesh_of_hooks(self) -> Any:
        return self.fsdp_params[0].shard_mesh_from_root

    def _labelled(self, label: str) -> AbstractContextManager[Any]:
        """What shows in profiles as FSDP2's own gathers do."""
        return torch.profiler.record_function(self._with_fqn(label)) if profiling() else nullcontext()

    @torch.no_grad()
    def _begun(self, pack: Pack, row: Row, async_op: bool) -> _Begun:
        """As FSDP2's foreach_all_gather: what is sent is copied on one stream, into its place in what all send; the
        collective runs on another."""
        copies, gathers = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        group, comm = self._all_gather_process_group, self._all_gather_comm
        with self.device_handle.stream(copies):
            output = comm.allocate((row.nbytes * group.size(),), dtype=torch.uint8, device=self.device)
            sent = output.narrow(0, row.nbytes * group.rank(), row.nbytes)
            for run in row.runs:
                run.fill(sent)
            pack.fill(sent[row.start : row.start + pack.nbytes], self._mesh_of_hooks)
        gathers.wait_stream(copies)
        with self.device_handle.stream(gathers):
            work = comm(output_tensor=output, input_tensor=sent, group=group, async_op=async_op)
            return _Begun(output, gathers.record_event(), work, *row.metadata)

    @torch.no_grad()
    def _finish(self, result: _Begun) -> None:
        """As FSDP2's wait_for_unshard, which says when the bytes that have arrived may be freed."""
        pack, row, context = self._pack, self._row, self.comm_ctx
        assert pack is not None
        assert row is not None
        in_forward = self._training_state is TrainingState.FORWARD
        if in_forward and (before := context.all_gather_state) is not None:
            self._wait_all_gather_streams_on_event(before.event)
            context.all_gather_state = None
        output, event, work = result[:3]
        if event is not None:
            self.device_handle.current_stream().wait_event(event)
        if work is not None:
            work.wait()
        for run in row.runs:
            run.arrive(output)
        pack.arrive(output, row.start, row.nbytes)
        self._to_unsharded()  # type: ignore[no-untyped-call]
        done = self.device_handle.Event()
        done.record()
        if in_forward and work is None:
            context.all_gather_state = AllGatherState(result, done)
        else:
            self._wait_all_gather_streams_on_event(done)
        self._all_gather_result = None


def carry(group: Any, pack: Pack) -> None:
    """Has an FSDPParamGroup gather a pack, which has all of its weights that are not plain, from its second gather on.

    A group of a class of somebody else's, or of a torch that gathers in other steps, is left as it is.
    """
    if type(group) in (FSDPParamGroup, PackedGroup) and _is_known(group):
        group.__class__ = PackedGroup
        group._pack, group._row = pack, None


def _is_known(group: Any) -> bool:
    """True if this torch has what is used here, under the names and with the parameters that are known."""
    return (
        AllGatherResult._fields == _RESULT
        and AllGatherState._fields == ("all_gather_result", "event")
        and all(hasattr(group, name) for name in _OF_GROUP)
        and hasattr(group.comm_ctx, "get_all_gather_streams")
        and list(signature(FSDPParamGroup.unshard).parameters) == ["self", "async_op"]
        and list(signature(FSDPParamGroup.wait_for_unshard).parameters) == ["self"]
    )


def _row_of(result: AllGatherResult, params: Sequence[Any], pack: Pack) -> Row | None:
    """What FSDP2 has sent; None if that was not a pack and plain parameters, each where kernels reach it."""
    runs: list[PlainRun] = []
    at, packs = 0, []
    fields = result.param_all_gather_input_dtypes, result.param_all_gather_input_numels
    for param, dtypes, numels in zip(params, *fields, strict=True):
        if hasattr(gathered.shard_of(param), "QUANTIZED"):
            packs += [at] if numels else []
        elif not gathered.is_plain(param) or 0 in numels:
            return None
        elif runs and runs[-1].stop == at and runs[-1].dtype is dtypes[0]:
            runs[-1] = runs[-1].with_next(param, numels[0])
        else:
            runs.append(PlainRun.of(param, at, dtypes[0], numels[0]))
        at += sum(dtype.itemsize * numel for dtype, numel in zip(dtypes, numels, strict=True))
    if len(packs) != 1 or packs[0] % ALIGNED or at % ALIGNED or any(run.start % run.dtype.itemsize for run in runs):
        return None
    return Row(at, packs[0], runs, result[3:])
