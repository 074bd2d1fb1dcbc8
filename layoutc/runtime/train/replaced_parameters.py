"""Parameters that replaced others in an optimizer's groups, or in modules, and groups and states that users edit.

accelerate does the first when it shards a model after the optimizer was made, fully_shard the second. The new parameter
takes over its part of the old one's master, which is finer than what the parameter dequantizes to.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.sharding import registry
from layoutc.runtime.train import inner_optimizer
from layoutc.runtime.train.steps import Entry, local_of, same
from layoutc.runtime.weight.tensor import QuantizedTensor

Places = dict[Tensor, tuple[dict[str, Any], str]]
_converted: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # by id: a module may define ==


def record_replacements(roots: Iterable[nn.Module]) -> None:
    """Records modules, weakly, whose parameters an optimizer is likely to get."""
    for root in roots:
        _converted.update((id(module), module) for module in root.modules())


def places(params: Iterable[Tensor]) -> Places:
    """Where modules have parameters that are not sharded yet: the module's dict of parameters, and the name there.

    An optimizer only gets parameters. Most are in converted modules; for others, Python's garbage collector finds the
    referrers, which takes 0.1 s for a million objects.
    """
    wanted = {id(param): param for param in params if not isinstance(param, DTensor)}
    found = _among([module._parameters for module in _converted.values()], wanted)
    if rest := [param for param in wanted.values() if param not in found]:
        dicts = [one for one in gc.get_referrers(*rest) if type(one) is dict]
        owners = gc.get_referrers(*dicts) if dicts else []
        of_modules = {id(one._parameters) for one in owners if isinstance(one, nn.Module)}
        of_modules |= {id(one["_parameters"]) for one in owners if type(one) is dict and "_parameters" in one}
        found |= _among([one for one in dicts if id(one) in of_modules], wanted)
    return found


def _among(dicts: Iterable[dict[str, Any]], wanted: dict[int, Tensor]) -> Places:
    """The wanted parameters, by id, in these modules' dicts."""
    return {wanted[id(value)]: (one, name) for one in dicts for name, value in one.items() if id(value) in wanted}


def _sharded_since(found: Places, param: Tensor) -> Tensor | None:
    """The parameter by which fully_shard has replaced `param`, if any."""
    parameters, name = found.get(param, ({}, ""))
    now = parameters.get(name)
    is_shard = isinstance(now, DTensor) and not isinstance(param, DTensor) and now.shape == param.shape
    return now if is_shard else None


def _hand_gradient_over(old: Tensor, new: Tensor) -> None:
    """Moves the old parameter's gradient to the new one: to initialize state, torch's checkpoints set gradients of the
    groups' parameters and step once."""
    if old.grad is not None and new.grad is None and isinstance(new, DTensor):
        new.grad = distribute_tensor(old.grad, new.device_mesh, new.placements, src_data_rank=None)
    old.grad = None


def _hand_over(param: Tensor, made: Tensor, old: Tensor, master: Tensor) -> bool:
    """Copies a master's values to the one that replaces it, if both parameters have the same values; else false.

    They differ on a rank whose weights were replaced by the first rank's since.
    """
    if old.is_meta:  # no values yet
        return False
    values = [
        _cut(one.dequantize(torch.float32) if isinstance(one, QuantizedTensor) else one, param) for one in (old, master)
    ]
    local = local_of(param)
    now = local.dequantize(torch.float32) if isinstance(local, QuantizedTensor) else local
    if not torch.equal(now.to(torch.float32), values[0].to(torch.float32)):
        return False
    local_of(made).copy_(values[1])
    return True


