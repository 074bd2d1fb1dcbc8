"""MasterWeights: fp32 masters around any torch optimizer, and quantized weights made anew from them after each step."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layoutc.ints.cuts import Cuts
from layoutc.ints.sizes import cdiv
from layoutc.runtime.dispatch import update_warnings
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.quantize import amax, weights
from layoutc.runtime.quantize.batches import shared_amaxes
from layoutc.runtime.sharding import meshes, registry, shards
from layoutc.runtime.sharding.shards import Place
from layoutc.runtime.train import replaced_parameters
from layoutc.runtime.weight import initial_values
from layoutc.runtime.weight.tensor import QuantizedTensor


class MasterWeights(torch.optim.Optimizer):
    """Runs `optimizer_class` on fp32 masters of the parameters that are not fp32, and writes the result back.

    Quantized parameters are requantized from their masters, with one amax collective a step for each process group,
    whatever the number of parameters; bf16 and fp16 parameters are rounded; fp32 parameters are their own masters. A
    parameter without a gradient is left as it is, byte for byte, and one that does not require a gradient has no
    master. Parameters may be DTensors (FSDP2) or plain.

    A master starts from the values that its weight was quantized from, which quantize_ and quantized_init keep until
    then; where there are none, as the dequantized weight, which is said in a warning at the first step. Weights that
    somebody else has written since the last step (a checkpoint, an initializer) become the masters at the next one,
    with the values that were written; masters loaded by `load_state_dict` win over them once.

    `param_groups` and `state` are keyed by the model's parameters, so that learning-rate schedulers and
    torch.distributed.checkpoint.state_dict work; a parameter's state is the inner optimizer's and, under "master", its
    master.

    Parameters that are put into `param_groups` in the place of others, as accelerate does when it shards the model, are
    trained from then on; their masters go along.

    A step raises LayoutError where it would train nothing, or something else: made before fully_shard, whose parameters
    are others, or with a quantized weight that something has made plain since.
    """

    STEPS_MASTERS = True  # not the quantized weights themselves

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], params: Iterable[Any], **options: Any) -> None:
        """`params` and `options` are those of `optimizer_class`. Create it after fully_shard, as any optimizer."""
        params = list(params)
        groups = [dict(g) for g in params] if params and isinstance(params[0], dict) else [{"params": params}]
        for group in groups:
            members = group["params"]
            members = [members] if isinstance(members, Tensor) else list(members)
            group["params"] = [m[1] if isinstance(m, tuple) else m for m in members]  # named_parameters()
        self._masters: dict[Tensor, Tensor] = {}
        self._recipes: dict[Tensor, tuple[str, str]] = {}
        self._written: dict[Tensor, Any] = {}
        self._coarse: dict[Tensor, None] = {}  # whose masters come from codes
        self._loaded = False
        self._adopt([param for group in groups for param in group["params"]])
        inner_groups = [{**group, "params": [self._masters[p] for p in group["params"]]} for group in groups]
        self.inner = optimizer_class(inner_groups, **options)
        _own_options(self.inner.param_groups)
        super().__init__(groups, self.inner.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As Optimizer.add_param_group; masters are made for the new parameters."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        if len(self.inner.param_groups) < len(self.param_groups):
            self._adopt(added["params"])
            self.inner.add_param_group({**added, "params": [self._masters[p] for p in added["params"]]})
            _own_options(self.inner.param_groups[-1:])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer on the masters, then every parameter that has a gradient from its master.

        Collective: every rank steps with the same parameters. Parameters of a group whose learning rate is 0 are not
        written. A closure is called once, before the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        replaced_parameters.follow(self)
        self._push_options()
        self._check_parameters()
        self._refresh_masters()
        self._loaded = False
        for param, master in self._masters.items():
            if master is not param:
                master.grad = None if param.grad is None else param.grad.to(torch.float32)
        try:
            _inner_step(self.inner, loss)
            self._collect_state()
            self._write_back()
        finally:
            for param, master in self._masters.items():
                if master is not param:
                    master.grad = None
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores masters and the inner optimizer's state in fp32, as they were saved.

        Parameters are not touched: they come from the model's own state. Everything is checked before anything is
        changed: raises ValueError when groups or parameters do not match.
        """
        replaced_parameters.follow(self)
        saved_groups = state_dict["param_groups"]
        sizes = [len(g["params"]) for g in self.param_groups], [len(g["params"]) for g in saved_groups]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the state has parameter groups of sizes {sizes[1]}, this optimizer has {sizes[0]}")
        states = []
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            for param, key in zip(group["params"], saved["params"], strict=True):
                state = state_dict["state"].get(key) or {}
                _check_state(param, self._masters[param], state)
                states.append((param, state))
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update(copy.deepcopy({key: value for key, value in saved.items() if key != "params"}))
        self.state.clear()
        for param, state in states:
            self._load_one(param, state)
        self._push_options()
        self._collect_state()
        self._loaded = True

    @torch.no_grad()
    def masters(self) -> dict[Tensor, Tensor]:
        """Each parameter, in the order of the groups, and its fp32 master, sharded as it is: what to average or export.

        A parameter that is its own master (fp32, or it does not train) comes with itself. The tensors are the ones that
        are stepped: read them; to change a weight, write into the parameter. Where weights have been written since the
        last step, masters are made of them first.
        """
        if not self._loaded:
            self._refresh_masters()
        return {param: self._masters[param].detach() for group in self.param_groups for param in group["params"]}

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeights:
        """A copy on the copied parameters, as torch.optim gives one."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        for name, value in self.__dict__.items():
            other.__dict__[name] = copy.deepcopy(value, memo)
        other._loaded = True  # the copied weights are new to it, and made of the copied masters
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Everything: Optimizer's own leaves out what it does not know. What is restored starts from its masters."""
        return {**self.__dict__, "_loaded": True}

    def _adopt(self, params: Iterable[Tensor]) -> None:
        """Makes masters of parameters that are new to it."""
        for param in params:
            local = _local(param)
            if isinstance(local, QuantizedTensor):
                self._recipes[param] = local._name or "a weight", local.LAYOUT.name
                if not param.requires_grad:
                    initial_values.free(local)
            self._masters[param] = self._master(param)
            self._written[param] = _stamp(param)

    def _master(self, param: Tensor) -> Tensor:
        """An fp32 copy of a parameter, sharded as it is; the parameter itself when it is fp32, or does not train."""
        local = _local(param)
        quantized = isinstance(local, QuantizedTensor)
        if not param.requires_grad or (not quantized and param.dtype in (torch.float32, torch.float64)):
            return param
        if isinstance(local, QuantizedTensor):
            meshes.amax_groups(local.LAYOUT, param, local._name or "a weight")  # refused now, not after the first step
            local._writes.trains = True
        with torch.no_grad():
            # Not DTensor.from_local, which would move an offloaded shard to the mesh's device.
            master = torch.zeros_like(param, dtype=torch.float32, requires_grad=False)
            self._take_values(param, master)
        return nn.Parameter(master)

    def _take_values(self, param: Tensor, master: Tensor) -> None:
        """Gives a master its parameter's values: those that a weight was quantized from, which are freed, if it has
        them."""
        local = _local(param)
        self._coarse.pop(param, None)
        if not isinstance(local, QuantizedTensor):
            _local(master).copy_(local)
            return
        values = initial_values.values(local, torch.float32)
        initial_values.free(local)
        if values is None:
            values = local.dequantize(torch.float32)
            self._coarse.update({param: None} if local.numel() else {})
        _local(master).copy_(values)

    def _load_one(self, param: Tensor, saved: dict[str, Any]) -> None:
        master = self._masters[param]
        if master is not param and "master" in saved:
            with torch.no_grad():
                master.copy_(saved["master"])
            self._coarse.pop(param, None)
        self.inner.state.pop(master, None)
        values = {name: _moved(value, master, name) for name, value in saved.items() if name != "master"}
        if values:
            self.inner.state[master].update(values)

    def _push_options(self) -> None:
        """Learning rates and other options, which schedulers change on the outer groups, to the inner ones."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            _set_options(inner, {key: value for key, value in outer.items() if key != "params"})

    def _check_parameters(self) -> None:
        """Raises LayoutError for parameters that are not what they were when masters were made. Alike on all ranks."""
        for param, (name, recipe) in self._recipes.items():
            if not isinstance(_local(param), QuantizedTensor):
                raise LayoutError(
                    f"{name} of shape {tuple(param.shape)} was in {recipe} when its master was made, and is "
                    f"plain {param.dtype} now: what module._apply was given has dequantized it; model.to(dtype) "
                    "does not"
                )
        if all(param.grad is None for param in self._masters):
            for param, (name, _) in self._recipes.items():
                if not isinstance(param, DTensor) and registry.trains_instead(name, tuple(param.shape)):
                    raise LayoutError(
                        f"MasterWeights holds {name} of shape {tuple(param.shape)} as it was before fully_shard, which "
                        "has made new parameters: create it after fully_shard"
                    )

    def _refresh_masters(self) -> None:
        """Masters for parameters that have begun to train, and of weights that somebody else has written."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for position, param in enumerate(outer["params"]):
                master = self._masters[param]
                if master is param:
                    if not param.requires_grad or (made := self._master(param)) is param:
                        continue
                    self._masters[param] = inner["params"][position] = made
                elif self._written[param] == _stamp(param):
                    continue
                elif not self._loaded:
                    self._take_values(param, master)
                elif isinstance(local := _local(param), QuantizedTensor):
                    initial_values.free(local)  # the masters that were loaded win
                self._written[param] = _stamp(param)

    def _collect_state(self) -> None:
        for param, master in self._masters.items():
            state = self.inner.state.get(master)
            if state is None and master is param:
                continue
            self.state[param] = dict(state or {}) if master is param else {**(state or {}), "master": master.detach()}

    def _write_back(self) -> None:
        """Parameters from masters; what shards must share is reduced for all parameters of a process group at once."""
        batches: dict[tuple[int, ...], list[tuple[QuantizedTensor, Tensor, Place | None]]] = defaultdict(list)
        groups: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
        groups_that_move = [group["params"] for group in self.param_groups if bool(group.get("lr", 1))]
        moved = [p for params in groups_that_move for p in params if p.grad is not None]
        self._say_what_is_coarse(moved)
        for param in moved:
            master = self._masters[param]
            if master is param:
                continue
            target, values = _local(param), _local(master)
            if not isinstance(target, QuantizedTensor):
                target.copy_(values)
                continue
            own_groups = meshes.amax_groups(target.LAYOUT, param)
            key = tuple(id(group) for group in own_groups)
            groups[key] = own_groups
            batches[key].append((target, values, place_of(param, target)))
        for key, batch in batches.items():
            *pairs, places = zip(*batch, strict=True)
            requantize_batch_(list(zip(*pairs, strict=True)), groups[key], places)
        self._written = {param: _stamp(param) for param in self._masters}

    def _say_what_is_coarse(self, moved: Iterable[Tensor]) -> None:
        """Warns once in a process of masters that are stepped and have started from codes."""
        if self._coarse and (coarse := [param for param in moved if param in self._coarse]):
            name, recipe = self._recipes[coarse[0]]
            update_warnings.warn_once(
                "coarse",
                f"masters of quantized weights ({name} in {recipe} first, {len(coarse)} in all) start as what those "
                "dequantize to, since the values before quantization are not known: a small learning rate changes few "
                "codes for many steps. "
                "Load the optimizer's state together with the weights, or load high-precision weights with "
                "layoutc.checkpoint.load(state, folder, convert=True); quantize_ and quantized_init keep the values "
                "that they quantize, unless keep_values=False, for the first MasterWeights of a model",
            )
            self._coarse.clear()


