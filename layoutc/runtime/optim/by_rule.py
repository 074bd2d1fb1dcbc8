"""Optimizers with a rule, AdamW among them: moments and masters are stored in recipes and updated together with the
weights' codes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.kernels import launch
from layoutc.runtime.optim import foreign_states, launches, rules, states
from layoutc.runtime.optim.f24 import F24Tensor
from layoutc.runtime.optim.launches import Member, Updates
from layoutc.runtime.optim.rules import Chance
from layoutc.runtime.optim.states import Forms, State, as_matrix
from layoutc.runtime.sharding import meshes
from layoutc.runtime.streams import capturing
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.train import inner_optimizer
from layoutc.runtime.train.master_weights import MasterWeights
from layoutc.runtime.train.steps import Entry, gradient_of, local_of, rounded
from layoutc.runtime.weight.tensor import QuantizedTensor, written

Masters = Literal["fp32", "bf16", "f24"]


class Held(NamedTuple):
    """One parameter: its name ("" unless it is a quantized weight), its shape, and what this rank stores for it.

    codes: "" if the launch that updates the master also writes the weight; else why another launch does.
    """

    name: str
    shape: tuple[int, ...]
    master: str
    moments: Mapping[str, str]
    nbytes: int
    codes: str

    def __str__(self) -> str:
        moments = ", ".join(f"{name} {form}" for name, form in self.moments.items())
        how = "written with its master" if not self.codes else f"written after it: {self.codes}"
        shape = " x ".join(map(str, self.shape))
        return f"{self.name or 'a parameter'} ({shape}): master {self.master}, {moments or 'no step yet'}; {how}"


def form_of(tensor: Tensor) -> str:
    """The name of a tensor's recipe, or of its dtype as users write it."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.LAYOUT.name
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


class _Kept(NamedTuple):
    """A parameter's member, and the objects and addresses that it was made of."""

    held: tuple[Any, ...]
    where: tuple[Any, ...]
    member: Member
    has_kernels: bool


class _Moments(torch.optim.Optimizer):
    """Holds parameter groups and moments. ByRule updates them."""

    STEPS_SHARDS = True

    def step(self, closure: Any = None) -> Any:
        """Never called."""
        raise NotImplementedError


