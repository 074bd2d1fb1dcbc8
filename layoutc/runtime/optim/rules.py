"""The rules by which optimizers update values: moments, options and step of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layoutc.runtime.optim import reference

Update = Callable[[Tensor, Tensor, Sequence[Tensor], int, Sequence[float], bool, bool], None]


@dataclass(frozen=True)
class Rule:
    """An optimizer's arithmetic.

    name: what kernels call the rule. moments: names in `optimizer.state`. options: names in a parameter group, in the
    kernels' order. update: the step in plain torch. decoupled: decay shrinks values; else it is added to gradients.
    """

    name: str
    moments: tuple[str, ...]
    options: tuple[str, ...]
    update: Update
    decoupled: bool

    def settings(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """The options of a parameter group that a step needs, in the kernels' order: numbers or one-element tensors."""
        given = [group.get(name, 0) for name in self.options]
        own = [one for each in given for one in (each if isinstance(each, tuple | list) else (each,))]
        return group["lr"], *own, group["weight_decay"], group.get("maximize") or 0


_BETAS = ("betas", "eps")
ADAMW = Rule("adam", ("exp_avg", "exp_avg_sq"), _BETAS, reference.adam, True)
ADAM = Rule("adam", ("exp_avg", "exp_avg_sq"), _BETAS, reference.adam, False)
SGD = Rule("sgd", ("momentum_buffer",), ("momentum", "dampening", "nesterov"), reference.sgd, False)
LION = Rule("lion", ("exp_avg",), _BETAS, reference.lion, True)

_KNOWN = {"lr", "betas", "eps", "weight_decay", "maximize", "momentum", "dampening", "nesterov"}
_KNOWN |= {"foreach", "fused", "capturable", "use_triton"}  # implementation choices; results are the same
_NEUTRAL = {"cautious_factor": 1.0}  # other options are neutral if false


def of_class(optimizer_class: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]) -> tuple[Rule, Any]:
    """The rule of an optimizer and the options of its groups. Raises ValueError for optimizers without a rule."""
    probe = optimizer_class([nn.Parameter(torch.zeros(1, device="cpu"))], **options)
    given, kind = dict(probe.defaults), type(probe)
    rules: dict[type, Rule] = {torch.optim.AdamW: ADAMW, torch.optim.Adam: ADAM, torch.optim.SGD: SGD}
    rule = LION if kind.__name__ == "Lion" else rules.get(kind)
    if rule is None:
        raise ValueError(
            f"state= and masters= work with AdamW, Adam, SGD with momentum, and Lion, not with {kind.__name__}: leave "
            "them out, and it keeps its own state"
        )
    if rule is ADAM and given.get("decoupled_weight_decay"):
        rule = ADAMW
    given.pop("decoupled_weight_decay" if rule.name == "adam" else "", None)
    if other := sorted(key for key in given.keys() - _KNOWN if given[key] and given[key] != _NEUTRAL.get(key)):
        named = ", ".join(f"{key}={given[key]!r}" for key in other)
        raise ValueError(f"{kind.__name__} with state= or masters= does not support {named}: leave them out")
    if rule is SGD and not given["momentum"]:
        raise ValueError("SGD without momentum has no state: leave state= and masters= out, or give it momentum=0.9")
    return rule, given
