"""The optimizer inside MasterWeights: what it steps, its options, its state, and its step.

Users, schedulers and checkpoints see the groups and the state of MasterWeights, which are keyed by the model's
parameters. The inner optimizer has its own groups and state, keyed by what it steps: masters, or their shards if they
are DTensors and the optimizer is elementwise. DTensor's dispatch takes four times the host time of fused AdamW, and
refuses parameters of several meshes in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from layoutc.runtime.sharding.meshes import with_local
from layoutc.runtime.torch_private import local_tensor, version_of

# Elementwise optimizers, which step a shard like the whole. Not their subclasses, which may add a norm or a rank.
ELEMENTWISE = frozenset({ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop})

_EVALUATES = (
    "evaluates its closure at intermediate points, and MasterWeights quantizes no weights for those: use an optimizer "
    "that steps without a closure; or, where it takes a base optimizer as SAM does, pass it MasterWeights as that: "
    "SAM(model.parameters(), functools.partial(layoutc.MasterWeights, torch.optim.AdamW), ...)"
)


def groups_of(owner: str, optimizer_class: object, params: Iterable[Any]) -> list[dict[str, Any]]:
    """The parameter groups that `owner` is given, with the class of the inner optimizer. Raises TypeError, with what to
    write, for an optimizer instead of its class, and for a model, or nothing, instead of parameters."""
    if isinstance(optimizer_class, torch.optim.Optimizer):
        name = type(optimizer_class).__name__
        raise TypeError(f"{owner} makes the optimizer itself: pass the class, {owner}({name}, model.parameters(), ...)")
    if isinstance(optimizer_class, nn.Module) or not callable(optimizer_class):
        raise TypeError(
            f"{owner} takes the optimizer's class first: {owner}(torch.optim.AdamW, model.parameters(), ...)"
        )
    if isinstance(params, nn.Module):
        raise TypeError(f"{owner} takes parameters, not a {type(params).__name__}: pass model.parameters()")
    if isinstance(params, tuple) and not params:
        raise TypeError(f"{owner} has no parameters to step: pass model.parameters()")
    params = list(params)
    groups = [dict(g) for g in params] if params and isinstance(params[0], dict) else [{"params": params}]
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        if members and isinstance(members[0], tuple):  # named_parameters()
            group["param_names"], members = map(list, zip(*members, strict=True))
        group["params"] = members
    return groups


def steps_shard(inner: torch.optim.Optimizer, master: Tensor) -> bool:
    """Whether an optimizer steps a master's shard as a plain tensor, not the master."""
    return isinstance(master, DTensor) and is_elementwise(inner)


def is_elementwise(inner: torch.optim.Optimizer) -> bool:
    """Whether an optimizer steps each element by itself, and keeps state of a parameter's shape."""
    return type(inner) in ELEMENTWISE or getattr(inner, "STEPS_SHARDS", False)


def step_instead(inner: torch.optim.Optimizer, old: Tensor, new: Tensor) -> None:
    """Moves the state of the old stepped tensor to the new one."""
    if (state := inner.state.pop(old, None)) is not None:
        inner.state[new] = {name: value_for(old, new, name, value) for name, value in state.items()}


def value_for(master: Tensor, one: Tensor, name: str, value: Any) -> Any:
    """A value of a master's state, for the stepped tensor `one`: its shard for a shard, on the same device.

    Step counters stay where they are, as in torch.optim.
    """
    if not isinstance(value, Tensor) or name == "step":
        return value
    value = value.to(one.device)
    if not isinstance(value, DTensor) or isinstance(one, DTensor):
        return value
    if isinstance(master, DTensor) and (value.device_mesh, value.placements) != (master.device_mesh, master.placements):
        value = value.redistribute(master.device_mesh, master.placements)
    return local_tensor(value)


