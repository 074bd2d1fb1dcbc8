"""What FSDP2 keeps in private is checked as it is read: where a name has changed, all ranks say so before a collective.

Each check hides one name from the registry alone, so FSDP2 itself goes on as it would after a change of its names.
"""

from __future__ import annotations

import gc
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from models import build, shard
from torch.distributed import _composable_state
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from layoutc.runtime.errors import UnsupportedTorch
from layoutc.runtime.sharding import registry
from layoutc.runtime.torch_private import fsdp2

STATES = "torch.distributed._composable_state"
RENAMED = [  # what is hidden, and what is said to be missing
    ("_module_state_mapping", "cannot import name '_module_state_mapping'"),
    ("FSDPState", "cannot import name 'FSDPState'"),
    ("FSDPMeshInfo", "cannot import name 'FSDPMeshInfo'"),
    ("_fsdp_param_groups", "FSDPState has no _fsdp_param_groups"),
    ("fsdp_params", "FSDPParamGroup has no fsdp_params"),
    ("_training_state", "FSDPParamGroup has no _training_state"),
    ("PRE_BACKWARD", "TrainingState has no PRE_BACKWARD"),
    ("_reshard_after_forward", "FSDPParamGroup has no _reshard_after_forward"),
    ("_use_post_forward_mesh", "FSDPParamGroup has no _use_post_forward_mesh"),
    ("sharded_param", "FSDPParam has no sharded_param"),
    ("fsdp_placement", "FSDPParam has no fsdp_placement"),
    ("mesh_info", "FSDPParam has no mesh_info"),
    ("shard_process_group", "MeshInfo has no shard_process_group"),  # FSDPMeshInfo, or HSDPMeshInfo of an earlier model
    ("_orig_size", "FSDPParam has no _orig_size"),
    ("padded_sharded_param_size", "FSDPParam has no padded_sharded_param_size"),
    ("_unsharded_param", "FSDPParam has no _unsharded_param"),
]


class Without:
    """An object of FSDP2's, and all that it leads to, without an attribute of one name."""

    def __init__(self, held: Any, hidden: str) -> None:
        object.__setattr__(self, "own", (held, hidden))

    def __getattribute__(self, name: str) -> Any:
        held, hidden = object.__getattribute__(self, "own")
        if name == hidden or (hidden == "_fsdp_param_groups" and name == "_fsdp_param_group"):
            raise AttributeError(name)
        found = getattr(held, name)
        if name == "_training_state" and hidden == "PRE_BACKWARD":
            return Enum("TrainingState", ["IDLE"]).IDLE  # type: ignore[attr-defined]
        if name in ("_fsdp_param_groups", "fsdp_params"):
            return [Without(one, hidden) for one in found]
        leads_on = name == "mesh_info" or (name == "_fsdp_param_group" and found is not None)  # torch 2.11
        return Without(found, hidden) if leads_on else found


class Mapping:
    """The states of modules, as the registry finds them."""

    def __init__(self, hidden: str) -> None:
        self.hidden = hidden

    def values(self) -> list[Any]:
        """What stands for weak references."""
        held = [reference() for reference in _composable_state._module_state_mapping.values()]
        return [lambda state=state: Without(state, self.hidden) for state in held if state is not None]


@contextmanager
def renamed(hidden: str) -> Iterator[None]:
    """Whoever imports what is private to FSDP2 in here does not find this name."""
    before = dict(sys.modules)
    annotations = dict(FSDPParam.__annotations__)
    for module in (STATES, *(f"torch.distributed.fsdp._fully_shard._fsdp_{part}" for part in ("state", "common"))):
        changed = ModuleType(module)
        changed.__dict__.update({name: value for name, value in vars(before[module]).items() if name != hidden})
        sys.modules[module] = changed
    if hidden != "_module_state_mapping":
        sys.modules[STATES]._module_state_mapping = Mapping(hidden)  # type: ignore[attr-defined]
    FSDPParam.__annotations__.pop(hidden, None)
    try:
        yield
    finally:
        sys.modules.update(before)
        FSDPParam.__annotations__.update(annotations)


def said_of(rows: int, hidden: str | None) -> str:
    """What a first forward says where a name is hidden, or, for None, where the registry stays empty; afterwards the
    group works, and so does the model."""
    gc.collect()  # models of other tests, whose states may be of another kind
    model = shard(build("mxfp8", rows))
    x = torch.ones(4, rows)
    try:
        with renamed(hidden or "nothing"):
            if hidden is None:
                sys.modules[STATES]._module_state_mapping = {}  # type: ignore[attr-defined]
            model(x)
    except UnsupportedTorch as error:
        said = str(error)
    else:
        said = "nothing"
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    if hidden is not None:
        model(x)
    return said


def all_said(rows: int) -> dict[str, str]:
    """By what is hidden."""
    return {hidden: said_of(rows, hidden) for hidden, _ in RENAMED} | {"all": said_of(rows, None)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [64, 96], ids=["even shards", "cuts inside blocks"])
def test_a_renamed_registry_is_refused_on_all_ranks_before_a_collective(two: Ranks, rows: int) -> None:
    first = two.told(all_said, rows)
    for hidden, missing in RENAMED:
        assert missing in first[hidden], (hidden, first[hidden])
        assert first[hidden].startswith(f"torch {torch.__version__} keeps FSDP2's shards differently")
        assert first[hidden].endswith("layoutc runs with torch 2.11 to 2.14: pip install 'torch>=2.11,<2.15'")
    assert "_module_state_mapping does not lead to head.weight, which FSDP2 gathers" in first["all"]


@pytest.mark.checkout
def test_what_is_said_to_work_is_what_may_be_installed() -> None:
    """The bound in pyproject.toml is that of the message."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"pip install '{project['dependencies'][0]}'" == fsdp2.FIX


def test_nothing_is_read_before_there_is_a_process_group() -> None:
    """A weight on one device does not ask FSDP2."""
    with renamed("_module_state_mapping"):
        assert registry.find(build("mxfp8", 64).layers[0].weight) is None
