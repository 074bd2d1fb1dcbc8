"""Per-weight overrides of the mode: low precision for some weights, for others values, on gather or in the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from layoutc.runtime.errors import check_model
from layoutc.runtime.product_mode import Mode, Settings, Where, checked
from layoutc.runtime.products.parallel import multiply_parts_
from layoutc.runtime.sharding import gathered, registry
from layoutc.runtime.sharding.registry import Sharding
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.torch_private.fsdp2 import shard_of

Filter = Callable[[nn.Module, str], bool]


def set_products_(
    model: nn.Module, mode: Mode | None = None, *, dequantize: Where | None = None, filter_fn: Filter | None = None
) -> list[str]:
    """Sets how the quantized weights of the chosen modules are multiplied, and where they are dequantized.

    Returns their names. What is left out follows the setting for all weights: `set_products_(model)` takes all back.

    mode: as for `layoutc.products`, which no longer changes these weights. dequantize: as for `layoutc.dequantize`, but
    "gather" applies to weights of any group whose products are not in low precision: FSDP2 gathers codes, and each
    gather dequantizes the weights of a group in one launch. A gathered weight is then a plain tensor to compiled graphs
    and other software. It uses as much gathered memory as in a plain model, and less host time. Forward and backward
    have the same values as with "layer", bit for bit: where a recipe's passes gather different codes, both passes
    gather forward's. Write into the sharded parameter: writes into a gathered weight are lost, and the next gather
    raises.
    filter_fn(module, fully qualified name): chooses modules; default: all. Weights that are cast on gather count too. A
    weight that several modules share has one override. Call it after `quantize_`, `quantized_init` or
    `cast_on_gather_`, before or after fully_shard, on all ranks, and not between a forward and its backward.

    The override stays with the weight: in shards, gathered weights, views and copies, through `module.to`, to_empty and
    deepcopy. Compiled graphs retrace when it changes. It is not saved: loading a checkpoint does not change it, and
    unpickled modules have none.

    Under tensor parallelism (parallelize_module), linear layers of chosen weights multiply their parts themselves, in
    any mode. DTensor's autograd would compute the weight's gradient in the activations' precision, without the weight.

    Changes nothing if it raises. Raises ValueError for an unknown mode, a model without quantized weights, and
    a filter that chooses none of them; LayoutError for a switch between gathered values and gathered codes while a
    weight is gathered.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "fp8_block")
        ['0.weight']
        >>> layoutc.set_products_(model, "low_precision")
        ['0.weight']
    """
    check_model(model, "set_products_")
    own: Settings | None = checked(mode, dequantize)
    own = None if own == (None, None) else own
    every: list[str] = []
    chosen: dict[int, tuple[str, Tensor]] = {}
    modules: list[nn.Module] = []
    gathered_as_values = gathered.weights_of_values()
    for fqn, module in model.named_modules(remove_duplicate=False):
        is_chosen = filter_fn is None or filter_fn(module, fqn)
        for name, held in module.named_parameters(fqn, recurse=False):
            param = gathered_as_values.get(id(held), held)
            if own_mode_holder(param) is None:
                continue
            every.append(name)
            if is_chosen:
                chosen.setdefault(id(param), (name, param))
                modules.append(module)
    if not every:
        raise ValueError("the model has no quantized weights: call quantize_ or cast_on_gather_ before set_products_")
    if not chosen:
        shown = ", ".join(every[:4]) + (", ..." if len(every) > 4 else "")
        raise ValueError(f"filter_fn chooses no module with a quantized weight. The model has {len(every)}: {shown}")
    chosen_shards = {id(holder): holder for _, param in chosen.values() for holder in _holders(param)}
    changed = _changed(chosen_shards, own)
    for sharding in changed:
        gathered.check_resharded(sharding, sharding.name or "a weight")
        gathered.check_given_back(sharding, [sharding.param()], "set_products_ changes the weight")
    for sharding in changed:
        gathered.forget(sharding)
    if own is None or own.dequantize != "gather":
        multiply_parts_(modules)
    for _, param in chosen.values():
        for holder in _holders(param):
            holder.own_products = own
    return [name for name, _ in chosen.values()]


def _changed(chosen: Mapping[int, Any], own: Settings | None) -> list[Sharding]:
    """The weights, gathered with the chosen ones, whose gathers switch between values and codes. chosen: by id."""
    found: list[Sharding] = []
    groups = {id(one.group()): one for holder in chosen.values() if (one := registry.find(holder)) is not None}
    for sharding in groups.values():
        weights = gathered.weights_of(sharding)
        shards: list[Any] = [shard_of(one) for one in weights]
        settings = [own if id(shard) in chosen else shard.own_products for shard in shards]
        for param, shard, values in zip(weights, shards, gathered.are_left(weights, settings), strict=True):
            decision, at = gathered.decision_of(param), registry.find(shard)
            if at is not None and decision is not None and decision.values != values:
                found.append(at)
    return found


def own_mode_holder(param: Tensor) -> Any:
    """The quantized or cast-on-gather weight that a parameter is, or holds a part of; else None."""
    local = local_tensor(param)
    return local if getattr(local, "QUANTIZED", None) is not None else None


def _holders(param: Tensor) -> Iterator[Any]:
    """The tensors that hold a weight's mode. For a gathered weight, also its shard: the next gather reads it there."""
    local = own_mode_holder(param)
    yield local
    home = getattr(getattr(local, "store", None), "home", None)  # only quantized weights have one
    if home is not None and (shard := home()) is not None:
        yield shard
