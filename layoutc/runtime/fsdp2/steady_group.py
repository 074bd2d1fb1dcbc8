"""A group whose gathers and reductions are much like the ones before: FSDP2's own, in fewer steps.

FSDP2 asks the hooks of every weight, copies what has arrived into a tensor of each, and calls hooks again. Here one
kernel copies planes into what the rank sends, and another takes them from where all ranks' bytes have arrived: into
FSDP2's outputs, or dequantized, for weights whose gathers leave values and which travel in one pack. What is sent are
the bytes that FSDP2 would send, in its order, so each rank may gather in one way or the other. The first gather of a
pass is FSDP2's, and so are those in CUDA graphs, under transforms, and of groups that have something else in them.

With `steady_reduction`, `registry` and `gathered` the only module that reads FSDP2's private names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import AllGatherState, FSDPParamGroup

from layoutc.ints.gathers import in_few_steps
from layoutc.runtime import product_mode, streams
from layoutc.runtime.captures import capturing
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import PassName
from layoutc.runtime.fsdp2 import codes
from layoutc.runtime.fsdp2.codes import Weight
from layoutc.runtime.fsdp2.gradient_rows import CopiesInOneLaunch
from layoutc.runtime.fsdp2.pack import Pack
from layoutc.runtime.fsdp2.runs import Part, Run, plain, runs_of
from layoutc.runtime.kernels.copies import WORD
from layoutc.runtime.product_mode import Settings
from layoutc.runtime.sharding import gathered
from layoutc.runtime.torch_private import changed, profiling, reductions, say_changed, transform, without_torch_function
from layoutc.runtime.torch_private.reductions import Reduction

FORWARD: PassName = "forward"  # whose values packs leave
MOST_FAILURES = 4  # gathers of a pass after which FSDP2 is left to it
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


class Load(Protocol):
    """The quantized weights of a row."""

    @property
    def which(self) -> PassName | None:
        """The pass; None if weights are gathered for several."""

    def is_steady(self) -> bool:
        """True if a gather would be like the ones before, or asks hooks where it is not."""

    def fill(self, sent: Tensor, mesh: Callable[[], Any]) -> None:
        """Writes what runs do not, into (nbytes,) uint8. mesh: gives what FSDP2 calls hooks with."""

    def arrive(self, received: Tensor, nbytes: int) -> None:
        """Makes the weights whole, from the rows of all ranks, of so many bytes each, once runs have arrived."""


class Packed(NamedTuple):
    """A pack, and where it starts in a row, in bytes."""

    pack: Pack
    start: int
    which: PassName = FORWARD

    def is_steady(self) -> bool:
        """True: a pack asks hooks by itself."""
        return True

    def fill(self, sent: Tensor, mesh: Callable[[], Any]) -> None:
        """See `Load`."""
        self.pack.fill(sent[self.start : self.start + self.pack.nbytes], mesh)

    def arrive(self, received: Tensor, nbytes: int) -> None:
        """See `Load`."""
        self.pack.arrive(received, self.start, nbytes)


class Row(NamedTuple):
    """What each rank sends in a pass."""

    nbytes: int
    sending: Sequence[Run]  # what is sent as it lies: plain parameters, and planes
    arriving: Sequence[Run]  # what arrives so
    weights: Load
    metadata: tuple[Any, Any, Any]  # the last fields of FSDP2's result

    def fill(self, sent: Tensor, mesh: Callable[[], Any]) -> None:
        """Writes what this rank sends, (nbytes,) uint8. mesh: gives what FSDP2 calls hooks with."""
        for run in self.sending:
            run.fill(sent)
        self.weights.fill(sent, mesh)

    def arrive(self, received: Tensor) -> None:
        """Makes parameters whole, from what all ranks have sent, (ranks * nbytes,) uint8."""
        for run in self.arriving:
            run.arrive(received)
        self.weights.arrive(received, self.nbytes)


class _Begun(AllGatherResult):
    """A gather that `SteadyGroup` began."""

    row: Row


class _ReduceScatter(CopiesInOneLaunch, DefaultReduceScatter):
    """FSDP2's own, of which it allows itself to take another one's place."""


class SteadyGroup(FSDPParamGroup):
    """FSDP2's group of parameters, with `carry`."""

    _reduces: bool | None  # whether FSDP2 reduces gradients as is known; None before it does
    _reduction: Reduction | None  # once there were gradients
    _pack: Pack | None  # None: gathers leave codes
    _leader: Any  # the first FSDPParam that is quantized
    _mode: Settings  # of all weights, under which that was decided
    _awaits_backward: bool  # gathered in a forward pass that may have a graph, since the last backward
    _rows: dict[PassName, Row]  # of passes that FSDP2 has gathered for
    _failures: Counter[PassName] | None  # gathers of each pass of which no row was made; None: none is to be made

    def unshard(self, async_op: bool = False) -> None:
        """Begins a gather, if there is something to gather."""
        if decides := self._is_of_another_mode():
            self._check_values()
        row = self._rows.get(self._pass())
        if row is None or decides or not self._is_at_rest() or not row.weights.is_steady():
            super().unshard(async_op)
        else:
            with self._labelled("FSDP::all_gather"):
                self._all_gather_result = self._begun(row, async_op)
        self._awaits_backward = self._awaits_backward or self._is_of_a_graph()

    def wait_for_unshard(self) -> None:
        """Makes the parameters whole, if a gather has begun."""
        result = self._all_gather_result
        if isinstance(result, _Begun):
            with self._labelled("FSDP::all_gather_copy_out"):
                self._finish(result)
            return
        if result is None or not self._learns():
            super().wait_for_unshard()
            return
        metadata = [gathered.metadata_of(param) for param in self.fsdp_params]
        super().wait_for_unshard()
        self._learn(result, metadata)

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

    def forget_rows(self) -> None:
        """From now on, gathers are FSDP2's, until `carry` is called again."""
        self._pack, self._rows, self._failures = None, {}, None

    def _pass(self) -> PassName:
        """The pass that gathers."""
        return FORWARD if self._pack is not None else codes.pass_of(self._leader)

    def _is_of_another_mode(self) -> bool:
        """True if hooks must decide anew whether gathers leave values or codes, which they do for forward."""
        return self._mode != product_mode.current() and self._training_state is not TrainingState.PRE_BACKWARD

    def _check_values(self) -> None:
        """Raises LayoutError for weights that are still gathered as values, and are now to be multiplied as codes."""
        settings = product_mode.in_effect(gathered.shard_of(self._leader).own_products)
        held = self._pack is not None and self._sharded_state is not ShardedState.SHARDED
        if held and settings.products != "dequantize":
            raise LayoutError(
                f"{self._with_fqn('weights')} are still gathered, as values, which {settings} does not "
                f"multiply; {gathered.RESHARD}"
            )

    def _is_of_a_graph(self) -> bool:
        return torch.is_grad_enabled() and self._training_state is TrainingState.FORWARD

    def _learns(self) -> bool:
        """False in inference mode as well: FSDP2 makes what it has gathered there anew."""
        if self._failures is None or self._failures[self._pass()] >= MOST_FAILURES:
            return False
        return not capturing(self.device) and not torch.is_inference_mode_enabled()

    def _learn(self, result: AllGatherResult, metadata: Sequence[Any]) -> None:
        """Makes the row of a pass that FSDP2 has gathered for."""
        row = _row_of(result, self.fsdp_params, self._pack, metadata, self._all_gather_process_group.rank())
        if row is None or (which := row.weights.which) is None:
            assert self._failures is not None
            self._failures[self._pass()] += 1
        else:
            self._rows[which] = row

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

    def _mesh_of_hooks(self) -> Any:
        return self.fsdp_params[0].shard_mesh_from_root

    def _labelled(self, label: str) -> AbstractContextManager[Any]:
        """What shows in profiles as FSDP2's own gathers do."""
        return torch.profiler.record_function(self._with_fqn(label)) if profiling() else nullcontext()

    @torch.no_grad()
    def _begun(self, row: Row, async_op: bool) -> _Begun:
        """As FSDP2's foreach_all_gather: what is sent is copied on one stream, into its place in what all send; the
        collective runs on another."""
        copies, gathers = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        group, comm, handle = self._all_gather_process_group, self._all_gather_comm, self.device_handle
        with streams.on(copies, handle):
            output = comm.allocate((row.nbytes * group.size(),), dtype=torch.uint8, device=self.device)
            sent = output.narrow(0, row.nbytes * group.rank(), row.nbytes)
            row.fill(sent, self._mesh_of_hooks)
        gathers.wait_stream(copies)
        with streams.on(gathers, handle):
            work = comm(output_tensor=output, input_tensor=sent, group=group, async_op=async_op)
            begun = _Begun(output, gathers.record_event(), work, *row.metadata)
        begun.row = row
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
        result.row.arrive(output)
        self._to_unsharded()
        done = current.record_event()
        if in_forward and work is None:
            context.all_gather_state = AllGatherState(result, done)
        else:
            self._wait_all_gather_streams_on_event(done)
        self._all_gather_result = None


