"""FSDP2's private names for its state: parameters, their shards, which pass gathers, how gradients are reduced.

FSDP2 passes the mesh to its hooks, but a layout also needs to know which pass gathers, whether the weight stays
gathered for backward, and the sizes of padded shard and whole weight. The shard's FSDPParam knows all of that.

Every name is checked when it is read, so that a name that torch has changed is not mistaken for a weight that FSDP2
does not hold. The checks depend only on torch's code, so either all ranks raise or none does.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Placement

from layoutc.runtime.errors import LayoutError, UnsupportedTorch

RUNS_WITH = "2.11 to 2.14"
FIX = "pip install 'torch>=2.11,<2.15'"

_OF_GROUP = ("fsdp_params", "_training_state", "_all_gather_result", "_reshard_after_forward", "_use_post_forward_mesh")
_OF_PARAM = (
    *("sharded_param", "sharded_state", "fsdp_placement", "mesh_info"),
    *("_orig_size", "padded_sharded_param_size", "all_gather_outputs", "offload_to_cpu"),
)


def parameters() -> Iterator[tuple[Any, Any]]:
    """Every FSDPParam with its FSDPParamGroup.

    Raises UnsupportedTorch if one of them, or FSDP2's registry, lacks a name that is read here.
    """
    states, state_class, mesh_class = _registry()
    for reference in list(states.values()):
        state = reference()
        if not isinstance(state, state_class):  # the registry also has FSDP1's and DDP's states
            continue
        for group in _groups(state):
            _check(group, _OF_GROUP)
            _check(group._training_state.__class__, ("PRE_BACKWARD", "FORWARD"))
            for param in group.fsdp_params:
                _check(param, _OF_PARAM)
                if isinstance(param.mesh_info, mesh_class):
                    _check(param.mesh_info, ("shard_process_group",))
                yield param, group


def _registry() -> tuple[Mapping[Any, Any], type, type]:
    """Weak references to module states, by module; FSDP2's state class; its class for meshes that shard."""
    try:
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    except ImportError as error:
        refuse(str(error), error)
    if "_unsharded_param" not in FSDPParam.__annotations__:  # instances have it only after a gather
        refuse("FSDPParam has no _unsharded_param")
    return _module_state_mapping, FSDPState, FSDPMeshInfo


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    if not hasattr(state, "_fsdp_param_group"):
        refuse(f"{state.__class__.__name__} has no _fsdp_param_groups")
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11: at most one


