"""What FSDP2 keeps of a shard: the only module that reads private names of torch.distributed.fsdp.

FSDP2's extension hooks are told the mesh and nothing else that a layout needs: which pass gathers, whether the weight
stays gathered for backward, how many rows the padded shard has, how large the whole weight is. All of it is on the
FSDPParam that holds the shard, which is found once through FSDP2's registry of modules, and remembered.

Names are checked as they are read: one that torch has changed is not taken for a weight that FSDP2 does not hold. What
is read depends on torch's code alone, so all ranks raise, or none does.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard as Placement
from torch.utils.weak import WeakTensorKeyDictionary

from layoutc.runtime.errors import LayoutError, UnsupportedTorch
from layoutc.runtime.facts import Layout

RUNS_WITH = "2.11 to 2.14"
FIX = "pip install 'torch>=2.11,<2.15'"

_OF_GROUP = ("fsdp_params", "_training_state", "_reshard_after_forward", "_use_post_forward_mesh")
_OF_PARAM = ("sharded_param", "fsdp_placement", "mesh_info", "_orig_size", "padded_sharded_param_size")


def parameters() -> Iterator[tuple[Any, Any]]:
    """Every FSDPParam, and the FSDPParamGroup that it is in.

    Raises UnsupportedTorch where one of them, or the registry, lacks what is read of it.
    """
    states, state_class, mesh_class = _registry()
    for reference in list(states.values()):
        state = reference()
        if not isinstance(state, state_class):  # FSDP1 and DDP keep theirs there too
            continue
        for group in _groups(state):
            _check(group, _OF_GROUP)
            _check(group._training_state.__class__, ("PRE_BACKWARD",))
            for param in group.fsdp_params:
                _check(param, _OF_PARAM)
                if isinstance(param.mesh_info, mesh_class):
                    _check(param.mesh_info, ("shard_process_group",))
                yield param, group


def _registry() -> tuple[Mapping[Any, Any], type, type]:
    """Weak references to the states of modules, by module; the class of FSDP2's, and that of meshes which shard."""
    try:
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    except ImportError as error:
        refuse(str(error), error)
    if "_unsharded_param" not in FSDPParam.__annotations__:  # an object has it once it was gathered
        refuse("FSDPParam has no _unsharded_param")
    return _module_state_mapping, FSDPState, FSDPMeshInfo


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    if not hasattr(state, "_fsdp_param_group"):
        refuse(f"{state.__class__.__name__} has no _fsdp_param_groups")
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11: one at most


