"""What hands out a weight gives it memory of its own wherever a plain weight has that: writes into it stay there."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import mesh_of, on
from models import raw
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import layoutc
from layoutc import checkpoint
from layoutc.integrations import plain_values
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight.tensor import QuantizedTensor

functional: Any = torch.ops._c10d_functional
FULL = StateDictOptions(full_state_dict=True)
BLOCK = 32  # rows and columns of which every block below is a part


def group(model: Any) -> Any:
    return model.weight.device_mesh.get_group()


def local(model: Any) -> Any:
    """This rank's part of the weight, outside of autograd."""
    return local_tensor(model.weight).detach()


def gathered(model: Any) -> Tensor:
    world = group(model).size()
    return functional.wait_tensor(functional.all_gather_into_tensor(local(model), world, group(model).group_name))  # type: ignore[no-any-return]


def broadcast(model: Any) -> Tensor:
    sent = functional.broadcast(local(model), 0, group(model).group_name)
    return functional.wait_tensor(sent)  # type: ignore[no-any-return]


def masters(model: Any) -> Any:
    return layoutc.MasterWeights(torch.optim.AdamW, model.parameters())


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def of_unsharded(model: Any) -> Any:
    model.unshard()
    copied = model.weight.detach().clone(), copy.deepcopy(model.weight)
    model.reshard()
    return copied


def objects(model: Any) -> list[Any]:
    """As pickles between ranks."""
    found: list[Any] = [None] * group(model).size()
    dist.all_gather_object(found, local(model), group=group(model))
    return found


def shifted(model: Any) -> list[Any]:
    """Each rank's rows, in a list that all_gather fills."""
    found = [torch.empty_like(local(model)) for _ in range(group(model).size())]
    dist.all_gather(found, local(model), group=group(model))
    return found


def of_class(model: Any, call: Callable[[Any], Any]) -> Any:
    """What a call that plain weights don't have gives."""
    return [] if type(local(model)) is Tensor else call(local(model))


GIVERS: dict[str, Callable[[Any], Any]] = {
    "full_tensor": lambda m: m.weight.full_tensor(),
    "replicate": lambda m: m.weight.redistribute(placements=[Replicate()]),
    "replicate, async": lambda m: m.weight.redistribute(placements=[Replicate()], async_op=True),
    "to columns": lambda m: m.weight.redistribute(placements=[Shard(1)]),
    "to columns and whole": lambda m: m.weight.redistribute(placements=[Shard(1)]).full_tensor(),
    "there and back": lambda m: m.weight.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)]),
    "full state": lambda m: get_model_state_dict(m, options=FULL),
    "full state on the host": lambda m: get_model_state_dict(
        m, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    ),
    "full states": lambda m: get_state_dict(m, masters(m), options=FULL),
    "staged": lambda m: DefaultStager(StagingOptions(False, False, False, False)).stage({"model": m.state_dict()}),
    "staged, blocking": lambda m: BlockingAsyncStager().stage({"model": m.state_dict()}),
    "streamed": lambda m: list(checkpoint.stream_export(m, files="compressed_tensors")),
    "saved": saved,
    "copied state": lambda m: copy.deepcopy(m.state_dict()),
    "unsharded, copied": of_unsharded,
    "masters": lambda m: list(masters(m).masters().values()),
    "deepcopy": lambda m: copy.deepcopy(m.weight),
    "clone": lambda m: m.weight.detach().clone(),
    "to, copy": lambda m: m.weight.detach().to("cpu", copy=True),
    "all_gather": gathered,
    "broadcast": broadcast,
    "distribute": lambda m: distribute_tensor(local(m), m.weight.device_mesh, [Shard(0)]),
    "distribute columns": lambda m: distribute_tensor(local(m), m.weight.device_mesh, [Shard(1)]),
    "distribute copies": lambda m: distribute_tensor(local(m), m.weight.device_mesh, [Replicate()]),
    "cat": lambda m: torch.cat(local(m).split(BLOCK)),
    "cat of one": lambda m: torch.cat([local(m)]),
    "cat of columns": lambda m: torch.cat(local(m).split(BLOCK, 1), 1),
    "cat of rows of experts": lambda m: torch.cat([one.view(1, *one.shape) for one in local(m).split(BLOCK)], 1),
    "index_select": lambda m: local(m).index_select(0, torch.arange(BLOCK)),
    "pad": lambda m: F.pad(local(m), (0, 0, 0, BLOCK)),
    "pad by nothing": lambda m: F.pad(local(m), (0, 0)),
    "rows, cloned": lambda m: local(m)[:BLOCK].clone(),
    "rows, copied": lambda m: copy.deepcopy(local(m)[:BLOCK]),
    "columns, contiguous": lambda m: local(m)[:, :BLOCK].contiguous(),
    "transposed, contiguous": lambda m: local(m).t().contiguous(),
    "rows of experts, contiguous": lambda m: local(m).view(2, -1, 2 * BLOCK)[:, :BLOCK].contiguous(),
    "new_zeros": lambda m: local(m).new_zeros(local(m).shape),
    "new_empty": lambda m: local(m).new_empty(local(m).shape),
    "empty_like": lambda m: torch.empty_like(local(m)),
    "values": lambda m: local(m).to(torch.bfloat16),
    "quantized": lambda m: of_class(m, lambda weight: weight.quantize() if hasattr(weight, "quantize") else []),
    "plain values": lambda m: plain_values.plain(m.state_dict()),
    "all_gather into a list": shifted,
    "objects": objects,
}
ALIASES: dict[str, Callable[[Any], Any]] = {  # as those of plain weights
    "state_dict": lambda m: m.state_dict(),
    "sharded state": lambda m: get_model_state_dict(m),
    "detach": lambda m: m.weight.detach(),
    "contiguous": lambda m: m.weight.detach().contiguous(),
    "rows, contiguous": lambda m: local(m)[:BLOCK].contiguous(),
}
SHARDS = {"one": (1, 4 * BLOCK), "two": (2, 8 * BLOCK), "inside a block": (2, 3 * BLOCK)}  # ranks, rows