def _own_options(groups: Iterable[dict[str, Any]]) -> None:
    """Lets options that are tensors be the inner optimizer's own: who sets one aside for a step expects it back."""
    for group in groups:
        group.update({key: value.clone() for key, value in group.items() if isinstance(value, Tensor)})


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Sets options of a parameter group. Tensors stay the objects that they are, as who reads them relies on it: graphs
    of compiled steps, and optimizers that refuse a learning rate that is a number."""
    for key, value in options.items():
        current = group.get(key)
        if not isinstance(current, Tensor):
            group[key] = value
        elif isinstance(value, Tensor):
            current.copy_(value)
        else:
            current.fill_(value)


def _inner_step(inner: torch.optim.Optimizer, loss: Any) -> None:
    """Optimizers that want a closure (LBFGS) evaluate it at new points, which masters can't offer: say so."""
    try:
        inner.step()
    except TypeError as error:
        if "closure" not in str(error):
            raise
        raise TypeError(
            f"{type(inner).__name__} calls its closure at points of its own, where quantized weights are not made"
        ) from error


def requantize_batch_(
    batch: list[tuple[QuantizedTensor, Tensor]],
    groups: list[dist.ProcessGroup],
    places: Sequence[Place | None] | None = None,
) -> None:
    """Overwrites quantized tensors with new values; one MAX all-reduce a group carries what all of them share.

    Shards that are cut inside a block take one all-gather a group more; `places` says which they are.
    """
    sharing = [(target, values) for target, values in batch if target.LAYOUT.shares_amax]
    shared: dict[int, Tensor] = {}
    if sharing:
        matrices = [
            (type(target), weights.as_matrix(values, (target._rows, target._matrix[1]))) for target, values in sharing
        ]
        amaxes, shapes = shared_amaxes(matrices)
        amaxes = amax.reduce_max(amaxes, groups)
        pieces = torch.split(amaxes, [prod(shape) for shape in shapes])
        for (target, _), piece, shape in zip(sharing, pieces, shapes, strict=True):
            shared[id(target)] = piece if len(shape) == 1 else piece.view(shape)
    weights.requantize_many_(batch, [shared.get(id(target)) for target, _ in batch], places)