def _cut(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor if it is cut as `like` is, without communication."""
    if not isinstance(like, DTensor) or isinstance(whole, DTensor):
        return local_of(whole)
    cut: Any = distribute_tensor(whole.detach(), like.device_mesh, like.placements, src_data_rank=None)
    return local_of(cut).to(local_of(like).device)


class FollowsParameters(torch.optim.Optimizer):
    """An optimizer of masters whose parameters may be replaced."""

    inner: torch.optim.Optimizer
    _masters: dict[Tensor, Tensor]
    _recipes: dict[Tensor, tuple[str, str]]  # quantized parameters -> names of parameter and recipe
    _written: dict[Tensor, Any]
    _coarse: dict[Tensor, None]  # parameters whose masters were made from codes
    _places: Places
    _kept: Sequence[Entry]
    _followed: Sequence[dict[str, Any]] = ()  # the groups that the inner optimizer's belong to
    _stepped: dict[Tensor, Tensor]  # what the inner optimizer steps for each parameter

    def _adopt(self, params: Iterable[Tensor]) -> None:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as Optimizer.add_param_group does, and makes masters for its parameters."""
        super().add_param_group(param_group)
        if self._followed:
            self._follow()

    def _forget(self) -> None:
        raise NotImplementedError

    def _entries(self) -> Sequence[Entry]:
        raise NotImplementedError

    def _load_one(self, param: Tensor, saved: dict[str, Any]) -> None:
        raise NotImplementedError

    def _in_own_words(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        return inner_optimizer.in_own_words(self.inner, state_dict)

    @torch.no_grad()
    def _follow(self) -> None:
        """Switches to the groups and parameters that it holds now, and to those by which fully_shard replaced them.
        Takes over states that users have replaced or deleted.

        Raises LayoutError for a parameter of another shape, and after a step, since state belongs to the old shards;
        ValueError for a state that does not fit.
        """
        groups, params = self.param_groups, [param for group in self.param_groups for param in group["params"]]
        if (
            self._places
            or not same(params, [entry.param for entry in self._kept])
            or not same(groups, self._followed)
            or [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.inner.param_groups]
        ):
            self._take_edits()
            self._forget()
            self._follow_parameters()
            self._follow_groups()
        self._step_masters()
        self._take_edits()

    def _follow_parameters(self) -> None:
        """Makes masters for the parameters that came, and drops those of parameters that are gone."""
        masters, came = self._masters, list[Tensor]()
        held = {param for group in self.param_groups for param in group["params"]}
        at = {id(outer): inner["params"] for outer, inner in zip(self._followed, self.inner.param_groups, strict=True)}
        param_of = {id(stepped): param for param, stepped in self._stepped.items()}
        for outer in self.param_groups:
            before = [param_of[id(stepped)] for stepped in at.get(id(outer), ())]
            for position, param in enumerate(outer["params"]):
                if (now := _sharded_since(self._places, param)) is not None:
                    _hand_gradient_over(param, now)
                    outer["params"][position] = now
                    self._replace(param, now)
                elif param not in masters and position < len(before) and (old := before[position]) not in held:
                    self._replace(old, param)
                elif param not in masters:
                    came.append(param)
        self._adopt(came)
        self._places |= places(came) if came else {}
        held = {param for group in self.param_groups for param in group["params"]}
        for param in masters.keys() - held:
            self.inner.state.pop(self._stepped.pop(param), None)
            for record in (masters, self._recipes, self._coarse):
                record.pop(param, None)
        # Users may put a parameter back: its state has the master.
        self._written = {param: now for param, now in self._written.items() if param in masters or param in self.state}

    def _replace(self, old: Tensor, param: Tensor) -> None:
        """Makes a master for a parameter, with the values of that of the old one."""
        if tuple(param.shape) != tuple(old.shape) or self.inner.state.get(self._stepped[old]):
            raise LayoutError(
                f"a parameter of shape {tuple(param.shape)} was put into the groups of MasterWeights in place "
                f"of {getattr(local_of(old), 'weight_name', None) or 'one'} of shape {tuple(old.shape)}"
                + (", after a step" if self.inner.state.get(self._stepped[old]) else "")
                + "; create a new optimizer with the parameters that it is to train"
            )
        was_coarse, master = old in self._coarse, self._masters[old]
        self.state.pop(old, None)
        self._adopt([param])
        made = self._masters[param]
        if made is not param and master is not old and _hand_over(param, made, old, master) and not was_coarse:
            self._coarse.pop(param, None)

    def _follow_groups(self) -> None:
        """Gives the inner optimizer the same groups, still without parameters."""
        inner = self.inner
        known = {id(outer): group for outer, group in zip(self._followed, inner.param_groups, strict=True)}
        for group in known.values():
            group["params"].clear()
        inner.param_groups.clear()
        for outer in self.param_groups:
            if id(outer) in known:
                inner.param_groups.append(known[id(outer)])
            else:
                inner.add_param_group({**outer, "params": [self._masters[param] for param in outer["params"]]})
                inner_optimizer.own_options(inner.param_groups[-1:])
        self._followed = list(self.param_groups)

    def _step_masters(self) -> None:
        """Makes the inner optimizer step the parameters' current masters, in the order of the groups."""
        entries, changed = iter(self._entries()), not self._stepped
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            params, now = inner["params"], [entry.stepped for entry in islice(entries, len(outer["params"]))]
            if not same(params, now):
                params[:], changed = now, True
        if changed:
            before, self._stepped = self._stepped, {entry.param: entry.stepped for entry in self._entries()}
            for param, new in self._stepped.items():
                if (old := before.get(param, new)) is not new:
                    inner_optimizer.step_instead(self.inner, old, new)

    def _take_edits(self) -> None:
        """Gives the inner optimizer the states that are not as they were shown."""
        edits = [(entry, edit) for entry in self._kept if (edit := entry.edited(self.state)) is not None]
        for entry, edit in edits:
            self._check_state(entry, edit)
        for entry, edit in edits:
            self._load_one(entry.param, edit)
            entry.hide()
            if self.state.get(entry.param):  # torch's checkpoints initialize states that are empty
                entry.show(self.inner.state.get(entry.stepped), self.state)

    def _check_state(
        self, entry: Entry, state: dict[str, Any], names: Collection[str] = (), key: object = None
    ) -> None:
        """Raises ValueError, on all ranks, if one of `names`, or another elementwise value, is not like the master.

        key: the parameter's in a state dict. Masters that users set have as many bits: torch's load_state_dict, of an
        optimizer around this one, casts them.
        """
        master, where = entry.master, "optimizer.state[param]" if key is None else f"state['state'][{key!r}]"
        elementwise = {"master"} & state.keys() if entry.trains else set()
        if inner_optimizer.is_elementwise(self.inner):
            elementwise |= {n for n, value in state.items() if isinstance(value, Tensor) and value.dim()} - {"step"}
        for name in sorted(elementwise.union(names)):
            value = state.get(name)
            if isinstance(value, Tensor) and isinstance(value, DTensor) == isinstance(master, DTensor):
                is_as_fine = key is not None or name != "master" or value.dtype.itemsize >= master.dtype.itemsize
                if is_as_fine and value.shape == master.shape:
                    continue
            of = f" of shape {tuple(value.shape)} in {value.dtype}" if isinstance(value, Tensor) else ""
            kind = "DTensor" if isinstance(master, DTensor) else "tensor"
            raise ValueError(
                f"{where} has {'no' if value is None else type(value).__name__} {name}{of} for "
                f"{getattr(local_of(entry.param), 'weight_name', None) or 'a parameter'} of shape "
                f"{tuple(master.shape)}: set a {kind} as torch.zeros_like(optimizer.masters()[param]) makes it, or "
                f"delete {where}, and the next step starts its state anew. An optimizer around this one that casts "
                "states to the dtype of parameters is loaded by base_optimizer.load_state_dict"
            )

    def _check_kinds(self) -> None:
        """Raises LayoutError, on all ranks, for parameters whose kind has changed since their masters were made."""
        for param, (name, recipe) in self._recipes.items():
            if not isinstance(local_of(param), QuantizedTensor):
                raise LayoutError(
                    f"{name} of shape {tuple(param.shape)} was in {recipe} when its master was made, and is "
                    f"plain {param.dtype} now: a function given to module._apply has dequantized it; use "
                    "model.to(dtype), which does not"
                )
        registry.check_replaced(self._masters, "MasterWeights")