def shown_state(master: Tensor, one: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the stepped tensor `one`, as state of the master: DTensors if the master is one."""
    if one is master:
        return dict(state)
    elementwise = {name for name, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
    return {
        name: with_local(master, value) if name in elementwise and value.shape == one.shape else value
        for name, value in state.items()
    }


def push_options(outer_groups: list[dict[str, Any]], inner_groups: list[dict[str, Any]]) -> None:
    """Copies learning rates and other options, which schedulers change on the outer groups, to the inner groups."""
    for outer, inner in zip(outer_groups, inner_groups, strict=True):
        _set_options(inner, {key: value for key, value in outer.items() if key != "params"})


def marks(inner_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options that `pull_options` compares with."""
    return [{key: _mark(value) for key, value in group.items() if key != "params"} for group in inner_groups]


def pull_options(
    outer_groups: list[dict[str, Any]], inner_groups: list[dict[str, Any]], before: list[dict[str, Any]]
) -> None:
    """Copies options that the inner optimizer has set since `marks` to the outer groups.

    Some optimizers keep results in their groups: Prodigy its step size, ScheduleFree the weight of its average.
    `push_options` would overwrite them, and checkpoints would lack them.
    """
    for outer, inner, marked in zip(outer_groups, inner_groups, before, strict=True):
        changed = {key: value for key, value in inner.items() if key != "params" and _differs(marked.get(key), value)}
        own = {
            key: value.clone() if isinstance(value, Tensor) and key not in outer else value
            for key, value in changed.items()
        }
        _set_options(outer, own)


def _mark(value: Any) -> Any:
    return (value, version_of(value)) if isinstance(value, Tensor) else (value, None)


def _differs(mark: Any, value: Any) -> bool:
    now = _mark(value)
    return mark is None or mark[0] is not now[0] or mark[1] != now[1]


def own_options(groups: Iterable[dict[str, Any]]) -> None:
    """Gives the inner optimizer its own copies of tensor options: code may replace one for a step and restore it."""
    for group in groups:
        group.update({key: value.clone() for key, value in group.items() if isinstance(value, Tensor)})


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Sets options of a parameter group. Tensors are written in place, not replaced.

    Graphs of compiled steps hold these tensors, and some optimizers refuse a learning rate that is a plain number.
    """
    for key, value in options.items():
        current = group.get(key)
        if not isinstance(current, Tensor):
            group[key] = value
        elif isinstance(value, Tensor):
            current.copy_(value)
        else:
            current.fill_(value)


def refuse_closures(inner: torch.optim.Optimizer) -> None:
    """Raises TypeError for an optimizer that moves weights and evaluates the model by itself (LBFGS, SAM)."""
    closure = signature(inner.step).parameters.get("closure")
    if hasattr(inner, "first_step") or (closure is not None and closure.default is closure.empty):
        raise TypeError(f"{type(inner).__name__} {_EVALUATES}")


def step(inner: torch.optim.Optimizer) -> None:
    """Steps the inner optimizer. Raises as `refuse_closures` does, if only a step without a closure tells."""
    try:
        inner.step()
    except Exception as error:
        if "closure" not in str(error):
            raise
        raise TypeError(f"{type(inner).__name__} {_EVALUATES}") from error


def in_own_words(inner: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict as torch's optimizers name its entries: Transformer Engine's and apex's FusedAdam count steps for a
    group, and call masters master_param.

    Raises ValueError for what torch's optimizers can't go on from: moments without a step, steps without the correction
    of bias, and masters as the 16 bits that bf16 weights lack.
    """
    if not is_elementwise(inner):
        return dict(state_dict)  # others may keep anything under these names
    groups, states = [dict(group) for group in state_dict["param_groups"]], dict(state_dict["state"])
    for group in groups:
        steps = group.pop("step", None)
        if group.get("bias_correction", True) is False or group.get("bias_correction") == 0:
            raise ValueError("the state is of an optimizer with bias_correction=False, and torch's correct the bias")
        for key in group["params"]:
            if not (state := dict(states.get(key) or {})):
                continue
            if (master := state.pop("master_param", None)) is not None:
                if not master.is_floating_point():
                    raise ValueError(
                        f"the master of parameter {key} is {master.dtype}, the bits that its bf16 weight lacks: save "
                        "the state of an optimizer with store_param_remainders=False"
                    )
                state["master"] = master
            if steps is not None:
                state.setdefault("step", torch.as_tensor(steps, dtype=torch.float32, device="cpu").reshape(()).clone())
            if "exp_avg_sq" in state and "step" not in state:
                raise ValueError(
                    f"the state of parameter {key} has exp_avg_sq, but no step, by which its bias is corrected: set "
                    f"state['state'][{key!r}]['step'] to the number of steps"
                )
            states[key] = state
    return {**state_dict, "param_groups": groups, "state": states}


def check_has_master(param: Tensor, saved: dict[str, Any], key: object) -> None:
    """Raises ValueError if the saved state of a parameter with a master has none."""
    if saved.get("master") is None:
        name = getattr(local_tensor(param), "weight_name", None) or f"parameter {key}"
        raise ValueError(
            f"{name} of shape {tuple(param.shape)}: the state has no fp32 master, as none of a plain optimizer has. To "
            f"go on with its moments, add the masters of all such weights: state['state'][{key!r}]['master'] = "
            "optimizer.masters()[param]"
        )
