"""Warnings about updates of quantized weights: in place each time by name, and once for optimizers and averages.

An update smaller than half a step between codes is lost, so such a model hardly trains, or gets worse.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from layoutc.runtime import callers
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.sharding import registry
from layoutc.runtime.storage import initial_values
from layoutc.runtime.torch_private import left_by_compilers, local_tensor, schema_of, traced
from layoutc.runtime.weight.tensor import QuantizedTensor

_warned: set[str] = set()  # kinds of warnings that this process has given
_seen: WeakSet[torch.optim.Optimizer] = WeakSet()  # optimizers that were checked


def warn_once(what: str, message: str) -> None:
    """Warns unless this process has already given that warning."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(message, stacklevel=3)


def warn_of_coarse(name: str, recipe: str, count: int) -> None:
    """Warns, once, of stepped masters that were made from codes. name: of the first of `count` weights."""
    warn_once(
        "coarse",
        f"masters of quantized weights ({name} in {recipe} first, {count} in all) start as the dequantized weights, "
        "since the values before quantization are not known: for many steps, a small learning rate changes few codes. "
        "Load the optimizer's state together with the weights, or load high-precision weights with "
        "layoutc.checkpoint.load(state, folder, convert=True). quantize_ and quantized_init keep what they quantize "
        "for a model's first MasterWeights, unless keep_values=False, or it is given frozen weights: leave these out, "
        "and call add_param_group when they train",
    )


def warn_inexact_update(func: Any, targets: Sequence[QuantizedTensor], others: Sequence[Any]) -> None:
    """Warns of an operator that updates quantized weights in place from other tensors of their shape.

    Initializers have no such operands, and weights with initial values, or masters, lose nothing.
    """
    name = schema_of(func).name
    if not name.endswith("_") or name.endswith("copy_"):
        return
    plain = [one for one in others if isinstance(one, Tensor) and not any(one is target for target in targets)]
    shapes = {tuple(one.shape) for one in plain if one.is_floating_point() and one.dim()}
    averages = any(isinstance(one, QuantizedTensor) for one in plain)
    known = initial_values.lookup if averages else initial_values.finest  # codes are no finer than codes
    lose = [one for one in targets if tuple(one.shape) in shapes and known(one.store) is None]
    if not lose or note_average(lose[0]) or callers.merging()[0] == "merge":
        return
    lose = [
        one
        for one in lose
        if not one.store.writes.stepped and not (callers.merging()[0] and initial_values.base(one.store))
    ]
    if lose and not callers.merging()[0] and (averages or _was_read(lose[0])):
        _warn_of_average(f"{func} averages into {lose[0].label()}")
    elif lose:
        what = f"{func} updates {', '.join(one.label() for one in lose)} in place, and {_LOSES}"
        undo = "to add what is taken off again, call layoutc.merge_(weight, delta, keep_base=True)"
        warnings.warn(f"{what}. To train, {_train('torch.optim.AdamW')}; {_AVERAGE}; {undo}", stacklevel=2)


def note_average(target: QuantizedTensor) -> bool:
    """Warns if torch's AveragedModel writes an average into a quantized weight; returns whether it does."""
    averages = callers.is_near(_AVERAGES)
    if averages:
        _warn_of_average(f"AveragedModel keeps its averages quantized ({target.label()} first)")
    return averages


def _warn_of_average(what: str) -> None:
    warn_once("average", f"{what}, and {_LOSES}. Instead, {_AVERAGE}")


def note_values(target: QuantizedTensor, values: Any) -> None:
    """Records that an operator has computed values from a weight, one for each element."""
    if isinstance(values, Tensor) and values.shape == target.shape:
        target.store.writes.read = target.store.writes.content


def _was_read(target: QuantizedTensor) -> bool:
    return target.store.writes.read is target.store.writes.content


def values_before(target: QuantizedTensor) -> Tensor | None:
    """What a weight holds, if values that were computed from it may be about to be written into it; else None."""
    if "average" in _warned or not _was_read(target) or traced(target) or callers.merging()[0]:
        return None
    return None if target.is_meta or initial_values.lookup(target.store) else target.dequantize(torch.float32)


def check_written(target: QuantizedTensor, before: Tensor | None, values: Tensor) -> None:
    """Warns, once, if quantizing values of a weight takes away more than half of what they change."""
    if before is None:
        return
    values = values.to(before.device)
    if 2 * (target.dequantize(torch.float32) - values).norm() > (values - before).norm():
        _warn_of_average(f"values close to what {target.label()} held were written into it, as averages are")


@cache
def watch() -> None:
    """Starts warning of optimizers that step quantized weights themselves."""
    register_optimizer_step_pre_hook(_before_step)


@left_by_compilers
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Checks an optimizer before its first step. Weights that it steps itself keep no initial values."""
    if optimizer in _seen:
        return
    _check_replaced(optimizer)
    if any(getattr(type(one), "STEPS_MASTERS", False) for one in (optimizer, *vars(optimizer).values())):
        _seen.add(optimizer)  # or one that wraps it
        return
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if any(hasattr(local_tensor(param), "LAYOUT") for param in params):
        registry.check_shards(params, type(optimizer).__name__)
        registry.check_replaced(params, type(optimizer).__name__)
    _seen.add(optimizer)
    weights = [local for p in params if isinstance(local := local_tensor(p), QuantizedTensor)]
    for weight in weights:
        initial_values.free(weight.store)
        weight.store.writes.trains, weight.store.writes.stepped = False, True
    if weights:
        kind = type(optimizer)
        name = f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__name__
        what = f"{kind.__name__} steps quantized weights themselves ({weights[0].label()} first), and {_LOSES}"
        instead = f"{_train(name)}, which steps fp32 masters; {_OUTER}"
        warnings.warn(f"{what}. Instead, {instead}", stacklevel=2)


def mark_replaced(param: Tensor, name: str, caller: str) -> None:
    """Records that a conversion replaced a parameter: an optimizer that still has it would train nothing."""
    setattr(param, _REPLACED, (name, caller))


def _check_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Raises LayoutError for parameters that a conversion replaced, unless another model trains them."""
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.grad is None and (found := getattr(param, _REPLACED, None)) is not None:
            name, caller = found
            raise LayoutError(
                f"{caller} replaced {name} of shape {tuple(param.shape)}, and {type(optimizer).__name__} would step "
                f"the old one alone: create the optimizer after {caller}, with model.parameters()"
            )


_REPLACED = "_layoutc_replaced"
_LOSES = "a change of less than half a step between codes is lost: such weights stand still or get worse"
_AVERAGE = "to average weights, average what optimizer.masters() gives"
_AVERAGES = "torch.optim.swa_utils"
_OUTER = "give an outer optimizer (DiLoCo) optimizer.masters().values(), and call optimizer.write_back() after it"


def _train(optimizer: str) -> str:
    return f"write layoutc.MasterWeights({optimizer}, model.parameters(), ...)"