def memory(found: Any) -> Iterator[Tensor]:
    """All plain tensors that hold something of what was handed out, initial values among them."""
    if isinstance(found, Mapping | list | tuple):
        for one in found.values() if isinstance(found, Mapping) else found:
            yield from memory(one)
    elif isinstance(found, DTensor):
        yield from memory(found._local_tensor)
    elif hasattr(found, "trigger_wait"):  # an AsyncCollectiveTensor
        yield from memory(found.trigger_wait())
    elif isinstance(found, QuantizedTensor):
        yield from found.planes().values()
        if found.store.writes.initial is not None:
            yield found.store.writes.initial.values
    elif isinstance(found, Tensor):
        yield getattr(found, "plain", found).detach()


def build(recipe: str, shards: str) -> Any:
    world, rows = SHARDS[shards]
    if recipe.startswith("nvfp4") and shards == "inside a block":
        rows -= BLOCK // 2
    torch.manual_seed(0)
    model = nn.Linear(2 * BLOCK, rows, bias=False)
    if recipe.startswith("cast "):
        layoutc.cast_on_gather_(model, recipe.removeprefix("cast "))
    elif recipe != "plain":
        layoutc.quantize_(model, recipe)
    fully_shard(model, mesh=mesh_of(2) if world == 2 else mesh_of(2, 1, names=("other", "one"))["one"])
    return model


def changed(recipe: str, shards: str) -> dict[str, bool]:
    """Whether writing into all that a function hands out changes a byte of the model. What is refused changes none."""
    found = {}
    for name, give in (GIVERS | ALIASES).items():
        model = build(recipe, shards)
        before = [raw(one) for one in memory(model.weight)]
        try:
            given = list(memory(give(model)))
        except LayoutError:
            given = []
        with torch.no_grad():
            for one in given:
                one.copy_((raw(one) ^ 0x55).view(one.dtype).view(one.shape))
        after = [raw(one) for one in memory(model.weight)]  # a master that was made has taken the initial values
        found[name] = not all(map(torch.equal, before, after))
    return found


plain = cache(lambda shards: changed("plain", shards))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "shards"),
    [
        *product(["nvfp4", "fp8_delayed"], ["one", "two"]),
        *product(["nvfp4", "mxfp8"], ["inside a block"]),
        *product(["nvfp4_4over6", "fp8_rowwise", "cast nvfp4"], ["two"]),
    ],
)
@on("two")
def test_writes_into_what_is_handed_out_leave_the_model(recipe: str, shards: str) -> None:
    found = changed(recipe, shards)
    written = [name for name in GIVERS if found[name] and not plain(shards)[name]]
    assert not written, written
    assert [name for name in ALIASES if found[name]] == [name for name in ALIASES if plain(shards)[name]] == [*ALIASES]


def test_trainers_that_write_files_of_their_own_get_plain_values() -> None:
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    layoutc.quantize_(model, "mxfp8")
    weight: Any = model.weight
    found = plain_values.plain(model.state_dict(keep_vars=True) | {"steps": 3})
    assert found.pop("steps") == 3
    assert {name: type(value) for name, value in found.items()} == {"weight": Tensor, "bias": Tensor}
    assert torch.equal(found["weight"], weight.dequantize())
    assert torch.equal(found["bias"], model.bias)