class ByRule(MasterWeights):
    """The optimizer that `MasterWeights(optimizer_class, params, state=..., masters=...)` makes; base of AdamW."""

    _KEPT = (*MasterWeights._KEPT, "_members", "_updates")
    _step_supports_amp_scaling = True  # GradScaler lets the launch unscale gradients and skip steps

    inner: _Moments
    _updates: Mapping[torch.device, Updates] = MappingProxyType({})
    _members: dict[Entry, _Kept]

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: Iterable[Any] = (),
        *,
        state: State | None = None,
        masters: Masters | None = None,
        least: int = 4096,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Arguments: see MasterWeights and AdamW. Raises ValueError for classes without a rule (optim/rules.py)."""
        masters = masters or "fp32"
        if masters not in get_args(Masters):
            raise ValueError(f"masters must be one of {', '.join(get_args(Masters))}, not {masters!r}")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed must fit into 32 bits, but {seed} does not")
        owner = MasterWeights if type(self) is ByRule else type(self)
        groups = inner_optimizer.groups_of(owner.__name__, optimizer_class, params)
        self._rule, given = rules.of_class(optimizer_class, options)
        self._forms, self._masters_in = Forms.of(state or "fp32", least, self._rule.moments), masters
        super().__init__(lambda params, **options: _Moments(params, options), groups, **given, seed=seed)

    # ---------------------------------------------------------------------------------------------------------- masters
    def _master_dtype(self, param: Tensor) -> torch.dtype:
        if param.requires_grad and param.dtype not in launch.FLOATS:
            raise LayoutError(
                f"a parameter of shape {tuple(param.shape)} is {param.dtype}; with state= or masters=, and in "
                "layoutc.AdamW, parameters are float32, bfloat16 or float16. Step it with an optimizer of torch's, or "
                "leave both arguments of MasterWeights out"
            )
        return torch.bfloat16 if self._masters_in == "bf16" and self._forms.applies(param) else torch.float32

    def _new_master(self, param: Tensor, zeros: Tensor) -> Tensor:
        if self._masters_in == "f24" and self._forms.applies(param):
            return meshes.with_local(zeros, states.zeros(local_of(zeros), F24Tensor))
        return zeros

    def _adopt(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        for param in params:
            if param.requires_grad:
                name = getattr(local_of(param), "weight_name", None) or "a parameter"
                self._forms.check(param, name)
                if self._master_dtype(param) == torch.bfloat16:
                    states.refuse_bf16_masters(param, name)
        super()._adopt(params)

    def _forget(self) -> None:
        super()._forget()
        self._updates, self._members = {}, {}

    def _in_own_words(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Also of torchao's and bitsandbytes' AdamW. Their bytes are kept if this optimizer's recipe has the same
        layout."""
        return super()._in_own_words(foreign_states.translated(state_dict, self._rule.moments))

    def _load_one(self, param: Tensor, saved: dict[str, Any]) -> None:
        """Converts states that are in fp32 or in other recipes."""
        super()._load_one(param, saved)
        master = self._masters[param]
        stepped = local_of(master) if inner_optimizer.steps_shard(self.inner, master) else master
        state = self.inner.state.get(stepped, {})
        for name in self._rule.moments:
            if name in state:
                state[name] = states.converted(local_of(state[name]), self._forms.recipe(param, name))
        if state:  # torch's SGD does not count steps
            step = torch.as_tensor(state.get("step", 1), dtype=torch.float32, device="cpu")
            state["step"] = step.reshape(()).to(local_of(stepped).device, copy=True)

    def _check_state(
        self, entry: Entry, state: dict[str, Any], names: Collection[str] = (), key: object = None
    ) -> None:
        """Also if a moment or the step is missing from a state that is not empty."""
        moments = self._rule.moments if state.keys() & {"step", *self._rule.moments} else ()
        if "exp_avg_sq" in moments and "step" not in state:
            raise ValueError(
                "optimizer.state[param] has moments, but no step, by which their bias is corrected: set "
                'optimizer.state[param]["step"] = torch.tensor(0.0), or delete optimizer.state[param]'
            )
        super()._check_state(entry, state, moments, key)

    def explain(self) -> list[Held]:
        """What this rank stores for each parameter, and whether the update writes the weight's codes, or why not."""
        self._follow()
        found = []
        for entry in self._entries():
            state, local, master = self.inner.state.get(entry.stepped, {}), entry.local, local_of(entry.stepped)
            moments = {name: local_of(state[name]) for name in self._rule.moments if name in state}
            held = [*moments.values(), *([master] if entry.trains else [])]
            why = "" if _has_kernels(rounded(entry.stepped), moments.values()) else "plain torch steps it here"
            if entry.trains and not why and isinstance(local, QuantizedTensor):
                why = launches.why_apart(local, entry.row_sharding)
            own = "is its own" if not entry.trains else form_of(master)
            forms = {name: form_of(moment) for name, moment in moments.items()}
            planes = [[*one.planes().values()] if isinstance(one, QuantizedTensor) else [one] for one in held]
            nbytes = sum(one.nbytes for one in chain(*planes))
            name = getattr(local, "weight_name", None) or ""
            found.append(Held(name, tuple(entry.param.shape), own, forms, nbytes, why))
        return found

    # ------------------------------------------------------------------------------------------------------------- step
    def _advance(self, entries: Sequence[Entry]) -> None:
        """Updates the parameters that have gradients, and rewrites their weights."""
        numbers = {entry: number for number, entry in enumerate(entries)}
        groups = [at for at, group in enumerate(self.param_groups) for _ in group["params"]]
        stepped = [entry for entry in entries if entry.param.grad is not None]
        grads = [entry.param.grad for entry in stepped if entry.param.grad is not None]
        if sparse := [grad for grad in grads if grad.layout is not torch.strided]:
            raise LayoutError(
                f"a parameter of shape {tuple(sparse[0].shape)} has a sparse gradient; with state= or masters=, and in "
                "layoutc.AdamW, gradients are dense: make its embedding with sparse=False, or step it with "
                "torch.optim.SparseAdam"
            )
        found_inf, scale = (getattr(self, name, None) for name in ("found_inf", "grad_scale"))
        together: dict[torch.device, list[tuple[Entry, Member, Tensor]]] = defaultdict(list)
        for entry in stepped:
            number, grad = numbers[entry], gradient_of(entry)
            member, has_kernels = self._member(entry, number, groups[number])
            is_readable = type(grad) is Tensor and grad.dtype in launch.FLOATS and grad.is_contiguous()
            if is_readable and has_kernels:
                together[member.master.device].append((entry, member, grad))
            elif found_inf is None or not bool(found_inf):
                self._update(member, grad if scale is None else grad / scale)
        launched = {entry: member for updated in together.values() for entry, member, _ in updated}
        done = {entry for entry, member in launched.items() if member.target is not None}
        rewriting = self._next_write_back(done)
        amaxes = rewriting.amaxes_of(launched.keys())
        for device, updated in together.items():
            measured = [(entry, member._replace(amax=amaxes.get(entry)), grad) for entry, member, grad in updated]
            self._launch(device, measured, found_inf, scale)
        written([entry.local for entry in done if isinstance(entry.local, QuantizedTensor)])
        increment_version([entry.local for entry in done if not isinstance(entry.local, QuantizedTensor)])
        self._collect_state()
        self._write_back(rewriting, done)

    def _member(self, entry: Entry, number: int, group: int) -> tuple[Member, bool]:
        """The tensors that a parameter's step reads and writes, and whether kernels do. Makes its state if there is
        none. Kept from step to step while they are the same."""
        stepped = entry.stepped
        state, shard, local = self.inner.state[stepped], local_tensor(stepped), None
        if "step" not in state:
            master = local_of(stepped)
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state.update(
                {name: states.zeros(master, self._forms.recipe(entry.param, name)) for name in self._rule.moments}
            )
        if entry.trains and self._moves(self.param_groups[group]):
            local = entry.local
        planes = local.store.planes if isinstance(local, QuantizedTensor) else None
        held = stepped, shard, local, planes, state["step"], *[state[name] for name in self._rule.moments]
        where = number, group, None if isinstance(shard, QuantizedTensor) else shard.data_ptr()
        kept = self._members.get(entry)
        if kept is None or kept.where != where or not all(map(is_, kept.held, held)):
            target = local if local is None or _is_written(local, entry) else None
            moments = tuple([local_of(state[name]) for name in self._rule.moments])
            member = Member(local_of(stepped), moments, state["step"], target, group, number, entry.place)
            has_kernels = _has_kernels(launches.planes_of(member.master)[0], moments)
            self._members[entry] = kept = _Kept(held, where, member, has_kernels)
        return kept.member, kept.has_kernels

    def _moves(self, group: dict[str, Any]) -> bool:
        return isinstance(group["lr"], Tensor) or bool(group["lr"])

    def _launch(
        self, device: torch.device, updated: list[tuple[Entry, Member, Tensor]], skipped: Any, scale: Any
    ) -> None:
        members, grads = [member for _, member, _ in updated], [grad for _, _, grad in updated]
        updates = self._updates.get(device)
        if updates is None or not updates.holds(members, grads):
            if capturing(device):
                raise LayoutError(
                    "the first step allocates tables, which a CUDA graph can't capture: step once before the "
                    "capture, with gradients of the same dtypes"
                )
            updates = Updates(self._rule, members, grads, len(self.param_groups))
            self._updates = {**self._updates, device: updates}
            for (entry, _, _), member in zip(updated, updates.members, strict=True):
                self.inner.state[entry.stepped]["step"] = member.step
        updates.set_options([self._rule.settings(group) for group in self.param_groups], self.param_groups[0]["seed"])
        updates(grads, skipped, scale)
        if capturing(device):
            self._captured = [*self._captured, updates]

    def _update(self, member: Member, grad: Tensor) -> None:
        """Steps one shard in plain torch."""
        member.step.add_(1)
        if not member.master.numel():
            return
        step, settings = int(member.step), tuple(map(float, self._rule.settings(self.param_groups[member.group])))
        moments = [states.read(moment) for moment in member.moments]
        values, grad = states.read(member.master).to(torch.float32), as_matrix(grad).to(torch.float32)
        rounds = member.master.dtype != torch.float32  # stochastically
        held = member.master, *member.moments
        quick = rounds or any(isinstance(one, QuantizedTensor) for one in held)
        grad = -grad if settings[-1] else grad
        self._rule.update(values, grad, moments, step, settings, self._rule.decoupled, quick)
        for moment, one in zip(member.moments, moments, strict=True):
            states.write(moment, one)
        if rounds:
            chance = Chance(self.param_groups[0]["seed"], member.number, step, member.place)
            rules.write_master(values, member.master, chance)
        else:
            states.write(member.master, values)