def _check(owner: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not hasattr(owner, name):
            kinds = (owner if isinstance(owner, type) else owner.__class__).__mro__
            of_torch = next((kind for kind in kinds if kind.__module__.startswith("torch.")), kinds[0])
            refuse(f"{of_torch.__name__} has no {name}")


def refuse(what: str, error: ImportError | None = None) -> NoReturn:
    """Raises UnsupportedTorch. what: how this torch differs from the supported releases."""
    raise UnsupportedTorch(
        f"torch {torch.__version__} keeps FSDP2's shards differently from what layoutc reads: {what}. "
        f"layoutc runs with torch {RUNS_WITH}: {FIX}"
    ) from error


@dataclass(frozen=True)
class Sharding:
    """Where FSDP2 keeps a shard: weak references to the local tensor, its FSDPParam and FSDPParamGroup.

    known: what other modules derive from that, cached by name for as long as the shard lives.
    """

    local: weakref.ref[Any]
    param: weakref.ref[Any]
    group: weakref.ref[Any]
    known: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def is_gone(self) -> bool:
        """True once the shard's model has been freed."""
        return self.param() is None

    def is_of(self, shard: Any) -> bool:
        """True if FSDP2 still holds this very tensor as the shard."""
        param: Any = self.param()
        return param is not None and shard_of(param) is shard

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter, a DTensor."""
        parameter: nn.Parameter = self.param().sharded_param  # type: ignore[union-attr]
        return parameter

    @property
    def name(self) -> str | None:
        """The parameter's fully qualified name, if FSDP2 knows it."""
        return getattr(self.param(), "_param_fqn", None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole weight."""
        return whole_shape(self.param())

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of the longest shard, to which FSDP2 pads all shards."""
        return tuple(self.param().padded_sharded_param_size)  # type: ignore[union-attr]

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group that the weight is sharded over; None if it is only replicated."""
        return getattr(self.param().mesh_info, "shard_process_group", None)  # type: ignore[union-attr]

    @property
    def dim(self) -> int:
        """The dim that is sharded."""
        return int(self.param().fsdp_placement.dim)  # type: ignore[union-attr]

    @property
    def mesh_dims(self) -> int:
        """How many dims of the parameter's mesh FSDP2 uses. They come first."""
        return int(self.param().mesh_info.mesh.ndim)  # type: ignore[union-attr]

    @property
    def is_part(self) -> bool:
        """True if the weight was already a DTensor: each rank gathers its tensor-parallel part."""
        return bool(getattr(self.param(), "is_dtensor", False))

    @property
    def frees_after_forward(self) -> bool:
        """False for a weight that stays gathered until the end of backward."""
        return bool(self.group()._reshard_after_forward)  # type: ignore[union-attr]

    @property
    def reshards_to_fewer_ranks(self) -> bool:
        """True if reshard_after_forward is a number of ranks."""
        return bool(getattr(self.group(), "_use_post_forward_mesh", False))

    def params_of_group(self) -> list[Any]:
        """The FSDPParams that are gathered with this one, in the order of their hooks."""
        return self.group().fsdp_params  # type: ignore[no-any-return, union-attr]

    @property
    def gathers_for_backward(self) -> bool:
        """True while the group gathers for backward."""
        state = self.group()._training_state  # type: ignore[union-attr]
        return state is type(state).PRE_BACKWARD  # comparing names would take three times as long

    @property
    def frees_after_pass(self) -> bool:
        """True if FSDP2 frees this gather after the pass: the weight is not kept, nor gathered by `unshard()`."""
        group: Any = self.group()
        if group._training_state is type(group._training_state).FORWARD:
            return self.frees_after_forward
        return self.gathers_for_backward and bool(getattr(group, "reshard_after_backward", False))

    def gather_as_rows(self) -> None:
        """Makes FSDP2 leave the gathered bytes in rank order when a dim other than 0 is sharded.

        Raises LayoutError if this torch lacks the function that this depends on.
        """
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        param: Any = self.param()
        if not hasattr(_fsdp_collectives, _COPY_OUT):
            raise LayoutError(
                f"{self.name}: torch {torch.__version__} has no {_COPY_OUT}, with which shards of dim {self.dim} are "
                "gathered; shard dim 0"
            )
        if not isinstance(param.fsdp_placement, _CutAsRows):
            param.fsdp_placement = _CutAsRows(self.dim)


_COPY_OUT = "foreach_all_gather_copy_out"  # torch.distributed.fsdp's function that reads each placement's dim


class _CutAsRows(Placement):
    """Shard(dim) that FSDP2 reads as Shard(0) when it copies gather outputs out, and as Shard(dim) everywhere else.

    For dims other than 0, FSDP2 would rearrange the outputs itself, assuming the shard's shape and one byte per
    element. With Shard(0) they stay in rank order, and the post-hook rearranges them.
    """

    @property
    def dim(self) -> int:  # type: ignore[override]
        """The dim that is sharded, or 0 for the caller that copies out."""
        return 0 if sys._getframe(1).f_code.co_name == _COPY_OUT else super().dim


def whole_shape(param: Any) -> tuple[int, ...]:
    """The shape of the whole weight of an FSDPParam."""
    return tuple(param._orig_size)


def gathered_parameter(param: Any) -> nn.Parameter | None:
    """The parameter that an FSDPParam gathers into; None before the first gather, in which FSDP2 makes it for good."""
    return getattr(param, "_unsharded_param", None)


FOR_INFERENCE = "inference mode gathered it first"


def shard_of(param: Any) -> Any:
    """The local tensor of an FSDPParam's shard."""
    return getattr(param.sharded_param, "_local_tensor", None)


def trains(param: Any) -> bool:
    """True for an FSDPParam whose shard requires gradients."""
    return bool(param.sharded_param.requires_grad)


def gathered_of(param: Any) -> Tensor | None:
    """The tensor that an FSDPParam gathers into, the rank's part if it is a DTensor; None before the first gather.

    FSDP2 makes it in the first gather, and keeps it.
    """
    made: Tensor | None = gathered_parameter(param)
    return made._local_tensor if isinstance(made, DTensor) else made


def dtype_of(param: Any) -> torch.dtype | None:
    """The dtype that an FSDPParam is gathered in: the policy's, or its shard's; None before the first forward."""
    own: torch.dtype | None = getattr(param, "orig_dtype", None)
    return own if own is None or (of_policy := param.param_dtype) is None else of_policy


def name_of(param: Any) -> str:
    """The fully qualified name of an FSDPParam's parameter, if FSDP2 knows it."""
    return getattr(param, "_param_fqn", None) or "a parameter"


def why_elsewhere(param: Any) -> str:
    """Why an FSDPParam's shard can't be sent directly from its memory; "" if it can."""
    if is_offloaded(param):
        return "it is offloaded to the CPU"
    return f"it is sharded on dim {param.fsdp_placement.dim}" if param.fsdp_placement.dim else ""


def why_not_plain(param: Any) -> str:
    """Why an FSDPParam is not plain, that is, cut on dim 0 and gathered without hooks; "" if it is plain."""
    if hasattr(shard_of(param), "fsdp_pre_all_gather") or len(param.all_gather_outputs) != 1:
        return "it has all-gather hooks of its own"
    return why_elsewhere(param) or (FOR_INFERENCE if param.all_gather_outputs[0].is_inference() else "")


def plain_shard_of(param: Any) -> Tensor:
    """The values that a plain FSDPParam sends, before the cast: (numel,), padded to the size of all ranks."""
    return param._sharded_param_data  # type: ignore[no-any-return]


def outputs_of(param: Any) -> list[Tensor]:
    """The gather outputs of an FSDPParam: (ranks * numel,) tensors, whose storages FSDP2 frees and allocates."""
    return param.all_gather_outputs  # type: ignore[no-any-return]


def allocate(values: Tensor) -> None:
    """Gives a tensor that a gather writes its memory, as FSDP2 would before the post-all-gather hook."""
    storage, nbytes = values.untyped_storage(), values.nbytes
    if storage.size() != nbytes:
        storage.resize_(nbytes)


def free_outputs(params: Iterable[Any]) -> None:
    """Frees the gathered bytes, as FSDP2 does after the pass; it reallocates them for the next gather."""
    for param in params:
        for output in param.all_gather_outputs:
            storage = output.untyped_storage()
            if storage.size():
                storage.resize_(0)


def is_offloaded(param: Any) -> bool:
    """True for an FSDPParam whose shard is in host memory, and is copied to the device for each gather."""
    return bool(param.offload_to_cpu)


def is_held(sharding: Sharding) -> bool:
    """True while FSDP2 holds the whole weight, or gathers it."""
    state: Any = sharding.param().sharded_state  # type: ignore[union-attr]
    group: Any = sharding.group()
    return state is not type(state).SHARDED or group._all_gather_result is not None


def is_in_a_graph(made: Tensor) -> bool:
    """True for a gathered parameter that autograd, or anything else in C++, still holds."""
    return int(made._use_count()) > 1  # type: ignore[attr-defined]  # one use is Python's


def drop_gathered(param: Any) -> None:
    """Drops the gathered parameter of an FSDPParam; FSDP2 makes a new one in the next gather."""
    if hasattr(param, "_unsharded_param"):
        del param._unsharded_param


def drop_outputs(param: Any) -> None:
    """Drops the gather outputs of an FSDPParam; FSDP2 allocates new ones."""
    param.all_gather_outputs = []


@dataclass(frozen=True)
class Reduced:
    """How FSDP2 reduces the gradients of parameters that it gathers together.

    over: the ranks. dtypes: of the gradients, by the policy or the parameters. into: the dtype of their sum; None: the
    same. numel: elements that a rank keeps, padding included. by: what FSDP2 calls to reduce-scatter. params: the
    sharded parameters whose gradients are reduced. replicas: the ranks that hold the same shard; None: only this one.
    among: what FSDP2 calls to all-reduce over replicas, by default their process group.
    """

    over: dist.ProcessGroup
    dtypes: frozenset[torch.dtype]
    into: torch.dtype | None
    numel: int
    by: Any
    params: tuple[nn.Parameter, ...]
    replicas: dist.ProcessGroup | None
    among: Any


def reductions(module: nn.Module) -> list[Reduced]:
    """The reduction of each FSDPParamGroup of a module that was passed to fully_shard. Raises like `parameters`."""
    states, state_class, mesh_class = _registry()
    state = states[module]() if module in states else None
    found = []
    for group in _groups(state) if isinstance(state, state_class) else []:
        _check(group, ("fsdp_params", "mp_policy", "_reduce_scatter_comm", "mesh_info"))
        trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
        numel = sum(param.padded_sharded_param_size.numel() for param in trained)
        given = {param.sharded_param.dtype for param in group.fsdp_params}
        dtypes = frozenset(given if group.mp_policy.param_dtype is None else {group.mp_policy.param_dtype})
        if group.fsdp_params and isinstance(mesh := group.fsdp_params[0].mesh_info, mesh_class):
            kept = tuple(param.sharded_param for param in trained)
            sums = _sums_in(group, dtypes), numel, group._reduce_scatter_comm, kept
            replicas, among = (getattr(one, "replicate_process_group", None) for one in (mesh, group.mesh_info))
            found.append(Reduced(mesh.shard_process_group, dtypes, *sums, replicas, among))  # type: ignore[attr-defined]
    return found


def _sums_in(group: Any, dtypes: frozenset[torch.dtype]) -> torch.dtype | None:
    """The policy's reduce_dtype; None where FSDP2 has dropped it, since nothing trained in the first forward."""
    into: torch.dtype | None = group.mp_policy.reduce_dtype
    return None if getattr(group, "_reduce_dtype", into) is None and into not in dtypes else into


def reduce_among(module: nn.Module, among: Any) -> None:
    """Makes FSDP2 all-reduce a module's gradients with `among` instead of the replicas' process group.

    Parameters keep their mesh. Raises like `parameters`, also if FSDP2 finds that process group elsewhere.
    """
    states, _, _ = _registry()
    for group in _groups(states[module]()):
        _check(group, ("_all_reduce_process_group",))
        group.mesh_info = copy.copy(group.mesh_info)  # stays equal to the original, with which FSDP2 compares it
        group.mesh_info.replicate_process_group = among
        if group._all_reduce_process_group is not among:
            refuse("FSDPParamGroup takes the process group of replicas from elsewhere than its mesh_info")
