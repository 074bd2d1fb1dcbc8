"""MasterWeights: any torch optimizer on fp32 masters, from which weights are requantized after each step."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from layoutc.runtime.dispatch import update_warnings
from layoutc.runtime.sharding import cards, meshes, registry
from layoutc.runtime.storage import initial_values
from layoutc.runtime.torch_private import left_by_compilers, with_load_hooks
from layoutc.runtime.train import inner_optimizer
from layoutc.runtime.train.replaced_parameters import FollowsParameters, places
from layoutc.runtime.train.steps import Entry, Gradients, WriteBack, local_of, same, stamp
from layoutc.runtime.weight.tensor import QuantizedTensor


class MasterWeights(FollowsParameters):
    """Runs `optimizer_class` on fp32 masters of the parameters that are not fp32, and writes the results back.

    These are the master weights of mixed precision training (arXiv 1710.03740, 3.1). Quantized parameters are
    requantized from their masters. Each step takes one amax collective for each process group, however many parameters
    there are. bf16 and fp16 parameters are rounded; fp32 parameters are their own masters. A parameter without a
    gradient keeps its bytes. One that does not require a gradient has no master. DTensors and plain tensors work.

    A master starts from the values that its weight was quantized from; quantize_ and quantized_init keep them until
    then. Without them, the master starts from the dequantized weight, and the first step warns. If something else
    writes a weight between steps (a checkpoint, an initializer), its master takes over the new values at the next step.
    Masters that were loaded in between win, once, also if a state dict was loaded in place. Arithmetic in place, such
    as `param.mul_(0.999)` in a hook, starts from the master's values.

    `param_groups` and `state` are keyed by the model's parameters, so learning-rate schedulers and
    torch.distributed.checkpoint.state_dict work. A parameter's state is the inner optimizer's, and "master".
    The next step takes over what is set or deleted there; a state without a master goes on from the one that it had.

    Parameters that replace others before the first step, by fully_shard or in `param_groups`, take over their masters.
    Parameters may change their groups, leave them and come back: state and master stay until they are deleted.
    A step raises LayoutError if its parameters no longer belong to a model, or if a quantized weight was made plain.

    With `state` or `masters`, as for layoutc.AdamW, recipes hold the moments and masters of torch's AdamW and Adam, of
    SGD with momentum, and of Lion. One launch steps them and writes codes. Other optimizers raise ValueError then.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "nvfp4")
        ['0.weight']
        >>> optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    """

    STEPS_MASTERS = True  # `update_warnings` does not warn of it
    _KEPT: tuple[str, ...] = ("_kept", "_gradients", "_rewriting", "_captured", "_handed")  # which copies compute again

    _kept: Sequence[Entry] = ()  # from step to step; never copied or pickled
    _gradients = Gradients()
    _rewriting: WriteBack | None = None
    _captured: Sequence[Any] = ()  # holds the tables that launches in CUDA graphs read, also when steps use others
    _handed: Mapping[Entry, Any] = {}  # stamps of masters that state dicts share, until a step

    BY_RULE: type[MasterWeights]  # the class for `state` or `masters`; optim/by_rule.py sets it

    def __new__(cls, *args: Any, state: Any = None, masters: Any = None, **options: Any) -> MasterWeights:
        """With `state` or `masters`, an instance of BY_RULE."""
        return super().__new__(cls.BY_RULE if cls is MasterWeights and (state, masters) != (None, None) else cls)

    def __init__(
        self, optimizer_class: Callable[..., torch.optim.Optimizer], params: Iterable[Any] = (), **options: Any
    ) -> None:
        """`params` and `options` are those of `optimizer_class`, a class or a function.

        After fully_shard masters are as small as shards. Raises TypeError for optimizers that need a closure, such as
        LBFGS and SAM. SAM takes MasterWeights as its base optimizer.
        """
        groups = inner_optimizer.groups_of(type(self).__name__, optimizer_class, params)
        self._masters, self._recipes, self._written, self._coarse, self._stepped = {}, {}, {}, {}, {}
        self._loaded = False
        self._adopt([param for group in groups for param in group["params"]])
        self._places = places(self._masters)
        inner_groups = [{**group, "params": [self._masters[p] for p in group["params"]]} for group in groups]
        self.inner = optimizer_class(inner_groups, **options)
        inner_optimizer.refuse_closures(self.inner)
        inner_optimizer.own_options(self.inner.param_groups)
        super().__init__(groups, self.inner.defaults)
        self._followed = list(self.param_groups)
        self._step_masters()

    @left_by_compilers  # a step works on Python objects: stamps, entries, batches of launches
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the inner optimizer on the masters, then rewrites every parameter that has a gradient from its master.

        Collective: every rank steps with the same parameters. A group with the learning rate 0 is not written.
        closure: called once, before the step; its result is returned. Raises LayoutError as the class says.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        inner_optimizer.push_options(self.param_groups, self.inner.param_groups)
        self._check_kinds()
        self._refresh_masters()
        self._loaded, self._handed = False, {}
        self._advance(self._entries())
        self._places.clear()
        return loss

    def _advance(self, entries: Sequence[Entry]) -> None:
        """Steps the inner optimizer, and rewrites weights."""
        self._gradients.give(entries)
        marks = inner_optimizer.marks(self.inner.param_groups)
        try:
            inner_optimizer.step(self.inner)
            inner_optimizer.pull_options(self.param_groups, self.inner.param_groups, marks)
            self._collect_state()
            self._write_back(self._next_write_back())
        finally:
            self._gradients.take(entries)

    @property
    def train(self) -> Callable[[], None]:
        """The inner optimizer's own `train`, as ScheduleFree has it; the weights that it has stepped follow it.

        Collective, as a step is. Raises AttributeError, so that hasattr is false, for optimizers without it.
        """
        return partial(self._switch, self._switch_of("train"))

    @property
    def eval(self) -> Callable[[], None]:
        """As `train`."""
        return partial(self._switch, self._switch_of("eval"))

    def _switch_of(self, mode: str) -> Callable[[], None]:
        switch = getattr(self.inner, mode, None)
        if not callable(switch):
            raise AttributeError(f"{type(self.inner).__name__} has no {mode}()")
        return switch  # type: ignore[no-any-return]

    @left_by_compilers
    @torch.no_grad()
    def _switch(self, switch: Callable[[], None]) -> None:
        self._follow()
        inner_optimizer.push_options(self.param_groups, self.inner.param_groups)
        self._check_kinds()
        self._refresh_masters()
        marks = inner_optimizer.marks(self.inner.param_groups)
        switch()
        inner_optimizer.pull_options(self.param_groups, self.inner.param_groups, marks)
        self._rewrite([entry for entry in self._entries() if entry.trains and self.inner.state.get(entry.stepped)])

    @left_by_compilers
    @torch.no_grad()
    def write_back(self) -> None:
        """Rewrites every weight from its master, after something else has written the masters of `masters()`.

        Collective, like a step, and raises the same. Values written into weights since the last step are lost.
        """
        self._follow()
        self._check_kinds()
        self._rewrite([entry for entry in self._entries() if entry.trains])

    def _rewrite(self, entries: list[Entry]) -> None:
        self._loaded, self._handed = False, {}
        WriteBack(entries)()
        for entry in entries:
            entry.stamp = stamp(entry.param)

    def state_dict(self) -> dict[str, Any]:
        """Returns what Optimizer.state_dict does, for the parameters that the groups hold now."""
        self._take_writes()
        states = self.state
        self.state = defaultdict(dict, {param: state for param, state in states.items() if param in self._masters})
        try:
            return super().state_dict()
        finally:
            self.state = states

    @with_load_hooks
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the masters and the inner optimizer's state, in fp32 as they were saved.

        Also from Transformer Engine's and apex's FusedAdam, if the inner optimizer is torch's. It leaves parameters
        alone: they belong to the model's state. Raises ValueError, before anything is changed, if groups, parameters
        or shapes do not match.
        """
        self._follow()
        state_dict = self._in_own_words(state_dict)
        saved_groups = state_dict["param_groups"]
        sizes = [len(g["params"]) for g in self.param_groups], [len(g["params"]) for g in saved_groups]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the state has parameter groups of sizes {sizes[1]}, but this optimizer has {sizes[0]}")
        states = []
        keys = [key for saved in saved_groups for key in saved["params"]]
        for entry, key in zip(self._entries(), keys, strict=True):
            states.append((entry.param, state := state_dict["state"].get(key) or {}))
            if state and entry.trains:
                inner_optimizer.check_has_master(entry.param, state, key)
            self._check_state(entry, state, key=key)
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update(copy.deepcopy({key: value for key, value in saved.items() if key != "params"}))
        self.state.clear()
        for param, state in states:
            self._load_one(param, state)
        inner_optimizer.push_options(self.param_groups, self.inner.param_groups)
        # Without state there is nothing to collect: torch's checkpoints initialize only empty state.
        self._loaded = any(state for _, state in states)
        if self._loaded:
            self._collect_state()

    def _take_writes(self) -> None:
        """Brings masters up to what was written since the last step."""
        self._follow()
        if not self._loaded:
            self._refresh_masters()
        self._handed = {entry: stamp(entry.master) for entry in self._entries()}

    def masters(self) -> dict[Tensor, Tensor]:
        """Maps each parameter, in group order, to its master, sharded alike. For averages and exports.

        A parameter that is its own master (it is fp32, or does not train) maps to itself. Steps use these tensors:
        call `write_back` after you write into them. Weights written since the last step become masters first.
        """
        self._take_writes()
        return {param: self._masters[param].detach() for group in self.param_groups for param in group["params"]}

    def __getstate__(self) -> dict[str, Any]:
        """All attributes, unlike Optimizer's method. A copy, or a restored optimizer, starts from its masters: its
        weights have new stamps, but were made from these."""
        self._take_writes()
        state = {name: value for name, value in self.__dict__.items() if name not in self._KEPT}
        return state | {"_loaded": True, "_places": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._step_masters()  # masters and their shards were copied separately
        for name in self._KEPT:
            self.__dict__.pop(name, None)
        self._entries()
        if self.state:
            self._collect_state()

    def _adopt(self, params: Iterable[Tensor]) -> None:
        """Makes masters for new parameters. Raises LayoutError for gathered ones."""
        params = list(params)
        registry.check_shards(params, "MasterWeights")
        for param in params:
            local = local_of(param)
            if isinstance(local, QuantizedTensor):
                local.LAYOUT.check_weights(local.weight_name or "")
                if isinstance(param, DTensor):
                    cards.warn_if_elsewhere(local.weight_name or "a weight", local.device)
                self._recipes[param] = local.weight_name or "a weight", local.LAYOUT.name
                if not param.requires_grad:
                    initial_values.free(local.store)
            self._masters[param] = self._master(param)
            self._written.setdefault(param, stamp(param))

    def _master(self, param: Tensor) -> Tensor:
        """A copy of a parameter, sharded as it is; the parameter itself if it is fp32, wider, or does not train."""
        local, dtype = local_of(param), self._master_dtype(param)
        quantized = isinstance(local, QuantizedTensor)
        is_own = param.dtype in (torch.float32, torch.float64, dtype) or not param.is_floating_point()  # complex
        if not param.requires_grad or (not quantized and is_own):
            return param
        if isinstance(local, QuantizedTensor):
            # Raises now, not after the first step.
            meshes.amax_groups(local.LAYOUT, param, local.weight_name or "a weight")
            local.store.writes.trains = True
        with torch.no_grad():
            # Not DTensor.from_local, which would move an offloaded shard to the mesh's device.
            master = self._new_master(param, torch.zeros_like(param, dtype=dtype, requires_grad=False))
            self._take_values(param, master)
        return nn.Parameter(master)

    def _new_master(self, param: Tensor, zeros: Tensor) -> Tensor:
        """Zeros for a parameter's master."""
        return zeros

    def _master_dtype(self, param: Tensor) -> torch.dtype:
        """The dtype of a parameter's master."""
        return torch.float32

    def _take_values(self, param: Tensor, master: Tensor, plain: Tensor | None = None) -> None:
        """Copies a parameter's values into its master: its initial values, which are then freed, if there are any.

        plain: instead of those of a plain parameter.
        """
        local, into = local_of(param), local_of(master)
        self._coarse.pop(param, None)
        if not isinstance(local, QuantizedTensor):
            into.copy_(local if plain is None else plain)
            return
        values = local.initial_values(torch.float32)
        initial_values.free(local.store)
        if values is None:
            values = local.dequantize(torch.float32)
            self._coarse.update({param: None} if local.numel() else {})
        into.copy_(values)

    def _load_one(self, param: Tensor, saved: dict[str, Any]) -> None:
        master = self._masters[param]
        if master is not param and "master" in saved:
            with torch.no_grad():
                master.copy_(saved["master"])
            self._coarse.pop(param, None)
        stepped = local_of(master) if inner_optimizer.steps_shard(self.inner, master) else master
        self.inner.state.pop(stepped, None)
        values = {
            name: inner_optimizer.value_for(master, stepped, name, value)
            for name, value in saved.items()
            if name != "master"
        }
        if values:
            self.inner.state[stepped].update(values)

    def _entries(self) -> Sequence[Entry]:
        """All parameters with their masters, in the order of the groups."""
        params = [param for group in self.param_groups for param in group["params"]]
        if not same(params, [entry.param for entry in self._kept]):
            self._forget()
            known = {entry.param: entry for entry in self._kept}
            self._kept = [
                known.get(param) or Entry(param, self._masters[param], self.inner, self._written[param])
                for param in params
            ]
        return self._kept

    def _forget(self) -> None:
        """Drops what is kept from step to step of these parameters and groups, except entries."""
        self._written.update({entry.param: entry.stamp for entry in self._kept if entry.param in self._masters})
        self._gradients, self._rewriting = Gradients(), None

    @torch.no_grad()
    def _refresh_masters(self) -> None:
        """Makes masters for parameters that now train, and updates those of weights that other code has written."""
        made_any = False
        for entry in self._entries():
            param = entry.param
            if not entry.trains:
                if not param.requires_grad or (made := self._master(param)) is param:
                    continue
                entry.master = self._masters[param] = made
                made_any = True
            else:
                if entry.holds_master:
                    continue
                if not self._loaded and self._handed.get(entry, now := stamp(entry.master)) == now:
                    self._take_values(param, entry.master, entry.written)
                elif isinstance(local := local_of(param), QuantizedTensor):
                    initial_values.free(local.store)  # loaded masters win
            entry.stamp = stamp(param)
        if made_any:
            self._step_masters()

    def _collect_state(self) -> None:
        """Shows the inner optimizer's state, and masters, as the state of the parameters."""
        for entry in self._entries():
            entry.show(self.inner.state.get(entry.stepped), self.state)

    def _moves(self, group: dict[str, Any]) -> bool:
        """Whether a step writes the weights of a group. Adafactor finds its step size itself if `lr` is None."""
        lr = group.get("lr")
        return lr is None or bool(lr)

    def _next_write_back(self, done: Collection[Entry] = ()) -> WriteBack:
        """How this step rewrites parameters with a gradient, of groups that move, except those in `done`."""
        entries, moved = iter(self._entries()), []
        for group in self.param_groups:
            moves = self._moves(group)
            here = islice(entries, len(group["params"]))
            moved += [entry for entry in here if moves and entry.param.grad is not None]
        if self._coarse and (coarse := [entry.param for entry in moved if entry.param in self._coarse]):
            update_warnings.warn_of_coarse(*self._recipes[coarse[0]], len(coarse))
            self._coarse.clear()
        rest = [entry for entry in moved if entry not in done] if done else moved
        if self._rewriting is None or not self._rewriting.holds(rest):
            self._rewriting = WriteBack(rest, self._entries())
        return self._rewriting

    def _write_back(self, rewriting: WriteBack, done: Collection[Entry] = ()) -> None:
        """Rewrites parameters from their masters. done: already written ones."""
        rewriting()
        if captured := rewriting.captured:
            self._captured = [*self._captured, *captured]
        own = []
        for entry in (*done, *rewriting.rewritten):
            if entry.trains:
                entry.stamp = stamp(entry.param)
            elif entry.steps_shard:
                own.append(entry.param)
        increment_version(own)  # of DTensors whose shards were stepped, for autograd