MasterWeights.BY_RULE = ByRule


def _is_written(local: Tensor, entry: Entry) -> bool:
    """Whether the launch that updates a master also writes the weight's shard."""
    if not isinstance(local, QuantizedTensor):
        return local.is_contiguous()
    return not launches.why_apart(local, entry.row_sharding)


def _has_kernels(master: Tensor, moments: Iterable[Tensor]) -> bool:
    if not launch.usable(master) or not master.is_contiguous():
        return False
    return all(
        bool(type(one).quantizing_kernels(master)) if isinstance(one, QuantizedTensor) else one.is_contiguous()
        for one in moments
    )


class AdamW(ByRule):
    """AdamW (arXiv 1711.05101) for plain and quantized weights, with moments and masters stored in recipes.

    params: parameters, or parameter groups. lr, betas, eps, weight_decay: as for torch.optim.AdamW.
    state: how moments are stored: "fp32"; "8bit" (exp_avg in adam_m8, exp_avg_sq in adam_v8); "fp8"; "4bit"; or a dict
    of recipes. masters: "fp32"; "f24", bf16 and a byte, rounded to nearest; or "bf16" with stochastic rounding; a plain
    bf16 weight is then its own master.
    least: weights with fewer elements, and weights with one dim, keep fp32. The size of the whole weight counts.
    seed: seeds the random bits. With state and masters in fp32 and an `lr` that is a number, steps on a CPU match
    torch.optim.AdamW bit for bit.

    On a card, one launch reads the reduced gradients in place. It writes masters, moments, and the codes of all weights
    whose scales depend on blocks alone. `explain()` names the weights that later launches requantize. The result does
    not depend on the number of ranks: random bits depend on `seed`, the step, and the element's position in its
    weight. After one eager step, a CUDA graph can capture steps if `lr` is a tensor or does not change.

    Gradients, replaced parameters, checkpoints and errors of a step work as in MasterWeights. Raises ValueError for an
    unknown `state` or `masters`.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "fp8_block")
        ['0.weight']
        >>> optimizer = layoutc.AdamW(model.parameters(), lr=1e-3, state="fp8", masters="bf16")
        >>> model(torch.randn(4, 128)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: State = "fp32",
        masters: Masters = "fp32",
        least: int = 4096,
        seed: int = 0,
    ) -> None:
        """`params`: as for torch.optim.AdamW, also groups and named parameters. seed: 32 bits, for the random bits.

        Raises ValueError for options out of range. Raises LayoutError for parameters in other dtypes than fp32, bf16
        and fp16, and for shards whose cuts would split blocks of moments.
        """
        if min(float(lr), eps, weight_decay) < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"AdamW needs lr, eps and weight_decay of 0 or more and betas in [0, 1), not lr={lr}, eps={eps}, "
                f"weight_decay={weight_decay}, betas={betas}"
            )
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(torch.optim.AdamW, params, state=state, masters=masters, least=least, seed=seed, **options)
