"""The rules by which optimizers update values: moments, options and step of each.

The step of one shard in plain torch, on any device, is the reference that kernels match byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from layoutc.runtime.random_bits import counted_words


class Chance(NamedTuple):
    """What random bits depend on: seed, the parameter's number and step, and its shard's first row and column."""

    seed: int
    number: int
    step: int
    first: tuple[int, int]


def adam(
    values: Tensor, grad: Tensor, moments: Sequence[Tensor], step: int, settings: Sequence[float], decoupled: bool,
    quick: bool,
) -> None:  # fmt: skip
    """Updates fp32 values and moments in place, (m, k) each. step: starts at 1. settings: see `Rule.settings`.

    Operations are ordered and rounded as in torch.optim with foreach=True. quick: arithmetic for masters or moments
    that are rounded. It multiplies by one reciprocal and clamps second moments to [2^-100, 2^100], so that cards
    compute roots and reciprocals without branches.
    """
    (first, second), (lr, beta1, beta2, eps, decay, *_) = moments, settings
    grad = _decayed(values, grad, lr, decay, decoupled)
    correction = (1 - beta2**step) ** 0.5
    if quick:
        first.add_(grad - first, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        over = 1 / torch.tensor(correction, dtype=torch.float32, device=values.device)
        inverse = exact_sqrt(second.clamp(2.0**-100, 2.0**100)).mul_(over).add_(eps).reciprocal_()
        values.addcmul_(first, inverse, value=-(lr / (1 - beta1**step)))
        return
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    values.addcdiv_(first, sqrt(second).div_(correction).add_(eps), value=lr / (1 - beta1**step) * -1)


def sgd(
    values: Tensor, grad: Tensor, moments: Sequence[Tensor], step: int, settings: Sequence[float], decoupled: bool,
    quick: bool,
) -> None:  # fmt: skip
    """Like `adam`, for SGD with momentum."""
    (buffer,), (lr, momentum, dampening, nesterov, decay, *_) = moments, settings
    grad = _decayed(values, grad, lr, decay, decoupled)
    if step == 1:
        buffer.copy_(grad)
    else:
        buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
    values.add_(grad.add(buffer, alpha=momentum) if nesterov else buffer, alpha=-lr)


def lion(
    values: Tensor, grad: Tensor, moments: Sequence[Tensor], step: int, settings: Sequence[float], decoupled: bool,
    quick: bool,
) -> None:  # fmt: skip
    """Like `adam`, for Lion (arXiv 2302.06675)."""
    (moment,), (lr, beta1, beta2, _, decay, *_) = moments, settings
    grad = _decayed(values, grad, lr, decay, decoupled)
    values.add_(moment.mul(beta1).add_(grad, alpha=1 - beta1).sign_(), alpha=-lr)
    moment.mul_(beta2).add_(grad, alpha=1 - beta2)


def _decayed(values: Tensor, grad: Tensor, lr: float, decay: float, decoupled: bool) -> Tensor:
    """The gradient after weight decay, which is added to it; decoupled: shrinks values in place instead."""
    if decay and not decoupled:
        return grad.add(values, alpha=decay)
    if decay:
        values.mul_(1 - lr * decay)
    return grad


def sqrt(x: Tensor) -> Tensor:
    """torch's sqrt, which is occasionally one bit off on CPUs."""
    return x.sqrt()


def exact_sqrt(x: Tensor) -> Tensor:
    """A square root rounded to nearest, as on cards."""
    return x.sqrt() if x.is_cuda else x.double().sqrt().float()


# ------------------------------------------------------------------------------------------------------------- masters
def write_master(values: Tensor, master: Tensor, chance: Chance) -> None:
    """Rounds fp32 (m, k) values stochastically into a bf16 master with as many elements, in any shape."""
    m, k = values.shape
    bits = (values.view(torch.int32) + chance_bits(chance, m, k, values.device)) & -65536
    bits = torch.where(values.isnan(), 0x7FC00000, bits)
    master.copy_((bits >> 16).to(torch.int16).view(torch.bfloat16).view(master.shape))


def chance_bits(chance: Chance, m: int, k: int, device: torch.device) -> Tensor:
    """16 random bits per element of (m, k), int32. They depend on the element's position in the whole weight.

    Eight elements of a row share the Philox counter (column // 8, row, number, 0) under the key (seed, step). Each
    element uses half a word, the lower half first.
    """
    row, column = chance.first
    groups = -(-k // 8)
    zeros = torch.zeros(m, groups, dtype=torch.int64, device=device)
    columns = torch.arange(groups, device=device) + column // 8
    rows = torch.arange(row, row + m, device=device)[:, None]
    words = counted_words([zeros + columns, zeros + rows, zeros + chance.number, zeros], chance.seed, chance.step)
    halves = [(word >> shift) & 0xFFFF for word in words for shift in (0, 16)]
    return torch.stack(halves, dim=-1).view(m, groups * 8)[:, :k].to(torch.int32)


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
ADAMW = Rule("adam", ("exp_avg", "exp_avg_sq"), _BETAS, adam, True)
ADAM = Rule("adam", ("exp_avg", "exp_avg_sq"), _BETAS, adam, False)
SGD = Rule("sgd", ("momentum_buffer",), ("momentum", "dampening", "nesterov"), sgd, False)
LION = Rule("lion", ("exp_avg",), _BETAS, lion, True)

_KNOWN = {"lr", "betas", "eps", "weight_decay", "maximize", "momentum", "dampening", "nesterov"}
_KNOWN |= {"foreach", "fused", "capturable", "use_triton"}  # implementation choices; results are the same
_NEUTRAL = {"cautious_factor": 1.0}  # other options are neutral if false


def of_class(optimizer_class: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]) -> tuple[Rule, Any]:
    """The rule of an optimizer and the options of its groups. Raises ValueError for optimizers without a rule."""
    probe = optimizer_class([nn.Parameter(torch.zeros(1, device="cpu"))], **options)
    given, kind = probe.defaults, type(probe)
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
