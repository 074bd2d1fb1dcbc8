"""FSDP2's registry of what fully_shard has made, checked as it is read: a name that torch has changed is not taken for
a weight that FSDP2 does not hold.

What is read is the same on all ranks, since it depends on torch's code alone, so all of them raise, or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from layoutc.runtime.errors import UnsupportedTorch

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
