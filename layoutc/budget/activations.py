"""Activations that forward keeps on a rank for backward, given which layers are recomputed, and the loss. Pure.

Bytes per token come from `layoutc.models`; if unknown there, from the inputs and outputs of the model's products.
Activations are in bf16, attention is flash attention, and logits are as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from layoutc.budget.mesh import Mesh
from layoutc.estimate.work import BF16, Load, Runs
from layoutc.models.weights import Layer, Model

Policy = Literal["none", "half", "full"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
EVERY: Mapping[Policy, int] = {"none": 0, "half": 2, "full": 1}  # one of this many layers is recomputed
# Bytes per logit: bf16, which the caller keeps; its log-softmax and two gradients of it, all in fp32.
LOGIT = BF16 + 3 * 4


@dataclass(frozen=True)
class Activations:
    """Bytes on a rank. kept: from forward to backward, per layer. computing: what a layer's backward adds to these:
    recomputed activations and gradients. loss: of the root, from the last layer until its backward."""

    kept: tuple[int, ...]
    computing: tuple[int, ...]
    loss: int

    @property
    def total(self) -> int:
        """Bytes at the end of forward."""
        return sum(self.kept) + self.loss


def again(layers: int, policy: Policy) -> list[bool]:
    """Which layers backward recomputes."""
    every = EVERY[policy]
    return [bool(every) and at % every == 0 for at in range(layers)]


def activations(model: Model, mesh: Mesh, load: Load, runs: Runs, policy: Policy) -> Activations:
    """The activations of a step. Tensor parallelism divides all of them, as sequence parallelism does."""
    tokens = load.tokens / mesh.tensor
    kept, computing = [], []
    for layer, twice in zip(model.layers, again(len(model.layers), policy), strict=True):
        whole, entry = _saved(layer, runs) * tokens, _entry(layer) * BF16 * tokens
        kept.append(int(entry if twice else whole))
        computing.append(int((whole if twice else 0) + 2 * BF16 * _widest(layer) * tokens))
    rows = max((w.shape[0] for w in model.root.weights if len(w.shape) == 2 and w.share > 0), default=0)
    end = model.root.saved.eager if model.root.saved else 0.0
    return Activations(tuple(kept), tuple(computing), int((rows * LOGIT + end) * tokens))


def _saved(layer: Layer, runs: Runs) -> float:
    if layer.saved is not None:
        return layer.saved.eager if runs == "eager" else layer.saved.compiled
    return BF16 * sum(share * (m + k) for share, m, k in _products(layer))


def _widest(layer: Layer) -> float:
    """Columns of gradients that are alive together: of elementwise work, and of tokens routed to several experts."""
    products = _products(layer)
    routed = max((share * k for share, _, k in products if share > 1), default=0.0)
    return routed + (layer.width or max((share * max(m, k) for share, m, k in products), default=0.0))


def _entry(layer: Layer) -> int:
    """Columns of a layer's input: those of its first product."""
    return next((k for _, _, k in _products(layer)), 0)


def _products(layer: Layer) -> Sequence[tuple[float, int, int]]:
    """(share of tokens that it multiplies, m, k) of each matrix."""
    return [
        (w.share * (w.shape[0] if len(w.shape) == 3 else 1), w.shape[-2], w.shape[-1])
        for w in layer.weights
        if w.share > 0 and len(w.shape) > 1
    ]