def _check(held: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not hasattr(held, name):
            refuse(f"{held.__name__ if isinstance(held, type) else held.__class__.__name__} has no {name}")


def refuse(what: str, error: ImportError | None = None) -> NoReturn:
    """Raises UnsupportedTorch. `what` is not as it was in the releases of torch that layoutc has run with."""
    raise UnsupportedTorch(
        f"torch {torch.__version__} keeps FSDP2's shards in another way than layoutc reads them: {what}. "
        f"layoutc runs with torch {RUNS_WITH}: {FIX}"
    ) from error


# ------------------------------------------------------------------------------------------- where FSDP2 keeps a shard
class Shard(Protocol):
    """A wrapper of ours that FSDP2 may hold as a shard, quantized or cast on gather."""

    LAYOUT: ClassVar[Layout]
    _name: str | None
    _peers: tuple[str, ...] | None

    @property
    def shape(self) -> torch.Size:
        """Of this rank's part of the weight."""

    @property
    def device(self) -> torch.device:
        """Of what it holds."""

    @property
    def _planes(self) -> Mapping[str, Tensor]:
        """The very object is what a shard and all its aliases share."""

    def _label(self) -> str:
        """What messages call it."""


@dataclass(frozen=True)
class Sharding:
    """Where FSDP2 keeps a shard: weak references to the local tensor, its FSDPParam and FSDPParamGroup."""

    local: weakref.ref[Any]
    param: weakref.ref[Any]
    group: weakref.ref[Any]

    @property
    def is_gone(self) -> bool:
        """True when the model is gone that the shard was of."""
        return self.param() is None

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter, a DTensor."""
        found: nn.Parameter = self.param().sharded_param  # type: ignore[union-attr]
        return found

    @property
    def name(self) -> str | None:
        """The parameter's fully qualified name, where FSDP2 knows it."""
        return getattr(self.param(), "_param_fqn", None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole weight."""
        return tuple(self.param()._orig_size)  # type: ignore[union-attr]

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Of the longest shard: as which FSDP2 gathers each of them."""
        return tuple(self.param().padded_sharded_param_size)  # type: ignore[union-attr]

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Over which the weight is sharded; None where it is only replicated."""
        return getattr(self.param().mesh_info, "shard_process_group", None)  # type: ignore[union-attr]

    @property
    def dim(self) -> int:
        """That is cut."""
        return int(self.param().fsdp_placement.dim)  # type: ignore[union-attr]

    @property
    def frees_after_forward(self) -> bool:
        """False for a weight that stays gathered until backward is done."""
        return bool(self.group()._reshard_after_forward)  # type: ignore[union-attr]

    @property
    def reshards_to_fewer_ranks(self) -> bool:
        """True where reshard_after_forward is a number of ranks."""
        return bool(getattr(self.group(), "_use_post_forward_mesh", False))

    @property
    def gathers_for_backward(self) -> bool:
        """True while the group's backward gathers."""
        return bool(self.group()._training_state.name == "PRE_BACKWARD")  # type: ignore[union-attr]

    def gather_as_rows(self) -> None:
        """Lets FSDP2 gather the bytes of a shard of another dim than 0 in rank order.

        Raises LayoutError where FSDP2 is not as expected.
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


_COPY_OUT = "foreach_all_gather_copy_out"  # of torch.distributed.fsdp, which reads the dim of each placement


class _CutAsRows(Placement):
    """Shard(dim) as FSDP2 reads it: with dim 0 where it puts together what it has gathered, else as it is.

    For other dims than 0 it would put the outputs together by itself, as if each were a plane of the shard's own shape
    and of one byte an element. As rows they are left in rank order, and the post hook puts them together.
    """

    @property
    def dim(self) -> int:  # type: ignore[override]
        """The dim that is cut."""
        return 0 if sys._getframe(1).f_code.co_name == _COPY_OUT else super().dim


_shardings: dict[int, Sharding] = {}  # by the id of the shard's planes, until the shard is gone
_copies: Any = WeakTensorKeyDictionary()


def find(shard: Shard) -> Sharding | None:
    """Where FSDP2 keeps this tensor, or the one that it is an alias of, as a shard; None where it does not."""
    shard = _copies.get(shard, shard) if _copies else shard
    known = _look_up(shard)
    if known is None and dist.is_available() and dist.is_initialized():
        _scan()
        known = _look_up(shard)
    return known


def _look_up(shard: Shard) -> Sharding | None:
    known = _shardings.get(id(shard._planes))
    local = known.local() if known else None
    return known if local is not None and local._planes is shard._planes else None


def _scan() -> None:
    for param, group in parameters():
        local: Any = getattr(param.sharded_param, "_local_tensor", None)
        if getattr(local, "_planes", None) is not None and _look_up(local) is None:
            number = id(local._planes)
            forget = partial(_forget, number)
            _shardings[number] = Sharding(weakref.ref(local, forget), weakref.ref(param), weakref.ref(group))


def _forget(number: int, local: weakref.ref[Any]) -> None:
    """Called when a shard is gone. Another may have its number by now."""
    if (known := _shardings.get(number)) is not None and known.local is local:
        del _shardings[number]


def remember_copy(copy: Shard, shard: Shard) -> bool:
    """CPU offload gathers from a copy of the shard on the device; the copy then answers for the shard."""
    is_held = copy.device != shard.device and find(shard) is not None
    if is_held:
        stand_in(copy, shard)
    return is_held


def stand_in(copy: Shard, shard: Shard) -> None:
    """From now on `copy`, made of what the shard holds, answers for the shard."""
    _copies[copy] = _copies.get(shard, shard)


def parameter_name(shard: Shard) -> str | None:
    """The parameter's fully qualified name, where FSDP2 or quantize_ knows it."""
    known = find(shard)
    return (known.name if known else None) or shard._name


# -------------------------------------------------------------------------------------------------- of all parameters
def holds(parameter: Tensor) -> bool:
    """True for a parameter that fully_shard has made, quantized or not."""
    return any(param.sharded_param is parameter for param, _ in parameters())


def trains_instead(name: str, shape: tuple[int, ...]) -> bool:
    """True where fully_shard has made a parameter of a weight of this name and shape, and that has a gradient."""
    return any(
        getattr(getattr(param.sharded_param, "_local_tensor", None), "_name", None) == name
        and tuple(param._orig_size) == shape
        and param.sharded_param.grad is not None
        for param, _ in parameters()
    )


def sharded_parameters() -> dict[int, Tensor]:
    """By the id of each parameter that fully_shard has gathered: the sharded parameter that it was made of."""
    found = {}
    for param, _ in parameters():
        if (gathered := getattr(param, "_unsharded_param", None)) is not None:
            found[id(gathered)] = param.sharded_param
    return found