def carry(group: Any, pack: Pack | None, leader: Any) -> None:
    """Has an FSDPParamGroup gather in few steps, from the second gather of each pass on, and copy gradients in one.

    pack: has all of its weights that are not plain; None: their gathers leave codes. leader: the first FSDPParam of
    them. A group of somebody else's class, of one rank, of `replicate`, or of a torch that gathers in other steps, is
    left as it is.
    """
    if getattr(group.mesh_info, "shard_process_group", None) is None:
        return
    if type(group) not in (FSDPParamGroup, SteadyGroup):
        return
    if names := unknown(group):
        say_changed(names, "gathers and reductions")
    elif group._all_gather_process_group.size() > 1:
        group.__class__ = SteadyGroup
        group._pack, group._leader, group._rows, group._failures = pack, leader, {}, Counter()
        decision = gathered.decision_of(leader)
        group._mode = product_mode.current() if decision is None else decision.mode
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


def _row_of(
    result: AllGatherResult, params: Sequence[Any], pack: Pack | None, metadata: Sequence[Any], rank: int
) -> Row | None:
    """What FSDP2 has sent; None unless that was plain parameters, and a pack or weights that are gathered as codes, all
    of them where kernels reach them.

    metadata: of the hooks of each parameter. rank: of the row that this process has sent.
    """
    sent: list[Part] = []  # plain parameters
    arrived: list[Part] = []
    sending_planes: list[Part] = []  # of a short shard less than what arrives
    arriving_planes: list[Part] = []
    weights: list[Weight] = []
    at, packs = 0, []
    fields = result.param_all_gather_input_dtypes, result.param_all_gather_input_numels
    for param, dtypes, numels, held in zip(params, *fields, metadata, strict=True):
        if not hasattr(gathered.shard_of(param), "QUANTIZED"):
            if not gathered.is_plain(param) or 0 in numels:
                return None
            as_sent, as_arrived = plain(param, dtypes[0], at, numels[0])
            sent.append(as_sent)
            arrived.append(as_arrived)
        elif pack is not None:
            packs += [at] if numels else []
        elif (weight := codes.weight_of(param, held, numels, at)) is not None:
            weights.append(weight)
            for piece, start in weight.pieces():
                if piece is None:
                    return None
                sending_planes += [(piece, WORD, start, piece.source.numel())] if piece.source.numel() else []
                arriving_planes.append((piece, WORD, start, piece.output.numel() // weight.gathering.route.world))
        else:
            return None
        at += sum(dtype.itemsize * numel for dtype, numel in zip(dtypes, numels, strict=True))
    if len(packs) != (pack is not None) or not in_few_steps(packs, at):
        return None
    sending, arriving = runs_of(sent + sending_planes), runs_of(arrived + arriving_planes)
    if sending is None or arriving is None:
        return None
    if pack is not None:
        return Row(at, sending, arriving, Packed(pack, packs[0]), result[3:])
    load = codes.codes_of(weights, result.all_gather_output.view(torch.uint8).narrow(0, at * rank, at))
    if load is None:
        return None
    if load.quantizing is not None:  # it writes planes into the row itself
        sending = runs_of(sent) or []
    return Row(at, sending, arriving, load, result[3:])