def place_of(param: Tensor, target: QuantizedTensor) -> Place | None:
    """Where a parameter's local tensor lies among its shards, where that can matter: some blocks have several rows."""
    if target.LAYOUT.block_rows == 1 or not isinstance(param, DTensor):
        return None
    shard_place, cut = shards.place(target), [mesh_dim for mesh_dim, dim in meshes.cuts(param) if dim == 0]
    if shard_place is not None or len(cut) != 1:
        return shard_place
    group, inner = param.device_mesh.get_group(cut[0]), prod(param.shape[1:-1])
    cuts = Cuts(param.shape[0] * inner, cdiv(param.shape[0], group.size()) * inner, group.size())
    return Place(group, group.rank(), cuts)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _stamp(param: Tensor) -> Any:
    """Changes whenever the parameter is written, or replaced by other bytes."""
    local = param._local_tensor if isinstance(param, DTensor) else param
    if isinstance(local, QuantizedTensor):
        return initial_values.mark(local)
    return id(local), local._version, param._version


def _check_state(param: Tensor, master: Tensor, saved: dict[str, Any]) -> None:
    if master is param or not saved:
        return
    saved_master = saved.get("master")
    if saved_master is None:
        raise ValueError(f"the state of a parameter of shape {tuple(param.shape)} has no fp32 master")
    if tuple(saved_master.shape) != tuple(master.shape):
        raise ValueError(
            f"the master of a parameter of shape {tuple(param.shape)} has shape {tuple(saved_master.shape)}"
        )


def _moved(value: Any, master: Tensor, name: str) -> Any:
    """State onto the master's device; step counters stay where they are, as torch.optim keeps them."""
    return value.to(master.device) if isinstance(value, Tensor) and name != "step" else value
